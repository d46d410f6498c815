"""Asks a coding agent twelve questions about shardwright and for four features, and checks what it did.

    python -m bench.agents                               # prints the tasks; or name some
    python -m bench.agents --answers answers.json        # checks answers: {"mesh": "path.py:12", …}
    python -m bench.agents --copy ../copy moba           # checks a feature in a copy of the checkout

The tasks follow ATE-Bench (arXiv 2605.31463), without its four of operating and profiling on GPUs. Give an agent the
text of one task at a time, and count its turns and tokens: this program is not the agent. It computes the answers from
the program. A feature is right if the copy leaves the check alone, `tools.check` accepts the step on the mesh of the
task, logits, losses and gradients are those of whole arrays in NumPy (dense.py), and 20 steps lower the loss.

Exit status 0 if all tasks are right. The checks of one feature take one to three minutes on two cores.
"""

import argparse
import filecmp
import json
import math
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.agents.facts import ROOT, facts, is_right

TASKS = tomllib.loads((Path(__file__).parent / "tasks.toml").read_text())
TOLERANCE = 1e-3
"""Of differences between f32 and f64, relative to the largest entry."""
PROOF = "shardlib", "shardwright/inspect", "shardwright/tools", "shardwright/settings", "tools"
STEPS, LEAST = 20, 0.5
"""Steps of the training, and the nats by which they lower the loss at least."""


def checked_answers(answers: dict[str, Any], names: list[str]) -> Iterator[tuple[str, str]]:
    """Each question with what is wrong with its answer; empty if nothing is."""
    for name, right in facts():
        if name in names:
            answer = answers.get(name, "no answer")
            yield name, "" if is_right(answer, right) else f"{answer} is not {' or '.join(sorted(right))}"


def in_copy(copy: Path, *words: str) -> subprocess.CompletedProcess:
    """Runs Python in a copy of the checkout."""
    environment = os.environ | {"PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True)


def last_line(done: subprocess.CompletedProcess) -> str:
    return (f"{done.stderr}\n{done.stdout}".strip().splitlines() or ["nothing printed"])[-1]


def problems_of(copy: Path, name: str) -> Iterator[str]:
    """What is wrong with a feature in a copy, one check after the other."""
    task = TASKS["features"][name]
    settings = [*task["settings"], "training.report=false"]
    ours = [path for part in PROOF for path in (ROOT / part).rglob("*.py")]
    if edited := [path for path in ours if not is_same(path, copy / path.relative_to(ROOT))]:
        yield f"the copy has another {edited[0].relative_to(ROOT)}, which decides what is right"
        return
    done = in_copy(copy, "-m", "tools.check", *settings, "check.against=null", "check.output=json")
    if done.returncode:
        found = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 1 else {}
        yield f"rejected: {found['place']}: {found['problem']}" if found else last_line(done)
        return
    given = json.dumps([name, task["settings"], task["learned"]])
    done = in_copy(copy, str(Path(__file__).parent / "dense.py"), given)
    if done.returncode:
        yield last_line(done)
        return
    differences = json.loads(done.stdout.strip().splitlines()[-1])
    yield from (f"{key}: differs by {x:.2g}" for key, x in differences.items() if not x < TOLERANCE)
    with tempfile.TemporaryDirectory() as runs:
        run = [f"training.steps={STEPS}", f"paths.root_working_dir={runs}", "paths.model_name=run"]
        done = in_copy(copy, "-m", "train", *settings, *run)
        log = Path(runs, "run/metrics.jsonl")
        losses = [json.loads(line).get("loss") for line in log.read_text().splitlines()] if log.exists() else []
    losses = [x for x in losses if x is not None]
    if done.returncode or len(losses) < 2:
        yield f"the training failed: {last_line(done)}"
    elif not all(map(math.isfinite, losses)) or losses[-1] > losses[0] - LEAST:
        yield f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps"


def is_same(ours: Path, theirs: Path) -> bool:
    return theirs.is_file() and filecmp.cmp(ours, theirs, shallow=False)


def main() -> None:
    questions, features = TASKS["questions"], TASKS["features"]
    parser = argparse.ArgumentParser(prog="bench.agents", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answers", type=Path, metavar="FILE", help="JSON with an answer for each question")
    parser.add_argument("--copy", type=Path, metavar="DIR", help="a checkout in which an agent wrote the features")
    parser.add_argument("names", nargs="*", metavar="task", help=f"{', '.join([*questions, *features])}; default: all")
    given = parser.parse_args()
    names = given.names or [*questions, *features]
    if unknown := [name for name in names if name not in {**questions, **features}]:
        parser.error(f"{unknown[0]} is not a task")
    if not given.answers and not given.copy:
        print("\n\n".join(f"{name}: {text_of(name)}" for name in names))
        return
    rows: list[tuple[str, str]] = []
    if given.answers:
        rows += checked_answers(json.loads(given.answers.read_text()), names)
    if given.copy:
        rows += ((name, "; ".join(problems_of(given.copy.resolve(), name))) for name in names if name in features)
    print("| task | result |\n|---|---|")
    for name, problem in rows:
        print(f"| {name} | {problem or 'right'} |")
    sys.exit(any(problem for _, problem in rows))


def text_of(name: str) -> str:
    if name in TASKS["questions"]:
        return TASKS["questions"][name]
    task = TASKS["features"][name]
    settings = " ".join(task["settings"])
    return f"{task['text'].strip()}\nIt must train, and be accepted by `python -m tools.check {settings}`."


if __name__ == "__main__":
    main()
