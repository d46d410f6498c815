"""Evaluates a checkpoint: loss, perplexity and bits per byte of documents, and tasks.

    python -m tools.evaluate run=runs/<name>
    python -m tools.evaluate run=runs/<name> data=stories.jsonl out=losses.jsonl
    python -m tools.evaluate run=runs/<name> step=500 mesh.t=2
    python -m tools.evaluate run=runs/<name> 'tasks=[mine]' task_path=tasks/

Without data or tasks, the loss is that of the run's own validation: its evaluation step, on the
same batches. With data, each document of a file of texts is counted once. docs/evaluation.md has
examples.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from shardwright.cluster.devices import known_options
from shardwright.data.checks import a_path, at_least_0, at_least_1
from shardwright.data.loader import make_loader
from shardwright.data.text import sources
from shardwright.data.text.tokenizers import Tokenizer, tokenizer_of_run
from shardwright.inspect.causality import check_causal
from shardwright.inspect.soundness import check_steps
from shardwright.modeling.model import inputs_of, load_model
from shardwright.program.evaluation import evaluate as evaluate_batches
from shardwright.program.files import write_whole
from shardwright.program.mesh_choice import MeshChoice, StepChoice, mesh_for
from shardwright.program.resume import CheckpointChoice, open_run, trusted_options
from shardwright.program.spec import load_spec
from shardwright.program.step import trace_step
from shardwright.sampling.harness import language_model, run_harness
from shardwright.sampling.scoring import Scorer, document_losses
from shardwright.settings.program import run_program


@dataclass
class Settings(CheckpointChoice):
    """Settings of the program."""

    mesh: StepChoice = field(default_factory=StepChoice)
    """Devices along r, d, e, c and t; -1 for one of them: all that are left. Null: the run's if it
    fits, else all on d. Stages of the run are left out: d takes their devices. `tasks`, which may
    sample, have r, d and t alone."""
    batches: int | None = at_least_1(None)
    """Batches of the run's own validation; null: training.eval_batches."""
    data: str | None = a_path(None)
    """Texts to evaluate instead of the run's own validation: a file (.jsonl, .json, .csv, .parquet,
    .arrow, .feather or .txt), or a glob for several."""
    text_field: str = "text"
    """The JSON key or column that holds a text."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of lm-eval by name, which needs the package: pip install -e '.[eval]'."""
    task_path: str | None = a_path(None)
    """A directory with YAML files of further tasks."""
    num_fewshot: int | None = at_least_0(None)
    """Number of examples before each question of `tasks`; null: as the task says."""
    limit: int | None = at_least_1(None)
    """Number of documents of `data`, from the first on, or of each of the `tasks`; null: all."""
    out: str | None = a_path(None)
    """A file for the result: a JSON object on one line. With `data`, a line for each document is
    before it."""


def _choice(config: Settings) -> MeshChoice:
    """The mesh that is chosen; of tasks, one on which a Sampler works.

    Raises ValueError if it would not.
    """
    if not config.tasks:
        return config.mesh
    if other := [
        f"mesh.{axis}={n}" for axis in "ec" if (n := getattr(config.mesh, axis)) is not None
    ]:
        raise ValueError(
            f"{' and '.join(other)}: tasks, which may sample, have a mesh of r, d and t. Choose "
            "these."
        )
    return MeshChoice(config.mesh.r, config.mesh.d, config.mesh.t)


class OpenRun:
    """A checkpoint whose weights are on the devices.

    Raises:
        ValueError: there is no such run or checkpoint, or it does not fit the devices.
    """

    def __init__(self, config: Settings, write_line: Callable[[str], None] = print):
        with open_run(config.run, config.step, config.trust) as saved:
            self.config = config
            self.c = saved.config
            self.step = saved.step
            self.of_tokenizer = config.tokenizer, saved.tokenizer_file
            self.mesh = mesh_for(_choice(config), self.c)
            self.model = load_model(self.c.model)
            with jax.set_mesh(self.mesh):
                self.traced = trace_step(self.c, self.model)
                self.weights = saved.read_weights(
                    self.traced, config.other_source, write_line, config.average
                )
                if why := check_causal(self.traced):
                    write_line(f"not known whether a position sees a later token: {why}")

    def scorer(self) -> Scorer:
        """What computes losses of tokens."""
        with jax.set_mesh(self.mesh):
            return Scorer(self.traced, load_spec().cross_entropy, self.c.training.seq_len)

    def tokenizer(self) -> Tokenizer:
        """That of the settings, or else of the run's data, or of its import.

        Raises ValueError if it is missing.
        """
        return tokenizer_of_run(self.c.data, *self.of_tokenizer)

    def language_model(self) -> Any:
        """The checkpoint as a model of lm-eval."""
        return language_model(self.scorer(), self.tokenizer(), self.weights)


# ---- the run's own validation --------------------------------------------------------------------


