"""Groups of axes in specs: `B/b` is `B/r/d/e`, `+b` is `+r +d +e`, and `*fsdp` is `*c *d *e`."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from shardlib import shardops
from shardlib.axes import GROUPS
from shardlib.parsing import ShardError, parse_op, parse_shape
from shardlib.shardtypes import f32, typed_shard_map
from tests.support.abstract_mesh import on_mesh, simulated_mesh

pytestmark = pytest.mark.quick


def in_full(text: str) -> str:
    """A spec with the axes of each group in its place."""
    between = {"/": "", "+": " ", "*": " "}
    return re.sub(
        r"([/+*])(b|fsdp)\b",
        lambda m: between[m[1]].join(m[1] + axis for axis in GROUPS[m[2]]),
        text,
    )


@pytest.mark.parametrize(
    ("text", "axes", "printed"),
    [
        ("B/b L/c/t M", "B/r/d/e L/c/t M", "B/b L/c/t M"),
        ("layers/p M/t/fsdp", "layers/p M/t/c/d/e", "layers/p M/t/fsdp"),
        ("V/t M/fsdp/p", "V/t M/c/d/e/p", "V/t M/fsdp/p"),
        ("B E +c +b", "B E +c +r +d +e", "B E +r +c +d +e"),
        ("K/t Q *fsdp", "K/t Q *c *d *e", "K/t Q *c *d *e"),
        ("+t +fsdp *r", "+t +c +d +e *r", "+t +c +d +e *r"),
    ],
)
def test_a_group_is_its_axes(text, axes, printed):
    assert in_full(text) == axes, "this file's own expansion"
    group = parse_shape(text)
    assert (group, hash(group), f32[text]) == (
        parse_shape(axes),
        hash(parse_shape(axes)),
        f32[axes],
    )
    assert str(group) == printed
    assert parse_op(f"{text}, {text} ->").lhs == parse_op(f"{axes}, {axes} ->").lhs


def sums_of_squares(spell):
    """Σ x w² on the mesh in force and its gradient by w, where `spell` writes each spec."""

    @jax.jit
    @typed_shard_map
    def run(
        w: f32[spell("M/fsdp")], x: f32[spell("B/b L/c M")]
    ) -> tuple[f32[""], f32[spell("M/fsdp")]]:
        def total(w):
            whole = shardops.all_gather(
                spell("M/fsdp -> M *fsdp"), shardops.replicate("... -> ... *r", w)
            )
            sums = shardops.einsum_unreduced(
                spell("B/b L/c M, M *fsdp, M *fsdp -> +b +c"), x, whole, whole
            )
            return shardops.psum(spell("+b +c ->"), sums)

        return jax.value_and_grad(total)(w)

    return run


MESHES = ["r=2 d=2 e=2", "d=4 c=2"]


@pytest.mark.parametrize("mesh", MESHES)
def test_ops_and_gradients_are_those_of_numpy_and_of_the_axes(mesh):
    """Also where the mesh lacks axes of the group."""
    rng = np.random.default_rng(0)
    w, x = (
        rng.standard_normal(8).astype(np.float32),
        rng.standard_normal((8, 4, 8)).astype(np.float32),
    )
    with jax.set_mesh(simulated_mesh(mesh)):
        found, written = (
            jax.tree.map(np.asarray, sums_of_squares(spell)(w, x)) for spell in (str, in_full)
        )
    for a, b, expected in zip(
        found, written, (np.sum(x * w**2), 2 * w * x.sum((0, 1))), strict=True
    ):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "M/fsdp/t",
            "dim M/fsdp/t has its axes in the wrong order: .*\n  groups of axes: fsdp = "
            "c/d/e\n.*write M/c/t/d/e",
        ),
        (
            "B/p/b",
            "dim B/p/b has its axes in the wrong order: .*\n  groups of axes: b = r/d/e\n.*write "
            "B/r/d/e/p",
        ),
        ("B/e/b", "spec 'B/e/b' names axis e more than once\n  groups of axes: b = r/d/e\n"),
        (
            "B/b M/fsdp",
            "spec 'B/b M/fsdp' names axis d more than once\n  groups of axes: b = r/d/e, fsdp = "
            "c/d/e\n",
        ),
        ("B/b +b", r"spec 'B/b \+b' names axis r more than once\n  groups of axes: b = r/d/e\n"),
    ],
)
def test_a_group_in_the_wrong_order_or_twice_is_refused(text, message):
    with pytest.raises(ShardError, match=message):
        parse_shape(text)


ON = AbstractMesh((2, 2, 2), ("d", "e", "c"), axis_types=(AxisType.Explicit,) * 3)
WRONG = {  # the body, the type of its result, and parts of the message
    "an annotation": (
        lambda rows: rows,
        "B/b M/c",
        ("f32['B/b M/c']: ", "value: `B/b M`, f32[1,8]"),
        "b = r/d/e",
    ),
    "an op": (
        lambda rows: shardops.einsum_unreduced("B/b M -> M", rows),
        "M",
        ("einsum_unreduced('B/b M -> M'): contracting B/b sums only", "operand 1: `B/b M`"),
        "b = r/d/e",
    ),
    "a mark": (
        lambda rows: shardops.psum("B M +fsdp -> B M", rows),
        "B M",
        ("psum('B M +fsdp -> B M'): operand 1", "operand 1: `B/b M`"),
        "b = r/d/e, fsdp = c/d/e",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_messages_name_the_group_as_it_is_written_and_its_axes_once(name):
    body, result, parts, groups = WRONG[name]
    with pytest.raises(ShardError) as refused:
        on_mesh(body, f32[result], ON, rows=f32["B/b M"])
    text = str(refused.value)
    assert [part for part in (*parts, f"\n  groups of axes: {groups}\n") if part not in text] == []
    assert text.count("groups of axes") == 1
    assert "B/r" not in text
