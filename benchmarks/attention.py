"""Attention by blocks beside attention with all scores: time, and memory by sequence length, on the first device.

    python -m benchmarks.attention [--quick] [--blocks 128 256 512] [--longest 32768] [--only time|memory]

- Time: attention alone, forward and backward, f32 (bf16 where the device is no CPU), 4,096 tokens at any length, of one
  document a row and of documents of 300 tokens on average. Rounds of all programs in turn, the best of each; below
  einsum's time stand the others' as parts of it.
- Memory: the compiler's figure for the temporary memory of a training step of configs/model/demo.yaml, one sequence,
  without chunks of logits and with them. Nothing of it runs, so the length may be beyond this machine.

Exits with 1 if the memory of the step by blocks grows more than 1.1 times as fast as the length.
"""

import argparse
import functools
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import train
from cluster.config import HardwareConfig, MeshConfig
from cluster.devices import make_mesh
from input_loader import DataConfig, batch_shapes
from modeling.blockwise import blockwise
from modeling.model import load_model
from modeling.rules import Places, Rule
from shardlib.shardtypes import Scope, dtype_name, i32, typed_shard_map
from training_io.config import Config, PathsConfig, TrainingConfig

act = dtype_name("act")
TOKENS = 4096
HEADS = {"demo (2 × 2 heads of 32)": (2, 2, 32), "GPT-2 124M (12 heads of 64)": (12, 1, 64)}


def programs(length: int, heads: tuple[int, int, int], documents: bool, blocks: list[int]) -> dict:
    """Name: compiled gradient of a sum of attention's results, and its arguments."""
    kv, queries, d = heads
    rows, dtype = max(1, TOKENS // length), jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal((rows, length, *shape)), dtype)
    document = np.cumsum(rng.random((rows, length)) < (1 / 300 if documents else 0), axis=1).astype(np.int32)
    args = draw(kv, queries, d), draw(kv, d), draw(kv, d), document
    found = {}
    for name in ["einsum", *(block for block in blocks if block <= length)]:

        @typed_shard_map
        def gradients(
            q: act["B/r/d L K/t Q D"], k: act["B/r/d L K/t D"], v: act["B/r/d L K/t D"], document: i32["B/r/d L"]
        ) -> tuple[act["B/r/d L K/t Q D"], act["B/r/d L K/t D"], act["B/r/d L K/t D"]]:
            path = train.attention if name == "einsum" else functools.partial(blockwise, block=name)  # noqa: B023
            index = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
            places = Places(index, index, document)
            total = lambda q, k, v: jnp.sum(jnp.sin(jnp.float32(path(q, k, v, places, Rule()))))
            return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

        with Scope(act=dtype):
            found[name] = jax.jit(gradients).lower(*args).compile(), args
    return found


def best_times(found: dict, rounds: int) -> dict:
    """Name: seconds of the fastest of `rounds` calls."""
    best = dict.fromkeys(found, float("inf"))
    for turn in range(rounds + 1):
        for name, (compiled, args) in found.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def times(quick: bool, blocks: list[int]) -> None:
    print("Forward and backward of attention alone; by blocks, as parts of einsum's time\n")
    print("| heads | documents | tokens | einsum ms | " + " | ".join(f"blocks of {b}" for b in blocks) + " |")
    print("|---|---|---|---|" + "---|" * len(blocks))
    for name, heads in HEADS.items():
        for documents in (False, True):
            for length in (512, 1024) if quick else (256, 512, 1024, 2048, 4096):
                best = best_times(programs(length, heads, documents, blocks), 2 if quick else 5)
                cells = [f"{best[b] / best['einsum']:.2f}" if b in best else "" for b in blocks]
                kind = "300 tokens" if documents else "one"
                print(f"| {name} | {kind} | {length} | {best['einsum'] * 1e3:.1f} | {' | '.join(cells)} |", flush=True)


def step_memory(length: int, **training) -> int:
    """Bytes of temporary memory of a compiled training step."""
    c = Config(
        model=train.ModelConfig(
            vocab=1280, d_model=256, layers=2, n_kv=2, n_q_per_kv=2, d_head=32, d_ff=1024, rope_base=256
        ),
        optimizer=train.OptimizerConfig(learning_rate=1e-3, warmup_steps=1, schedule_steps=9),
        mesh=MeshConfig(),
        data=DataConfig(filespec="unused"),
        training=TrainingConfig(
            batch_size=1, seq_len=length, steps=9, compute_dtype="f32" if jax.default_backend() == "cpu" else "bf16"
        ),
        hardware=HardwareConfig(),
        paths=PathsConfig(),
    )
    for name, value in training.items():
        setattr(c.training, name, value)
    model = load_model(c.model)
    state = jax.eval_shape(lambda key: train.init_state(key, c, model), jax.random.key(0))
    lowered = train.make_training_step(c, model).lower(state, batch_shapes(1, length), np.int32(0))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def memory(missed: list[str], longest: int) -> None:
    lengths = [2**n for n in range(11, longest.bit_length())]
    print("\nTemporary memory of a training step of the demo's model in MiB, one sequence, by the compiler\n")
    print("| tokens | " + " | ".join(f"{n:,}" for n in lengths) + " |")
    print("|---|" + "---|" * len(lengths))
    cases = {"einsum": {"attention": "einsum"}, "blockwise": {"attention": "blockwise"}}
    cases["blockwise, loss_chunk=1024"] = {"attention": "blockwise", "loss_chunk": 1024}
    for name, training in cases.items():
        sizes = [step_memory(length, **training) for length in lengths]
        print(f"| {name} | " + " | ".join(f"{size / 2**20:,.1f}" for size in sizes) + " |", flush=True)
        if name != "einsum" and sizes[-1] / sizes[0] > 1.1 * lengths[-1] / lengths[0]:
            missed.append(
                f"memory of {name} grows {sizes[-1] / sizes[0]:.1f} times, {lengths[0]} to {lengths[-1]} tokens"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 256, 512], help="positions of a block")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest sequence")
    parser.add_argument("--only", choices=["time", "memory"], help="one part of the two")
    options = parser.parse_args()
    missed: list[str] = []
    with jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1])):
        if options.only != "memory":
            times(options.quick, options.blocks)
        if options.only != "time":
            memory(missed, options.longest)
    for line in missed:
        print("MISSED:", line)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
