"""Finds what is wrong in a whole traced program, by comparing it with its twin on one device.

Inside each jax.shard_map an Interpreter derives facts about blocks, beginning with in_specs.
Outside, both programs must compute the same on whole arrays. If one shard_map takes a result of
another, with the same spec, each device gets its own block back: then the facts about blocks still
hold, whatever the spec declares. JAX passes residuals to the backward pass in this way, stacked
along dim 0 over all axes.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from shardlib.equations import IDENTITIES, Eqn, body_of, jaxprs_of, shape_of
from shardlib.interpret import Domain, Operation, equations_in, interpret
from shardlib.proof.alignment import Paired
from shardlib.proof.control import anonymous, join, varying
from shardlib.proof.domain import UNIFORM, Sizes, SizesOnOne, Value, describe, devices, near, whole
from shardlib.proof.equation import Equation, Refused, Twins
from shardlib.proof.interpreter import Interpreter, block_of, read_array
from shardlib.proof.origins import callers_text, use_of
from shardlib.values import Sharding, axes_of_spec

AS_RUN = "as run"
"""The `form` of a Finding in a program that was traced as a run executes it."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A value that is wrong or not proved right. `text` has its line, the problem and a remedy."""

    text: str
    is_wrong: bool = False
    """True: the value contradicts its type. False: nothing proves that the program is right."""
    differs: bool = False
    """True: the program on one device does not compute the value."""
    form: str = AS_RUN
    """The form in which the program was traced."""

    def __str__(self) -> str:
        return self.text if self.form == AS_RUN else f"{self.text}\n  traced with: {self.form}"


Facts = dict[tuple[int, ...], tuple[Equation, list[Value]]]
"""The facts about the results of each equation inside a shard_map, by its `Operation.path`."""


def findings(
    program: ClosedJaxpr, twin: object, types: list | None = None
) -> tuple[list[Finding], Facts]:
    """Finds what is wrong in each jax.shard_map of a traced program.

    Also finds values outside of them that depend on the mesh.

    Args:
        program: the result of jax.make_jaxpr or of jax.jit(f).trace(...).jaxpr.
        twin: the same program traced on a mesh whose axes have one device each.
        types: the specs of the arguments of each shard_map, which give dims their names in
            messages; None: no names.

    Returns:
        The findings, and the facts about the results of each equation inside a shard_map.

    Raises:
        Different: the twin has other operations.
    """
    count = len(shard_maps_in(program))
    outside = _Outside(program, types if types and len(types) == count else [None] * count)
    _use(outside.run(Twins(program, twin), [None] * len(program.jaxpr.invars)))
    found = (s.finding for s in outside.found if s.is_used or not s.is_taken)
    return list(dict.fromkeys(found)), outside.facts


def shard_maps_in(program: object) -> list[Any]:
    """Returns the equations of a program, also in its bodies, that call jax.shard_map."""
    return [eqn for eqn in equations_in(program) if eqn.primitive.name == "shard_map"]


@dataclasses.dataclass
class _Suspect:
    """A finding about a value outside of jax.shard_map, which may turn out not to matter.

    It does not matter if nothing reads the value except shard_maps that get the facts about it.
    """

    finding: Finding
    is_taken: bool = False  # such a shard_map reads the value, or possibly nothing does
    is_used: bool = False  # something else reads the value


@dataclasses.dataclass(frozen=True)
class _Passed:
    """Facts about a value outside of jax.shard_map."""

    value: Value  # facts about each device's block; if `spec` is None, about the whole value
    spec: Sharding | None = None  # how a shard_map over the axes `sizes` put the blocks together
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    suspects: tuple[_Suspect, ...] = ()

    @property
    def is_positive_number(self) -> bool:
        return self.spec is None and self.value.is_constant and self.value.ratio > 0

    @property
    def is_cut(self) -> bool:
        """True if devices have different blocks of dim 0."""
        return bool(self.spec and self.spec[0])

    @property
    def has_known_layout(self) -> bool:
        """True if it is known how the value is cut, or does not matter, as for zeros."""
        return self.spec is not None or self.value.is_zero


def _use(values: Iterable[_Passed | None]) -> None:
    """Records that something other than a shard_map with facts about them reads the values."""
    for suspect in itertools.chain.from_iterable(x.suspects for x in values if x):
        suspect.is_used = True


