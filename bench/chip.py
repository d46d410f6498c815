"""Measures an accelerator: everything, part by part, or one thing of one device.

    python -m bench.chip                             # the settings here, such as hardware=tpu
    hardware.chip=v5e python -m bench.chip minutes=12                  # all PARTS; bench/chip.sh
    also sets up an environment python -m bench.chip minutes=12 'parts=[attention,fp8]' python -m
    bench.chip attention [--lengths 1024 4096] [--tokens 16384] [--heads 16] [--width 128] python -m
    bench.chip rates [--size 8192] python -m bench.chip rates --chip FILE.yaml

With `minutes` it measures PARTS in order, each in its own process with a time limit. It writes
results immediately: <out>/<part>.json, the part's output in <part>.out and .err, and a Markdown
table in chip.md, which you can paste into an issue. If a part fails, the others still run; start it
again to run missing or failed parts, or name `parts` to measure them even if measured before. On a
CPU the same parts run on small shapes, as a rehearsal.

`attention` times every implementation, forward and backward, with its memory and its error. For
each length, with and without a document mask, it prints a line per value of `training.attention`
that this platform supports, and for GPU kernels a second line with hardware.deterministic. TFLOP/s
count the causal half. `error` is the largest relative difference (in the norm) of result and
gradients from einsum in f32. It is omitted if the scores of all pairs would take more than 2 GiB.
Operands are in bf16.

`rates` prints the rate of a matmul of size × size/2 × 7/4 size, with and without autotuning, and
with other XLA options one at a time. With --chip it writes a file for hardware.chip: it copies the
file in shardwright/cluster/chips of the chip that JAX finds (of the h100 for an unknown chip), and
replaces assumed numbers by measured ones.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from bench.common import first_line, parser_of
from shardlib.shardtypes import i32, typed_shard_map
from shardwright.cluster.chips import Chip, chip_for, chip_of, settings_for
from shardwright.cluster.config import HardwareConfig
from shardwright.cluster.devices import make_mesh
from shardwright.data.untrusted import one_line, read_object
from shardwright.modeling import attention_paths
from shardwright.modeling.masks import CAUSAL, AttentionMask, Mask, Positions, same_document
from shardwright.modeling.model import compute_scope
from shardwright.modeling.weights import act
from shardwright.program.files import write_json, write_whole
from shardwright.program.spec import load_spec

# ---- all parts -----------------------------------------------------------------------------------

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch")
# seconds that must be left to start a part; seconds that an interrupted part gets to exit
LEAST, GRACE = 15, 10
TRAIN = (
    "shardwright train {hardware} data=synthetic training.eval_batches=0 "
    "training.sample_interval=null"
)
TRAIN += (
    " optimizer.warmup_steps=5 paths.root_working_dir={out} paths.model_name={part} --config-name="
)
GPT2 = (
    f"{TRAIN}gpt2_124m mesh.d=-1 model.vocab=50304 training.steps=40 training.microbatches=2 "
    "training.batch_size="
)
GPT2_124M, GPT2_350M = f"{GPT2}64", f"{GPT2}32 model.layers=24 model.d_model=1024 model.heads=16"
# CUDA graphs hide the time of each kernel
PROFILED = "++hardware.compiler_options.xla_gpu_enable_command_buffer="
OTHERS = "bench.throughput --platform {platform} --sizes 270m --rounds 2 --seconds 1.5 --limit 70"
SMALL = "model.layers=2 model.d_model=96 model.vocab=1280 model.bos_id=0"
SMALL += " training.seq_len=64 training.batch_size=4 training.steps=8"
RUN = (
    (r"^(?P<what>plan) +(.+)$", r"\2"),
    (r"^(?P<what>step 1)/\d+  (loss \S+)", r"\2"),
    (r"^step 1  (?P<what>memory)  peak_memory (.+?)  source", r"\2"),
    (
        r"^(?P<what>step (\d+))/\2  ETA \S+  (loss \S+)  speed (\S+ tokens/s(?:  MFU \S+)?)",
        r"\3, \4",
    ),
)
ROW = ((r"^(?P<what>.+?): (.+)$", r"\2"),)
SLOWEST = (
    *RUN,
    (r"^ *([\d.]+%) +(?:[\d.]+% +)?(?P<what>~?\S+:\d+|without a line)\b.*$", r"\1 of the time"),
)
TRAINERS = (
    (
        r"^(?P<what>\S+) +([\d,]+) +[\d,]+ +(?:\S+% +)?([\d,]+) +([\d.]+)",
        r"\2 tokens/s, \3 MiB, compiled in \4 s",
    ),
    (r"^(?P<what>\S+) +(failed: .*)$", r"\2"),
)


class Part(NamedTuple):
    """A measurement, run as a program."""

    name: str
    limit: int  # seconds
    command: str  # arguments of `python -m`; `command_of` fills in the names in braces
    small: str = SMALL  # arguments to add on a CPU
    figures: tuple[tuple[str, str], ...] = RUN  # patterns of output lines, and what to show of each


PARTS = (  # the most useful first
    Part("devices", 60, "bench.chip", "", ROW),
    Part(
        "demo",
        120,
        f"{TRAIN}first_chip model.vocab=1280 training.steps=30 {PROFILED}",
        figures=SLOWEST,
    ),
    Part(
        "attention",
        150,
        "bench.chip attention",
        "--lengths 256 --tokens 512 --heads 2 --width 16",
        ROW,
    ),
    Part("124m", 110, GPT2_124M),
    Part("124m-deterministic", 110, f"{GPT2_124M} hardware.deterministic=true"),
    Part("350m", 120, GPT2_350M),
    Part("350m-deterministic", 120, f"{GPT2_350M} hardware.deterministic=true"),
    Part("matmul", 90, "bench.chip rates", "--size 512", ROW),
    Part("fp8", 110, f"{GPT2_124M} training.fp8=true"),
    Part("chip", 60, "bench.chip rates --chip {out}/{chip}.yaml", "--size 512", ROW),
    Part("others", 240, OTHERS, "--sizes tiny --rounds 1 --seconds 0.2 --limit 200", TRAINERS),
)
NOT_RUN = {"rows": [("not run", "call again")], "failed": True}


def print_settings() -> None:
    """Prints devices, versions and, as the last line, the settings."""
    first = jax.devices()[0]
    found = {package.name for package in importlib.metadata.distributions()}
    installed = {
        x: importlib.metadata.version(x) for x in PACKAGES if x in found
    }  # of several, the one that is imported
    versions = [
        f"Python {platform.python_version()}",
        *(f"{x} {installed[x]}" for x in PACKAGES if x in installed),
    ]
    print(f"devices: {jax.device_count()} x {first.device_kind}")
    print(f"versions: {', '.join([*versions, *first.client.platform_version.splitlines()[-1:]])}")
    print(settings_for(first.device_kind, first.platform))


def hardware_of(out: Path) -> str:
    """Returns the settings that the part `devices` printed, or a guess."""
    found = re.findall(r"^hardware=.*$", _text(out / "devices.out"), re.MULTILINE)
    return found[-1] if found else "hardware=gpu" if shutil.which("nvidia-smi") else "hardware=cpu"


def command_of(part: Part, out: Path) -> list[str]:
    """Returns the arguments of Python that run a part, with `hardware_of`."""
    hardware = hardware_of(out)
    at = {"chip": "h100"} | dict(
        word.removeprefix("hardware.").split("=") for word in hardware.split()
    )
    command = f"{part.command} {part.small if at['hardware'] == 'cpu' else ''}"
    at |= {
        "platform": at["hardware"],
        "hardware": hardware,
        "out": shlex.quote(str(out)),
        "part": part.name,
    }
    return shlex.split(command.format(**at))


def measured(part: Part, out: Path, seconds: float) -> dict[str, Any]:
    """Runs a part for at most `seconds`.

    Returns its rows, and if it failed, with the reason in the last row.
    """
    command = [sys.executable, "-m", *command_of(part, out)]
    logs = [out / f"{part.name}.{x}" for x in ("out", "err")]
    shutil.rmtree(out / part.name, ignore_errors=True)  # left by a failed run
    with logs[0].open("w") as stdout, logs[1].open("w") as stderr:
        # In a new session, so that signals also reach its children.
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            why = f"exit status {code}" if (code := process.wait(seconds)) else ""
        except subprocess.TimeoutExpired:
            why = f"its limit of {seconds:.0f} s ended it"
        finally:  # remaining processes would occupy the device's memory
            for kill, grace in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, kill)
                    process.wait(grace)
    shutil.rmtree(out / part.name / "checkpoints", ignore_errors=True)  # gigabytes
    text = _text(logs[0])
    rows = [
        (m["what"], m.expand(shown))
        for row, shown in part.figures
        for m in re.finditer(row, text, re.MULTILINE)
    ]
    if why or not rows:
        said = [line for line in (text + _text(logs[1])).splitlines() if line.strip()] or [
            "no message"
        ]
        errors = [
            line for line in said if re.search(r"Error\b|Exception\b|RESOURCE_EXHAUSTED", line)
        ] or said
        message = "" if why.startswith("its limit") else f": {one_line(errors[-1], 200)}"
        rows.append(("failed", f"{why or 'no figures in its output'}{message}"))
    return {"rows": rows, "failed": rows[-1][0] == "failed"}


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def table_of(results: Mapping[str, Mapping[str, Any]], hardware: str) -> str:
    """Writes the Markdown table; its head calls results on a CPU a rehearsal."""
    rows = [(name, *map(str, row)) for name, result in results.items() for row in result["rows"]]
    result = "rehearsal" if hardware.startswith("hardware=cpu") else "result"
    lines = [f"| part | measured | {result} |", "|---|---|---|"]
    return (
        "\n".join(
            [*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)]
        )
        + "\n"
    )


def measure(minutes: float, out: Path, chosen: Sequence[str]) -> None:
    """Measures the parts that are missing or failed, or those that are chosen."""
    deadline = time.monotonic() + 60 * minutes
    results = {}
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        file = out / f"{part.name}.json"
        left = deadline - time.monotonic()
        result = NOT_RUN
        with contextlib.suppress(OSError, ValueError):
            result = read_object(file, {"rows": [[str]], "failed": bool})
        if (part.name in chosen if chosen else result["failed"]) and left > LEAST:
            print(f"{part.name}, {min(part.limit, left):.0f} s at most", flush=True)
            result = measured(part, out, min(part.limit, left))
            write_json(file, result)
            print("".join(f"  {what}: {figures}\n" for what, figures in result["rows"]), flush=True)
        results[part.name] = result
        table = table_of(results, hardware_of(out))
        write_whole(out / "chip.md", table)
    missing = [name for name, result in results.items() if result["failed"]]
    print(
        f"\n{table}\nTable: {out}/chip.md"
        + f"\nCall again for {', '.join(missing)}." * bool(missing)
    )


# ---- attention -----------------------------------------------------------------------------------

RULES = {"documents": CAUSAL, "one document": CAUSAL.without(same_document)}
DETERMINISTIC = HardwareConfig(deterministic=True).options
ROUNDS, CALLS = 5, 5
LARGEST = 2**31
"""The error is computed if the f32 scores take at most this many bytes."""


def best_seconds(call: Callable[..., Any], *arguments: jax.Array) -> float:
    """Returns the seconds per call, the best of ROUNDS rounds of CALLS calls, after one warm-up
    call.
    """
    jax.block_until_ready(call(*arguments))
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([call(*arguments) for _ in range(CALLS)])
        seconds.append((time.perf_counter() - start) / CALLS)
    return min(seconds)


def operands(length: int, tokens: int, heads: int, width: int) -> tuple[list[jax.Array], jax.Array]:
    """Draws q, k, v and a gradient in bf16, and document ids, with four documents per sequence on
    average.
    """
    rng = np.random.default_rng(0)
    rows = max(1, tokens // length)
    shapes = (heads, 1, width), (heads, width), (heads, width), (heads, 1, width)
    drawn = [
        jnp.asarray(rng.standard_normal((rows, length, *shape), np.float32), jnp.bfloat16)
        for shape in shapes
    ]
    starts = rng.random((rows, length)) < 4 / length
    return drawn, jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)


def with_gradients(attend: Callable, pattern: AttentionMask) -> Callable:
    """Returns a function of q, k, v, a gradient and documents that returns the result and the three
    gradients.
    """

    @typed_shard_map
    def run(
        q: act["B/r/d L K/t Q D"],
        k: act["B/r/d L K/t D"],
        v: act["B/r/d L K/t D_v"],
        g: act["B/r/d L K/t Q D_v"],
        document: i32["B/r/d L"],
    ) -> tuple[
        act["B/r/d L K/t Q D_v"],
        act["B/r/d L K/t Q D"],
        act["B/r/d L K/t D"],
        act["B/r/d L K/t D_v"],
    ]:
        index = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        positions = Positions(index, index, document)
        out, vjp = jax.vjp(
            lambda q, k, v: attend(q, k, v, Mask(pattern, positions, positions)), q, k, v
        )
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
    """Returns a compiled implementation, its seconds and FLOP/s.

    Raises what it, the compiler or the device raises.
    """
    attention_paths.choose(path, pattern, given[0])
    attend = (
        load_spec().attention
        if path == "einsum"
        else functools.partial(attention_paths.run, path, block=None)
    )
    with compute_scope("bf16"):
        compiled = (
            jax.jit(with_gradients(attend, pattern)).lower(*given).compile(compiler_options=options)
        )
    rows, length, heads, _, width = given[0].shape
    seconds = best_seconds(compiled, *given)
    return compiled, seconds, 3.5 * 4 * rows * heads * length**2 * width / 2 / seconds


def show(
    length: int, documents: str, pattern: AttentionMask, tokens: int, heads: int, width: int
) -> None:
    """Prints a line for each implementation."""
    here = jax.devices()[0].platform
    paths = [
        path
        for path in attention_paths.PATHS
        if attention_paths.KERNELS.get(path, here) == here and path != "auto"
    ]
    kernels = [(path, {}) for path in paths]
    kernels += [
        (path, DETERMINISTIC) for path in paths if here == "gpu" and path in attention_paths.KERNELS
    ]
    drawn, document = operands(length, tokens, heads, width)
    expected = None
    if 4 * length * max(tokens, length) * heads <= LARGEST:
        with compute_scope("f32"), jax.default_matmul_precision("highest"):
            expected = jax.jit(with_gradients(load_spec().attention, pattern))(
                *map(jnp.float32, drawn), document
            )
    for path, options in kernels:
        try:
            compiled, seconds, rate = timed(path, pattern, [*drawn, document], options)
            error = (
                ""
                if expected is None
                else f", error {error_of(compiled(*drawn, document), expected):.1e}"
            )
            used: Any = compiled.memory_analysis()
            memory = used.temp_size_in_bytes / 2**30
            figures = f"{1e3 * seconds:.3g} ms, {rate / 1e12:.3g} TFLOP/s, {memory:.2f} GiB{error}"
        except Exception as error:  # if one implementation fails, the others still run
            figures = first_line(error)
        print(
            f"{path}{', deterministic' * bool(options)}, {length} tokens, {documents}: {figures}",
            flush=True,
        )


# ---- rates ---------------------------------------------------------------------------------------

OPTIONS = {
    "autotuned": {},
    "not autotuned": {"xla_gpu_autotune_level": 0},
    "deterministic": {"xla_gpu_exclude_nondeterministic_ops": True},
    "without Triton": {"xla_gpu_enable_triton_gemm": False},
}
SOURCE = "measured by bench.chip rates with jax"


def product_s(m: int, k: int, n: int, options: dict | None = None) -> float:
    """Returns the seconds of a bf16 matmul."""
    a, b = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate([(m, k), (k, n)])
    )
    return best_seconds(jax.jit(jnp.matmul).lower(a, b).compile(compiler_options=options), a, b)


def measured_fields(chip: Chip, size: int) -> dict[str, float]:
    """Returns the fields of the chip that one device can measure."""
    shape = size, size // 2, size * 7 // 4
    x = jnp.zeros((size, size), jnp.float32)
    moved = 2 * x.nbytes / best_seconds(jax.jit(lambda x: x + 1), x)
    small = jnp.zeros((8, 8), jnp.float32)
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda _, x: jnp.sin(x), x))
    kernels = 1000
    found = {
        "matmul_share": chip.matmul_share * chip.matmul_s(1, *shape, "bf16") / product_s(*shape)
    }
    found |= {
        "memory_share": moved / chip.memory_bandwidth,
        "launch_s": best_seconds(chain, small) / kernels,
    }
    with jax.set_mesh(make_mesh(jax.devices()[:1], d=1)):
        drawn, document = operands(size // 2, 2 * size, heads=16, width=128)
        _, _, rate = timed(
            attention_paths.choose("auto", CAUSAL, drawn[0]), CAUSAL, [*drawn, document]
        )
    found |= {"attention_share": rate / chip.peak["bf16"]}
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def described(size: int) -> dict[str, Any]:
    """Returns the content of the chip file for this device."""
    device = jax.devices()[0]
    known = chip_for(device.device_kind)
    source = f"{SOURCE} {jax.__version__}"
    chip = known or dataclasses.replace(chip_of("h100"), products=None)
    found: dict[str, Any] = dict(measured_fields(chip, size))
    if known is None or known.platform == "cpu":
        # whose peak is unknown: take the rate of its matmuls
        rate = chip.peak["bf16"] * found["matmul_share"]
        moved = chip.memory_bandwidth * found["memory_share"]
        limit = (device.memory_stats() or {}).get("bytes_limit")
        found |= {
            "title": device.device_kind,
            "platform": device.platform,
            "kinds": [device.device_kind],
        }
        found |= {"peak": {"bf16": rate}, "memory_bandwidth": moved} | (
            {"memory_bytes": float(limit)} if limit else {}
        )
        found |= {"products": None, "collectives": None, "matmul_share": 1.0, "memory_share": 1.0}
        found |= {"attention_share": found["attention_share"] * chip.peak["bf16"] / rate}
    fields = {name: {"value": value, "source": source} for name, value in found.items()}
    return {"like": known.name if known else "h100", **fields}


def show_products(size: int) -> None:
    """Prints a line for each of OPTIONS."""
    m, k, n = size, size // 2, size * 7 // 4
    for name, options in OPTIONS.items():
        try:
            rate = f"{2 * m * k * n / product_s(m, k, n, options) / 1e12:.3g} TFLOP/s"
        except Exception as error:
            rate = first_line(error)
        print(f"matmul {m} × {k} × {n}, {name}: {rate}", flush=True)


def write_chip(size: int, file: Path) -> None:
    """Writes the chip file for this device, and prints its numbers."""
    fields = described(size)
    file.write_text(yaml.safe_dump(fields, sort_keys=False, width=120))
    chip_of(str(file))  # raises if it is invalid
    own = {name: field["value"] for name, field in fields.items() if name != "like"}
    own |= {"peak": own.get("peak", {}).get("bf16")}
    shown = [f"{name} {value:.3g}" for name, value in own.items() if isinstance(value, float)]
    print(f"{file.name}, like {fields['like']}: {', '.join(shown)}")


# ---- the command line ----------------------------------------------------------------------------


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses a command line. Of `all`, which is its default, options are name=value."""
    whole = parser_of(__doc__)
    commands = whole.add_subparsers(dest="command")
    every = commands.add_parser(
        "all", help="prints the settings, or measures all parts (the default)"
    )
    every.add_argument(
        "--minutes", type=float, help="for all parts; without, only prints the settings"
    )
    every.add_argument(
        "--out", type=Path, default=Path("runs/chip"), help="directory of the results"
    )
    every.add_argument("--parts", default="", help="to measure, even if measured before")
    attention = commands.add_parser("attention", help="times every implementation")
    attention.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    for name, default in (("tokens", 16384), ("heads", 16), ("width", 128)):
        attention.add_argument(f"--{name}", type=int, default=default)
    rates = commands.add_parser(
        "rates", help="measures matmuls, or writes a file for hardware.chip"
    )
    rates.add_argument("--size", type=int, default=8192, help="a multiple of 4")
    rates.add_argument(
        "--chip", type=Path, metavar="FILE", help="file to write, with a name that ends in .yaml"
    )
    if not arguments or "=" in arguments[0]:
        arguments = ["all", *(f"--{word}" for word in arguments)]
    args = whole.parse_args(arguments)
    if args.command == "all":
        args.parts = [name for name in args.parts.strip("[]").split(",") if name]
        if wrong := {*args.parts} - {part.name for part in PARTS}:
            every.error(
                f"no part is {min(wrong)}; choose of {', '.join(part.name for part in PARTS)}"
            )
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    args = parsed(sys.argv[1:] if arguments is None else arguments)
    try:
        if args.command == "attention":
            with jax.set_mesh(make_mesh(jax.devices()[:1], d=1)):
                for length, (documents, pattern) in itertools.product(args.lengths, RULES.items()):
                    show(length, documents, pattern, args.tokens, args.heads, args.width)
        elif args.command == "rates":
            write_chip(args.size, args.chip) if args.chip else show_products(args.size)
        elif args.minutes is None:
            print_settings()
        else:
            measure(args.minutes, args.out.absolute(), args.parts)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running part
    main()
