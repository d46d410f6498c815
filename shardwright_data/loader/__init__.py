"""Training batches: the tokens of the batch of a step, and their way to the devices (docs/loading.md).

`make_loader` gives the loader that a configuration names: of one flat-tokens dataset, a mixture of several, or a stream
that is tokenized on the fly. `Prefetcher` loads batches ahead of use.
"""

from shardwright_data.loader.batches import (
    Limit,
    Loader,
    Prefetcher,
    Sequences,
    TokenBatch,
    batch_shapes,
    in_microbatches,
)
from shardwright_data.loader.config import DataConfig, batch_of, check_skips, fixed_settings, make_loader, steps_for
from shardwright_data.loader.flat import FlatTokensConfig, FlatTokensLoader, ReadingConfig
from shardwright_data.loader.mixture import MixtureLoader, SourceConfig
from shardwright_data.loader.shuffle import permute
from shardwright_data.loader.stream import StreamConfig, StreamLoader

__all__ = [
    "DataConfig",
    "FlatTokensConfig",
    "FlatTokensLoader",
    "Limit",
    "Loader",
    "MixtureLoader",
    "Prefetcher",
    "ReadingConfig",
    "Sequences",
    "SourceConfig",
    "StreamConfig",
    "StreamLoader",
    "TokenBatch",
    "batch_of",
    "batch_shapes",
    "check_skips",
    "fixed_settings",
    "in_microbatches",
    "make_loader",
    "permute",
    "steps_for",
]
