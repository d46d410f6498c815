"""A run becomes a model of transformers with the same logits, on any mesh, or is refused by
name.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
import safetensors.numpy
from safetensors.numpy import load_file, save_file

import train
from shardwright.data.flat_tokens import Writer
from shardwright.data.text.tokenizers import open_tokenizer
from shardwright.modeling import masks
from tests.support import huggingface_models as models
from tests.support.huggingface_models import export

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("no_hashes")


def need_transformers():
    pytest.importorskip(
        "torch", reason="transformers' models need torch, installed on Python 3.11 only"
    )
    return pytest.importorskip("transformers", reason="the comparison needs transformers")


@pytest.fixture
def saved(tmp_path, one_device):
    """Makes a run's checkpoint of a case, on one device: its weights, its model and its
    directory.
    """

    def make(case, **changes):
        c = models.model(case, **changes)
        w = models.weights(c)
        return w, c, models.save(tmp_path / "run", w, c)

    return make


# ---- what is written -----------------------------------------------------------------------------


def test_texts_of_an_export_as_on_the_page(tmp_path, one_device, monkeypatch, capsys):
    """With the tokenizer of a dataset of bytes."""
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

    page = (ROOT / "docs/huggingface.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert "It is a truth" in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert tokenizer("é")["input_ids"] == [0, *(3 + byte for byte in "é".encode())]
    llama = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert llama.generation_config.eos_token_id == 1


def test_an_export_that_fails_leaves_nothing_that_looks_whole(saved, tmp_path, monkeypatch):
    _, _, run = saved("grouped")
    output = tmp_path / "exported"

    def fail(*args, **options):
        save_file(*args, **options)
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", fail)
        with pytest.raises(OSError, match="no space left"):
            export(run, output, check=False)
    assert not output.exists()
    export(run, output, check=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run"]
    assert len(load_file(output / "model.safetensors")) == 3 + 9 * 3
    config = json.loads((output / "config.json").read_text())
    # Null is stated as the end: transformers' Llama would otherwise end at id 2.
    assert {"eos_token_id": None, "bos_token_id": 3}.items() <= config.items()


# ---- refusals ------------------------------------------------------------------------------------


def alibi(scores, q, k, heads):
    return scores - (q.index - k.index) * 0.5**heads


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            masks.AttentionMask((*masks.CAUSAL.mask_mod, masks.Window(64))),
            r"^layer 0 has the attention mask `causal, same_document, Window\(size=64\)`; llama in "
            r"transformers has ",
        ),
        (
            masks.AttentionMask(score_mod=alibi),
            r"^the logits of this llama are not the run's own: of 32 tokens, they differ by .* "
            r"of the largest.$",
        ),
    ],
)
def test_another_model_is_refused_with_the_name(saved, tmp_path, monkeypatch, mask, message):
    need_transformers()
    _, _, run = saved("grouped")
    monkeypatch.setattr(train.Llama, "mask", mask)
    with pytest.raises(ValueError, match=message):
        export(run, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_weights_that_are_not_finite_are_refused(tmp_path, one_device):
    need_transformers()
    c = models.model("grouped")
    w = models.weights(c)
    w.final_norm = w.final_norm * jnp.nan
    with pytest.raises(ValueError, match="has values that are not finite"):
        export(models.save(tmp_path / "run", w, c), tmp_path / "exported")
