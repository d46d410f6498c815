"""A run becomes a model of transformers with the same logits, on any mesh, or is refused by
name.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from shardwright.data.flat_tokens import Writer
from shardwright.data.text.tokenizers import open_tokenizer
from shardwright.huggingface import families
from shardwright.modeling.model import module_of
from shardwright.models import gpt2
from tests.support import huggingface_models as models
from tests.support.huggingface_models import export, to_run

ROOT = Path(__file__).parents[2]
GPT2 = gpt2.ModelConfig(
    module="gpt2", vocab=64, positions=96, d_model=32, layers=2, heads=4, dropout=0.1, bos_id=5, norm_epsilon=1e-4,
    init_std=0.2,
)  # fmt: skip


def need_transformers():
    pytest.importorskip(
        "torch", reason="transformers' models need torch, installed on Python 3.11 only"
    )
    return pytest.importorskip("transformers", reason="the comparison needs transformers")


@pytest.fixture(autouse=True)
def _no_hashes(no_hashes):
    pass


@pytest.fixture
def saved(tmp_path, one_device):
    """Makes a run's checkpoint of a case, on one device: its weights, its model and its
    directory.
    """

    def make(case, **changes):
        c = case if isinstance(case, gpt2.ModelConfig) else models.model(case, **changes)
        w = models.weights(c)
        return w, c, models.save(tmp_path / "run", w, c)

    return make


# ---- there and back ------------------------------------------------------------------------------


@pytest.mark.long
def test_there_and_back_is_the_same_to_the_bit(saved, tmp_path):
    """Of Llamas: tests/models/test_families.py."""
    w, c, run = saved(GPT2)
    said = export(run, tmp_path / "exported")
    back = to_run(tmp_path / "exported", tmp_path / "back")
    compared = [line for line in said.splitlines() if line.startswith("compared ")]
    assert compared == [line for line in back.splitlines() if line.startswith("compared ")]
    assert ("with those of transformers: they differ by at most" in compared[0]) == models.COMPARES
    model, weights = models.read(tmp_path / "back")
    assert model == c
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(np.asarray, weights),
        jax.tree.map(np.asarray, w),
    )


@pytest.mark.long
def test_greedy_generation_is_ours(tmp_path, one_device, monkeypatch, capsys):
    """From text to text, with the tokenizer of a dataset of bytes; then as docs/huggingface.md does
    it.
    """
    transformers = need_transformers()
    c = models.model("grouped", vocab=259, bos_id=0)
    w = models.weights(c)
    with Writer(str(tmp_path / "data"), "train") as writer:
        encoded = open_tokenizer("bytes", end_token="</s>").encode(["It is a truth"])
        writer.append(encoded.ids, encoded.lengths)
        writer.attributes.update({"tokenizer": {"kind": "bytes", "end_token": "</s>"}})
    output = tmp_path / "exported"
    said = export(models.save(tmp_path / "run", w, c, filespec=str(tmp_path / "data")), output)
    assert "tokenizer  tokenizer.json" in said

    prompt, new = "It is naïve", 20
    ids = (np.frombuffer(prompt.encode(), np.uint8) + 3).astype(np.uint32)
    batch, logits = models.rows(c), models.logits_of(c)
    for place in range(ids.size, ids.size + new):
        batch.targets[:, : ids.size] = ids
        ids = np.append(ids, logits(w, batch)[0, place].argmax().astype(np.uint32))

    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    llama = transformers.AutoModelForCausalLM.from_pretrained(output)
    inputs = tokenizer(prompt, return_tensors="pt")
    generated = llama.generate(**inputs, max_new_tokens=new, do_sample=False, eos_token_id=None)[0]
    assert generated.tolist() == [0, *ids]
    text = bytes((ids[ids >= 3] - 3).astype(np.uint8)).decode(errors="replace")
    assert text.startswith(prompt)

    page = (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert "It is a truth" in capsys.readouterr().out
    assert tokenizer.decode(generated, skip_special_tokens=True) == text
    assert llama.generation_config.eos_token_id == 1


def test_what_an_export_has(saved, tmp_path):
    """Null is stated as the end: transformers' Llama would otherwise end at id 2."""
    w, c, run = saved("grouped")
    models.save(Path(run), models.weights(c, seed=9), c, step=9)
    said = export(f"{run}/checkpoints/0000000005", tmp_path / "exported")
    assert "tokenizer  none: " in said
    assert "after 5 steps" in said
    tensors = load_file(tmp_path / "exported/model.safetensors")
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], np.asarray(w.embed))
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert {"dtype": "float32", "eos_token_id": None, "bos_token_id": 3}.items() <= config.items()
    assert config["shardwright"] == {"step": 5, "programs": None}
    assert "after 9 steps" in export(run, tmp_path / "last", check=False)
    for settings, message in [
        ({"step": 6}, r"no complete checkpoint of step 6 .* it has \[5, 9\]"),
        ({"output": str(tmp_path / "exported")}, r"output is .*exported, which exists already"),
    ]:
        with pytest.raises(ValueError, match=message):
            export(run, **{"output": tmp_path / "another"} | settings)
    assert not (tmp_path / "another").exists()


