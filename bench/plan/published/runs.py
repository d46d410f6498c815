"""Runs of others: the rows of a table of measured runs as configurations of ours, and their plans.

Two tables are known by their columns: runs of trainers with their settings (COLUMNS), and vTrain's
(VTRAIN). A row becomes a configuration of ours, whose step is traced and put on its chip.
trainers.yaml has what each trainer computes.
"""

import collections
import csv
import dataclasses
import functools
import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import yaml

from shardwright.cluster.chips import Chip, chip_of
from shardwright.cluster.config import HardwareConfig, MeshConfig
from shardwright.data.loader import DataConfig
from shardwright.data.untrusted import one_line, read_text
from shardwright.inspect.operation import Operation
from shardwright.inspect.plan.plan import Plan, plan_of
from shardwright.inspect.plan.step import PlannedStep
from shardwright.inspect.planning import planned_step
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import ModelConfig
from shardwright.models import gpt2
from shardwright.optimizers.config import OptimizerConfig
from shardwright.program.checks import check_config
from shardwright.program.config import Config, PathsConfig, PipelineConfig, TrainingConfig
from shardwright.program.flops import flops_of_model

COLUMNS = (
    *(
        "id",
        "source",
        "model",
        "chips",
        "mesh",
        "sequences_per_data_shard",
        "accumulation",
        "seq_len",
        "precision",
    ),
    *("recompute", "flops", "step_s", "tokens_per_s_per_chip", "mfu_percent", "memory_gb"),
)
"""Columns of a table of runs. Its last four are measured, and may be empty."""
VTRAIN = {
    "chips": "# GPUs", "batch": "global batch", "sequences": "micro batch", "width": "hidden size",
    "heads": "attention heads", "layers": "# layers",
    "seq_len": "sequence length", "t": "tensor parallelism",
    "d": "data parallelism", "p": "pipeline parallelism", "ms": "iteration time (ms)",
}  # fmt: skip
"""Columns of vTrain's table (github.com/VIA-Research/vTrain, data/)."""
ADDED = (
    "predicted_step_s",
    "predicted_tokens_per_s_per_chip",
    "predicted_mfu_percent",
    "predicted_memory_gb",
)
"""Columns that are added. Gigabytes are 2**30 bytes, as PyTorch's trainers print them."""
KNOWN = {
    "L8": "32/4096/32/8/14336/128256",
    "L70": "80/8192/64/8/28672/128256",
    "L405": "126/16384/128/8/53248/128256",
}
"""Models with a name: layers, width, heads, key/value heads, width of the MLP and vocabulary."""
SCHEDULE = "gpipe"
"""Our steps wait for all stages in each tick. Then gpipe takes the time that 1F1B takes where
stages do not wait."""
EAGER = {"layer_s": 3e-3}
"""Constants of a trainer whose host starts each kernel: about 3 ms for those of a layer and
microbatch, which is what vTrain's single-node rows have beside a roofline."""
HOPPER = ("h100", "h100_nvl", "h100_pcie", "h200", "h200_nvl", "gh200")
MMA_SYNC = 0.629
"""Rate of mma.sync, which attention kernels from before Hopper use, relative to Hopper's own wgmma
(arXiv 2402.13499)."""
MOST = 2**14
"""Most microbatches times stages of a pipeline: its schedule is written out."""


class Run(NamedTuple):
    """A row that was read.

    Attributes:
        name: of the row, for messages.
        trainer: its name in trainers.yaml.
        group: rows of one group are ranked, and are held out, together.
        chip: kind of its devices, apart from what calibration fits.
        constants: fields of the Chip that differ for its trainer: EAGER, or what calibration found.
        config, sizes: settings of ours, and devices along p, r, d, c and t.
        again: shares of products and attention that the backward pass computes again, beside what
            `config` says.
        chunks: of layers, that each stage of its pipeline has.
        saved: share that it keeps of what `config` saves for the backward pass.
        eager: whether each operation is a kernel of its own.
        flops: FLOPs a token that its MFU counts.
        step_s, memory_gb: measured; None where they are not.
    """

    name: str
    trainer: str
    group: tuple[str, ...]
    chip: Chip
    constants: Mapping[str, float]
    config: Config
    sizes: Mapping[str, int]
    again: Mapping[str, float]
    saved: float
    chunks: int
    eager: bool
    flops: float
    step_s: float | Any = None
    memory_gb: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.training.batch_size * self.config.training.seq_len

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    def mfu(self, step_s: float) -> float:
        """Model FLOPs utilization in percent, as the trainer counts it."""
        return 100 * self.flops * self.tokens / step_s / self.devices / self.chip.peak["bf16"]


