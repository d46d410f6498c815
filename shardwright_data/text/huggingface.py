"""The tokenizer of a run's dataset, as the files that transformers' AutoTokenizer opens."""

import json
from collections.abc import Mapping
from typing import Any

from shardwright_data.flat_tokens import Reader
from shardwright_data.text.codec import tokenizer_of_dataset
from shardwright_data.text.definitions import PAD
from shardwright_data.text.tokenizers import load_definition, open_tokenizer


def find_tokenizer(data: Mapping[str, Any], dataset: str | None = None) -> tuple[str, str | None]:
    """The tokenizer.json of the data that a run reads, and the token at the end of each document, None for none.

    Args:
        data: the run's data section.
        dataset: a flat-tokens dataset to look at instead.

    Raises:
        ValueError: the dataset is missing or names no tokenizer, or the sources of a mixture have different ones.
        FileNotFoundError: its tokenizer.json is missing.
    """
    stream = data.get("stream")
    if dataset is None and stream is not None:
        tokenizer = open_tokenizer(stream.get("tokenizer_kind", "bytes"), stream.get("tokenizer"))
        return tokenizer.definition, stream.get("end_token")
    mixture = [source["filespec"] for source in (data.get("mixture") or {}).values()]
    filespecs = [dataset or data.get("filespec")] if dataset or data.get("filespec") else mixture
    if not filespecs:
        raise ValueError("the checkpoint names no dataset; give dataset=<one with its tokenizer>")
    each = {filespec: tokenizer_of_dataset(filespec, Reader(filespec, "train").attributes) for filespec in filespecs}
    if len(set(each.values())) > 1:
        raise ValueError(f"the datasets have different ones: {', '.join(each)}")
    if (found := each[filespecs[0]]) is None:
        raise ValueError(f"{filespecs[0]} names none")
    return found


def tokenizer_files(
    definition: str, bos_id: int, end_token: str | None
) -> tuple[dict[str, dict], int | None, list[str]]:
    """Files that make AutoTokenizer give what a run of this project reads: bos_id, then the text's ids.

    Args:
        definition: tokenizer.json of the dataset.
        bos_id: the id put before each document.
        end_token: the token at the end of each document.

    Returns:
        The content of the files, by name; the id of the end token; and sentences about what a user may not expect.
    """
    tokenizer = load_definition(definition)
    content = json.loads(definition)
    special = {token["content"]: token["id"] for token in content.get("added_tokens", []) if token["special"]}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    notes, processor = [], None
    bos = tokenizer.id_to_token(bos_id)
    if bos is None:
        notes.append(f"it has no token of id {bos_id} (model.bos_id): put that id before the text's yourself")
    else:
        piece = lambda kind, name: {kind: {"id": name, "type_id": 0}}
        single = [piece("SpecialToken", bos), piece("Sequence", "A")]
        processor = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, piece("Sequence", "B")],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }
    # Named as such, a token of text would be found in any text and left out where special tokens are skipped.
    for name, token in (("bos_token", bos), ("eos_token", end_token)):
        if token in special:
            settings[name] = token
        elif token is not None:
            notes.append(f"its {name} {token!r} is a token of text too")
    # Padding is masked: where the vocabulary has no token for it, one that no text becomes does as well.
    pads = (token for token in (PAD, "[PAD]", "<|pad|>", "<|padding|>", end_token, bos, *special) if token in special)
    if (pad := next(pads, None)) is None:
        notes.append("it has no special token: set a pad_token before you pad batches")
    else:
        settings["pad_token"] = pad
    content |= {"post_processor": processor, "truncation": None, "padding": None}
    end = None if end_token is None else tokenizer.token_to_id(end_token)
    return {"tokenizer.json": content, "tokenizer_config.json": settings}, end, notes