KILLED = """
import os, signal, safetensors.numpy
from shardwright.tools import checkpoint_to_huggingface as tool
save = safetensors.numpy.save_file
def save_file(*args, **options):
    save(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)
safetensors.numpy.save_file = save_file
tool.run(tool.Settings(run={run!r}, output={output!r}, check=False))
"""


@pytest.mark.long
def test_a_killed_export_leaves_nothing_that_looks_whole(saved, tmp_path):
    _, _, run = saved("grouped")
    output = tmp_path / "exported"
    code = KILLED.format(run=run, output=str(output))
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not output.exists()
    export(run, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run"]
    assert len(load_file(output / "model.safetensors")) == 3 + 9 * 3


# ---- refusals ------------------------------------------------------------------------------------

EXCHANGE = "from shardwright.huggingface.families import from_huggingface, to_huggingface\n"
RULE = "mask_mod=(masks.causal, masks.same_document)"
GATE = "(jax.nn.silu(jnp.float32(gate)) * up).astype(x.dtype)"
ALIBI = "score_mod=lambda scores, q, k, heads: scores - (q.index - k.index) * 0.5 ** heads"
OTHER_LOGITS = (
    r"^the logits of this llama are not the run's own: of 32 tokens, they differ by .* "
    r"of the largest.$"
)
EDITS = {
    "added weight": (
        [('    mlp_norm: gain["M"]\n', '    mlp_norm: gain["M"]\n    mlp_bias: gain["M"]\n')],
        r"^llama in transformers .* Only one of them has weights/layers/mlp_bias",
    ),
    "window": (
        [(RULE, "mask_mod=(masks.causal, masks.same_document, masks.Window(64))")],
        r"^layer 0 has the attention mask `causal, same_document, Window\(size=64\)`; llama in "
        r"transformers has ",
    ),
    "ALiBi": ([(RULE, ALIBI)], OTHER_LOGITS),
    "every second layer": (
        [
            ("    Weights = Transformer\n", "    Weights, period = Transformer, 2\n"),
            (GATE, "(jax.nn.gelu if tokens.index_in_period else jax.nn.silu)(gate) * up"),
        ],
        OTHER_LOGITS,
    ),
}


@pytest.fixture
def edited(saved, tmp_path, monkeypatch):
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
        return saved("grouped", module="mine", layers=4)[2]

    return make


@pytest.mark.parametrize(
    "edit", [pytest.param(x, marks=[pytest.mark.long] * ("every" in x)) for x in EDITS]
)
def test_another_model_is_refused_with_the_name(edited, tmp_path, edit):
    edits, message = EDITS[edit]
    if message == OTHER_LOGITS:
        need_transformers()
    run = edited(edits)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        export(run, tmp_path / "exported")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.long
def test_an_edit_that_changes_nothing_is_exported(edited, tmp_path):
    """Another file with the same math; and attention within no documents, as the exported model has
    it.
    """
    need_transformers()
    run = edited(
        [
            (RULE, "mask_mod=(masks.causal,), scale=8**-0.5"),
            (GATE, "gate * jax.nn.sigmoid(gate) * up"),
        ]
    )
    assert "with those of transformers" in export(run, tmp_path / "exported")


def transposed(monkeypatch):
    monkeypatch.setitem(families._LAYER, "w_gate", "mlp.up_proj.weight")
    monkeypatch.setitem(families._LAYER, "w_up", "mlp.gate_proj.weight")


def without_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def other_activation(monkeypatch):
    monkeypatch.setattr(gpt2, "_FIXED", gpt2._FIXED | {"activation_function": "gelu"})


@pytest.mark.parametrize(
    ("wrong", "case", "message"),
    [
        (transposed, "grouped", r"are not the run's own: .*"),
        pytest.param(other_activation, GPT2, r"are not the run's own: .*", marks=pytest.mark.long),
        (
            without_package,
            "grouped",
            r"needs torch: pip install torch transformers, or set check=false",
        ),
    ],
)
def test_a_wrong_mapping_is_found(saved, tmp_path, monkeypatch, wrong, case, message):
    need_transformers()
    _, _, run = saved(case)
    wrong(monkeypatch)
    with pytest.raises(ValueError, match=message):
        export(run, tmp_path / "exported", check=True)
    assert not (tmp_path / "exported").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path, one_device):
    need_transformers()
    c = models.model("grouped")
    w = models.weights(c)
    w.final_norm = w.final_norm * jnp.nan
    with pytest.raises(ValueError, match="has values that are not finite"):
        export(models.save(tmp_path / "run", w, c), tmp_path / "exported")
