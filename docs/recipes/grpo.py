"""GRPO (arXiv 2402.03300): its loss in a file of one's own, and the dataset that it reads.

docs/changing.md has the commands.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.shardtypes import f32
from shardwright.data import flat_tokens
from shardwright.modeling.model import Targets
from train import cross_entropy

CLIP = 0.2
"""ε: a token's probability counts as changed by at most this factor."""
BETA = 0.04
"""β: the weight of the divergence from the reference."""


def loss(logits: Any, targets: Targets, config: object) -> jax.Array:
    """Loss of each target: weight · (β · D − min(ρ · A, clip(ρ, 1 − ε, 1 + ε) · A)), equations 3
    and 4.

    ρ is the target's probability, divided by that when the answer was sampled; A the answer's
    advantage; D the unbiased estimate of the divergence from the reference, r − log r − 1, where r
    is the probability under the reference, divided by today's. Targets of the prompt do not count.
    """
    log_p = jnp.where(targets.counted, -cross_entropy(logits, targets.ids), 0)
    advantage = targets.input("advantage")
    ratio = jnp.exp(log_p - targets.input("old_log_p"))
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    log_r = targets.input("reference_log_p") - log_p
    divergence = jnp.exp(log_r) - log_r - 1
    return targets.input("weight") * (BETA * divergence - gain)


loss.inputs = {"advantage": f32, "old_log_p": f32, "reference_log_p": f32, "weight": f32}


def advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Rewards of answers, less their mean among the answers to the same prompt, divided by the
    standard deviation.

    0 where all rewards of a group are equal.
    """
    _, group = np.unique(groups, return_inverse=True)
    count = np.bincount(group)
    centered = rewards - (np.bincount(group, rewards) / count)[group]
    deviation = np.sqrt(np.bincount(group, centered**2) / count)[group]
    return np.where(deviation > 0, centered / np.where(deviation > 0, deviation, 1), 0)


def write(path: str, answers: list[dict], batch_size: int) -> None:
    """Writes the training split of a dataset: a document for each answer, in order.

    The batches of a run are `batch_size` neighbors, of which the loss is the mean over answers of
    the mean over their tokens. A run divides by the number of targets in the batch instead, so
    `weight` is that, divided by batch_size and by the length of the answer.

    Args:
        path: of the dataset.
        answers: of each, `prompt` and `answer` (token ids), `group` (the same for answers to the
            same prompt), `reward`, and for each token of the answer `old_log_p` and
            `reference_log_p`, its log-probability when it was sampled and under the reference.
        batch_size: training.batch_size, of which the number of answers is a multiple.
    """
    if not answers or len(answers) % batch_size:
        raise ValueError(
            f"{len(answers)} answers are not a multiple of the batch size {batch_size}: add or "
            "drop some."
        )
    lengths = np.array([len(x["answer"]) for x in answers])
    counts = np.repeat(lengths.reshape(-1, batch_size).sum(1), batch_size)
    rewards, groups = (np.array([x[name] for x in answers]) for name in ("reward", "group"))
    of_answers = {"answer": np.ones(len(answers)), "advantage": advantages(rewards, groups)}
    of_answers["weight"] = counts / (batch_size * lengths)

    def of_tokens(name: str) -> Iterator[float]:
        for i, x in enumerate(answers):
            yield from [0.0] * len(x["prompt"])
            yield from [of_answers[name][i]] * lengths[i] if name in of_answers else x[name]

    with flat_tokens.Writer(path, "train") as writer:
        for x in answers:
            ids = np.array([*x["prompt"], *x["answer"]])
            writer.append(ids=ids, lengths=np.array([len(ids)]))
    for name in loss.inputs:
        flat_tokens.add_input(
            path, "train", name, np.fromiter(of_tokens(name), np.float32).view(np.uint32)
        )
    flat_tokens.add_input(path, "train", "answer", np.fromiter(of_tokens("answer"), np.uint32))


if __name__ == "__main__":
    source, target, size = sys.argv[1:]
    with open(source, encoding="utf-8") as lines:
        write(target, [json.loads(line) for line in lines], int(size))
