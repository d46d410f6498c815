"""What the files of a model in transformers say beside its weights: chat template, ends, padding, how to generate.

An import keeps it in the checkpoint's metadata, runs carry it into their own checkpoints, and an export writes what
still means the same. It comes from others, so types and sizes are checked, and nothing in it is run.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.data.text.definitions import load_definition
from shardwright.data.text.tokenizers import Tokenizer
from shardwright.data.untrusted import COPY_AGAIN, check_types, read_object
from shardwright.run.opening import CARRIED, SavedRun

MOST = 2**20
"""Most characters of all of it, as JSON."""
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
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
    "tokens": {str: str},
}
"""What is kept. `tokens` has the text of each token whose id, name or text is in the rest, by its id."""
NOTHING: dict[str, Any] = {"dtype": "bf16"} | {name: {} for name in KINDS if name != "dtype"}
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
        "config": {name: config[name] for name in ("eos_token_id", "pad_token_id") if name in config},
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
        found["chat_templates"] = templates if isinstance(templates, dict) else {"default": templates}
        ids = [*_ids([config.get("eos_token_id"), config.get("pad_token_id")])]
        ids += [i for name, value in generation.items() if _HAS_IDS.search(name) for i in _ids(value)]
        found["tokens"] = _tokens(tokenizer, ids, "".join(map(str, found["chat_templates"].values())))
    check(found, f"what {directory} says beside its weights")
    return found


def described(found: dict[str, Any]) -> list[str]:
    """Names what was found, for messages."""
    templates = [f"chat template{f' {name}' if name != 'default' else ''}" for name in found["chat_templates"]]
    files = ["generation_config.json"] * bool(found["generation_config"])
    return [*templates, *files, *found["config"], *found["tokenizer_config"], found["dtype"]]


def check(found: Any, where: str) -> None:
    """Raises ValueError unless `found` is as `read` returns it."""
    check_types(where, found, KINDS)
    for name, value in {**found["config"], **found["generation_config"]}.items():
        if _HAS_IDS.search(name) and value is not None and not _is_of_numbers(value):
            raise ValueError(f"{where}: {name} is {value!r:.80}; it must be ids of tokens. {COPY_AGAIN}")
    try:
        length = len(json.dumps(found, allow_nan=False))
    except ValueError as error:
        raise ValueError(f"{where}: {error}. {COPY_AGAIN}") from error
    if length > MOST:
        raise ValueError(f"{where} has {length:,} characters, more than the limit of {MOST:,}. {COPY_AGAIN}")


def _tokens(tokenizer: Any, ids: list[int], templates: str) -> dict[str, str]:
    """The tokens of `ids`, the special ones, and those that chat templates write, by id."""
    backend, special = tokenizer.backend_tokenizer, {*tokenizer.all_special_tokens}
    by_id = {i: backend.id_to_token(i) for i in ids if 0 <= i < 2**31}
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    by_id |= {i: text for i, text in added.items() if text in special or text in templates}
    return {str(i): text for i, text in by_id.items() if text is not None}


def _texts(tokens: str | list[str] | dict[str, str]) -> list[str]:
    """The texts of a token, or of several."""
    return [tokens] if isinstance(tokens, str) else [*(tokens.values() if isinstance(tokens, dict) else tokens)]


def _ids(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    for part in value if isinstance(value, list) else ():
        yield from _ids(part)


def _is_of_numbers(value: Any) -> bool:
    return all(map(_is_of_numbers, value)) if isinstance(value, list) else type(value) in (int, float)


# ---- export -------------------------------------------------------------------------------------------------------


class Kept:
    """What an import kept, as far as it means the same with the tokenizer and the vocabulary of an export.

    Args:
        found: as `check` takes it.
        tokenizer: of the export; None if it has none.
        vocab: ids of the model.

    Attributes:
        names: what is kept, for messages.
        left_out: what is not, and why.
    """

    def __init__(self, found: dict[str, Any], tokenizer: Tokenizer | None, vocab: int):
        self._found, self._vocab = found, vocab
        self._tokenizer = tokenizer and load_definition(tokenizer.definition or "")
        self.names: list[str] = []
        of_tokenizer = [*found["tokenizer_config"], *["chat template"] * bool(found["chat_templates"])]
        self.left_out = [] if tokenizer else [f"{name}: the export has no tokenizer" for name in of_tokenizer]

    def _holds(self, i: int) -> bool:
        known = self._found["tokens"].get(str(i))
        return 0 <= i < self._vocab and (self._tokenizer is None or self._tokenizer.id_to_token(i) == known)

    def ids(self, file: str) -> dict[str, Any]:
        """The content of config.json or generation_config.json, without ids of other tokens."""
        content = dict(self._found[file])
        for name in [name for name in content if _HAS_IDS.search(name) and name != "bos_token_id"]:
            value = content.pop(name)
            parts = value if isinstance(value, list) else [value]
            good = [part for part in parts if all(map(self._holds, _ids(part)))]
            for part in parts:
                if part not in good:
                    was = self._found["tokens"].get(str(part))
                    self.left_out.append(f"{name} {part} of {file}.json" + (f", which was {was!r}" if was else ""))
            if good:
                content[name] = good if isinstance(value, list) else value
        if content:
            self.names.append(f"{file}.json")
        return content

    def of_tokenizer(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings of tokenizer_config.json, in addition to those given, which name the token of model.bos_id."""
        found = self._found["tokenizer_config"]
        kept = {name: x for name, x in found.items() if name in PLAIN or all(map(self._is_same, _texts(x)))}
        kept.pop("bos_token", None)
        self.left_out += [f"{name} {x!r}" for name, x in found.items() if name not in (*kept, "bos_token")]
        settings = settings | kept
        templates = {}
        for name, template in self._found["chat_templates"].items():
            which = "chat template" + (f" {name}" if name != "default" else "")
            uses = [x for x in self._found["tokens"].values() if x in template and not self._is_same(x)]
            uses += [x for x in TOKENS if x in template and settings.get(x) != found.get(x)]
            named = found.get("extra_special_tokens", {})
            uses += [x for x in named if x in template and "extra_special_tokens" not in kept]
            if uses:
                self.left_out.append(f"{which}, which has {uses[0]!r}: the tokenizer has another id or text for it")
            else:
                templates[name] = template
                self.names.append(which)
        if templates:
            several = [{"name": name, "template": template} for name, template in templates.items()]
            settings["chat_template"] = several if [*templates] != ["default"] else templates["default"]
        self.names += kept
        return settings

    def _is_same(self, text: str) -> bool:
        i = self._tokenizer and self._tokenizer.token_to_id(text)
        return i is not None and self._found["tokens"].get(str(i)) == text and self._holds(i)


def with_end(ends: int | list[int] | None, end: int | None) -> int | list[int] | None:
    """Adds the id that ends the run's documents to the EOS ids of an import."""
    ids = [*_ids(ends)]
    if end is None or end in ids:
        return ends
    return [*ids, end] if ids else end


def ends_of(saved: SavedRun, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a text of a run: that of its documents, and the EOS ids of an import that mean the same still."""
    ids = [] if tokenizer.end is None else [tokenizer.end]
    found = saved.metadata.get(CARRIED)
    if found and tokenizer.definition:
        check(found, "what the checkpoint kept of the files of an imported model")
        kept = Kept(found, tokenizer, saved.config.model.vocab)
        for file in ("generation_config", "config"):
            ids += _ids(kept.ids(file).get("eos_token_id"))
    return tuple(dict.fromkeys(ids))
