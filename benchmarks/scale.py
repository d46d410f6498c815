"""What a device is given to do when there are more of them: instructions and collectives of the compiled step.

    python -m benchmarks.scale [llama muon microbatches gpt2]

Compiles the training step for 8, 16, 32 and 64 simulated devices, one axis of the mesh growing while the others stay,
and the rows of a device too. Prints a line for each configuration and axis, as a table in Markdown: operations that JAX
traced, instructions in the optimized HLO, which is the program of one device, and how many of these are collectives.
Numbers that grow with the mesh would be a program that writes out what it does device by device.

The sizes of the models are such that no block becomes 1 long, nor as long as another dim: XLA simplifies then. Two
passes are off that only XLA's compiler for CPUs needs. One makes trees of long sums, with more levels the longer a
device's block is; the other gives an all-to-all an operand for each device. What is left are fusions that depend on
sizes, in GPT-2 a few instructions in a thousand; and JAX traces a function once for two arrays of the same shape.
"""

import argparse
import math
import os
import re
from pathlib import Path

import jax
import numpy as np
from hydra import compose, initialize_config_dir

import train
from cluster.devices import make_mesh
from input_loader import batch_shapes
from modeling.model import load_model
from shardlib.shardtypes import make_shardings
from training_io.config import Config, register_schema, to_config

DEVICES = (8, 16, 32, 64)
FLAGS = (
    f"--xla_force_host_platform_device_count={max(DEVICES)} "
    "--xla_disable_hlo_passes=tree_reduction_rewriter,all_to_all_decomposer "
    "--xla_backend_optimization_level=0"  # of LLVM, behind the HLO that is counted: spares time
)
SMALLEST = {"r": 2, "d": 2, "t": 2}
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
ROWS = 6
"""Of the batch, on each device."""

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
"""By name, a file in configs/ and what is changed in it. Muon deals layers out: each device is to have several."""


def load(case: str) -> Config:
    register_schema()
    name, *overrides = CASES[case]
    with initialize_config_dir(str(Path(__file__).parents[1] / "configs"), version_base="1.3"):
        return to_config(compose(name, overrides=overrides))


def lowered_step(c: Config, sizes: dict[str, int]) -> jax.stages.Lowered:
    """The training step on the first devices, as a mesh of these sizes."""
    c.training.batch_size = ROWS * sizes["r"] * sizes["d"]
    with jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])):
        model = load_model(c.model)
        shapes = jax.eval_shape(lambda: train.init_state(jax.random.key(0), c, model))
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        state = jax.tree.map(place, shapes, make_shardings(train.State[model.Weights], like=shapes))
        batch = batch_shapes(c.training.batch_size, c.training.seq_len)
        return train.make_training_step(c, model).lower(state, batch, np.int32(0))


def count(lowered: jax.stages.Lowered) -> tuple[int, int, str]:
    """Operations traced, instructions compiled, and in words how many of these are collectives. Loops count once."""
    traced = re.findall(r"^ *(?:%\S+ = )?\"?(?:stablehlo|func|sdy|chlo|mhlo)\.", lowered.as_text(), re.MULTILINE)
    hlo = lowered.compile().as_text()
    compiled = re.findall(r"^\s+(?:ROOT )?%[\w.-]+ = .*?[\])}] ([a-z][\w-]*)\(", hlo, re.MULTILINE)
    found = {kind: compiled.count(kind) + compiled.count(f"{kind}-start") for kind in COLLECTIVES}
    return len(traced), len(compiled), ", ".join(f"{number} {kind}" for kind, number in found.items() if number)


def growing(axis: str) -> list[dict[str, int]]:
    """The meshes of so many devices in which this axis alone is longer than in the smallest."""
    others = math.prod(SMALLEST.values()) // SMALLEST[axis]
    return [SMALLEST | {axis: devices // others} for devices in DEVICES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; without any, all")
    cases = parser.parse_args().cases or list(CASES)
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"case is {unknown[0]!r}; choose from {', '.join(CASES)}.")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    jax.config.update("jax_platforms", "cpu")
    # One number, or list of collectives, where it is the same on all meshes.
    one = lambda values: " → ".join(dict.fromkeys(values))
    print("| configuration | axis | traced |", *(f"{devices} devices |" for devices in DEVICES), "collectives |")
    print("|---|---|---:|" + "---:|" * len(DEVICES) + "---|")
    for case in cases:
        done = {}
        for axis in SMALLEST:
            meshes = growing(axis)
            for sizes in meshes:
                key = tuple(sizes.values())
                done[key] = done.get(key) or count(lowered_step(load(case), sizes))
            traced, compiled, kinds = zip(*(done[tuple(sizes.values())] for sizes in meshes), strict=True)
            cells = [case, f"{axis} = {meshes[0][axis]} … {meshes[-1][axis]}", one(f"{number:,}" for number in traced)]
            cells += [f"{number:,}" for number in compiled] + [one(kinds)]
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
