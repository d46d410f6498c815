"""Loads training batches onto the devices (docs/loading.md).

`make_loader` makes the loader of a configuration: for a flat-tokens dataset, a mixture of them, or a stream that is
tokenized on the fly. `prefetch` loads batches ahead of use.
"""

from shardwright.data.loader.batches import (
    Loader,
    Piece,
    TargetCounts,
    TokenBatch,
    batch_shapes,
    in_microbatches,
    prefetch,
)
from shardwright.data.loader.config import DataConfig, SourceConfig, StreamConfig, batch_of, check_skips, fixed_settings
from shardwright.data.loader.flat import FlatTokensLoader
from shardwright.data.loader.opening import make_loader, steps_for
from shardwright.data.loader.stream import StreamLoader
