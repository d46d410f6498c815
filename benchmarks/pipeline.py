"""Pipelines on this machine: memory, program size, step time and bubble, against GPipe by automatic differentiation.

    python -m benchmarks.pipeline [--quick] [--only=memory|times]

The peer is what one writes in plain JAX: a `lax.scan` over m + p - 1 ticks, each a stage and a `ppermute`, and
`jax.grad` through all of it. It embeds all microbatches at once before the scan, and shares the outputs of the last
stage out among all devices for the loss, so that neither is idle time. Both have the model of train.py, its loss, its
gathers, and keep for the backward pass what it marks.

- Memory: the compiler's figure for temporary memory of a device, p=2 and p=4, and instructions in the optimized HLO.
- Time: p=2, one thread a device, on two cores. Rounds of all programs in turn; the best of each.
- Bubble: the table's, by the measured times of a stage, and the measured: 1 - what two devices of r do, on whole models
  and half the microbatches each, over what the two stages do. Both in the same rounds.

Exits with 1 if a target is missed: memory of 1f1b and interleaved_1f1b within 5 % from m=8 to m=32, instructions within
1 %, time of interleaved_1f1b at most 0.95 of the peer's at p=2.
"""

import argparse
import dataclasses
import os
import re
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import train
from cluster.config import HardwareConfig, MeshConfig
from cluster.devices import make_mesh
from input_loader import DataConfig, TokenBatch
from modeling.model import load_model
from shardlib import shardops
from shardlib.layers import LayerNumbers
from shardlib.op_checks import varying
from shardlib.pipeline import Parts
from shardlib.schedule_simulator import Costs, simulate_ticks
from shardlib.shardtypes import Scope, f32, make_shardings, typed_shard_map
from shardlib.values import Origin, Partial, pipeline_stage
from training_io.config import Config, PathsConfig, TrainingConfig
from training_io.pipeline_config import PipelineConfig
from training_io.stages import microbatches, placement_of, training_plan

FLAGS = "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false"
LENGTH = 128
ROWS = 2
"""Of a microbatch."""


def settings(m: int, schedule: str = "interleaved_1f1b", v: int = 1, recompute: bool = False) -> Config:
    c = Config(
        model=train.ModelConfig(vocab=512, d_model=256, layers=8, n_kv=2, n_q_per_kv=2, d_head=64, d_ff=704),
        optimizer=train.OptimizerConfig(learning_rate=1e-3, warmup_steps=1, schedule_steps=9),
        mesh=MeshConfig(),
        data=DataConfig(filespec="unused"),
        training=TrainingConfig(
            batch_size=m * ROWS, seq_len=LENGTH, steps=9, microbatches=m, gather_weights="step", compute_dtype="f32"
        ),
        hardware=HardwareConfig(),
        paths=PathsConfig(),
    )
    c.pipeline = PipelineConfig(schedule, v, recompute=recompute)
    return c


def autodiff_gpipe(parts: Parts, w, microbatches, p: int, rows: int):
    """(loss, a partial sum over p; gradients) by jax.grad through a scan over stages and ppermutes."""
    m = jax.tree.leaves(microbatches)[0].shape[0]
    me = lax.axis_index("p")
    microbatches = jax.tree.map(lambda x: varying(x, ("p",)), microbatches)
    merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), microbatches)
    at = lambda k: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, jnp.clip(k, 0, m - 1), 0, False), microbatches)
    numbers = LayerNumbers(jnp.arange(rows))

    def loss(w):
        with pipeline_stage():
            embedded = parts.first(w, *merged)
        embedded = embedded.reshape(m, -1, *embedded.shape[1:])

        def tick(x, t):
            entering = lax.dynamic_index_in_dim(embedded, jnp.minimum(t, m - 1), 0, False)
            with pipeline_stage():
                y = parts.layers(w.layers, jnp.where(me == 0, entering, x), numbers, *at(t - me))
            return lax.ppermute(y, "p", [(i, (i + 1) % p) for i in range(p)]), y

        _, ys = lax.scan(tick, jnp.zeros_like(embedded[0]), jnp.arange(m + p - 1))
        outputs = jnp.where(me == p - 1, ys[p - 1 :], 0)
        own = lax.psum_scatter(outputs, "p", scatter_dimension=0, tiled=True)
        share = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, me * (m // p), m // p), microbatches)
        share = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), share)
        with pipeline_stage():
            return parts.last(w, own.reshape(-1, *own.shape[2:]), *share)

    total, g = jax.value_and_grad(loss)(w)
    return Partial(varying(total, ("p",)), ("p",), Origin("autodiff")), g