REMEDY = "compute it inside jax.shard_map, or make it the same on every mesh"


class _Outside(Paired[_Passed | None]):
    """Follows a program outside of jax.shard_map. The fact None: the value equals its twin's."""

    def __init__(self, program: object, types: Sequence):
        super().__init__({}, {})
        self.found: list[_Suspect] = []  # in program order
        self.facts: Facts = {}
        self._program = program
        self._types = iter(types)

    def other(self, var: object, op: Equation | None) -> None:
        """Records that an operand, or a result of the program, is another value on one device."""
        where = f"{op.place()}: " if op else ""
        self._suspect(
            f"{where}outside jax.shard_map, another value is used than on one device\n  "
            f"remedy: {REMEDY}"
        )

    def number(self, here: Any, there: Any, op: Equation | None) -> _Passed | None:
        """Returns facts about a literal or captured array; None if it is the same on one device."""
        arrays = [getattr(x, "val", x) for x in (here, there)]
        value = read_array(*arrays)
        is_same = len({*map(np.shape, arrays)}) == 1
        if is_same and not value.unprovable and value.ratio == 1.0:
            return None
        if isinstance(here, Literal):
            return _Passed(value, suspects=(self._of_number(op),))
        text = (
            "an array that was made outside of the program depends on the mesh: "
            f"{here.dtype}{list(here.shape)}"
        )
        use = use_of(here, self._program)
        if use:
            lines = [f"{use.place()}: {text}", *filter(None, [callers_text(use.eqn)])]
        else:
            lines = [text]
        return _Passed(value, suspects=(self._suspect("\n  ".join([*lines, f"remedy: {REMEDY}"])),))

    def _suspect(self, finding: Finding | str) -> _Suspect:
        """Records a finding about a value, and returns its _Suspect."""
        self.found.append(_Suspect(Finding(finding) if isinstance(finding, str) else finding))
        return self.found[-1]

    def _of_number(self, op: Equation | None) -> _Suspect:
        """Records that a literal or parameter of `op`, or a literal result, depends on the mesh."""
        where = f"{op.place()}: {op.shown}" if op else "result"
        return self._suspect(
            f"{where}: a number outside of jax.shard_map depends on the mesh\n  remedy: {REMEDY}"
        )

    def follow(self, op: Any, ins: list[_Passed | None]) -> list[_Passed | None]:
        """Derives facts about the results of an equation."""
        ins = self.read(op.eqn.invars, op.twin.invars, ins, op.others, op)
        if op.name == "shard_map":
            return self._of_shard_map(op.eqn, op.twin, ins)
        numbers = (self._of_number(op),) if _numbers(op.eqn) != _numbers(op.twin) else ()
        blank = Value((UNIFORM,) * len(shape_of(op.eqn.outvars[0]) if op.eqn.outvars else ()))
        # With check_vma=False, JAX divides a gradient by the number of devices that get it, and
        # sums it inside the shard_map.
        if (
            op.name == "div"
            and ins[0] is None
            and ins[1]
            and ins[1].is_positive_number
            and jnp.issubdtype(op.eqn.outvars[0].aval.dtype, jnp.inexact)  # an integer is truncated
        ):
            made = Equation(op.eqn, ins=[blank, ins[1].value])
            value = dataclasses.replace(blank, ratio=near(1 / ins[1].value.ratio), scaled=made)
            return [_Passed(value, suspects=ins[1].suspects)]
        # A branch of a cond returns zeros in place of the residuals of another branch.
        if op.name.startswith("empty") or (
            op.name == "broadcast_in_dim" and ins[0] and ins[0].value.is_zero
        ):
            for suspect in numbers:
                suspect.is_taken = True
            return [_Passed(dataclasses.replace(blank, known=(0, 0)), suspects=numbers)]
        return ins if op.name in IDENTITIES else super().follow(op, ins)

    def apply(self, op: Any, ins: list[_Passed | None]) -> list[_Passed | None]:
        """Marks the operands as used, and follows bodies without facts about their arguments."""
        _use(ins)
        for bodies in zip(jaxprs_of(op.eqn), jaxprs_of(op.twin), strict=True):
            _use(self.run(Twins(*bodies), [None] * len(body_of(bodies[0])[0].invars), op))
        return [None] * len(op.eqn.outvars)

    def loop(self, op: Operation, *ins: list[_Passed | None]) -> list[_Passed | None]:
        """Follows the bodies of a while loop without facts about their arguments."""
        return self.apply(op, [*itertools.chain(*ins)])

    def scan(
        self,
        op: Operation,
        consts: list[_Passed | None],
        carry: list[_Passed | None],
        xs: list[_Passed | None],
    ) -> list[_Passed | None]:
        """Derives facts about the results of a scan, without any about its carry."""
        _use(carry)
        _use(x for x in xs if x and x.is_cut)
        rows = [
            None if x is None or x.is_cut else _in_turns(x, x.value.dims[1:], x.spec and x.spec[1:])
            for x in xs
        ]
        outs = self.run(op.body("jaxpr"), [*consts, *[None] * len(carry), *rows], op)
        carried, ys = outs[: len(carry)], outs[len(carry) :]
        _use(carried)
        turns = whole(op.params["length"])
        ys = [y and _in_turns(y, (turns, *y.value.dims), y.spec and ((), *y.spec)) for y in ys]
        return [*[None] * len(carried), *ys]

    def branch(
        self, op: Operation, which: _Passed | None, args: list[_Passed | None]
    ) -> list[_Passed | None]:
        """Derives facts about the results of a conditional, and marks its predicate as used."""
        _use([which])
        return super().branch(op, which, args)

    def join(self, op: Any, a: _Passed | None, b: _Passed | None) -> _Passed | None:
        """Joins the facts about a result of a conditional from two branches."""
        if (
            a is None
            or b is None
            or not (a.has_known_layout and b.has_known_layout)
            or len({a.spec, b.spec} - {None}) != 1
        ):
            _use([a, b])
            return None
        x = a if b.spec is None else b
        eq = dataclasses.replace(op, sizes=Sizes(x.sizes), twin_sizes=SizesOnOne({}))
        suspects = a.suspects + b.suspects
        return dataclasses.replace(x, value=join(eq, a.value, b.value), suspects=suspects)

    def _of_shard_map(self, eqn: Eqn, twin: Eqn, ins: list[_Passed | None]) -> list[_Passed | None]:
        # The compiler shards over the other axes, of which the program shows nothing.
        manual = eqn.params["newly_manual_axes"]
        sizes = Sizes({axis: n for axis, n in eqn.params["mesh"].shape.items() if axis in manual})
        twin_sizes = dict(twin.params["mesh"].shape)
        is_unchecked = not eqn.params.get("check_vma", True)
        interpreter = Interpreter(sizes, twin_sizes, is_unchecked)
        (body, _), (other, _) = body_of(eqn.params["jaxpr"]), body_of(twin.params["jaxpr"])
        # Constants of the caller come before the arguments.
        known = [[dim.name for dim in spec.dims] for spec in next(self._types) or ()]
        names = [None] * (len(body.invars) - len(known)) + known
        args = []
        for x, spec, var, name in zip(ins, eqn.params["in_specs"], body.invars, names, strict=True):
            axes = axes_of_spec(spec, len(var.aval.shape))
            args.append(
                _argument(x, axes, block_of(axes, var.aval.shape, sizes, names=name), sizes)
            )
        values = interpreter.run(Twins(eqn.params["jaxpr"], twin.params["jaxpr"]), args)
        self.facts |= interpreter.noted
        for unprovable in interpreter.problems.values():
            self._suspect(str(interpreter.blamed(unprovable)))
        outs = []
        for i, (spec, value, there) in enumerate(
            zip(eqn.params["out_specs"], values, other.outvars, strict=True)
        ):
            axes = axes_of_spec(spec, len(there.aval.shape))
            var = body.outvars[i]
            suspects = ()
            if finding := _finding(
                interpreter, i, value, axes, body, _whole_shape(there.aval, axes, twin_sizes)
            ):
                live = {axis for axis, n in sizes.items() if n > 1}
                over = live & {*itertools.chain(*axes)}
                apart = live if is_unchecked else varying(var.aval, sizes)
                suspects = (self._suspect(finding),)
                # If devices may differ over an axis that the spec lacks, a device may get the block
                # of another one.
                suspects[0].is_used = not apart <= over
                # It may be a residual. The backward pass does not read all of them.
                suspects[0].is_taken = apart == over and len(list(filter(None, axes))) == 1
            outs.append(_Passed(value, axes, sizes, suspects))
        return outs


