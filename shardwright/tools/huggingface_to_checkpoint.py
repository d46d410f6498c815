"""Writes a model of `transformers` as a checkpoint, from which a run can continue training.

    python -m tools.huggingface_to_checkpoint model=<directory, or name on the hub>
    output=runs/<name>

Llama, models with its math (TinyLlama, SmolLM, Mistral without a sliding window …) and Qwen3 become
models of train.py; Qwen2, Mistral 0.1, OLMo 2, SmolLM 3, Gemma 2, Gemma 3 and Phi of family.py;
Mixtral, Qwen3-MoE, OLMoE, GLM-4-MoE and gpt-oss of moe.py; DeepSeek-V3 of mla.py; Qwen3-Next of
delta.py. Another model_type is converted by `from_huggingface` of the module of that name, or of
the one that `module` names; docs/huggingface.md describes that function. Settings that change the
math and are not supported are refused by name. Then the logits of a text are computed twice, by
transformers from the model's files and as a run does. If they differ, there is no checkpoint. Runs
on the CPU, in memory for three times the model. It writes into `output`

    checkpoints/0000000000/    the weights, in f32; complete or missing
    model/imported.yaml        the model section, as a config group
    tokenizer.json             if the model has one, with all added tokens, to make datasets with

so that training.init_from=<output> with --config-dir=<output> model=imported starts from it. The
checkpoint also has the chat template, how to generate, the EOS ids, the special tokens and the
dtype, which exports of such runs write.
"""

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from omegaconf import MISSING, OmegaConf

from shardwright.data.checks import a_path, within
from shardwright.data.text import definitions
from shardwright.data.untrusted import first_line, read_object, refused, shown
from shardwright.huggingface import Tensors, as_transformers_reads, sidecars
from shardwright.huggingface.check import check_rules, compare_logits, mapping_of, module_for
from shardwright.modeling.model import is_shipped
from shardwright.program.checkpoint import Checkpointer
from shardwright.program.resume import CARRIED
from shardwright.settings.output import override, say
from shardwright.settings.program import run_program

FILES = ["*config.json", *definitions.FILES, "*.jinja", "model*.safetensors"]
"""Files to download of a model on the hub; some models have their weights again, in other
formats."""

KINDS = {"model_type?": str, "bos_token_id?": int | None, "num_nextn_predict_layers?": int | None}
KINDS |= {"quantization_config?": dict | None}
"""Types of what this program reads of config.json itself."""
DEQUANTIZE = (
    "Dequantize it first, in transformers: from_pretrained(…).dequantize().save_pretrained(…)."
)


@dataclass
class Settings:
    """Settings of the program."""

    model: str = a_path(MISSING)
    """A directory with config.json and safetensors, or a name on the Hugging Face hub."""
    output: str = a_path(MISSING)
    """The directory to write, runs/<name> for example; it must not have checkpoints yet."""
    module: str | None = None
    """Value of model.module. Null: train, moe or family for the types that they have, else the
    module named like the model_type."""
    bos_id: int | None = within(0, 2**31, None)
    """The id before the first token of each document. Null: the config's bos_token_id."""
    further: bool = False
    """Imports DeepSeek-V3's module that predicts the token after the next (MTP), which training
    then continues. False: it is left out."""
    check: bool = True
    """Compares the logits with those of transformers, which must be installed, with torch."""


def find_model(name: str) -> Path:
    """The directory of a model: `name` itself, or, for a name on the hub, a download.

    Raises:
        ValueError: there is no such model, or it has no config.json.
    """
    directory = Path(name)
    if not directory.is_dir():
        remedy = (
            "Check the name, the connection, and that you are logged in if access is restricted."
        )
        with refused(
            f"model is {name!r}, which is not a directory, and cannot be downloaded from the hub",
            remedy,
        ):
            import huggingface_hub

            directory = Path(huggingface_hub.snapshot_download(name, allow_patterns=FILES))
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} has no config.json: it is not a model of transformers. Correct "
            f"model={name}."
        )
    return directory


def find_tokenizer(directory: Path, log: Callable[[str], None]) -> Any:
    """Opens the tokenizer of a model with transformers.

    Logs a line and returns None if there is none.
    """
    try:
        return definitions.open_directory(directory)
    except (ImportError, ValueError) as error:
        if (directory / "tokenizer.json").exists():
            raise
        log(shown(f"tokenizer  none: {first_line(error)}, and import again;"))
        log(
            "           or give tokenizer=<name or directory> to tools and exports, which then "
            "lack the chat template"
        )
        return None


def next_commands(output: Path) -> list[str]:
    """Writes what to do with an import."""
    sample = f"To sample:\n  python -m tools.generate {override('run', str(output))} prompt=<text>"
    return [
        *[sample] * (output / "tokenizer.json").is_file(),
        "To continue training, with the settings of a run in configs/:\n"
        f"  python -m train --config-name=<run> {shlex.quote(f'--config-dir={output}')} "
        f"model=imported {override('training.init_from', str(output))} "
        "data.filespec=data/<name>.zarr",
    ]


