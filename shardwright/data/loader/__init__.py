"""Loads training batches onto the devices (docs/data.md).

`make_loader` makes the loader of a configuration: for a flat-tokens dataset, a mixture of them, or
a stream that is tokenized on the fly. `prefetch` loads batches ahead of use. In a training loop of
your own:

    from shardwright.data.loader import make_loader, prefetch, steps_for

    with jax.set_mesh(mesh):
        loader = make_loader(config.data, "train", batch_size, seq_len, vocab_size,
        state=saved_state, microbatches=m)
    steps = steps_for(loader, epochs=1)
    with prefetch(loader.load, start, steps, depth=config.data.prefetch,
    threads=loader.parallel_loads) as batches:
        for step, batch in enumerate(batches, start):
            ...  # train; at a checkpoint, save loader.state(step + 1) in its metadata

`load(step)` returns the batch of any step, except that a stream can't skip ahead.
"""

from shardwright.data.loader.batches import (
    Loader,
    Piece,
    Text,
    TokenBatch,
    batch_shapes,
    in_microbatches,
    is_input,
    prefetch,
    widths_of,
)
from shardwright.data.loader.config import (
    DataConfig,
    SourceConfig,
    StreamConfig,
    batch_of,
    check_skips,
)
from shardwright.data.loader.flat import FlatTokensLoader
from shardwright.data.loader.opening import make_loader, steps_for
from shardwright.data.loader.stream import StreamLoader
