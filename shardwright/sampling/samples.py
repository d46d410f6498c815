"""Samples texts and evaluates tasks during training: two listeners of a run."""

import json
from typing import Any

import jax

from shardwright.cluster.watch import pause
from shardwright.data.text.tokenizers import REMEDY, tokenizer_of_run
from shardwright.program.best_effort import best_effort, in_a_line
from shardwright.program.processes import check_processes
from shardwright.program.stages import folded_mesh, without_stages
from shardwright.run.listeners import Listener, Training
from shardwright.run.metrics import move_later_lines
from shardwright.sampling.harness import check_tasks, language_model, run_harness
from shardwright.sampling.sampler import Sampler, Sampling, check_ids
from shardwright.sampling.scoring import Scorer
from shardwright.settings.output import say

SHOWN = 100
"""Most characters of a sample on the terminal."""


class Samples(Listener):
    """Continues training.sample_prompts before the first step and when training.sample_interval is
    due.

    Each sample is a line in `<directory>/samples.jsonl`: step (number of steps done), prompt, text
    (what was added), and ended (true if by the data's end-of-document token). The noise is the same
    each time, so texts differ only by what was learned. All processes make the same calls; process
    0 writes. A resumed run moves lines of later steps aside when it first writes. If sampling
    fails, it warns, and training continues without samples.

    Raises:
        ValueError: the data's tokenizer cannot encode a prompt, or a setting is out of range.
    """

    _sampler: Sampler | None = None

    def check(self, run: Training) -> None:
        c, t = run.config, run.config.training
        if t.sample_interval is None or run.is_over:
            return
        if run.step.inputs:
            raise ValueError(
                f"training.sample_interval is {t.sample_interval}, but the model also reads "
                f"{', '.join(run.step.inputs)}, which generated tokens lack. Set "
                "training.sample_interval=null."
            )
        self._run = run
        self._texts = list(t.sample_prompts)
        try:
            self._tokenizer = tokenizer_of_run(c.data)
            self._prompts = [self._tokenizer.ids(text) for text in self._texts]
            check_processes({"tokenizer of training.sample_prompts": self._prompts})
            for text, ids in zip(self._texts, self._prompts, strict=True):
                check_ids(f"training.sample_prompts: {text!r}", ids, c.model.vocab)
        except ValueError as e:
            instead = (
                "Set training.sample_interval=null for no samples, or use a dataset that has "
                "its tokenizer.json."
            )
            raise ValueError(f"training.sample_prompts: {str(e).replace(REMEDY, instead)}") from e
        self._stop = () if self._tokenizer.end is None else (self._tokenizer.end,)
        settings = Sampling(
            t.sample_tokens, t.sample_temperature, t.sample_top_k, seed=t.seed, stop=self._stop
        )
        self._mesh = folded_mesh(c)
        with jax.set_mesh(self._mesh):
            self._sampler = Sampler(run.step, settings, context=t.seq_len)
        self._path = run.directory / "samples.jsonl"
        self._wrote = False

    def before(self, step: int, state: Any, batch: Any) -> None:
        if step == 0:
            self._write(state.weights)

    def is_due(self) -> bool:
        return self._sampler is not None and self._run.due(
            self._run.config.training.sample_interval
        )

    def after(self, step: int, state: Any, metrics: Any) -> None:
        if self.is_due():
            self._run.log.flush()  # so that the time of sampling is not that of a step
            with self.timed():
                self._write(state.weights)

    def _write(self, weights: object) -> None:
        if self._sampler is None:
            return
        done = self._run.done
        try:
            with pause("sampling texts"), jax.set_mesh(self._mesh):
                folded = without_stages(weights, self._run.placement, self._mesh)
                drawn = self._sampler.generate(folded, self._prompts)
        except Exception as error:  # from the user's model, in every process
            self._sampler = None
            say(
                f"WARNING: no samples: {type(error).__name__}: {error}\nTraining continues without "
                "samples."
            )
            return
        lines = []
        for text, prompt, ids in zip(self._texts, self._prompts, drawn, strict=True):
            ended = ids[-1] in self._stop
            added = self._tokenizer.continuation(prompt, ids[:-1] if ended else ids)
            lines.append(
                json.dumps({"step": done, "prompt": text, "text": added, "ended": ended}) + "\n"
            )
            shown = " ".join((text + added).split())
            self._run.log.log_event(
                done - 1, "sample", {"text": shown[:SHOWN] + "…" * (len(shown) > SHOWN)}
            )
        if jax.process_index() == 0:
            with best_effort(str(self._path)):
                if not self._wrote:
                    move_later_lines(self._path, self._run.start + 1 if self._run.start else 0)
                with open(self._path, "a") as file:
                    file.writelines(lines)
            self._wrote = True


class Tasks(Listener):
    """Evaluates training.evals as tools.evaluate does: the event `evals`, such as arc_easy/acc.

    They are due at training.evals_interval, or where a validation is. A task that fails is logged
    as `failed`, and training continues. Raises ValueError if lm-eval is not installed.
    """

    _scorer: Scorer | None = None

    def check(self, run: Training) -> None:
        c = self._c = run.config
        if not c.training.evals or run.is_over:
            return
        check_tasks(c.training.evals)
        self._run = run
        self._mesh = folded_mesh(c)
        with jax.set_mesh(self._mesh):
            loss = run.spec.cross_entropy
            self._scorer = Scorer(run.step, loss, c.training.seq_len)

    def is_due(self) -> bool:
        t = self._c.training
        epochs = None if t.evals_interval else t.eval_epochs
        return self._scorer is not None and self._run.due(
            t.evals_interval or t.eval_interval, epochs
        )

    def after(self, step: int, state: Any, metrics: Any) -> None:
        if self._scorer and self.is_due():
            weights = without_stages(state.weights, self._run.placement, self._mesh)
            self._run.log.flush()
            with self.timed():
                found = self._metrics(self._scorer, weights)
            self._run.log.log_event(step, "evals", found)

    def _metrics(self, scorer: Scorer, weights: object) -> dict[str, Any]:
        c = self._c
        metrics = {}
        failed = []
        for name in c.training.evals:
            try:
                with pause("evaluating tasks"), jax.set_mesh(self._mesh):
                    model = language_model(scorer, tokenizer_of_run(c.data), weights)
                    found = run_harness(model, [name], limit=c.training.evals_limit)["results"]
            except Exception as error:  # from the user's model or data, or lm-eval
                failed.append(f"{name}: {in_a_line(error)}")
                continue
            numbers = (
                (f"{task}/{metric}", x)
                for task, of_task in found.items()
                for metric, x in of_task.items()
            )
            metrics |= {
                key.removesuffix(",none"): float(x)
                for key, x in numbers
                if isinstance(x, int | float)
            }
        return metrics | ({"failed": "; ".join(failed)} if failed else {})
