"""The flat-tokens dataset format (docs/flat-tokens.md): one split read, and one written."""

from .format import (
    INNER_CHUNK,
    MAX_TOKEN_ID,
    STARTS_SHARD,
    STORE_REQUESTS,
    TOKENS_SHARD,
    check_absent,
    decode,
    delete_split,
    entropy,
    is_there,
    mark_starts,
    open_kvstore,
    opening_context,
    read_file,
    unigram_entropy,
)
from .reader import Reader, open_reader
from .writer import Writer, add_input

__all__ = [
    "INNER_CHUNK",
    "MAX_TOKEN_ID",
    "STARTS_SHARD",
    "STORE_REQUESTS",
    "TOKENS_SHARD",
    "Reader",
    "Writer",
    "add_input",
    "check_absent",
    "decode",
    "delete_split",
    "entropy",
    "is_there",
    "mark_starts",
    "open_kvstore",
    "open_reader",
    "opening_context",
    "read_file",
    "unigram_entropy",
]
