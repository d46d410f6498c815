"""Writes a checkpoint as a model of `transformers`: config.json, safetensors, tokenizer.

    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported
    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported step=500 dtype=bf16

    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")

A model of train.py becomes a Llama; with QK-norm, a Qwen3. The module of another model (model.module) is
converted by its own `to_huggingface`, which docs/huggingface.md describes. A weight or a setting that the format cannot
hold, or attention that is not plain causal, is refused by name. Then the logits of a text are computed twice, by
transformers from the files and as the run does. If they differ, the error names the layer. The output is complete or
missing. Runs on the CPU, in memory for three times the model.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from omegaconf import MISSING

import train
from shardwright.modeling.model import inputs_of, load_model
from shardwright.modeling.weights import shapes_of
from shardwright.run.checkpoint import find_checkpoint
from shardwright.run.opening import CheckpointChoice
from shardwright.run.provenance import compare_source, provenance_of
from shardwright.run.resuming import config_of, saved_config
from shardwright.settings.program import run_program
from shardwright_data.checks import check_choice, check_ranges
from shardwright_data.foreign import shown
from shardwright_data.text.huggingface import find_tokenizer, tokenizer_files
from tools.huggingface.check import check_rules, compare_logits, mapping_of

DTYPES = {"f32": ("float32", np.dtype(np.float32)), "bf16": ("bfloat16", np.dtype(jnp.bfloat16))}
"""Names in torch, and numpy dtypes."""


@dataclass
class Settings(CheckpointChoice):
    """Settings of the program."""

    output: str = MISSING
    """The directory to write; it must not exist yet."""
    check: bool = True
    """Compares the logits with those of transformers, which must be installed, with torch."""
    dtype: str = "f32"
    """Dtype of the weights: f32, as trained, or bf16, rounded to nearest."""
    dataset: str | None = None
    """A flat-tokens dataset whose tokenizer is written. Null: the run's."""


def read_model(choice: CheckpointChoice) -> tuple[int, Any, Any, dict]:
    """Reads a checkpoint: its step, configuration, weights as NumPy arrays, and metadata.

    Raises:
        ValueError: there is no such checkpoint, or its weights are not those of its model.
    """
    checkpoints, found = find_checkpoint(choice.run, choice.step)
    with checkpoints:
        metadata = checkpoints.metadata(found)
        c = config_of(saved_config(metadata), choice.trust)
        which, on_host = choice.which(c), SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        like = jax.tree.map(lambda x: x.update(sharding=on_host), shapes_of(load_model(c.model).table))
        weights = checkpoints.restore(found, {which: like})[which]
    return found, c, jax.tree.map(np.asarray, weights), metadata


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> None:
    """Writes a file of safetensors."""
    from safetensors.numpy import save_file

    rounded = {name: np.ascontiguousarray(tensor).astype(dtype, copy=False) for name, tensor in tensors.items()}
    save_file(rounded, path, metadata={"format": "pt"})
    os.umask(umask := os.umask(0))
    path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def run(config: Settings, log: Callable[[str], None] = print) -> None:
    """Writes the model into config.output.

    Raises:
        ValueError: a setting out of range, no such checkpoint, an output that exists, a model that transformers cannot
            express, or one whose logits differ from those of the files.
    """
    check_ranges("", config)
    check_choice("dtype", config.dtype, tuple(DTYPES))
    output = Path(config.output)
    if output.exists():
        raise ValueError(f"output is {config.output}, which exists already. Move it away, or give another path.")
    step, c, weights, metadata = read_model(config)
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
    facts = {"step": step, "weights": config.which(c), "programs": (saved or {}).get("programs")}
    # Written even if null: transformers would take the ids of Llama's own tokenizer.
    files["config.json"] = content | ids | {"dtype": torch_dtype, "torch_dtype": torch_dtype, "shardwright": facts}
    files["generation_config.json"] = ids
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # a killed export left it
    temporary.mkdir(parents=True)
    try:
        for name, file in files.items():
            _write_json(temporary / name, file)
        write_tensors(temporary / "model.safetensors", tensors, dtype)
        compared = compare_logits(c.model, weights, temporary, dtype) if config.check else "nothing: check=false"
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
    log(f"model      {content['architectures'][0]}: {parameters:,} parameters in {config.dtype}, after {step} steps")
    log(f"compared   {compared}")
    log(shown(f"tokenizer  {about}"))
    log(f'written    {output}: open it with transformers.AutoModelForCausalLM.from_pretrained("{output}")')


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # other devices would be started, and their memory taken, for nothing
    run_program("checkpoint_to_huggingface", Settings, run)
