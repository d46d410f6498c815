"""The text of an optimized HLO program, as `jax.stages.Compiled.as_text` prints it, as data. Does not import JAX.

XLA prints the source lines of an operation in one of two ways: in its own metadata (source_file, source_line), or as
the number of a stack frame, with tables of frames before the first computation.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Shape(NamedTuple):
    """Type of an array of one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Number of bytes of its entries. Zero for what holds none, such as a token."""
        bits = re.search(r"\d+", self.dtype)
        return math.ceil(math.prod(self.dims) * (int(bits[0]) if bits else 8 * (self.dtype == "pred")) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Frame(NamedTuple):
    """A call on the way to an operation. `function` is empty where the program does not name it."""

    file: str
    line: int
    function: str


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation of a computation.

    Attributes:
        name: unique in the program.
        opcode: such as "all-gather".
        shapes: of the result; of all parts of a tuple, in order.
        operands: names of the instructions that it reads, in order.
        attributes: text after the operands.
        is_root: whether its result is the computation's.
        op_name: JAX's name of the operation, such as "jit(f)/transpose(jvp())/while/body/mul". Empty without one.
        frames: the calls in the source that lead to it, innermost first.
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
        """Names of the computations that run as part of it, such as a fusion's or a loop's body."""
        found = re.findall(
            r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)", self.attributes
        )
        branches = re.search(r"\bbranch_computations=\{([^}]*)\}", self.attributes)
        return (*found, *(re.findall(r"[\w.\-]+", branches[1]) if branches else ()))

    @property
    def index(self) -> int:
        """Which part of a tuple a get-tuple-element reads."""
        return int(re.search(r"\bindex=(\d+)", self.attributes)[1])

    @property
    def turns(self) -> int | None:
        """Number of turns of a loop; None if the compiler does not know it."""
        count = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(count[1]) if count else None


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A function of the program. `instructions` are in the order of the text, which is that of the schedule."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next((i for i in self.instructions.values() if i.is_root), [*self.instructions.values()][-1])

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
        mesh: number of devices along each axis, which `with_mesh` wrote before the text. Empty without it.
        computations: by name.
        entry: the computation that runs.
        files: paths of the source files that it names.
    """

    name: str
    devices: int
    mesh: dict[str, int]
    computations: dict[str, Computation]
    entry: Computation
    files: tuple[str, ...]

    def instructions(self) -> Iterator[Instruction]:
        """All of them, those of fusions and loops too."""
        for computation in self.computations.values():
            yield from computation.instructions.values()


def with_mesh(text: str, mesh: Mapping[str, int]) -> str:
    """The text of a program, after a comment with the mesh that it was compiled for."""
    return f"// mesh {' '.join(f'{axis}={size}' for axis, size in mesh.items())}\n{text}"


def parse(text: str) -> Program:
    """The program of an HLO text. Raises ValueError for a text that is none."""
    heading = re.search(r"^HloModule ([\w.\-]+)", text, re.MULTILINE)
    if heading is None:
        raise ValueError('this is no text of an HLO program: it has no line that begins with "HloModule".')
    comment = re.match(r"// mesh ((?:\w+=\d+ ?)*)\n", text)
    mesh = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", comment[1])} if comment else {}
    partitions = re.search(r"num_partitions=(\d+)", text[heading.start() : text.find("\n", heading.start())])
    stacks, computations, entry, files = _Stacks(text), {}, None, {}
    instructions: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if instructions is None:
            if head := _HEAD.match(line):
                instructions, name, is_entry = {}, head[2], bool(head[1])
        elif line.startswith("}"):
            if instructions:
                computations[name] = Computation(name, instructions)
                entry = computations[name] if is_entry else entry
            instructions = None
        elif instruction := _instruction(line, stacks):
            instructions[instruction.name] = instruction
            files.update(dict.fromkeys(frame.file for frame in instruction.frames))
    if entry is None:
        raise ValueError("the text of the HLO program has no ENTRY computation, or ends before its end.")
    return Program(heading[1], int(partitions[1]) if partitions else 1, mesh, computations, entry, tuple(files))


_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_NAME = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`; the last one if none does."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1


def _instruction(line: str, stacks: "_Stacks") -> Instruction | None:
    name = _NAME.match(line)
    if name is None:
        return None
    start = name.end()
    end = _closing(line, start) + 1 if line[start : start + 1] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    shapes = tuple(
        Shape(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size))
        for dtype, dims in _ARRAY.findall(line[start:end])
    )
    close = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : close]
    if "%" in inside:
        operands = re.findall(r"%([\w.\-]+)", inside)
    elif opcode[1] == "constant":
        operands = []
    else:
        operands = [part.split()[-1] for part in re.sub(r"/\*.*?\*/", "", inside).split(",") if part.strip()]
    attributes = line[close + 1 :]
    op_name = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', attributes)
    return Instruction(
        name=name[2],
        opcode=opcode[1],
        shapes=shapes,
        operands=tuple(operands),
        attributes=attributes,
        is_root=bool(name[1]),
        op_name=op_name[1] if op_name else "",
        frames=stacks.of(attributes),
    )


class _Stacks:
    """The frames of a program: of its tables, or of the metadata of an instruction."""

    def __init__(self, text: str):
        tables = {title: table for title, _, table in (part.partition("\n") for part in text.split("\n\n", 5))}
        names = lambda title: dict(re.findall(r'^(\d+) "(.*)"$', tables.get(title, ""), re.MULTILINE))
        rows = lambda title: {
            number: dict(re.findall(r"(\w+)=(\d+)", fields))
            for number, fields in re.findall(r"^(\d+) \{(.*)\}$", tables.get(title, ""), re.MULTILINE)
        }
        files, functions, frames = names("FileNames"), names("FunctionNames"), rows("StackFrames")
        self._places = {
            number: Frame(files[x["file_name_id"]], int(x["line"]), functions.get(x["function_name_id"], ""))
            for number, x in rows("FileLocations").items()
            if x["file_name_id"] in files
        }
        # XLA prints the number of the parent, or one more, so that 1 is no parent.
        shift = int(any(frame.get("parent_frame_id") == number for number, frame in frames.items()))
        parents = {number: str(int(frame.get("parent_frame_id", 0)) - shift) for number, frame in frames.items()}
        self._frames = {number: (frame["file_location_id"], parents[number]) for number, frame in frames.items()}

    def of(self, attributes: str) -> tuple[Frame, ...]:
        if number := re.search(r"\bstack_frame_id=(\d+)", attributes):
            return self._stack(number[1])
        file, line = re.search(r'\bsource_file="([^"]*)"', attributes), re.search(r"\bsource_line=(\d+)", attributes)
        return (Frame(file[1], int(line[1]), ""),) if file and line else ()

    @functools.cache  # noqa: B019 (it lives as long as the text is parsed)
    def _stack(self, number: str) -> tuple[Frame, ...]:
        found, seen = [], set()
        while number in self._frames and number not in seen:
            seen.add(number)
            place, number = self._frames[number]
            found += [self._places[place]] if place in self._places else []
        return tuple(found)
