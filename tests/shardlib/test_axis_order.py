"""A dim keeps the axes that shard it, in their order: JAX's types know neither, and another order
permutes the data. Groups of axes: `B/b` is `B/r/d/e`, `+b` is `+r +d +e`, `*fsdp` is `*c *d *e`.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from shardlib import shardops
from shardlib.axes import AXIS_ORDER
from shardlib.parsing import ShardError, parse_op, parse_shape
from shardlib.shardtypes import f32, make_shardings, typed, typed_shard_map

pytestmark = pytest.mark.quick
MESH = AbstractMesh((2,) * 4, ("d", "e", "c", "t"), axis_types=(AxisType.Explicit,) * 4)


@typed
def summed(y: f32["N/c/t"]) -> f32[""]:
    return shardops.psum("+t +c ->", shardops.einsum_unreduced("N/c/t -> +t +c", y))


def gathered_after_exchange(x):
    return shardops.all_gather("M N/c/t -> M N", shardops.all_to_all("M/c N/t -> M N/t/c", x))


CASES = {
    "op": ("M/t/c", lambda x: shardops.all_gather("M/c/t -> M", x)),
    "what jnp made": ("M/t/c", lambda x: shardops.all_gather("M/c/t -> M", 2 * x)),
    "other axes beside": ("M/t/fsdp", lambda x: shardops.all_gather("M/c/t/d/e -> M/c/t", x)),
    "einsum": ("M/c/t", lambda x: shardops.einsum_unreduced("M/t/c -> +t +c", x)),
    "rearrange": ("M/c/t", lambda x: shardops.rearrange("(M/t/c N) -> M/t/c N", x, N=2)),
    "all_to_all": ("M/t/c N", lambda x: shardops.all_to_all("M/c/t N -> M/c N/t", x)),
    "result of an op": ("M/c N/t", gathered_after_exchange),
    "call": ("M/t/c", summed),
    "two dims": ("M/d N/e", lambda x: shardops.all_gather("M/e N/d -> M N", x)),
}


def traced(type_of_x: str, body) -> None:
    @typed_shard_map
    def run(x: f32[type_of_x]) -> f32[""]:
        body(x)
        return jnp.float32(0)

    with jax.sharding.use_abstract_mesh(MESH):
        shape = [16] * len(parse_shape(type_of_x).dims)
        sharding = make_shardings(f32[type_of_x])
        jax.eval_shape(run, jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))


@pytest.mark.parametrize("name", CASES)
def test_no_value_gets_another_order(name):
    message = r" becomes .*: a device would mistake its block for another one"
    with pytest.raises(ShardError, match=message):
        traced(*CASES[name])


@pytest.mark.parametrize("axes", ["t/c", "c/t"])
def test_either_order_is_kept(axes):
    def body(x):
        shardops.all_gather(f"N/{axes} -> N", x)  # a value may have another name
        shardops.all_gather(f"M/{axes} -> M", 2 * x)
        y = jnp.zeros((8, 8)) + shardops.axis_index("c") + x[0]
        return shardops.all_to_all("N/c M/t -> N M/t/c", y)

    traced(f"M/{axes}", body)


def test_only_t_and_c_have_two_orders():
    for a, b in itertools.permutations(AXIS_ORDER, 2):
        if AXIS_ORDER.index(a) < AXIS_ORDER.index(b) or {a, b} == {"t", "c"}:
            assert parse_shape(f"M/{a}/{b}").dims[0].axes == (a, b)
            continue
        with pytest.raises(ShardError, match=f"write M/{b}/{a}"):
            parse_shape(f"M/{a}/{b}")


@pytest.mark.parametrize(
    ("text", "axes", "printed"),
    [
        ("B/b L/c/t M", "B/r/d/e L/c/t M", "B/b L/c/t M"),
        ("V/t M/fsdp/p", "V/t M/c/d/e/p", "V/t M/fsdp/p"),
        ("B E +c +b", "B E +c +r +d +e", "B E +r +c +d +e"),
        ("K/t Q *fsdp", "K/t Q *c *d *e", "K/t Q *c *d *e"),
        ("+t +fsdp *r", "+t +c +d +e *r", "+t +c +d +e *r"),
    ],
)
def test_a_group_is_its_axes(text, axes, printed):
    group, same = parse_shape(text), parse_shape(axes)
    assert (group, hash(group), f32[text]) == (same, hash(same), f32[axes])
    assert str(group) == printed
    assert parse_op(f"{text}, {text} ->").lhs == parse_op(f"{axes}, {axes} ->").lhs
