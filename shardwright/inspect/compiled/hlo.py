"""Parses the text of an optimized HLO program, as `jax.stages.Compiled.as_text` prints it.

Does not import JAX.

An operation has the id of a stack frame. Tables before the first computation hold the source line
of each frame.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple


class Shape(NamedTuple):
    """Type of an array on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its entries. Zero for types without entries, such as a token."""
        bits = re.search(r"\d+", self.dtype)
        return math.ceil(
            math.prod(self.dims) * (int(bits[0]) if bits else 8 * (self.dtype == "pred")) / 8
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Frame(NamedTuple):
    """A call that led to an operation. `function` is empty if the program does not name it."""

    file: str
    line: int
    function: str


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation of a computation.

    Attributes:
        name: unique in the program.
        opcode: such as "all-gather".
        shapes: shape of the result; of all parts of a tuple, in order.
        operands: names of the instructions that it reads, in order.
        attributes: text after the operands.
        is_root: True if its result is the computation's.
        op_name: JAX's name of the operation, such as "jit(f)/transpose(jvp())/while/body/mul";
            empty without one.
        frames: the calls in the source that led to it, innermost first.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    op_name: str
    frames: tuple[Frame, ...]

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that run as part of it, such as the body of a fusion or a
        loop.
        """
        found = re.findall(
            r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)",
            self.attributes,
        )
        branches = re.search(r"\bbranch_computations=\{([^}]*)\}", self.attributes)
        return (*found, *(re.findall(r"[\w.\-]+", branches[1]) if branches else ()))

    @property
    def index(self) -> int:
        """Index of the part of a tuple that a get-tuple-element reads."""
        return int(re.findall(r"\bindex=(\d+)", self.attributes)[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A function of the program.

    `instructions` are in the order of the text, which is the schedule's order.
    """

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(
            (i for i in self.instructions.values() if i.is_root), [*self.instructions.values()][-1]
        )

    @functools.cached_property
    def readers(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """An HLO module.

    Attributes:
        name: such as "jit_training_step".
        devices: number of devices of one instance of the program.
        mesh: number of devices along each axis, which `with_mesh` wrote before the text. Empty
            without it.
        computations: by name.
        entry: the computation that runs.
    """

    name: str
    devices: int
    mesh: dict[str, int]
    computations: dict[str, Computation]
    entry: Computation

    def turns(self, loop: Instruction) -> int | None:
        """Number of turns of a loop; None if neither the compiler nor the loop's condition tells
        it.

        Compilers for TPUs do not. A JAX loop with a known number of turns counts from 0 while it is
        below that number.
        """
        if count := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(count[1])
        found = re.search(r"\bcondition=%?([\w.\-]+)", loop.attributes)
        condition = self.computations[found[1]] if found else None
        if condition is None or "direction=LT" not in condition.root.attributes:
            return None
        bounds = [condition.instructions[name] for name in condition.root.operands]
        counted = [bound.opcode for bound in bounds] == ["get-tuple-element", "constant"]
        return int(bounds[1].operands[0]) if counted else None


def parse(text: str) -> Program:
    """Parses an HLO text. Raises ValueError if it is not one."""
    heading = re.search(r"^HloModule ([\w.\-]+)(?:.* num_partitions=(\d+))?", text, re.MULTILINE)
    if heading is None:
        raise ValueError('this is not the text of an HLO program: no line begins with "HloModule".')
    comment = re.match(r"// mesh ((?:\w+=\d+ ?)*)\n", text)
    mesh = (
        {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", comment[1])}
        if comment
        else {}
    )
    # kernels of TPUs have line breaks in their attributes
    text = re.sub(r'\n(?="|\}[^\n,])', " ", text)
    stacks = _stacks(text)
    computations = {}
    entry = None
    for is_entry, name, body in _COMPUTATION.findall(text):
        parsed = [_instruction(found, stacks) for found in _INSTRUCTION.finditer(body)]
        computations[name] = Computation(
            name, {instruction.name: instruction for instruction in parsed}
        )
        entry = computations[name] if is_entry else entry
    if entry is None:
        raise ValueError("the text of the HLO program has no ENTRY computation, or is cut off.")
    return Program(heading[1], int(heading[2] or 1), mesh, computations, entry)


_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([\w.\-]+) (?:\([^\n]*)?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL
)
_INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)$", re.MULTILINE
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")


def _instruction(found: re.Match[str], stacks: Mapping[str, tuple[Frame, ...]]) -> Instruction:
    is_root, name, types, opcode, operands, attributes = found.groups()
    op_name = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', attributes)
    stack = re.search(r"\bstack_frame_id=(\d+)", attributes)
    return Instruction(
        name=name,
        opcode=opcode,
        shapes=tuple(
            Shape(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size))
            for dtype, dims in _ARRAY.findall(types)
        ),
        operands=tuple(re.findall(r"([\w.\-]+)(?=, |$)", operands)),
        attributes=attributes,
        is_root=bool(is_root),
        op_name=op_name[1] if op_name else "",
        frames=stacks.get(stack[1], ()) if stack else (),
    )


def _read_names(table: str) -> dict[str, str]:
    """The text of each id."""
    return dict(re.findall(r'^(\d+) "(.*)"$', table, re.MULTILINE))


def _read_rows(table: str) -> dict[str, dict[str, str]]:
    """The fields of each id; one that is missing is empty."""
    return {
        number: collections.defaultdict(str, re.findall(r"(\w+)=(\d+)", fields))
        for number, fields in re.findall(r"^(\d+) \{(.*)\}$", table, re.MULTILINE)
    }


def _stacks(text: str) -> dict[str, tuple[Frame, ...]]:
    """The frame of each id and those around it, innermost first."""
    tables = {
        title: table for title, _, table in (part.partition("\n") for part in text.split("\n\n", 5))
    }
    files, functions = (
        _read_names(tables.get(title, "")) for title in ("FileNames", "FunctionNames")
    )
    locations, frames = (
        _read_rows(tables.get(title, "")) for title in ("FileLocations", "StackFrames")
    )
    places = {
        number: Frame(
            files[x["file_name_id"]], int(x["line"] or 0), functions.get(x["function_name_id"], "")
        )
        for number, x in locations.items()
        if x["file_name_id"] in files
    }
    # XLA prints the id of the parent, or one more, so that 1 is no parent.
    shift = int(any(frame["parent_frame_id"] == number for number, frame in frames.items()))
    found: dict[str, tuple[Frame, ...]] = {}
    for number, frame in frames.items():  # a parent is before its children
        outer = found.get(str(int(frame["parent_frame_id"] or 0) - shift), ())
        place = places.get(frame["file_location_id"])
        found[number] = (place, *outer) if place else outer
    return found
