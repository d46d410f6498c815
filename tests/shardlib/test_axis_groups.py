"""Groups of axes in specs: `B/b` is `B/r/d/e`, `+b` is `+r +d +e`, and `*fsdp` is `*c *d *e`."""

import pytest
from jax.sharding import AbstractMesh, AxisType

from shardlib import shardops
from shardlib.parsing import ShardError, parse_op, parse_shape
from shardlib.shardtypes import f32
from tests.support.abstract_mesh import on_mesh

pytestmark = pytest.mark.quick


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "M/fsdp/t",
            "dim M/fsdp/t has its axes in the wrong order: .*\n  groups of axes: fsdp = "
            "c/d/e\n.*write M/c/t/d/e",
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


def test_messages_name_the_group_as_it_is_written_and_its_axes_once():
    mesh = AbstractMesh((2, 2, 2), ("d", "e", "c"), axis_types=(AxisType.Explicit,) * 3)
    with pytest.raises(ShardError) as refused:
        on_mesh(
            lambda rows: shardops.psum("B M +fsdp -> B M", rows),
            f32["B M"],
            mesh,
            rows=f32["B/b M"],
        )
    text = str(refused.value)
    assert "psum('B M +fsdp -> B M'): operand 1" in text
    assert "operand 1: `B/b M`" in text
    assert "\n  groups of axes: b = r/d/e, fsdp = c/d/e\n" in text
    assert text.count("groups of axes") == 1
    assert "B/r" not in text
