"""The training step compiled for TPUs on a machine without one: its memory, and a floor of its time.

    python -m bench.tpu_aot --config-name flat_tokens_c4_a100x1_84m --chip v6e training.batch_size=8

Prints a table in Markdown with a line for each configuration, or the reason why it does not compile: XLA refuses what
does not fit. Nothing runs. Needs libtpu, as `pip install -e '.[tpu]'` installs it, and no TPU. The columns:

- GiB of a chip: arguments, and the peak, arguments included.
- Kernels of splash attention, each counted once, in loops too.
- Floors in ms: of the products with weights, at the chip's peak; of splash attention, for causal rules. It computes
  whole blocks, and the backward pass computes scores twice. The floor is the larger one of its products at the peak
  and of what it reads again and again at the memory's bandwidth.
"""

import argparse
import os
import re
import time
from pathlib import Path

import jax
from jax.experimental import topologies

from bench.steps import load, lowered_step, print_header, print_line
from shardwright.cluster.devices import make_mesh
from shardwright.compiled.hlo import with_mesh
from shardwright.modeling.model import load_model
from shardwright.modeling.splash import block_of
from shardwright.run.config import Config, check_divides
from shardwright.run.flops import flops_of_model, peak_flops

BANDWIDTH = {"v5e": 819e9, "v6e": 1638e9}
"""Bytes/s of a chip's memory, by cloud.google.com/tpu/docs."""
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Products of each kernel for a block of queries and one of keys. It reads two arrays of a block's size for them."""
COLUMNS = ["configuration", "chips", "compiled in s", "arguments", "peak", "kernels", "products", "attention"]


def chips_of(kind: str, count: int) -> list:
    """Abstract devices of `count` chips: 1, or 4 in a square."""
    hosts = {"topology_name": f"{kind}:2x2"}
    if count == 1:
        hosts = {"topology_name": f"{kind}:1x1", "chips_per_host_bounds": (1, 1, 1)}
    return topologies.get_topology_desc(platform="tpu", **hosts).devices


def floors(c: Config, kind: str, devices: list) -> tuple[float, float]:
    """Milliseconds of a step, at least, for the products with weights, and for causal splash attention in bf16."""
    t, model = c.training, c.model
    peak = peak_flops(devices, jax.numpy.bfloat16).total
    flops = flops_of_model(load_model(model).table, model, t.seq_len)
    tokens = t.batch_size * t.seq_len
    weights = (2 * flops.causal - flops.full) * tokens / peak  # causal counts half of attention
    block = block_of(t.seq_len)
    blocks = t.seq_len // block
    pairs = t.batch_size * model.layers * model.heads * blocks * (blocks + 1) // 2
    size, bandwidth = block * model.d_head, BANDWIDTH[kind] * len(devices)
    attention = sum(max(2 * n * block * size / peak, 2 * 2 * size / bandwidth) for n in PRODUCTS.values())
    return weights * 1e3, pairs * attention * 1e3


def main() -> None:
    """Prints the table of the configurations that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", required=True, help="names of files in configs/, separated by commas")
    parser.add_argument("--chip", choices=BANDWIDTH, default="v6e")
    parser.add_argument("--devices", type=int, choices=(1, 4), default=1)
    parser.add_argument("--hlo", type=Path, help="directory for the programs, by configuration")
    args, overrides = parser.parse_known_args()
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would look for the host's description on a network
    try:
        devices = chips_of(args.chip, args.devices)
    except RuntimeError as error:
        parser.error(f"libtpu is not installed, or does not start: pip install -e '.[tpu]' ({str(error)[:200]})")
    print_header(*COLUMNS, left=2)
    for name in args.config_name.split(","):
        case = [" ".join((name, *overrides)), f"{args.devices} × {args.chip}"]
        try:
            c = load(name, ["hardware=tpu", *overrides])
            mesh = make_mesh(c.mesh.r, c.mesh.d, c.mesh.t, devices, c.mesh.p)
            check_divides(c, mesh.shape)
            with jax.set_mesh(mesh):
                lowered = lowered_step(c)
            begin = time.perf_counter()
            compiled = lowered.compile()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print_line(*case, f"not compiled: {' '.join(str(error).split())[:400]}")
            continue
        hlo, memory = compiled.as_text(), compiled.memory_analysis()
        seconds = f"{time.perf_counter() - begin:.1f}"
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        sizes = [f"{size / 2**30:.2f}" for size in (memory.argument_size_in_bytes, peak)]
        kernels = len(re.findall(r"^ *%splash_\S+ = .* custom-call\(", hlo, re.MULTILINE))
        weights, attention = floors(c, args.chip, devices)
        print_line(*case, seconds, *sizes, kernels, f"{weights:.1f}", f"{attention:.1f}" if kernels else "")
        if args.hlo:
            args.hlo.mkdir(parents=True, exist_ok=True)
            (args.hlo / f"{name}.txt").write_text(with_mesh(hlo, mesh.shape))


if __name__ == "__main__":
    main()