def left_out(name: str, content: dict, tensors: Tensors) -> list[str]:
    """Writes which weights the model `name` has no place for."""
    left = getattr(mapping_of(name), "left_out", lambda *_: [])(content, tensors)
    what = f"{len(left)} tensors, such as {left[0]}, predict further tokens (MTP)" if left else ""
    return [shown(f"left out   {what}; further=true imports DeepSeek's")] * bool(left)


def run(config: Settings, log: Callable[[str], None] = say) -> None:
    """Writes the checkpoint.

    Raises:
        ValueError: a setting out of range, no such model, math that the module does not have, or
            other logits.
        OSError: the checkpoint could not be written.
    """
    directory, output = find_model(config.model), Path(config.output)
    if Checkpointer(output / "checkpoints").steps():
        raise ValueError(
            f"output is {config.output}, which has checkpoints already. Give another directory."
        )
    content = read_object(directory / "config.json", KINDS)
    bos = content.get("bos_token_id") if config.bos_id is None else config.bos_id
    if bos is None:
        raise ValueError(
            "config.json: bos_token_id is None; give bos_id=<the id that begins each document>."
        )
    kind = content.get("model_type")
    content = as_transformers_reads(content | {"bos_token_id": bos})
    name = config.module or module_for(content)
    if not config.module and name != "train" and not is_shipped(name):
        raise ValueError(
            f"config.json: model_type is {kind!r}, and shardwright has no model of that name; give "
            "module=<its module>."
        )
    quantization = content.get("quantization_config") or {}
    tensors = Tensors(directory, quantization.get("weight_block_size") or (128, 128))
    tokenizer = find_tokenizer(directory, log)
    found = sidecars.read(directory, tensors.dtype, tokenizer)
    try:
        given = content | {"further": config.further}
        c, weights = mapping_of(name).from_huggingface(given, tensors)
    except ValueError as error:
        if tensors.quantized is None:
            raise
        method = quantization.get("quant_method", "unknown")
        raise ValueError(
            f"the model is quantized (method {method}; {tensors.quantized}). {DEQUANTIZE}"
        ) from error
    for line in [] if config.further else left_out(name, content, tensors):
        log(line)
    c.module = name
    if not 0 <= c.bos_id < c.vocab:
        raise ValueError(
            f"bos_id is {c.bos_id}; it must be an id of the vocabulary, at least 0 and below "
            f"{c.vocab}."
        )
    check_rules(c, content)
    compared = "nothing: check=false"
    if config.check:
        compared = compare_logits(
            c, weights, directory, tensors if quantization or tensors.scales else None
        )
    log(f"compared   {compared}")
    model = dataclasses.asdict(c)
    length = content.get("max_position_embeddings") or content.get("n_positions") or 2048
    # The other sections of a run's configuration, for programs that read them.
    optimizer = {"learning_rate": 0.0, "warmup_steps": 0, "schedule": "constant"}
    training = {"batch_size": 1, "seq_len": length, "steps": 1}
    metadata = {
        "config": {"model": model, "optimizer": optimizer, "training": training},
        "loader": {},
    }
    metadata[CARRIED] = found
    (output / "model").mkdir(parents=True, exist_ok=True)
    header = f"# {config.model}, as shardwright/tools/huggingface_to_checkpoint read it.\n"
    (output / "model" / "imported.yaml").write_text(
        header + OmegaConf.to_yaml(OmegaConf.create(model))
    )
    if tokenizer is not None:
        (output / "tokenizer.json").write_text(
            definitions.find_huggingface(str(directory)), encoding="utf-8"
        )
    # Last, because an output that has a checkpoint is refused: a full disk before must not stop the
    # next try.
    with Checkpointer(output / "checkpoints") as checkpoints:
        state = {"weights": jax.device_put(weights, jax.local_devices(backend="cpu")[0])}
        checkpoints.save(0, state, metadata)
    parameters = sum(array.size for array in jax.tree.leaves(weights))
    of_fp8 = f", {len(tensors.scales)} matrices dequantized from FP8" if tensors.scales else ""
    log(f"model      {shown(kind)}: {parameters:,} parameters, as model.module={name}{of_fp8}")
    log(f"checkpoint {output}/checkpoints/0000000000")
    log(shown(f"kept       for exports: {', '.join(sidecars.described(found))}"))
    for line in next_commands(output):
        log(line)


if __name__ == "__main__":
    # other devices would be started, and their memory taken, for nothing
    jax.config.update("jax_platforms", "cpu")
    run_program("huggingface_to_checkpoint", Settings, run)
