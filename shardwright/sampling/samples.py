"""Samples texts and evaluates tasks during training."""

import json
from typing import Any

import jax

from shardwright.cluster.watch import pause
from shardwright.data.text.tokenizers import REMEDY, tokenizer_of_run
from shardwright.run.best_effort import best_effort, in_a_line
from shardwright.run.config import Config
from shardwright.run.metrics import move_later_lines
from shardwright.run.run import Run
from shardwright.run.stages import folded_mesh, without_stages
from shardwright.sampling.sampler import Sampler, Sampling, check_ids
from shardwright.sampling.scoring import Scorer
from shardwright.sampling.tasks import check_tasks, evaluate_tasks
from shardwright.settings.words import say

SHOWN = 100
"""Most characters of a sample on the terminal."""


class TrainingSamples:
    """Continues training.sample_prompts with the weights of a run during training.

    Each sample is a line in `<directory>/samples.jsonl`: step (number of steps done), prompt, text (what was added),
    and ended (true if by the data's end-of-document token). The noise is the same each time, so texts differ only by
    what was learned. All processes make the same calls; process 0 writes.

    Args:
        c: configuration of the run.
        run: the run, which need not have begun. If it resumes, the first `write` removes lines of later steps.

    Raises:
        ValueError: the data's tokenizer cannot encode a prompt, or a setting is out of range.
    """

    def __init__(self, c: Config, run: Run):
        t = c.training
        self._run = run
        self._texts = list(t.sample_prompts)
        try:
            self._tokenizer = tokenizer_of_run(c.data)
            self._prompts = [self._tokenizer.ids(text) for text in self._texts]
            for text, ids in zip(self._texts, self._prompts, strict=True):
                check_ids(f"training.sample_prompts: {text!r}", ids, c.model.vocab)
        except ValueError as e:
            instead = "Set training.sample_interval=null for no samples, or use a dataset that has its tokenizer.json."
            raise ValueError(f"training.sample_prompts: {str(e).replace(REMEDY, instead)}") from e
        self._stop = () if self._tokenizer.end is None else (self._tokenizer.end,)
        settings = Sampling(t.sample_tokens, t.sample_temperature, t.sample_top_k, seed=t.seed, stop=self._stop)
        self._mesh = folded_mesh(c)
        with jax.set_mesh(self._mesh):
            self._sampler = Sampler(run.step, settings, context=t.seq_len, source=run.provenance["source"])
        self._path = run.directory / "samples.jsonl"
        self._wrote = False
        self._failed = False

    def write(self, weights: object) -> None:
        """Samples with these weights, after the steps done so far.

        On failure, prints a warning and disables samples; training continues.
        """
        done = self._run.done
        weights = without_stages(weights, self._run.placement, self._mesh)
        if self._failed:
            return
        try:
            with pause("sampling texts"), jax.set_mesh(self._mesh):
                drawn = self._sampler.generate(weights, self._prompts)
        except Exception as error:  # from the user's model, in every process
            self._failed = True
            say(f"WARNING: no samples: {type(error).__name__}: {error}\nTraining continues without samples.")
            return
        lines = []
        for text, prompt, ids in zip(self._texts, self._prompts, drawn, strict=True):
            ended = ids[-1] in self._stop
            added = self._tokenizer.continuation(prompt, ids[:-1] if ended else ids)
            lines.append(json.dumps({"step": done, "prompt": text, "text": added, "ended": ended}) + "\n")
            shown = " ".join((text + added).split())
            self._run.log_event("sample", {"text": shown[:SHOWN] + "…" * (len(shown) > SHOWN)})
        if jax.process_index() == 0:
            with best_effort(str(self._path)):
                if not self._wrote:
                    move_later_lines(self._path, self._run.start + 1 if self._run.start else 0)
                with open(self._path, "a") as file:
                    file.writelines(lines)
            self._wrote = True


class TrainingTasks:
    """Evaluates training.evals during training, as tools.evaluate does: the event `evals`, such as cloze/accuracy.

    Arguments are those of TrainingSamples. Raises ValueError for an unknown task.
    """

    def __init__(self, c: Config, run: Run):
        check_tasks(c.training.evals)
        self._c = c
        self._run = run
        self._mesh = folded_mesh(c)
        with jax.set_mesh(self._mesh):
            loss = run.spec.cross_entropy
            source = run.provenance["source"]
            self._scorer = Scorer(run.step, loss, c.training.seq_len, source)

    def write(self, weights: object) -> None:
        """Logs the metrics of all tasks. A task that fails is logged as `failed`, and training continues."""
        weights = without_stages(weights, self._run.placement, self._mesh)
        self._run.log_event("evals", lambda: self._metrics(weights))

    def _metrics(self, weights: object) -> dict[str, Any]:
        c = self._c
        metrics = {}
        failed = []
        for name in c.training.evals:
            try:
                with pause("evaluating tasks"), jax.set_mesh(self._mesh):
                    found = evaluate_tasks([name], self._scorer, weights, c, c.training.evals_limit)["results"]
            except Exception as error:  # from the user's model or data, or lm-eval
                failed.append(f"{name}: {in_a_line(error)}")
                continue
            numbers = ((f"{task}/{metric}", x) for task, of_task in found.items() for metric, x in of_task.items())
            metrics |= {key.removesuffix(",none"): float(x) for key, x in numbers if isinstance(x, int | float)}
        return metrics | ({"failed": "; ".join(failed)} if failed else {})


class TrainingTexts:
    """The TrainingSamples and TrainingTasks of a run, as far as its settings ask for them."""

    def __init__(self, c: Config, run: Run):
        self._run = run
        self._t = c.training
        self._samples = TrainingSamples(c, run) if c.training.sample_interval else None
        self._tasks = TrainingTasks(c, run) if c.training.evals else None

    def write(self, weights: object) -> None:
        """Writes what is due after the steps done so far. Samples are also due before the first step."""
        run, t = self._run, self._t
        begins = run.done == run.start
        if self._samples and (run.start == 0 if begins else run.due(t.sample_interval)):
            self._samples.write(weights)
        epochs = None if t.evals_interval else t.eval_epochs
        if self._tasks and not begins and run.due(t.evals_interval or t.eval_interval, epochs):
            self._tasks.write(weights)
