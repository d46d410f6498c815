"""Writes a checkpoint as a model that `transformers` opens: config.json, safetensors, tokenizer.

    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported
    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported step=500 dtype=bf16

    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")

A model of train.py becomes a Llama; with QK-norm, a Qwen3. The module of another model (model.module) says itself what
it becomes, with `to_huggingface`: docs/huggingface.md describes that function. What a format cannot hold is refused by
name: a weight, attention that is not plain causal. Then the logits of a text are computed twice, from the files and as
the run does. If they differ, the layer is named. The output is there as a whole or not at all.

Runs on the CPU. Memory is bounded, whatever the model's size: two files of `file_bytes`; where a checkpoint's chunks
hold all layers of a weight, as those of a run do, 8 GiB of them, or the largest weight; and for the logits four times
the embedding table, and twice 8 GiB of layers, or of the model where it is smaller.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from omegaconf import MISSING, OmegaConf

import train
from configuration.checks import check_choice
from configuration.program import run_program
from modeling.model import inputs_of, load_model, module_of
from models.huggingface import mapping_of
from models.huggingface_check import check_rules, compare
from text.huggingface import find_tokenizer, tokenizer_files
from training_io.checkpoint_arrays import named_leaves
from training_io.config import check_weights
from training_io.host_checkpoint import StoredArray, open_checkpoint
from training_io.provenance import compare_source, provenance_of
from training_io.resuming import config_of, with_defaults

DTYPES = {"f32": ("float32", np.dtype(np.float32)), "bf16": ("bfloat16", np.dtype(jnp.bfloat16))}
"""What torch and numpy call them."""


@dataclass
class Config:
    run: str = MISSING
    """A run's directory, or that of one of its checkpoints."""
    output: str = MISSING
    """The directory to write, which must not be there yet."""
    step: int | None = None
    """Which checkpoint of the run. Null: the last."""
    weights: str = "weights"
    """weights: those that are trained; ema: their moving average (training.ema_decay)."""
    other_source: bool = False
    """Whether source may compare the logits that computes something else than what made the checkpoint."""
    dtype: str = "f32"
    """Of the weights: f32, as trained, or bf16, rounded to nearest."""
    dataset: str | None = None
    """A flat-tokens dataset whose tokenizer is written. Null: what the run read."""
    file_bytes: int = 2**31
    """Weights in a file at most, in bytes, where a single tensor is not larger; at least 1."""


def read_model(run: str, step: int | None, which: str = "weights") -> tuple[int, Any, Any, dict]:
    """The step of a checkpoint, its ModelConfig, its weights, to be read when they are indexed, and its metadata.

    `which`: weights, or ema, their average.

    Raises:
        ValueError: there is no such checkpoint, or its weights are not those of its model.
    """
    found, arrays, metadata = open_checkpoint(run, step)
    config = with_defaults(metadata["config"])
    check_weights("weights", which, config["training"]["ema_decay"])
    kind = module_of(config["model"]["module"]).ModelConfig
    c = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), config["model"]))
    table = load_model(c).table
    leaves = []
    for name, weight in named_leaves({which: table}).items():
        if name not in arrays or arrays[name].shape != weight.shape:
            has = f"of shape {list(arrays[name].shape)}" if name in arrays else "missing"
            raise ValueError(f"{name} is {has} in the checkpoint; its model has it as {list(weight.shape)}.")
        leaves.append(arrays[name])
    return found, c, jax.tree.unflatten(jax.tree.structure(table), leaves), metadata | {"config": config}


