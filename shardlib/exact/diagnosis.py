"""Says what is wrong with a value on a mesh, by trying what would make it right."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from shardlib.exact import elementwise
from shardlib.exact.layouts import Layout, gather, is_same, scatter, subsets
from shardlib.exact.machine import Machine, axes_of_entry
from shardlib.exact.values import Exact, is_complex, move, of_numbers
from shardlib.interpret import Operation

REDUCTIONS = {"sum": "psum", "maximum": "pmax", "minimum": "pmin"}
"""The collectives that make whole what is partial."""
Finding = tuple[str, str] | None
"""What is wrong, and the remedy."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A result that nothing explains.

    Attributes:
        m: the machine that runs the mesh.
        operation: what made it.
        ins: what explains the operands.
        x: the result.
        whole: what one device has.
        options: the layouts that shapes allow, most likely first.
    """

    m: Machine
    operation: Operation
    ins: Sequence[Layout | None]
    x: Exact
    whole: Exact
    options: Sequence[Layout]

    @property
    def axes(self) -> list[str]:
        """The axes with several devices, those that the operation names first."""
        params = self.operation.params
        named = axes_of_entry(params.get("axes", params.get("axis_name")))
        axes = [axis for axis, n in self.m.sizes.items() if n > 1]
        return sorted(axes, key=lambda axis: axis not in named)


def diagnose(case: Case) -> tuple[str, str]:
    """Returns what is wrong, and the remedy."""
    tests = _index, _factor, _partial_operand, _moved, _reordered, _first_device, _own_block
    for test in tests:
        if found := test(case):
            return found
    remedy = "Compute with global sizes and positions, and with what all devices need."
    if case.options:
        return "the devices' values do not make up what one device computes", remedy
    shapes = (case.m.shape(x) for x in (case.x, case.whole))
    return "it has the shape {} here and {} on one device".format(*shapes), remedy


_IN_SHARDOPS = {
    r"jax\.lax\.psum\(…, AXES\)": lambda axes: f'shardops.psum("… {_plus(axes)} -> …", …)',
    r"jax\.lax\.psum_scatter\(…, AXES, scatter_dimension=(\d+).*?\)": lambda axes, dim: (
        f'shardops.psum_scatter("… {_plus(axes)} -> …", …), with {_slashes(axes)} for dim {dim}'
    ),
    r"jax\.lax\.all_gather\(…, AXES, axis=(\d+), tiled=True\)": lambda axes, dim: (
        f'shardops.all_gather("…{_slashes(axes)} … -> … …", …) for dim {dim}'
    ),
    r"jax\.lax\.pmax\(…, AXES\)": lambda axes: f'shardops.pmax("…{_slashes(axes)} -> …", …)',
    r"jax\.lax\.axis_size\(AXES\)": lambda axes: f"shardops.axis_size({_words(axes)})",
    r"jax\.lax\.axis_index\(AXES\)": lambda axes: f"shardops.axis_index({axes})",
}


def in_shardops(remedy: str) -> str:
    """Returns a remedy with calls of shardlib.shardops in place of those of jax.lax.

    >>> in_shardops("Add jax.lax.psum(…, ('d', 't')).")
    'Add shardops.psum("… +d +t -> …", …).'
    """
    for call, put in _IN_SHARDOPS.items():
        remedy = re.sub(
            call.replace("AXES", r"(\(.*?\)|[^()]*?)"),
            lambda found, put=put: put(*found.groups()),
            remedy,
        )
    return remedy


def _names(axes: str) -> list[str]:
    return re.findall(r"\w+", axes)


def _plus(axes: str) -> str:
    return " ".join(f"+{axis}" for axis in _names(axes))


def _slashes(axes: str) -> str:
    return "".join(f"/{axis}" for axis in _names(axes))


def _words(axes: str) -> str:
    return axes if axes == "axis" else repr(" ".join(_names(axes)))


def listed(axes: Sequence[str]) -> str:
    """Returns axes for a text."""
    return ", ".join(axes)


def code(axes: Sequence[str]) -> str:
    """Returns axes for a program."""
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def _index(case: Case) -> Finding:
    """Finds the index of a device, which is none of one device's values."""
    if case.operation.name != "axis_index":
        return None
    remedy = "Use it only for the positions of this device's block, and for masks by them."
    return "the index of a device gets into the result", remedy


def _times(x: Exact, n: int) -> Exact:
    return Exact(x.value * n) if x.image is None else elementwise.multiply(x, of_numbers(n))


def _factor(case: Case) -> Finding:
    """Tries numbers of devices as factors."""
    if is_complex(case.x) or case.x.value.dtype.kind not in "fi":
        return None
    for layout, over in itertools.product(case.options, subsets(case.axes)):
        n = case.m.count(over)
        found = gather(case.m, case.x, layout)
        if is_same(found, case.whole):
            continue
        if is_same(found, _times(case.whole, n)):
            text = f"it is {n} times what one device computes"
            if case.operation.name in ("psum", "psum_invariant", "unreduced_psum"):
                text += f": each device of {listed(over)} adds a value that is whole"
            return text, f"Divide it by jax.lax.axis_size({code(over)}), or sum it once."
        if is_same(_times(found, n), case.whole):
            text = f"it is {1 / n:g} times what one device computes"
            return text, f"Multiply it by jax.lax.axis_size({code(over)}), or divide it once."
    return None


