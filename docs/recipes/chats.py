"""Writes chats as a dataset whose input `answer` is 1 at the tokens of answers, for instruction
tuning (docs/data.md).

Reads chats_train.jsonl and chats_validation.jsonl, whose lines are
[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]. Copy it to change the
template.
"""

import json
from collections.abc import Iterator

import numpy as np

from shardwright.data import flat_tokens
from shardwright.data.text.tokenizers import open_tokenizer

tokenizer = open_tokenizer("bytes", end_token="</s>")  # that of the model to tune


def parts(messages: list[dict[str, str]]) -> Iterator[tuple[list[int], bool]]:
    """Applies the template, which is yours to choose: yields ids, and whether they are targets."""
    prompt = ""
    for message in messages:
        if message["role"] == "assistant":
            yield tokenizer.ids(prompt + "assistant: "), False
            yield [*tokenizer.ids(message["content"]), tokenizer.end], True
            prompt = ""
        else:
            prompt += f"{message['role']}: {message['content']}\n"
    yield tokenizer.ids(prompt), False


for split in ("train", "validation"):
    with open(f"chats_{split}.jsonl") as lines:
        chats = [list(parts(json.loads(line))) for line in lines]
    ids = np.array([i for chat in chats for part, _ in chat for i in part], np.uint32)
    answer = np.array(
        [is_target for chat in chats for part, is_target in chat for _ in part], np.uint32
    )
    with flat_tokens.Writer("data/chats.zarr", split) as writer:
        writer.append(ids, np.array([sum(len(part) for part, _ in chat) for chat in chats]))
        writer.attributes["tokenizer"] = {"kind": "bytes", "end_token": "</s>"}
    flat_tokens.add_input("data/chats.zarr", split, "answer", answer)
