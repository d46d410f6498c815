import itertools
import re
import time
import xml.etree.ElementTree

import pytest
import step_text
import tiny
from hlo_texts import TEXT

from shardwright.compiled.hlo import parse, with_mesh
from shardwright.compiled.picture import draw
from shardwright.compiled.show import show
from shardwright.compiled.step import describe
from shardwright.compiled.table import read_source

SVG = "{http://www.w3.org/2000/svg}"


def drawn(text, source=()):
    return draw(describe(parse(text)), dict(source))


def texts(svg):
    return [element.text for element in xml.etree.ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.quick
def test_a_picture_of_a_text_by_hand():
    svg = drawn(with_mesh(TEXT, {"d": 2, "t": 2}), {"train.py:20": "y = x @ w"})
    found = texts(svg)
    assert found[0] == "f: the compiled step, by source line"
    assert found[1].startswith("4 devices, d=2 t=2. In a step each device sends 960 B, multiplies 2.0 KFLOP, keeps 0 B")
    chips = ["all-gather t: sends 128 B, overlapped", "reduce-scatter d: sends 64 B", "8×8×16 f32: 2.0 KFLOP"]
    assert {"loop in f × 5", "y = x @ w", "along d", "along t", *chips} <= set(found)


@pytest.mark.quick
def test_what_a_file_says_is_text():
    """Names and lines of a program may be a stranger's."""
    svg = drawn(TEXT.replace("/home/x/train.py", "/home/x/<script>.py"), {"<script>.py:20": '"<a>&\x1b[2J</a>'})
    assert "<script>" not in svg
    assert "\x1b" not in svg
    assert any(text and text.startswith('"<a>&') for text in texts(svg))


def boxes(svg):
    root = xml.etree.ElementTree.fromstring(svg)
    number = lambda element, name: float(element.get(name))
    return [
        tuple(number(rect, key) for key in ("x", "y", "width", "height"))
        for group in root.iter(f"{SVG}g")
        for rect in list(group)[1:2]
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "training",
    [
        {},
        pytest.param({"unroll": None}, marks=pytest.mark.slow),
        pytest.param({"microbatches": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_picture_of_a_step_with_eight_layers(tmp_path, training):
    """It is drawn within ten seconds, opens with its title, fits a screen's width, and can be read as it is."""
    step = tiny.config(tiny.model(layers=8), **training)
    path = tmp_path / "training_step_optimized_hlo_1.txt"
    mesh = tiny.mesh("d=4 t=2")
    path.write_text(with_mesh(step_text.compile_config(step, mesh).as_text(), mesh.shape))
    begin = time.monotonic()
    picture = show(path)
    assert time.monotonic() - begin < 10
    svg = picture.read_text()
    root = xml.etree.ElementTree.fromstring(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    assert width <= 1280
    assert height < 12_000
    sizes = [float(text.get("font-size")) for text in root.iter(f"{SVG}text")]
    assert min(sizes) >= 11
    title = next(root.iter(f"{SVG}text"))
    assert float(title.get("x")) < 100
    assert float(title.get("y")) < 100
    found = texts(svg)
    in_a_loop = "" if training.get("unroll", 1) else ", without a loop"
    assert found.count(f"layers, forward × 8{in_a_loop}") == found.count(f"layers, backward × 8{in_a_loop}") == 1
    assert ("microbatches × 2" in found) == (training == {"microbatches": 2})
    placed = boxes(svg)
    assert len(placed) > 50
    for x, y, w, h in placed:
        assert 0 <= x < x + w <= width
        assert 0 <= y < y + h <= height
    edges = sorted((y, y + h) for _, y, _, h in placed)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(edges)), "boxes overlap"
    assert {entry.suffix for entry in tmp_path.iterdir()} == {".txt", ".json", ".svg"}


@pytest.mark.quick
def test_lines_of_files_that_changed_since_are_left_out(tmp_path):
    (tmp_path / "shardlib").mkdir()
    (tmp_path / "train.py").write_text("a\n" * 9 + "  tenth = 1\n")
    step = describe(parse(TEXT.replace("/home/x", str(tmp_path))))
    changed = (tmp_path / "train.py").stat().st_mtime
    assert read_source(step, changed) == {"train.py:10": "tenth = 1"}
    assert read_source(step, changed - 1) == {}
    assert not re.search("tenth", drawn(TEXT))
