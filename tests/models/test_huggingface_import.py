"""A model of transformers gives the same logits here, on any mesh, and continues training; or is
refused by name.
"""

import dataclasses
import functools
import json
from importlib.util import find_spec
from pathlib import Path

import hydra
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
import zarr
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file

import train
from shardlib.shardtypes import make_shardings
from shardwright.huggingface import as_transformers_reads, families
from shardwright.modeling import masks
from shardwright.modeling.model import load_model
from shardwright.modeling.rope import attention_factor, rope_frequencies
from shardwright.modeling.settings import RopeScaling
from shardwright.modeling.weights import shapes_of
from shardwright.models import family, gpt2
from shardwright.program import config as run_config
from shardwright.program.checks import register_schema, to_config
from shardwright.program.differences import config_differences
from shardwright.program.resume import fresh_state, read_weights
from shardwright.program.saved_config import fixed_settings, with_defaults
from shardwright.program.step import trace_step
from shardwright.tools import huggingface_to_checkpoint as tool
from tests.support import huggingface_models as models
from tests.support import tiny
from tests.support.huggingface_models import export
from tests.support.huggingface_models import to_run as run
from tests.support.transformers_models import theirs

# Not by `importorskip`, which would import it where tests are only collected.
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers reads config.json"
)
ROOT = Path(__file__).parents[2]


def start_weights(source, c, like, **training):
    """The weights that a run of model `c` starts with, placed as `like`."""
    return read_weights(source, like, dataclasses.asdict(models.settings(c, **training)))[0]


def shapes(c):
    """The weights of model `c` without their values, on the mesh in force."""
    like = shapes_of(train.Llama(c).table)

    def sharded(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(sharded, like, make_shardings(train.Transformer, like=like))


@pytest.fixture(autouse=True)
def _no_hashes(no_hashes):
    pass


@pytest.fixture
def exported(tmp_path, one_device):
    """Makes an exported model of a case: its weights, its model and its directory."""

    def make(case: str = "grouped", **changes):
        c = models.model(case, **changes)
        w = models.weights(c)
        export(models.save(tmp_path / "source", w, c), tmp_path / "model", check=False)
        return w, c, tmp_path / "model"

    return make


def change_config(directory, **changes):
    """Changes config.json; None removes a field."""
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# ---- logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [100.0])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling("linear", 4.0),
        RopeScaling("llama3", 8.0),
        RopeScaling(
            "llama3", 2.5, original_length=100, low_frequency_factor=1.5, high_frequency_factor=9.0
        ),
        RopeScaling("yarn", 4.0, original_length=4096),
        RopeScaling(
            "yarn",
            32.0,
            100,
            slow_turns=1.5,
            fast_turns=20.0,
            truncate=False,
            attention_factor=1.25,
        ),
    ],
)
def test_rotary_frequencies_are_those_of_transformers(scaling, base):
    torch = pytest.importorskip(
        "torch", reason="transformers' frequencies need torch, installed on Python 3.11 only"
    )
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    c = models.model("grouped", d_head=128, rope_base=base, rope_scaling=scaling)
    stated, _ = families.to_huggingface(zeros(c), c)
    config = LlamaConfig(**stated | {"max_position_embeddings": 2**17})
    if scaling is None:
        expected = LlamaRotaryEmbedding(config).inv_freq
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
        np.testing.assert_allclose(attention_factor(scaling), factor, rtol=1e-12)
    found = rope_frequencies(c)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


# ---- what is written -----------------------------------------------------------------------------


def test_the_checkpoint_is_one_of_a_whole_run(exported, tmp_path):
    """Programs that read a run's configuration can read this one's; its config group and manifest
    are the model.
    """
    _, c, directory = exported("qk_norm tied llama3")
    said = run(directory, tmp_path / "imported", check=False)
    assert (
        f"--config-dir={tmp_path}/imported model=imported training.init_from={tmp_path}/imported"
        in said
    )
    register_schema()
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        overrides = [
            "model=imported",
            "data.filespec=x",
            f"hydra.searchpath=[file://{tmp_path}/imported]",
        ]
        composed = hydra.compose("local_text", overrides)
    assert to_config(composed).model == c
    checkpoint = zarr.open_group(tmp_path / "imported/checkpoints/0000000000", mode="r")
    saved = checkpoint.attrs["metadata"]["config"]
    assert saved["model"] == yaml.safe_load((tmp_path / "imported/model/imported.yaml").read_text())
    settings = to_config(
        OmegaConf.merge(OmegaConf.structured(run_config.Config), with_defaults(saved))
    )
    assert settings.model == c
    with pytest.raises(ValueError, match=r"output is .*imported, which has checkpoints already"):
        run(directory, tmp_path / "imported")