def program(c: Config, mesh, peer: bool = False):
    """Compiled loss and gradients of a batch, its arguments, and the order of stacked layers."""
    model = load_model(c.model)
    forward = train.Forward(model, c.training)

    def gradients(w: train.Transformer, batch: TokenBatch) -> tuple[f32[""], train.Transformer]:
        if not peer:
            return train.loss_and_gradients(w, batch, c, forward)[:2]
        copies, reduce_gradients = jax.vjp(lambda w: forward.copies(w, gather=True), w)
        parts = train.staged_loss(forward, targets=train.count_targets(batch))
        p, parts_of_batch = mesh.shape["p"], microbatches((batch, None), c.training.microbatches)
        total, g = autodiff_gpipe(parts, copies, parts_of_batch, p, c.model.layers // p)
        (g,) = reduce_gradients(jax.tree.map(lambda x, copy: x.astype(copy.dtype), g, copies))
        return shardops.psum("+p ->", total), g

    with jax.set_mesh(mesh):
        mapped = typed_shard_map(gradients)

        @jax.jit
        def run(w, batch):
            with Scope(act="float32"):
                return mapped(w, batch)

        w = jax.jit(lambda key: train.init_state(key, c, model).weights)(jax.random.key(0))
        rng = np.random.default_rng(0)
        shape = c.training.batch_size, LENGTH
        batch = TokenBatch(
            targets=rng.integers(0, c.model.vocab, shape).astype(np.uint32),
            is_seq_start=rng.random(shape) < 0.01,
            loss_mask=np.ones(shape, bool),
        )
        batch = jax.tree.map(jax.device_put, batch, make_shardings(TokenBatch, like=batch))
        return run.lower(w, batch).compile(), (w, batch), placement_of(c, model).order


def host_gradients(result, order):
    loss, g = jax.tree.map(np.asarray, result)
    if order is not None:
        g = dataclasses.replace(g, layers=jax.tree.map(order.to_layers, g.layers))
    return float(loss), g


def best_times(programs: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds of each program in each round; they take turns."""
    times = {name: [] for name in programs}
    for compiled, args, _ in programs.values():
        jax.block_until_ready(compiled(*args))
    for _ in range(rounds):
        for name, (compiled, args, _) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            times[name].append(time.perf_counter() - start)
    return times


def memory(missed: list[str], quick: bool) -> None:
    print("Temporary memory of a device in MiB, by the compiler, and instructions of the optimized HLO\n")
    counts = (8, 32) if quick else (8, 16, 32)
    print("| | p | " + " | ".join(f"m={m}" for m in counts) + " | instructions |")
    print("|---|---|" + "---|" * (len(counts) + 1))
    rows = [("autodiff GPipe", "gpipe", False, True, 1), ("gpipe", "gpipe", False, False, 1)]
    rows += [("1f1b", "1f1b", False, False, 1), ("interleaved_1f1b", "interleaved_1f1b", False, False, 1)]
    rows += [("interleaved_1f1b, v=2", "interleaved_1f1b", False, False, 2)]
    rows += [("interleaved_1f1b, recompute", "interleaved_1f1b", True, False, 1)]
    for p in (2,) if quick else (2, 4):
        mesh = make_mesh(1, 1, 1, jax.devices()[:p], p)
        for name, schedule, recompute, peer, v in rows:
            compiled = [program(settings(m, schedule, v, recompute), mesh, peer)[0] for m in counts]
            sizes = [x.memory_analysis().temp_size_in_bytes / 2**20 for x in compiled]
            instructions = [len(re.findall(r"^\s+(?:ROOT )?\S+ = ", x.as_text(), re.M)) for x in compiled]
            cells = " | ".join(f"{size:.1f}" for size in sizes)
            print(f"| {name} | {p} | {cells} | {' / '.join(map(str, instructions))} |", flush=True)
            if "1f1b" in schedule and sizes[-1] > 1.05 * sizes[0]:
                missed.append(f"memory of {name} at p={p} grows from {sizes[0]:.1f} to {sizes[-1]:.1f} MiB")
            if not peer and abs(instructions[-1] - instructions[0]) > 0.01 * instructions[0]:
                missed.append(f"instructions of {name} at p={p} change with m: {instructions}")


def times(missed: list[str], quick: bool) -> None:
    mesh = make_mesh(1, 1, 1, jax.devices()[:2], 2)
    cases = [("gpipe", 1, False), ("1f1b", 1, False), ("interleaved_1f1b", 1, False), ("interleaved_1f1b", 2, False)]
    cases += [("interleaved_1f1b", 1, True), ("interleaved_1f1b", 2, True)]
    for m in (8,) if quick else (4, 8, 16):
        programs = {"autodiff GPipe": program(settings(m, "gpipe"), mesh, peer=True)}
        tables = {}
        for schedule, v, recompute in cases:
            c = settings(m, schedule, v, recompute)
            name = f"{schedule}{', v=2' * (v > 1)}{', recompute' * recompute}"
            programs[name] = program(c, mesh)
            with jax.set_mesh(mesh):
                tables[name] = training_plan(c, load_model(c.model)).table, v, recompute
        whole = settings(m // 2)
        whole.training.batch_size = m * ROWS
        programs["two whole models"] = program(whole, make_mesh(2, 1, 1, jax.devices()[:2]))
        expected = host_gradients(programs["two whole models"][0](*programs["two whole models"][1]), None)
        for compiled, args, order in programs.values():
            loss, g = host_gradients(compiled(*args), order)
            np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
            for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(expected[1]), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())
        found = best_times(programs, 3 if quick else 20)
        forward = forward_share(mesh)
        print(f"\nTime of a step in s, p=2, m={m}, one thread a device, f32; best and median of {len(found[name])}\n")
        print("| | best | median | of autodiff GPipe's | bubble by the table | measured |")
        print("|---|---|---|---|---|---|")
        base, ideal = min(found["autodiff GPipe"]), min(found["two whole models"])
        for name, seconds in found.items():
            predicted = ""
            if name in tables:
                table, v, recompute = tables[name]
                costs = Costs(
                    forward=[forward / v] * 2 * v,
                    backward=[(1 - forward) / v] * 2 * v,
                    recompute=recompute,
                    fuse_last=recompute,
                )
                predicted = f"{1 - 2 * m * useful(costs, v) / (2 * simulate_ticks(table, costs).total):.1%}"
            ratio = min(seconds) / base
            measured = f"{1 - ideal / min(seconds):.1%}" if name != "two whole models" else ""
            cells = f"{min(seconds):.3f} | {statistics.median(seconds):.3f} | {ratio:.2f}"
            print(f"| {name} | {cells} | {predicted} | {measured} |", flush=True)
        best = min(min(found[name]) for name in found if name.startswith("interleaved"))
        if best > 0.95 * base:
            missed.append(f"interleaved_1f1b takes {best / base:.2f} of autodiff GPipe's time at m={m}")


def useful(costs: Costs, v: int) -> float:
    """Time of one microbatch on one device, nothing computed again."""
    return sum(costs.forward[:v]) + sum(costs.backward[:v])


def forward_share(mesh) -> float:
    """What part of forward and backward the forward is, measured by itself."""
    c = settings(8)
    with jax.set_mesh(mesh):
        evaluation = train.make_evaluation_step(c, load_model(c.model))
        compiled, (w, batch), _ = program(c, mesh)
        step = evaluation.lower(w, batch).compile()
        programs = {"forward": (step, (w, batch), None), "both": (compiled, (w, batch), None)}
        found = best_times(programs, 5)
    return min(found["forward"]) / min(found["both"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--only", choices=["memory", "times"], help="one half of it")
    arguments = parser.parse_args()
    # Read when the devices start, which no import does.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    missed: list[str] = []
    for name, part in {"memory": memory, "times": times}.items():
        if arguments.only in (None, name):
            part(missed, arguments.quick)
    print()
    for line in missed:
        print("MISSED:", line)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
