"""Verdicts where a device holds one entry of a dim: JAX traces other operations there than for several."""

import jax
import pytest
import running
from corpus import RIGHT, WRITTEN
from running import Program, abstract_mesh, distance, run, traced

from shardlib.proof.check import prove

ACCEPTED = [program for program in RIGHT if not program.escape and program.name != "ring attention"]
"""Without the ring, whose turns are compared with one device's only where JAX traces both alike."""
EQUAL, DIFFERENT = 1e-4, 1e-2
SHARE = 12
"""One in so many programs is also in `make test`."""


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
    """The settings of sizes with one entry a device, of one dim or of all; and what the analysis says at each."""
    dims, mesh = devices_by_dim(program), (2,) * len(program.axes)
    settings = [{name: n} for name, n in dims.items()] + ([dims] if len(dims) > 1 else [])
    trace = lambda: {"": traced(program, jax.sharding.get_abstract_mesh().axis_sizes)}
    for sizes in settings:
        with monkeypatch.context() as patch:
            for name, n in sizes.items():
                patch.setitem(running.SIZES, name, n)
            try:
                found = prove(trace, abstract_mesh(program, mesh))
            except (ValueError, TypeError):  # a program that does not trace at this size
                continue
            yield sizes, mesh, list(map(str, found))
    jax.clear_caches()  # which keep all traces: gigabytes


def error(program: Program, mesh: tuple[int, ...]) -> float | None:
    """Distance of a program's result from that on one device; None if it does not run there."""
    try:
        return distance(run(program, mesh), run(program, (1,) * len(mesh)))
    except (ValueError, TypeError, IndexError):
        return None


def parts(programs: list[Program]) -> list:
    """Each program is in one of SHARE parts, of which the first is not long."""
    part = lambda i: pytest.param(programs[i::SHARE], id=str(i), marks=[pytest.mark.long] if i else [])
    return [part(i) for i in range(SHARE)]


@pytest.mark.long
@pytest.mark.parametrize("programs", parts(ACCEPTED))
def test_right_programs_are_accepted(programs, monkeypatch):
    accepted = 0
    for program in programs:
        for sizes, mesh, found in verdicts(program, monkeypatch):
            accepted += not found
            if found:  # it may be another program at this size
                with monkeypatch.context() as patch:
                    for name, n in sizes.items():
                        patch.setitem(running.SIZES, name, n)
                    wrong_by = error(program, mesh)
                assert wrong_by is None or wrong_by > EQUAL, f"{program} {sizes}: {found[0]}"
    assert accepted > len(programs)


@pytest.mark.long
@pytest.mark.parametrize("programs", parts(WRITTEN))
def test_wrong_programs_are_refused(programs, monkeypatch):
    refused = 0
    for program in programs:
        for sizes, mesh, found in verdicts(program, monkeypatch):
            refused += bool(found)
            if not found:  # it may do on one device what it does here
                assert not program.hangs, f"{program} {sizes}"
                with monkeypatch.context() as patch:
                    for name, n in sizes.items():
                        patch.setitem(running.SIZES, name, n)
                    wrong_by = error(program, mesh)
                assert wrong_by is None or wrong_by < DIFFERENT, f"{program} {sizes}: differs by {wrong_by}"
    assert refused > len(programs)
