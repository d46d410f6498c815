"""Pipelines on this machine: memory, program size, step time and bubble, against GPipe by automatic differentiation.

    python -m bench.pipeline [--quick] [--only=memory|times]

The peer is a usual pipeline in plain JAX: a `lax.scan` over m + p - 1 ticks, each a stage and a `ppermute`, and
`jax.grad` through all of it. All devices embed all microbatches at once before the scan, and compute their loss at once
after it, each with its part of the vocabulary. Both have the model of train.py, its loss, its gathers, and save the
values that it marks for the backward pass.

- Memory: the compiler's figure for temporary memory of a device, p=2 and p=4, and instructions in the optimized HLO.
- Time: p=2, one thread a device, on two cores. All programs take turns; a time is the best of all rounds.
- Bubble: by the tick table, with the measured times of a stage; and measured: 1 - the time of two devices of r, with a
  whole model and half of the microbatches each, over the time of the two stages, in the same rounds.

Exits with 1 if a target is missed: memory of all but gpipe within 5 % from m=8 to m=32, instructions within 1 %, time
of interleaved_1f1b at most 0.95 of the peer's at p=2.
"""

import argparse
import dataclasses
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import train
from bench.steps import config_of, print_header, print_line, simulate_devices, times_in_turn
from shardlib import shardops
from shardlib.layers import LayerNumbers
from shardlib.op_checks import varying, wrap
from shardlib.pipeline import StagedLoss
from shardlib.schedule_simulator import Costs, simulate_ticks
from shardlib.shardtypes import Scope, f32, make_shardings, typed_shard_map
from shardlib.values import pipeline_stage
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import load_model
from shardwright.run.config import Config
from shardwright.run.pipeline_config import PipelineConfig
from shardwright.run.stages import placement_of, training_plan
from shardwright_data.loader import TokenBatch, in_microbatches

LENGTH = 128
SEQUENCES = 2
"""Number of sequences of a microbatch."""


def settings(
    m: int,
    schedule: str = "interleaved_1f1b",
    v: int = 1,
    recompute: bool = False,
) -> Config:
    """A configuration with m microbatches and this schedule."""
    model = train.ModelConfig(vocab=512, d_model=256, layers=8, n_kv=2, n_q_per_kv=2, d_head=64, d_ff=704)
    c = config_of(model, batch_size=m * SEQUENCES, seq_len=LENGTH, microbatches=m, gather_weights="step")
    c.pipeline = PipelineConfig(schedule, v, recompute=recompute)
    return c


def autodiff_gpipe(parts: StagedLoss, w, microbatches, p: int, layers: int):
    """The loss, a partial sum over p, and gradients, by jax.grad through a scan over stages and ppermutes."""
    m = jax.tree.leaves(microbatches)[0].shape[0]
    me = lax.axis_index("p")
    microbatches = jax.tree.map(lambda x: varying(x, ("p",)), microbatches)
    merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), microbatches)
    at = lambda k: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, jnp.clip(k, 0, m - 1), 0, False), microbatches)
    numbers = LayerNumbers(jnp.arange(layers))

    def loss(w):
        with pipeline_stage(alone=False):
            embedded = varying(parts.first(w, *merged), ("p",))
        embedded = embedded.reshape(m, -1, *embedded.shape[1:])

        def tick(x, t):
            entering = lax.dynamic_index_in_dim(embedded, jnp.minimum(t, m - 1), 0, False)
            with pipeline_stage():
                y, _ = parts.layers(w.layers, jnp.where(me == 0, entering, x), numbers, *at(t - me))
            return lax.ppermute(y, "p", [(i, (i + 1) % p) for i in range(p)]), y

        _, ys = lax.scan(tick, jnp.zeros_like(embedded[0]), jnp.arange(m + p - 1))
        outputs = lax.psum(jnp.where(me == p - 1, ys[p - 1 :], 0), "p")
        with pipeline_stage(alone=False):
            total = parts.last(w, varying(outputs.reshape(-1, *outputs.shape[2:]), ("p",)), *merged)
        return jnp.where(me == 0, total, 0)  # which all devices have

    total, g = jax.value_and_grad(loss)(w)
    return wrap(varying(total, ("p",)), ("p",), (), "autodiff"), g