def test_half_precision_becomes_f32_unchanged(exported, tmp_path):
    _, _, directory = exported()
    tensors = load_file(directory / "model.safetensors")
    half = {
        name: x.astype(jnp.bfloat16 if "q_proj" in name else np.float16)
        for name, x in tensors.items()
    }
    save_file(half, directory / "model.safetensors")
    assert {x.dtype for x in tool.Tensors(directory).values()} == {np.dtype(np.float32)}
    run(directory, tmp_path / "imported", check=False)
    checkpoint = zarr.open_group(tmp_path / "imported/checkpoints/0000000000", mode="r")
    embed, w_q = checkpoint["weights/embed"][...], checkpoint["weights/layers/w_q"][1]
    assert embed.dtype == np.float32
    np.testing.assert_array_equal(embed, half["model.embed_tokens.weight"].astype(np.float32))
    theirs = half["model.layers.1.self_attn.q_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(w_q.reshape(32, -1).T, theirs)


@pytest.mark.long
def test_a_model_in_several_files_is_that_of_transformers(tmp_path):
    theirs("Llama", head_dim=8).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert "with those of transformers: they differ by" in run(
        tmp_path / "model", tmp_path / "imported"
    )


@pytest.mark.long
def test_models_on_the_hub_are_downloaded(exported, tmp_path, monkeypatch):
    import huggingface_hub

    _, _, directory = exported()
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(directory)
    )
    run("someone/some-model", tmp_path / "imported")
    assert asked == [(("someone/some-model",), {"allow_patterns": tool.FILES})]

    def fail(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ValueError, match=r"'someone/other', which is not a directory.*no route to host"
    ):
        run("someone/other", tmp_path / "other")


# ---- refusals ------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 2.0}
MATH = [
    (
        {"attention_bias": True},
        r"attention_bias is True, and this model has False: it would give other logits",
    ),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and this model has 'silu'"),
    (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8},
        "use_sliding_window is True",
    ),
    ({"model_type": "gemma"}, r"model_type is 'gemma'; it can be llama, qwen3, mistral"),
    (
        {"rope_scaling": {"rope_type": "proportional"}},
        "rope_type is 'proportional'; it can be default, linear",
    ),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale": 0.7}}, "mscale is 0.7"),
    (
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, "Missing required keys in .*factor"),
    (
        {"num_hidden_layers": 10**9},
        r"model.layers is 1000000000; it must be at least 1 and below 2\*\*16",
    ),
    ({"head_dim": 7}, "requires an even"),
    ({"rms_norm_eps": -1.0}, "norm_epsilon is -1.0; it must be at least 0"),
    ({"rope_scaling": LINEAR | {"factor": 0.5}}, "rope_scaling.factor is .* at least 1"),
    ({"hidden_size": "32"}, "'hidden_size' expected int, got str"),
]
MATH_OF_GPT2 = [
    (
        {"activation_function": "relu"},
        "activation_function is 'relu', and this model has 'gelu_new'",
    ),
    ({"n_inner": 100}, "n_inner is 100"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
]


def zeros(c):
    """Weights of a model, all 0."""
    return jax.tree.map(lambda w: np.zeros(w.shape, np.float32), load_model(c).table)


def imported(module, c, changes):
    """The model of an exported model's config.json with changes; ... removes a field."""
    mapping = gpt2 if module == "gpt2" else families
    content, tensors = mapping.to_huggingface(zeros(c), c)
    stated = {
        key: value for key, value in content.items() if value is not None or key == "sliding_window"
    }
    stated |= {"bos_token_id": c.bos_id} | changes
    config = as_transformers_reads(
        {key: value for key, value in stated.items() if value is not ...}
    )
    if c.module == "train" and changes.get("model_type") == "qwen3":
        norm = np.ones(c.d_head, np.float32)
        tensors |= {
            f"model.layers.{i}.self_attn.{x}_norm.weight": norm
            for i in range(c.layers)
            for x in "qk"
        }
    return mapping.from_huggingface(config, tensors)[0]


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [("train", *row) for row in MATH] + [("gpt2", *row) for row in MATH_OF_GPT2],
)
def test_other_math_is_refused_by_name(module, changes, message):
    c = (
        gpt2.ModelConfig(vocab=64, d_model=32, layers=2, heads=4)
        if module == "gpt2"
        else models.model("grouped")
    )
    assert imported(module, c, {}) == c
    with pytest.raises(ValueError, match=rf"^config.json.*{message}") as error:
        imported(module, c, changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "becomes"),
    [
        (
            {
                "pretraining_tp": 2,
                "torch_dtype": "bfloat16",
                "some_setting": 1,
                "architectures": None,
            },
            {},
        ),
        (
            {"model_type": "qwen3", "sliding_window": 4096, "max_window_layers": 2},
            {"qk_norm": True},
        ),
        ({"model_type": "mistral", "sliding_window": None}, {}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_scaling": RopeScaling("linear", 2.0)},
        ),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_theta": 9, "rope_type": "default"}},
            {"rope_base": 9.0},
        ),
    ],
)
def test_what_does_not_change_the_logits_is_no_hindrance(changes, becomes):
    c = models.model("grouped")
    assert imported("train", c, changes) == dataclasses.replace(c, **becomes)


