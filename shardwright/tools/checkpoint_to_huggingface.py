"""Writes a checkpoint as a model of `transformers`: config.json, safetensors, tokenizer, how to
generate.

    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported
    python -m tools.checkpoint_to_huggingface run=runs/<name> output=exported step=500

    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")

A model of train.py becomes a Llama; with QK-norm, a Qwen3. family.py and moe.py become what
docs/huggingface.md lists. The module of another model (model.module) is converted by its own
`to_huggingface` (docs/huggingface.md). A model with a method `merged(weights)`, such as LoRA, is
exported with what it gives. A weight or a setting that the format cannot hold, or attention that is
not plain causal, is refused by name. The logits of a text are computed twice, by transformers from
files in f32 and as the run does. If they differ, nothing is written. Then the weights are rounded
to `dtype`. If the run began with an imported model, its chat template, EOS ids, special tokens and
generation_config.json are written again if the vocabulary is the same. The output is complete or
missing. Runs on the CPU, in memory for three times the model.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from omegaconf import MISSING

from shardwright.data.checks import a_path, check_choice
from shardwright.data.text.definitions import PAD, differences, load_definition
from shardwright.data.text.tokenizers import Tokenizer, tokenizer_of_run
from shardwright.data.untrusted import shown
from shardwright.huggingface import sidecars
from shardwright.huggingface.check import (
    check_rules,
    compare_logits,
    mapping_of,
    one_device,
)
from shardwright.huggingface.sidecars import with_end
from shardwright.modeling.model import inputs_of, load_model
from shardwright.program.resume import CARRIED, CheckpointChoice, SavedRun, open_run
from shardwright.program.step import trace_step
from shardwright.settings.program import run_program

DTYPES: dict[str, Any] = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
"""The dtype of an export's files, for each value of `dtype`."""


@dataclass
class Settings(CheckpointChoice):
    """Settings of the program."""

    output: str = a_path(MISSING)
    """The directory to write; it must not exist yet."""
    dtype: str | None = None
    """Of the files: f32, bf16 or f16. Null: f32 for a run that computes in f32; else that of the
    imported model that the run began with, or bf16."""
    check: bool = True
    """Compares the logits with those of transformers, which must be installed, with torch."""


def tokenizer_files(tokenizer: Tokenizer, bos_id: int) -> tuple[dict[str, dict], list[str]]:
    """Files that make AutoTokenizer give what a run of this project reads: bos_id, then the text's
    ids.

    Returns:
        The content of the files, by name, and sentences about what a user may not expect.

    Raises:
        ValueError: no tokenizer is known.
    """
    if tokenizer.definition is None:
        raise ValueError("the run's data names none")
    content = json.loads(tokenizer.definition)
    special = {
        token["content"]: token["id"]
        for token in content.get("added_tokens", [])
        if token["special"]
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    notes = []
    processor = None
    bos = load_definition(tokenizer.definition).id_to_token(bos_id)
    if bos is None:
        notes.append(
            f"it has no token of id {bos_id} (model.bos_id): put that id before the text's yourself"
        )
    else:
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
        single = [{"SpecialToken": {"id": bos, "type_id": 0}}, first]
        processor = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, second],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }
    # Named as such, a token of text would be found in any text and left out where special tokens
    # are skipped.
    for name, token in (("bos_token", bos), ("eos_token", tokenizer.end_token)):
        if token in special:
            settings[name] = token
        elif token is not None:
            notes.append(f"its {name} {token!r} is a token of text too")
    # Padding is masked: where the vocabulary has no token for it, one that no text becomes does as
    # well.
    pads = [token for token in (PAD, tokenizer.end_token, bos, *special) if token in special]
    settings |= {"pad_token": pads[0]} if pads else {}
    content |= {"post_processor": processor, "truncation": None, "padding": None}
    return {"tokenizer.json": content, "tokenizer_config.json": settings}, notes


