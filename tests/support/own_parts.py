"""An optimizer, a loss and a tracker as a user writes them in a file of his own."""

import dataclasses
import json

import jax

import train
from shardwright.program.trackers import Opened

SGD = "tests.support.own_parts:sgd"


def sgd(state, g, step, rate, c, updates):
    """Gradient descent of the weights that it updates."""

    def move(update, w, g):
        return w - rate * update.rate * g if update.algorithm == SGD else w

    return dataclasses.replace(state, weights=jax.tree.map(move, updates, state.weights, g))


def halved(logits, targets, c):
    """Half of the cross-entropy."""
    return 0.5 * train.cross_entropy(logits, targets.ids)


def mixes_sequences(logits, targets, c):
    """Compares targets with the logits of another sequence."""
    return train.cross_entropy(logits[::-1], targets.ids)


def tracker(module, facts):
    """Writes the metrics to a file in the run's directory."""
    file = (facts.directory / f"{module.__name__}.jsonl").open("a")

    def log(values, step):
        return print(json.dumps({"step": step, **values}), file=file)

    return Opened(None, log, file.close)
