"""Compares the measured time of each GPU kernel in a run's training step with XLA's prediction.

    python -m train --config-name=<name> +hardware.compiler_options.xla_gpu_collect_cost_model_stats=true
    python -m tools.chip.kernels runs/<name> --chip h100

Reads the step's HLO text and the trace of the run's profiled steps, and needs no device. Prints, for each kind of
kernel and then for the ROWS slowest kernels, per step and device:

    measured     ms, mean over devices and profiled steps; for a collective including the wait for other devices
    predicted    ms, by tools.chip.clock; for a collective without contention. Only XLA for GPUs predicts
    ratio        measured / predicted
"""

import collections
import sys
from pathlib import Path

import jax

from shardwright.cluster.chips import chip_of, known
from shardwright.data.untrusted import read_object
from shardwright.inspect.compiled import hlo, trace
from shardwright.inspect.compiled.operations import works_of
from shardwright.inspect.compiled.step import describe
from shardwright.inspect.compiled.table import CompiledStep
from shardwright.run.profile import MODULE
from shardwright.tools.chip.clock import ATTENTION, Clock, attention_matmuls
from shardwright.tools.chip.common import parser_of

OPTION = "hardware.compiler_options.xla_gpu_collect_cost_model_stats=true"
ROWS = 40
Row = tuple[str, float, float, str]
"""Kind, measured ms, predicted ms, and the kernel with its source line."""


def measured(file: Path, table: CompiledStep) -> dict[str, float]:
    """Returns seconds per operation, averaged over devices and steps. Raises ValueError if the trace has none."""
    if not (steps := read_object(file.with_name(trace.LINES)).get("steps")):
        raise ValueError(f"{file.with_name(trace.LINES)} has no number of steps: train again with this version.")
    devices = trace.devices_of(jax.profiler.ProfileData.from_file(str(file)), MODULE, steps)
    found = collections.defaultdict[str, float](float)
    for device in devices.values():
        for (start, end), name in device.operations:
            if table.line_of.get(name, "") is not None:  # a loop's time is counted in its body
                found[name] += (end - start) / 1e9 / steps / len(devices)
    if not found:
        raise ValueError(f"{file} has no operation of the step")
    return found


def kinds(program: hlo.Program, table: CompiledStep) -> dict[str, str]:
    """Returns the kind of each operation: matmuls, attention, collectives or the rest."""
    found = {}
    for computation in program.computations.values():
        for i in computation.instructions.values():
            products = any(work.kind == "matmul" for work in works_of(program, computation, i))
            kind = "products" if products else "attention" if attention_matmuls(i) else "the rest"
            found[i.name] = "collectives" if i.name in table.communicating else kind
    return found


def rows(run: Path, chip: str) -> list[Row]:
    """Returns the operations of a run's step, the slowest (measured or predicted) first."""
    found = []
    for pattern in ("training_step_optimized_hlo_*.txt", "plugins/profile/*/*.xplane.pb"):
        if not (files := sorted(run.glob(pattern))):
            raise ValueError(f"{run} has no {pattern}: give the directory of a run that was profiled.")
        found.append(files[-1])
    text, profile = found
    program = hlo.parse(content := text.read_text())
    table = describe(program)
    predicted = collections.defaultdict[str, float](float)
    if "reification_cost" in content:
        clock = Clock(program, table, chip_of(chip), {}, ATTENTION)
        clock.seconds(program.entry)
        predicted = clock.kernels
    else:
        print(f"{text} has no predictions of XLA: train on a GPU, with +{OPTION}.", file=sys.stderr)
    took, kind = measured(profile, table), kinds(program, table)
    names = sorted(
        took.keys() | {name for name in predicted if predicted[name] > 0},
        key=lambda name: -max(took[name], predicted[name]),
    )
    return [
        (
            kind.get(name, "not in the text"),
            1e3 * took[name],
            1e3 * predicted[name],
            f"{name}  {table.line_of.get(name) or ''}".rstrip(),
        )
        for name in names
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("--chip", choices=known(), required=True, help="on which it ran")
    args = parser.parse_args(arguments)
    try:
        found = rows(args.run, args.chip)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    took, predicted = (collections.defaultdict[str, float](float) for _ in range(2))
    for kind, *ms, _ in found:
        took[kind] += ms[0]
        predicted[kind] += ms[1]
    print(f"{'measured':>9} {'predicted':>10} {'ratio':>8}  ms of a device in a step")
    for kind, measured_ms, told_ms, label in [
        *((kind, took[kind], predicted[kind], "all") for kind in took),
        *found[:ROWS],
    ]:
        ratio = f"{measured_ms / told_ms:8.2f}" if told_ms else f"{'-':>8}"
        print(f"{measured_ms:9.3f} {told_ms:10.3f} {ratio}  {kind}: {label}")


if __name__ == "__main__":
    main()
