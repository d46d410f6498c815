"""The files that define tokenizers: found by name, translated to Hugging Face's tokenizer.json, and trained.

Whatever library defines a tokenizer, its dataset keeps a tokenizer.json, so that all programs can read its ids.
"""

import base64
import importlib.resources
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from configuration.foreign import COPY_AGAIN, LARGE, parse_object, read_file, read_text, refused

MOST_IDS = 2**24
"""Ids of a tokenizer are below this. Libraries take memory for the largest."""

# GPT-2's letters for bytes: the printable ones of Latin-1 for themselves, characters from 256 on for the others.
_PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_LETTERS = {byte: chr(byte) if byte in _PRINTABLE else chr(256 + _UNPRINTABLE.index(byte)) for byte in range(256)}


@dataclass(frozen=True)
class Tekken:
    """The content of a tekken.json of Mistral's: a byte-level BPE whose ids follow those of the special tokens."""

    pattern: str
    ranks: dict[bytes, int]
    special: dict[str, int]
    """The ids below those of the ranks. An id without a name is named `<SPECIAL_id>`, as in mistral-common."""


# Files that list no special tokens have these.
_TEKKEN_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
_TEKKEN_SPECIAL += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"]
_TEKKEN_SPECIAL += ["[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]


def find_huggingface(name: str) -> str:
    """The content of a tokenizer.json.

    Args:
        name: the file, a directory that holds it, or a name on the Hugging Face hub.

    Raises:
        ValueError: it is missing, or not a tokenizer.json.
    """
    path = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
    if not os.path.exists(path):
        if path != name or name.endswith(".json"):
            raise ValueError(f"There is no file {path!r} in {os.getcwd()}. Correct the path.")
        path = _download(name, ["tokenizer.json"], "a local tokenizer.json")
    definition = read_text(path, LARGE)
    definition_of(path, definition)
    return definition


_DEFINITION = {
    "model": {"type?": str, "dropout?": float | None, "vocab?": dict | list | None},
    "added_tokens?": [{"id": int, "content": str, "special": bool}],
}


def definition_of(where: str | os.PathLike, definition: str) -> dict[str, Any]:
    """The content of a tokenizer.json, which `where` names.

    Raises:
        ValueError: it is not one, draws merges at random, or has an id of MOST_IDS or more.
    """
    content = parse_object(str(where), definition, _DEFINITION)
    model = content["model"]
    if model.get("dropout"):
        raise ValueError(
            f"{where}: model.dropout is {model['dropout']}: a text would have other ids at each run. Set it to null."
        )
    vocab = model.get("vocab") or {}
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(x["id"] for x in content.get("added_tokens", ()))]
    if wrong := next((i for i in ids if type(i) is not int or not 0 <= i < MOST_IDS), None):
        raise ValueError(f"{where}: {wrong!r:.40} is no id of a token; ids are 0 to {MOST_IDS - 1:,}. {COPY_AGAIN}")
    return content


def find_mistral(name: str) -> Tekken | bytes:
    """A tokenizer of Mistral's: the content of its tekken.json or of its SentencePiece model.

    Args:
        name: the path of such a file, a name on the Hugging Face hub, or the name of a file in mistral-common.

    Raises:
        ValueError: it is missing, or not a file of Mistral's.
    """
    path = name
    if not os.path.exists(path) and "/" in name:
        path = _download(name, ["tekken.json", "tokenizer.model.v3", "tokenizer.model"], "the path of a local file")
    elif not os.path.exists(path):
        path = _find_in_mistral_common(name)
    content = read_file(path, LARGE)
    if not os.path.basename(path).endswith(".json"):
        return content
    found = parse_object(str(path), content, _TEKKEN, "A tekken.json of Mistral's is wanted.")
    with refused(f"{path} is not a tekken.json of Mistral's"):  # base64
        return _read_tekken(found)


def _find_in_mistral_common(name: str) -> str:
    try:
        data = importlib.resources.files("mistral_common") / "data"
    except ImportError as e:
        raise ValueError(
            f"There is no file {name!r} in {os.getcwd()}. The tokenizers that come with the package mistral-common "
            "need it: pip install mistral-common"
        ) from e
    known = sorted(file.name for file in data.iterdir() if "tekken" in file.name or ".model." in file.name)
    if name not in known:
        raise ValueError(
            f"There is no file {name!r} in {os.getcwd()}, nor in mistral-common, which has {known}. Give one of "
            "these, or a path."
        )
    return str(data / name)


_TEKKEN = {
    "config": {"pattern": str, "default_num_special_tokens": int, "default_vocab_size": int},
    "special_tokens?": [{"token_str": str, "rank": int}],
    "vocab": [{"token_bytes": str, "rank": int}],
}


