import io
import math

import pytest
from rich.console import Console

from shardwright.run.terminal import Sparkline, Terminal

PARTS = ["loss 2.571", "validation 2.625", "18.5k tokens/s", "MFU 43.1%", "grad_norm 0.41"]


def live_line(width, encoding="utf-8", total=500, parts=PARTS):
    """The live line after seven steps, as plain text."""
    file = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace")
    options = {"force_terminal": True, "width": width, "legacy_windows": False, "color_system": None}
    terminal = Terminal(Console(file=file, **options), 0, total, 10)
    for step in range(1, 8):
        terminal.show(step, "0:01:05", 9.0 - step, parts)
    terminal.close()
    page = Console(file=file, **options)
    with page.capture() as captured:
        page.print(terminal)
    return captured.get()


@pytest.mark.parametrize("width", [1, 5, 12, 20, 30, 40, 60, 80, 100, 140, 200])
def test_the_live_line_is_one_line_at_any_width(width):
    (line,) = live_line(width).splitlines()
    assert len(line) <= width


def test_step_bar_and_eta_come_first_and_what_does_not_fit_is_left_out():
    assert live_line(80).startswith("step 7/500 ")
    assert live_line(80).rstrip().endswith("ETA 0:01:05  loss 2.571 █▇▆▅▃▂▁  validation 2.625")
    assert live_line(95).rstrip().endswith("validation 2.625  18.5k tokens/s")
    assert live_line(40).rstrip().endswith("ETA 0:01:05")
    assert live_line(200).rstrip().endswith("  ".join(PARTS[1:]))
    assert live_line(80, total=1_000_000).startswith("step 7/1000000 ")


def test_a_terminal_without_blocks_gets_no_sparkline():
    assert "loss 2.571  validation" in live_line(200, "ascii")


def test_a_line_is_of_one_moment():
    """Another thread renders it."""
    terminal = Terminal(Console(file=io.StringIO()), 0, 500, 10)
    terminal.show(1, "0:01:05", 9.0, PARTS)

    class Page(Console):
        encoding = property(lambda self: terminal.show(2, "", 8.0, ["loss 8.000"]) or "utf-8")

    plain = Console(file=io.StringIO(), width=200)
    (found,) = terminal.__rich_console__(Page(file=io.StringIO()), plain.options)
    plain.print(found)
    assert plain.file.getvalue().startswith("step 1/500 ")
    assert "loss 2.571" in plain.file.getvalue()


def test_strange_texts_cannot_move_the_cursor():
    assert "\x1b[2J" not in live_line(200, parts=["loss 1", "own\x1b[2J 3"])


def test_at_the_end_the_live_line_is_gone_and_the_last_step_remains():
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=True, width=80, legacy_windows=False), 0, 500, 10)
    terminal.show(120, "0:01:05", 2.5, PARTS)
    terminal.close()
    terminal.close()
    *_, last, its_rest = out.getvalue().splitlines()  # 83 columns, broken between words
    assert f"{last} {its_rest}".endswith("step 120/500  " + "  ".join(PARTS))
    assert "ETA" not in last


# ---- sparkline --------------------------------------------------------------------------------------------------


def sparkline(losses):
    line = Sparkline()
    for loss in losses:
        line.add(loss)
    return str(line)


def test_a_sparkline_has_the_means_of_equal_parts():
    assert sparkline([]) == sparkline([1.0]) == ""
    assert sparkline([2.0, 1.0]) == "█▁"
    assert sparkline([1.0, 1.0, 1.0]) == "▁▁▁"
    assert sparkline([float(8 - i // 4) for i in range(32)]) == "█▇▆▅▄▃▂▁"
    assert sparkline([2.0, math.nan, "NaN", math.inf, 1.0]) == "█▁"


@pytest.mark.parametrize("count", [1023, 1024, 5000, 40_000])
def test_a_sparkline_of_many_steps_has_the_same_shape_and_bounded_memory(count):
    line = Sparkline()
    for i in range(count):
        line.add(8 - 8 * i / count)
    assert str(line) == "█▇▆▅▄▃▂▁"
    assert len(line._means) < 1024
