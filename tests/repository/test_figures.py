"""Figures in README and docs/status.md follow from docs/measurements.md, which says how each was
measured.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.quick


def text_of(page: str) -> str:
    """A page on one line, without marks of quotes."""
    return " ".join((ROOT / page).read_text().replace("\n> ", "\n").split())


MEASURED = text_of("docs/measurements.md")


def row(first: str) -> list[str]:
    """The other cells of the only row that begins with this cell."""
    page = (ROOT / "docs/measurements.md").read_text()
    (found,) = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in found.strip("| ").split("|")][1:]


def numbers(text: str) -> list[str]:
    """The numbers of a sentence that has # in their place."""
    found = re.search(re.escape(text).replace(r"\#", r"([\d.,]*\d)"), MEASURED)
    assert found, text
    return [*found.groups()]


def span(values: list[str] | list[float]) -> str:
    low, high = (f"{limit(map(float, values)):.2f}" for limit in (min, max))
    return low if low == high else f"{low} to {high}"


def against(column: int, *sizes: str) -> list[str]:
    """Our speed on a CPU relative to that of the contestant of a column."""
    return [ratio for size in sizes for ratio in re.findall(r"\(([\d.]+)\)", row(size)[column])]


def on_h100(contestant: str) -> str:
    return span([row(f"{size}, {contestant}")[2] for size in ("270m", "1b")])


def predicted() -> list[tuple[float, float]]:
    """Our time and memory, relative to plain JAX, of the programs that XLA compiled for H100s."""
    programs = [f"{size}_{mesh}" for size in ("124m", "1b", "2b") for mesh in ("d8", "r4d8")]
    return [
        (float(time), float(memory))
        for time, memory in (row(name)[-1].split(", ") for name in programs)
    ]


def of_plans() -> list[float]:
    """Measured time of our runs on an H100, as a share of the planned time."""
    runs = [
        re.findall(r"[\d.]+", row(name)[0]) for name in ("first_chip", "gpt2_124m", "270m", "1b")
    ]
    return [float(measured) / float(planned) for measured, planned in runs]


CLAIMS = {
    "README.md": lambda: [
        f"| one H100, plain JAX, 270M and 1B | {on_h100('plain JAX')} |",
        f"| one H100, `torch.compile`, 270M and 1B | {on_h100('torch.compile')} |",
        f"{on_h100('torch.compile')}× as fast as `torch.compile`",
        "| eight devices simulated by two CPU cores, seqax | "
        f"{span(against(3, 'demo') + numbers('#–#× as fast as seqax'))} |",
        f"| one CPU device, `torch.compile` | "
        f"{span(against(2, '2m', '10m') + numbers('2m is #× as fast'))} |",
        f"XLA predicts that shardwright is {span([1 / time for time, _ in predicted()])} times as "
        "fast as plain JAX",
        f"Our own runs on one H100 took {span(of_plans())} of the predicted time",
        f"and needs {span([memory for _, memory in predicted()])} times the memory",
    ],
    "docs/status.md": lambda: [
        f"| 270M on one H100 | {row('270m, ours')[0]} tokens/s | "
        f"{numbers('270m makes # tokens/s')[0]} |",
    ],
}


@pytest.mark.parametrize("page", CLAIMS)
def test_figures_are_those_of_the_measurements(page):
    text = text_of(page)
    assert [claim for claim in CLAIMS[page]() if claim not in text] == []
