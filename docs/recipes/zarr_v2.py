"""Copies data/mine.zarr to data/mine_for_seqax.zarr in zarr v2, which is all that seqax reads
(docs/formats.md).
"""

import zarr
from numcodecs import Blosc

source = zarr.open_group("data/mine.zarr", mode="r")
copy = zarr.open_group("data/mine_for_seqax.zarr", mode="w", zarr_format=2)
blosc = Blosc("lz4", clevel=5, shuffle=Blosc.BITSHUFFLE)
for split, part in source.groups():
    group = copy.create_group(split, attributes={"max_token_id": part.attrs["max_token_id"]})
    for name, chunk in {"encoded_tokens": 2**22, "seq_starts": 2**16}.items():
        old, whole = part[name], {"write_empty_chunks": True}  # what is missing counts as damage
        new = group.create_array(
            name, shape=old.shape, dtype=old.dtype, chunks=[chunk], compressors=blosc, config=whole
        )
        for i in range(0, old.shape[0], 2**22):
            new[i : i + 2**22] = old[i : i + 2**22]
