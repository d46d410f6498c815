"""Every single change, of some kinds, to a spec or a collective of train.py or of its stages: what
notices it.

The first gate is tracing, on a mesh of r=2, d=2, t=2 that has no devices, and on one of p=2 more. A
mutant that passes it is harmless if its program is the same to the letter (the StableHLO of
training and evaluation step, in each of CONFIGS), or if it only leaves out to gather weights ahead,
which are then gathered at their use: tools.verify sees the same numbers. Else it is for
verify_only, and the second gate, tools.verify, must reject it.

    python -m pytest -m slow -s tests/train/test_mutation_score.py      prints the score of both
    gates, on all cores
"""

import ast
import collections
import concurrent.futures
import functools
import multiprocessing
import os
import re

import pytest

from shardlib.axes import PIPELINE_AXIS
from shardlib.parsing import OpSpec, ShardError, parse_op, parse_shape
from tests.support.mutants import Mutant, mutants, spec_changes
from tests.support.recipes import ROOT, SOURCE
from tests.support.traced_steps import CONFIGS, Program, program
from tests.support.verifying import verify

STAGES = "shardwright/program/stages.py"


def verify_only(mutant: Mutant) -> bool:
    """Whether no type can notice it: the loss is divided by a number that is the same on every
    device.
    """
    return mutant.kind in ("loss divided by a size", "loss divided by a multiple")


# ---- the first gate ------------------------------------------------------------------------------


@functools.cache
def own_program(name: str) -> Program:
    return program(SOURCE, CONFIGS[name])


RESULTS = ("rejected", "the same program", "another program")


def outcome(mutant: Mutant) -> str:
    """What becomes of a mutant: one of RESULTS."""
    about_p = (
        PIPELINE_AXIS in axes_of(mutant.before) ^ axes_of(mutant.after) or '"p"' in mutant.after
    )
    same = True
    for name in sorted(CONFIGS, key=lambda name: CONFIGS[name][0] != about_p):
        # first where it is noticed sooner
        if not CONFIGS[name][0] and same_without_p(mutant):
            continue
        try:
            same = (
                program(mutant.source, CONFIGS[name], mutant.file).is_same(own_program(name))
                and same
            )
        except (ValueError, TypeError, NameError, AttributeError, NotImplementedError):
            return "rejected"
    if same:
        return "the same program"
    return "another program"


def axes_of(text: str) -> set[str]:
    return set(re.findall(r"[/+*]([rtdp])\b", text))


def same_without_p(mutant: Mutant) -> bool:
    """Whether a mutated spec means what it did on a mesh without p: there its marks are left out
    before it is read.
    """
    try:
        before, after = (ast.literal_eval(text) for text in (mutant.before, mutant.after))
    except (ValueError, SyntaxError):
        return False  # a call
    try:
        if "->" not in before:
            before, after = (
                parse_shape(spec).without((PIPELINE_AXIS,)) for spec in (before, after)
            )
            return before == after
        before, after = (parse_op(spec) for spec in (before, after))
    except ShardError:
        return False

    def left_out(op):
        return OpSpec(
            tuple(s.without((PIPELINE_AXIS,)) for s in op.lhs), op.rhs.without((PIPELINE_AXIS,))
        )

    # An operation that does nothing without p is passed over, if p is named: see does_nothing.
    idle = [
        left_out(op).lhs == (left_out(op).rhs,) and left_out(op) != op for op in (before, after)
    ]
    return left_out(before) == left_out(after) and idle[0] == idle[1]


