"""Adds what a run, such as a reference policy, computes for each token to the training split of a
dataset.

    python docs/recipes/log_p.py runs/<run> <dataset> --by-document

adds `reference_log_p`, the log-probability of each token, for preferences.py. distillation.py adds
what its loss reads. The run must be one that you trust, because its model's module is imported.
docs/changing.md has the commands.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardwright.data import flat_tokens
from shardwright.data.loader import DataConfig, make_loader
from shardwright.modeling.model import load_model
from shardwright.program.mesh_choice import MeshChoice, mesh_for
from shardwright.program.resume import open_run
from shardwright.program.step import trace_step


def bits(x: jax.Array) -> jax.Array:
    """The values of f32 as uint32, as datasets store them."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def log_p(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The log-probability of each target, uint32[sequences, positions, 1]."""
    found = jax.nn.log_softmax(logits)
    return bits(jnp.take_along_axis(found, targets[..., None].astype(jnp.int32), axis=-1))


def add_inputs(
    names: Sequence[str],
    compute: Callable[[jax.Array, jax.Array], jax.Array],
    run: str,
    data: str,
    by_document: bool = False,
    seq_len: int | None = None,
    batch_size: int = 32,
) -> None:
    """Adds inputs to the training split.

    A training run with the same sequences has the same contexts.

    Args:
        names: of the inputs.
        compute: of logits f32[sequences, positions, vocab] and targets, their values
            uint32[sequences, positions, n].
        run: directory or URL of a run, or of one of its checkpoints, with the vocabulary of the
            dataset.
        data: the dataset.
        by_document: True for a sequence for each document, as data.sequence_packing=false has.
        seq_len: training.seq_len; None: that of the run.
        batch_size: sequences to compute at a time.

    Raises:
        ValueError: there is no such run, the dataset does not fit it or has such inputs already, or
            a document is longer than a sequence.
    """
    reader = flat_tokens.Reader(data, "train")
    with open_run(run, None, trust=True) as saved:
        c = saved.config
        c.data = DataConfig(filespec=data, shuffle=False, sequence_packing=not by_document)
        c.training.seq_len = length = seq_len or c.training.seq_len
        c.training.batch_size, c.training.microbatches = batch_size, 1
        model = load_model(c.model)
        mesh = mesh_for(MeshChoice(), c)
        with jax.set_mesh(mesh):
            weights = saved.read_weights(trace_step(c, model), False, print)

    @jax.jit
    def of_whole_sequences(logits: jax.Array, targets: jax.Array) -> jax.Array:
        of_sequences, *_ = jax.typeof(logits).sharding.spec
        logits, targets = (jax.reshard(x, PartitionSpec(of_sequences)) for x in (logits, targets))
        return compute(logits.astype(jnp.float32), targets)

    sequences = reader.num_documents if by_document else reader.num_tokens // length
    with jax.set_mesh(mesh), tempfile.TemporaryFile() as file:
        found = np.memmap(file, np.uint32, "w+", shape=(len(names), reader.num_tokens))
        loader = make_loader(c.data, "train", batch_size, length, c.model.vocab)
        logits_of = trace_step(c, model, name="logits").lowered.compile()
        done = 0
        for first in range(0, sequences, batch_size):
            batch = jax.tree.map(lambda x: x[0], loader.load(first // batch_size))
            values = of_whole_sequences(logits_of(weights, (batch, None)), batch.targets)
            values, is_token = (
                np.asarray(x)[: sequences - first] for x in (values, batch.loss_mask)
            )
            count = np.count_nonzero(is_token)
            found[:, done : done + count] = values[is_token].T
            done += count
        if by_document and done < reader.num_tokens:
            raise ValueError(
                f"a document of {data} is longer than the {length} tokens of a sequence: give "
                "--seq-len."
            )
        for name, values in zip(names, found, strict=True):
            flat_tokens.add_input(data, "train", name, values)


def arguments(doc: str | None) -> dict[str, object]:
    """The arguments of the command line, as add_inputs takes them."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="directory or URL of a run, or of one of its checkpoints")
    parser.add_argument("data", help="the dataset")
    parser.add_argument(
        "--by-document", action="store_true", help="as data.sequence_packing=false reads it"
    )
    parser.add_argument(
        "--seq-len", type=int, help="training.seq_len of the run to train; else that of the run"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="sequences to compute at a time")
    return vars(parser.parse_args())


if __name__ == "__main__":
    add_inputs(["reference_log_p"], log_p, **arguments(__doc__))