def test_tensors_must_be_those_of_the_model():
    c = models.model("grouped")
    _, tensors = families.to_huggingface(zeros(c), c)

    def read(tensors, c=c):
        return families.names_of(c).from_tensors(tensors, train.Llama(c).table)

    with pytest.raises(
        ValueError, match=r"1 tensors are only in the files, or only in the model: lm_head.weight"
    ):
        read({k: v for k, v in tensors.items() if k != "lm_head.weight"})
    bias = {
        f"model.layers.{i}.self_attn.{x}_proj.bias": None for i in range(c.layers) for x in "qkv"
    }
    with pytest.raises(
        ValueError, match=r"9 tensors are only .* model: model.layers.0.self_attn.k_proj.bias, .* …"
    ):
        read(tensors | bias)
    for layers in (1, 5):
        with pytest.raises(
            ValueError, match=f"the files have 3 layers; config.json asks for {layers}"
        ):
            read(tensors, dataclasses.replace(c, layers=layers))
    read(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": None})
    # a tied table may be stated a second time
    read(tensors, dataclasses.replace(c, tied_embeddings=True))
    with pytest.raises(
        ValueError, match=r"mlp.up_proj.weight is \(31, 48\) .* config.json asks for \(32, 48\)"
    ):
        read(tensors | {"model.layers.1.mlp.up_proj.weight": np.zeros((48, 31), np.float32)})


def test_a_second_table_of_a_tied_model_must_be_the_first(exported, tmp_path):
    """transformers keeps both where they differ, and computes logits with the second."""
    _, _, directory = exported("tied")
    tensors = load_file(directory / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": 2 * table}, directory / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"^lm_head.weight differs from model.embed_tokens.weight, although .* tie_word",
    ):
        run(directory, tmp_path / "imported", check=False)


def test_a_config_of_quantized_weights_that_is_left_over_changes_nothing(exported, tmp_path):
    """With it, transformers asks for bitsandbytes."""
    _, _, directory = exported("grouped")
    change_config(
        directory, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}
    )
    run(directory, tmp_path / "imported")


def replace_matrices(directory, replace):
    """Puts other tensors in the place of the matrices of layers: what `replace` returns for a name
    and a matrix.
    """
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if "_proj" in name]:
        tensors |= replace(name, tensors.pop(name))
    save_file(tensors, path)


