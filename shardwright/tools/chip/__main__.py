"""Prints the settings for this machine's devices, such as hardware=tpu hardware.chip=v5e, or measures one of them.

    python -m tools.chip
    python -m tools.chip minutes=12
    python -m tools.chip minutes=12 'parts=[attention,fp8]'

With `minutes` it measures PARTS in order, each in its own process with a time limit. It writes results immediately:
<out>/<part>.json, the part's output in <part>.out and .err, and a Markdown table in chip.md, which you can paste into
an issue. If a part fails, the others still run; start it again to run missing or failed parts. On a CPU the same parts
run on small shapes, as a rehearsal. The part `others` compares with other trainers. It is in bench/, so it is left out
unless you start in a clone.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from shardwright.cluster.chips import chip_for
from shardwright.data.checks import a_path, above_0, check_choice
from shardwright.data.untrusted import one_line, read_object
from shardwright.run.files import write_json, write_whole
from shardwright.settings.program import run_program
from shardwright.settings.words import say

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch")
LEAST, GRACE = 15, 10  # seconds that must be left to start a part; seconds that an interrupted part gets to exit
TRAIN = "shardwright train {hardware} data=synthetic training.eval_batches=0 training.sample_interval=null"
TRAIN += " optimizer.warmup_steps=5 paths.root_working_dir={out} paths.model_name={part} --config-name="
GPT2 = f"{TRAIN}gpt2_124m mesh.d=-1 model.vocab=50304 training.steps=40 training.microbatches=2 training.batch_size="
GPT2_124M, GPT2_350M = f"{GPT2}64", f"{GPT2}32 model.layers=24 model.d_model=1024 model.heads=16"
PROFILED = "++hardware.compiler_options.xla_gpu_collect_cost_model_stats=true"
PROFILED += " ++hardware.compiler_options.xla_gpu_enable_command_buffer="  # CUDA graphs hide the time of each kernel
OTHERS = "bench.throughput --platform {platform} --sizes 270m --rounds 2 --seconds 1.5 --limit 70"
SMALL = "model.layers=2 model.d_model=96 model.vocab=1280 model.bos_id=0"
SMALL += " training.seq_len=64 training.batch_size=4 training.steps=8"
RUN = (
    (r"^(?P<what>plan) +(.+)$", r"\2"),
    (r"^(?P<what>step 1)/\d+  (loss \S+)", r"\2"),
    (r"^step 1  (?P<what>memory)  peak_memory (.+?)  source", r"\2"),
    (r"^(?P<what>step (\d+))/\2  ETA \S+  (loss \S+)  speed (\S+ tokens/s(?:  MFU \S+)?)", r"\3, \4"),
)
ROW = ((r"^(?P<what>.+?): (.+)$", r"\2"),)
KIND = ((r"^ *([\d.]+) +([\d.]+) +\S+  (?P<what>.+): all$", r"\1 ms a step, predicted \2"),)
TRAINERS = (
    (r"^(?P<what>\S+) +([\d,]+) +[\d,]+ +(?:\S+% +)?([\d,]+) +([\d.]+)", r"\2 tokens/s, \3 MiB, compiled in \4 s"),
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
    Part("devices", 60, "shardwright.tools.chip", "", ROW),
    Part("demo", 120, f"{TRAIN}first_chip model.vocab=1280 training.steps=30 {PROFILED}"),
    Part("attention", 150, "shardwright.tools.chip.attention", "--lengths 256 --tokens 512 --heads 2 --width 16", ROW),
    Part("124m", 110, GPT2_124M),
    Part("124m-deterministic", 110, f"{GPT2_124M} hardware.deterministic=true"),
    Part("350m", 120, GPT2_350M),
    Part("350m-deterministic", 120, f"{GPT2_350M} hardware.deterministic=true"),
    Part("matmul", 90, "shardwright.tools.chip.rates", "--size 512", ROW),
    Part("fp8", 110, f"{GPT2_124M} training.fp8=true"),
    Part("profile", 60, "shardwright.tools.chip.kernels {out}/demo --chip {chip}", "", KIND),
    Part("chip", 60, "shardwright.tools.chip.rates --chip {out}/{chip}.yaml", "--size 512", ROW),
    Part("others", 240, OTHERS, "--sizes tiny --rounds 1 --seconds 0.2 --limit 200", TRAINERS),
)
NOT_RUN = {"rows": [("not run", "call again")], "failed": True}
LEFT_OUT = {"rows": [("left out", "bench/ is not here: start in a clone")], "failed": False}


@dataclass
class Settings:
    """Settings of the program."""

    minutes: float | None = above_0(None)
    """Minutes for all parts; start again for the remaining ones. Null: only prints the settings."""
    out: str = a_path("runs/chip")
    """Directory of the results."""
    parts: list[str] | None = None
    """Parts to measure, even if measured before. Null: all that are missing or failed."""


def settings_for(kind: str, platform: str) -> str:
    """Returns the settings for devices that JAX calls `kind`, without hardware.chip if that chip is unknown."""
    chip = chip_for(kind)
    return f"hardware={platform}" + (f" hardware.chip={chip.name}" if chip else "")


def print_settings() -> None:
    """Prints devices, versions and, as the last line, the settings."""
    first = jax.devices()[0]
    found = {package.name for package in importlib.metadata.distributions()}
    installed = {
        x: importlib.metadata.version(x) for x in PACKAGES if x in found
    }  # of several, the one that is imported
    versions = [f"Python {platform.python_version()}", *(f"{x} {installed[x]}" for x in PACKAGES if x in installed)]
    say(f"devices: {jax.device_count()} x {first.device_kind}")
    say(f"versions: {', '.join([*versions, *first.client.platform_version.splitlines()[-1:]])}")
    say(settings_for(first.device_kind, first.platform))


def hardware_of(out: Path) -> str:
    """Returns the settings that the part `devices` printed, or a guess."""
    found = re.findall(r"^hardware=.*$", _text(out / "devices.out"), re.MULTILINE)
    return found[-1] if found else "hardware=gpu" if shutil.which("nvidia-smi") else "hardware=cpu"


def command_of(part: Part, out: Path) -> list[str]:
    """Returns the arguments of Python that run a part, with `hardware_of`."""
    hardware = hardware_of(out)
    at = {"chip": "h100"} | dict(word.removeprefix("hardware.").split("=") for word in hardware.split())
    command = f"{part.command} {part.small if at['hardware'] == 'cpu' else ''}"
    at |= {"platform": at["hardware"], "hardware": hardware, "out": shlex.quote(str(out)), "part": part.name}
    return shlex.split(command.format(**at))


def measured(part: Part, out: Path, seconds: float) -> dict[str, Any]:
    """Runs a part for at most `seconds`. Returns its rows, and if it failed, with the reason in the last row."""
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
    rows = [(m["what"], m.expand(shown)) for row, shown in part.figures for m in re.finditer(row, text, re.MULTILINE)]
    if why or not rows:
        said = [line for line in (text + _text(logs[1])).splitlines() if line.strip()] or ["no message"]
        errors = [line for line in said if re.search(r"Error\b|Exception\b|RESOURCE_EXHAUSTED", line)] or said
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
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)]) + "\n"


def run(config: Settings) -> None:
    """Prints the settings, or measures."""
    for name in config.parts or ():
        check_choice("parts", name, [part.name for part in PARTS])
    if config.minutes is None:
        return print_settings()
    # In a process of its own, because devices that this one started would be missing in the parts.
    code = "from shardwright.cluster.devices import unused_gpus; print(unused_gpus() or '')"
    if unused := subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip():
        raise ValueError(unused)
    out = Path(config.out).absolute()
    deadline = time.monotonic() + 60 * config.minutes
    results = {}
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        file = out / f"{part.name}.json"
        left = deadline - time.monotonic()
        result = NOT_RUN
        with contextlib.suppress(OSError, ValueError):
            result = read_object(file, {"rows": [[str]], "failed": bool})
        if part.command == OTHERS and not Path("bench/throughput").exists():
            result = LEFT_OUT
        elif (result["failed"] if config.parts is None else part.name in config.parts) and left > LEAST:
            say(f"{part.name}, {min(part.limit, left):.0f} s at most", flush=True)
            result = measured(part, out, min(part.limit, left))
            write_json(file, result)
            say("".join(f"  {what}: {figures}\n" for what, figures in result["rows"]), flush=True)
        results[part.name] = result
        table = table_of(results, hardware_of(out))
        write_whole(out / "chip.md", table)
    missing = [name for name, result in results.items() if result["failed"]]
    say(f"\n{table}\nTable: {out}/chip.md" + f"\nCall again for {', '.join(missing)}." * bool(missing))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running part
    run_program("chip", Settings, run)
