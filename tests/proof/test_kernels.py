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


def attention(q, k, v, bias=None, dropout_rate=0.0):
    """The gradients of q, k and v [B, T, heads, H], and of the bias [B, 1, T, S], from the kernels."""
    parameters = {"scale": 0.5, "seed": 1, "dropout_rate": dropout_rate, "mask_type": 2, "layout": 0}
    none = jnp.zeros(0, q.dtype)  # an operand that the call leaves out
    operands = q, k, v, none if bias is None else bias, *(none,) * 6
    statistics = q.transpose(0, 2, 1, 3)[..., 0]
    (out,) = forward.bind(*operands, results=(0,), **parameters)
    results = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    return backward.bind(*operands, statistics, out, 2 * out, results=results, **parameters)


def of_bias(over):
    """The gradient of a bias that heads share: a partial sum over the axes of the heads."""
    return lambda q, k, v, bias: jax.lax.psum(attention(q, k, v, bias)[3], over)


HEADS, EACH = P("d", None, "t"), P("d")
ENTRIES = P(None, None, None, "d")
PARTIAL = r"partial sum|\+t"
CASES = {  # how q and k are sharded, what runs, what is wrong
    "sequences and heads": (HEADS, HEADS, attention, None),
    "sequences": (P(("d", "t")), P(("d", "t")), attention, None),
    "positions": (P("d", "t"), P("d", "t"), attention, "taken together along dim 1, which is sharded over t"),
    "entries of a head": (ENTRIES, ENTRIES, attention, "along dim 3, which is sharded over d"),
    "heads of q alone": (P(None, None, "t"), P(), attention, "heads of keys and of queries are sharded differently"),
    "dropout": (EACH, EACH, lambda *x: attention(*x, dropout_rate=0.1), "each device drops entries by the same seed"),
    "gradient of a bias": (HEADS, HEADS, of_bias("t"), None),
    "gradient of a bias over others": (HEADS, HEADS, of_bias("d"), PARTIAL),
    "gradient of a bias over none": (HEADS, HEADS, of_bias(()), PARTIAL),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule(case):
    q, k, run, problem = CASES[case]
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H), (B, 1, T, T)]
    has_bias = "bias" in case
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes[: 4 if has_bias else 3]]
    specs = {"in_specs": (q, k, k, EACH)[: len(args)], "out_specs": EACH if has_bias else [q, k, k]}
    if problem is None:
        return check(run, *args, mesh=MESH, check_vma=False, **specs)
    with pytest.raises(ShardError, match=problem):
        check(run, *args, mesh=MESH, check_vma=False, **specs)
