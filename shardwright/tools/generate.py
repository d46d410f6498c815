"""Samples text from a checkpoint.

    python -m tools.generate run=runs/<name> prompt="Once upon a time" max_tokens=200
    temperature=0.8 top_k=50 python -m tools.generate run=runs/<name> prompts_file=prompts.txt
    samples=4 output=texts.jsonl python -m tools.generate run=runs/<name> step=500
    'prompt_ids=[5,8,13]' mesh.t=2

The weights are sharded as in training, on any mesh. docs/evaluation.md explains how to use it.
"""

import bisect
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from shardwright.axes import mesh_text
from shardwright.data.checks import a_path, check_ranges, within
from shardwright.data.text.tokenizers import Tokenizer, tokenizer_of_run
from shardwright.data.untrusted import LARGE, parse_object, read_text, shown
from shardwright.huggingface.sidecars import ends_of
from shardwright.modeling.model import load_model
from shardwright.program.files import write_whole
from shardwright.program.mesh_choice import MeshChoice, mesh_for
from shardwright.program.resume import CheckpointChoice, SavedRun, Write, open_run
from shardwright.program.step import trace_step
from shardwright.sampling.sampler import Sampler, Sampling, check_ids
from shardwright.settings.output import quoted
from shardwright.settings.program import run_program


@dataclass
class Settings(Sampling, CheckpointChoice):
    """Settings of the program."""

    prompt: str | None = None
    """Text to continue, exactly as it is after `prompt=`; empty: a document from its beginning."""
    prompts_file: str | None = a_path(None)
    """A file with a prompt on each line; or a .jsonl, with a prompt under the key `prompt` of
    each."""
    prompt_ids: list[int] | None = None
    """A prompt as token ids, without model.bos_id, which is put before it."""
    samples: int = within(1, 2**20, 1)
    """Number of texts for each prompt, at least 1."""
    context: int | None = within(1, 2**24, None)
    """Number of tokens that the next one can see, for which memory is taken; null: training.seq_len
    of the run."""
    stop: list[int] | None = None
    """Ids of the tokens that end a text. Null: the end token of the run's data and the EOS tokens
    of an imported model; []: none."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a text where the first of them comes."""
    batch: int = within(1, 2**20, 64)
    """Number of texts at once, at least 1; rounded up to a multiple of the devices."""
    mesh: MeshChoice = field(default_factory=MeshChoice)
    """Devices along r, d and t; -1 for one of them: all that are left. Null: the run's if these
    fit, else all on d."""
    output: str | None = a_path(None)
    """A file for the texts. Each line is a JSON object: prompt, sample (number of the text among
    those of its prompt, from 0), text (what was added, without the stop token or string), ended (by
    a stop token or string), prompt_ids, and ids (the tokens added, with those of the stop)."""


