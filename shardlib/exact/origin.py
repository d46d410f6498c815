"""Finds the source line at which a program on a mesh first computes something else than its twin.

Both programs run, and their equations are paired in order. A value is *explained* if it can be put
together from the devices' values: each dim is sharded over some axes, and over the other axes the
devices have the same, or terms of a sum, or candidates of an extreme. From the results that differ,
the search goes back through values that nothing explains, to equations that make such a value of
explained ones. What is wrong is found by trying: the program runs again with the results of a line
made right, and the first line that mends the results of the program is the origin.
"""

import collections
import dataclasses
import functools
import itertools
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardlib.equations import frames_of, kinds
from shardlib.exact.compare import compare_results
from shardlib.exact.contents import Contents
from shardlib.exact.diagnosis import (
    REDUCTIONS,
    Case,
    code,
    diagnose,
    in_shardops,
    listed,
    partial_operand,
)
from shardlib.exact.endings import Undecided, Wrong
from shardlib.exact.layouts import (
    Layout,
    combine,
    explains,
    possible_layouts,
    scatter,
    varying_axes,
)
from shardlib.exact.machine import axes_of_entry
from shardlib.exact.recording import Change, Execution, Rerun, record
from shardlib.exact.values import Exact
from shardlib.interpret import Operation
from shardlib.places import is_installed, is_users, shown_path

