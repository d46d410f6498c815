"""Verdicts where a device holds one entry of a dim: JAX traces other operations there than for several."""

import jax
import pytest

from shardlib.proof.check import prove_function
from tests.programs import program as of_program
from tests.programs.corpus import RIGHT, WRITTEN
from tests.programs.program import Program, abstract_mesh, distance, run, traced

ACCEPTED = [program for program in RIGHT if not program.escape and program.name != "ring attention"]
"""Without the ring, whose turns are compared with one device's only where JAX traces both alike."""
EQUAL, DIFFERENT = 1e-4, 1e-2
SHARE = 8
"""One in so many programs is long, the others are slow."""


def devices_by_dim(program: Program) -> dict[str, int]:
    """Number of devices that shard each dim of a program's arguments and results, two along each axis."""
    found: dict[str, int] = {}
    for t in jax.tree.leaves((list(program.ins.values()), program.outs)):
        for dim in t.spec.dims:
            count = 2 ** len({*dim.axes} & {*program.axes})
            if count > 1 and not dim.literal_size:
                found[dim.name] = max(count, found.get(dim.name, 1))
    return found


def verdicts(program: Program, monkeypatch):
    """What the analysis says at sizes with one entry a device, of one dim or of all, and how far the result is off.

    The distance is None where the program does not run there, or was expected to be as the analysis says.
    """
    dims, mesh = devices_by_dim(program), (2,) * len(program.axes)
    settings = [{name: n} for name, n in dims.items()] + ([dims] if len(dims) > 1 else [])

    def trace():
        return traced(program, jax.sharding.get_abstract_mesh().axis_sizes)

    for sizes in settings:
        with monkeypatch.context() as patch:
            for name, n in sizes.items():
                patch.setitem(of_program.SIZES, name, n)
            try:
                found, wrong_by = prove_function(trace, abstract_mesh(program, mesh)), None
                if bool(found) == (program in ACCEPTED):  # it may be another program at this size
                    assert not program.hangs, f"{program} {sizes}"
                    wrong_by = distance(run(program, mesh), run(program, (1,) * len(mesh)))
            except (ValueError, TypeError, IndexError):  # a program that does not trace, or not run, at this size
                continue
        yield f"{program} {sizes}: {found[:1]}", bool(found), wrong_by
    jax.clear_caches()  # which keep all traces: gigabytes


def some_and_others(programs: list[Program]):
    some = programs[::SHARE]
    others = [program for program in programs if program not in some]
    each = pytest.param(some, marks=pytest.mark.long), pytest.param(others, marks=pytest.mark.slow)
    return pytest.mark.parametrize("programs", each, ids=["some", "others"])


@some_and_others(ACCEPTED)
def test_right_programs_are_accepted(programs, monkeypatch):
    found = [verdict for program in programs for verdict in verdicts(program, monkeypatch)]
    assert not [text for text, is_refused, wrong_by in found if wrong_by is not None and wrong_by <= EQUAL]
    assert sum(not is_refused for _, is_refused, _ in found) > len(programs)


@some_and_others(WRITTEN)
def test_wrong_programs_are_refused(programs, monkeypatch):
    found = [verdict for program in programs for verdict in verdicts(program, monkeypatch)]
    # It may do on one device what it does here.
    assert not [text for text, is_refused, wrong_by in found if wrong_by is not None and wrong_by >= DIFFERENT]
    assert sum(is_refused for _, is_refused, _ in found) > len(programs)
