import itertools
import time
import xml.etree.ElementTree

import pytest

from shardwright.inspect.compiled.files import show
from shardwright.inspect.compiled.picture import draw
from shardwright.program.compiling import with_mesh
from tests.support import step_text, tiny
from tests.support.hlo_texts import TEXT
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


@pytest.mark.long
def test_the_picture_of_a_step_with_eight_layers(tmp_path):
    """It is drawn within ten seconds, fits a screen's width, and can be read as it is."""
    path, mesh = tmp_path / "training_step_optimized_hlo_1.txt", tiny.mesh("d=4 t=2")
    compiled = step_text.compile_config(tiny.config(tiny.model(layers=8), microbatches=2), mesh)
    path.write_text(with_mesh(compiled.as_text(), mesh.shape))
    begin = time.monotonic()
    svg = show(path).read_text()
    assert time.monotonic() - begin < 10
    root = xml.etree.ElementTree.fromstring(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    assert width <= 1280
    assert height < 12_000
    assert min(float(text.get("font-size")) for text in root.iter(f"{SVG}text")) >= 11
    assert {"layers, forward × 8", "layers, backward × 8", "groups of microbatches × 2"} <= set(
        texts(svg)
    )
    of_lines = (rect for rect in root.iter(f"{SVG}rect") if rect.get("stroke") == "#dadce0")
    placed = [
        tuple(float(rect.get(key)) for key in ("x", "y", "width", "height")) for rect in of_lines
    ]
    assert len(placed) > 50
    for x, y, w, h in placed:
        assert 0 <= x < x + w <= width
        assert 0 <= y < y + h <= height
    edges = sorted((y, y + h) for _, y, _, h in placed)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(edges)), "boxes overlap"
    assert {entry.suffix for entry in tmp_path.iterdir()} == {".txt", ".json", ".svg"}