class Table(NamedTuple):
    """A table of runs: its header, its rows as they are, and for each row the Run or the reason why
    it is none.
    """

    header: list[str]
    rows: list[list[str]]
    runs: list[Run | str]


# ---- reading -------------------------------------------------------------------------------------


@functools.cache
def trainers() -> dict[str, Any]:
    """The content of trainers.yaml."""
    return yaml.safe_load(read_text(Path(__file__).parent / "trainers.yaml"))


def read(path: str) -> Table:
    """The table in a file.

    Raises ValueError for one that is neither of the two, naming a column that it lacks.
    """
    try:
        lines = [row for row in csv.reader(io.StringIO(read_text(path)), strict=True) if row]
    except csv.Error as error:
        raise ValueError(f"{path} is not a table: {error}. Give a CSV file.") from None
    header = [name.strip() for name in (lines or [[]])[0]]
    rows = lines[1:]
    is_vtrain = bool({VTRAIN["chips"], VTRAIN["width"]} & set(header))
    needed = list(VTRAIN.values()) if is_vtrain else list(COLUMNS)
    if missing := [name for name in needed if header.count(name) != 1]:
        how = "twice the" if missing[0] in header else "no"
        raise ValueError(
            f"{path} has {how} column {missing[0]!r}; such a table has the columns "
            f"{', '.join(needed)}."
        )
    # they are there if it was printed here
    kept = [i for i, name in enumerate(header) if name not in ADDED]
    runs = [_run_or_reason(number, header, row, is_vtrain) for number, row in enumerate(rows, 2)]
    shown = [
        [row[i] if i < len(row) else "" for i in kept] for row in rows
    ]  # as many as the header, of a short row too
    return Table([header[i] for i in kept], shown, runs)


def _run_or_reason(number: int, header: list[str], row: list[str], is_vtrain: bool) -> Run | str:
    name = f"row {number}"
    try:
        if len(row) != len(header):
            raise ValueError(f"it has {len(row)} values for {len(header)} columns")
        values = dict(zip(header, (x.strip() for x in row), strict=True))
        name += f" ({one_line(values['id'], 20)})" if values.get("id") else ""
        if not is_vtrain:
            return _run(name, values)
        values, group = _of_vtrain(values)
        return _run(name, values)._replace(group=group)
    except ValueError as error:
        return f"{name}: {one_line(str(error), 300)}"


def _whole(values: Mapping[str, str], name: str, most: int = 2**24) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", values[name]) or not 0 < int(values[name]) <= most:
        raise ValueError(f"{name} is {values[name]!r}, no whole number from 1 to {most}")
    return int(values[name])


def _measured(values: Mapping[str, str], name: str) -> float | None:
    try:
        found = float(values[name]) if values[name] else 1.0
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ValueError(f"{name} is {values[name]!r}, no number above 0")
    return found if values[name] else None


