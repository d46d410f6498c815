"""What is exported and imported computes what the run computes, or is refused with the name of what differs."""

import json
import sys
from pathlib import Path

import huggingface_models as models
import jax
import jax.numpy as jnp
import pytest
import tiny

import gpt2
import train
from shardwright.huggingface import check_names
from shardwright.modeling import rules
from shardwright.modeling.model import module_of
from shardwright.run import initial_weights
from shardwright.run.resuming import fixed_by_weights
from tools import huggingface_to_checkpoint
from tools.checkpoint_to_huggingface import __main__ as checkpoint_to_huggingface
from tools.huggingface import llama as huggingface_llama

pytest.importorskip("torch", reason="transformers' models need torch, installed on Python 3.11 only")
pytest.importorskip("transformers", reason="the comparison needs transformers")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(tiny.mesh("one device")):
        yield


def export(run, output, **settings) -> list[str]:
    """What the tool printed."""
    lines: list[str] = []
    config = checkpoint_to_huggingface.Config(run=str(run), output=str(output), trust=True, **settings)
    checkpoint_to_huggingface.run(config, lines.append)
    return lines


def to_run(model, output, **settings) -> list[str]:
    """What the tool printed."""
    lines: list[str] = []
    config = huggingface_to_checkpoint.Config(model=str(model), output=str(output), **settings)
    huggingface_to_checkpoint.run(config, lines.append)
    return lines


def compared(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("compared ")]
    return line


# ---- exports of what was not changed ------------------------------------------------------------------------------


def saved(tmp_path, c, **weights) -> str:
    """A run's directory."""
    return models.save(tmp_path / "run", models.weights(c, **weights), c)


