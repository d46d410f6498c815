"""Writes a checkpoint as a model of `transformers`: config.json, safetensors, tokenizer, model card.

    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported
    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported step=500 dtype=bf16
    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported push_to_hub=<owner>/<name>
    python -m tools.checkpoint_to_huggingface output=exported push_to_hub=<owner>/<name>

    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")

A model of train.py becomes a Llama; with QK-norm, a Qwen3. The module of another model (model.module) is
converted by its own `to_huggingface`, which docs/huggingface.md describes. A weight that the format cannot hold, or
attention that is not plain causal, is refused by name. Then the logits of a text are computed twice, by transformers
from the files and as the run does. If they differ, the error names the layer. The output is complete or missing. Only a
complete one is sent to the hub, by the last command one that an earlier call wrote. Runs on the CPU, in memory for
three times the model, or with check=false for two files of `file_bytes`.
"""

import json
import math
import os
import re
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
from shardwright.modeling.model import inputs_of, load_model, module_of
from shardwright.run.checkpoint_arrays import named_leaves
from shardwright.run.config import WEIGHTS, check_weights
from shardwright.run.host_checkpoint import StoredArray, open_checkpoint
from shardwright.run.provenance import compare_source, provenance_of
from shardwright.run.resuming import config_of, with_defaults
from shardwright.run.saved import check_modules, literal, saved_config
from shardwright.settings.program import run_program
from shardwright_data.checks import check_choice, check_ranges, within
from shardwright_data.foreign import shown
from shardwright_data.text.huggingface import find_tokenizer, tokenizer_files
from tools.checkpoint_to_huggingface.card import CARD, write_card
from tools.checkpoint_to_huggingface.hub import check_repository, push
from tools.huggingface.check import check_rules, compare
from tools.huggingface.mapping import mapping_of

DTYPES = {"f32": ("float32", np.dtype(np.float32)), "bf16": ("bfloat16", np.dtype(jnp.bfloat16))}
"""Names in torch, and numpy dtypes."""


@dataclass
class Config:
    """Settings of the program."""

    run: str | None = None
    """Directory or URL of a run, or of one of its checkpoints. Null: `output` exists, and push_to_hub sends it."""
    output: str = MISSING
    """The directory to write; with a run it must not exist yet."""
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
    push_to_hub: str | None = None
    """Repository that the finished export is sent to, <owner>/<name>. Null: none. The token is that of `hf auth login`,
    or HF_TOKEN in the environment; HF_ENDPOINT is the address of another server."""
    private: bool = True
    """Makes the repository private. True also refuses one that exists and is public."""


def read_model(run: str, step: int | None, which: str = "weights", trust: bool = False) -> tuple[int, Any, Any, dict]:
    """Opens a checkpoint: its step, ModelConfig, `weights` or `ema` (read when they are indexed), and metadata.

    Raises:
        ValueError: there is no such checkpoint, or its weights are not those of its model.
    """
    found, arrays, metadata = open_checkpoint(run, step)
    config = saved_config(metadata)
    check_modules(config, trust)
    config = with_defaults(config, config.get("model", {}).get("module"))
    check_weights("weights", which, config["training"]["ema_decay"])
    kind = module_of(config["model"]["module"]).ModelConfig
    c = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), literal(config["model"])))
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
    """Writes safetensors, in several files with an index if one is too small. Returns the bytes of all weights."""
    from safetensors.numpy import save_file

    parts: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}
    total = 0
    os.umask(umask := os.umask(0))

    def flush() -> None:
        parts.append(list(waiting))
        path = directory / f"{len(parts)}.part"
        save_file(waiting, path, metadata={"format": "pt"})
        path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read
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


def export(config: Config, log: Callable[[str], None]) -> None:
    """Writes the model into config.output.

    Raises:
        ValueError: a setting out of range, no such checkpoint, an output that exists, a model that transformers cannot
            express, or one whose logits differ from those of the files.
    """
    check_choice("dtype", config.dtype, tuple(DTYPES))
    check_choice("weights", config.weights, WEIGHTS)
    if config.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,60}", config.license):
        raise ValueError(f"license is {config.license!r}; give its name on the hub, such as apache-2.0 or other.")
    output = Path(config.output)
    if output.exists():
        raise ValueError(f"output is {config.output}, which exists already. Move it away, or give another path.")
    step, c, weights, metadata = read_model(config.run, config.step, config.weights, config.trust)
    settings, allow = metadata["config"], None if config.other_source else "other_source=true"
    if saved := metadata.get("provenance"):
        now = provenance_of(train.programs, config_of(metadata["config"], config.trust), load_model(c))
        if differs := compare_source(saved, now, ("evaluation",), allow):
            log(f"source     {differs}")
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
    # Written even if null: transformers would take the ids of Llama's own tokenizer.
    files["config.json"] = content | ids | {"dtype": torch_dtype, "torch_dtype": torch_dtype}
    files["generation_config.json"] = ids
    temporary = output.with_name(output.name + ".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)  # a killed export left it
    temporary.mkdir(parents=True)
    try:
        for name, file in files.items():
            _write_json(temporary / name, file)
        total = write_tensors(temporary, tensors, dtype, config.file_bytes)
        compared = compare(c, weights, temporary, dtype) if config.check else "nothing: check=false"
        parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
        facts = {
            "architecture": content["architectures"][0],
            "parameters": parameters,
            "weights": f"{config.dtype}, {config.weights}, after {step} steps",
            "logits compared": compared,
            "hashes of the programs": (saved or {}).get("programs", "not known"),
        }
        title = (config.push_to_hub or output.absolute().name).rpartition("/")[2]
        has_tokenizer = "tokenizer.json" in files
        write_card(temporary, title, config.push_to_hub, config.license, facts, settings, has_tokenizer)
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    log(f"model      {content['architectures'][0]}: {parameters:,} parameters after {step} steps")
    log(f"weights    {total:,} bytes, {config.dtype}")
    log(f"compared   {compared}")
    log(shown(f"tokenizer  {about}"))
    log(f"card       {output / CARD}")
    log(f'written    {output}: open it with transformers.AutoModelForCausalLM.from_pretrained("{output}")')


def run(config: Config, log: Callable[[str], None] = print) -> None:
    """Writes the model, and sends it to the hub.

    Raises:
        ValueError: as `export` and `push`, or a setting that the other settings need is missing.
    """
    check_ranges("", config)
    if config.push_to_hub is not None:
        check_repository(config.push_to_hub)
    if config.run is not None:
        export(config, log)
    elif config.push_to_hub is None:
        raise ValueError("run is missing; give run=<directory of a run>, or push_to_hub=… for an export that exists.")
    elif not Path(config.output).is_dir():
        raise ValueError(f"output is {config.output}, which is no directory. Give run=<directory of a run> to make it.")
    if config.push_to_hub is not None:
        push(Path(config.output), config.push_to_hub, config.private, log)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # other devices would be started, and their memory taken, for nothing
    run_program("checkpoint_to_huggingface", Config, run)
