"""Measures matmuls, memory and kernel launches of one device; with --chip, writes a file for hardware.chip.

    python -m tools.chip.rates [--size 8192]
    python -m tools.chip.rates --chip FILE.yaml

The first prints the rate of a matmul of size × size/2 × 7/4 size, with and without autotuning, and with other XLA
options one at a time. The second copies the file in shardwright/cluster/chips of the chip that JAX finds (of the h100
for an unknown chip), and replaces assumed numbers by measured ones.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml

from shardwright.cluster.chips import Chip, chip_for, chip_of
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.attention_paths import choose
from shardwright.modeling.masks import CAUSAL
from shardwright.tools.chip.attention import best_seconds, operands, timed
from shardwright.tools.chip.common import first_line, parser_of

OPTIONS = {
    "autotuned": {},
    "not autotuned": {"xla_gpu_autotune_level": 0},
    "deterministic": {"xla_gpu_exclude_nondeterministic_ops": True},
    "without Triton": {"xla_gpu_enable_triton_gemm": False},
}
SOURCE = "measured by tools.chip.rates with jax"


def product_s(m: int, k: int, n: int, options: dict | None = None) -> float:
    """Returns the seconds of a bf16 matmul."""
    a, b = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate([(m, k), (k, n)]))
    return best_seconds(jax.jit(jnp.matmul).lower(a, b).compile(compiler_options=options), a, b)


def measured(chip: Chip, size: int) -> dict[str, float]:
    """Returns the fields of the chip that one device can measure."""
    shape = size, size // 2, size * 7 // 4
    x = jnp.zeros((size, size), jnp.float32)
    moved = 2 * x.nbytes / best_seconds(jax.jit(lambda x: x + 1), x)
    small = jnp.zeros((8, 8), jnp.float32)
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda _, x: jnp.sin(x), x))
    kernels = 1000
    found = {"matmul_share": chip.matmul_share * chip.matmul_s(1, *shape, "bf16") / product_s(*shape)}
    found |= {"memory_share": moved / chip.memory_bandwidth, "launch_s": best_seconds(chain, small) / kernels}
    with jax.set_mesh(make_mesh(jax.devices()[:1], d=1)):
        drawn, document = operands(size // 2, 2 * size, heads=16, width=128)
        _, _, rate = timed(choose("auto", CAUSAL, drawn[0]), CAUSAL, [*drawn, document])
    found |= {"attention_share": rate / chip.peak["bf16"]}
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def described(size: int) -> dict[str, Any]:
    """Returns the content of the chip file for this device."""
    device = jax.devices()[0]
    known = chip_for(device.device_kind)
    source = f"{SOURCE} {jax.__version__}"
    chip = known or dataclasses.replace(chip_of("h100"), products=None)
    found: dict[str, Any] = dict(measured(chip, size))
    if known is None or known.platform == "cpu":  # whose peak is unknown: take the rate of its matmuls
        rate = chip.peak["bf16"] * found["matmul_share"]
        moved = chip.memory_bandwidth * found["memory_share"]
        limit = (device.memory_stats() or {}).get("bytes_limit")
        found |= {"title": device.device_kind, "platform": device.platform, "kinds": [device.device_kind]}
        found |= {"peak": {"bf16": rate}, "memory_bandwidth": moved} | ({"memory_bytes": float(limit)} if limit else {})
        found |= {"products": None, "collectives": None, "matmul_share": 1.0, "memory_share": 1.0}
        found |= {"attention_share": found["attention_share"] * chip.peak["bf16"] / rate}
    fields = {name: {"value": value, "source": source} for name, value in found.items()}
    return {"like": known.name if known else "h100", **fields}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", type=int, default=8192, help="a multiple of 4")
    parser.add_argument("--chip", type=Path, metavar="FILE", help="file to write, with a name that ends in .yaml")
    args = parser.parse_args()
    if args.chip is not None:
        fields = described(args.size)
        args.chip.write_text(yaml.safe_dump(fields, sort_keys=False, width=120))
        chip_of(str(args.chip))  # raises if it is invalid
        own = {name: field["value"] for name, field in fields.items() if name != "like"}
        own |= {"peak": own.get("peak", {}).get("bf16")}
        shown = [f"{name} {value:.3g}" for name, value in own.items() if isinstance(value, float)]
        print(f"{args.chip.name}, like {fields['like']}: {', '.join(shown)}")
        return
    m = args.size
    k = args.size // 2
    n = args.size * 7 // 4
    for name, options in OPTIONS.items():
        try:
            rate = f"{2 * m * k * n / product_s(m, k, n, options) / 1e12:.3g} TFLOP/s"
        except Exception as error:
            rate = first_line(error)
        print(f"matmul {m} × {k} × {n}, {name}: {rate}", flush=True)


if __name__ == "__main__":
    main()
