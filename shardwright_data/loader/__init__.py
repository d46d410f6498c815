"""Training batches: the tokens of the batch of a step, and their way to the devices (docs/loading.md).

`make_loader` gives the loader that a configuration names: of flat-tokens datasets, one or several mixed, or of a stream
that is tokenized on the fly. `prefetch` loads batches ahead of use.
"""

from shardwright_data.loader.batches import Loader, Piece, TokenBatch, batch_shapes, in_microbatches, prefetch
from shardwright_data.loader.config import DataConfig, SourceConfig, StreamConfig, batch_of, check_skips, fixed_settings
from shardwright_data.loader.flat import FlatTokensLoader
from shardwright_data.loader.opening import make_loader, steps_for
from shardwright_data.loader.stream import StreamLoader
