"""A small dataset of known texts."""

from shardwright.data.flat_tokens import Writer
from shardwright.data.text.tokenizers import open_tokenizer

TEXTS = [f"Document number {i}, {'very ' * (i % 9)}short." for i in range(60)]


def write(path, tokenizer=None, attributes=None):
    tokenizer = tokenizer or open_tokenizer("bytes", end_token="</s>")
    encoded = tokenizer.encode(TEXTS)
    with Writer(str(path), "train") as writer:
        writer.append(encoded.ids, encoded.lengths)
        writer.attributes.update(
            {"tokenizer": {"kind": "bytes"}} if attributes is None else attributes
        )
    return str(path)