@pytest.mark.long
@pytest.mark.quick
def test_every_change_of_a_kind_is_made():
    found = collections.defaultdict(set)
    for kind, spec in spec_changes("B/d L +t -> B/d L/t"):
        found[kind].add(spec)
    assert found["/axis dropped"] == {"B L +t -> B/d L/t", "B/d L +t -> B L/t", "B/d L +t -> B/d L"}
    assert found["+axis dropped"] == {"B/d L -> B/d L/t"}
    assert "B/d L +d -> B/d L/t" in found["axis swapped"]
    assert found["axis swapped"] >= {"B/r L +t -> B/d L/t", "B/d L +t -> B/d L/r"}
    assert {"B/d L/r +t -> B/d L/t", "B/d/t L +t -> B/d L/t", "B/d L +t -> B/d L/t/d"} - found[
        "/axis added"
    ] == {
        "B/d/t L +t -> B/d L/t"  # stands as B/t/d, the order of axes
    }
    assert "B/t L +d -> B/t L/d" in found["axes exchanged in a whole spec"]
    assert "B/d L -> B/d L" in found["axis dropped from a whole spec"]
    assert len(found["+axis added"]) == 7
    assert len(found["*axis added"]) == 8
    assert {"B/r/e L/c", "B/r/t/d/e L/c", "B/r/d/e L/t/c", "B/r/d/e L/c +t"} <= {
        spec for _, spec in spec_changes("B/b L/c")
    }
    assert dict(spec_changes("M/t/d"))["axis order swapped"] == "M/d/t"
    assert "+d +t ->" not in [spec for _, spec in spec_changes("+t +d ->")]
    by_kind = collections.Counter(mutant.kind for mutant in all_mutants())
    assert len(by_kind) == 16
    assert by_kind["call removed"] == by_kind["call done twice"] >= 15
    assert by_kind["loss divided by a size"] == by_kind["loss divided by a device's count"] == 1
    assert by_kind["loss divided by a multiple"] == 8
    assert sum(map(verify_only, all_mutants())) == 9
    assert {"B/d/p L +t -> B/d L/t", "B/d L/p +t -> B/d L/t", "B/d L +t -> B/d L/t/p"} <= found[
        "/axis added"
    ]
    assert {mutant.after for mutant in all_mutants() if mutant.before == '"+p ->"'} >= {
        '"->"',
        '"+t ->"',
        '"+p +r ->"',
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("M/t/d", "M/t/d/p", True),
        ("M/t/d/p", "M/t/p", False),
        ("V/t/p M/d -> V/t M *d *p", "V/t/p M/d -> V/t M *d", True),
        ("+t +p ->", "+t ->", True),
        ("+p ->", "->", False),  # no p is named: it is no longer passed over
        ("+p ->", "+t +p ->", False),
        ("M/d ->", "M/d/d ->", False),
    ],
)
def test_what_means_the_same_without_p(before, after, same):
    mutant = Mutant("", 1, f'"{before}"', f'"{after}"', "")
    assert same_without_p(mutant) is same


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_the_program_as_it_stands_traces(name):
    assert own_program(name).is_same(program(SOURCE, CONFIGS[name]))


@pytest.mark.long
def test_a_sample_of_the_mutants():
    """Every two hundredth; all of them is the slow test."""
    for mutant in all_mutants()[::200]:
        assert outcome(mutant) != "another program" or verify_only(mutant), mutant


def numbered_outcome(i: int) -> str:
    return outcome(all_mutants()[i])


@functools.cache
def all_mutants() -> list[Mutant]:
    return [*mutants(SOURCE), *mutants((ROOT / STAGES).read_text(), STAGES)]


@pytest.mark.slow
def test_score():
    counts = collections.defaultdict(collections.Counter)
    others = []
    processes = multiprocessing.get_context("spawn")  # forks of a process that has run JAX may hang
    with concurrent.futures.ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), mp_context=processes
    ) as pool:
        results = pool.map(numbered_outcome, range(len(all_mutants())), chunksize=32)
        for i, (mutant, result) in enumerate(zip(all_mutants(), results, strict=True), 1):
            counts[mutant.kind][result] += 1
            if result == "another program":
                others.append(mutant)
            if result != "rejected":
                print(f"{i} of {len(all_mutants())}: {result}: {mutant}", flush=True)
    for mutant in others:
        print("not noticed while tracing:", mutant)
    total = sum(counts.values(), collections.Counter())
    print(f"{'':40}" + "".join(f"{result:>25}" for result in RESULTS))
    for kind, count in [*counts.items(), ("all", total)]:
        print(f"{kind:40}" + "".join(f"{count[result]:25}" for result in RESULTS))
    changing = total["rejected"] + total["another program"]
    print(f"while tracing: {total['rejected']} of {changing}, {total['rejected'] / changing:.2%}")
    assert set(others) == {mutant for mutant in all_mutants() if verify_only(mutant)}
    assert total["rejected"] >= 0.95 * changing


# ---- the second gate -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("i", range(9))
def test_verify_rejects_what_the_types_cannot_tell(tmp_path, i):
    mutant = list(filter(verify_only, all_mutants()))[i]
    # Beside p, 8 devices are not enough for all of r, d and t.
    mesh = "2x1x2x2" if '"t"' in mutant.after else "2x2x2x1"
    (tmp_path / "train.py").write_text(mutant.source)
    done = verify(tmp_path, f"verify.meshes=[2x2x2,{mesh}]")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERS on" in done.stdout