def _read_tekken(content: dict[str, Any]) -> Tekken:
    config = content["config"]
    num_special = config["default_num_special_tokens"]
    if listed := content.get("special_tokens"):
        special = {token["token_str"]: token["rank"] for token in listed}
    else:
        special = {token: i for i, token in enumerate(_TEKKEN_SPECIAL)}
    special |= {f"<SPECIAL_{i}>": i for i in range(len(special), num_special)}
    vocabulary = content["vocab"][: config["default_vocab_size"] - num_special]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in vocabulary}
    return Tekken(config["pattern"], ranks, special)


def _download(name: str, files: list[str], instead: str) -> str:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        for file in files:
            try:
                return huggingface_hub.hf_hub_download(name, file)
            except EntryNotFoundError:
                if file == files[-1]:
                    raise
    # Without a connection it raises one of several errors of the system, else its own.
    except (OSError, ValueError, HfHubHTTPError) as e:
        raise ValueError(
            f"Cannot load {' or '.join(files)} of {name!r} from the Hugging Face hub: {e} Check the name, the "
            f"connection, and that you are logged in if access is restricted; or give {instead}."
        ) from e


# ---- translation --------------------------------------------------------------------------------------------------


def from_ranks(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], offset: int = 0) -> str:
    """The tokenizer.json of a byte-level BPE as tiktoken has it.

    tiktoken splits text by a pattern, then merges the two neighbours whose bytes together have the lowest rank. So each
    way to cut a token in two is a merge, in the order of the ranks. Split text that is itself a token stays whole.

    Args:
        ranks: of the tokens.
        pattern: splits the text.
        special: ids of the special tokens, by name.
        offset: the id of rank 0.
    """
    merges = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += [[_to_letters(a), _to_letters(b)] for a, b in sorted(known, key=lambda c: (ranks[c[0]], ranks[c[1]]))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _tokenizer_json(
        special,
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]},
        decoder=byte_level,
        ignore_merges=True,
        byte_fallback=False,
        unk_token=None,
        # `tokenizers` gives an added token that is not in the vocabulary another id than the one stated.
        vocab={_to_letters(token): rank + offset for token, rank in ranks.items()} | dict(special),
        merges=merges,
    )


def _to_letters(token: bytes) -> str:
    return "".join(map(BYTE_LETTERS.__getitem__, token))


def from_sentencepiece(model: bytes) -> str:
    """The tokenizer.json of a SentencePiece BPE that prepends a space and changes nothing else, as Mistral's do.

    Raises:
        ValueError: not a SentencePiece model.
    """
    tokenizer = load_sentencepiece(model)
    ids = range(tokenizer.get_piece_size())
    pieces = [tokenizer.id_to_piece(i) for i in ids]
    vocabulary = dict(zip(pieces, ids, strict=True))
    mergeable = {pieces[i] for i in ids if not (tokenizer.is_control(i) or tokenizer.is_byte(i))}
    merges = []
    for piece in sorted(mergeable, key=lambda p: (-tokenizer.get_score(vocabulary[p]), vocabulary[p])):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        merges += [[a, b] for a, b in cuts if a in mergeable and b in mergeable]
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    replace = [{"type": "Prepend", "prepend": space}, _replacement(" ", space)]
    restore = [
        _replacement(space, " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return _tokenizer_json(
        {pieces[i]: i for i in ids if tokenizer.is_control(i) or tokenizer.is_unknown(i)},
        normalizer={"type": "Sequence", "normalizers": replace},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": restore},
        ignore_merges=False,
        byte_fallback=True,
        unk_token=pieces[tokenizer.unk_id()],
        vocab=vocabulary,
        merges=merges,
    )


def _replacement(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def load_sentencepiece(model: bytes) -> Any:
    """A sentencepiece.SentencePieceProcessor.

    Raises:
        ValueError: not a SentencePiece model, or the package is missing.
    """
    try:
        import sentencepiece
    except ImportError as e:
        raise ValueError("A SentencePiece model needs the package sentencepiece: pip install sentencepiece") from e
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as e:
        raise ValueError(f"The file of tokenizer.name is not a SentencePiece model: {e}") from e


def _tokenizer_json(
    special: Mapping[str, int], *, normalizer: Any, pre_tokenizer: Any, decoder: Any, **model: Any
) -> str:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": token} | flags for token, i in sorted(special.items(), key=lambda item: item[1])]
    absent = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "BPE"} | absent | model,
    }
    return json.dumps(definition, ensure_ascii=False)


# ---- training -----------------------------------------------------------------------------------------------------


def train_bpe(documents: Iterable[str], vocab_size: int) -> str:
    """The tokenizer.json of a byte-level BPE trained on `documents`, with ids 0 and 1 for `<|begin|>` and `<|end|>`.

    Its vocabulary is smaller than `vocab_size` if the documents are too few: once each word is a token, nothing is left
    to merge.

    Raises:
        ValueError: vocab_size is too small for the bytes and these two.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|begin|>", "<|end|>"]
    if vocab_size < 256 + len(special):
        raise ValueError(f"tokenizer.vocab_size is {vocab_size}; 256 bytes and {special} need 258 or more.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer.to_str()
