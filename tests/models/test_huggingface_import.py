"""A model of transformers gives the same logits here, on any mesh, and continues training; or is
refused by name.
"""

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import hydra
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import train
from shardlib.shardtypes import make_shardings
from shardwright.huggingface import families
from shardwright.modeling.model import load_model
from shardwright.modeling.weights import shapes_of
from shardwright.program.checks import register_schema, to_config
from shardwright.program.resume import fresh_state, open_run, read_weights
from shardwright.program.step import trace_step
from shardwright.tools import huggingface_to_checkpoint as tool
from tests.support import huggingface_models as models
from tests.support import tiny
from tests.support.huggingface_models import export
from tests.support.huggingface_models import to_run as run
from tests.support.transformers_models import theirs

# Not by `importorskip`, which would import it where tests are only collected.
pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers reads config.json"),
    pytest.mark.usefixtures("no_hashes"),
]
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
    assert f"tokenizer  none: {directory} has no tokenizer.json" in said
    register_schema()
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        overrides = [
            "model=imported",
            "data.filespec=x",
            f"hydra.searchpath=[file://{tmp_path}/imported]",
        ]
        composed = hydra.compose("local_text", overrides)
    assert to_config(composed).model == c
    with open_run(str(tmp_path / "imported"), None, True) as opened:
        assert opened.config.model == c
    with pytest.raises(ValueError, match=r"output is .*imported, which has checkpoints already"):
        run(directory, tmp_path / "imported")


def test_models_on_the_hub_are_downloaded(tmp_path, monkeypatch):
    """This one is in several files."""
    import huggingface_hub

    directory = tmp_path / "model"
    theirs("Llama", head_dim=8).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(directory)
    )
    run("someone/some-model", tmp_path / "imported")
    assert asked == [(("someone/some-model",), {"allow_patterns": tool.FILES})]


# ---- refusals ------------------------------------------------------------------------------------


def zeros(c):
    """Weights of a model, all 0."""
    return jax.tree.map(lambda w: np.zeros(w.shape, np.float32), load_model(c).table)


def test_tensors_must_be_those_of_the_model():
    c = models.model("grouped")
    _, tensors = families.to_huggingface(zeros(c), c)

    def read(tensors, c=c):
        return families.names_of(c).from_tensors(tensors, train.Llama(c).table)

    with pytest.raises(
        ValueError, match=r"1 tensors are only in the files, or only in the model: lm_head.weight"
    ):
        read({k: v for k, v in tensors.items() if k != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"1 tensors are only .*layers.0.self_attn.k_proj.bias"):
        read(tensors | {"model.layers.0.self_attn.k_proj.bias": None})
    with pytest.raises(ValueError, match=r"the files have 3 layers; config\.json asks for 1"):
        read(tensors, dataclasses.replace(c, layers=1))
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


def replace_matrices(directory, replace):
    """Puts other tensors in the place of the matrices of layers: what `replace` returns for a name
    and a matrix.
    """
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if "_proj" in name]:
        tensors |= replace(name, tensors.pop(name))
    save_file(tensors, path)


def test_fp8_with_scales_of_blocks_is_dequantized_as_by_torch(exported, tmp_path):
    torch = pytest.importorskip("torch", reason="the oracle")
    from safetensors.torch import load_file as load_torch

    rng = np.random.default_rng(0)
    rows, columns = block = [16, 20]

    def quantize(name, x):
        scale = rng.uniform(0.001, 0.1, (-(-x.shape[0] // rows), -(-x.shape[1] // columns)))
        return {
            name: (x / scale.mean()).astype(jnp.float8_e4m3fn),
            f"{name}_scale_inv": scale.astype(np.float32),
        }

    _, _, directory = exported("grouped")
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


def test_weights_that_are_not_finite_or_of_another_dtype_are_refused(tmp_path):
    """Those too that no text of the comparison reaches."""
    broken = np.ones((64, 32), jnp.bfloat16)
    broken[5, 2] = np.nan
    save_file({"x": broken, "y": np.ones(3)}, tmp_path / "model.safetensors")
    tensors = tool.Tensors(tmp_path)
    with pytest.raises(ValueError, match=r"x has values that are not finite: .* another copy"):
        tensors["x"]
    with pytest.raises(ValueError, match="y is F64; only F32, F16, BF16 can be read"):
        tensors["y"]


# ---- training.init_from --------------------------------------------------------------------------


# no unembed, two new norms, and a longer table
OTHER = {"tied_embeddings": True, "qk_norm": True, "vocab": 80}
ALLOWED = {"init_from_missing": "fresh", "init_from_unused": "leave"}


def test_a_run_with_other_weights_takes_those_that_it_has(tmp_path, capsys):
    c = models.model("grouped")
    other = dataclasses.replace(c, **OTHER)
    record = {}
    with jax.set_mesh(tiny.mesh("d=2")):
        old = models.weights(c)
        source = models.save(tmp_path / "run", old, c)
    settings = models.settings(other, init_from=source, **ALLOWED)
    model = load_model(other)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        fresh = tiny.state(settings, settings.training.seed).weights
        state = fresh_state(trace_step(settings, model), record)
        placed = jax.tree.map(lambda x, y: x.sharding == y.sharding, state.weights, shapes(other))
    assert all(jax.tree.leaves(placed))
    new, old, fresh = (jax.tree.map(np.asarray, w) for w in (state.weights, old, fresh))
    taken = ("attention_norm", "w_q", "w_k", "w_v", "w_o", "mlp_norm", "w_gate", "w_up", "w_down")
    expected = {name: getattr(old.layers, name) for name in taken}
    expected |= {name: getattr(fresh.layers, name) for name in ("q_norm", "k_norm")}
    for name, x in expected.items():
        np.testing.assert_array_equal(getattr(new.layers, name), x)
    np.testing.assert_array_equal(new.embed, np.concatenate([old.embed, fresh.embed[c.vocab :]]))
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
    assert "  2 made fresh: layers.q_norm, layers.k_norm\n" in said
    assert "model.vocab: checkpoint has 64, this run has 80" in said


@pytest.mark.parametrize(
    ("changes", "allowed", "message"),
    [
        (
            OTHER,
            {"init_from_unused": "leave"},
            r"(?s)embed: .*layers/q_norm.*init_from_missing=fresh",
        ),
        (OTHER, {"init_from_missing": "fresh"}, r"(?s)unembed.*init_from_missing=fresh"),
        (OTHER | {"rope_base": 7.0}, ALLOWED, "another model:\n  model.rope_base"),
    ],
)
def test_another_model_does_not_start_from_weights(tmp_path, one_device, changes, allowed, message):
    c = models.model("grouped")
    source = models.save(tmp_path / "run", models.weights(c), c)
    other = dataclasses.replace(c, **changes)
    with pytest.raises(ValueError, match=message):
        start_weights(source, other, shapes(other), **allowed)