WORK = 30_000
"""Number of equations up to which a program is run again to find its origin."""
OPTIONS = 4
"""Number of layouts that are tried for a result."""
COMPUTED = kinds("addition", "product", "selection", "nonlinear", "scattering") | {"dot_general"}
"""Primitives that do more than to move values."""
OTHERWISE = "one device runs another program, in which this line does something else"
ONLY_HERE = "a device of the mesh runs this, and one device does not"
ONLY_THERE = "one device runs this, and a device of the mesh does not"
SAME = "Do the same on every mesh."
CALLERS = 3
"""Number of calls that a message names."""
Idea = tuple[Callable[[], "Origin"], dict[Execution, Change]]
"""What to say if a change mends the program, and the change."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """A line whose value is wrong.

    Attributes:
        place: file and line.
        shown: the name of the primitive.
        text: what is wrong.
        remedy: what mends it.
        callers: lines that called it, innermost first; "" if there are none.
    """

    place: str
    shown: str
    text: str
    remedy: str
    callers: str = ""

    def __str__(self) -> str:
        lines = [f"{self.place}: {self.shown}: {self.text}"]
        lines += [f"  called from {self.callers}"] * bool(self.callers)
        return "\n".join([*lines, f"  remedy: {self.remedy}"])


def origins(program: Any, twin: Any, sizes: Mapping[str, int], args: Sequence[Any]) -> list[Origin]:
    """Finds which lines make the results differ from those of one device, most certain first.

    Args:
        program: a jaxpr, traced for a mesh.
        twin: the jaxpr of the same function, traced for one device along each axis.
        sizes: number of devices along each axis.
        args: whole arrays, on which the results differ.

    Raises:
        Undecided: a primitive has no rule.
    """
    try:
        return _Search(program, twin, sizes, args).origins()
    except Wrong as error:
        shown, text = str(error).removeprefix(f"{error.place}: ").split(": ", 1)
        remedy = "Let all devices do the same there, with the same shapes."
        return [Origin(error.place, shown, text, remedy)]


class _Search:
    """Looks for the origin of what differs between a program and its twin."""

    def __init__(self, program: Any, twin: Any, sizes: Mapping[str, int], args: Sequence[Any]):
        self.program = program
        self.m, self.outs = record(program, sizes, args)
        self.there, self.expected = record(twin, dict.fromkeys(sizes, 1), args)
        self.first_args = self.m.arguments[id(program)][0]
        self.wrong = compare_results(self.m, self.outs, self.there, self.expected)
        self.work = 0
        self.known: dict[tuple[int, int], Layout | None] = {}
        self.twins: dict[Execution, Execution] = {}
        others = _by_key(self.there.executions)
        for key, found in _by_key(self.m.executions).items():
            if len(found) == len(others.get(key, ())):
                self.twins.update(zip(found, others[key], strict=True))
        self.local: set[int] = set()
        self.positions: set[int] = set()
        made = self.m.makers.keys() | self.m.sources.keys()
        for e in self.m.executions:
            if e.name == "axis_index" or not self.local.isdisjoint(map(id, e.ins)):
                self.local |= {*map(id, e.outs)}
                others = {*map(id, e.ins)} - self.positions
                is_made_of_positions = others.isdisjoint(made)
                for x in e.outs:
                    if is_made_of_positions or getattr(x, "image", None) is None:
                        self.positions.add(id(x))

    @functools.cached_property
    def contents(self) -> Contents:
        """The values of one device."""
        return Contents(self.m, self.there)

    # ---- what explains a value

    def layout(self, x: Any, whole: Any) -> Layout | None:
        """Returns what explains a value; None if nothing does."""
        at = id(x), id(whole)
        if at not in self.known:
            self.known[at] = self._layout(x, whole)
        return self.known[at]

    def _layout(self, x: Any, whole: Any) -> Layout | None:
        if not isinstance(x, Exact) or not isinstance(whole, Exact):
            return Layout(())
        if (x.image is None) != (whole.image is None):
            return None
        varying = set(varying_axes(self.m, x))
        found = self.possible(x, whole)
        found.sort(key=lambda layout: (bool(layout.kind), len(layout.axes - varying)))
        for layout in found:
            if not varying.issuperset(layout.over):
                continue
            for kind in self.kinds(x) if layout.kind else ("",):
                tried = dataclasses.replace(layout, kind=kind)
                if explains(self.m, x, whole, tried):
                    return tried
        return None

    def possible(self, x: Exact, whole: Exact) -> list[Layout]:
        """Returns the layouts that shapes allow."""
        return [*possible_layouts(self.m, self.m.shape(x), self.there.shape(whole))]

    def kinds(self, x: Exact) -> Sequence[str]:
        """Returns how a value may be partial: one made with an index of a device only as a sum."""
        is_bool = x.value.dtype == bool
        if id(x) in self.local:
            return () if is_bool else ("sum",)
        return ("maximum", "minimum") if is_bool else (*REDUCTIONS,)

    def layout_in(self, e: Execution, i: int) -> Layout | None:
        """Returns what explains an operand."""
        twin = self.twins.get(e)
        if twin is not None:
            return self.layout(e.ins[i], twin.ins[i])
        if self.is_given(e.ins[i]):
            return Layout(())
        return self.contents.layout(e.ins[i], e.active)

    def layout_out(self, e: Execution, i: int) -> Layout | None:
        """Returns what explains a result."""
        twin = self.twins.get(e)
        if e.name == "axis_index":
            return None
        if twin is not None:
            return self.layout(e.outs[i], twin.outs[i])
        return self.contents.layout(e.outs[i], e.active)

    def layouts_in(self, e: Execution) -> list[Layout | None]:
        """Returns what explains the operands of an execution."""
        return [self.layout_in(e, i) for i in range(len(e.ins))]

    def layouts_out(self, e: Execution) -> list[Layout | None]:
        """Returns what explains the results of an execution."""
        return [self.layout_out(e, i) for i in range(len(e.outs))]

    def is_position(self, x: Any) -> bool:
        """True for what is made of the index of a device, and integers and masks made with it."""
        return id(x) in self.positions

    def may_be_right(self, x: Any) -> bool:
        """True for positions in a device's block, and masks by them."""
        return self.is_position(x) and x.image is None

    def is_given(self, x: Any) -> bool:
        """True for a number or array of the program, which no equation makes."""
        while id(x) in self.m.sources:
            caller, i = self.m.sources[id(x)]
            x = caller.ins[i]
        return id(x) not in self.m.makers

    # ---- from the results back

    def returned(self) -> Iterator[tuple[Execution, int, Any, Layout | None, Layout]]:
        """Yields the results of shard_maps that are not what out_specs declares."""
        for e in self.m.executions:
            if e.name != "shard_map":
                continue
            twin = self.twins.get(e)
            specs = e.operation.params["out_specs"]
            for i, (x, spec) in enumerate(zip(e.bodies[0][1], specs, strict=True)):
                axes = (*map(axes_of_entry, spec), *[()] * len(self.m.shape(x)))
                dims = axes[: len(self.m.shape(x))]
                several = [tuple(a for a in own if self.m.sizes[a] > 1) for own in dims]
                declared = Layout(tuple(several))
                if twin is None:
                    yield e, i, x, self.contents.layout(x, e.active), declared
                    continue
                whole = twin.bodies[0][1][i]
                is_possible = declared in self.possible(x, whole)
                if not (is_possible and explains(self.m, x, whole, declared)):
                    yield e, i, x, self.layout(x, whole), declared

    def roots(self, values: Sequence[Any]) -> list[Execution]:
        """Returns the executions that first made values wrong, in order.

        Args:
            values: what nothing explains.
        """
        found: dict[Execution, None] = {}
        todo = [*values]
        seen: set[int] = set()
        while todo:
            x = todo.pop()
            if id(x) in seen:
                continue
            seen.add(id(x))
            e = self.m.makers.get(id(x))
            if e is None:
                caller, i = self.m.sources.get(id(x), (None, 0))
                if caller is not None and self.layout_in(caller, i) is None:
                    todo.append(caller.ins[i])
                elif caller is not None and caller.name != "shard_map":
                    found[caller] = None
                continue
            i = next(i for i, out in enumerate(e.outs) if out is x)
            condition = self.layout_in(e, 0) if e.name == "cond" else None
            inner = [] if condition and condition.kind else self.inside(e, i)
            if inner:
                todo += inner
                continue
            wrong = [u for j, u in enumerate(e.ins) if self.layout_in(e, j) is None]
            todo += [u for u in wrong if not self.is_given(u)]
            if all(self.is_given(u) or self.may_be_right(u) for u in wrong):
                found[e] = None
        return sorted(found, key=self.doubt)

    def inside(self, e: Execution, i: int) -> list[Any]:
        """Returns the values of bodies that make up a result, and that nothing explains."""
        bodies = [body for body in e.bodies if len(body[1]) == len(e.outs)]
        twin = self.twins.get(e)
        others = [body for body in twin.bodies if len(body[1]) == len(e.outs)] if twin else []
        if len(bodies) == len(others):
            pairs = zip(bodies, others, strict=True)
            return [a[1][i] for a, b in pairs if self.layout(a[1][i], b[1][i]) is None]
        return [body[1][i] for body in bodies if self.contents.layout(body[1][i], body[2]) is None]

    def doubt(self, e: Execution) -> tuple:
        """Returns what executions are ordered by, those first that are more surely wrong.

        Positions in a device's block may be right, and so may be what this library does that one
        device does not, such as moves into the buffers of a pipeline.
        """
        return all(map(self.is_position, e.outs)), self.is_of_library(e), e.index

    def is_of_library(self, e: Execution) -> bool:
        """True for what a mesh alone runs, by code that is no user's."""
        operation = e.operation
        while operation.caller is not None and operation.caller.is_of_jax():
            operation = operation.caller
        files = [file for file, _ in frames_of(operation.eqn) if not is_installed(file)]
        return e not in self.twins and (bool(e.bodies) or not (files and is_users(files[-1])))

    def missing(self) -> list[Execution]:
        """Returns what one device runs and the mesh does not, of values that are on the mesh."""
        for e in self.m.executions:
            self.layouts_out(e)
        for e, twin in self.twins.items():
            self.contents.add(x for i, x in enumerate(twin.outs) if self.layout_out(e, i))
        here = {(e.place, e.name) for e in self.m.executions}
        return [
            e
            for e in self.there.executions
            if e.name in COMPUTED and (e.place, e.name) not in here
            if all(map(self.contents.is_matched, filter(self.is_made_there, e.ins)))
            if not all(map(self.contents.is_matched, e.outs))
        ]

    def is_made_there(self, x: Any) -> bool:
        """True for a value of one device that is no number of its program."""
        return id(x) in self.there.makers or id(x) in self.there.sources

    def partial(self, x: Any) -> list[tuple[Execution, Layout]]:
        """Returns the executions at a line that made a value partial, on its way to `x`."""
        while e := self.m.makers.get(id(x)):
            if e not in self.twins:
                return []
            i = next(i for i, out in enumerate(e.outs) if out is x)
            layout = self.layout_out(e, i)
            if layout is None or not layout.kind:
                return []
            if e.bodies:
                x = e.bodies[-1][1][i] if len(e.bodies[-1][1]) == len(e.outs) else None
                continue
            kinds = [found and found.kind for found in self.layouts_in(e)]
            if layout.kind not in kinds:
                return [*self.alike(e, layout)]
            x = e.ins[kinds.index(layout.kind)]
        return []

    def alike(self, e: Execution, layout: Layout) -> Iterator[tuple[Execution, Layout]]:
        """Yields the executions at the line of `e` that make the same kind of partial values."""
        for other in self.at_line(e):
            if other.name == e.name:
                for found in self.layouts_out(other):
                    if found and (found.kind, found.over) == (layout.kind, layout.over):
                        yield other, found

    def at_line(self, e: Execution) -> Iterator[Execution]:
        """Yields what is paired and was run for the line of `e`, without what has bodies."""
        for other in self.m.executions:
            is_alone = other is e or not other.bodies
            if other.place == e.place and other in self.twins and is_alone:
                yield other

    # ---- trying

    def left(self, changes: dict[Execution, Change]) -> int:
        """Runs the program with changes. Returns how many results are wrong."""
        again = Rerun(self.m, changes)
        try:
            outs = again.run(self.program, self.first_args)
        except (Wrong, Undecided, ValueError, IndexError):
            return len(self.outs) + 1
        finally:
            self.work += again.work
        return len(compare_results(again, outs, self.there, self.expected))

    def ideas(self, group: Sequence[Execution]) -> Iterator[Idea]:
        """Yields what may be wrong at a line, of which some executions are given."""
        for e in group:
            for x in e.ins:
                yield from self.reductions(x)
        e = group[0]
        if e in self.twins:
            for option in range(OPTIONS):
                if changes := self.replaced(e, option):
                    yield functools.partial(self.describe, e, option), changes

    def reductions(self, x: Any) -> Iterator[Idea]:
        """Yields the reduction that a partial value may lack."""
        if starts := self.partial(x):
            changes = {e: functools.partial(_combined, layout) for e, layout in starts}
            yield functools.partial(self.say_partial, *starts[0]), changes

    def replaced(self, e: Execution, option: int) -> dict[Execution, Change]:
        """Returns the right results of a line, in the option-th layout that shapes allow.

        It is empty if there are no such layouts.
        """
        changes: dict[Execution, Change] = {}
        for other in self.at_line(e):
            outs = [*other.outs]
            layouts = self.layouts_out(other)
            for i, whole in enumerate(self.twins[other].outs):
                options = self.possible(outs[i], whole) if layouts[i] is None else []
                if option < len(options):
                    outs[i] = scatter(self.m, whole, options[option])
                    changes[other] = lambda m, operation, ins, outs=outs: outs
        return changes

    def origins(self) -> list[Origin]:
        """Returns what was found, most certain first."""
        if not self.wrong:
            return []
        returned = [*self.returned()]
        values = [x for _, _, x, layout, _ in returned if layout is None]
        outside = (self.outs[x.result] for x in self.wrong if x.result is not None)
        mapped = {id(x) for e in self.m.executions if e.name == "shard_map" for x in e.outs}
        values += [x for x in outside if id(x) not in mapped]
        roots = self.roots(values)
        groups = collections.defaultdict(list)
        for e in roots:
            groups[e.place].append(e)
        ideas = [self.reductions(x) for _, _, x, layout, _ in returned if layout is not None]
        tries = itertools.chain.from_iterable([*ideas, *map(self.ideas, groups.values())])
        found = []
        for say, changes in tries:
            left = self.left(changes)
            if left < len(self.wrong):
                found.append((left, say()))
            if left == 0 or self.work > WORK:
                break
        named = [origin for _, origin in sorted(found, key=lambda x: x[0])]
        if not named:
            named = [self.describe(group[0]) for group in groups.values()]
            if any(e not in self.twins for e in roots):
                there = {(e.place, e.name) for e in self.there.executions}
                is_only_here = (roots[0].place, roots[0].name) not in there
                at = is_only_here and not self.is_of_library(roots[0])
                named[at:at] = [self.say(e, ONLY_THERE, SAME) for e in self.missing()]
        named += [self.say_returned(*x) for x in returned if x[3] is not None and x[3] != x[4]]
        return [*dict.fromkeys(named)]

    # ---- what is wrong

    def say(self, e: Execution, text: str, remedy: str) -> Origin:
        """Makes an Origin of the line of an execution."""
        calls = e.operation.calls()[-2::-1][:CALLERS]
        callers = "; ".join(
            f"{shown_path(file)}:{', '.join(str(line) for _, line in lines)}"
            for file, lines in itertools.groupby(calls, key=lambda call: call[0])
        )
        line = e.operation.line()
        if line and any("shardops" in text for text in linecache.getlines(line[0])):
            remedy = in_shardops(remedy)
        return Origin(e.place, e.operation.shown, text, remedy, callers)

    def say_partial(self, e: Execution, layout: Layout) -> Origin:
        """Describes a partial value that nothing reduces."""
        axes = listed(layout.over)
        reduced = "summed" if layout.kind == "sum" else f"by its {layout.kind}"
        text = f"{reduced} over {axes} it is right: a reduction over {axes} is missing"
        call = f"jax.lax.{REDUCTIONS[layout.kind]}(…, {code(layout.over)})"
        return self.say(e, text, f"Add {call}.")

    def describe(self, e: Execution, option: int | None = None) -> Origin:
        """Describes results that nothing explains; `option` is the layout that mends them."""
        twin = self.twins.get(e)
        if twin is None:
            there = {(other.place, other.name) for other in self.there.executions}
            if (e.place, e.name) not in there:
                return self.say(e, ONLY_HERE, SAME)
            found = partial_operand(self.m, e.operation, self.layouts_in(e))
            return self.say(e, *(found or (OTHERWISE, SAME)))
        for x, whole in zip(e.ins, twin.ins, strict=True):
            is_number = self.is_given(x) and isinstance(x, Exact) and x.value.size == 1
            if is_number and self.layout(x, whole) is None:
                here, there = (value.value.flat[0] for value in (x, whole))
                text = f"a number that depends on the mesh: {here} here, {there} on one device"
                size = "x.shape[i] * jax.lax.axis_size(axis)"
                return self.say(e, text, f"Compute it from global sizes, such as {size}.")
        layouts = self.layouts_out(e)
        i = layouts.index(None) if None in layouts else 0
        x, whole = e.outs[i], twin.outs[i]
        options = self.possible(x, whole)
        if option is not None and option < len(options):
            options.insert(0, options.pop(option))
        case = Case(self.m, e.operation, self.layouts_in(e), x, whole, options)
        return self.say(e, *diagnose(case))

    def say_returned(
        self, mapped: Execution, i: int, x: Any, layout: Layout | None, declared: Layout
    ) -> Origin:
        """Describes a result that is not as it is declared."""
        assert layout is not None
        e = self.m.makers.get(id(x), mapped)
        if layout.kind == "sum":
            for dim, axes in enumerate(declared.dims):
                if axes and set(axes) <= set(layout.over):
                    call = f"psum_scatter(…, {code(axes)}, scatter_dimension={dim}, tiled=True)"
                    text = f"summed over {listed(axes)} it is right: a reduction is missing"
                    return self.say(e, text, f"Add jax.lax.{call}.")
        if layout.kind:
            return self.say_partial(e, layout)
        text = f"result {i} is {layout}, and out_specs declares {declared}"
        return self.say(e, text, "Declare what it is, or return what is declared.")


def _by_key(executions: Sequence[Execution]) -> dict[Any, list[Execution]]:
    """Returns the executions with each key, in the order in which they began."""
    found = collections.defaultdict(list)
    for e in sorted(executions, key=lambda e: e.index):
        found[e.key].append(e)
    return found


def _combined(layout: Layout, m: Rerun, operation: Operation, ins: list) -> list:
    """Runs an equation, and reduces its results over devices."""
    return [combine(m, x, layout) for x in m.compute(operation, ins)]