def write_tensors(
    directory: Path, tensors: Mapping[str, np.ndarray | StoredArray | Callable], dtype: np.dtype, file_bytes: int
) -> int:
    """Writes safetensors, in several files with an index where one does not hold them. Returns their bytes in all."""
    from safetensors.numpy import save_file

    parts: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}
    total = 0
    os.umask(umask := os.umask(0))

    def flush() -> None:
        parts.append(list(waiting))
        path = directory / f"{len(parts)}.part"
        save_file(waiting, path, metadata={"format": "pt"})
        path.chmod(0o666 & ~umask)  # safetensors makes files that only their owner can read
        waiting.clear()

    for name, tensor in tensors.items():
        values = np.asarray(tensor() if callable(tensor) else tensor)
        values = np.ascontiguousarray(values).astype(dtype, copy=False)
        if waiting and sum(x.nbytes for x in waiting.values()) + values.nbytes > file_bytes:
            flush()
        waiting[name] = values
        total += values.nbytes
    flush()
    if len(parts) == 1:
        (directory / "1.part").rename(directory / "model.safetensors")
        return total
    files = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    for i, file in enumerate(files):
        (directory / f"{i + 1}.part").rename(directory / file)
    places = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    return total


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def run(config: Config, say: Callable[[str], None] = print) -> None:
    """Writes the directory that `config` asks for.

    Raises:
        ValueError: a setting out of range, no such checkpoint, an output that is there already, a model that
            transformers cannot express, or one whose logits are not those of what was written.
    """
    check_choice("dtype", config.dtype, tuple(DTYPES))
    if config.file_bytes < 1:
        raise ValueError(f"file_bytes is {config.file_bytes}; it must be at least 1.")
    output = Path(config.output)
    if output.exists():
        raise ValueError(f"output is {config.output}, which is there already. Move it away, or give another path.")
    step, c, weights, metadata = read_model(config.run, config.step, config.weights)
    settings, allow = metadata["config"], None if config.other_source else "other_source=true"
    if saved := metadata.get("provenance"):
        now = provenance_of(train.programs, config_of(metadata["config"]), load_model(c))
        if differs := compare_source(saved, now, ("evaluation",), allow):
            say(f"source     {differs}")
    if inputs := inputs_of(load_model(c)):
        raise ValueError(
            f"model.module {c.module!r} reads {', '.join(inputs)} beside the tokens; no model in transformers does: "
            "this model cannot be exported."
        )
    content, tensors = mapping_of(c.module).to_huggingface(weights, c)
    check_rules(c, content.get("model_type"))
    if content.get("max_position_embeddings", 0) is None:
        content["max_position_embeddings"] = settings["training"].get("seq_len")

    files, end, notes = {}, None, []
    try:
        definition, end_token = find_tokenizer(settings["data"], config.dataset)
        files, end, notes = tokenizer_files(definition, c.bos_id, end_token)
        about = "tokenizer.json" + "".join(f"; {note}" for note in notes)
    except (ValueError, OSError) as error:
        about = f"none: {error}"

    torch_dtype, dtype = DTYPES[config.dtype]
    ids = {"bos_token_id": c.bos_id, "eos_token_id": end}
    # Stated even if null: transformers would take the ids of Llama's own tokenizer.
    files["config.json"] = content | ids | {"dtype": torch_dtype, "torch_dtype": torch_dtype}
    files["generation_config.json"] = ids
    temporary = output.with_name(output.name + ".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)  # what a killed export left
    temporary.mkdir(parents=True)
    try:
        for name, file in files.items():
            _write_json(temporary / name, file)
        total = write_tensors(temporary, tensors, dtype, config.file_bytes)
        compared = compare(c, weights, json.loads((temporary / "config.json").read_text()), temporary, dtype)
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
    say(f"model      {content['architectures'][0]}: {parameters:,} parameters after {step} steps")
    say(f"weights    {total:,} bytes, {config.dtype}")
    say(f"compared   {compared}")
    say(f"tokenizer  {about}")
    say(f'written    {output}: open it with transformers.AutoModelForCausalLM.from_pretrained("{output}")')


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # other devices would be started, and their memory taken, for nothing
    run_program("checkpoint_to_huggingface", Config, run)


if __name__ == "__main__":
    main()
