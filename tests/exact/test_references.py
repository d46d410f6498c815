"""Kernels and primitives without rules: refused by name, and with a reference checked as that."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from shardlib.exact import check, reference
from shardlib.parsing import ShardError

MESH = AbstractMesh((2, 4), ("d", "t"))
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
ROWS, BLOCKS = P("d"), P("d", "t")


def center_in_place(x, out):
    out[...] = x[...] - x[...].mean(-1, keepdims=True)


def center_on_host(x):
    return x - x.mean(-1, keepdims=True)


def by_pallas(x):
    return pl.pallas_call(
        center_in_place, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


def by_named_pallas(x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(center_in_place, out_shape=out, name="center", interpret=True)(x)


def by_callback(x):
    return jax.pure_callback(center_on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


centered = Primitive("centered")
centered.def_abstract_eval(lambda x, *, dim: x)


def by_primitive(x):
    return centered.bind(x, dim=1)


def center(x, dim=1):
    return x - x.mean(dim, keepdims=True)


KERNELS = {
    "center_in_place": by_pallas,
    "center": by_named_pallas,
    "center_on_host": by_callback,
    "centered": by_primitive,
}


def specs(spec):
    return {"in_specs": spec, "out_specs": spec, "check_vma": False}


@pytest.mark.parametrize("name", KERNELS)
def test_what_has_no_rule_is_checked_as_its_reference(name):
    kernel = KERNELS[name]
    message = (
        rf"test_references.py:\d+: \w+: .* no rule for {name}: .*exact.reference\('{name}', "
        rf"function\)`\nnot decided"
    )
    with pytest.raises(ShardError, match=message):
        check(kernel, X, mesh=MESH, **specs(ROWS))
    with reference(name, center):
        check(kernel, X, mesh=MESH, **specs(ROWS))
        with pytest.raises(ShardError, match=r"\nwrong: "):
            check(kernel, X, mesh=MESH, **specs(BLOCKS))
    with pytest.raises(ShardError, match="no rule"):
        check(kernel, X, mesh=MESH, **specs(ROWS))


def test_a_function_with_a_partitioning_of_its_own_is_looked_into():
    @custom_partitioning
    def double(x):
        return 2 * x

    double.def_partition(None, None, sharding_rule="i j -> i j")
    check(double, X, mesh=MESH, **specs(BLOCKS))
    with pytest.raises(ShardError, match=r"\nwrong: "):
        check(lambda x: jax.lax.psum(double(x), "t"), X, mesh=MESH, **specs(BLOCKS))


# ---- cuDNN's attention, which JAX traces on a machine with a GPU alone: a primitive of its name st

forward = Primitive("dot_product_attention_fwd_wrapper")
forward.multiple_results = True
forward.def_abstract_eval(lambda *avals, **_: avals[:1])


def attention(q, k, v):
    """By the kernel, with the operands that JAX gives it; those left out are empty."""
    none = jnp.zeros(0, q.dtype)
    return forward.bind(
        q, k, v, *(none,) * 8, scale=0.5, seed=1, dropout_rate=0.0, mask_type=2, layout=0
    )[0]


def attend(q, k, v, *_, scale, mask_type, **options):
    del options
    assert mask_type == 2  # causal
    return [
        jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation="xla")
    ]


HEADS = P("d", None, "t")


@pytest.mark.parametrize(
    ("q", "k", "is_right"),
    [
        (HEADS, HEADS, True),
        (P(("d", "t")), P(("d", "t")), True),
        (P("d", "t"), P("d", "t"), False),
        (HEADS, P("d"), False),
    ],
    ids=["heads", "sequences", "positions", "heads of queries alone"],
)
def test_attention_by_a_kernel(q, k, is_right):
    shapes = [jax.ShapeDtypeStruct((8, 8, heads, 5), jnp.bfloat16) for heads in (16, 4, 4)]
    options = {"in_specs": (q, k, k), "out_specs": q, "check_vma": False}
    with reference(forward.name, attend):
        if is_right:
            return check(attention, *shapes, mesh=MESH, **options)
        with pytest.raises(ShardError, match=r"\nwrong: "):
            check(attention, *shapes, mesh=MESH, **options)
