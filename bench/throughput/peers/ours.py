"""shardwright: the step of train.py, from a configuration that Hydra composes, on its mesh."""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import train
from bench.throughput.peers.job import BOS_ID, Job, batches
from bench.throughput.peers.plain_jax import OnJax
from shardlib.shardtypes import make_shardings
from shardwright.cluster.devices import known_options, make_mesh, start_devices
from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.step import describe
from shardwright.inspect.compiled.trace import devices_of, line_times
from shardwright.modeling.model import load_model
from shardwright.run.compiling import free_kept_memory
from shardwright.run.config import check_divides
from shardwright.run.launch import composed
from shardwright.run.profile import MODULE
from shardwright.run.step import trace_step
from shardwright_data.loader import TokenBatch, in_microbatches


def config_of(job: Job):
    """The configuration of a run: job.config, with the shapes and numbers of the job."""
    shapes = {f"model.{name}": value for name, value in dataclasses.asdict(job.shapes).items()}
    training = {"batch_size": job.sequences, "seq_len": job.length, "steps": 1000}
    training |= {"seed": job.seed, "document_mask": False, "compute_dtype": job.dtype}
    optimizer = {"learning_rate": job.learning_rate, "adam_b1": job.b1, "adam_b2": job.b2, "warmup_steps": 0}
    optimizer |= {"adam_epsilon": job.epsilon, "weight_decay": job.weight_decay, "clip_norm": job.clip_norm}
    overrides = shapes | {f"training.{name}": value for name, value in training.items()}
    overrides |= {f"optimizer.{name}": value for name, value in optimizer.items()}
    overrides |= {
        "mesh.r": job.r,
        "mesh.d": job.d,
        "mesh.t": job.t,
        # On TPUs too, without a loop: jaxlib 0.10.2 cannot read what libtpu 0.0.42.1 makes of one for v6e.
        "hardware": "cpu" if job.platform == "cpu" else "h200",
    }
    overrides |= {"hardware.compilation_cache": "null"}
    lines = [f"++{name}={value}" if "." in name else f"{name}={value}" for name, value in overrides.items()]
    lines += ["optimizer.schedule=constant", "optimizer.schedule_steps=null", f"++model.bos_id={BOS_ID}"]
    return composed(job.config, *lines, *job.overrides.split())


def lowered(job: Job, devices: Any) -> Any:
    """The step for devices that need not be here."""
    c = config_of(job)
    with jax.set_mesh(make_mesh(devices, **dataclasses.asdict(c.mesh))):
        return trace_step(c, load_model(c.model)).lower()


class Contestant(OnJax):
    """The step of train.py."""

    def __init__(self, job: Job, weights: dict[str, np.ndarray] | None = None):
        self.config = c = config_of(job)
        start_devices(c.distributed, c.hardware)
        self.model = load_model(c.model)
        self.mesh = make_mesh(jax.devices()[: job.devices], **dataclasses.asdict(c.mesh))
        with jax.set_mesh(self.mesh):
            check_divides(c, self.mesh.shape)
            init = functools.partial(train.init_state, c=c, model=self.model)
            self.state = jax.jit(init)(jax.random.key(c.training.seed))
            if weights is not None:
                self.state.weights = placed(weights, self.state.weights)
            self.batches = [whole_documents(targets, c.training.microbatches) for targets in batches(job)]
            self.options = known_options(c.hardware.options, print)
            self.training_step = None
        self.steps = 0

    def step(self) -> jax.Array:
        """Starts a step. Returns its loss, on the device."""
        with jax.set_mesh(self.mesh):
            batch = self.batches[self.steps % len(self.batches)]
            if self.training_step is None:
                lowered = train.make_training_step(self.config, self.model).lower(self.state, batch, np.int32(0))
                self.training_step = lowered.compile(compiler_options=self.options)
                free_kept_memory()
            self.state, metrics = self.training_step(self.state, batch, np.int32(self.steps))
        self.steps += 1
        return metrics.loss

    def lines(self, steps: int) -> list[tuple[float, str]]:
        """Seconds of so many steps by source line, those of all devices added."""
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                self.wait([self.step() for _ in range(steps)])
            profile = jax.profiler.ProfileData.from_file(str(next(Path(directory).rglob("*.xplane.pb"))))
        devices = devices_of(profile, MODULE, steps)
        found = line_times(devices, describe(parse(self.training_step.as_text())))["lines"]
        return [(row["seconds"], f"{row['line']}  {row['text']}") for row in found]


def whole_documents(targets: np.ndarray, microbatches: int) -> TokenBatch:
    """The batch of a step on the current mesh, in which each sequence is one document."""
    starts = np.zeros(targets.shape, bool)
    starts[:, 0] = True
    batch = TokenBatch(targets=targets, is_seq_start=starts, loss_mask=np.ones_like(starts))
    batch = in_microbatches(batch, microbatches)
    return jax.device_put(batch, make_shardings(train.Batch, like=batch))


def placed(weights: dict[str, np.ndarray], like: train.Transformer) -> train.Transformer:
    """`weights` with the shardings of `like`."""
    named = lambda path, x: jax.device_put(weights[path[-1].name], x.sharding)
    return jax.tree_util.tree_map_with_path(named, like)
