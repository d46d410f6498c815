"""Groups of axes in specs: `B/b` is `B/r/d/e`, `+b` is `+r +d +e`, and `*fsdp` is `*c *d *e`."""

import pytest

from shardlib.parsing import parse_op, parse_shape
from shardlib.shardtypes import f32

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
