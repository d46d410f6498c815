"""Evaluates tasks during training and in tools.evaluate: our own, which need no download, and those of lm-eval."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardwright.data.loader import make_loader
from shardwright.data.text.tokenizers import tokenizer_of_run
from shardwright.run.config import Config
from shardwright.run.stores import in_all_processes
from shardwright.sampling.harness import language_model, run_harness
from shardwright.sampling.scoring import Scorer, log_likelihoods
from shardwright.settings.program import has_package

QUESTIONS = 1000
"""Most questions of each of our tasks without a limit, and most validation batches that are read for them."""
ANSWER, CHOICES, COPIED = 8, 4, 32
"""Tokens of an answer of `cloze`, how many answers there are to choose from, and most tokens that `copying` repeats."""


def held_out(c: Config, count: int) -> list[np.ndarray]:
    """Reads pieces of validation documents, each of 2·ANSWER tokens or more, alike on all processes.

    At most `count`, but CHOICES if that is more.
    """
    t = c.training
    loader = make_loader(c.data, "validation", t.batch_size, t.seq_len, c.model.vocab)
    steps = itertools.takewhile(loader.rows, range(QUESTIONS))

    def pieces() -> Iterator[np.ndarray]:
        for batch in (loader.sequences(i, np.arange(loader.rows(i))) for i in steps):
            for ids, starts, counts in zip(batch.targets, batch.is_seq_start, batch.loss_mask, strict=True):
                parts = np.split(ids[counts], np.flatnonzero(starts[counts]))
                yield from (part for part in parts if len(part) >= 2 * ANSWER)

    found = in_all_processes(lambda: [*itertools.islice(pieces(), max(count, CHOICES))])
    if len(found) < CHOICES:
        few = f"the validation split has {len(found)} documents of {2 * ANSWER} tokens in training.seq_len"
        raise ValueError(f"{few}; use one with {CHOICES} or more, or leave out the tasks cloze and copying.")
    return found


def cloze(scorer: Scorer, weights: object, c: Config, count: int) -> dict[str, float]:
    """Which of CHOICES endings, of ANSWER tokens, does a held-out text have? The others end other texts."""
    texts = held_out(c, count)
    ends = [text[-ANSWER:].tolist() for text in texts]
    begins = [[c.model.bos_id, *text[:-ANSWER]] for text in texts]
    asked = enumerate(begins[:count])
    pairs = ((begin, ends[(i + k) % len(ends)]) for i, begin in asked for k in range(CHOICES))
    scores = np.array([score for score, _ in log_likelihoods(scorer, weights, pairs)]).reshape(-1, CHOICES)
    right = scores[:, 0] > scores[:, 1:].max(1)
    return {"accuracy": float(right.mean()), "loss": -float(scores[:, 0].mean()) / ANSWER}


def copying(scorer: Scorer, weights: object, c: Config, count: int) -> dict[str, float]:
    """Repeats held-out tokens, in random order."""
    words = np.concatenate(held_out(c, count))
    rng = np.random.RandomState(0)
    drawn = rng.choice(words, (count, min(COPIED, scorer.length // 2)))
    found = [*scorer.losses(weights, ([c.model.bos_id, *text, *text] for text in drawn))]
    n = drawn.shape[1] - 1  # without the first token that is repeated, which nothing announces
    losses, likeliest = (np.concatenate([x[i][-n:] for x in found]) for i in range(2))
    return {"accuracy": float(likeliest.mean()), "loss": float(losses.mean())}


TASKS: dict[str, Callable[..., dict[str, float]]] = {"cloze": cloze, "copying": copying}
"""Our own tasks. Each maps a Scorer, weights, the configuration and a number of questions to metrics."""


def check_tasks(names: Sequence[str]) -> None:
    """Raises ValueError for training.evals with tasks that are not in TASKS if lm-eval is not installed."""
    if (others := {*names} - {*TASKS}) and not has_package("lm_eval"):
        known = f"training.evals has {min(others)!r}, which is not one of {', '.join(TASKS)}"
        raise ValueError(f"{known}. For tasks of lm-eval, run: pip install -e '.[eval]'")


def evaluate_tasks(
    names: Sequence[str],
    scorer: Scorer,
    weights: Any,
    c: Config,
    limit: int | None,
    tokenizer: Sequence[str | None] = (),
    **options: Any,
) -> dict[str, Any]:
    """Evaluates tasks of TASKS and of lm-eval. Returns `results`, metrics by task, and what run_harness returns.

    `limit` is the most questions of each task; None: all, or QUESTIONS. `tokenizer` are the arguments of
    tokenizer_of_run after the data, `options` those of run_harness. Raises ValueError if there are too few held-out
    texts, or lm-eval lacks a task.
    """
    found: dict[str, Any] = {}
    if others := [name for name in names if name not in TASKS]:
        model = language_model(scorer, tokenizer_of_run(c.data, *tokenizer), weights)
        found = run_harness(model, others, limit=limit, **options)
    own = {name: TASKS[name](scorer, weights, c, limit or QUESTIONS) for name in names if name in TASKS}
    return found | {"results": own | found.get("results", {})}
