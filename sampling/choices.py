"""Multiple choice by log-likelihood, as in lm-eval: the likeliest choice after its context is the answer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from configuration.foreign import LARGE, parse_object, read_text
from sampling.scoring import Scorer, continued, log_likelihoods
from text.codec import TextCodec

SIZES = {"acc": lambda text: 1, "acc_norm": len, "acc_bytes": lambda text: len(text.encode())}
"""Divisors of the log-likelihood of a choice, by lm-eval's name of the share of right answers: nothing, its characters,
its UTF-8 bytes."""


@dataclass
class Question:
    """A line of `choices`."""

    context: str
    choices: list[str]
    answer: int


def read_questions(path: str) -> list[Question]:
    """The questions of a file. Raises ValueError for a line that is none, with its number."""
    try:
        text = read_text(path, LARGE)
    except FileNotFoundError as error:
        raise ValueError(f"choices: there is no file {path}. Correct the path.") from error
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            found.append(_question(line, f"{path}:{number}"))
    if not found:
        raise ValueError(f"{path} has no question. Each line is one: a JSON object with context, choices and answer.")
    return found


def _question(line: str, where: str) -> Question:
    read = parse_object(where, line, remedy="Each line must be one JSON object.")
    context, choices, answer = read.get("context", read.get("question")), read.get("choices"), read.get("answer")
    if not isinstance(context, str):
        raise ValueError(f"{where}: no context; give a text as `context` or `question`.")
    if not isinstance(choices, list) or not choices or not all(isinstance(x, str) and x for x in choices):
        raise ValueError(f"{where}: choices must be a list of texts, none of them empty.")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"{where}: answer is {answer!r}; it must be the index of a choice, 0 to {len(choices) - 1}.")
    return Question(context, choices, answer)


@dataclass
class Answer:
    """The answer of a model to a question."""

    index: int
    """Place of the question, counted from 0."""
    answer: int
    """The right choice."""
    chosen: dict[str, int]
    """The choice of the model, by the names of SIZES."""
    log_likelihoods: list[float]
    """Log-probability of each choice after its context, in nats."""


def answers(
    scorer: Scorer, codec: TextCodec, weights: Any, questions: Sequence[Question], delimiter: str
) -> Iterator[Answer]:
    """The model's answer to each question. `delimiter` is the text between a context and a choice."""
    pair = lambda question, choice: continued(codec, scorer.c.bos_id, question.context, delimiter + choice)
    pairs = (pair(question, choice) for question in questions for choice in question.choices)
    found = log_likelihoods(scorer, weights, pairs)
    for i, question in enumerate(questions):
        likelihoods = np.array([next(found)[0] for _ in question.choices])
        divided = {name: likelihoods / [*map(size, question.choices)] for name, size in SIZES.items()}
        chosen = {name: int(np.argmax(values)) for name, values in divided.items()}
        yield Answer(i, question.answer, chosen, likelihoods.tolist())


def shares(found: Sequence[Answer]) -> dict[str, float]:
    """Share of right answers under each name of SIZES, and its standard error as `<name>_stderr`."""
    result = {}
    for name in SIZES:
        share = float(np.mean([answer.chosen[name] == answer.answer for answer in found]))
        result[name] = share
        result[f"{name}_stderr"] = math.sqrt(share * (1 - share) / max(1, len(found) - 1))
    return result
