"""A model of transformers gives the same logits here, on any mesh, and continues training; or is refused by name."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import huggingface_models as models
import hydra
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import yaml
import zarr
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file

import train
from shardlib.shardtypes import make_shardings
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import RopeScaling
from shardwright.modeling.weights import shapes_of
from shardwright.run import config as run_config
from shardwright.run import host_checkpoint
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.config import register_schema, to_config
from shardwright.run.initial_weights import fresh_state, read_weights
from shardwright.run.resuming import fixed_settings, with_defaults
from shardwright.run.stages import placement_of
from shardwright.settings.differences import config_differences
from tools import huggingface_to_checkpoint as tool
from tools.checkpoint_to_huggingface import __main__ as checkpoint_to_huggingface
from tools.huggingface import llama as huggingface_llama
from tools.huggingface_to_checkpoint import Config

ROOT = Path(__file__).parents[2]


def run(model, output, **settings) -> str:
    """Imports a model; what the tool printed."""
    lines: list[str] = []
    tool.run(Config(model=str(model), output=str(output), **{"check": models.COMPARES} | settings), lines.append)
    return "\n".join(lines)


def start_weights(source, c, like):
    """The weights that a run of model `c` starts with, placed as `like`."""
    config = dataclasses.asdict(models.settings(c))
    return read_weights(source, like, config)


def shapes(c):
    """The weights of model `c` without their values, on the mesh in force."""
    like = shapes_of(train.weight_table(c))
    sharded = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(sharded, like, make_shardings(train.Transformer, like=like))


@pytest.fixture
def one_device():
    with jax.set_mesh(tiny.mesh("one device")):
        yield


@pytest.fixture
def exported(tmp_path, one_device):
    """Makes an exported model of a case: its weights, its model and its directory."""

    def make(case: str = "grouped", **changes):
        c = models.model(case, **changes)
        w = models.weights(c)
        directory = tmp_path / "model"
        source = models.save(tmp_path / "source", w, c)
        checkpoint_to_huggingface.run(
            checkpoint_to_huggingface.Config(run=source, output=str(directory), check=models.COMPARES), lambda _: None
        )
        return w, c, directory

    return make


def change_config(directory, **changes):
    """Changes config.json; None removes a field."""
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# ---- logits -------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "bos_token_id": 3,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "kind", "settings"),
    [
        ("d=8", "Llama", {"num_key_value_heads": 16}),
        ("r=2 d=2 t=2", "Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 100.0}}),
        ("d=4 t=2", "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}}),
        ("one device", "Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
        ("t=8", "Qwen3", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    ],
)
def test_logits_here_are_those_of_transformers(tmp_path, mesh, kind, settings):
    torch = pytest.importorskip("torch", reason="transformers' models need torch, installed on Python 3.11 only")
    transformers = pytest.importorskip("transformers", reason="the comparison needs transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    if kind == "Llama":
        # As transformers before 5.0 writes it.
        stated = dict(config.rope_parameters)
        theta, stated["type"] = stated.pop("rope_theta"), stated.pop("rope_type")
        scaling = None if stated["type"] == "default" else stated
        change_config(tmp_path / "model", rope_parameters=None, rope_theta=theta, rope_scaling=scaling)

    run(tmp_path / "model", tmp_path / "imported")
    _, c, _, _ = checkpoint_to_huggingface.read_model(str(tmp_path / "imported"), None)
    assert c.qk_norm == (kind == "Qwen3")
    batch = models.rows(c)
    with jax.set_mesh(tiny.mesh(mesh)):
        w = start_weights(tmp_path / "imported", c, shapes(c))
        found = models.logits_of(c)(w, batch)
    expected = models.their_logits(model, batch, c.bos_id)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


# ---- what is written ----------------------------------------------------------------------------------------------


def test_the_config_group_is_the_model(exported, tmp_path):
    _, c, directory = exported("qk_norm tied llama3")
    said = run(directory, tmp_path / "imported")
    assert f"--config-dir={tmp_path}/imported model=imported training.init_from={tmp_path}/imported" in said
    register_schema()
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        overrides = ["model=imported", "data.filespec=x", f"hydra.searchpath=[file://{tmp_path}/imported]"]
        composed = hydra.compose("local_text", overrides)
    assert to_config(composed).model == c


def test_half_precision_becomes_f32_unchanged(exported, tmp_path):
    _, _, directory = exported()
    tensors = load_file(directory / "model.safetensors")
    half = {name: x.astype(jnp.bfloat16 if "q_proj" in name else np.float16) for name, x in tensors.items()}
    save_file(half, directory / "model.safetensors")
    assert {x.dtype for x in tool.Tensors(directory).values()} == {np.dtype(np.float32)}
    run(directory, tmp_path / "imported")
    checkpoint = zarr.open_group(tmp_path / "imported/checkpoints/0000000000", mode="r")
    embed, w_q = checkpoint["weights/embed"][...], checkpoint["weights/layers/w_q"][1]
    assert embed.dtype == np.float32
    np.testing.assert_array_equal(embed, half["model.embed_tokens.weight"].astype(np.float32))
    theirs = half["model.layers.1.self_attn.q_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(w_q.reshape(32, -1).T, theirs)


@pytest.mark.long
def test_chunks_are_small_enough_to_read_apart(exported, tmp_path, monkeypatch):
    """A process that holds a part of a weight reads little more than it; the values are there, whatever the chunks."""
    w, _, directory = exported()
    monkeypatch.setattr(host_checkpoint, "CHUNK_BYTES", 1000)
    run(directory, tmp_path / "imported")
    checkpoint = zarr.open_group(tmp_path / "imported/checkpoints/0000000000", mode="r")
    assert checkpoint["weights/embed"].chunks == (7, 32)
    assert checkpoint["weights/layers/w_q"].chunks == (1, 1, 8, 2, 8)
    _, _, read, _ = checkpoint_to_huggingface.read_model(str(tmp_path / "imported"), None)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, read), jax.tree.map(np.asarray, w))


@pytest.mark.long
def test_a_failed_import_leaves_no_checkpoint(exported, tmp_path):
    _, _, directory = exported()
    tensors = load_file(directory / "model.safetensors")
    broken = tensors | {"model.norm.weight": np.ones(31, np.float32)}
    save_file(broken, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"weights/final_norm is \[31\] in the model's files; it must be \[32\]"):
        run(directory, tmp_path / "imported")
    assert Checkpointer(tmp_path / "imported/checkpoints").steps() == []
    save_file(tensors, directory / "model.safetensors")
    run(directory, tmp_path / "imported")
    assert Checkpointer(tmp_path / "imported/checkpoints").steps() == [0]
    with pytest.raises(ValueError, match=r"output is .*imported, which has checkpoints already"):
        run(directory, tmp_path / "imported")


@pytest.mark.long
def test_as_a_program(exported, tmp_path):
    _, _, directory = exported()
    command = [sys.executable, "-m", "tools.huggingface_to_checkpoint", f"model={directory}", f"output={tmp_path}/o"]
    command.append(f"check={models.COMPARES}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "llama: " in done.stdout
    assert "initialize backend" not in done.stdout + done.stderr  # it starts no device but the CPU


# ---- refusals -----------------------------------------------------------------------------------------------------

MATH = [
    ({"model_type": "gemma"}, r"model_type is 'gemma'; train.py can be llama, mistral, qwen3"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"model_type": "mistral", "architectures": None, "sliding_window": 4096}, "sliding_window is 4096"),
    ({"model_type": "mistral", "architectures": None}, "sliding_window is 4096"),  # what its absence means
    ({"model_type": "qwen3", "architectures": None, "use_sliding_window": True}, "use_sliding_window is True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type is 'yarn'; train.py has default, linear, llama3",
    ),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0}}, "rope_type linear lacks factor"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta is 5.0, and elsewhere it is 100.0"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is not 1"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "attention_factor": 2.0}}, "linear with attention_factor"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config is .* ignore=\[quantization_config\]"),
    ({"logit_scale": 0.5}, "logit_scale is 0.5, and it is not known here"),
    ({"num_key_value_heads": 5}, "num_attention_heads is 16, which is not a multiple of num_key_value_heads 5"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor of rope_type linear is '2'; it must be a numb"),
    ({"hidden_size": "32"}, "hidden_size is '32'; it must be a whole number"),
]


@pytest.mark.parametrize(("changes", "message"), MATH)
def test_other_math_is_refused_by_name(changes, message):
    c = models.model("grouped")
    config, tensors = huggingface_llama.to_huggingface(train.weight_table(c), c)
    config = {key: value for key, value in (config | {"bos_token_id": 3}).items() if value is not None}
    changed = {key: value for key, value in (config | changes).items() if value is not None}
    huggingface_llama.from_huggingface(config, tensors)
    with pytest.raises(ValueError, match=rf"config.json: .*{message}"):
        huggingface_llama.from_huggingface(changed, tensors)


def test_what_does_not_change_the_logits_is_no_hindrance():
    c = models.model("grouped")
    config, tensors = huggingface_llama.to_huggingface(train.weight_table(c), c)
    config |= {
        "bos_token_id": 3,
        "pretraining_tp": 2,
        "torch_dtype": "bfloat16",
        "clip_qkv": None,
        "hidden_act": "swish",
    }
    stray = {"model.layers.0.self_attn.rotary_emb.inv_freq": None}
    assert huggingface_llama.from_huggingface(config, tensors | stray)[0] == c
    qwen = config | {"model_type": "qwen3", "architectures": None, "sliding_window": 4096, "use_sliding_window": False}
    norms = {f"model.layers.{i}.self_attn.{name}_norm.weight": None for i in range(c.layers) for name in "qk"}
    assert huggingface_llama.from_huggingface(qwen, tensors | norms)[0] == dataclasses.replace(c, qk_norm=True)


def test_absent_values_mean_what_they_mean_in_transformers():
    transformers = pytest.importorskip("transformers", reason="the defaults compared with are transformers'")
    for kind in ("Llama", "Mistral", "Qwen3"):
        theirs = getattr(transformers, f"{kind}Config")().to_dict()
        wanted = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        config = {name: theirs[name] for name in wanted} | {"model_type": kind.lower(), "num_hidden_layers": 0}
        if kind == "Mistral":
            config["sliding_window"] = None
        names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
        c, _ = huggingface_llama.from_huggingface(config | {"bos_token_id": 0}, dict.fromkeys(names))
        assert c.n_kv == theirs["num_key_value_heads"]
        assert c.d_head == (theirs["head_dim"] or theirs["hidden_size"] // theirs["num_attention_heads"])
        assert c.norm_epsilon == theirs["rms_norm_eps"]
        assert c.rope_base == theirs["rope_parameters"]["rope_theta"]
        assert c.tied_embeddings == theirs["tie_word_embeddings"]


def test_tensors_must_be_those_of_the_model():
    c = models.model("grouped")
    config, tensors = huggingface_llama.to_huggingface(train.weight_table(c), c)
    config |= {"bos_token_id": 3}
    with pytest.raises(ValueError, match=r"the model lacks 1 tensors: lm_head.weight"):
        huggingface_llama.from_huggingface(config, {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    bias = {f"model.layers.{i}.self_attn.q_proj.bias": None for i in range(5)}
    with pytest.raises(ValueError, match=r"beyond this model, 5 tensors: model.layers.0.self_attn.q_proj.bias, .* …"):
        huggingface_llama.from_huggingface(config, tensors | bias)
    # A tied table may be stated a second time.
    huggingface_llama.from_huggingface(config | {"tie_word_embeddings": True}, tensors)


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["llama", "gpt2"])
def test_a_second_table_of_a_tied_model_must_be_the_first(prefix, exported, tmp_path):
    """transformers keeps both where they differ, and computes logits with the second."""
    if prefix == "llama":
        _, _, directory = exported("tied")
    else:
        transformers = pytest.importorskip("transformers", reason="a GPT-2 needs transformers")
        pytest.importorskip("torch", reason="a GPT-2 needs torch, installed on Python 3.11 only")
        sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 3}
        directory = tmp_path / "model"
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    table = tensors["model.embed_tokens.weight" if prefix == "llama" else "transformer.wte.weight"]
    save_file(tensors | {"lm_head.weight": table}, directory / "model.safetensors")
    run(directory, tmp_path / "equal")
    other = table.copy()
    other[-1, -1] += 1e-4
    save_file(tensors | {"lm_head.weight": other}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"ties .* but lm_head.weight differs from .*\. If lm_head.weight was trained"):
        run(directory, tmp_path / "imported")
    assert Checkpointer(tmp_path / "imported/checkpoints").steps() == []


def test_weights_that_are_not_finite_are_refused(exported, tmp_path):
    """Those too that no text of the comparison reaches."""
    _, _, directory = exported()
    tensors = load_file(directory / "model.safetensors")
    name = "model.embed_tokens.weight"
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        broken = tensors[name].astype(dtype)
        broken[5, 2:4], broken[9, 0] = np.nan, -np.inf
        save_file(tensors | {name: broken}, directory / "model.safetensors")
        said = rf"{name} has 3 values that are not finite, of 2,048: 2 NaN, 1 infinite\..* take another copy"
        with pytest.raises(ValueError, match=said):
            run(directory, tmp_path / "imported")
    assert Checkpointer(tmp_path / "imported/checkpoints").steps() == []


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "F64", "BOOL"])
def test_other_dtypes_are_refused_by_name(tmp_path, dtype):
    """safetensors reads some of them as NumPy arrays, and fails with an AttributeError at others."""
    size = 24 if dtype == "F64" else 3
    entry = {"model.norm.weight": {"dtype": dtype, "shape": [3], "data_offsets": [0, size]}}
    header = json.dumps(entry).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(
        ValueError, match=rf"model.norm.weight is {dtype}; only F32, F16, BF16 .* Dequantize the model first"
    ):
        tool.Tensors(tmp_path)["model.norm.weight"]


LLAMA3_CHANGES = {"factor": 0.5, "low_freq_factor": 0, "original_max_position_embeddings": 0, "high_freq_factor": 1}


def test_rope_factors_are_those_of_longer_sequences(exported, tmp_path):
    """transformers warns of all of these but the low_freq_factor."""
    _, _, directory = exported()
    linear = [{"rope_type": "linear", "factor": factor} for factor in (0.5, -2, float("inf"))]
    for scaling in linear + [LLAMA3 | {name: value} for name, value in LLAMA3_CHANGES.items()]:
        change_config(directory, rope_scaling=scaling)
        with pytest.raises(ValueError, match=r"rope_scaling\.\w+ is .*must be (a .*number, |)(at least 1|above)"):
            run(directory, tmp_path / "imported")


def test_user_mistakes(exported, tmp_path):
    _, _, directory = exported()
    output = tmp_path / "imported"
    with pytest.raises(ValueError, match=r"has no config.json: it is not a model"):
        run(tmp_path, output)
    change_config(directory, bos_token_id=None)
    with pytest.raises(ValueError, match=r"bos_token_id is None; give bos_id="):
        run(directory, output)
    with pytest.raises(ValueError, match=r"bos_id is 64; it must be an id of the vocabulary, at least 0 and below 64"):
        run(directory, output, bos_id=64)
    change_config(directory, bos_token_id=3, some_new_setting=1)
    with pytest.raises(ValueError, match=r"some_new_setting is 1, .* give ignore=\[some_new_setting\]"):
        run(directory, output)
    change_config(directory, model_type="gemma")
    with pytest.raises(ValueError, match="model_type is 'gemma', and shardwright has no model of that name"):
        run(directory, output)
    change_config(directory, model_type="llama", max_position_embeddings="${oc.env:HOME}")
    with pytest.raises(
        ValueError, match=r"config.json: max_position_embeddings is '\$\{oc.env:HOME\}'; it must be a whole"
    ):
        run(directory, output, ignore=["some_new_setting"])
    change_config(directory, max_position_embeddings=64)
    assert not output.exists()
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(ValueError, match=r"cannot read .*model.safetensors: .* Copy or download it again"):
        run(directory, output, ignore=["some_new_setting"])
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model.safetensors.*from_pretrained\(…\).save_pretrained"):
        run(directory, output, ignore=["some_new_setting"])


@pytest.mark.long
def test_models_on_the_hub_are_downloaded(exported, tmp_path, monkeypatch):
    import huggingface_hub

    _, _, directory = exported()
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(directory))
    run("someone/some-model", tmp_path / "imported")
    assert asked == [(("someone/some-model",), {"allow_patterns": tool.FILES})]

    def fail(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"'someone/other', which is not a directory.*no route to host"):
        run("someone/other", tmp_path / "other")


# ---- training.init_from -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_starts_from_the_weights_of_another(tmp_path, capsys):
    """On another mesh; the first loss is that of the weights, computed on one device."""
    c = models.model("llama3")
    batch = models.rows(c)
    with jax.set_mesh(tiny.mesh("one device")):
        w = models.weights(c)
        logits = models.logits_of(c)(w, batch).astype(np.float64)
        source = models.save(tmp_path / "run", w, c)
    at_target = np.take_along_axis(logits, batch.targets[..., None].astype(np.int64), -1)[..., 0]
    expected = (np.log(np.exp(logits).sum(-1)) - at_target).mean()
    settings = models.settings(c, init_from=source)
    model = load_model(c)
    init = functools.partial(train.init_state, c=settings, model=model)
    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        state = fresh_state(settings, placement_of(settings, model), init, train.State)
        assert "after 5 steps; the optimizer's state is fresh" in capsys.readouterr().out
        jax.tree.map(
            np.testing.assert_array_equal, jax.tree.map(np.asarray, state.weights), jax.tree.map(np.asarray, w)
        )
        assert all(jax.tree.leaves(jax.tree.map(lambda x, y: x.sharding == y.sharding, state.weights, shapes(c))))
        assert not any(np.asarray(x).any() for x in jax.tree.leaves((state.adam_mu, state.adam_nu)))
        nats, targets = tiny.evaluation_step(settings)(state.weights, tiny.place_batch(settings, batch))
    np.testing.assert_allclose(nats / targets, expected, rtol=1e-5)


def test_only_the_same_model_starts_from_weights(tmp_path, one_device, capsys):
    c = models.model("grouped")
    w = models.weights(c)
    source = models.save(tmp_path / "run", w, c)
    with pytest.raises(
        ValueError, match=r"(?s)another model:.*d_ff: checkpoint has 48, this run has 64\n  .*rope_base"
    ):
        start_weights(source, dataclasses.replace(c, d_ff=64, rope_base=7.0), w)
    # How weights are drawn at first is over; a longer context is what RoPE scaling is for.
    scaling = RopeScaling("linear", 2.0)
    start_weights(source, dataclasses.replace(c, weight_init_scale=2.0, rope_scaling=scaling), w)
    assert "model.rope_scaling.factor: checkpoint does not have it, this run has 2.0" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*/checkpoints: give a run's directory"):
        start_weights(tmp_path, c, w)


def test_resuming_may_leave_the_source_out_but_not_change_it():
    c = models.model("grouped")
    saved, other, none = (
        dataclasses.asdict(models.settings(c, init_from=source)) for source in ("runs/a", "runs/b", None)
    )
    differences = lambda now: config_differences(saved, now, fixed_settings(saved, now))
    assert differences(saved) == differences(none) == []
    assert differences(other) == ["training.init_from: checkpoint has 'runs/a', this run has 'runs/b'"]


def test_the_checkpoint_is_one_of_a_whole_run(exported, tmp_path):
    """Programs that read a run's configuration from its checkpoint can read this one's; yaml and manifest agree."""
    _, c, directory = exported()
    run(directory, tmp_path / "imported")
    checkpoint = zarr.open_group(tmp_path / "imported/checkpoints/0000000000", mode="r")
    written = yaml.safe_load((tmp_path / "imported/model/imported.yaml").read_text())
    saved = checkpoint.attrs["metadata"]["config"]
    assert saved["model"] == written == dataclasses.asdict(c)
    complete = OmegaConf.merge(OmegaConf.structured(run_config.Config), with_defaults(saved))
    settings = to_config(complete)
    assert settings.model == c
    assert settings.training.seq_len == models.LENGTH  # of the run that was exported


# ---- files of a stranger --------------------------------------------------------------------------------------------

HOSTILE = ["x", "${oc.env:HOME}", [1], {}, -1, 1.5, True, 10**30, 0]
NUMBERS = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
NUMBERS += ["intermediate_size", "max_position_embeddings", "bos_token_id", "rms_norm_eps", "rope_theta"]
FINE = [("bos_token_id", 0), ("rms_norm_eps", 0), ("rope_theta", 1.5)]


@pytest.mark.quick
def test_hostile_values_of_config_are_refused_by_field():
    cases = [(key, value) for key in NUMBERS for value in HOSTILE if (key, value) not in FINE]
    for key in ("rope_scaling", "rope_parameters"):
        cases += [(key, value) for value in ("x", 1, [1])] + [(key, {"rope_type": ["x"]}), (key, {"rope_theta": "x"})]
    cases += [(key, value) for key in ("model_type", "hidden_act") for value in ([1], {}, 1)]
    cases += [(key, value) for key in ("layer_types", "architectures") for value in (1, {}, [[1]])]
    for key, value in cases:
        with pytest.raises(ValueError, match=r"config.json: [\w.]+ is ") as error:
            tool.check_fields({key: value})
        assert "\n" not in str(error.value)


def test_a_refused_file_leaves_nothing(exported, tmp_path):
    _, _, directory = exported()
    change_config(directory, rope_theta="x", bos_token_id=3)
    with pytest.raises(ValueError, match=r"config.json: rope_theta is 'x'; it must be a number"):
        run(directory, tmp_path / "o")
    change_config(directory, rope_theta=100.0, head_dim=7)
    with pytest.raises(ValueError, match=r"d_head is 7.*even"):
        run(directory, tmp_path / "o")
    change_config(directory, head_dim=8)
    (directory / "tokenizer.json").write_text('{"model": {}, "added_tokens": [1]}')
    with pytest.raises(ValueError, match=r"tokenizer.json: added_tokens is 1; it must be an object"):
        run(directory, tmp_path / "o")
    (directory / "tokenizer.json").unlink()
    (tmp_path / "secret.json").write_text("{}")
    (directory / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match=r"tokenizer.json is a link to .*secret.json, outside of the model"):
        run(directory, tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.quick
def test_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8-sig")
    assert tool.read_object(tmp_path / "config.json") == {}
