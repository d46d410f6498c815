"""An exported checkpoint gives the same logits in transformers, on any mesh, or is refused."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

import gpt2
import train
from shardwright_data.flat_tokens import Writer
from shardwright_data.text.tokenizers import ByteTokenizer
from tools import huggingface_to_checkpoint
from tools.checkpoint_to_huggingface import __main__ as tool
from tools.checkpoint_to_huggingface.__main__ import Config
from tools.huggingface import llama as huggingface_llama

ROOT = Path(__file__).parents[2]


def need_transformers():
    pytest.importorskip("torch", reason="transformers' models need torch, installed on Python 3.11 only")
    return pytest.importorskip("transformers", reason="the comparison needs transformers")


def export(run, output, **settings) -> tuple[Path, str]:
    """The exported directory, and what the tool printed."""
    lines: list[str] = []
    tool.run(Config(run=str(run), output=str(output), **{"check": models.COMPARES} | settings), lines.append)
    return output, "\n".join(lines)


@pytest.fixture
def one_device():
    with jax.set_mesh(tiny.mesh("one device")):
        yield


@pytest.fixture
def saved(tmp_path, one_device):
    """Makes a run's checkpoint of a case, on one device: its weights, its model and its directory."""

    def make(case: str, **changes):
        c = models.model(case, **changes)
        w = models.weights(c)
        return w, c, models.save(tmp_path / "run", w, c)

    return make


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "case"),
    [
        ("one device", "multi-head"),
        ("d=8", "tied"),
        ("t=8", "linear"),
        ("d=4 t=2", "llama3"),
        ("r=2 d=2 t=2", "qk_norm"),
        ("d=8", "qk_norm tied llama3"),
    ],
)
def test_logits_in_transformers_are_ours(tmp_path, mesh, case):
    transformers = need_transformers()
    c = models.model(case)
    batch = models.rows(c)
    with jax.set_mesh(tiny.mesh(mesh)):
        w = models.weights(c)
        expected = models.logits_of(c)(w, batch)
        run = models.save(tmp_path / "run", w, c)
    output, _ = export(run, tmp_path / "exported")
    llama = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert type(llama).__name__ == ("Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLM")
    found = models.their_logits(llama, batch, c.bos_id)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.long
def test_greedy_generation_is_ours(tmp_path, one_device, monkeypatch, capsys):
    """From text to text, with the tokenizer of a dataset of bytes; then as docs/huggingface.md does it."""
    transformers = need_transformers()
    c = models.model("grouped", vocab=259, bos_id=0)
    w = models.weights(c)
    with Writer(str(tmp_path / "data"), "train") as writer:
        encoded = ByteTokenizer(append_end=True).encode(["It is a truth"])
        writer.append(encoded.ids, encoded.lengths)
        writer.attributes.update({"tokenizer": {"kind": "bytes", "end_token": "</s>"}})
    output, said = export(models.save(tmp_path / "run", w, c, filespec=str(tmp_path / "data")), tmp_path / "exported")
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
    assert llama.generation_config.eos_token_id == ByteTokenizer.END


def test_without_an_end_token_generation_never_ends(saved, tmp_path):
    """Null is stated: transformers' Llama would otherwise end at id 2."""
    _, _, run = saved("grouped")
    output, said = export(run, tmp_path / "exported")
    assert "tokenizer  none: " in said
    for file in ("config.json", "generation_config.json"):
        content = json.loads((output / file).read_text())
        assert content["eos_token_id"] is None
        assert content["bos_token_id"] == 3
    assert not (output / "tokenizer.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("case", models.CASES)
def test_there_and_back_is_the_same_to_the_bit(saved, tmp_path, case):
    w, c, run = saved(case)
    output, _ = export(run, tmp_path / "exported", file_bytes=20_000)
    assert len(list(output.glob("model-*.safetensors"))) > 1
    huggingface_to_checkpoint.run(
        huggingface_to_checkpoint.Config(str(output), str(tmp_path / "back"), check=models.COMPARES), lambda _: None
    )
    _, model, weights, _ = tool.read_model(str(tmp_path / "back"), None)
    assert model == c
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, weights), jax.tree.map(np.asarray, w))


@pytest.mark.long
def test_another_model_goes_there_and_back(tmp_path, one_device):
    c = gpt2.ModelConfig(
        module="gpt2", vocab=64, positions=32, d_model=32, layers=2, heads=4, dropout=0.1, bos_id=5, norm_epsilon=1e-4
    )
    w = models.weights(c)
    run = models.save(tmp_path / "run", w, c)
    output, said = export(run, tmp_path / "exported")
    assert "GPT2LMHeadModel" in said
    huggingface_to_checkpoint.run(
        huggingface_to_checkpoint.Config(str(output), str(tmp_path / "back"), check=models.COMPARES), lambda _: None
    )
    _, model, weights, _ = tool.read_model(str(tmp_path / "back"), None)
    assert model == c
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, weights), jax.tree.map(np.asarray, w))


