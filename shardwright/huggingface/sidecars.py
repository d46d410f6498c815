"""What the files of a model in transformers say beside its weights: chat template, ends, padding,
how to generate.

An import keeps it in the checkpoint's metadata, runs carry it into their own checkpoints, and an
export with the same vocabulary writes it again. It comes from others, so types and sizes are
checked, and nothing in it is run.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.data.text.definitions import load_definition
from shardwright.data.text.tokenizers import Tokenizer
from shardwright.data.untrusted import COPY_AGAIN, check_types, read_object
from shardwright.program.resume import CARRIED, SavedRun

MOST = 2**20
"""Most characters of all of it, as JSON."""
TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens of any tokenizer, by the names by which a chat template may use them."""
PLAIN = ("padding_side", "model_max_length")
"""What else is kept of tokenizer_config.json."""
KINDS = {
    "dtype": str,
    "config": {"eos_token_id?": int | list | None, "pad_token_id?": int | None},
    "generation_config": dict,
    "tokenizer_config": {
        **dict.fromkeys((f"{name}?" for name in (*TOKENS, "padding_side")), str),
        "model_max_length?": int,
        "additional_special_tokens?": [str],
        "extra_special_tokens?": {str: str},
    },
    "chat_templates": {str: str},
    "vocabulary?": str,
}
"""What is kept. `vocabulary` is that of the tokenizer, by `vocabulary_of`."""
NOTHING: dict[str, Any] = {"dtype": "bf16", "config": {}, "generation_config": {}}
NOTHING |= {"tokenizer_config": {}, "chat_templates": {}}
"""What a run that began without an import kept."""
_HAS_IDS = re.compile(r"_token_id$|_ids$|suppress_tokens$|^sequence_bias$")


def read(directory: Path, dtype: str, tokenizer: Any) -> dict[str, Any]:
    """Reads the files of a model.

    Args:
        directory: contains the files.
        dtype: of the weights.
        tokenizer: as `open_directory` returns it; None if the model has none.

    Raises:
        ValueError: a file is damaged or too large, or a value has another type.
    """

    def content(name: str) -> dict[str, Any]:
        path = directory / name
        return read_object(path) if path.is_file() else {}

    config, generation = content("config.json"), content("generation_config.json")
    found = NOTHING | {
        "dtype": dtype,
        "config": {
            name: config[name] for name in ("eos_token_id", "pad_token_id") if name in config
        },
        "generation_config": generation,
    }
    if tokenizer is not None:
        named = tokenizer.special_tokens_map
        texts = {name: named.pop(name) for name in TOKENS if name in named}
        # By the names that transformers 4 reads too.
        texts["additional_special_tokens"] = [*map(str, tokenizer.extra_special_tokens)]
        texts["extra_special_tokens"] = named
        plain = {name: x for name, x in content("tokenizer_config.json").items() if name in PLAIN}
        found["tokenizer_config"] = {name: x for name, x in texts.items() if x} | plain
        templates = tokenizer.chat_template or {}
        found["chat_templates"] = (
            templates if isinstance(templates, dict) else {"default": templates}
        )
        found["vocabulary"] = vocabulary_of(tokenizer.backend_tokenizer)
    check(found, f"what {directory} says beside its weights")
    return found


def described(found: dict[str, Any]) -> list[str]:
    """Names what was found, for messages."""
    templates = [
        "chat template" if name == "default" else f"chat template {name}"
        for name in found["chat_templates"]
    ]
    generation = ["generation_config.json"] if found["generation_config"] else []
    ids = [
        name
        for file in ("config", "generation_config")
        for name in found[file]
        if _HAS_IDS.search(name)
    ]
    return [
        *templates,
        *generation,
        *dict.fromkeys(ids),
        *found["tokenizer_config"],
        found["dtype"],
    ]


def check(found: Any, where: str) -> None:
    """Raises ValueError unless `found` is as `read` returns it."""
    check_types(where, found, KINDS)
    for name, value in {**found["config"], **found["generation_config"]}.items():
        if _HAS_IDS.search(name) and value is not None and not _is_of_numbers(value):
            raise ValueError(
                f"{where}: {name} is {value!r:.80}; it must be ids of tokens. {COPY_AGAIN}"
            )
    try:
        length = len(json.dumps(found, allow_nan=False))
    except ValueError as error:
        raise ValueError(f"{where}: {error}. {COPY_AGAIN}") from error
    if length > MOST:
        raise ValueError(
            f"{where} has {length:,} characters, more than the limit of {MOST:,}. {COPY_AGAIN}"
        )


def vocabulary_of(tokenizer: Any) -> str:
    """A hash of all tokens of a tokenizers.Tokenizer and their ids."""
    tokens = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def _ids(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    for part in value if isinstance(value, list) else ():
        yield from _ids(part)


def _is_of_numbers(value: Any) -> bool:
    return (
        all(map(_is_of_numbers, value)) if isinstance(value, list) else type(value) in (int, float)
    )


# ---- export --------------------------------------------------------------------------------------


def kept(found: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What an export with this tokenizer writes again of what `read` found.

    All of it with the vocabulary of the import. With another one, neither ids nor texts of tokens;
    without a tokenizer, no texts.
    """
    definition = tokenizer and tokenizer.definition
    if definition and vocabulary_of(load_definition(definition)) == found.get("vocabulary"):
        return found
    changes: dict[str, Any] = {"tokenizer_config": {}, "chat_templates": {}}
    for file in ("config", "generation_config") if tokenizer else ():
        changes[file] = {name: x for name, x in found[file].items() if not _HAS_IDS.search(name)}
    return found | changes


def tokenizer_settings(found: dict[str, Any]) -> dict[str, Any]:
    """Settings of tokenizer_config.json, without the token of model.bos_id, which an export names
    itself.
    """
    settings = {name: x for name, x in found["tokenizer_config"].items() if name != "bos_token"}
    templates = found["chat_templates"]
    if [*templates] == ["default"]:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": x} for name, x in templates.items()]
    return settings


def with_end(ends: int | list[int] | None, end: int | None) -> int | list[int] | None:
    """Adds the id that ends the run's documents to the EOS ids of an import."""
    ids = [*_ids(ends)]
    if end is None or end in ids:
        return ends
    return [*ids, end] if ids else end


def ends_of(saved: SavedRun, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a text of a run: that of its documents, and with the vocabulary of an import its
    EOS ids.
    """
    ids = [] if tokenizer.end is None else [tokenizer.end]
    found = saved.metadata.get(CARRIED)
    if found and tokenizer.definition:
        check(found, "what the checkpoint kept of the files of an imported model")
        found = kept(found, tokenizer)
        for file in ("generation_config", "config"):
            ids += [
                i for i in _ids(found[file].get("eos_token_id")) if i < saved.config.model.vocab
            ]
    return tuple(dict.fromkeys(ids))
