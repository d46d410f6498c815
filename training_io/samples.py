"""Texts that a run samples while it learns: noise becomes sentences."""

import json
from pathlib import Path
from typing import Any

import jax

from configuration import Config
from sampling import Sampler, Settings, check_ids
from stages import folded_mesh, placement_of, without_stages
from tools.text_codec import codec_of_data

from .metrics import RunLog
from .progress import pause

SHOWN = 100
"""Characters of a sample on the terminal."""


class TrainingSamples:
    """Continues training.sample_prompts every training.sample_interval steps, before the first and after the last.

    `<directory>/samples.jsonl` gets a line for each: step (how many were done), prompt, text (what was added), and
    ended (whether by the token that ends the data's documents). The noise is the same each time, so that texts differ
    by what was learned. With several processes all make the same calls, and process 0 writes.

    Args:
        c: of the run.
        directory: of the run.
        start: steps done before; lines of later steps, of an interrupted run, are removed.
        steps: of the whole run.
        log: where to say so.

    Raises:
        ValueError: a prompt that the data's tokenizer cannot encode, or a setting out of its range.
    """

    def __init__(self, c: Config, directory: Path, start: int, steps: int, log: RunLog):
        t = c.training
        self._interval, self._start, self._steps, self._log = t.sample_interval, start, steps, log
        self._codec = codec_of_data(c.data)
        self._texts = list(t.sample_prompts)
        try:
            self._prompts = [self._codec.encode(text) for text in self._texts]
            for text, ids in zip(self._texts, self._prompts, strict=True):
                check_ids(f"training.sample_prompts: {text!r}", ids, c.model.vocab)
        except ValueError as e:
            raise ValueError(f"training.sample_prompts: {e}") from e
        self._stop = () if self._codec.end is None else (self._codec.end,)
        settings = Settings(t.sample_tokens, t.sample_temperature, t.sample_top_k, seed=t.seed, stop=self._stop)
        self._mesh, self._placement = folded_mesh(c), placement_of(c)
        with jax.set_mesh(self._mesh):
            self._sampler = Sampler(c, settings, context=t.seq_len)
        self._path = directory / "samples.jsonl"
        if jax.process_index() == 0:
            lines = self._path.read_text().splitlines(keepends=True) if start and self._path.exists() else []
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= start]
            temporary = self._path.with_name(self._path.name + ".tmp")
            temporary.write_text("".join(kept))
            temporary.replace(self._path)

    def after(self, done: int, weights: Any) -> None:
        """Samples with these weights if it is time for it after `done` steps."""
        # A run that is resumed after `start` steps had its texts of that step before its checkpoint.
        is_time = done % self._interval == 0 or done == self._steps
        if not is_time or done == self._start > 0:
            return
        weights = without_stages(weights, self._placement, self._mesh)
        with pause("sampling texts"), jax.set_mesh(self._mesh):
            drawn = self._sampler.generate(weights, self._prompts)
        lines = []
        for text, prompt, ids in zip(self._texts, self._prompts, drawn, strict=True):
            ended = ids[-1] in self._stop
            added = self._codec.continuation(prompt, ids[:-1] if ended else ids)
            lines.append(json.dumps({"step": done, "prompt": text, "text": added, "ended": ended}) + "\n")
            shown = " ".join((text + added).split())
            self._log.log_event(done - 1, "sample", {"text": shown[:SHOWN] + "…" * (len(shown) > SHOWN)})
        if jax.process_index() == 0:
            with open(self._path, "a") as file:
                file.writelines(lines)
