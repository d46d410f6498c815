"""The tasks for coding agents: right answers and solutions pass their checks, wrong ones do not."""

import shutil
from pathlib import Path

import pytest

from bench.agents.__main__ import TASKS, checked_answers, problems_of, text_of
from bench.agents.facts import is_right
from tests.support.agent_edits import checkout
from tests.support.recipes import ROOT

SOLUTIONS = Path(__file__).parent / "agents"
ANSWERS = {
    "mesh": "shardwright/cluster/devices.py|return jax.make_mesh(",
    "config": "shardwright/run/checks.py|c: Any = OmegaConf.to_object(config)",
    "data": "shardwright/data/loader/batches.py|return jax.make_array_from_callback(",
    "seed": "shardwright/run/opening.py|state = start.compile()(jax.random.key(",
    "attention": "shardwright/modeling/attention.py|path = attention_paths.choose(",
    "rope": "shardwright/modeling/rope.py|return (jnp.cos(angles), jnp.sin(angles))",
    "swiglu": 'train.py|hidden: act["B/b L/c F/t"] = ',
    "context": 'shardwright/modeling/context.py|k = shardops.all_gather("B/b S/c',
    "fsdp": 'train.py|w_down = shardops.all_gather("F/t M/fsdp',
    "clipping": 'train.py|total = shardops.psum("+t +fsdp +p ->"',
    "checkpoint": 'shardwright/run/checkpoint_arrays.py|store.write(f"{directory}/{key}", b',
}
"""A file, and how the line in it begins that a reader of the source would name."""


def line_of(answer: str, further: int = 0) -> str:
    file, _, text = answer.partition("|")
    lines = (ROOT / file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.strip().startswith(text)]
    return f"{file}:{number + further}"


@pytest.mark.long
def test_answers_of_a_reader_are_right_and_other_lines_are_wrong():
    answers = {name: line_of(answer) for name, answer in ANSWERS.items()} | {
        "norms": "5"
    }  # 2 layers, twice, and logits
    assert dict(checked_answers(answers, list(TASKS["questions"]))) == dict.fromkeys(TASKS["questions"], "")
    wrong = {name: line_of(answer, further=4) for name, answer in ANSWERS.items()} | {"norms": 4}
    found = dict(checked_answers(wrong, list(TASKS["questions"])))
    assert all(problem.startswith(f"{wrong[name]} is not ") for name, problem in found.items()), found


@pytest.mark.quick
def test_an_answer_may_name_any_line_of_the_statement():
    first = line_of("train.py|unembed = shardops.all_gather(")  # of three lines
    assert is_right(line_of("train.py|unembed = shardops.all_gather(", further=2), {first})
    assert is_right(f" {ROOT}/{first}\n", {first})
    assert not is_right(line_of("train.py|unembed = shardops.all_gather(", further=4), {first})
    assert not is_right("train.py", {first})
    assert not is_right("nowhere.py:3", {first})
    assert is_right(5, {"5"})


@pytest.mark.quick
def test_texts_name_all_weights_that_must_learn():
    for name, task in TASKS["features"].items():
        own = (SOLUTIONS / f"{name}.py").read_text()
        assert all(f"{key}:" not in own or key in text_of(name) for key in task["learned"])


def with_solution(directory: Path, name: str, old: str = "", new: str = "") -> Path:
    text = (SOLUTIONS / f"{name}.py").read_text()
    assert not old or text.count(old) == 1
    (checkout(directory) / f"{name}.py").write_text(text.replace(old, new) if old else text)
    (directory / "synthetic_dataset.zarr").symlink_to(ROOT / "synthetic_dataset.zarr")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS["features"])
def test_a_solution_is_right(name, tmp_path):
    assert list(problems_of(with_solution(tmp_path, name), name)) == []


WRONG = {
    "blocks of two documents": (
        "moba",
        "== document[:, :, None]\n        scores",
        "<= document[:, :, None]\n        scores",
        "in an earlier document",
    ),
    "not all blocks": ("moba", "min(self.config.best, len(block))", "1", "logits: differs"),
    "no gradient": ("moba", ", jnp.float32(k))", ", lax.stop_gradient(jnp.float32(k)))", "gradients: differs"),
    "one map": ("differential", "- factor[..., None, None] *", "- 0 *", "logits: differs"),
    "scores of the chosen": (
        "moepp",
        "jnp.where(chosen, scores, 0.0)",
        "jax.nn.softmax(jnp.where(chosen, logits, -1e9))",
        "logits: differs",
    ),
    "no expert": ("dynmoe", "active | best &", "active | False &", "logits: differs"),
    "thresholds that do not learn": (
        "dynmoe",
        "(jnp.float32(active) + above - lax.stop_gradient(above))",
        "jnp.float32(active)",
        "no gradient of threshold",
    ),
}
"""Of each: the feature, what is edited in its solution, and the problem that the check finds."""


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.long if i == 0 else pytest.mark.slow) for i, x in enumerate(WRONG)]
)
def test_a_wrong_solution_fails(case, tmp_path):
    name, old, new, problem = WRONG[case]
    copy = with_solution(tmp_path, name, old, new)
    assert any(problem in found for found in problems_of(copy, name))


@pytest.mark.quick
def test_a_copy_may_not_change_the_proof(tmp_path):
    for part in ("shardlib", "shardwright", "tools"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    causality = tmp_path / "shardwright/inspect/causality.py"
    causality.write_text(causality.read_text() + "\n")
    (problem,) = problems_of(tmp_path, "moba")
    assert "shardwright/inspect/causality.py" in problem
