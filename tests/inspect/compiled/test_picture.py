import xml.etree.ElementTree

import pytest

from shardwright.inspect.compiled.picture import draw
from tests.inspect.compiled.hlo_texts import TEXT
from tests.support.step_text import table_of

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in xml.etree.ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.quick
def test_a_picture_of_a_text_by_hand():
    table = table_of(TEXT, {"d": 2, "t": 2})
    table.source["train.py:20"] = "y = x @ w"
    svg = draw(table)
    found = texts(svg)
    assert found[0] == "f: the compiled step, by source line"
    assert (
        found[1]
        == "4 devices, d=2, t=2. In a step a device sends 960 B; a device multiplies 2.05 kFLOP"
    )
    chips = ["all-gather t, overlapped: 128 B", "reduce-scatter d: 64 B", "8×8×16 f32: 2.05 kFLOP"]
    assert {"loop in f × 5", "y = x @ w", "along d", "along t", *chips} <= set(found)
    squares = [
        x
        for x in xml.etree.ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if x.get("width") == "11"
    ]
    legend = {square.get("fill") for square in squares if float(square.get("y")) < 100}
    assert len(legend) == 2 + 1 + 4, "axes, matmul, phases"
    assert {square.get("fill") for square in squares} == legend


@pytest.mark.quick
def test_what_a_file_says_is_text():
    """Names and lines of a program may be a stranger's."""
    table = table_of(TEXT.replace("/home/x/train.py", "/home/x/<script>.py"))
    table.source["<script>.py:20"] = '"<a>&\x1b[2J</a>'
    svg = draw(table)
    assert "<script>" not in svg
    assert "\x1b" not in svg
    assert any(text and text.startswith('"<a>&') for text in texts(svg))