def read_prompts(config: Settings) -> list[str]:
    """The prompts as texts; none with prompt_ids.

    Raises ValueError unless they are given in exactly one way.
    """
    names = ("prompt", "prompts_file", "prompt_ids")
    given = [name for name in names if getattr(config, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ValueError(f"give one of prompt, prompts_file and prompt_ids; given: {found}.")
    if config.prompts_file is not None:
        text = read_text(config.prompts_file, LARGE)
        if not text.strip():
            raise ValueError(
                f"prompts_file={config.prompts_file} has no prompt. Write one on each line."
            )
        if not config.prompts_file.endswith(".jsonl"):
            return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
        lines = [
            (f"{config.prompts_file}, line {i}", line)
            for i, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
        return [
            parse_object(where, line, {"prompt": str}, "Correct it.")["prompt"]
            for where, line in lines
        ]
    return [] if config.prompt is None else [config.prompt]


def read_tokenizer(config: Settings, saved: SavedRun, say: Write) -> Tokenizer:
    """The tokenizer of the run; one that shows ids if there is none and the prompt is given as
    ids.
    """
    try:
        return tokenizer_of_run(saved.config.data, config.tokenizer, saved.tokenizer_file)
    except (ValueError, OSError) as error:
        if config.prompt_ids is None or config.tokenizer is not None:
            raise
        say(f"ids are shown, and none ends a text: {error}")
        return Tokenizer()


# ---- texts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ends:
    """What ends a text: a token of one of these ids, or one of these strings."""

    tokenizer: Tokenizer
    ids: tuple[int, ...]
    strings: list[str]

    @classmethod
    def read(cls, config: Settings, tokenizer: Tokenizer, saved: SavedRun) -> "Ends":
        """Reads the settings. Raises ValueError for an empty string."""
        if "" in config.stop_strings:
            raise ValueError(
                "stop_strings has an empty text, which every text begins with; leave it out."
            )
        ids = ends_of(saved, tokenizer) if config.stop is None else tuple(config.stop)
        return cls(tokenizer, ids, config.stop_strings)

    def decode(self, prompt: Sequence[int], ids: list[int]) -> str:
        """The text that tokens add to a prompt, without the one that ends it."""
        return self.tokenizer.continuation(prompt, ids[:-1] if ids[-1] in self.ids else ids)

    def have_string(self, prompt: Sequence[int], ids: list[int]) -> bool:
        """True if the added text has one of the strings."""
        return any(end in self.decode(prompt, ids) for end in self.strings)

    def cut(self, prompt: Sequence[int], ids: list[int]) -> tuple[list[int], str, bool]:
        """The tokens up to the end, the text before it, and True if there is an end.

        More tokens may have been drawn, because the host reads several at once.
        """
        if self.have_string(prompt, ids):
            lengths = range(1, len(ids))
            ids = ids[
                : 1 + bisect.bisect(lengths, False, key=lambda n: self.have_string(prompt, ids[:n]))
            ]
        text = self.decode(prompt, ids)
        ended = ids[-1] in self.ids or self.have_string(prompt, ids)
        return (
            ids,
            text[: min((text.index(end) for end in self.strings if end in text), default=None)],
            ended,
        )


def make_sampler(
    config: Settings, saved: SavedRun, stop: tuple[int, ...], context: int, say: Write
) -> tuple[Sampler, Any]:
    """A sampler of texts of at most `context` tokens, on the current mesh, and the weights."""
    step = trace_step(saved.config, load_model(saved.config.model))
    weights = saved.read_weights(step, config.other_source, say, config.average)
    drawing: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(Sampling)}
    settings = Sampling(**{**drawing, "stop": stop})
    return Sampler(step, settings, context, config.batch), weights


def print_text(result: dict[str, Any], sampler: Sampler, console: Console) -> None:
    """Prints a text after its prompt, and why it ends."""
    if result["ended"]:
        how = "ended"
    elif len(result["ids"]) < sampler.settings.max_tokens:
        how = f"cut by context={sampler.context}"
    else:
        how = "cut by max_tokens"
    heading = f"sample {result['sample']}: {len(result['ids'])} tokens, {how}"
    console.rule(heading, align="left", style="dim")
    parts = (shown(result["prompt"]), "bold"), ("▸", "dim"), shown(result["text"])
    console.print(Text.assemble(*parts), soft_wrap=True)


def generate(config: Settings, console: Console | None = None) -> list[dict[str, Any]]:
    """Samples texts and prints them, each after its prompt in bold and ▸.

    Returns what `output` has of each.

    Raises:
        ValueError: a setting out of range, settings that contradict each other, no such run,
            checkpoint or tokenizer.
    """
    console = console or Console()

    def say(text: str) -> None:
        console.print(Text(shown(text), style="dim"), soft_wrap=True)

    check_ranges("", config)
    texts = read_prompts(config)
    with open_run(config.run, config.step, config.trust) as saved:
        c = saved.config
        tokenizer = read_tokenizer(config, saved, say)
        try:
            prompts = [tokenizer.ids(text) for text in texts]
        except ValueError as error:
            raise ValueError(f"{error} Or give the prompt as ids: prompt_ids=[1,2,3].") from error
        if config.prompt_ids is not None:
            check_ids("prompt_ids", config.prompt_ids, c.model.vocab)
            prompts = [config.prompt_ids]
            texts = [tokenizer.decode(config.prompt_ids)]
        ends = Ends.read(config, tokenizer, saved)
        context = config.context or c.training.seq_len
        c.model.check(context)
        # Of a long context no more is taken than the texts can have.
        context = min(context, max(map(len, prompts)) + config.max_tokens)
        with jax.set_mesh(mesh_for(config.mesh, c)):
            sampler, weights = make_sampler(config, saved, ends.ids, context, say)
            repeated = [prompt for prompt in prompts for _ in range(config.samples)]
            start = time.perf_counter()
            drawn = sampler.generate(weights, repeated, ends.have_string)
            results = []
            for i, (prompt, ids) in enumerate(zip(repeated, drawn, strict=True)):
                ids, added, ended = ends.cut(prompt, ids)
                about = {
                    "prompt": texts[i // config.samples],
                    "sample": i % config.samples,
                    "text": added,
                }
                results.append(about | {"ended": ended, "prompt_ids": list(prompt), "ids": ids})
            for result in results:
                print_text(result, sampler, console)
            seconds = time.perf_counter() - start
            count = sum(len(result["ids"]) for result in results)
            made = (
                f"{count:,} tokens of {len(results)} texts in {seconds:.2f} s, compilation included"
            )
            mesh = mesh_text(jax.sharding.get_mesh().shape)
            say(f"{made}; step {saved.step}, mesh {mesh}, {c.training.compute_dtype}")
    if config.output is not None:
        lines = (json.dumps(result, ensure_ascii=False) + "\n" for result in results)
        write_whole(Path(config.output), "".join(lines))
    return results


# ---- main ----------------------------------------------------------------------------------------


def quote_prompt(argument: str) -> str:
    """Quotes a `prompt` of the command line for Hydra: `prompt=Hello, "you"` is exactly that
    text.
    """
    name, equals, value = argument.partition("=")
    if name != "prompt" or not equals:
        return argument
    return f"prompt={quoted(value)}"


if __name__ == "__main__":
    sys.argv[1:] = map(quote_prompt, sys.argv[1:])
    run_program("generate", Settings, generate)
