"""The rule of cuDNN's attention. JAX traces it on a machine with a GPU alone: a primitive of its name stands for it."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from shardlib.parsing import ShardError
from shardlib.proof.check import check

MESH = AbstractMesh((2, 4), ("d", "t"))
B, T, N, K, H = 8, 16, 8, 4, 6
forward, backward = (Primitive(f"dot_product_attention_{way}_wrapper") for way in ("fwd", "bwd"))
for _primitive in (forward, backward):
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(lambda *avals, results, **_: [avals[i] for i in results])


def attention(
    q,
    k,
    v,
    bias=None,
    dropout_rate=0.0,
):
    """The gradients of q, k and v [B, T, heads, H], and of the bias [B, 1, T, S], from the kernels."""
    parameters = {"scale": 0.5, "seed": 1, "dropout_rate": dropout_rate, "mask_type": 2, "layout": 0}
    none = jnp.zeros(0, q.dtype)  # an operand that the call leaves out
    operands = q, k, v, none if bias is None else bias, *(none,) * 6
    statistics = q.transpose(0, 2, 1, 3)[..., 0]
    (out,) = forward.bind(*operands, results=(0,), **parameters)
    results = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    return backward.bind(*operands, statistics, out, 2 * out, results=results, **parameters)


def shapes(heads: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16)


CASES = {  # how q and k are sharded, what is wrong
    "sequences and heads": (P("d", None, "t"), P("d", None, "t"), {}, None),
    "sequences": (P(("d", "t")), P(("d", "t")), {}, None),
    "positions": (P("d", "t"), P("d", "t"), {}, "attention runs along dim 1, which is sharded over t"),
    "entries of a head": (
        P(None, None, None, "d"),
        P(None, None, None, "d"),
        {},
        "along dim 3, which is sharded over d",
    ),
    "heads of q alone": (P(None, None, "t"), P(), {}, "heads of keys are sharded otherwise"),
    "dropout": (P("d"), P("d"), {"dropout_rate": 0.1}, "each device drops entries by the same seed"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule(case):
    q, k, options, problem = CASES[case]
    run = lambda *x: attention(*x, **options)
    specs = {"in_specs": (q, k, k), "out_specs": [q, k, k], "check_vma": False}
    args = shapes(N), shapes(K), shapes(K)
    if problem is None:
        return check(run, *args, mesh=MESH, **specs)
    with pytest.raises(ShardError, match=problem):
        check(run, *args, mesh=MESH, **specs)


@pytest.mark.parametrize("over", ["t", "d", None])
def test_the_gradient_of_a_bias_that_heads_share_is_a_partial_sum(over):
    q, each = P("d", None, "t"), P("d")

    def run(q, k, v, bias):
        g = attention(q, k, v, bias)[3]
        return jax.lax.psum(g, over) if over else g

    specs = {"in_specs": (q, q, q, each), "out_specs": each, "check_vma": False}
    args = shapes(N), shapes(K), shapes(K), jax.ShapeDtypeStruct((B, 1, T, T), jnp.bfloat16)
    if over == "t":
        return check(run, *args, mesh=MESH, **specs)
    with pytest.raises(ShardError, match=r"partial sum|\+t"):
        check(run, *args, mesh=MESH, **specs)
