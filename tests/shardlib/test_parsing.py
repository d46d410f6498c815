"""The grammar of spec strings: what parses, and to what. What does not is in refused_types.txt."""

import pytest

from shardlib.parsing import Dim, ShapeSpec, parse_op, parse_shape, sort_axes

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", ShapeSpec()),
        ("B", ShapeSpec((Dim("B"),))),
        ("B/d L M", ShapeSpec((Dim("B", ("d",)), Dim("L"), Dim("M")))),
        ("M/t/d", ShapeSpec((Dim("M", ("t", "d")),))),
        ("d_model/d 3", ShapeSpec((Dim("d_model", ("d",)), Dim("3")))),
        ("B/data/model", ShapeSpec((Dim("B", ("data", "model")),))),
        ("  B   L  ", ShapeSpec((Dim("B"), Dim("L")))),
        ("B +t", ShapeSpec((Dim("B"),), partial=("t",))),
        ("+d +t", ShapeSpec(partial=("t", "d"))),  # marks are a set, kept in the project's order
        ("M *d *r", ShapeSpec((Dim("M"),), copies=("r", "d"))),
        ("M *d +t", ShapeSpec((Dim("M"),), partial=("t",), copies=("d",))),
        ("[V/t] M", ShapeSpec((Dim("V", ("t",)), Dim("M")), index=0)),
        ("B [V/t]", ShapeSpec((Dim("B"), Dim("V", ("t",))), index=1)),
        ("... *r", ShapeSpec(copies=("r",), open=True)),
    ],
)
def test_shape(text, spec):
    assert parse_shape(text) == spec
    assert parse_shape(str(spec)) == spec


def test_shape_properties():
    spec = parse_shape("B/d L 3 +t")
    assert spec.names == ("B", "L", "3")
    assert spec.sharded == {"d"}
    assert [dim.literal_size for dim in spec.dims] == [None, None, 3]
    assert str(parse_shape("B/d  L [V/t] *r")) == "B/d L [V/t] *r"


@pytest.mark.parametrize(
    ("text", "operands", "printed"),
    [
        ("M/d F/t -> M F/t", 1, "M/d F/t -> M F/t"),
        ("B/d F/t,M F/t->B/d M +t", 2, "B/d F/t, M F/t -> B/d M +t"),
        ("B, B, -> B", 3, "B, B,  -> B"),
        ("+d +t ->", 1, "+t +d ->"),
    ],
)
def test_op(text, operands, printed):
    op = parse_op(text)
    assert len(op.lhs) == operands
    assert str(op) == printed


def test_axes_have_one_order_and_no_repeats():
    assert sort_axes(["x", "p", "d", "t", "r", "a", "d"]) == ("r", "t", "d", "p", "a", "x")
