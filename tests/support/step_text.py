"""Collectives and computations of compiled programs, read from their HLO text."""

import collections
import re

import jax
import numpy as np

from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.step import describe
from shardwright.inspect.compiled.table import CompiledStep
from shardwright.program.compiling import with_mesh
from tests.support import tiny

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def compile_step(mesh: str, **training):
    return compile_config(tiny.config(**training), tiny.mesh(mesh))


def compile_config(c, mesh):
    with jax.set_mesh(mesh):
        state, batch = tiny.state(c), tiny.place_batch(c)
        return tiny.training_step(c).lower(state, batch, np.int32(0)).compile()


def table_of(text: str, mesh=None) -> CompiledStep:
    """What `describe` says of an optimized HLO text, compiled for a mesh of these sizes."""
    return describe(parse(with_mesh(text, mesh) if mesh else text))


def computations(hlo: str) -> dict[str, list[str]]:
    """Name of each HLO computation → its instructions."""
    found, name = {}, None
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[1]
            found[name] = []
        elif name and " = " in line:
            found[name].append(line)
    return found


def operands(instruction: str, opcode: str) -> int:
    """Arrays that a collective communicates: XLA joins several collectives into one of many
    operands.
    """
    arguments = instruction.split(f" {opcode}(", 1)[1].split(")", 1)[0]
    return arguments.count("%")


def collectives(hlo: str) -> dict[str, collections.Counter]:
    """How many arrays each kind of collective communicates: in the forward loop over layers, in the
    backward loop, in the loop over microbatches around them (if there is more than one), and
    outside of all loops."""
    bodies = re.findall(r" while\(.*body=%?([\w.\-]+)", hlo)
    layers, found = [], {"microbatches": collections.Counter(), "outside": collections.Counter()}
    for name, instructions in computations(hlo).items():
        count = collections.Counter()
        for line in instructions:
            for kind in KINDS:
                for opcode in (kind, kind + "-start"):
                    if f" {opcode}(" in line:
                        count[kind] += operands(line, opcode)
        if name not in bodies:
            found["outside"] += count
        elif any(" while(" in line for line in instructions):
            found["microbatches"] += count
        elif count:
            layers.append(count)
    assert len(layers) == 2, f"expected a forward and a backward loop over layers, found {layers}"
    # The backward loop computes the layer again, so it is the one that communicates more.
    found["forward"], found["backward"] = sorted(layers, key=lambda count: count.total())
    return found
