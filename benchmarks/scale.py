"""Instructions and collectives of the compiled step, as the number of devices grows.

    python -m benchmarks.scale [llama muon microbatches gpt2]

Compiles the training step for 8, 16, 32 and 64 simulated devices. One axis of the mesh grows. The other axes and the
sequences of a device stay the same. Prints a table in Markdown with a line for each configuration and axis: operations
that JAX traced, instructions in the optimized HLO, which is the program of one device, and the collectives among them.
If numbers grew with the mesh, the program would be written out device by device.

The sizes of the models avoid blocks that are 1 long, or as long as another dim: XLA simplifies these. Two passes that
only XLA's compiler for CPUs needs are off. One makes trees of long sums, with more levels for longer blocks; the other
gives an all-to-all an operand for each device. The differences that remain are fusions that depend on sizes: in GPT-2 a
few instructions in a thousand, with microbatches one in a thousand at most. JAX also traces a function only once for
two arrays of the same shape.
"""

import argparse
import math
import re

import jax

from benchmarks.steps import load, lowered_step, print_header, print_line, simulate_devices
from cluster.devices import make_mesh
from compiled.hlo import parse
from compiled.operations import COLLECTIVES

DEVICES = (8, 16, 32, 64)
FLAGS = (
    "--xla_disable_hlo_passes=tree_reduction_rewriter,all_to_all_decomposer",
    "--xla_backend_optimization_level=0",  # of LLVM, after the HLO that is counted: this saves time
)
SMALLEST = {"r": 2, "d": 2, "t": 2}
SEQUENCES = 6
"""Number of sequences on each device."""

LLAMA = ["local_test_synthetic", "model.layers=3", "model.d_model=3072", "model.n_kv=64", "model.n_q_per_kv=2"]
LLAMA += ["model.d_head=6", "model.d_ff=1280", "model.vocab=1792", "training.seq_len=320"]
GPT2 = ["local_gpt2", "model.layers=5", "model.d_model=6144", "model.heads=48", "model.vocab=1792", "model.dropout=0.1"]
GPT2 += ["model.positions=320", "training.seq_len=320"]
CASES = {
    "llama": LLAMA,
    "muon": [*LLAMA, "optimizer=muon", "model.layers=128"],
    "microbatches": [*LLAMA, "training.microbatches=3", "training.gather_weights=step"],
    "gpt2": GPT2,
}
"""A file in configs/ and its overrides, by name. Muon distributes layers: each device should have several."""


def step_on(case: str, sizes: dict[str, int]) -> jax.stages.Lowered:
    """The training step of a case on the first devices, as a mesh of these sizes."""
    c = load(CASES[case][0], CASES[case][1:])
    c.training.batch_size = SEQUENCES * sizes["r"] * sizes["d"]
    with jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])):
        return lowered_step(c)


def count(lowered: jax.stages.Lowered) -> tuple[int, int, str]:
    """Operations traced, instructions compiled, and, as text, the collectives among them. Loops count once."""
    traced = re.findall(r"^ *(?:%\S+ = )?\"?(?:stablehlo|func|sdy|chlo|mhlo)\.", lowered.as_text(), re.MULTILINE)
    compiled = [instruction.opcode for instruction in parse(lowered.compile().as_text()).instructions()]
    found = {kind: compiled.count(kind) + compiled.count(f"{kind}-start") for kind in COLLECTIVES}
    return len(traced), len(compiled), ", ".join(f"{number} {kind}" for kind, number in found.items() if number)


def growing(axis: str) -> list[dict[str, int]]:
    """The meshes of DEVICES devices in which only this axis is longer than in the smallest."""
    others = math.prod(SMALLEST.values()) // SMALLEST[axis]
    return [SMALLEST | {axis: devices // others} for devices in DEVICES]


def main() -> None:
    """Prints the table of the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; without any, all")
    cases = parser.parse_args().cases or list(CASES)
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"case is {unknown[0]!r}; choose from {', '.join(CASES)}.")
    simulate_devices(max(DEVICES), *FLAGS)
    # One number, or one list of collectives, if it is the same on all meshes.
    one = lambda values: " → ".join(dict.fromkeys(values))
    columns = [f"{devices} devices" for devices in DEVICES]
    print_header("configuration", "axis", "traced", *columns, "collectives", left=2)
    for case in cases:
        done = {}
        for axis in SMALLEST:
            meshes = growing(axis)
            for sizes in meshes:
                key = tuple(sizes.values())
                done[key] = done.get(key) or count(step_on(case, sizes))
            traced, compiled, kinds = zip(*(done[tuple(sizes.values())] for sizes in meshes), strict=True)
            axis_sizes = f"{axis} = {meshes[0][axis]} … {meshes[-1][axis]}"
            print_line(case, axis_sizes, one(f"{n:,}" for n in traced), *(f"{n:,}" for n in compiled), one(kinds))


if __name__ == "__main__":
    main()
