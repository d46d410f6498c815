"""Reads and writes datasets in the flat-tokens format (docs/formats.md)."""

from shardwright.data.flat_tokens.format import (
    check_files,
    decode,
    is_there,
    open_kvstore,
    opening_context,
    read_file,
)
from shardwright.data.flat_tokens.reader import Reader, bos_id_of
from shardwright.data.flat_tokens.writer import (
    Writer,
    add_input,
    mark_starts,
    unfinished_settings,
    work_on,
)
