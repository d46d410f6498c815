"""A model small enough to compile in seconds, its meshes and batches, for the tests of train.py."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import train
from shardlib.shardtypes import Scope, make_shardings, typed_shard_map
from shardwright.axes import axes_of_mesh
from shardwright.cluster.config import HardwareConfig, MeshConfig
from shardwright.cluster.devices import explicit_mesh, make_mesh
from shardwright.data.loader import DataConfig, TokenBatch, in_microbatches
from shardwright.modeling import weights as of_weights
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import ModelConfig
from shardwright.modeling.weights import initialize
from shardwright.optimizers.config import OptimizerConfig
from shardwright.optimizers.rates import updates_of
from shardwright.program.config import Config, PathsConfig, TrainingConfig
from shardwright.program.step import Step, trace_step
from shardwright.sampling.sampler import Sampler

MESHES = ("one device", "d=8", "t=8", "d=4 t=2", "r=2 d=2 t=2")
BATCH, LENGTH = 8, 16


class WithoutAttention(train.Llama):
    """Half as much to trace and to compile."""

    def layer(self, x, w, tokens, attention):
        return x + self.mlp(x, w)


def model(**changes) -> ModelConfig:
    sizes = {
        "vocab": 64,
        "d_model": 32,
        "layers": 3,
        "n_kv": 8,
        "n_q_per_kv": 2,
        "d_head": 4,
        "d_ff": 48,
    }
    return ModelConfig(**{**sizes, **changes})


def optimizer(**changes) -> OptimizerConfig:
    return OptimizerConfig(
        **{"learning_rate": 1e-2, "warmup_steps": 3, "schedule_steps": 12, **changes}
    )


def config(c: ModelConfig | None = None, **training_changes) -> Config:
    return Config(
        model=c or model(),
        optimizer=optimizer(),
        mesh=MeshConfig(),
        data=DataConfig(filespec="unused"),
        training=TrainingConfig(
            **{
                "seq_len": LENGTH,
                "steps": 20,
                "batch_size": BATCH,
                "compute_dtype": "f32",
                "report": False,
            }
            | training_changes,
        ),
        hardware=HardwareConfig(),
        paths=PathsConfig(),
    )


def updates(c: OptimizerConfig, table) -> Any:
    """How `c` updates the weights of a table."""
    of: Any = load_model(model())
    of.table = table
    return updates_of(c, of, train.OPTIMIZERS)


def forward(c: Config) -> train.Forward:
    """The forward pass of a run of `c`."""
    return forward_of(load_model(c.model), c.training)


def forward_of(model, training: TrainingConfig, in_training: bool = False) -> train.Forward:
    """The forward pass of a model."""
    return train.Forward(model, training, train.softmax_attention, in_training)


def step(c: Config) -> Step:
    """The training step of `c`, on the mesh in force."""
    return trace_step(c, load_model(c.model))


def step_of(of: train.Forward, length: int = LENGTH, rows: int = BATCH) -> Step:
    """The training step of a forward pass, on the mesh in force, for so many sequences of a
    microbatch.
    """
    training = dataclasses.replace(
        of.training, seq_len=length, batch_size=rows * of.training.microbatches
    )
    spec = dataclasses.replace(train.SPEC, attention=of.einsum)
    return trace_step(
        dataclasses.replace(config(of.model.config), training=training), of.model, spec=spec
    )


def at_rest(w):
    """Weights as a layer gets them. Per-device code."""
    return of_weights.at_rest(w, "compute")


def logits(w, batch: TokenBatch, c: Config):
    """Logits of a batch, as a run of `c` computes them. Per-device code."""
    run = forward(c)
    return run.logits(run.gatherable(w), run.tokens(batch))


def loss_and_gradients(w, batch: train.Batch, c: Config, seeds=None):
    """Mean loss and gradients of the batch of a step, as a run of `c` computes them.

    Per-device code.
    """
    return train.loss_and_gradients(w, batch, seeds, c, forward(c))[:2]


def state(c: Config, seed: int = 0) -> train.State:
    """A fresh state on the mesh in force."""
    return jax.jit(functools.partial(train.init_state, config=c, model=load_model(c.model)))(
        jax.random.key(seed)
    )


def training_step(c: Config):
    return train.make_training_step(c, load_model(c.model))


def evaluation_step(c: Config):
    return train.make_evaluation_step(c, load_model(c.model))


@functools.cache
def mesh(name: str) -> jax.sharding.Mesh:
    """That of a name such as "one device", "d=4 t=2" or "p=2 d=2"."""
    given = {axis: int(size) for axis, size in re.findall(r"([prdect])=(\d+)", name)}
    sizes = dict.fromkeys("prdt", 1) | given
    return make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def abstract_mesh(sizes: dict[str, int]):
    """Enters a mesh of these sizes without devices."""
    return jax.sharding.use_abstract_mesh(explicit_mesh(axes_of_mesh(sizes)))


def host_batch(seed: int = 0, vocab: int = 64) -> TokenBatch:
    """Random tokens in documents of about five tokens; a few targets are masked."""
    rng = np.random.default_rng(seed)
    return TokenBatch(
        targets=rng.integers(0, vocab, (BATCH, LENGTH)).astype(np.uint32),
        is_seq_start=rng.random((BATCH, LENGTH)) < 0.2,
        loss_mask=rng.random((BATCH, LENGTH)) < 0.9,
    )


def place(tree, kind):
    """The host arrays of `tree` on the mesh in force, sharded as type `kind` says."""
    return jax.tree.map(jax.device_put, tree, make_shardings(kind, like=tree))


def place_batch(c: Config, batch: TokenBatch | None = None) -> TokenBatch:
    """The sequences of a host batch, by default host_batch(), as the batch of a step of `c` on the
    mesh in force.
    """
    return place(in_microbatches(batch or host_batch(), c.training.microbatches), train.Batch)


def weights(c: ModelConfig) -> train.Transformer:
    """Fresh weights on the mesh in force, with norm weights that differ from one."""
    w = jax.jit(lambda key: initialize(train.Llama(c).table, key))(jax.random.key(7))

    def wobble(x):
        return x * (1 + 0.1 * np.cos(np.arange(x.size).reshape(x.shape)).astype(np.float32))

    w.final_norm = jax.device_put(wobble(np.asarray(w.final_norm)), w.final_norm.sharding)
    for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
        norm = getattr(w.layers, name)
        if norm is not None:
            setattr(w.layers, name, jax.device_put(wobble(np.asarray(norm)), norm.sharding))
    return w


@contextlib.contextmanager
def unproved() -> Iterator[None]:
    """Runs train and are replayed, and texts are sampled, without a proof of the program, which
    takes longest.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "check", lambda self: None)
        patch.setattr("shardwright.tools.replay.session.check_steps", lambda step: None)
        patch.setattr(Sampler, "check", lambda self, prompts: None)
        yield


def per_device(fn, act="float32"):
    """`fn`, an annotated per-device function, jitted on the mesh in force with `act` bound."""
    mapped = typed_shard_map(fn)

    @jax.jit
    def run(*args):
        with Scope(act=act):
            return mapped(*args)

    return run