def test_bf16_rounds_to_nearest(saved, tmp_path):
    w, _, run = saved("grouped")
    output, _ = export(run, tmp_path / "exported", dtype="bf16")
    tensors = load_file(output / "model.safetensors")
    assert {str(x.dtype) for x in tensors.values()} == {"bfloat16"}
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], np.asarray(w.embed.astype(jnp.bfloat16)))
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.long
def test_step(tmp_path, one_device):
    c = models.model("grouped")
    for step in (5, 9):
        run = models.save(tmp_path / "run", models.weights(c, seed=step), c, step=step)
    for i, (settings, step) in enumerate([({}, 9), ({"step": 5}, 5)]):
        output, said = export(run, tmp_path / f"exported{i}", **settings)
        assert f"after {step} steps" in said
        embed = load_file(output / "model.safetensors")["model.embed_tokens.weight"]
        np.testing.assert_array_equal(embed, np.asarray(models.weights(c, seed=step).embed))
    output, said = export(f"{run}/checkpoints/0000000005", tmp_path / "exported")
    assert "after 5 steps" in said
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 6 .* there are \[5, 9\]"):
        export(run, tmp_path / "another", step=6)
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*give a run's directory"):
        export(tmp_path, tmp_path / "another")
    with pytest.raises(ValueError, match=r"output is .*exported, which exists already"):
        export(run, tmp_path / "exported")
    with pytest.raises(ValueError, match="dtype is 'f16'; choose one of f32, bf16"):
        export(run, tmp_path / "another", dtype="f16")
    assert not (tmp_path / "another").exists()


def test_what_transformers_cannot_express_is_refused(saved, tmp_path):
    _, _, run = saved("grouped", logit_softcap=30.0)
    with pytest.raises(ValueError, match=r"model.logit_softcap is 30.0, which neither Llama nor Qwen3"):
        export(run, tmp_path / "exported")
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_settings_that_the_mapping_does_not_know_are_refused(monkeypatch):
    """A model that grows a setting is not exported as if it had none."""
    c = models.model("grouped")
    monkeypatch.setattr(huggingface_llama, "KNOWN_FIELDS", huggingface_llama.KNOWN_FIELDS - {"bos_id"})
    with pytest.raises(ValueError, match=r"model\.bos_id is 3, which neither Llama nor Qwen3"):
        huggingface_llama.to_huggingface(train.weight_table(c), c)
    huggingface_llama.to_huggingface(train.weight_table(c), models.model("grouped", bos_id=0))


def test_a_damaged_checkpoint_is_not_exported(saved, tmp_path):
    _, _, run = saved("grouped")
    chunk = next((Path(run) / "checkpoints/0000000005/weights/layers/w_up/c").rglob("0/0/0"))
    content = bytearray(chunk.read_bytes())
    content[10] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(OSError, match=r"cannot read the array 'weights/layers/w_up'.*Restore another step"):
        export(run, tmp_path / "exported")
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


KILLED = """
import os, signal, safetensors.numpy
from tools.checkpoint_to_huggingface import __main__ as tool
save = safetensors.numpy.save_file
def save_file(tensors, path, metadata):
    save(tensors, path, metadata=metadata)
    if "2.part" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
safetensors.numpy.save_file = save_file
tool.run(tool.Config(run={run!r}, output={output!r}, file_bytes=20_000, check=False))
"""


@pytest.mark.long
def test_a_killed_export_leaves_nothing_that_looks_whole(saved, tmp_path):
    _, _, run = saved("grouped")
    output = tmp_path / "exported"
    code = KILLED.format(run=run, output=str(output))
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not output.exists()
    assert sorted(path.suffix for path in tmp_path.rglob("*.tmp/*") if "json" not in path.name) == [".part", ".part"]
    export(run, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run"]
    assert len(load_file(output / "model.safetensors")) == 3 + 9 * 3


@pytest.mark.long
def test_as_a_program(saved, tmp_path):
    _, _, run = saved("grouped")
    command = [sys.executable, "-m", "tools.checkpoint_to_huggingface", f"run={run}", f"output={tmp_path / 'exported'}"]
    command.append(f"check={models.COMPARES}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM: " in done.stdout
    assert "initialize backend" not in done.stdout + done.stderr  # it starts no device but the CPU


@pytest.mark.slow
def test_a_trained_model_goes_on_with_the_same_text(tmp_path):
    """Austen's bytes: train, validate, sample, export, generate."""
    transformers = need_transformers()

    def program(module, *arguments):
        done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    data, prompt = tmp_path / "data.zarr", "It is a truth universally acknowledged"
    limits = ["train.max_tokens=300000", "validation.max_tokens=20000"]
    program("tools.huggingface_to_flat_tokens", "--config-name=austen_bytes", f"out={data}", *limits)
    sizes = ["model.layers=2", "model.d_model=64", "model.d_ff=176", "training.batch_size=16", "training.steps=80"]
    rates = ["optimizer.warmup_steps=5", "optimizer.schedule_steps=80", "training.compute_dtype=f32"]
    paths = [f"data.filespec={data}", f"paths.root_working_dir={tmp_path}", "paths.model_name=run"]
    said = program("train", "--config-name=local_text", *sizes, *rates, *paths)
    assert "validation  loss" in said
    settings = ["max_tokens=60", "temperature=0", f"output={tmp_path}/texts.jsonl", f"prompt={prompt}"]
    program("tools.generate", f"run={tmp_path}/run", *settings)
    ours = json.loads((tmp_path / "texts.jsonl").read_text())

    program(
        "tools.checkpoint_to_huggingface",
        f"run={tmp_path}/run",
        f"output={tmp_path}/exported",
        f"check={models.COMPARES}",
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    llama = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    generated = llama.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=60, do_sample=False)[0]
    assert generated.tolist() == [0, *ours["prompt_ids"], *ours["ids"]]
    assert tokenizer.decode(generated, skip_special_tokens=True) == prompt + ours["text"]
    assert len(set(ours["ids"])) > 5
