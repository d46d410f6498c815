"""Training batches: the tokens of the batch of a step, and their way to the devices (docs/loading.md).

`make_loader` gives the loader that a configuration names: of one flat-tokens dataset, a mixture of several, or a stream
that is tokenized on the fly. `Prefetcher` loads batches ahead of use.
"""

from input_loader.batches import Limit, Loader, Prefetcher, Sequences, TokenBatch, batch_shapes, in_microbatches
from input_loader.config import DataConfig, batch_of, check_skips, fixed_settings, make_loader, steps_for
from input_loader.flat import FlatTokensConfig, FlatTokensLoader, ReadingConfig
from input_loader.mixture import MixtureLoader, SourceConfig
from input_loader.shuffle import permute
from input_loader.stream import StreamConfig, StreamLoader

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
