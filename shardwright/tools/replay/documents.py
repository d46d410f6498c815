"""Finds the documents of a batch, and the loss of each."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.shardtypes import Of, f32, make_shardings, typed_shard_map, u32
from shardwright.data.loader import Piece, TokenBatch
from shardwright.data.text.tokenizers import Tokenizer, tokenizer_of_run
from shardwright.modeling.forward import Forward
from shardwright.modeling.model import compute_scope
from shardwright.program.spec import load_spec
from shardwright.program.stages import folded_mesh, without_stages
from shardwright.tools.replay.session import Session


@dataclasses.dataclass(kw_only=True)
class Document(Piece):
    """Part of a document in a sequence of a batch, with its tokens."""

    ids: np.ndarray
    loss: float = float("nan")
    """Mean over its tokens, in nats."""

    @property
    def span(self) -> slice:
        """Its positions in the sequence."""
        return slice(self.position, self.position + self.length)

    @property
    def name(self) -> str:
        """Describes where the document is from."""
        of = f"{self.source} " * bool(self.source)
        return f"{of}{self.document:,}" if self.document is not None else f"{of}-"


def on_host(batch: TokenBatch) -> TokenBatch:
    """Returns a batch as host arrays [sequences, …]."""
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), batch)


def documents_of(session: Session, batch: TokenBatch) -> list[Document]:
    """Returns the documents of a batch `on_host`, in order, without padding."""
    try:
        pieces = session.loader.pieces(session.number)
    except ValueError:  # a stream
        return _by_starts(batch)
    return [
        Document(**vars(x), ids=batch.targets[x.sequence, x.position : x.position + x.length])
        for x in pieces
    ]


def _by_starts(batch: TokenBatch) -> list[Document]:
    found = []
    for number, (ids, is_start, mask) in enumerate(
        zip(batch.targets, batch.is_seq_start, batch.loss_mask, strict=True)
    ):
        length = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
        places = [*sorted({0, *np.flatnonzero(is_start[:length]).tolist()}), length]
        ends = [(a, b) for a, b in itertools.pairwise(places) if b > a]
        found += [Document(number, a, None, 0, b - a, ids=ids[a:b]) for a, b in ends]
    return found


def tokenizer_of(session: Session) -> Tokenizer:
    """Returns the tokenizer of the run's data, or one that shows ids if there is none."""
    try:
        return tokenizer_of_run(session.config.data)
    except ValueError:
        return Tokenizer()


def token_losses(session: Session, batch: TokenBatch) -> np.ndarray:
    """Returns the loss of each target in nats, f32[sequences, seq_len], by the forward pass of
    training.

    With pipeline stages, it runs on the mesh without them.
    """
    c, model = session.config, session.model
    spec = load_spec()
    Weights = model.Weights
    forward = Forward(model, c.training, spec.attention, in_training=True)

    @typed_shard_map
    def per_device(
        w: Of[Weights], batch: Of[spec.Batch], seeds: u32["m B/r/d"] | None
    ) -> f32["m B/r/d L"]:
        copies = forward.gatherable(w)

        def of_microbatch(_, part):
            logits = forward.logits(copies, forward.tokens(*part))
            return None, spec.cross_entropy(logits, part[0].targets)

        return lax.scan(of_microbatch, None, (batch, seeds))[1]

    @functools.partial(jax.jit, compiler_options=session.options)
    def losses(w: object, batch: Any, step: Any):
        key = jax.random.fold_in(jax.random.key(c.training.seed), step)  # as in the training step
        seeds = (
            jax.random.bits(key, batch.targets.shape[:2])
            if getattr(c.model, "dropout", 0)
            else None
        )
        with compute_scope(c.training.compute_dtype):
            return jax.reshard(per_device(w, batch, seeds), PartitionSpec())

    mesh = folded_mesh(c)
    weights = without_stages(session.state.weights, session.placement, mesh)
    with jax.set_mesh(mesh):
        batch = jax.tree.map(jax.device_put, batch, make_shardings(spec.Batch, like=batch))
        found = np.asarray(losses(weights, batch, np.int32(session.step)))
    return found.reshape(-1, found.shape[-1])


def with_losses(documents: list[Document], losses: np.ndarray, mask: np.ndarray) -> list[Document]:
    """Returns the documents with their losses, highest first, without those that have no targets
    that count.
    """
    scored = []
    for document in documents:
        counts = mask[document.sequence, document.span]
        if counts.any():
            of = losses[document.sequence, document.span][counts]
            scored.append(dataclasses.replace(document, loss=float(np.mean(of, dtype=np.float64))))
    return sorted(
        scored, key=lambda document: -document.loss if np.isfinite(document.loss) else -np.inf
    )
