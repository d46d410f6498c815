"""The loss in chunks beside the loss of all logits at once: time and memory of unembedding, loss and gradients alone.

    python -m benchmarks.loss_chunks [--vocab 32768] [--d_model 256] [--tokens 2048]

One sequence on the first device, in f32 (bf16 if the device is not a CPU). All programs take turns; the time is the
best of all rounds. Memory is the compiler's figure for temporary memory.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import train
from benchmarks.steps import print_header, print_line, times_in_turn, use_cpu_by_default
from cluster.devices import make_mesh
from input_loader import TokenBatch
from modeling.model import load_model
from modeling.weights import initialize
from shardlib.shardtypes import Scope, dtype_name, f32, typed_shard_map
from training_io.config import TrainingConfig

act = dtype_name("act")


def program(c: train.ModelConfig, length: int, dtype, chunk: int | None):
    """Loss and gradients of the parts after the layers, jitted."""
    model = load_model(c)
    forward = train.Forward(model, TrainingConfig(batch_size=1, seq_len=length, loss_chunk=chunk))

    @typed_shard_map
    def last(
        w: train.Transformer, x: act["B/r/d L/t M"], batch: TokenBatch
    ) -> tuple[f32[""], train.Transformer, act["B/r/d L/t M"]]:
        parts = train.MicrobatchLoss(forward)
        loss = lambda w, x: parts.last(forward.copies(w), x, batch, None)
        value, (g_w, g_x) = jax.value_and_grad(loss, argnums=(0, 1))(w, x)
        return value, g_w, g_x

    def run(*args):
        with Scope(act=dtype):
            return last(*args)

    return jax.jit(run)


def main() -> None:
    """Prints the table for the sizes that the command line gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocab", 32768), ("d_model", 256), ("tokens", 2048), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    use_cpu_by_default()
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    c = train.ModelConfig(vocab=o.vocab, d_model=o.d_model, layers=1, n_kv=1, n_q_per_kv=1, d_head=8, d_ff=8)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, o.vocab, (1, o.tokens)).astype(np.uint32)
    batch = TokenBatch(ids, np.zeros(ids.shape, bool), np.ones(ids.shape, bool))
    x = jnp.asarray(rng.standard_normal((1, o.tokens, o.d_model)), dtype)
    with jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1])):
        w = jax.jit(lambda key: initialize(load_model(c).table, key))(jax.random.key(0))
        chunks = [None, *(n for n in (1024, 512, 256, 128) if n < o.tokens)]
        compiled = {chunk: program(c, o.tokens, dtype, chunk).lower(w, x, batch).compile() for chunk in chunks}
        times = times_in_turn({chunk: (run, (w, x, batch)) for chunk, run in compiled.items()}, o.rounds)
    print_header("loss_chunk", "ms", "of the time without", "temporary memory, MiB")
    for chunk, run in compiled.items():
        best, size = min(times[chunk]), run.memory_analysis().temp_size_in_bytes
        print_line(chunk or "null", f"{best * 1e3:.0f}", f"{best / min(times[None]):.2f}", f"{size / 2**20:.1f}")


if __name__ == "__main__":
    main()