def own_validation(run: OpenRun, write_line: Callable[[str], None]) -> dict[str, Any]:
    """The loss that the run logs on its validation split."""
    c = run.c
    t = run.c.training
    inputs = inputs_of(run.model)
    batches = run.config.batches or t.eval_batches
    if not batches:
        raise ValueError(
            "the run has no validation (training.eval_batches is 0). Give batches=<number>, or "
            "data=…."
        )
    sizes = t.batch_size, t.seq_len, c.model.vocab
    with jax.set_mesh(run.mesh):
        loader = make_loader(
            c.data, "validation", *sizes, inputs=inputs, microbatches=t.microbatches
        )
        options = known_options(trusted_options(c, run.config.trust, write_line), write_line)
        evaluation_step = load_spec().make_evaluation_step(c, run.model, options)
        if run.mesh.size > 1:  # it may be a mesh that no run was checked on
            check_steps(run.traced, ("evaluation",))
        found: dict[str, Any] = evaluate_batches(evaluation_step, run.weights, loader, batches)
    about = {"data": "the run's own validation"}
    return about | result_of(
        found["loss"] * found["targets"], found["targets"], found.get("utf8_bytes")
    )


def result_of(nats: float, tokens: int, utf8_bytes: int | None) -> dict[str, Any]:
    """The numbers of an evaluation, from the sum of the losses of some tokens, and the bytes of
    their text.
    """
    loss = nats / tokens
    result = {
        "tokens": tokens,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
    }
    if utf8_bytes:
        result |= {"bytes": utf8_bytes, "bits_per_byte": nats / math.log(2) / utf8_bytes}
    return result


# ---- documents -----------------------------------------------------------------------------------


def documents_of(
    run: OpenRun, write_line: Callable[[str], None]
) -> Iterator[tuple[int, list[int], int]]:
    """Place in the files, counted from 0; token ids without bos, with the end token of the run's
    data; UTF-8 bytes.

    Documents without text are left out, but counted.
    """
    tokenizer = run.tokenizer()
    end = [] if tokenizer.end is None else [tokenizer.end]
    field = run.config.text_field
    name, data, found = sources.open_text("data", None, None, None, [str(run.config.data)], field)
    for line in found.described("data"):
        write_line(line)
    blocks = sources.blocks(name, data, field)
    for i, text in enumerate(text for texts, _ in blocks for text in texts):
        if ids := tokenizer.ids(text):
            yield i, [*ids, *end], len(text.encode())


def of_data(
    run: OpenRun, write_line: Callable[[str], None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The loss of all documents of `data`, and a line for each."""
    documents, again = itertools.tee(
        itertools.islice(documents_of(run, write_line), run.config.limit)
    )
    losses = document_losses(run.scorer(), run.weights, (ids for _, ids, _ in documents))
    lines = [
        {"index": i, "tokens": len(ids), "loss": loss, "bytes": size}
        for (i, ids, size), loss in zip(again, losses, strict=True)
    ]
    if not lines:
        raise ValueError(f"{run.config.data} has no document. Choose another file.")
    nats = math.fsum(line["loss"] for line in lines)
    tokens, size = (sum(line[name] for line in lines) for name in ("tokens", "bytes"))
    return {"data": run.config.data, "documents": len(lines)} | result_of(nats, tokens, size), lines


# ---- tasks ---------------------------------------------------------------------------------------


def of_tasks(run: OpenRun, write_line: Callable[[str], None]) -> dict[str, Any]:
    """The results of tasks."""
    config = run.config
    of_harness: Any = {"num_fewshot": config.num_fewshot, "task_path": config.task_path}
    with jax.set_mesh(run.mesh):
        found = run_harness(run.language_model(), config.tasks, limit=config.limit, **of_harness)
    write_line(found.pop("table"))
    return found


# ---- main ----------------------------------------------------------------------------------------


def evaluate(config: Settings, console: Console | None = None) -> dict[str, Any]:
    """Evaluates, prints the result, and returns it.

    Raises:
        ValueError: a setting out of range, settings that contradict each other, no such run,
            checkpoint, data or tokenizer.
    """
    console = console or Console()
    write_line = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if config.data is not None and config.tasks:
        raise ValueError("give one of data and tasks; data and tasks is given.")
    run = OpenRun(config, write_line)
    lines = []
    if config.data is not None:
        result, lines = of_data(run, write_line)
    else:
        result = of_tasks(run, write_line) if config.tasks else own_validation(run, write_line)
    about = {"run": config.run, "step": run.step, "mesh": dict(run.mesh.shape)}
    about |= {"average": run.c.training.eval_average} if config.average else {}
    about["compute_dtype"] = run.c.training.compute_dtype
    if config.out is not None:
        written = (
            json.dumps(line, ensure_ascii=False, default=str) + "\n"
            for line in (*lines, about | result)
        )
        write_whole(Path(config.out), "".join(written))
    for name, value in (about | ({} if config.tasks else result)).items():
        shown = (
            f"{value:.6f}"
            if isinstance(value, float)
            else f"{value:,}"
            if isinstance(value, int)
            else str(value)
        )
        write_line(f"{name:<14}{shown}")
    return about | result


if __name__ == "__main__":
    run_program("evaluate", Settings, evaluate)
