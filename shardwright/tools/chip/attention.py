"""Times every attention implementation on one device, forward and backward, with its memory and its error.

    python -m tools.chip.attention [--lengths 1024 4096] [--tokens 16384] [--heads 16] [--width 128]

For each length, with and without a document mask, it prints a line per value of `training.attention` that this platform
supports, and for GPU kernels a second line with hardware.deterministic. TFLOP/s count the causal half. `error` is the
largest relative difference (in the norm) of result and gradients from einsum in f32. It is omitted if the scores of all
pairs would take more than 2 GiB. Operands are in bf16.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.shardtypes import i32, typed_shard_map
from shardwright.cluster.config import HardwareConfig
from shardwright.cluster.devices import make_mesh
from shardwright.modeling import attention_paths
from shardwright.modeling.masks import CAUSAL, AttentionMask, Mask, Positions, same_document
from shardwright.modeling.model import compute_scope
from shardwright.modeling.weights import act
from shardwright.run.spec import load_spec
from shardwright.tools.chip.common import first_line, parser_of

RULES = {"documents": CAUSAL, "one document": CAUSAL.without(same_document)}
DETERMINISTIC = HardwareConfig(deterministic=True).options
ROUNDS, CALLS = 5, 5
LARGEST = 2**31
"""The error is computed if the f32 scores take at most this many bytes."""


def best_seconds(call: Callable[..., Any], *arguments: jax.Array) -> float:
    """Returns the seconds per call, the best of ROUNDS rounds of CALLS calls, after one warm-up call."""
    jax.block_until_ready(call(*arguments))
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([call(*arguments) for _ in range(CALLS)])
        seconds.append((time.perf_counter() - start) / CALLS)
    return min(seconds)


def operands(length: int, tokens: int, heads: int, width: int) -> tuple[list[jax.Array], jax.Array]:
    """Draws q, k, v and a gradient in bf16, and document ids, with four documents per sequence on average."""
    rng = np.random.default_rng(0)
    rows = max(1, tokens // length)
    shapes = (heads, 1, width), (heads, width), (heads, width), (heads, 1, width)
    drawn = [jnp.asarray(rng.standard_normal((rows, length, *shape), np.float32), jnp.bfloat16) for shape in shapes]
    starts = rng.random((rows, length)) < 4 / length
    return drawn, jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)


def program(path: str, pattern: AttentionMask) -> Callable:
    """Returns a function of q, k, v, a gradient and documents that returns the result and the three gradients."""

    @typed_shard_map
    def run(
        q: act["B/r/d L K/t Q D"],
        k: act["B/r/d L K/t D"],
        v: act["B/r/d L K/t D"],
        g: act["B/r/d L K/t Q D"],
        document: i32["B/r/d L"],
    ) -> tuple[act["B/r/d L K/t Q D"], act["B/r/d L K/t Q D"], act["B/r/d L K/t D"], act["B/r/d L K/t D"]]:
        index = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        positions = Positions(index, index, document)
        attend = load_spec().attention if path == "einsum" else functools.partial(attention_paths.run, path, block=None)
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, Mask(pattern, positions, positions)), q, k, v)
        return out, *vjp(g)

    return run


def error_of(found: tuple, expected: tuple) -> float:
    """Returns the largest relative difference (in the norm) of arrays from the expected ones."""
    return max(_norm(jnp.float32(a) - b) / _norm(b) for a, b in zip(found, expected, strict=True))


def _norm(x: jax.Array) -> float:
    return float(jnp.sqrt(jnp.sum(jnp.square(x))))


def timed(
    path: str, pattern: AttentionMask, given: list, options: dict | None = None
) -> tuple[jax.stages.Compiled, float, float]:
    """Returns a compiled implementation, its seconds and FLOP/s. Raises what it, the compiler or the device raises."""
    attention_paths.choose(path, pattern, given[0])
    with compute_scope("bf16"):
        compiled = jax.jit(program(path, pattern)).lower(*given).compile(compiler_options=options)
    rows, length, heads, _, width = given[0].shape
    seconds = best_seconds(compiled, *given)
    return compiled, seconds, 3.5 * 4 * rows * heads * length**2 * width / 2 / seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    for name, default in (("tokens", 16384), ("heads", 16), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with jax.set_mesh(make_mesh(jax.devices()[:1], d=1)):
        for length, (documents, pattern) in itertools.product(args.lengths, RULES.items()):
            show(length, documents, pattern, args.tokens, args.heads, args.width)


def show(length: int, documents: str, pattern: AttentionMask, tokens: int, heads: int, width: int) -> None:
    """Prints a line for each implementation."""
    here = jax.devices()[0].platform
    paths = [
        path for path in attention_paths.PATHS if attention_paths.KERNELS.get(path, here) == here and path != "auto"
    ]
    kernels = [(path, {}) for path in paths]
    kernels += [(path, DETERMINISTIC) for path in paths if here == "gpu" and path in attention_paths.KERNELS]
    drawn, document = operands(length, tokens, heads, width)
    expected = None
    if 4 * length * max(tokens, length) * heads <= LARGEST:
        with compute_scope("f32"), jax.default_matmul_precision("highest"):
            expected = jax.jit(program("einsum", pattern))(*map(jnp.float32, drawn), document)
    for path, options in kernels:
        try:
            compiled, seconds, rate = timed(path, pattern, [*drawn, document], options)
            error = "" if expected is None else f", error {error_of(compiled(*drawn, document), expected):.1e}"
            used: Any = compiled.memory_analysis()
            memory = used.temp_size_in_bytes / 2**30
            figures = f"{1e3 * seconds:.3g} ms, {rate / 1e12:.3g} TFLOP/s, {memory:.2f} GiB{error}"
        except Exception as error:  # if one implementation fails, the others still run
            figures = first_line(error)
        print(f"{path}{', deterministic' * bool(options)}, {length} tokens, {documents}: {figures}", flush=True)


if __name__ == "__main__":
    main()
