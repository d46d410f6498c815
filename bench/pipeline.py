"""Pipelines on this machine: the memory of a device, the time of a step and the bubble, for each schedule.

    python -m bench.pipeline [--rounds 20] [--only zb_v,...]

Two stages, on one thread a device. A line for each schedule, and one for two whole models without stages, each with
half of the microbatches. The columns:

- Temporary memory of a device in MiB, as the compiler states it, with 8 and with 32 microbatches.
- Seconds of a training step with 8 microbatches, the best of all rounds. All programs take turns.
- The bubble by the tick table, and measured: 1 - the time of the two whole models over that of the two stages.
"""

import argparse
import dataclasses
import time

import jax
import numpy as np

import train
from bench.steps import config_of, lowered_step, print_header, print_line, simulate_devices
from shardlib.schedule_simulator import Costs, simulate
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import load_model
from shardwright.run.config import Config
from shardwright.run.pipeline_config import PipelineConfig
from shardwright.run.stages import training_table
from shardwright_data.loader import TokenBatch, in_microbatches

CASES = {  # schedule, v
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved_1f1b": ("interleaved_1f1b", 1),
    "interleaved_1f1b, v=2": ("interleaved_1f1b", 2),
    "zb_h1": ("zb_h1", 1),
    "zb_v": ("zb_v", 2),
}
LENGTH = 128
SEQUENCES = 2
"""Number of sequences of a microbatch."""


def settings(m: int, schedule: str = "gpipe", v: int = 1) -> Config:
    """A configuration with m microbatches and this schedule."""
    model = train.ModelConfig(vocab=512, d_model=256, layers=8, n_kv=2, n_q_per_kv=2, d_head=64, d_ff=704)
    c = config_of(model, batch_size=m * SEQUENCES, seq_len=LENGTH, microbatches=m, gather_weights="step")
    return dataclasses.replace(c, pipeline=PipelineConfig(schedule, v))


class Program:
    """A compiled training step with its state and a batch."""

    def __init__(self, c: Config, mesh: jax.sharding.Mesh):
        model, self.best = load_model(c.model), float("inf")
        with jax.set_mesh(mesh):
            self.compiled = lowered_step(c).compile()
            self.state = jax.jit(lambda: train.init_state(jax.random.key(0), c, model))()
        ids = np.random.default_rng(0).integers(0, c.model.vocab, (c.training.batch_size, LENGTH)).astype(np.uint32)
        self.batch = in_microbatches(
            TokenBatch(ids, np.zeros(ids.shape, bool), np.ones(ids.shape, bool)), c.training.microbatches
        )

    @property
    def memory(self) -> float:
        """Temporary memory of a device in MiB."""
        return self.compiled.memory_analysis().temp_size_in_bytes / 2**20

    def run(self) -> float:
        """Runs and times a step. Returns its loss."""
        start = time.perf_counter()
        self.state, metrics = self.compiled(self.state, self.batch, np.int32(0))
        loss = float(metrics.loss)
        self.best = min(self.best, time.perf_counter() - start)
        return loss


def main() -> None:
    """Prints the table of the schedules that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default=",".join(CASES), help="names of lines that begin so, separated by commas")
    options = parser.parse_args()
    simulate_devices(2, "--xla_cpu_multi_thread_eigen=false")
    stages, models = make_mesh(1, 1, 1, jax.devices(), 2), make_mesh(2, 1, 1, jax.devices())
    cases = {name: case for name, case in CASES.items() if name.startswith(tuple(options.only.split(",")))}
    whole = dataclasses.replace(settings(4).training, batch_size=8 * SEQUENCES)
    programs = {name: Program(settings(8, *case), stages) for name, case in cases.items()}
    programs["two whole models"] = Program(dataclasses.replace(settings(4), training=whole), models)
    for _ in range(options.rounds):
        losses = [program.run() for program in programs.values()]
        np.testing.assert_allclose(losses, losses[-1], rtol=1e-4)
    print_header("", "MiB, m=8", "m=32", "s, m=8", "bubble by the table", "measured")
    ideal = programs["two whole models"].best
    for name, program in programs.items():
        cells = [""] * 3
        if name in cases:
            with jax.set_mesh(stages):
                table = training_table(settings(8, *cases[name]), load_model(settings(8).model))
            timeline = simulate(table, Costs())
            many = Program(settings(32, *cases[name]), stages).memory
            cells = f"{many:.1f}", f"{1 - 8 * 3 / timeline.total:.1%}", f"{1 - ideal / program.best:.1%}"
        print_line(name, f"{program.memory:.1f}", cells[0], f"{program.best:.3f}", *cells[1:])


if __name__ == "__main__":
    main()