QUANTIZED = {
    "gptq": lambda name, x: {
        f"{name[:-6]}qweight": np.zeros((4, 8), np.int32),
        f"{name[:-6]}scales": np.ones(1),
    },
    "bitsandbytes": lambda name, x: {
        name: x.astype(np.int8),
        f"{name[:-6]}SCB": np.ones(len(x), np.float32),
    },
    "mxfp4": lambda name, x: {
        f"{name}_blocks": x.astype(np.uint8),
        f"{name}_scales": x[0].astype(np.uint8),
    },
    "compressed-tensors": lambda name, x: {
        name: x.astype(jnp.float8_e4m3fn),
        f"{name}_scale": np.ones((len(x), 1)),
    },
    "fp8": lambda name, x: {name: x.astype(jnp.float8_e4m3fn), f"{name}_scale_inv": np.ones(())},
    None: lambda name, x: {name: x.astype(np.int8)},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_named_as_such(exported, tmp_path, method):
    _, _, directory = exported("grouped")
    if method:
        change_config(directory, quantization_config={"quant_method": method})
    replace_matrices(directory, QUANTIZED[method])
    message = (
        f"the model is quantized \\(method {method or 'unknown'}; model.layers.0.* is "
        "[FIU].*Dequantize it first"
    )
    with pytest.raises(ValueError, match=message):
        run(directory, tmp_path / "imported")


@pytest.mark.parametrize("block", [None, [16, 20]])
def test_fp8_with_scales_of_blocks_is_dequantized_as_by_torch(exported, tmp_path, block):
    torch = pytest.importorskip("torch", reason="the oracle")
    from safetensors.torch import load_file as load_torch

    rng = np.random.default_rng(0)
    rows, columns = block or (128, 128)

    def quantize(name, x):
        scale = rng.uniform(0.001, 0.1, (-(-x.shape[0] // rows), -(-x.shape[1] // columns)))
        return {
            name: (x / scale.mean()).astype(jnp.float8_e4m3fn),
            f"{name}_scale_inv": scale.astype(np.float32),
        }

    _, _, directory = exported("grouped")
    if block:
        change_config(
            directory, quantization_config={"quant_method": "fp8", "weight_block_size": block}
        )
    replace_matrices(directory, quantize)
    assert "21 matrices dequantized from FP8" in run(directory, tmp_path / "imported")
    weights = models.read(tmp_path / "imported")[1]
    stored = load_torch(directory / "model.safetensors")
    w = stored["model.layers.1.mlp.down_proj.weight"]
    scale = stored["model.layers.1.mlp.down_proj.weight_scale_inv"]
    of_element = scale.repeat_interleave(rows, 0)[: len(w)].repeat_interleave(columns, 1)[
        :, : w.shape[1]
    ]
    np.testing.assert_array_equal(
        weights.layers.w_down[1].T, (w.to(torch.float32) * of_element).numpy()
    )
    other = [8, 8]  # with which the scales would be of more blocks
    change_config(
        directory, quantization_config={"quant_method": "fp8", "weight_block_size": other}
    )
    with pytest.raises(
        ValueError, match=r"its scale is \(\d, \d\), and it has \(16, 4\) blocks of \(8, 8\)"
    ):
        run(directory, tmp_path / "other")


def test_a_model_without_a_tokenizer_is_said_to_have_none(exported, tmp_path):
    _, _, directory = exported("grouped")
    said = run(directory, tmp_path / "imported", check=False)
    assert f"tokenizer  none: {directory} has no tokenizer.json" in said
    assert "tokenizer=<name or directory>" in said


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_weights_that_are_not_finite_are_refused(tmp_path, dtype):
    """Those too that no text of the comparison reaches."""
    broken = np.ones((64, 32), dtype)
    broken[5, 2] = np.nan
    save_file({"x": broken}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"x has values that are not finite: .* another copy"):
        tool.Tensors(tmp_path)["x"]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E8M0", "F64"])
def test_other_dtypes_are_refused_by_name(tmp_path, dtype):
    """safetensors reads some of them as NumPy arrays, and fails with an AttributeError at
    others.
    """
    size = 24 if dtype == "F64" else 3
    entry = {"model.norm.weight": {"dtype": dtype, "shape": [3], "data_offsets": [0, size]}}
    header = json.dumps(entry).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(size)
    )
    with pytest.raises(
        ValueError, match=rf"model.norm.weight is {dtype}; only F32, F16, BF16 can be read"
    ):
        tool.Tensors(tmp_path)["model.norm.weight"]


def test_user_mistakes(exported, tmp_path, monkeypatch):
    """None leaves a checkpoint, or a file."""
    _, _, directory = exported()
    output = tmp_path / "imported"

    def refuses(message, model=directory, **settings):
        with pytest.raises(ValueError, match=message):
            run(model, output, **settings)
        assert not output.exists()

    refuses(r"has no config.json: it is not a model", model=tmp_path)
    change_config(directory, bos_token_id=None)
    refuses(r"bos_token_id is None; give bos_id=")
    refuses(r"bos_id is 64; it must be an id of the vocabulary, at least 0 and below 64", bos_id=64)
    change_config(directory, bos_token_id=3, model_type="gemma")
    refuses("model_type is 'gemma', and shardwright has no model of that name")
    change_config(directory, model_type="llama", max_position_embeddings="${oc.env:HOME}")
    refuses(r"config.json: .*'max_position_embeddings' expected int")
    change_config(directory, max_position_embeddings=64)
    monkeypatch.setattr(
        train.Llama,
        "mask",
        masks.AttentionMask(mask_mod=(*masks.CAUSAL.mask_mod, masks.Window(64))),
    )
    refuses(r"^layer 0 has the attention mask `causal, same_document, Window\(size=64\)`")
    monkeypatch.undo()
    tensors = load_file(directory / "model.safetensors")
    save_file(
        tensors | {"model.norm.weight": np.ones(31, np.float32)}, directory / "model.safetensors"
    )
    refuses(r"model.norm.weight is \(31,\) .* config.json asks for \(32,\)")
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[:-100])
    refuses(r"cannot read .*model.safetensors: .* Copy or download it again")
    (directory / "model.safetensors").unlink()
    refuses(r"no model.safetensors.*from_pretrained\(…\).save_pretrained")


# ---- training.init_from --------------------------------------------------------------------------


def test_only_the_same_model_starts_from_weights(tmp_path, one_device, capsys):
    c = models.model("grouped")
    w = models.weights(c)
    source = models.save(tmp_path / "run", w, c)
    with pytest.raises(
        ValueError,
        match=r"(?s)another model:.*d_ff: checkpoint has 48, this run has 64\n  .*rope_base",
    ):
        start_weights(source, dataclasses.replace(c, d_ff=64, rope_base=7.0), w)
    # How weights are drawn at first is over; a longer context is what RoPE scaling is for.
    scaling = RopeScaling("linear", 2.0)
    start_weights(source, dataclasses.replace(c, weight_init_scale=2.0, rope_scaling=scaling), w)
    assert (
        "model.rope_scaling.factor: checkpoint does not have it, this run has 2.0"
        in capsys.readouterr().out
    )
    with pytest.raises(
        ValueError, match=r"no complete checkpoint in .*/checkpoints. Give the directory of a run"
    ):
        start_weights(tmp_path, c, w)


# no unembed, two new norms, and a longer table
OTHER = {"tied_embeddings": True, "qk_norm": True, "vocab": 80}
ALLOWED = {"init_from_missing": "fresh", "init_from_unused": "leave"}


@pytest.mark.long
def test_a_run_with_other_weights_takes_those_that_it_has(tmp_path, capsys):
    c = models.model("grouped")
    other = dataclasses.replace(c, **OTHER)
    record = {}
    with jax.set_mesh(tiny.mesh("d=2")):
        old = models.weights(c)
        source = models.save(tmp_path / "run", old, c)
    settings = models.settings(other, init_from=source, **ALLOWED)
    model = load_model(other)
    init = functools.partial(train.init_state, config=settings, model=model)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        fresh = jax.tree.map(
            np.asarray, jax.jit(init)(jax.random.key(settings.training.seed)).weights
        )
        state = fresh_state(trace_step(settings, model), record)
        assert all(
            jax.tree.leaves(
                jax.tree.map(lambda x, y: x.sharding == y.sharding, state.weights, shapes(other))
            )
        )
    new, old = (jax.tree.map(np.asarray, w) for w in (state.weights, old))
    np.testing.assert_array_equal(new.embed, np.concatenate([old.embed, fresh.embed[c.vocab :]]))
    for name in ("q_norm", "k_norm"):
        np.testing.assert_array_equal(getattr(new.layers, name), getattr(fresh.layers, name))
    taken = ("attention_norm", "w_q", "w_k", "w_v", "w_o", "mlp_norm", "w_gate", "w_up", "w_down")
    for name in taken:
        np.testing.assert_array_equal(getattr(new.layers, name), getattr(old.layers, name))
    np.testing.assert_array_equal(new.final_norm, old.final_norm)
    assert record["init_from"] == {
        "taken": ["embed", *(f"layers.{name}" for name in taken), "final_norm"],
        "made fresh": ["layers.q_norm", "layers.k_norm"],
        "made longer, with fresh rows": ["embed"],
        "left": ["unembed"],
    }
    assert not any(np.asarray(x).any() for x in jax.tree.leaves((state.adam_mu, state.adam_nu)))
    said = capsys.readouterr().out
    assert "after 5 steps; the optimizer's state is fresh" in said
    assert "  11 taken\n" in said
    assert "  2 made fresh: layers.q_norm, layers.k_norm\n" in said
    assert "  1 made longer, with fresh rows: embed\n" in said
    assert "  1 left: unembed\n" in said
    assert "model.vocab: checkpoint has 64, this run has 80" in said


def test_other_weights_are_refused_by_name(tmp_path, one_device):
    c = models.model("grouped")
    source = models.save(tmp_path / "run", models.weights(c), c)
    other = dataclasses.replace(c, **OTHER)
    for allowed, named, unnamed in (
        ("init_from_unused", ["embed: ", "layers/q_norm"], ["unembed"]),
        ("init_from_missing", ["unembed"], ["/embed", "q_norm"]),
    ):
        with pytest.raises(ValueError, match=r"Or give training\.init_from_missing=fresh") as error:
            start_weights(source, other, shapes(other), **{allowed: ALLOWED[allowed]})
        assert all(name in str(error.value) for name in named)
        assert not any(name in str(error.value) for name in unnamed)
    for name, value in (("d_ff", 64), ("rope_base", 7.0)):  # of what both have
        with pytest.raises(ValueError, match=f"another model:\n  model.{name}"):
            start_weights(
                source, dataclasses.replace(other, **{name: value}), shapes(other), **ALLOWED
            )
    sizes = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name != "module"}
    ones = family.ModelConfig(**sizes, norm_offset=True)
    with_ones = models.save(tmp_path / "ones", models.weights(ones), ones)
    with pytest.raises(
        ValueError, match=r"model\.norm_offset: checkpoint has True, this run does not have it"
    ):
        start_weights(with_ones, other, shapes(other), **ALLOWED)
    shorter = dataclasses.replace(c, vocab=48)
    with pytest.raises(
        ValueError, match=r"embed: checkpoint has 'float32\[64, 32\]', this run has 'float32\[48"
    ):
        start_weights(source, shorter, shapes(shorter), **ALLOWED)


def test_resuming_may_leave_the_source_out_but_not_change_it():
    c = models.model("grouped")
    saved, other, none = (
        dataclasses.asdict(models.settings(c, init_from=source))
        for source in ("runs/a", "runs/b", None)
    )

    def differences(now):
        return config_differences(saved, now, fixed_settings(saved, now))

    assert differences(saved) == differences(none) == []
    assert differences(other) == [
        "training.init_from: checkpoint has 'runs/a', this run has 'runs/b'"
    ]


def test_a_yarn_without_mscale_may_write_0():
    """As transformers reads it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    config = {"max_position_embeddings": 32}
    plain = families._scaling(yarn, config)
    assert families._scaling(yarn | {"mscale": 0.0, "mscale_all_dim": 0.0}, config) == plain
    assert families._scaling(yarn | {"mscale_all_dim": 0.5}, config) != plain
