"""Writes a checkpoint as a model of `transformers`: config.json, safetensors, tokenizer.

    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported
    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported step=500

    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")

A model of train.py becomes a Llama; with QK-norm, a Qwen3. family.py and moe.py become what docs/huggingface.md lists.
The module of another model (model.module) is converted by its own `to_huggingface` (docs/huggingface.md). A model with
a method `merged(weights)`, such as LoRA, is exported with what it gives. A weight or a setting that the format cannot
hold, or attention that is not plain causal, is refused by name. Then the logits of a text are computed twice, by
transformers from the files and as the run does. If they differ, nothing is written. The output is complete or missing.
Runs on the CPU, in memory for three times the model.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from omegaconf import MISSING

from shardwright.data.text.definitions import PAD, load_definition
from shardwright.data.text.tokenizers import Tokenizer, tokenizer_of_run
from shardwright.data.untrusted import shown
from shardwright.modeling.model import inputs_of, load_model
from shardwright.run.opening import CheckpointChoice, open_run
from shardwright.settings.program import run_program
from shardwright.tools.huggingface.check import check_rules, compare_logits, mapping_of, one_device


@dataclass
class Settings(CheckpointChoice):
    """Settings of the program."""

    output: str = MISSING
    """The directory to write; it must not exist yet."""
    check: bool = True
    """Compares the logits with those of transformers, which must be installed, with torch."""


def tokenizer_files(tokenizer: Tokenizer, bos_id: int) -> tuple[dict[str, dict], list[str]]:
    """Files that make AutoTokenizer give what a run of this project reads: bos_id, then the text's ids.

    Returns:
        The content of the files, by name, and sentences about what a user may not expect.

    Raises:
        ValueError: no tokenizer is known.
    """
    if tokenizer.definition is None:
        raise ValueError("the run's data names none")
    content = json.loads(tokenizer.definition)
    special = {token["content"]: token["id"] for token in content.get("added_tokens", []) if token["special"]}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    notes = []
    processor = None
    bos = load_definition(tokenizer.definition).id_to_token(bos_id)
    if bos is None:
        notes.append(f"it has no token of id {bos_id} (model.bos_id): put that id before the text's yourself")
    else:
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
        single = [{"SpecialToken": {"id": bos, "type_id": 0}}, first]
        processor = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, second],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }
    # Named as such, a token of text would be found in any text and left out where special tokens are skipped.
    for name, token in (("bos_token", bos), ("eos_token", tokenizer.end_token)):
        if token in special:
            settings[name] = token
        elif token is not None:
            notes.append(f"its {name} {token!r} is a token of text too")
    # Padding is masked: where the vocabulary has no token for it, one that no text becomes does as well.
    pads = [token for token in (PAD, tokenizer.end_token, bos, *special) if token in special]
    settings |= {"pad_token": pads[0]} if pads else {}
    content |= {"post_processor": processor, "truncation": None, "padding": None}
    return {"tokenizer.json": content, "tokenizer_config.json": settings}, notes


def write_files(directory: Path, files: dict[str, dict], tensors: dict[str, np.ndarray]) -> None:
    """Writes JSON files and a file of safetensors."""
    from safetensors.numpy import save_file

    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    path = directory / "model.safetensors"
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, path, metadata={"format": "pt"})
    os.umask(umask := os.umask(0))
    path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read


def run(config: Settings, log: Callable[[str], None] = print) -> None:
    """Writes the model into config.output.

    Raises:
        ValueError: a setting out of range, no such checkpoint, an output that exists, a model that transformers cannot
            express, or one whose logits differ from those of the files.
    """
    output = Path(config.output)
    if output.exists():
        raise ValueError(f"output is {config.output}, which exists already. Move it away, or give another path.")
    with one_device(), open_run(config.run, config.step, config.trust) as saved:
        c = saved.config
        step = saved.step
        model = load_model(saved.config.model)
        if inputs := inputs_of(model):
            raise ValueError(f"the model reads {', '.join(inputs)} beside the tokens; no model in transformers does.")
        weights = saved.read_weights(model, config.other_source, log, config.average)
    weights = jax.tree.map(np.asarray, weights)
    merged = jax.tree.map(np.asarray, getattr(model, "merged", lambda weights: weights)(weights))
    content, tensors = mapping_of(c.model.module).to_huggingface(merged, c.model)
    check_rules(c.model, content)
    if content.get("max_position_embeddings", 0) is None:
        content["max_position_embeddings"] = c.training.seq_len

    files = {}
    end = None
    try:
        tokenizer = tokenizer_of_run(c.data, config.tokenizer)
        files, notes = tokenizer_files(tokenizer, c.model.bos_id)
        end = tokenizer.end
        about = "; ".join(("tokenizer.json", *notes))
    except (ValueError, OSError) as error:
        about = f"none: {error}"
    ids = {"bos_token_id": c.model.bos_id, "eos_token_id": end}
    programs = saved.metadata.get("provenance", {}).get("programs")
    facts = {"step": step, "programs": programs}
    # Written even if null: transformers would take the ids of Llama's own tokenizer.
    files["config.json"] = content | ids | {"dtype": "float32", "torch_dtype": "float32", "shardwright": facts}
    files["generation_config.json"] = ids
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # a killed export left it
    temporary.mkdir(parents=True)
    try:
        write_files(temporary, files, tensors)
        compared = compare_logits(c.model, weights, temporary) if config.check else "nothing: check=false"
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    parameters = sum(tensor.size for tensor in tensors.values())
    log(f"model      {content['architectures'][0]}: {parameters:,} parameters, after {step} steps")
    log(f"compared   {compared}")
    log(shown(f"tokenizer  {about}"))
    log(f'written    {output}: open it with transformers.AutoModelForCausalLM.from_pretrained("{output}")')


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # other devices would be started, and their memory taken, for nothing
    run_program("checkpoint_to_huggingface", Settings, run)