def partial_operand(m: Machine, operation: Operation, ins: Sequence[Layout | None]) -> Finding:
    """Finds an operand that is partial, and is used as if it were whole."""
    is_sum = operation.name in ("add", "add_any", "sub")
    for i, layout in enumerate(ins):
        if layout is None or not layout.kind:
            continue
        axes = listed(layout.over)
        call = f"jax.lax.{REDUCTIONS[layout.kind]}(…, {code(layout.over)})"
        if layout.kind != "sum":
            text = f"operand {i} is this device's {layout.kind}, used as if it were that"
            return f"{text} over {axes}", f"Take it over {axes} first: {call}."
        if is_sum and any(other is not None and not other.kind for other in ins):
            n = m.count(layout.over)
            text = f"a value that is whole is added to a partial sum over {axes}"
            return f"{text}, {n} times in all", f"Add it after {call}."
        text = f"operand {i} is a partial sum over {axes}, used as if it were whole"
        return text, f"Sum it first: {call}."
    return None


def _partial_operand(case: Case) -> Finding:
    return partial_operand(case.m, case.operation, case.ins)


def _positions(blocks: Sequence[Exact], others: Sequence[Exact]) -> list[int] | None:
    """Returns where in `others` each block is; None if one is nowhere."""
    found = [next((j for j, y in enumerate(others) if is_same(x, y)), -1) for x in blocks]
    return None if -1 in found else found


def _of_devices(m: Machine, x: Exact, axis: str) -> list[Exact]:
    front = move(lambda a: m.to_front(a, [axis]), x)
    return [move(lambda a, k=k: a[k], front) for k in range(m.sizes[axis])]


def _whole_options(case: Case) -> Iterator[tuple[Layout, Exact]]:
    """Yields the layouts of whole values, each with what the devices would have by it."""
    for layout in case.options:
        if not layout.kind:
            yield layout, scatter(case.m, case.whole, layout)


def _moved(case: Case) -> Finding:
    """Finds the right blocks on other devices."""
    for layout, right in _whole_options(case):
        for axis in layout.axes:
            at = _positions(*(_of_devices(case.m, x, axis) for x in (case.x, right)))
            if at and len({*at}) == 1:
                text = f"each device of {axis} has the block of device {at[0]}"
                if case.operation.name == "iota":
                    return text, f"Add n * jax.lax.axis_index({axis!r}), with n entries in a block."
                return text, f"Take the block of this device, by jax.lax.axis_index({axis!r})."
            if at and at != [*range(len(at))]:
                text = f"the blocks of {axis} are on other devices: device 0 has that of {at[0]}"
                return text, f"Give each device of {axis} its own block."
    return None


def _blocks_along(m: Machine, x: Exact, dim: int, n: int) -> list[Exact]:
    parts = [np.split(a, n, dim + m.rank) for a in x.parts]
    return [x.with_parts(arrays) for arrays in zip(*parts, strict=True)]


def _reordered(case: Case) -> Finding:
    """Finds the right blocks in another order within a dim."""
    m = case.m
    shape = m.shape(case.x)
    if shape != m.shape(case.whole):
        return None
    for (dim, size), over in itertools.product(enumerate(shape), subsets(case.axes)):
        n = m.count(over)
        if size % n == 0:
            at = _positions(*(_blocks_along(m, x, dim, n) for x in (case.x, case.whole)))
            if at and len({*at}) == n:
                text = f"the blocks of {listed(over)} along dim {dim} are in another order"
                remedy = "Name the axes in the order in which they shard the dim, major first."
                return text, remedy
    return None


def _first_device(case: Case) -> Finding:
    """Finds a result that only the first device has right."""
    first = (slice(1),) * case.m.rank
    for _, right in _whole_options(case):
        if is_same(*(move(lambda a: a[first], x) for x in (case.x, right))):
            device = ", ".join(f"{axis}=0" for axis in case.m.sizes if axis in case.axes)
            text = f"it is right on device {device} only: others count from their own block's start"
            remedy = "Subtract n * jax.lax.axis_index(axis) from positions, and mask those outside."
            return text, remedy
    return None


def _own_block(case: Case) -> Finding:
    """Finds an operand of which devices have blocks, sharded over what the result is not."""
    kept = case.options[0].axes if case.options else set()
    params = case.operation.params
    taken = {*axes_of_entry(params.get("axes", params.get("axis", params.get("dimension"))))}
    found = [
        (dim not in taken, set(axes) <= kept, i, dim, axes)
        for i, layout in enumerate(case.ins)
        for dim, axes in enumerate(layout.dims if layout else ())
        if axes
    ]
    if not found:
        return None
    *_, i, dim, axes = min(found)
    text = f"dim {dim} of operand {i} is sharded over {listed(axes)}: each device sees only its own"
    call = f"jax.lax.all_gather(…, {code(axes)}, axis={dim}, tiled=True)"
    remedy = f"Gather it first, {call}, or combine over devices what their blocks give."
    return f"{text} block", remedy
