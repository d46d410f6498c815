"""Each refusal of the analysis is needed: without it some wrong program is accepted, or refused for another reason.

Another reason, because many refusals stand before a check of the sizes on one device, which is less plain.
"""

import ast
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shardlib.proof import (
    collectives,
    control,
    elementwise,
    equation,
    interpreter,
    lookups,
    positions,
    primitives,
    shapes,
    sums,
)
from shardlib.proof.alignment import Different
from shardlib.proof.check import findings
from shardlib.proof.equation import Refused
from tests.programs import bad_operands
from tests.programs.corpus import WRONG
from tests.programs.program import traced

MODULES = (collectives, control, elementwise, equation, interpreter, lookups, positions, primitives, shapes, sums)
DEMANDS = {"block", "finished", "term", "plain", "unscaled", "uncut", "same", "same_size"}
"""Functions that refuse an operand, or give it back."""
SURVIVORS = {"collectives": 9, "control": 4, "elementwise": 1, "equation": 0, "interpreter": 5, "lookups": 8}
SURVIVORS |= {"positions": 4, "primitives": 2, "shapes": 4, "sums": 5}
# Programs elsewhere need three of them: arguments of per-device code (test_check.py), the NaN of a lookup
# (test_check.py). No program shows yet that loops over own rows need four of theirs.
# Most of them stand before another refusal of the same programs:
# - soundness.alignment, for which the program is another one on one device: lookups, sums and folds of several sizes.
# - findings without a twin: the one entry of a squeeze, of a key, of a bitcast, a Fourier transform, a loop over a
#   sharded dim. With one the sizes differ, or the program cannot be traced on one device.
# - what an earlier equation refuses: the rest of a sum or comparison of positions, a predicate, a mask of a sum, two
#   numbers of the mesh that are combined, a partial sum over an axis of its own dims, another dtype.
# - groups of devices and untiled exchanges, whose parameters or sizes differ on one device (seven of collectives).
# - cuDNN's attention, of which test_kernels.py has programs.
"""How many refusals of a module no program here shows to be needed. May only fall."""


class Mutant(NamedTuple):
    module: types.ModuleType
    lines: range
    text: str
    tree: ast.Module


class Void(ast.NodeTransformer):
    """Makes the refusal number `target` of a module void."""

    def __init__(self, target: int):
        self.target, self.count, self.node = target, -1, None

    def _is_next(self, node: ast.AST) -> bool:
        self.count += 1
        if self.count == self.target:
            self.node = node
        return self.count == self.target

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        is_refusal = isinstance(node.exc, ast.Call) and getattr(node.exc.func, "id", "") == "Refused"
        return ast.copy_location(ast.Pass(), node) if is_refusal and self._is_next(node) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in DEMANDS and self._is_next(node):
            operand = node.args[0] if node.args else ast.Constant(None)
            return operand if not isinstance(operand, ast.Starred) else ast.copy_location(ast.Constant(None), node)
        self.generic_visit(node)
        return node


def mutants(module: types.ModuleType) -> Iterator[Mutant]:
    source, target = Path(module.__file__).read_text(), 0
    while True:
        void = Void(target)
        tree = ast.fix_missing_locations(void.visit(ast.parse(source)))
        if void.node is None:
            return
        node = void.node
        text = " ".join(ast.get_source_segment(source, node).split())
        yield Mutant(module, range(node.lineno, node.end_lineno + 1), text, tree)
        target += 1


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """The functions and methods of a module, and its rules."""
    values = [*vars(module).values(), *getattr(module, "RULES", {}).values()]
    values += [method for value in values if isinstance(value, type) for method in vars(value).values()]
    yield from (value for value in values if isinstance(value, types.FunctionType))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_in(constant)


def install(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges the code of the functions of a module for that of the mutant."""

    def place(code):
        return (code.co_filename, code.co_qualname, code.co_firstlineno)

    file = mutant.module.__file__
    found = {place(code): code for code in codes_in(compile(mutant.tree, file, "exec"))}
    for function in functions_of(mutant.module):
        if new := found.get(place(function.__code__)):
            monkeypatch.setattr(function, "__code__", new)


@pytest.fixture(scope="module")
def refusals() -> list[tuple]:
    """The traces of each wrong program on two meshes, with the lines of the analysis that refuse it."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        original = Refused.__init__

        def recording(self, *args):
            frame = sys._getframe(1)
            while frame is not None:
                lines.add((frame.f_code.co_filename, frame.f_lineno))
                frame = frame.f_back
            original(self, *args)

        patch.setattr(Refused, "__init__", recording)
        for program in WRONG + bad_operands.PROGRAMS:
            lines: set[tuple[str, int]] = set()
            try:
                traces = [traced(program, (n,) * len(program.axes)) for n in (2, 1)]
                texts = list(map(str, findings(*traces)[0]))
            except (ValueError, TypeError, Different):  # it is another program on one device
                continue
            if texts:  # a ring of two turns is right on two devices
                found.append((texts, traces, lines))
    return found


def is_killed(mutant: Mutant, refusals: list[tuple]) -> bool:
    """Whether a wrong program comes to another verdict with the mutant in place, or to none."""
    for texts, traces, lines in refusals:
        if not any((mutant.module.__file__, line) in lines for line in mutant.lines):
            continue
        try:
            if list(map(str, findings(*traces)[0])) != texts:
                return True
        except Exception:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=[module.__name__.rpartition(".")[2] for module in MODULES])
def test_each_refusal_is_needed(module, refusals):
    survivors = []
    for mutant in mutants(module):
        with pytest.MonkeyPatch.context() as patch:
            install(mutant, patch)
            if not is_killed(mutant, refusals):
                survivors.append(f"line {mutant.lines[0]}: {mutant.text[:110]}")
    print(f"{module.__name__}: {sum(1 for _ in mutants(module))} mutants, {len(survivors)} survive")
    assert len(survivors) <= SURVIVORS[module.__name__.rpartition(".")[2]], "\n".join(survivors)
