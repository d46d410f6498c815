"""Weights that are gathered ahead, against what they are by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardlib.op_checks import varying
from shardlib.shardtypes import ShardError
from shardlib.values import is_opaque, unwrap
from shardwright.modeling.model import compute_scope, load_model
from shardwright.modeling.weights import gather_ahead, initialize
from shardwright.models import gpt2
from shardwright.run.step import trace_step
from tests.support import tiny
from tests.support.recipes import SOURCE, module_of

AXES = ("p", "r", "d", "t")
NORMS, MATRICES = "f32 layers/p M", "act layers/p M K/t D"
LLAMA = {  # of each weight: its dtype and type when it is gathered ahead
    **dict.fromkeys(["embed", "unembed"], "act V/t/p M"),
    **dict.fromkeys(["layers.attention_norm", "layers.mlp_norm"], NORMS),
    **dict.fromkeys(["layers.q_norm", "layers.k_norm"], "f32 layers/p D"),
    **dict.fromkeys(["layers.w_k", "layers.w_v"], MATRICES),
    "layers.w_q": "act layers/p M K/t Q D",
    "layers.w_o": "act layers/p K/t Q D M",
    **dict.fromkeys(["layers.w_gate", "layers.w_up"], "act layers/p M F/t"),
    "layers.w_down": "act layers/p F/t M",
    "final_norm": "f32 M",
}
GPT2 = {
    "embed": "act V/t/p M",
    "positions": "f32 P/t/p M",
    **{f"layers.{norm}_{kind}": NORMS for norm in ("attention", "mlp") for kind in ("gain", "bias")},
    **{f"layers.w_{name}": MATRICES for name in "qkv"},
    **{f"layers.b_{name}": "act layers/p K/t D" for name in "qkv"},
    "layers.w_o": "act layers/p K/t D M",
    **dict.fromkeys(["layers.b_o", "layers.b_down"], "act layers/p M"),
    "layers.w_up": "act layers/p M F/t",
    "layers.b_up": "act layers/p F/t",
    "layers.w_down": "act layers/p F/t M",
    **dict.fromkeys(["final_gain", "final_bias"], "f32 M"),
}
MODELS = {
    "llama": (tiny.model(layers=4, qk_norm=True, d_head=8), LLAMA),
    "gpt2": (gpt2.ModelConfig(vocab=64, positions=16, d_model=32, layers=4, heads=4, bos_id=0), GPT2),
}


def gathered(model, mesh) -> tuple[dict, dict]:
    """Of each weight that is gathered, in bf16: (blocks[device, …], dtype, axes that it is a copy over).

    And the whole weights, on the host.
    """
    noted = {}

    def per_device(w):
        found = jax.tree_util.tree_leaves_with_path(gather_ahead(tiny.at_rest(w)), is_leaf=is_opaque)
        found = {jax.tree_util.keystr(path).strip("."): unwrap(leaf) for path, leaf in found}
        noted.update({name: (leaf.dtype.name, set(leaf.axes)) for name, leaf in found.items()})
        return {name: varying(jax.tree.leaves(leaf)[0], mesh.axis_names)[None] for name, leaf in found.items()}

    with jax.set_mesh(mesh), compute_scope("bf16"):
        w = jax.jit(lambda key: initialize(model.table, key))(jax.random.key(3))
        specs = jax.tree.map(lambda x: x.sharding.spec, w)
        blocks = jax.jit(jax.shard_map(per_device, in_specs=(specs,), out_specs=P(mesh.axis_names)))(w)
    paths = jax.tree_util.tree_leaves_with_path(w)
    whole = {jax.tree_util.keystr(path).strip("."): np.asarray(x) for path, x in paths}
    return {name: (np.asarray(block), *noted[name]) for name, block in blocks.items()}, whole


def block_of(whole: np.ndarray, dims: list[str], place: dict[str, tuple[int, int]]) -> np.ndarray:
    """Of the device at `place`: of each axis the index and the size."""
    for i, dim in enumerate(dims):
        for axis in dim.split("/")[1:]:
            index, size = place[axis]
            whole = np.split(whole, size, i)[index]
    return whole


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), [("llama", "p=2 d=2 t=2"), ("gpt2", "r=2 d=2 t=2")])
def test_each_weight_that_is_gathered_ahead(name, mesh):
    """A matrix in the compute dtype, gathered over d; a gain in f32, over t and, outside of the layers, p too."""
    (c, expected), mesh = MODELS[name], tiny.mesh(mesh)
    found, whole = gathered(load_model(c), mesh)
    assert found.keys() == expected.keys()
    sizes = {axis: mesh.shape.get(axis, 1) for axis in AXES}
    for weight, (blocks, dtype, copies) in found.items():
        kind, *dims = expected[weight].split()
        assert dtype == {"act": "bfloat16", "f32": "float32"}[kind], weight
        assert copies == {*mesh.axis_names} - {axis for dim in dims for axis in dim.split("/")[1:]}, weight
        all_of_it = whole[weight].astype(jnp.bfloat16) if kind == "act" else whole[weight]
        for device, place in enumerate(np.ndindex(*sizes.values())):
            at = {axis: (i, sizes[axis]) for axis, i in zip(sizes, place, strict=True)}
            np.testing.assert_array_equal(blocks[device], block_of(all_of_it, dims, at))


def test_auto_gathers_once_where_there_is_nothing_to_gather():
    found = {}
    for mesh in ("one device", "t=8", "d=8", "r=2 d=2 t=2"):
        with jax.set_mesh(tiny.mesh(mesh)):
            settings = [tiny.config(gather_weights=setting) for setting in ("layer", "auto", "step")]
            found[mesh] = [tiny.forward(c).gathers_ahead for c in settings]
    alone, sharded = [False, True, True], [False, False, True]
    assert found == {"one device": alone, "t=8": alone, "d=8": sharded, "r=2 d=2 t=2": sharded}


@pytest.mark.parametrize(("how", "refused"), [("layer", "matmul"), ("step", "all_gather")])
def test_a_layer_that_does_not_gather_a_weight_is_refused_where_all_are_gathered_ahead_too(how, refused):
    old = '"M/fsdp F/t -> M F/t", w.w_up'
    assert SOURCE.count(old) == 1
    with module_of(SOURCE.replace(old, '"M/fsdp F/t -> M/fsdp F/t", w.w_up')) as changed_train:
        c = tiny.config(tiny.model(module="changed_train"), gather_weights=how)
        with jax.set_mesh(tiny.mesh("d=4 t=2")), pytest.raises(ShardError, match=refused):
            trace_step(c, load_model(c.model), spec=changed_train.SPEC).lower()
