"""Writes a checkpoint as a model of `transformers`: config.json, safetensors, tokenizer, model card.

    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported
    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported step=500 dtype=bf16

    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")

A model of train.py becomes a Llama; with QK-norm, a Qwen3. The module of another model (model.module) is
converted by its own `to_huggingface`, which docs/huggingface.md describes. A weight or a setting that the format cannot
hold, or attention that is not plain causal, is refused by name. Then the logits of a text are computed twice, by
transformers from the files and as the run does. If they differ, the error names the layer. The output is complete or
missing. Runs on the CPU, in memory for three times the model, or with check=false for the model and two files of
`file_bytes`.
"""

import dataclasses
import json
import math
import os
import shutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import SingleDeviceSharding
from omegaconf import MISSING

import train
from shardwright.modeling.model import inputs_of, load_model
from shardwright.modeling.weights import shapes_of
from shardwright.run.checkpoint import find_checkpoint
from shardwright.run.config import WEIGHTS, check_weights
from shardwright.run.provenance import compare_source, provenance_of
from shardwright.run.resuming import config_of, saved_config
from shardwright.settings.program import run_program
from shardwright_data.checks import check_choice, check_ranges, within
from shardwright_data.foreign import shown
from shardwright_data.text.huggingface import find_tokenizer, tokenizer_files
from tools.huggingface.check import check_rules, compare_logits, mapping_of

DTYPES = {"f32": ("float32", np.dtype(np.float32)), "bf16": ("bfloat16", np.dtype(jnp.bfloat16))}
"""Names in torch, and numpy dtypes."""


@dataclass
class Settings:
    """Settings of the program."""

    run: str = MISSING
    """Directory or URL of a run, or of one of its checkpoints."""
    output: str = MISSING
    """The directory to write; it must not exist yet."""
    step: int | None = within(0, 2**31, None)
    """Step of the checkpoint; null: the last one."""
    weights: str = "weights"
    """weights: the trained ones; ema: their moving average (training.ema_decay)."""
    other_source: bool = False
    """Allows source that computes something else than the source that made the checkpoint."""
    trust: bool = False
    """Imports the modules that the run names beside those shipped here, and fetches the tokenizer that it names on a
    server. For a run that is not yours, read them first."""
    check: bool = True
    """Compares the logits with those of transformers, which must be installed, with torch."""
    dtype: str = "f32"
    """Dtype of the weights: f32, as trained, or bf16, rounded to nearest."""
    dataset: str | None = None
    """A flat-tokens dataset whose tokenizer is written. Null: the run's."""
    file_bytes: int = within(1, 2**63, 2**31)
    """Largest size of a file of weights, at least 1. A tensor that is larger has a file of its own."""
    license: str | None = None
    """License of the weights, by its name on the hub, such as apache-2.0, for the model card."""


def read_model(run: str, step: int | None, which: str = "weights", trust: bool = False) -> tuple[int, Any, Any, dict]:
    """Reads a checkpoint: its step, configuration, `weights` or `ema` as NumPy arrays, and metadata.

    Raises:
        ValueError: there is no such checkpoint, or its weights are not those of its model.
    """
    checkpoints, found = find_checkpoint(run, step)
    with checkpoints:
        metadata = checkpoints.metadata(found)
        c = config_of(saved_config(metadata), trust)
        check_weights("weights", which, c.training.ema_decay)
        on_host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        like = jax.tree.map(lambda x: x.update(sharding=on_host), shapes_of(load_model(c.model).table))
        weights = checkpoints.restore(found, {which: like})[which]
    return found, c, jax.tree.map(np.asarray, weights), metadata


def write_tensors(directory: Path, tensors: Mapping[str, Callable], dtype: np.dtype, file_bytes: int) -> int:
    """Writes safetensors, in several files with an index if one is too small. Returns the bytes of all weights."""
    from safetensors.numpy import save_file

    files: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}
    total = 0
    os.umask(umask := os.umask(0))

    def flush() -> None:
        files.append(list(waiting))
        path = directory / f"{len(files)}.part"
        save_file(waiting, path, metadata={"format": "pt"})
        path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read
        waiting.clear()

    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor() if callable(tensor) else tensor).astype(dtype, copy=False)
        if waiting and sum(x.nbytes for x in waiting.values()) + values.nbytes > file_bytes:
            flush()
        waiting[name] = values
        total += values.nbytes
    flush()
    places = {}
    for i, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{i:05}-of-{len(files):05}.safetensors"
        (directory / f"{i}.part").rename(directory / file)
        places |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(directory / "model.safetensors.index.json", index)
    return total


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- model card -----------------------------------------------------------------------------------------------------