def program(c: Config, mesh, peer: bool = False):
    """Compiled loss and gradients of a batch, its arguments, and the order of stacked layers."""
    model = load_model(c.model)
    forward = train.Forward(model, c.training)

    def gradients(w: train.Transformer, batch: train.Batch) -> tuple[f32[""], train.Transformer]:
        if not peer:
            return train.loss_and_gradients(w, batch, c, forward)[:2]
        copies, reduce_gradients = jax.vjp(lambda w: forward.gathered(forward.copies(w)), w)
        parts = train.MicrobatchLoss(forward, targets=train.count_targets(batch))
        p = mesh.shape["p"]
        total, g = autodiff_gpipe(parts, copies, (batch, None), p, c.model.layers // p)
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
        batch = in_microbatches(batch, c.training.microbatches)
        batch = jax.device_put(batch, make_shardings(train.Batch, like=batch))
        return run.lower(w, batch).compile(), (w, batch), placement_of(c, model).order


def host_gradients(result, order):
    """The loss and the gradients on the host, in the order of the layers."""
    loss, g = jax.tree.map(np.asarray, result)
    if order is not None:
        g = dataclasses.replace(g, layers=jax.tree.map(order.to_layers, g.layers))
    return float(loss), g


def memory(quick: bool) -> list[str]:
    """Prints the table of memory and program size. Returns the targets that are missed."""
    print("Temporary memory of a device in MiB, by the compiler, and instructions of the optimized HLO\n")
    counts, missed = (8, 32) if quick else (8, 16, 32), []
    print_header("", "p", *(f"m={m}" for m in counts), "instructions")
    cases = [("autodiff GPipe", "gpipe", False, True, 1), ("gpipe", "gpipe", False, False, 1)]
    cases += [("1f1b", "1f1b", False, False, 1), ("interleaved_1f1b", "interleaved_1f1b", False, False, 1)]
    cases += [("interleaved_1f1b, v=2", "interleaved_1f1b", False, False, 2)]
    cases += [("interleaved_1f1b, recompute", "interleaved_1f1b", True, False, 1)]
    cases += [("zb_h1", "zb_h1", False, False, 1), ("zb_v", "zb_v", False, False, 2)]
    cases += [("zb_h1, recompute", "zb_h1", True, False, 1), ("dualpipe_v", "dualpipe_v", False, False, 2)]
    for p in (2,) if quick else (2, 4):
        mesh = make_mesh(1, 1, 1, jax.devices()[:p], p)
        for name, schedule, recompute, peer, v in cases:
            compiled = [program(settings(m, schedule, v, recompute), mesh, peer)[0] for m in counts]
            sizes = [x.memory_analysis().temp_size_in_bytes / 2**20 for x in compiled]
            instructions = [len(re.findall(r"^\s+(?:ROOT )?\S+ = ", x.as_text(), re.M)) for x in compiled]
            print_line(name, p, *(f"{size:.1f}" for size in sizes), " / ".join(map(str, instructions)))
            if schedule != "gpipe" and sizes[-1] > 1.05 * sizes[0]:
                missed.append(f"memory of {name} at p={p} grows from {sizes[0]:.1f} to {sizes[-1]:.1f} MiB")
            if not peer and abs(instructions[-1] - instructions[0]) > 0.01 * instructions[0]:
                missed.append(f"instructions of {name} at p={p} change with m: {instructions}")
    return missed


def times(quick: bool) -> list[str]:
    """Prints the tables of times and bubbles. Returns the targets that are missed."""
    mesh = make_mesh(1, 1, 1, jax.devices()[:2], 2)
    cases = [("gpipe", 1, False), ("1f1b", 1, False), ("interleaved_1f1b", 1, False), ("interleaved_1f1b", 2, False)]
    cases += [("interleaved_1f1b", 1, True), ("interleaved_1f1b", 2, True)]
    cases += [("zb_h1", 1, False), ("zb_h1", 1, True), ("zb_v", 2, False), ("dualpipe_v", 2, False)]
    missed = []
    for m in (8,) if quick else (4, 8):
        programs = {"autodiff GPipe": program(settings(m, "gpipe"), mesh, peer=True)}
        tables = {}
        for schedule, v, recompute in cases:
            c = settings(m, schedule, v, recompute)
            name = f"{schedule}{', v=2' * (v > 1)}{', recompute' * recompute}"
            programs[name] = program(c, mesh)
            with jax.set_mesh(mesh):
                tables[name] = training_plan(c, load_model(c.model)).table, v, recompute
        whole = settings(m // 2)
        whole.training.batch_size = m * SEQUENCES
        programs["two whole models"] = program(whole, make_mesh(2, 1, 1, jax.devices()[:2]))
        expected = host_gradients(programs["two whole models"][0](*programs["two whole models"][1]), None)
        for compiled, args, order in programs.values():
            loss, g = host_gradients(compiled(*args), order)
            np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
            for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(expected[1]), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())
        found = times_in_turn({name: run for name, (*run, _) in programs.items()}, 3 if quick else 20)
        forward = forward_share(mesh)
        print(f"\nTime of a step in s, p=2, m={m}, one thread a device, f32; best and median of {len(found[name])}\n")
        print_header("", "best", "median", "of autodiff GPipe's", "bubble by the table", "measured")
        base, ideal = min(found["autodiff GPipe"]), min(found["two whole models"])
        for name, seconds in found.items():
            predicted = ""
            if name in tables:
                table, v, recompute = tables[name]
                costs = Costs(
                    forward=[forward / v] * 2 * v,
                    backward=[(1 - forward) / v] * 2 * v,
                    recompute=recompute,
                )
                # Forward and backward of a microbatch together take 1.
                predicted = f"{1 - m / simulate_ticks(table, costs).total:.1%}"
            ratio = min(seconds) / base
            measured = f"{1 - ideal / min(seconds):.1%}" if name != "two whole models" else ""
            cells = f"{min(seconds):.3f}", f"{statistics.median(seconds):.3f}", f"{ratio:.2f}"
            print_line(name, *cells, predicted, measured)
        best = min(min(found[name]) for name in found if name.startswith("interleaved"))
        if best > 0.95 * base:
            missed.append(f"interleaved_1f1b takes {best / base:.2f} of autodiff GPipe's time at m={m}")
    return missed


def forward_share(mesh) -> float:
    """The measured time of the forward pass, as a part of forward and backward."""
    c = settings(8)
    with jax.set_mesh(mesh):
        evaluation = train.make_evaluation_step(c, load_model(c.model))
        compiled, (w, batch), _ = program(c, mesh)
        step = evaluation.lower(w, batch).compile()
        found = times_in_turn({"forward": (step, (w, batch)), "both": (compiled, (w, batch))}, 5)
    return min(found["forward"]) / min(found["both"])


def main() -> None:
    """Runs the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--only", choices=["memory", "times"], help="one of the parts")
    arguments = parser.parse_args()
    simulate_devices(4, "--xla_cpu_multi_thread_eigen=false")
    missed: list[str] = []
    for name, part in {"memory": memory, "times": times}.items():
        if arguments.only in (None, name):
            missed += part(arguments.quick)
    print()
    for line in missed:
        print("MISSED:", line)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