def rounded(tensors: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Rounds tensors to a key of DTYPES.

    Raises ValueError for a value that is not finite, or too large for it.
    """
    with np.errstate(over="ignore"):
        found = {name: x.astype(DTYPES[dtype]) for name, x in tensors.items()}
    for name, x in found.items():
        if not np.isfinite(tensors[name]).all():
            raise ValueError(
                f"{name} has values that are not finite: these weights are useless. Export other "
                "ones."
            )
        if not np.isfinite(x).all():
            raise ValueError(
                f"{name} has values that are too large for {dtype}. Export with dtype=bf16."
            )
    return found


def write_files(directory: Path, files: dict[str, dict], tensors: dict[str, np.ndarray]) -> None:
    """Writes JSON files and a file of safetensors."""
    from safetensors.numpy import save_file

    for name, content in files.items():
        (directory / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    path = directory / "model.safetensors"
    save_file(
        {name: np.ascontiguousarray(x) for name, x in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
    os.umask(umask := os.umask(0))
    path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read


def describe(
    saved: SavedRun, found: dict[str, Any] | None, named: str | None
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Makes the files that describe an export: its tokenizer, and what config.json and
    generation_config.json add.

    Args:
        saved: the checkpoint.
        found: what its metadata has of an imported model; None if there is nothing.
        named: setting `tokenizer`.

    Returns:
        The content of the files, by name, and lines to print.
    """
    c = saved.config
    files: dict[str, dict[str, Any]] = {}
    try:
        tokenizer = tokenizer_of_run(c.data, named, saved.tokenizer_file)
        files, notes = tokenizer_files(tokenizer, c.model.bos_id)
        lines = [f"tokenizer  {'; '.join(('tokenizer.json', *notes))}"]
    except (ValueError, OSError) as error:
        tokenizer = None
        lines = [f"tokenizer  none: {error}"]
    found = found or sidecars.NOTHING
    kept = sidecars.kept(found, tokenizer)
    end = tokenizer.end if tokenizer else None
    for name in ("config", "generation_config"):
        # Written even if null: transformers would take the ids of Llama's own tokenizer.
        ids = {
            "bos_token_id": c.model.bos_id,
            "eos_token_id": with_end(kept[name].get("eos_token_id"), end),
        }
        files[f"{name}.json"] = kept[name] | ids
    if tokenizer:
        files["tokenizer_config.json"] |= sidecars.tokenizer_settings(kept)
    if CARRIED in saved.metadata:
        names = sidecars.described(kept)
        lines.append(f"kept       of the import: {', '.join(names)}")
        if left := [name for name in sidecars.described(found) if name not in names]:
            why = (
                "the tokenizer has another vocabulary"
                if tokenizer
                else "the export has no tokenizer"
            )
            lines.append(f"left out   {', '.join(left)}: {why}")
    return files, lines


def run(config: Settings, log: Callable[[str], None] = print) -> None:
    """Writes the model into config.output.

    Raises:
        ValueError: a setting out of range, no such checkpoint, an output that exists, a model that
            transformers cannot express, or one whose logits differ from those of the files.
    """
    output = Path(config.output)
    if output.exists():
        raise ValueError(
            f"output is {config.output}, which exists already. Move it away, or give another path."
        )
    with one_device(), open_run(config.run, config.step, config.trust) as saved:
        c = saved.config
        step = saved.step
        model = load_model(saved.config.model)
        if inputs := inputs_of(model):
            raise ValueError(
                f"the model reads {', '.join(inputs)} beside the tokens; no model in transformers "
                "does."
            )
        weights = saved.read_weights(trace_step(c, model), config.other_source, log, config.average)
    weights = jax.tree.map(np.asarray, weights)
    merge = getattr(model, "merged", None)
    merged = jax.tree.map(np.asarray, merge(weights)) if merge else weights
    content, tensors = mapping_of(c.model.module).to_huggingface(merged, c.model)
    del merged
    check_rules(c.model, content)
    if content.get("max_position_embeddings", 0) is None:
        content["max_position_embeddings"] = c.training.seq_len
    found = saved.metadata.get(CARRIED)
    sidecars.check(
        found or sidecars.NOTHING, f"what {config.run} kept of the files of an imported model"
    )
    dtype = config.dtype or c.training.compute_dtype
    if found and config.dtype is None and (step == 0 or dtype != "f32"):
        # at step 0 the weights are those imported
        dtype = found["dtype"]
    check_choice("dtype", dtype, [*DTYPES])
    files, lines = describe(saved, found, config.tokenizer)
    facts = {"step": step, "programs": saved.metadata.get("provenance", {}).get("programs")}
    named = dict.fromkeys(("dtype", "torch_dtype"), DTYPES[dtype].__name__)
    files["config.json"] = content | files["config.json"] | named | {"shardwright": facts}
    narrow = rounded(tensors, dtype)
    parameters = sum(tensor.size for tensor in tensors.values())
    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # a killed export left it
    temporary.mkdir(parents=True)
    try:
        compared = "nothing: check=false"
        if config.check:
            # before rounding: weights that are merged cannot be rounded as what they become
            write_files(temporary, files, tensors)
            compared = compare_logits(c.model, weights, temporary)
        write_files(temporary, files, narrow)
        if config.check and "tokenizer.json" in files:
            lines += differences(temporary)
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    log(f"model      {content['architectures'][0]}: {parameters:,} parameters, after {step} steps")
    log(f"compared   {compared}")
    for line in lines:
        log(shown(line))
    log(
        f"written    {output}, in "
        f"{dtype}{'' if dtype == 'f32' else '; dtype=f32 would round no weight'}"
    )
    log(f'           open it with transformers.AutoModelForCausalLM.from_pretrained("{output}")')


if __name__ == "__main__":
    # other devices would be started, and their memory taken, for nothing
    jax.config.update("jax_platforms", "cpu")
    run_program("checkpoint_to_huggingface", Settings, run)
