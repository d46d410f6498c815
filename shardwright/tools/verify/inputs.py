"""Makes the inputs of a step for every mesh: a state and a batch, also with a NaN or infinity in a weight."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from shardlib.shardtypes import f32
from shardwright.data.loader import TokenBatch, in_microbatches
from shardwright.modeling.model import inputs_of, load_model
from shardwright.optimizers.rates import inputs_of_loss
from shardwright.run.config import Config


@dataclasses.dataclass
class Inputs:
    """Inputs of the step on every mesh, as host arrays."""

    state: Any
    batch: TokenBatch
    """The batch of a step, [m, B, …]."""
    step: int
    reference: tuple = ()
    """Further arguments of the step: the weights of training.reference, if there are any."""


def random_batch(c: Config) -> TokenBatch:
    """Draws random tokens, with about four documents per sequence and a tenth of the targets masked."""
    rng = np.random.default_rng(0)
    shape = (c.training.batch_size, c.training.seq_len)
    batch = TokenBatch(
        targets=rng.integers(0, c.model.vocab, shape).astype(np.uint32),
        is_seq_start=rng.random(shape) < 4 / c.training.seq_len,
        loss_mask=rng.random(shape) < 0.9,
    )
    if count := len(inputs_of(load_model(c.model))):  # 0 and 1 are valid for any input
        batch.inputs = rng.integers(0, 2, (*shape, count)).astype(np.uint32)
    if kinds := inputs_of_loss(c.optimizer).values():

        def draw(kind: Any) -> np.ndarray:
            values = rng.standard_normal(shape) if kind is f32 else rng.integers(0, 2, shape)
            return values.astype(kind.dtype).view(np.uint32)

        batch.loss_inputs = np.stack([draw(kind) for kind in kinds], -1)
    return in_microbatches(batch, c.training.microbatches)


def make_inputs(c: Config, state: Any) -> Inputs:
    """Draws a batch, and makes the fresh `state` resemble a trained one: biases and gains vary, moments aren't zero.

    The step is one with the highest learning rate.
    """
    rng = np.random.default_rng(1)
    count = sum(x.size for x in jax.tree.leaves(state.weights))

    def noisy(path, x):
        name = jax.tree_util.keystr(path)
        noise = rng.standard_normal(x.shape)
        if name.startswith(".weights"):
            x = x + 0.1 * (math.sqrt(np.mean(np.square(x))) or 1.0) * noise
        else:  # the size of gradients with norm 1
            x = (np.square(noise) + 0.1) / count if "nu" in name else noise / math.sqrt(count)
        return x.astype(np.float32)

    state = jax.tree_util.tree_map_with_path(noisy, state)
    return Inputs(state, random_batch(c), max(1, c.optimizer.warmup_steps))


def with_planted(inputs: Inputs, vocab: int) -> Iterator[tuple[str, Inputs]]:
    """Returns `inputs` with a NaN, and with an infinity, in a weight, with a name for each.

    It is in the last entry of the first and of the last weight; and in the first table of `vocab` ids, at an id that
    the batch lacks, near which other lookups may come on a mesh that shards the table.

    The proof assumes finite numbers. The metrics show what a step does with others: whether each metric is finite, and
    whether the step was skipped.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(inputs.state.weights)
    lacking = vocab // 2
    targets = inputs.batch.targets  # on an even number of devices, the first id of a block
    other = dataclasses.replace(inputs.batch, targets=np.where(targets == lacking, targets - 1, targets))
    tables = [i for i, (_, x) in enumerate(leaves) if x.shape[0] == vocab]
    places = [(0, -1, inputs.batch), (-1, -1, inputs.batch), *((i, lacking, other) for i in tables[:1])]
    for (i, row, batch), number in itertools.product(places, (np.nan, np.inf)):
        changed = [np.array(x, order="C") for _, x in leaves]
        changed[i].reshape(len(changed[i]), -1)[row, -1] = number
        state = dataclasses.replace(inputs.state, weights=jax.tree.unflatten(tree, changed))
        name = jax.tree_util.keystr(leaves[i][0]).removeprefix(".")
        name += f"[{row}], which the batch lacks" * (row != -1)
        yield f"metrics with {number} in {name}", dataclasses.replace(inputs, state=state, batch=batch)
