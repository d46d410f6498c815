"""Fits the constants of all chips, and writes them, how near plans are, and the tables of
docs/plan.md, together.

FIGURES also has a digest of what plans are made of, so that a test fails when they are older.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.plan.published.calibration import (
    ACHIEVED,
    Figures,
    Pair,
    figures,
    fit,
    held_out,
    picked,
    scores,
    traced,
)
from bench.plan.published.runs import Run, read
from shardwright.cluster.chips import CHIPS, chip_of
from shardwright.data.untrusted import parse_yaml, read_text

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests/data/plan/published.csv"
HELD_OUT = ROOT / "tests/data/plan/held_out.csv"
"""Runs to which nothing is fitted."""
FIGURES = Path(__file__).parent / "figures.json"
CONSTANTS = CHIPS / "_achieved.yaml"
PAGE = ROOT / "docs/plan.md"
COMMAND = "python -m bench.plan.published tests/data/plan/published.csv --write"
MOST = 100
SOURCES = (
    *("shardwright/inspect/operation.py", "shardwright/inspect/plan/*.py"),
    *("shardwright/cluster/chips.py", "shardwright/cluster/chips/*"),
    *("bench/plan/published/*.py", "bench/plan/published/*.yaml", "tests/data/plan/published.csv"),
    "tests/data/plan/held_out.csv",
)
MARK = "<!-- written by bench.plan.published --write -->"
MESHES = {"d": "d alone", "c": "c", "t": "t", "p": "p and t"}
"""Kinds of meshes, by the first of p, t and c that they have."""


def digest() -> str:
    """Digest of what plans of published runs are made of, without comments and docstrings."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        text = read_text(path)
        text = (
            _code(text)
            if path.suffix == ".py"
            else str(parse_yaml(text))
            if path.suffix == ".yaml"
            else text
        )
        found.update(f"{path.relative_to(ROOT)}\n{text}\n".encode())
    return found.hexdigest()[:16]


def _code(text: str) -> str:
    """The lines of a Python file without comments and docstrings."""
    texts = [
        x
        for x in ast.walk(ast.parse(text))
        if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
    ]
    left_out = {line for x in texts for line in range(x.lineno, (x.end_lineno or x.lineno) + 1)}
    lines = (
        line.partition("  #")[0] for i, line in enumerate(text.splitlines(), 1) if i not in left_out
    )
    return "\n".join(line for line in lines if line.strip() and not line.strip().startswith("#"))


def record() -> Iterator[str]:
    """Fits, and writes CONSTANTS, FIGURES and the tables of PAGE.

    Gives lines that say how near plans are.

    The constants are replaced if plans of runs whose trainer was not fitted come nearer with those
    that were fitted.
    """
    published = yield from _pairs(TABLE)
    unseen = yield from _pairs(HELD_OUT)
    used = {name: vars(chip_of("h100"))[name] for name in (*ACHIEVED, "error")}
    now = figures(published, {})
    found = fit(picked(published, MOST), ACHIEVED)
    crossed = figures(
        published, held_out(published, MOST, ACHIEVED, len({run.trainer for run, _ in published}))
    )
    whys = dict.fromkeys(found, "fitted")
    if crossed.error < now.error:
        used |= found
    else:
        errors = (
            f"{100 * crossed.error:.1f} % with fits to other trainers, {100 * now.error:.1f} "
            "% with this"
        )
        whys = {
            name: f"kept: fitted to published.csv it is {x:.3g}; mean error {errors}"
            for name, x in found.items()
        }
    constants = {
        run.group: {name: used[name] for name in ACHIEVED} for run, _ in published + unseen
    }
    final = figures(published, constants)
    # It never narrows, as runs of trainers that are not in the table are further off.
    if final.inside < 0.8:
        used["error"] = final.four_of_five
    whys["error"] = f"{100 * final.inside:.0f} % of the runs of published.csv are within it"
    text = CONSTANTS.read_text()
    for name, why in whys.items():
        text = re.sub(
            f"(?m)^{name}: .*$",
            f'{name}: {{value: {used[name]:.3g}, source: "{why} ({COMMAND})"}}',
            text,
        )
    CONSTANTS.write_text(text)
    kept = {
        "digest": digest(),
        "constants": {
            name: {"used": used[name], "fitted": round(x, 3)} for name, x in found.items()
        },
        "published": _data(final),
        "cross-validated": _data(crossed),
        "by trainer": _by(published, constants, lambda run: run.trainer),
        "held out": _data(figures(unseen, constants)),
        "held out by mesh": _by(unseen, constants, mesh_of),
        "held out by trainer": _by(unseen, constants, lambda run: run.trainer),
    }
    FIGURES.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), kept))
    yield from scores(published, constants)
    yield from (f"held out, {line}" for line in scores(unseen, constants))


def _pairs(path: Path) -> Generator[str, None, list[Pair]]:
    """The runs of a table that are measured and can be planned, with their steps."""
    runs = [run for run in read(str(path)).runs if isinstance(run, Run) and run.step_s]
    return (yield from traced([run._replace(group=(run.trainer,)) for run in runs]))


def mesh_of(run: Run) -> str:
    """What of MESHES the mesh of a run is."""
    return next((axis for axis in "ptc" if run.sizes[axis] > 1), "d")


def _by(pairs: Sequence[Pair], constants: Mapping, kind: Callable[[Run], str]) -> dict[str, Any]:
    kinds = sorted({kind(run) for run, _ in pairs})
    return {
        name: _data(figures([x for x in pairs if kind(x[0]) == name], constants)) for name in kinds
    }


def _data(found: Figures) -> dict[str, float]:
    return {name: round(getattr(found, name), 3) for name in ("rows", "median", "error", "inside")}


def with_tables(page: str, kept: Mapping[str, Any]) -> str:
    """A page with these figures between its two lines MARK."""
    before, _, after = page.split(MARK)
    return f"{before}{MARK}\n{tables(kept)}\n{MARK}{after}"


def tables(kept: Mapping[str, Any]) -> str:
    """The figures as docs/plan.md shows them."""
    of, unseen = kept["published"], kept["held out"]
    inside, also = (round(x["rows"] * x["inside"]) for x in (of, unseen))
    by_trainer = (
        f"{name} {x['median']:.2f}, {100 * x['error']:.0f}"
        for name, x in kept["by trainer"].items()
    )
    unfitted = kept["held out by mesh"]
    rows = [
        f"On the {of['rows']} public runs with which the constants were chosen, the mean error is "
        f"{100 * of['error']:.0f} %; the measured time is within the plan's range for {inside} of "
        f"them, and for {also} of {unseen['rows']} others.",
        "",
        "| runs | planned / measured | error, % | within range, % |",
        "|---|---|---|---|",
        _row("other runs", unseen),
        *(
            _row(f"other runs, with {MESHES[name]}", unfitted[name])
            for name in MESHES
            if name in unfitted
        ),
        _row("runs with which the constants were chosen", of),
        _row("the same, with constants fitted to the other trainers", kept["cross-validated"]),
        "",
        f"Planned / measured and error in %, by trainer: {'; '.join(by_trainer)}.",
    ]
    return "\n".join(rows)


def _row(name: str, x: Mapping[str, float]) -> str:
    return (
        f"| {name}, {x['rows']} | {x['median']:.2f} | {100 * x['error']:.0f} | "
        f"{100 * x['inside']:.0f} |"
    )
