"""Batches of another loader on a mesh that does not divide them."""

import numpy as np

from shardwright_data.loader.batches import Loader, Sequences
from shardwright_data.loader.shuffle import Indices


class PaddedLoader(Loader):
    """Batches of `loader`, with sequences of padding at the end where the mesh in force does not divide them.

    Args:
        loader: one made without a mesh.
        devices: number of devices that share the sequences of a microbatch, at least 1.
    """

    def __init__(self, loader: Loader, devices: int):
        self.inner, step = loader, devices * loader.microbatches
        sizes = -(-loader.batch_size // step) * step, loader.seq_len, loader.vocab_size
        super().__init__(loader.split, *sizes, loader.inputs, loader.microbatches)
        self.parallel_loads, self.num_tokens, self.limit = loader.parallel_loads, loader.num_tokens, loader.limit

    def sequences(self, step: int, indices: Indices) -> Sequences:
        """Sequences of the batch of `step`, as Loader.sequences describes. Those of padding have no target."""
        is_real = indices < self.inner.batch_size
        # Of a device that has padding alone too: a loader gives at least one sequence.
        found = self.inner.sequences(step, np.where(is_real, indices, 0))
        return found._replace(loss_mask=found.loss_mask & is_real[:, None])

    def epoch_steps(self) -> dict[str, float]:
        """Batches until each sequence of a source has come once, by the source's name."""
        return self.inner.epoch_steps()

    def utf8_bytes(self, step: int) -> int | None:
        """UTF-8 bytes of the text of the batch's targets; None if unknown."""
        return self.inner.utf8_bytes(step)