def _of_vtrain(values: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """A row of vTrain's table as one with COLUMNS, and its group."""
    read = {key: _whole(values, column) for key, column in VTRAIN.items() if key != "ms"}
    if read["batch"] % (read["sequences"] * read["d"]):
        raise ValueError(
            f"global batch is {read['batch']}, no multiple of {read['sequences']} on {read['d']} "
            "shards"
        )
    ms = _measured(values, VTRAIN["ms"])
    row = {
        "source": "vTrain",
        "model": "{layers}/{width}/{heads} vocab ".format(**read)
        + str(trainers()["vTrain"]["vocab"]),
        "chips": f"{read['chips']} A100",
        "mesh": "p{p} d{d} t{t}".format(**read),
        "sequences_per_data_shard": str(read["sequences"]),
        "accumulation": str(read["batch"] // read["sequences"] // read["d"]),
        "seq_len": str(read["seq_len"]),
        "precision": "bf16",
        "recompute": "full",
        "step_s": str(ms / 1000) if ms else "",
    }
    group = tuple(
        values[VTRAIN[key]] for key in ("width", "layers", "heads", "seq_len", "batch", "chips")
    )
    return dict.fromkeys(COLUMNS, "") | row, group


def _sizes(text: str, data: str) -> tuple[dict[str, int], int]:
    """The devices along each axis of a mesh, and the chunks of layers of each stage (v)."""
    parts = [] if text == "1" else text.split()
    axes = [part[:1] for part in parts]
    if (
        not all(re.fullmatch("[prdctv][1-9][0-9]{0,6}", part) for part in parts)
        or len(set(axes)) < len(parts)
        or not text
    ):
        raise ValueError(f"mesh is {text!r}; it has axes p, r, d, c and t, as in d8 t4, or is 1")
    sizes = {"p": 1, "r": 1, "d": 1, "c": 1, "t": 1, "v": 1} | {
        part[0]: int(part[1:]) for part in parts
    }
    chunks = sizes.pop("v")
    return (sizes if data == "d" else sizes | {"r": sizes["r"] * sizes["d"], "d": 1}), chunks


def _up(size: int, *factors: int) -> int:
    """The next multiple, as trainers round vocabularies up for their mesh."""
    return -(-size // math.prod(factors)) * math.prod(factors)


def _gpt(
    layers: int, width: int, heads: int, vocab: int, length: int, sizes: Mapping[str, int]
) -> Any:
    of_mesh = sizes["t"], sizes["p"]
    positions = _up(length, *of_mesh)
    return gpt2.ModelConfig(
        vocab=_up(vocab, *of_mesh),
        positions=positions,
        d_model=width,
        layers=layers,
        heads=heads,
        bos_id=0,
    )


def _model(text: str, length: int, sizes: Mapping[str, int]) -> Any:
    """The model of a row: one of KNOWN or six sizes as there, or layers/width/heads of a GPT with
    its vocabulary.
    """
    shape, *words = text.split() or [""]
    numbers = [
        int(x) for x in KNOWN.get(shape, shape).split("/") if re.fullmatch("[1-9][0-9]{0,7}", x)
    ]
    more = " ".join(words)
    vocab = re.fullmatch("vocab ([1-9][0-9]{0,7})", more)
    head = re.fullmatch("head ([1-9][0-9]{0,7})", more)
    if len(numbers) == 6 and (head or more in ("", "(bf16 weights)")):
        layers, width, heads, kv, hidden, vocabulary = numbers
        if heads % kv or (width % heads and not head):
            raise ValueError(
                f"model is {text!r}: {heads} heads must divide its width, and be a multiple of {kv}"
            )
        d_head = int(head[1]) if head else width // heads
        sizes_of: dict[str, Any] = {
            "n_kv": kv,
            "n_q_per_kv": heads // kv,
            "d_head": d_head,
            "d_ff": hidden,
        }
        return ModelConfig(
            vocab=_up(vocabulary, sizes["t"], sizes["p"]), d_model=width, layers=layers, **sizes_of
        )
    if len(numbers) == 3 and (vocab or re.fullmatch("MPT-[0-9]+[bm]", more)):
        layers, width, heads = numbers
        vocabulary = int(vocab[1]) if vocab else trainers()["llm-foundry"]["vocab"]
        return _gpt(layers, width, heads, vocabulary, length, sizes)
    raise ValueError(
        f"model is {text!r}; give one of {', '.join(KNOWN)}, layers/width/heads/kv "
        f"heads/MLP/vocabulary of a Llama, with 'head 128' where its heads are not width/heads "
        f"wide, or layers/width/heads and 'vocab 50304' of a GPT"
    )


def _run(name: str, values: Mapping[str, str]) -> Run:
    """The run of a row with COLUMNS."""
    trainer = next((x for x in trainers() if values["source"].startswith(x)), None)
    if trainer is None:
        raise ValueError(
            f"source is {values['source']!r}, and begins with none of {', '.join(trainers())}"
        )
    c = trainers()[trainer]
    found = re.fullmatch(r"([0-9]{1,7}) ([A-Za-z0-9-]+)", values["chips"])
    if not found or not int(found[1]):
        raise ValueError(f"chips is {values['chips']!r}; give their number and kind, as in 8 H100")
    chips = int(found[1])
    kind = found[2].lower().removesuffix("-80").replace("-40", "_40gb")
    sizes, chunks = _sizes(values["mesh"], c["data"])
    sequences, count = (
        _whole(values, "sequences_per_data_shard", 2**16),
        _whole(values, "accumulation", 2**16),
    )
    length = _whole(values, "seq_len")
    flops = values["flops"] or "F"
    model = _model(values["model"], length, sizes)
    if math.prod(sizes.values()) != chips:
        shown = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "1"
        raise ValueError(
            f"its mesh {shown} is not of {chips} chips; give sizes whose product is their number"
        )
    if sizes["p"] * count > MOST and sizes["p"] > 1:
        raise ValueError(
            f"it has {count} microbatches on {sizes['p']} stages; at most {MOST} together are "
            "planned"
        )
    precision, recompute = values["precision"], values["recompute"]
    if "bf16" not in precision or re.search("fp8|float8", precision.lower()):
        raise ValueError(f"precision is {precision!r}: products are planned in bf16 alone")
    if flops not in (counts := {"F": 1, "H": 0.5, "N": 0}):
        raise ValueError(
            f"flops is {flops!r}; it is F, with all of attention counted, H, its causal half, or "
            "N, none"
        )
    known = c["recompute"]
    if recompute not in known:
        raise ValueError(
            f"recompute is {recompute!r}; known of {trainer}: {', '.join(map(repr, known))}"
        )
    settings = (
        {"document_mask": False, "steps": 1, "unroll": None}
        | c["training"]
        | {"save": known[recompute]["save"]}
    )
    shards = sizes["r"] * sizes["d"]
    config = Config(
        model=model,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0, schedule_steps=1),
        mesh=MeshConfig(**sizes),
        data=DataConfig(filespec=""),
        training=TrainingConfig(sequences * count * shards, length, microbatches=count, **settings),
        hardware=HardwareConfig(),
        paths=PathsConfig(),
        pipeline=PipelineConfig(SCHEDULE),
    )
    check_config(config)
    table = load_model(model).table
    counted = flops_of_model(table, model, length * counts[flops])
    if c["counts"] == "all":
        looked_up = [w for w in jax.tree.leaves(table) if w.kind == "embedding"]
        counted += 6 * sum(math.prod(w.shape) for w in looked_up)
    eager = c["eager"] and "compiled" not in precision
    chip = dataclasses.replace(chip_of(kind), **c["hardware"])
    if c.get("mma_sync") and kind in HOPPER:
        chip = dataclasses.replace(chip, attention_share=MMA_SYNC * chip.attention_share)
    if "clock" in c and chip.products:
        slower = dataclasses.replace(chip.products, rates=chip.products.rates * c["clock"])
        chip = dataclasses.replace(chip, products=slower)
    how = known[recompute]
    run = Run(
        *(name, trainer, (trainer, name), chip, EAGER if eager else {}, config, sizes),
        *(how.get("again", {}), how.get("kept", 1.0), chunks, eager, counted),
    )
    step_s, rate, mfu = (
        _measured(values, x) for x in ("step_s", "tokens_per_s_per_chip", "mfu_percent")
    )
    step_s = step_s or (rate and run.tokens / rate / run.devices) or (mfu and run.mfu(1.0) / mfu)
    return run._replace(step_s=step_s, memory_gb=_measured(values, "memory_gb"))


# ---- planning ------------------------------------------------------------------------------------


def step_of(run: Run) -> PlannedStep:
    """The traced step of a run, with what its trainer computes again."""
    step = _traced(run, run.config.training.save)
    if run.again:
        ops = [
            op for op in _traced(run, "nothing").ops if op.phase == "again" and op.kind in run.again
        ]
        step = step._replace(
            ops=step.ops + [op._replace(count=op.count * run.again[op.kind]) for op in ops]
        )
    return step


def _traced(run: Run, save: str) -> PlannedStep:
    c = run.config
    c = dataclasses.replace(c, training=dataclasses.replace(c.training, save=save))
    return planned_step(c, load_model(c.model), run.sizes, run.chip)


def plan(run: Run, step: PlannedStep) -> Plan:
    """The plan of a run, on its chip with the constants of its trainer."""
    found = plan_of(
        step._replace(ops=_as_trained(run, step)), dataclasses.replace(run.chip, **run.constants), 1
    )
    # With v chunks of layers on a device, stages wait for each other 1 / v as long (arXiv
    # 2104.04473, section 2.2.2).
    saved = found.bubble * (1 - 1 / run.chunks)
    return found._replace(seconds=found.seconds - saved, bubble=found.bubble - saved)


def _as_trained(run: Run, step: PlannedStep) -> list[Operation]:
    """The operations of a step of ours, changed to those of its trainer."""
    c = trainers()[run.trainer]
    overlaps = c.get("overlaps", [])
    ops = list(_of_16_bits(step.ops)) if c.get("weights") == 16 else step.ops
    if c.get("fused_softmax"):
        ops = list(_of_fused_softmax(ops))
    if overlaps is False or "p" in overlaps:
        # collectives of all stages are ours alone, as we share the vocabulary
        ops = [
            op
            for op in ops
            if op.kind != "collective" or op.what == "ppermute" or "p" not in op.axes
        ]
    if overlaps is False:
        return [op._replace(timing="waited") if op.kind == "collective" else op for op in ops]
    if c.get("distributed_optimizer"):
        ops = list(_of_distributed_optimizer(ops, run.sizes))
    fused = c.get("fused", {})
    ops = [
        op._replace(count=fused["t"] * op.count, timing="waited") if _is_of(op, fused) else op
        for op in ops
    ]
    computed: dict[int, float] = collections.defaultdict(float)
    for op in ops:
        computed[op.loop] += op.count * op.flops
    most = max(computed, key=lambda loop: computed[loop])
    loops = [op.loop if computed[op.loop] else most for op in ops]
    return [
        op._replace(timing="after", loop=loop) if _is_of(op, overlaps) else op
        for op, loop in zip(ops, loops, strict=True)
    ]


def _of_16_bits(ops: Iterable[Operation]) -> Iterator[Operation]:
    """Operations with weights and gradients of 16 bits: no casts of weights, and half the bytes
    where gradients are added up or summed over r.
    """
    for op in ops:
        if op.kind == "memory" and not op.phase and op.count > 1:
            yield op._replace(traffic=op.traffic / 2)
        elif op.kind != "memory" or not op.tensor:
            yield op._replace(bytes=op.bytes / 2) if op.axes == ("r",) else op


def _of_fused_softmax(ops: Iterable[Operation]) -> Iterator[Operation]:
    """Operations with a softmax whose kernel computes the causal mask, where ours reads one in the
    forward pass: it then takes what it takes when it is computed again.
    """
    for op in ops:
        if op.kind != "memory" or "modeling/masks.py" not in op.line or op.phase == "backward":
            yield op
        elif op.phase == "again":
            yield op._replace(count=2 * op.count)


def _is_of(op: Operation, axes: Collection[str]) -> bool:
    return op.kind == "collective" and set(op.axes) <= set(axes)


def _of_distributed_optimizer(
    ops: Sequence[Operation], sizes: Mapping[str, int]
) -> Iterator[Operation]:
    """Operations with Megatron's distributed optimizer and its fused accumulation of gradients.

    Each device has whole weights, in bf16, and sums gradients of r and c once a step. A matmul adds
    to the gradients that are there already, and each device updates its part of the weights.
    """
    for op in ops:
        if op.kind == "memory" and not op.phase:
            if op.count == 1:
                yield op._replace(traffic=op.traffic / sizes["r"] / sizes["c"])
        elif op.kind != "collective" or "c" not in op.axes or op.timing == "waited":
            yield (
                op._replace(axes=("r", "c"), bytes=op.bytes * sizes["c"])
                if op.axes == ("r",)
                else op
            )


def memory(run: Run, step: PlannedStep) -> float | None:
    """Gigabytes of a device, by what its trainer's `memory` says that it keeps; None of one
    without.
    """
    kept = trainers()[run.trainer].get("memory")
    if kept is None:
        return None
    held = {
        kind: sum(x.bytes for x in step.held if x.kind == kind)
        for kind in ("weights", "optimizer", "saved")
    }
    model = run.config.model
    t = run.config.training
    d, split = (run.sizes["d"], run.sizes["t"])
    tokens = run.tokens / t.microbatches / run.sizes["r"] / d
    whole = kept["gradients_whole"] and t.microbatches > 1
    gradients = held["weights"] / 4 * kept["gradients"] * (d if whole else 1)
    logits = tokens * model.vocab * (kept["logits"] + kept["logits_split"] / split + 4 * run.eager)
    states = kept["states"] * (held["weights"] + held["optimizer"])
    return (states + gradients + held["saved"] * run.saved + logits) / float(kept["unit"])