def _argument(
    x: _Passed | None, axes: Sharding, declared: Value, sizes: Mapping[str, int]
) -> Value:
    """Returns facts about an argument of a shard_map that its spec shards over `axes`.

    They are `declared`, unless more is known: of a number that depends on the mesh, or of what
    another shard_map returned with this spec.
    """
    if (
        x is None
        or (x.spec is None and x.value.unprovable)
        or (x.spec is not None and (x.spec, x.sizes) != (axes, sizes))
    ):
        _use([x])
        return declared
    for suspect in x.suspects:
        suspect.is_taken = True
    if x.value.is_constant:  # JAX may have moved it out of a loop: blame what takes it
        return dataclasses.replace(x.value, scaled=None)
    return dataclasses.replace(x.value, dims=declared.dims) if x.spec is None else x.value


def _in_turns(x: _Passed, dims: tuple, spec: Sharding | None) -> _Passed | None:
    """Returns facts about a value of any iteration of a loop, or about a stack of all of them."""
    if not (x.value.unprovable or x.value.is_block):
        _use([x])
        return None
    known = None if x.value.count else x.value.known
    value = dataclasses.replace(anonymous(x.value), dims=dims, count=(), known=known)
    return dataclasses.replace(x, value=value, spec=spec)


def _numbers(eqn: Eqn) -> dict:
    """Returns the parameters of an equation that consist of numbers, dtypes and enums."""
    kinds = int | float | np.dtype | enum.Enum
    return {
        name: value
        for name, value in eqn.params.items()
        if all(isinstance(x, kinds) for x in jax.tree.leaves(value))
    }


