"""Writes a small dataset of synthetic tasks: `python -m tools.write_synthetic_dataset
out=synthetic_dataset.zarr`.

shardwright/data/synthetic.py describes the documents.
"""

from dataclasses import dataclass

import numpy as np
from omegaconf import MISSING

from shardwright.data import flat_tokens
from shardwright.data.checks import a_path, within
from shardwright.data.synthetic import TASKS
from shardwright.settings.program import run_program

SIZES = {"train": 2**18, "validation": 2**16}
"""Tokens per split. Each ends with the first document that reaches this size."""


@dataclass
class Settings:
    """Settings of the program."""

    out: str = a_path(MISSING)
    """Directory of the dataset."""
    seed: int = within(0, 2**32, 0)
    """Random seed, in [0, 2**32). The same seed writes the same bytes."""


def write(config: Settings) -> None:
    """Writes both splits.

    Raises:
        ValueError: the directory already has a dataset.
    """
    for index, (split, num_tokens) in enumerate(SIZES.items()):
        # Unlike numpy's newer generators, RandomState promises the same values in every version of
        # numpy.
        rng = np.random.RandomState([config.seed, index])
        with flat_tokens.Writer(config.out, split) as writer:
            while writer.num_tokens < num_tokens:
                document = TASKS[rng.randint(len(TASKS))](rng)
                writer.append(document, np.array([document.size]))
        print(f"{writer.path}: {writer.num_tokens:,} tokens in {writer.num_documents:,} documents")


if __name__ == "__main__":
    run_program("write_synthetic_dataset", Settings, write)
