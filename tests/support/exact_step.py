"""A training program of integers, whose losses numpy knows to the bit, and runs of it that start in
milliseconds.

Each loss is a hash of the whole state, the whole batch with the place of each token, the step and
the settings, and the state after a step depends on it: whatever is wrong once shows in every later
loss, on any mesh.
"""

import dataclasses
import functools
import os
import signal
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib.shardtypes import Array, f32, make_shardings, pytree_dataclass
from shardwright.modeling.weights import Weight, shapes_of
from shardwright.program import changes, step
from shardwright.run import run
from shardwright.run.listeners import Checkpoints, Listener, Skips, checkpoints
from tests.support import tiny

PRIME = 4093
"""Above every number of the state, so that f32 holds the integers below its square."""


@pytree_dataclass
class Layer:
    w: f32["M/d F/t"]


@pytree_dataclass
class Weights:
    embed: f32["V/t M/d"]
    layers: Array["layers", Layer]


class Model:
    """Has the weights of a model, and computes nothing."""

    Weights = Weights

    def __init__(self, c):
        self.config = c
        self.table = Weights(Weight((16, 8), "embedding"), Layer(Weight((2, 8, 8), "matrix")))


# ---- the arithmetic, of arrays of jax and of numpy ------------------------------------------------


def mixed(x, place):
    """A hash of each number of an array at its place."""
    x = (x.astype(np.uint32) + np.uint32(1)) * np.uint32(2654435761) + place * np.uint32(40503)
    return ((x ^ (x >> np.uint32(15))) * np.uint32(2246822519)).sum(dtype=np.uint32)


def hash_of_batch(batch, places):
    numbers = batch.targets * np.uint32(4) + batch.is_seq_start * np.uint32(2) + batch.loss_mask
    return mixed(numbers, places)


def loss_and_state(leaves, places, of_batch, number, rate):
    """Loss, and state after, of a step: leaves of weights, of adam_mu and of adam_nu."""
    of_settings = np.uint32(round(rate * 1e6) * 8191 % 2**32)
    total = of_batch * np.uint32(31) + number * np.uint32(1000003) + of_settings
    for i, (x, place) in enumerate(zip(leaves, places, strict=True)):
        total = total * np.uint32(3) + mixed(x, place + np.uint32(977 * i))
    total = total ^ (total >> np.uint32(13))
    count = len(leaves) // 3
    after = []
    for w, mu, nu in zip(*(leaves[i * count : (i + 1) * count] for i in range(3)), strict=True):
        mu = mu.astype(np.uint32) * np.uint32(3) + (total & np.uint32(255))
        nu = nu.astype(np.uint32) * np.uint32(5) + (total >> np.uint32(24)) + mu
        new = w.astype(np.uint32) * np.uint32(7) + mu + nu, mu, nu
        after.append([(x % np.uint32(PRIME)).astype(np.float32) for x in new])
    loss = (total >> np.uint32(12)).astype(np.float32) / np.float32(1024)
    return loss, [x for kind in zip(*after, strict=True) for x in kind]


def first_weights(seed, i, place):
    x = place * np.uint32(31) + np.uint32(104729 * i) + seed * np.uint32(7919)
    return (x % np.uint32(PRIME)).astype(np.float32)


# ---- the program ---------------------------------------------------------------------------------


def numbered(shape):
    """The number of each entry of an array, in numpy."""
    return np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)


def placed(shape, spec):
    """The same of a sharded array."""
    return jax.sharding.reshard(jnp.asarray(numbered(shape)), spec)


def like(x):
    return placed(x.shape, jax.typeof(x).sharding.spec)


def init_state(key, config, model):
    seed = jax.random.key_data(key)[1]
    shapes, tree = jax.tree.flatten(shapes_of(model.table))
    specs = [x.spec for x in jax.tree.leaves(make_shardings(Weights, like=shapes_of(model.table)))]
    places = map(placed, (x.shape for x in shapes), specs)
    w = jax.tree.unflatten(tree, [first_weights(seed, i, x) for i, x in enumerate(places)])
    return train.State(w, *(jax.tree.map(jnp.zeros_like, w) for _ in range(2)))


def make_training_step(config, model):
    @functools.partial(jax.jit, donate_argnums=0)
    def training_step(state, batch, number):
        leaves, tree = jax.tree.flatten(state)
        of_batch = hash_of_batch(batch, like(batch.targets))
        given = of_batch, number.astype(np.uint32), config.optimizer.learning_rate
        loss, leaves = loss_and_state(leaves, list(map(like, leaves)), *given)
        zero = jnp.zeros(())
        targets = jnp.float32(batch.targets.size)
        metrics = train.Metrics(loss, loss, zero, None, jnp.zeros((), bool), targets)
        return jax.tree.unflatten(tree, leaves), metrics

    return training_step


