"""This machine's CPU as a kind of chip, measured in a few seconds: its simulated devices share its cores."""

import dataclasses
import functools
import itertools
import math
import timeit
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardlib.products import product_of
from shardwright.cluster.chips import Chip, Table, chip_of

SIZES, MESSAGES = (64, 256, 1024), (2**12, 2**17, 2**22)
"""Sizes m, k and n of the products, and bytes of the collectives, that are measured."""
_LONG, _RUNS = 2**22, 3
"""Elements of an array that moves in memory, and runs of a program."""
_OPERATIONS: dict[str, Callable] = {
    "all_gather": functools.partial(jax.lax.all_gather, tiled=True),
    "psum_scatter": functools.partial(jax.lax.psum_scatter, tiled=True),
    "psum": jax.lax.psum,
    "all_to_all": functools.partial(jax.lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
}


def measured_cpu(devices: int, clock: Callable[[], float] = timeit.default_timer) -> Chip:
    """The chip of which this machine simulates `devices`.

    Each device of JAX computes the same while one is timed, so that what is found is of one of them. Where JAX has
    fewer than `devices`, those share the cores too, and messages are copies in memory. `clock` returns seconds.
    """
    seconds = functools.partial(_seconds, clock)
    found = jax.devices("cpu")[:devices]
    shared = devices / len(found)

    def product_s(m: int, k: int, n: int, dtype: str = "float32") -> float:
        program, shapes = (lambda x, y: product_of("ij,jk->ik", x, y)), [(m, k), (k, n)]
        return shared * seconds(program, shapes, found, 2**25 // (m * k * n), dtype=dtype)

    rates = [2 * math.prod(at) / product_s(*at) for at in itertools.product(SIZES, repeat=3)]
    of_bf16 = 2 * SIZES[-1] ** 3 / product_s(*(SIZES[-1],) * 3, dtype="bfloat16")
    peak = {"f32": max(rates), "bf16": max(rates) * of_bf16 / rates[-1]}
    # A table is of bf16: other dtypes take their share of its rates.
    grid = np.array(rates).reshape((len(SIZES),) * 3) * peak["bf16"] / peak["f32"]
    moved = 2 * 4 * _LONG / seconds(lambda x: jax.nn.silu(x) * x, [(_LONG,)], found, 4) / shared
    collectives = {op: _collective(op, found, seconds) for op in _OPERATIONS} if 1 < len(found) == devices else {}
    measured = {"peak": peak, "memory_bandwidth": moved, "near_bandwidth": moved / 2, "launch_s": product_s(8, 8, 8)}
    if collectives:
        measured["near_latency_s"] = MESSAGES[0] / collectives["psum"].rate(devices, MESSAGES[0])
    measured |= dict.fromkeys(("matmul_share", "attention_share", "memory_share", "link_share"), 1.0)
    sources = chip_of("cpu").sources | dict.fromkeys(measured, f"measured here, on {len(found)} devices")
    tables = {"products": Table((SIZES,) * 3, grid), "collectives": collectives}
    return dataclasses.replace(chip_of("cpu"), **measured, **tables, sources=sources)


def _collective(op: str, devices: list[jax.Device], seconds: Callable[..., float]) -> Table:
    """Bytes a second of an operation on groups of two and of all, which all groups run at once."""
    groups = [n for n in sorted({2, len(devices)}) if len(devices) % n == 0]
    rates, operation = [], functools.partial(_OPERATIONS[op], axis_name="of")
    for n, size in itertools.product(groups, MESSAGES):  # the operand of one device: of a gather, its part
        mine = math.ceil(size / 4 / n) * (1 if op == "all_gather" else n)
        rates.append(size / seconds(operation, [(mine,)], devices, max(4, 2**22 // size), n))
    return Table((tuple(groups), MESSAGES), np.array(rates).reshape(len(groups), len(MESSAGES)))


def _seconds(
    clock: Callable[[], float], program: Callable, shapes: list, devices: list, turns: int, n: int = 1, dtype="float32"
) -> float:
    """Seconds of a program that all devices run at once, each on arrays of these shapes, in groups of n.

    It runs in a loop, as in a step: to start a compiled program takes longer than a small operation. A turn needs the
    result of the one before, so that none is left out.
    """
    mesh = jax.make_mesh((len(devices) // n, n), ("groups", "of"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    turns = min(max(turns, 1), 50)

    def loop(x: jax.Array, *others: jax.Array) -> jax.Array:
        def turn(_: int, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x = carried[0].at[(0,) * len(shapes[0])].set(carried[1][(0,) * len(shapes[0])])
            return x, program(x, *others)

        return jax.lax.fori_loop(1, turns, turn, (x, program(x, *others)))[1]

    with jax.set_mesh(mesh):
        spec = PartitionSpec(("groups", "of"))
        run = jax.jit(jax.shard_map(loop, in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False))
        wholes = [np.full((len(devices) * rows, *rest), 1e-3, jnp.dtype(dtype)) for rows, *rest in shapes]
        arrays = jax.device_put(wholes, NamedSharding(mesh, spec))
        run(*arrays).block_until_ready()
        return min(timeit.repeat(lambda: run(*arrays).block_until_ready(), timer=clock, number=1, repeat=_RUNS)) / turns
