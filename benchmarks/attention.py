"""Attention by blocks beside attention with all scores: time, and memory by sequence length, on the first device.

    python -m benchmarks.attention [--quick] [--blocks 128 256 512] [--longest 32768] [--only time|memory]

- Time: attention alone, forward and backward, in f32 (bf16 if the device is not a CPU), 4,096 tokens at any length, of
  one document a sequence and of documents of 300 tokens on average. All programs take turns; a time is the best of all
  rounds. The times by blocks are ratios to the time of einsum.
- Memory: the compiler's figure for the temporary memory of a training step of configs/model/demo.yaml, one sequence,
  with and without chunks of logits. Nothing runs, so that the sequence may be too long for this machine.

Exits with 1 if the memory of the step by blocks grows more than 1.1 times as fast as the length.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

import train
from benchmarks.steps import config_of, lowered_step, print_header, print_line, times_in_turn, use_cpu_by_default
from cluster.devices import make_mesh
from modeling.blockwise import blockwise
from modeling.rules import Places, Rule
from shardlib.shardtypes import Scope, dtype_name, i32, typed_shard_map

act = dtype_name("act")
TOKENS = 4096
HEADS = {"demo (2 × 2 heads of 32)": (2, 2, 32), "GPT-2 124M (12 heads of 64)": (12, 1, 64)}


def programs(length: int, heads: tuple[int, int, int], documents: bool, blocks: list[int]) -> dict:
    """Compiled gradient of a sum of attention's results, with its arguments, by `einsum` or size of blocks."""
    kv, queries, d = heads
    batch, dtype = max(1, TOKENS // length), jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal((batch, length, *shape)), dtype)
    document = np.cumsum(rng.random((batch, length)) < (1 / 300 if documents else 0), axis=1).astype(np.int32)
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


def measure_time(quick: bool, blocks: list[int]) -> None:
    """Prints the table of times."""
    print("Forward and backward of attention alone; by blocks, as parts of einsum's time\n")
    print_header("heads", "documents", "tokens", "einsum ms", *(f"blocks of {b}" for b in blocks), left=2)
    for name, heads in HEADS.items():
        for documents in (False, True):
            for length in (512, 1024) if quick else (256, 512, 1024, 2048, 4096):
                times = times_in_turn(programs(length, heads, documents, blocks), 2 if quick else 5)
                einsum = min(times["einsum"])
                ratios = (f"{min(times[b]) / einsum:.2f}" if b in times else "" for b in blocks)
                print_line(name, "300 tokens" if documents else "one", length, f"{einsum * 1e3:.1f}", *ratios)


def step_memory(length: int, **training) -> int:
    """Bytes of temporary memory of a compiled training step."""
    model = {"vocab": 1280, "d_model": 256, "layers": 2, "n_kv": 2, "n_q_per_kv": 2, "d_head": 32, "d_ff": 1024}
    dtype = "f32" if jax.default_backend() == "cpu" else "bf16"
    sizes = {"batch_size": 1, "seq_len": length, "compute_dtype": dtype}
    step = lowered_step(config_of(train.ModelConfig(**model, rope_base=256), **sizes, **training))
    return step.compile().memory_analysis().temp_size_in_bytes


def measure_memory(longest: int) -> list[str]:
    """Prints the table of memory. Returns the targets that are missed."""
    lengths, missed = [2**n for n in range(11, longest.bit_length())], []
    print("\nTemporary memory of a training step of the demo's model in MiB, one sequence, by the compiler\n")
    print_header("tokens", *(f"{n:,}" for n in lengths))
    cases = {"einsum": {"attention": "einsum"}, "blockwise": {"attention": "blockwise"}}
    cases["blockwise, loss_chunk=1024"] = {"attention": "blockwise", "loss_chunk": 1024}
    for name, training in cases.items():
        sizes = [step_memory(length, **training) for length in lengths]
        print_line(name, *(f"{size / 2**20:,.1f}" for size in sizes))
        growth = sizes[-1] / sizes[0]
        if name != "einsum" and growth > 1.1 * lengths[-1] / lengths[0]:
            missed.append(f"memory of {name} grows {growth:.1f} times, {lengths[0]} to {lengths[-1]} tokens")
    return missed


def main() -> None:
    """Runs the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 256, 512], help="positions of a block")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest sequence")
    parser.add_argument("--only", choices=["time", "memory"], help="one of the two parts")
    options = parser.parse_args()
    use_cpu_by_default()
    missed: list[str] = []
    with jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1])):
        if options.only != "memory":
            measure_time(options.quick, options.blocks)
        if options.only != "time":
            missed = measure_memory(options.longest)
    for line in missed:
        print("MISSED:", line)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