SPEC = dataclasses.replace(train.SPEC, init_state=init_state, make_training_step=make_training_step)


# ---- what numpy expects --------------------------------------------------------------------------


def expected(seed: int, batches: Iterator) -> Iterator[float]:
    """The loss of each step, from the (TokenBatch of sequences, learning rate) of each."""
    places = [numbered(x.shape) for x in jax.tree.leaves(shapes_of(MODEL.table))]
    leaves = [first_weights(np.uint32(seed), i, place) for i, place in enumerate(places)]
    leaves += [np.zeros(place.shape, np.float32) for place in places * 2]
    with np.errstate(over="ignore"):
        for number, (batch, rate) in enumerate(batches):
            of_batch = hash_of_batch(batch, numbered(batch.targets.shape))
            loss, leaves = loss_and_state(leaves, places * 3, of_batch, np.uint32(number), rate)
            yield float(loss)


MODEL = Model(tiny.model(layers=2))
_STEPS, _PROGRAMS, _CONFIGS = {}, {}, {}


# ---- runs ----------------------------------------------------------------------------------------


class Stopping(Listener):
    """Sends this process SIGTERM in a step."""

    at = None
    """Steps done before it."""

    def before(self, step, state, batch):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


class Bare(run.Run):
    """A Run that counts skipped steps, and that a signal may stop: nothing is drawn or profiled."""

    began: ClassVar[list[int]] = []
    """Where each start resumed."""

    def __init__(self, *args):
        super().__init__(*args[:-1], listeners=[Skips, Stopping, Checkpoints])

    def begin(self):
        state = super().begin()
        self.began.append(self.start)
        return state


class Compiled:
    """A lowered program that is compiled once."""

    def __init__(self, lowered):
        self._lowered, self.out_info, self.as_text = lowered, lowered.out_info, lowered.as_text

    @functools.cache  # noqa: B019
    def compile(self, compiler_options=None):
        return self._lowered.compile(compiler_options={"xla_backend_optimization_level": 0})


def remembered(config_at):
    """`config_at`, which takes longer than all else of a start, once for each configuration and
    step.
    """

    def at(c, step):
        free = {"steps": c.training.steps, "resume_step": c.training.resume_step}
        bare = dataclasses.replace(c.training, steps=None, resume_step=None)
        key = repr(dataclasses.replace(c, training=bare)), step
        found = _CONFIGS[key] = _CONFIGS.get(key) or config_at(c, step)
        return dataclasses.replace(found, training=dataclasses.replace(found.training, **free))

    return at


def use(patch) -> None:
    """Patches what runs use: programs are traced and compiled once, and not proved, planned or
    described.
    """
    at = remembered(changes.config_at)
    for module in (changes, run, checkpoints):
        patch.setattr(module, "config_at", at)
    lower: Any = step.Step.lowered

    def trace(c, model, spec=None):
        t, mesh = c.training, jax.sharding.get_mesh()
        sizes = t.batch_size, t.seq_len, t.microbatches
        key = (mesh, sizes, t.seed, t.init_from, c.optimizer.learning_rate)
        return _STEPS.setdefault(key, step.Step(c, MODEL, mesh, SPEC))

    def lower_once(self):
        if self not in _PROGRAMS:
            _PROGRAMS[self] = Compiled(lower.func(self))
        return _PROGRAMS[self]

    patch.setattr(train, "Run", Bare)
    patch.setattr(run, "trace_step", trace)
    about = {"source": {}, "programs": {}, "traced_by": ""}
    patch.setattr(run, "provenance_of", lambda step: about)
    patch.setattr(step.Step, "lowered", property(lower_once))
    patch.setattr(step.Step, "calls", [])
    patch.setattr(run, "load_spec", lambda: SPEC)
    patch.setattr(run, "introduce", lambda run, *_: run.changes() and {})
    patch.setattr(run, "compile_step", lambda lowered, *_: (lowered.compile(), None))
    patch.setattr(run, "keep_source", lambda *_: None)
    patch.setattr(Bare, "_planned", lambda self: None)
    patch.setattr(Bare, "check", lambda self: None)
    patch.setattr(Bare, "check_kernels", lambda self: None)
    patch.setattr(run.examine, "check_as_written", lambda *_: None)


def train_on(mesh: str, c, directory) -> str | None:
    """A run, to its end, on a mesh of tests/support/tiny.py. `use` must have been called."""
    with jax.set_mesh(tiny.mesh(mesh)):
        return train.Run.to_the_end(lambda: train.train(c, MODEL, directory, SPEC))


@pytest.fixture
def exact(monkeypatch):
    """Runs are of this program."""
    use(monkeypatch)