_CARD = """\
---
{front}---

# {title}

A causal language model, trained with shardwright and exported to `transformers`. `shardwright` wrote this page. It has
no statement on what the model is good or bad for.

{about}
"""


def write_card(directory: Path, title: str, license: str | None, about: Mapping) -> None:
    """Writes README.md. What a checkpoint says is an indented block of JSON, in which Markdown is not read.

    Args:
        directory: of the export.
        title: name of the model.
        license: its name on the hub; None: not given.
        about: what the export knows of the model, and settings of the run.
    """
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["shardwright", "jax"]}
    front |= {"license": license} if license else {}
    text = textwrap.indent(json.dumps(about, indent=2), "    ")
    card = _CARD.format(front=yaml.safe_dump(front), title=title, about=text)
    (directory / "README.md").write_text(card, encoding="utf-8")


# ---- export ---------------------------------------------------------------------------------------------------------


def run(config: Settings, log: Callable[[str], None] = print) -> None:
    """Writes the model into config.output.

    Raises:
        ValueError: a setting out of range, no such checkpoint, an output that exists, a model that transformers cannot
            express, or one whose logits differ from those of the files.
    """
    check_ranges("", config)
    check_choice("dtype", config.dtype, tuple(DTYPES))
    check_choice("weights", config.weights, WEIGHTS)
    output = Path(config.output)
    if output.exists():
        raise ValueError(f"output is {config.output}, which exists already. Move it away, or give another path.")
    step, c, weights, metadata = read_model(config.run, config.step, config.weights, config.trust)
    model, allow = load_model(c.model), None if config.other_source else "other_source=true"
    if saved := metadata.get("provenance"):
        now = provenance_of(train.programs, c, model)
        if differs := compare_source(saved, now, ("evaluation",), allow):
            log(f"source     {differs}")
    if inputs := inputs_of(model):
        raise ValueError(f"the model reads {', '.join(inputs)} beside the tokens; no model in transformers does.")
    content, tensors = mapping_of(c.model.module).to_huggingface(weights, c.model)
    check_rules(c.model, content["model_type"])
    if content.get("max_position_embeddings", 0) is None:
        content["max_position_embeddings"] = c.training.seq_len

    files, end = {}, None
    try:
        definition, end_token = find_tokenizer(dataclasses.asdict(c.data), config.dataset)
        files, end, notes = tokenizer_files(definition, c.model.bos_id, end_token)
        about = "; ".join(("tokenizer.json", *notes))
    except (ValueError, OSError) as error:
        about = f"none: {error}"
    torch_dtype, dtype = DTYPES[config.dtype]
    ids = {"bos_token_id": c.model.bos_id, "eos_token_id": end}
    # Written even if null: transformers would take the ids of Llama's own tokenizer.
    files["config.json"] = content | ids | {"dtype": torch_dtype, "torch_dtype": torch_dtype}
    files["generation_config.json"] = ids
    facts = {
        "architecture": content["architectures"][0],
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights)),
        "weights": f"{config.dtype}, {config.weights}, after {step} steps",
        "tokenizer": about.split(":")[0],
        "logits compared": "nothing: check=false",
        "hashes of the programs": (saved or {}).get("programs", "not known"),
    }
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # a killed export left it
    temporary.mkdir(parents=True)
    try:
        for name, file in files.items():
            _write_json(temporary / name, file)
        total = write_tensors(temporary, tensors, dtype, config.file_bytes)
        if config.check:
            facts["logits compared"] = compare_logits(c.model, weights, temporary, dtype)
        of_run = {"model": dataclasses.asdict(c.model), "optimizer": dataclasses.asdict(c.optimizer)}
        write_card(temporary, output.absolute().name, config.license, facts | of_run)
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    log(f"model      {facts['architecture']}: {facts['parameters']:,} parameters after {step} steps")
    log(f"weights    {total:,} bytes, {config.dtype}")
    log(f"compared   {facts['logits compared']}")
    log(shown(f"tokenizer  {about}"))
    log(f'written    {output}: open it with transformers.AutoModelForCausalLM.from_pretrained("{output}")')


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # other devices would be started, and their memory taken, for nothing
    run_program("checkpoint_to_huggingface", Settings, run)
