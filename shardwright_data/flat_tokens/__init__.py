"""The flat-tokens dataset format (docs/flat-tokens.md): one split read, and one written."""

from shardwright_data.flat_tokens.format import (
    MAX_TOKEN_ID,
    decode,
    is_there,
    mark_starts,
    open_kvstore,
    opening_context,
    read_file,
)
from shardwright_data.flat_tokens.reader import Reader
from shardwright_data.flat_tokens.writer import Writer, add_input

__all__ = [
    "MAX_TOKEN_ID",
    "Reader",
    "Writer",
    "add_input",
    "decode",
    "is_there",
    "mark_starts",
    "open_kvstore",
    "opening_context",
    "read_file",
]
