"""Small runs of the tokenization tool, and what they leave."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from flat_tokens import writer
from text import sources
from tools.huggingface_to_flat_tokens import splits
from tools.huggingface_to_flat_tokens.config import Config, SplitConfig, TokenizerConfig

ROOT = Path(__file__).parent.parent
SIZES = [
    (writer, "INNER_CHUNK", 64),
    (writer, "TOKENS_SHARD", 2048),
    (writer, "STARTS_SHARD", 64),
    (sources, "BLOCK_BYTES", 300),
    (sources, "PIECE_BYTES", 1000),
    (splits, "STATE_SECONDS", 0.0),
]

DRIVER = """
import time
from configuration.program import run_program
from tools.huggingface_to_flat_tokens import __main__ as tool
from tools.huggingface_to_flat_tokens.blocks import Tokenize
{sizes}
# Slow enough to be killed within.
tokenize = Tokenize.__call__
Tokenize.__call__ = lambda self, item: (time.sleep({seconds}), tokenize(self, item))[1]
if __name__ == "__main__":
    run_program("huggingface_to_flat_tokens", tool.Config, tool.run)
"""


@pytest.fixture
def small(monkeypatch):
    """Files of few tokens, blocks of few documents, and a state written after each block."""
    for module, name, value in SIZES:
        monkeypatch.setattr(module, name, value)


def random_texts(num_texts, seed=0, longest=80):
    rng = np.random.default_rng(seed)
    words = np.array(["the", "sea", "naïve", "東京", "\n", "x"])
    return [" ".join(rng.choice(words, rng.integers(0, longest))) for _ in range(num_texts)]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def tree(directory):
    """All files below a directory, with their content."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def config(out, files, **settings):
    """Bytes of local files, with as much set in each split as is given as `<split>_<name>`."""
    splits = {}
    for split in ("train", "validation"):
        given = {k.removeprefix(f"{split}_"): settings.pop(k) for k in list(settings) if k.startswith(f"{split}_")}
        splits[split] = SplitConfig(files=list(files), **given)
    defaults = {"tokenizer": TokenizerConfig(end_token="</s>"), "num_workers": 1}
    return Config(**{"out": str(out)} | splits | defaults | settings)


def driver(directory, seconds):
    """A command line that runs the tool with small sizes, `seconds` of sleep for each block."""
    path = directory / "driver.py"
    sizes = "\n".join(f"import {module.__name__}\n{module.__name__}.{name} = {value}" for module, name, value in SIZES)
    path.write_text(DRIVER.format(sizes=sizes, seconds=seconds))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return [sys.executable, str(path), f"--config-path={ROOT}/tools/configs"], env
