"""shardwright: the step of train.py, from a configuration that Hydra composes, on its mesh."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from bench.throughput.peers.job import BOS_ID, Job, batches, starts_of
from bench.throughput.peers.plain_jax import OnJax
from shardlib.shardtypes import make_shardings
from shardwright.cluster.devices import known_options, make_mesh, start_devices
from shardwright.data.loader import TokenBatch, in_microbatches
from shardwright.modeling.model import load_model
from shardwright.program import compiling, config
from shardwright.program.spec import load_spec
from shardwright.program.step import trace_step
from shardwright.run import launch


def overrides(sections: dict[str, dict[str, Any]]) -> list[str]:
    """Settings by section, as they are given on a command line."""
    return [
        f"++{name}.{key}={value}"
        for name, settings in sections.items()
        for key, value in settings.items()
    ]


def config_of(job: Job) -> config.Config:
    """The configuration of a run: job.config, with the shapes and numbers of the job."""
    training = {"batch_size": job.sequences, "seq_len": job.length, "steps": 1000, "seed": job.seed}
    training |= {"document_mask": False, "compute_dtype": job.dtype}
    optimizer = {
        "learning_rate": job.learning_rate,
        "adam_b1": job.b1,
        "adam_b2": job.b2,
        "warmup_steps": 0,
    }
    optimizer |= {
        "adam_epsilon": job.epsilon,
        "weight_decay": job.weight_decay,
        "clip_norm": job.clip_norm,
    }
    sections = {"model": dataclasses.asdict(job.shapes) | {"bos_id": BOS_ID}, "training": training}
    sections |= {"optimizer": optimizer | {"schedule": "constant", "schedule_steps": "null"}}
    sections |= {
        "mesh": {axis: getattr(job, axis) for axis in "rdt"},
        "hardware": {"compilation_cache": "null"},
    }
    hardware = "cpu" if job.platform == "cpu" else "h200"
    return launch.composed(
        job.config, f"hardware={hardware}", *overrides(sections), *job.overrides.split()
    )


class Contestant(OnJax):
    """The step of train.py."""

    def __init__(self, job: Job, weights: dict[str, np.ndarray]):
        self.config = c = config_of(job)
        start_devices(c.distributed, c.hardware)
        self.model = load_model(c.model)
        self.mesh = make_mesh(jax.devices()[: job.devices], **dataclasses.asdict(c.mesh))
        with jax.set_mesh(self.mesh):
            config.check_divides(c, self.mesh.shape)
            init = functools.partial(load_spec().init_state, config=c, model=self.model)
            self.state = jax.jit(init)(jax.random.key(c.training.seed))
            self.state.weights = placed(weights, self.state.weights)
            self.batches = [
                whole_documents(targets, c.training.microbatches) for targets in batches(job)
            ]

    @staticmethod
    def lowered(job: Job, devices: Any) -> jax.stages.Lowered:
        """The step for devices that need not be here."""
        c = config_of(job)
        with jax.set_mesh(make_mesh(devices, **dataclasses.asdict(c.mesh))):
            return trace_step(c, load_model(c.model)).lowered

    @functools.cached_property
    def training_step(self) -> jax.stages.Compiled:
        lowered = (
            load_spec()
            .make_training_step(self.config, self.model)
            .lower(self.state, self.batches[0], np.int32(0))
        )
        compiling.free_kept_memory()
        compiled = lowered.compile(
            compiler_options=known_options(self.config.hardware.options, print)
        )
        compiling.free_kept_memory()
        return compiled

    def run(self, batch: TokenBatch) -> jax.Array:
        self.state, metrics = self.training_step(self.state, batch, np.int32(self.steps))
        return metrics.loss


def whole_documents(targets: np.ndarray, microbatches: int) -> TokenBatch:
    """The batch of a step on the current mesh, in which each sequence is one document."""
    starts = starts_of(targets)
    batch = TokenBatch(targets=targets, is_seq_start=starts, loss_mask=np.ones_like(starts))
    batch = in_microbatches(batch, microbatches)
    return jax.device_put(batch, make_shardings(load_spec().Batch, like=batch))


def placed(weights: dict[str, np.ndarray], like: Any) -> Any:
    """`weights` with the shardings of `like`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(weights[path[-1].name], x.sharding), like
    )
