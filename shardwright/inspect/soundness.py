"""Checks, before the first step of a run, that its steps compute on this mesh what they compute on
one device.

Both programs run, at small sizes, in exact arithmetic (shardlib.exact), and all their results are
compared.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardlib.equations import is_integer
from shardlib.exact import sizes
from shardlib.exact.compare import Difference, compare_results, digest_of, not_compared, run_draws
from shardlib.exact.coverage import Coverage
from shardlib.exact.endings import Undecided, Wrong
from shardlib.exact.machine import Machine
from shardlib.exact.origin import origins
from shardlib.exact.rounding import differing_dtypes
from shardlib.exact.values import Exact, move
from shardlib.findings import Finding, raise_for
from shardlib.places import place, users_call
from shardlib.tracing import on_one_device, tracing
from shardwright.axes import OPTIONAL
from shardwright.inspect.fresh import reimport
from shardwright.inspect.smaller import LENGTH, NOT_FINITE, Small, draw, make_other, make_small
from shardwright.optimizers.rates import own_functions
from shardwright.program.best_effort import in_a_line
from shardwright.program.processes import in_all_processes
from shardwright.program.remembered import remembered
from shardwright.program.stages import placement_of
from shardwright.program.step import EINSUM_ATTENTION, NAMES, Step

OF_MACHINES = (
    "devices",
    "local_devices",
    "device_count",
    "local_device_count",
    "process_count",
    "process_index",
)
OF_MACHINES += ("get_mesh",)
"""Functions of JAX that a step must not call: their results are the same in a trace for another
mesh."""
SHOWN = 5
"""Number of findings that an error shows."""
PLAIN = {**EINSUM_ATTENTION, "training.loss_chunk": None}
"""Edits of the step on one device: attention in one product, without blocks, and the loss in one
chunk."""
SEEDS = {"training": (0, 1, 2, NOT_FINITE), "evaluation": (0, 1), "start": (0,)}
"""Seeds of the inputs on which each program runs."""


LONGER = 3 * LENGTH
"""Positions of a sequence in which a step is run again if LENGTH of them leave something
undecided."""


class Verdict(NamedTuple):
    """What was found out about the programs of a step.

    Attributes:
        found: what is wrong.
        undecided: lines of which the inputs that were run do not show what the run's may do.
        apart: what was run by something that stands for it, such as a kernel of attention.
        results: hashes of the inputs of each program, and of each result.
    """

    found: list[Finding]
    undecided: Sequence[str] = ()
    apart: Sequence[str] = ()
    results: Mapping[str, str] = {}


class Checked(NamedTuple):
    """What a check that rejects nothing says.

    Attributes:
        how: how the programs were checked, for a line of the run.
        results: hashes of their inputs, and of each result in exact arithmetic.
    """

    how: str
    results: Mapping[str, str]


def check_steps(step: Step, names: tuple[str, ...] = NAMES) -> Checked:
    """Raises unless the programs of a step compute on their mesh what they compute on one device.

    Args:
        step: one of the programs, as the run executes it.
        names: the programs that are checked.

    Raises:
        ShardError: names the lines of the source that are wrong, with the remedy; or lines that the
            check cannot decide, unless training.accept_undecided accepts them.
    """

    def check() -> dict[str, Any]:
        verdict = examine(step, names)
        raise_for(verdict.found, SHOWN)
        accepted = step.config.training.accept_undecided
        if verdict.undecided and not accepted:
            raise_for([Finding(f"{line}\n  remedy: {REMEDY}") for line in verdict.undecided], SHOWN)
        how = [f"exact arithmetic, {len(SEEDS['training'])} inputs", *verdict.apart]
        how += [f"not decided: {', '.join(verdict.undecided)}"] * bool(verdict.undecided)
        return Checked("; ".join(how), {} if verdict.undecided else verdict.results)._asdict()

    def known() -> Checked:
        found, day = remembered(step, f"sound {' '.join(names)}", check)
        return Checked(
            found["how"] + f"; on {day}, and nothing has changed since" * bool(day),
            found["results"],
        )

    return in_all_processes(lambda: known() if jax.process_index() == 0 else Checked("", {}))


REMEDY = "set training.accept_undecided=true to run without knowing it"


def find_unsound(step: Step) -> list[Finding]:
    """Finds what is wrong with the programs of a step on its mesh.

    The argument is that of check_steps.
    """
    return examine(step).found


def examine(step: Step, names: tuple[str, ...] = NAMES) -> Verdict:
    """Runs the programs of a step at small sizes, on the mesh and on one device, and compares all
    results.
    """
    kinds = [
        kind for kind in type(step.model).__mro__ if kind.__module__ not in ("builtins", "typing")
    ]
    makers = [step.spec.init_state, step.spec.make_training_step, step.spec.make_evaluation_step]
    makers += own_functions(step.config.optimizer)
    if found := list(
        dict.fromkeys(finding for part in (*makers, *kinds) for finding in _machines(part))
    ):
        return Verdict(found)
    try:
        _programs(step, names)
    except Undecided as error:
        if isinstance(error.__cause__, ValueError):  # it says what to change
            raise error.__cause__ from None
        return Verdict([], [str(error)])
    verdict = _examine_at(step, names, LENGTH)
    if not verdict.undecided or step.config.training.seq_len <= LENGTH:
        return verdict
    # a model may divide a sequence into more than LENGTH shows
    longer = _examine_at(step, names, LONGER)
    return verdict if longer.undecided else longer


def _examine_at(step: Step, names: tuple[str, ...], length: int) -> Verdict:
    """Examines a step in sequences of this many positions, or more where it needs them."""
    try:
        small = make_small(step, length)
        with reimport(_on_one_device(small.real)) as whole:
            traces = [_programs(whole, names)]
        for fresh in (small.step, dataclasses.replace(_on_one_device(small.step), like=whole)):
            with reimport(fresh) as imported:
                traces.append(_programs(imported, names))
        other = make_other(step, small, length)
        others: dict[str, Step] = {}
        if other:
            with reimport(other.step) as imported:
                others = _programs(imported, names)
    except Undecided as error:
        return Verdict([], [str(error)])
    undecided: list[str] = []
    results: dict[str, str] = {}
    for name in sorted(names):
        # evaluation first: it is faster, and names a line of the forward pass
        smalls = [small, other] if other else [small]
        verdict = _compare(smalls, others.get(name), *(programs[name] for programs in traces))
        if verdict.found:
            return verdict
        undecided += verdict.undecided
        results |= verdict.results
    apart = [f"attention by {', '.join(small.kernels)} run as blockwise"] if small.kernels else []
    apart += ["sums by id run as scatter-adds"] * small.step.plain_sums
    apart += ["without FP8, whose scales each device chooses"] if step.config.training.fp8 else []
    return Verdict([], [*dict.fromkeys(undecided)], apart, results)


def _on_one_device(step: Step) -> Step:
    """Returns a step on one device, in its plainest form, with the choices for its mesh."""
    return step.other(
        PLAIN, mesh=on_one_device(step.mesh, without=OPTIONAL), planned=dict(step.mesh.shape)
    )


def traced(step: Step) -> Any:
    """Traces a program of a step. Raises Undecided if it does not trace."""
    try:
        return step.jaxpr
    except Exception as error:  # whatever the program does
        call = users_call(error)
        where = f"{place(call.tb_frame.f_code.co_filename, call.tb_lineno)}: " if call else ""
        on = " on one device" if step.mesh.size == 1 else ""
        raise Undecided(
            f"{where}the {step.name} step does not trace{on}: {in_a_line(error)}"
        ) from error


def _programs(step: Step, names: tuple[str, ...]) -> dict[str, Step]:
    """Traces programs of a step."""
    steps = {name: step.other(name=name) for name in names}
    for program in steps.values():
        traced(program)
    return steps


def _compare(
    smalls: list[Small], second: Step | None, whole: Step, step: Step, twin: Step
) -> Verdict:
    """Runs a program and the one of one device, `twin`, of which `whole` is that at the run's
    sizes.

    `second` is the program at the sizes of the second of `smalls`, if there are two.
    """
    with tracing(step.mesh):
        order = placement_of(step.config, step.model).order
    arguments = _paths(step.traced.args_info)
    results = _paths(step.traced.out_info)
    coverage = Coverage()
    draws = [draw(step, seed) for seed in SEEDS[step.name]]
    placed = [_placed(args, arguments, order) for args in draws]

    def run(is_reversed: bool = False) -> tuple[list[Difference], Machine, list[Exact]]:
        machine, outs = run_draws(
            step.jaxpr, step.mesh.shape, placed, coverage.observe, is_reversed
        )
        other, expected = run_draws(twin.jaxpr, twin.mesh.shape, draws, is_reversed=is_reversed)
        moved = [
            move(functools.partial(np.take, indices=order, axis=other.rank), x) if is_stack else x
            for x, is_stack in zip(expected, _are_stacks(results, order), strict=True)
        ]
        return compare_results(machine, outs, other, moved), other, expected

    try:
        differing, other, expected = run()
    except Undecided as error:
        return Verdict([], [str(error)])
    except Wrong as error:
        return Verdict([Finding(str(error), is_wrong=True)])
    inputs = [other.whole(x) for args in draws for x in args]
    hashes = {f"{step.name}: inputs": digest_of(inputs)}
    hashes |= {
        f"{step.name}: {_named(path)}": digest_of([x])
        for path, x in zip(results, expected, strict=True)
    }
    if differing:
        alike = [*_like(step), twin.jaxpr] if order is None else []
        for program, args in itertools.product(alike, placed):
            if lines := origins(step.jaxpr, program, step.mesh.shape, args):
                return Verdict([Finding(str(line), is_wrong=True) for line in lines])
        return Verdict([Finding(text, is_wrong=True) for text in _texts(step, results, differing)])
    if nans := not_compared([(other, expected)]):
        return Verdict([], _texts(step, results, nans), results=hashes)
    small = smalls[0]
    real = small.real.other(name=step.name)
    if texts := differing_dtypes(real.jaxpr, whole.jaxpr):
        return Verdict([Finding(text, is_wrong=True) for text in texts])
    programs = [real.jaxpr, step.jaxpr, *([second.jaxpr] if second else [])]
    lines = sizes.compare(
        programs, *(_numbers(of) for of in ([s.dims for s in smalls], [s.axes for s in smalls]))
    )
    lines += sizes.compare([whole.jaxpr, twin.jaxpr], small.dims, small.axes)
    if lines:
        return Verdict([], lines, results=hashes)
    bounds = _bounds(real, arguments, draws)
    undecided = coverage.undecided(real.jaxpr, real.mesh.shape, step.jaxpr, bounds)
    if undecided:
        with contextlib.suppress(Undecided, Wrong):
            differing, other, expected = run(is_reversed=True)
            if not differing and not not_compared([(other, expected)]):
                undecided = coverage.undecided(real.jaxpr, real.mesh.shape, step.jaxpr, bounds)
    return Verdict([], undecided, results=hashes)


def _numbers(pairs: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, ...]]:
    """Returns sizes by name: the run's, and one of each small program, which all of `pairs`
    name.
    """
    first, *others = pairs
    names = [name for name in first if all(name in of for of in others)]
    return {name: (*first[name], *(of[name][1] for of in others)) for name in names}


def _texts(step: Step, results: list[str], found: list[Difference]) -> list[str]:
    """Returns what was found about the results of a step, with their names."""
    texts = [
        f"{_named(results[x.result])}: {x.text}" if x.result is not None else x.text for x in found
    ]
    return [f"the {step.name} step: {text}" for text in texts]


def _bounds(real: Step, paths: list[str], draws: list[list[Any]]) -> list[tuple[int, int] | None]:
    """Returns least and largest entry of each argument: of integers that a dataset adds, those that
    were drawn.
    """

    def bounds_of(path: str, drawn: tuple[Any, ...]) -> tuple[int, int] | None:
        if not is_integer(drawn[0].dtype):
            return None
        if drawn[0].shape == ():
            return 0, 2**32 - 1 if "seed" in path else 2**31 - 2  # a number of steps
        if "targets" in path:
            return 0, real.config.model.vocab - 1
        return int(np.min(drawn)), int(np.max(drawn))

    return [
        bounds_of(path, drawn) for path, drawn in zip(paths, zip(*draws, strict=True), strict=True)
    ]


def _like(step: Step) -> list[Any]:
    """Returns the program of one device in the form of the mesh, whose lines can be compared, if it
    can be traced.
    """
    # A ring of one device has another order of positions.
    without = OPTIONAL if step.config.training.context == "ring" else ()
    try:
        mesh = on_one_device(step.mesh, without)
        return [step.other(mesh=mesh, planned=dict(step.mesh.shape)).jaxpr]
    except Exception:  # whatever the program does there
        return []


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _named(path: str) -> str:
    """Returns the name of a result by its path, such as [0].weights.embed."""
    name = re.sub(r"^(\[\d+\])?\.", "", path)
    return f"result {name}" if name == path else name


def _are_stacks(paths: list[str], order: Any) -> list[bool]:
    """Which arrays have layers in the order of stages, which is not that of one device."""
    return [order is not None and ".layers." in path for path in paths]


def _placed(args: list[Any], paths: list[str], order: Any) -> list[Any]:
    stacks = _are_stacks(paths, order)
    return [x[order] if is_stack else x for x, is_stack in zip(args, stacks, strict=True)]


def refuse(find: Callable[[], list[Finding]]) -> None:
    """Raises ShardError for what `find` finds.

    If several processes call this with the same program, as they all must, the first one checks it.
    """
    in_all_processes(lambda: (raise_for(find(), SHOWN) or {}) if jax.process_index() == 0 else {})


def _package(name: str) -> str:
    return name.partition(".")[0]


def _machines(part: Callable[..., Any]) -> Iterator[Finding]:
    """Where `part`, or what it names in its module, asks JAX about the machine, which is the same
    on all meshes.
    """
    lines, _ = inspect.findsource(sys.modules[part.__module__])
    defined: dict[str, Any] = {}
    tree = ast.parse("".join(lines))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    of_modules = [x for node in imports if isinstance(node, ast.Import) for x in node.names]
    packages = {"jax"} | {x.asname for x in of_modules if x.asname and _package(x.name) == "jax"}
    aliases = [
        x
        for node in imports
        if _package(getattr(node, "module", None) or "") == "jax"
        for x in node.names
    ]
    imported = {alias.asname or alias.name for alias in aliases if alias.name in OF_MACHINES}
    node: Any
    for node in tree.body:
        stored = (
            x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
        )
        defined |= dict.fromkeys([node.name] if hasattr(node, "name") else stored, node)
    reached = [name for name in (part.__name__,) if name in defined]
    for name in reached:  # the list grows
        names = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        reached += sorted(names & defined.keys() - {*reached})
    for node in (node for name in reached for node in ast.walk(defined[name])):
        name = getattr(node, "id", getattr(node, "attr", ""))
        named = isinstance(node, ast.Name) and node.id in imported
        is_attribute = isinstance(node, ast.Attribute) and node.attr in OF_MACHINES
        if named or (is_attribute and _package(ast.unparse(node)) in packages):
            where = place(inspect.getsourcefile(sys.modules[part.__module__]) or "?", node.lineno)
            problem = (
                f"{ast.unparse(node)} is the same on all meshes, so the check cannot see "
                "what depends on it"
            )
            remedy = "use shardops.axis_size('r d'), the number of devices along axes"
            yield Finding(f"{where}: {problem}\n  remedy: {remedy}")