def test_the_epsilon_is_compared_itself(tmp_path, monkeypatch):
    """The logits of these weights differ by less than rounding."""
    c = models.model("grouped", norm_epsilon=1e-6)
    to_huggingface = huggingface_llama.to_huggingface

    def wrong(weights, c):
        config, tensors = to_huggingface(weights, c)
        return config | {"rms_norm_eps": 1e-5}, tensors

    monkeypatch.setattr(huggingface_llama, "to_huggingface", wrong)
    with pytest.raises(ValueError, match=r"epsilon of the norms is 1e-06 in the run, and 1e-05 in config.json"):
        export(saved(tmp_path, c), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_tool_says_what_it_compared(tmp_path, dtype):
    """Both ways."""
    c = models.model("qk_norm tied llama3")
    said = compared(export(saved(tmp_path, c), tmp_path / "exported", dtype=dtype))
    assert said.startswith("compared   logits of 32 tokens with those of transformers: they differ by at most ")
    assert said == compared(to_run(tmp_path / "exported", tmp_path / "imported"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    run = saved(tmp_path, models.model("grouped"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers: pip install torch transformers, or set check=false"):
        export(run, tmp_path / "exported")
    assert compared(export(run, tmp_path / "exported", check=False)) == "compared   nothing: check=false"


# ---- exports of an edited train.py --------------------------------------------------------------------------------

EXCHANGE = "from tools.huggingface.llama import from_huggingface, to_huggingface\n"
RULE = "visible=(rules.causal, rules.same_document)"
GATE = "(jax.nn.silu(jnp.float32(gate)) * up).astype(dtype)"
ALIBI = "score=lambda scores, q, k, heads: scores - (q.index - k.index) * 0.5 ** heads"
EDITS = {
    "added weight": (
        [
            ('>> act["F/t M"]\n', '>> act["F/t M"]\n    mlp_bias: f32["M/t/d"] >> f32["M"]\n'),
            ("            mlp_norm=", "            mlp_bias=vector(n, c.d_model, value=0),\n            mlp_norm="),
        ],
        r"^the model has weights/layers/mlp_bias, and Llama and Qwen3 in transformers have no place for it",
    ),
    "window": (
        [(RULE, "visible=(rules.causal, rules.same_document, rules.Window(8))")],
        r"^layer 0 has attention by the rule `causal, same_document, Window\(size=8\)`; llama in transformers has ",
    ),
    "ALiBi": ([(RULE, ALIBI)], r"^layer 0 has attention by the rule `causal, same_document, score <lambda>`;"),
    "scale": ([(RULE, "scale=0.1")], r"^layer 0 has attention by the rule `causal, same_document, scale 0.1`;"),
    "not causal": ([(RULE, "visible=(rules.same_document,)")], r"^layer 0 has attention by the rule `same_document`;"),
    "sinks": (
        [("attend(q, k, v, self.rule)", "attend(q, k, v, self.rule, sinks=q[..., 0].astype(jnp.float32).mean(1))")],
        r"^layer 0 has attention by the rule `causal, same_document` with sinks;",
    ),
    "GELU": (
        [(GATE, "jax.nn.gelu(gate) * up")],
        r"^the logits of this llama are not .* Layer 0 is the first that differs.$",
    ),
    "squared ReLU": ([(GATE, "jnp.square(jax.nn.relu(gate)) * up")], r"Layer 0 is the first that differs.$"),
    "NoPE": (
        [("rope.rotate(head_norm(", "(lambda x, _: x)(head_norm(")],
        r"Layer 0 is the first that differs.$",
    ),
    "every second layer": (
        [
            ("    Weights = Transformer\n", "    Weights, period = Transformer, 2\n"),
            (GATE, "(jax.nn.gelu if tokens.turn else jax.nn.silu)(gate) * up"),
        ],
        r"One of the layers 0 … 1 is the first that differs.$",
    ),
    "residual": (
        [("x + shardops.psum_scatter", "x + 2 * shardops.psum_scatter")],
        r"Layer 0 is the first that differs.$",
    ),
    "embedding": (
        [('return shardops.psum("B/r/d L/t M +p', 'return 2 * shardops.psum("B/r/d L/t M +p')],
        r"What enters the first layer differs: the embedding.$",
    ),
    "logits": (
        [("return logits if softcap is None", "logits = logits / 2\n        return logits if softcap is None")],
        r"it is the last layers, the final norm, or the output projection.$",
    ),
}


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """A run's directory, of a copy of train.py with edits."""

    def make(edits: list[tuple[str, str]]) -> str:
        source = (ROOT / "train.py").read_text()
        for old, new in edits:
            assert old in source
            source = source.replace(old, new)
        (tmp_path / "mine.py").write_text(source + EXCHANGE)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        module_of("mine")
        return saved(tmp_path, models.model("grouped", module="mine", layers=4))

    yield make
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("edit", EDITS)
def test_another_model_is_refused_with_the_name(edited, tmp_path, edit):
    edits, message = EDITS[edit]
    run = edited(edits)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        export(run, tmp_path / "exported")
    assert sorted(tmp_path.iterdir()) == before


def test_an_edit_that_changes_nothing_is_exported(edited, tmp_path):
    """Another file with the same math; and attention within no documents, as the exported model has it."""
    run = edited([(RULE, "visible=(rules.causal,), scale=8**-0.5"), (GATE, "gate * jax.nn.sigmoid(gate) * up")])
    assert "with those of transformers" in compared(export(run, tmp_path / "exported"))


def test_weights_by_name():
    check_names({"a": 0, "b": {"c": 1}}, {"a", "b/c"}, "Llama")
    with pytest.raises(ValueError, match=r"^the model lacks weights/a, weights/d, and Llama in transformers need it"):
        check_names({"b": {"c": 1}}, {"a", "d", "b/c"}, "Llama")


# ---- a mapping that is wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w_q", "w_o"])
def test_a_transposed_weight_is_found(tmp_path, monkeypatch, name):
    theirs = huggingface_llama._theirs
    wrong = lambda at, x, c: theirs(at, x, c).T if at == name else theirs(at, x, c)
    monkeypatch.setattr(huggingface_llama, "_theirs", wrong)
    run = saved(tmp_path, models.model("grouped", d_head=2))  # a square matrix: 16 heads of 2, and 32 d_model
    with pytest.raises(ValueError, match=r"are not the run's own: .* Layer 0 is the first that differs.$"):
        export(run, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.long
def test_gpt2_is_compared(tmp_path, monkeypatch):
    c = gpt2.ModelConfig(module="gpt2", vocab=64, positions=24, d_model=32, layers=2, heads=4, bos_id=5, init_std=0.2)
    run = saved(tmp_path, c)
    assert "logits of 24 tokens" in compared(export(run, tmp_path / "exported"))
    assert "logits of 24 tokens" in compared(to_run(tmp_path / "exported", tmp_path / "imported"))
    monkeypatch.setattr(gpt2, "_FIXED", gpt2._FIXED | {"activation_function": "gelu"})
    with pytest.raises(ValueError, match=r"Layer 0 is the first that differs"):
        export(run, tmp_path / "another")


def test_weights_that_are_not_finite(tmp_path):
    c = models.model("grouped")
    w = models.weights(c)
    w.final_norm = w.final_norm * jnp.nan
    run = models.save(tmp_path / "run", w, c)
    with pytest.raises(ValueError, match="the run's own logits are not finite"):
        export(run, tmp_path / "exported")


# ---- imports ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_import_with_other_logits_leaves_no_checkpoint(tmp_path):
    export(saved(tmp_path, models.model("grouped")), tmp_path / "exported")
    path = tmp_path / "exported/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "relu"}))
    # Whoever says that a field changes nothing is told if it does.
    with pytest.raises(ValueError, match=r"are not the run's own: .* Layer 0 is the first"):
        to_run(tmp_path / "exported", tmp_path / "imported", ignore=["hidden_act"])
    assert not (tmp_path / "imported").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/tokenizer.json").write_text("mine")
    with pytest.raises(ValueError, match="are not the run's own"):
        to_run(tmp_path / "exported", tmp_path / "mine", ignore=["hidden_act"])
    assert [(path.name, path.read_text()) for path in (tmp_path / "mine").iterdir()] == [("tokenizer.json", "mine")]


def test_an_import_into_a_model_with_other_weights_is_refused(tmp_path, monkeypatch):
    export(saved(tmp_path, models.model("grouped")), tmp_path / "exported")
    table = huggingface_llama.weight_table
    monkeypatch.setattr(huggingface_llama, "weight_table", lambda c: {**vars(table(c)), "scale": 0})
    with pytest.raises(ValueError, match=r"the model has weights/scale, and Llama and Qwen3 in transformers have no"):
        to_run(tmp_path / "exported", tmp_path / "imported")


def test_an_import_into_a_model_with_a_window_is_refused(tmp_path, monkeypatch):
    """Which the few tokens that are compared would not show."""
    export(saved(tmp_path, models.model("grouped")), tmp_path / "exported")
    monkeypatch.setattr(train.Llama, "rule", rules.Rule(visible=(*rules.CAUSAL.visible, rules.Window(64))))
    with pytest.raises(
        ValueError, match=r"^layer 0 has attention by the rule `causal, same_document, Window\(size=64\)`"
    ):
        to_run(tmp_path / "exported", tmp_path / "imported")


def test_a_transposed_import_is_found(tmp_path, monkeypatch):
    export(saved(tmp_path, models.model("grouped", d_head=2)), tmp_path / "exported")
    ours = huggingface_llama._ours
    monkeypatch.setattr(huggingface_llama, "_ours", lambda at, x, c: ours(at, x.T if at == "w_q" else x, c))
    with pytest.raises(ValueError, match=r"are not the run's own: .* Layer 0 is the first that differs.$"):
        to_run(tmp_path / "exported", tmp_path / "imported")


# ---- training.init_from -------------------------------------------------------------------------------------------


def test_a_run_with_other_weights_does_not_start_from_these(edited, tmp_path, monkeypatch):
    c = models.model("grouped", layers=4)
    source = models.save(tmp_path / "plain", models.weights(c), c)
    edited(EDITS["added weight"][0])
    mine = models.model("grouped", layers=4, module="mine")
    w = models.weights(mine)

    def start(path, c, w):
        config = models.settings(c)
        config = json.loads(json.dumps(config, default=vars))
        fixed = tuple(name for name in fixed_by_weights(config) if name != "model.module")
        monkeypatch.setattr(initial_weights, "fixed_by_weights", lambda config: fixed)
        initial_weights.read_weights(path, w, config)

    remedy = r"Run with the model and optimizer that wrote it, or start a new run from another checkpoint"
    added = r"weights/layers/mlp_bias: not in the checkpoint, expected float32\[4, 32\]"
    with pytest.raises(ValueError, match=rf"(?s){added}\n{remedy}"):
        start(source, mine, w)
    missing = r"weights/layers/mlp_bias: float32\[4, 32\] in the checkpoint, not expected"
    with pytest.raises(ValueError, match=rf"(?s){missing}\n{remedy}"):
        start(tmp_path / "run", c, models.weights(c))