class _Places(Domain[str]):
    """Finds the line that makes each value, `file.py:line: `; for casts by JAX, the operand's."""

    def constant(self, x: object) -> str:
        return ""

    def follow(self, op: Operation, ins: list[str]) -> list[str]:
        place = op.place()
        found = f"{place}: " if place != "?" else next(iter(ins), "")
        return [found] * len(op.eqn.outvars)


def _whole_shape(aval: Any, axes: Sharding, sizes: Any) -> tuple[int, ...]:
    return tuple(n * devices(sizes, a) for n, a in zip(aval.shape, axes, strict=True))


def _finding(
    interpreter: Interpreter,
    i: int,
    value: Value,
    axes: Sharding,
    body: Any,
    there: tuple[int, ...],
) -> Finding | None:
    """Compares result i of a shard_map with its spec; returns None if they agree.

    The sum of a block, declared with P(), gives "result 0 is f32[4 +d], and is declared f32[4]".
    """
    if value.unprovable:
        return Finding(str(interpreter.blamed(value.unprovable)), differs=value.unprovable.differs)
    if value.shift or value.folded or (value.ratio != 1.0 and value.scaled is not None):
        origin = value.shifting if value.shift else value.folding if value.folded else value.scaled
        try:
            origin.unscaled(origin.unfolded(origin.term(value)))
        except Refused as refusal:
            return Finding(str(origin.explain(refusal)), is_wrong=True)
        return None
    aval = body.outvars[i].aval
    sizes = interpreter.sizes
    declared = block_of(axes, aval.shape, sizes)
    here = _whole_shape(aval, axes, sizes)
    fits = all(d is UNIFORM or d == w for d, w in zip(value.dims, declared.dims, strict=True))
    if not (value.is_block and fits and value.ratio == 1.0) or value.partial or value.extreme:
        types = [describe(x, aval.shape, aval.dtype, sizes) for x in (value, declared)]
        problem = f"is {types[0]}, and is declared {types[1]}\n  remedy: {DECLARED}"
    elif here != there:
        problem = (
            f"has shape {here} here and {there} on one device\n  remedy: compute the shape from "
            "global sizes, shardops.size(name); declare what does not grow with the mesh without "
            "axes"
        )
    else:
        return None
    places = interpret(body, _Places(), [""] * len([*body.constvars, *body.invars]))
    return Finding(f"{places[i]}result {i} {problem}", is_wrong=True)


DECLARED = (
    "declare it as it is, or convert it to what is declared: psum or psum_scatter for a partial "
    "sum, all_gather for blocks, this device's block, at axis_index times its size, for what is "
    "whole"
)
