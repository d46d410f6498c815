"""Defines all settings of a run with their types; configs/*.yaml and the command line are checked
against them.

The configuration of a run must set each field that has no default. The other sections are in
../modeling/settings.py, ../optimizers/config.py, ../cluster/config.py,
shardwright/data/loader/config.py, and trackers.py.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from shardlib.array_types import arrays_in
from shardlib.axes import PIPELINE_AXIS
from shardlib.planned import planned_for
from shardwright.axes import axes_of_mesh, mesh_text
from shardwright.cluster.config import DistributedConfig, HardwareConfig, MeshConfig
from shardwright.data.checks import (
    CHANGING,
    FIXED,
    a_path,
    above_0,
    at_least_0,
    at_least_1,
    one_of,
    setting,
    within,
)
from shardwright.data.loader import DataConfig
from shardwright.jax_extra import KEPT
from shardwright.modeling.attention_paths import PATHS
from shardwright.modeling.context import STRATEGIES
from shardwright.modeling.model import COMPUTE_DTYPES, load_model
from shardwright.optimizers.config import OptimizerConfig
from shardwright.program.trackers import TrackersConfig


@dataclasses.dataclass
class TrainingConfig:
    """Settings of the training loop, its step, and the work between steps."""

    batch_size: int = within(1, 2**24, dataclasses.MISSING, FIXED, CHANGING)
    """Sequences per step, over all devices. A multiple of r·d·e."""
    seq_len: int = within(1, 2**25, dataclasses.MISSING, FIXED, CHANGING)
    """Tokens per sequence. A multiple of c·t."""
    steps: int | None = at_least_1(None)
    """Length of the run in steps. Give one of steps, tokens, epochs and minutes."""
    tokens: int | None = within(1, 2**50, None)
    """Length of the run in tokens, padding included. A last batch that would exceed it is
    dropped."""
    epochs: float | None = within(0, 2**20, None)
    """Length of the run in passes over the dataset."""
    minutes: float | None = above_0(None)
    """Length of the run in minutes of wall time from its first step on, summed over all starts,
    with validation and checkpoints, also those after the last step, as far as earlier ones tell how
    long they take (docs/data.md). The learning rate decays by the clock: optimizer.schedule_steps
    stands for the whole time. Give it instead of steps, tokens and epochs."""
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Settings that change from a given step on, by their full names, such as
    [{step: 1000, training.seq_len: 2048}]. A resumed run may add entries (docs/experiments.md)."""
    seed: int = within(0, 2**63, 0, FIXED)
    """Random seed of the initial weights, in [0, 2**63). JAX reads its lowest 32 bits."""
    init_from: str | None = a_path(None)
    """Directory or URL of a run or checkpoint to warm-start from (fine-tuning): its weights, with a
    fresh optimizer and data position. The model must be the same except as the next two settings
    allow. Ignored when a run resumes."""
    init_from_missing: str = one_of(("fresh", "refuse"), default="refuse")
    """What to do with weights that init_from lacks. fresh: initialize them as in a new run, for
    example LoRA's factors or a new head, or the additional rows of a larger vocabulary. refuse:
    raise an error."""
    init_from_unused: str = one_of(("leave", "refuse"), default="refuse")
    """What to do with weights that only init_from has. leave: do not read them. refuse: raise an
    error."""
    resume_step: int | None = at_least_0(None)
    """Step of the checkpoint to resume from; later ones are set aside. If a run with this setting
    saved the latest checkpoint, resumes from that. Null: the latest intact checkpoint."""
    other_source: bool = False
    """Allows resuming with source that computes something else than the source of the
    checkpoint."""
    accept_undecided: bool = False
    """Runs even if the check leaves undecided whether the model is causal, or what a line does at
    sizes that were not run; both are printed."""
    microbatches: int = within(1, 2**16, 1, CHANGING)
    """Microbatches per step (gradient accumulation), processed one after another; each has the same
    consecutive sequences on every mesh. batch_size must be a multiple of r·d·e times this number,
    which for interleaved_1f1b must be a multiple of p."""
    gather_weights: str = one_of(("auto", "layer", "step"), default="auto")
    """When weights are cast and gathered over d. layer: where they are used (FSDP). step: once per
    step, before the microbatches, with one reduce-scatter of the gradients after them; each device
    of d then holds all weights and gradients in the compute dtype. auto: step if c, d and e are 1,
    else layer."""
    compute_dtype: str = one_of(COMPUTE_DTYPES, FIXED, default="bf16")
    """bf16 (mixed precision) or f32. Weights and optimizer state are f32 with both. GPUs multiply
    f32 as TF32, TPUs as bf16, unless JAX_DEFAULT_MATMUL_PRECISION=highest is in the environment."""
    reduce_dtype: str = one_of(("compute", "f32"), FIXED, default="compute")
    """Dtype in which gradients of matrices are reduced over d and r. compute: compute_dtype. f32:
    twice the bytes of bf16, without rounding at each addition (docs/performance.md). Gradients are
    accumulated over microbatches in f32."""
    attention: str = one_of(PATHS, default="auto")
    """Implementation of attention. einsum: materializes all scores. blockwise: one block of scores
    at a time. cudnn: NVIDIA's fused flash attention. triton: a kernel for NVIDIA GPUs that skips
    other documents. splash: a kernel for TPUs. auto: chosen by device, mask and seq_len, as the run
    prints (shardwright/modeling/attention_paths.py)."""
    attention_block: int | None = at_least_1(None)
    """Largest block size, in positions, of blockwise and ring attention. Null: the platform's
    default."""
    context: str = one_of(STRATEGIES, default="gather")
    """Strategy of context parallelism over c. gather: all-gathers keys and values. ring: passes
    keys and values around a ring. ulysses: an all-to-all gives each device some heads of all
    positions (docs/parallelism.md)."""
    document_mask: bool = setting(FIXED, default=True)
    """Restricts attention to tokens of the same document. false: treats each sequence as one
    document, which cudnn computes without a mask."""
    fp8: bool = setting(FIXED, default=False)
    """Rounds the operands of the layers' weight matmuls to FP8: faster on NVIDIA GPUs from Hopper
    on, slower elsewhere, and less precise (shardwright/modeling/fp8.py)."""
    loss_chunk: int | None = within(1, 2**25, None, CHANGING)
    """Positions per sequence whose logits are in memory at a time: a multiple of c·t that divides
    seq_len. Null: all, which is faster if they fit."""
    save: str = one_of(KEPT, default="marked")
    """Activation checkpointing: what a layer saves for its backward pass, which recomputes the
    rest. marked: values that the model marks with save_for_backward. offload: the same, in host
    memory; needs a loop over layers and no stages. nothing: only the layer's input. dots: outputs
    of weight matmuls. more: also inputs of weight matmuls that are cheap to recompute. everything:
    all that XLA does not fuse, except results of collectives that are not marked."""
    unroll: int | None = within(1, 2**16, 1)
    """Layers per iteration of the loop over layers, at least 1. Null: all, without a loop. This
    takes longer to compile, but a GPU copies fewer saved activations."""
    eval_batches: int = within(0, 2**31, 8, CHANGING)
    """Most batches of the validation split per evaluation; 0 for no evaluations. Each token is
    scored once."""
    eval_interval: int | None = at_least_1(None)
    """Steps between evaluations. The last step is always followed by one. Null: only that."""
    eval_epochs: float | None = above_0(None)
    """Passes over the dataset between evaluations, in addition to eval_interval. Null: none."""
    eval_average: str | None = one_of(("ema", "uniform"), FIXED, default=None)
    """Also keeps and evaluates an average of the weights, which estimates the loss of a decayed
    learning rate without decaying it: one more f32 copy, in checkpoints too. ema: an exponential
    moving average. uniform: the mean over the steps since the last multiple of average_steps. Null:
    none (docs/evaluation.md)."""
    average_steps: int = at_least_1(100, FIXED)
    """Half-life of the ema, or length of the uniform average, in steps."""
    evals: list[str] = dataclasses.field(default_factory=list)
    """Tasks of lm-eval to evaluate during training, which must be installed
    (docs/evaluation.md)."""
    evals_interval: int | None = at_least_1(None)
    """Steps between evaluations of `evals`, also after the last. Null: with each validation."""
    evals_limit: int | None = at_least_1(100)
    """Most questions of each of `evals`. Null: all."""
    sample_interval: int | None = at_least_1(None)
    """Steps between samples, texts that the model generates into samples.jsonl; also before the
    first step and after the last. Null: none."""
    sample_prompts: list[str] = dataclasses.field(default_factory=lambda: [""])
    """Prompts of the samples. An empty one starts a document."""
    sample_tokens: int = within(1, 2**24, 64)
    """Most tokens to generate per prompt, at least 1; the end of a document stops earlier."""
    sample_temperature: float = at_least_0(0.8)
    """Temperature: logits are divided by it. At least 0; 0 always takes the most likely token."""
    sample_top_k: int | None = at_least_1(None)
    """Number of most likely tokens to sample from, at least 1; null: all."""
    max_skipped: int | None = at_least_1(10)
    """Consecutive skipped steps after which the run ends, at least 1; null: never. A step whose
    loss or gradients are not finite is skipped: the state does not change."""
    spike_factor: float | None = above_0(1.5)
    """Reports a loss above this factor times the lowest median of 20 steps so far, or a gradient
    norm above ten times the factor, with the command to replay the step. Training is not affected.
    Null: off."""
    microscope_interval: int | None = at_least_1(None)
    """Steps between activation and gradient statistics, which are events in metrics.jsonl
    (docs/replay.md). Null: none."""
    log_interval: int = at_least_1(10)
    """Steps between printed lines."""
    checkpoint_interval: int = at_least_1(1000)
    """Steps between checkpoints. One is also saved after the last step."""
    keep_checkpoints: int | None = at_least_1(3)
    """Number of latest checkpoints to keep, at least 1; null: all."""
    keep_best: bool = False
    """Also keeps the checkpoint with the best validation loss, and saves one where a validation is
    the best so far. Needs eval_interval or eval_epochs."""
    export_interval: int | None = at_least_1(None)
    """Steps between exports to Hugging Face format, in exports/ of the run's directory, also after
    the last step; each comes with a checkpoint, and none is removed (docs/huggingface.md). Null:
    none."""
    listeners: list[str] = dataclasses.field(default_factory=list)
    """Classes of your own, as module:Class, whose methods are called around each step before those
    of train.py's listeners (docs/changing.md)."""
    report: bool = True
    """Keeps report.html in the run's directory up to date during training: at most once a minute,
    in at most a thirtieth of the time (shardwright/run/page.py)."""


@dataclasses.dataclass
class PipelineConfig:
    """Settings of pipeline parallelism (docs/parallelism.md).

    They have no effect if mesh.p is 1.
    """

    schedule: str = "interleaved_1f1b"
    """gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_v, or your own as module:function
    (shardlib/schedules.py)."""
    virtual_stages: int = within(1, 2**10, 1)
    """Stages v per device of p: any number for interleaved_1f1b or your own schedule, 2 for zb_v, 1
    for the others. The number of layers must be a multiple of p·v."""


@dataclasses.dataclass
class PathsConfig:
    """Where a run keeps its files."""

    root_working_dir: str = a_path("runs")
    """Directory of all runs, not a URL."""
    model_name: str | None = None
    """The run's directory inside root_working_dir. A run that is there already is resumed. Null:
    name of the configuration and the time."""
    checkpoints: str | None = a_path(None)
    """Directory, or URL that tensorstore can open, such as s3://bucket/runs, for
    <model_name>/checkpoints. All other files stay in the run's directory. Null: the checkpoints
    too."""


@dataclasses.dataclass
class Config:
    """All settings of a run, by section."""

    model: Any
    """The ModelConfig of the module model.module."""
    optimizer: OptimizerConfig
    mesh: MeshConfig
    data: DataConfig
    training: TrainingConfig
    hardware: HardwareConfig
    paths: PathsConfig
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    trackers: TrackersConfig = dataclasses.field(default_factory=TrackersConfig)


def check_divides(
    c: Config, mesh: Mapping[str, int], of_batch: bool = True, of_sequences: bool = True
) -> None:
    """Raises ValueError for a dim of a weight, a batch size or a sequence length that its axes do
    not divide.

    `mesh` maps axes to sizes. `of_batch=False` leaves out the batch size, `of_sequences=False` the
    sequence lengths.
    """
    sizes_of_mesh = axes_of_mesh(mesh)
    # Types with all their axes but those that do not divide a small vector.
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
        planned_for(sizes=(*sizes_of_mesh.items(),)),
    ):
        weights = arrays_in(type(table := load_model(c.model).table), table)
    settings = {dim: f"model.{name}" for dim, name in getattr(c.model, "dims", {}).items()}
    sized = [
        (path, zip(array.spec.dims, weight.shape, strict=False)) for path, array, weight in weights
    ]
    sizes = [
        (settings.get(dim.name, f"{dim.name} of {path}"), n, dim.axes)
        for path, dims in sized
        for dim, n in dims
    ]
    # stages may have other numbers of layers
    sizes = [size for size in sizes if PIPELINE_AXIS not in size[2][:1]]
    t = c.training
    in_ring = c.training.context == "ring" and mesh.get("c", 1) > 1
    if of_batch:
        sizes.append(
            ("training.batch_size", t.batch_size, ("r", "d", "e", "training.microbatches"))
        )
    if of_sequences:
        sizes.append(("training.seq_len", t.seq_len, ("c", "t")))
        sizes += [] if t.loss_chunk is None else [("training.loss_chunk", t.loss_chunk, ("c", "t"))]
        # a device has two chunks
        sizes += [("training.seq_len", t.seq_len, ("2", "c"))] if in_ring else []
    factors = {"training.microbatches": t.microbatches, "2": 2, **sizes_of_mesh}
    of_mesh = [
        (name, size, [axis for axis in axes if axis in factors]) for name, size, axes in sizes
    ]
    for name, size, axes in sorted(of_mesh, key=lambda found: -len(found[2])):
        # so that one message has all axes
        if size % (devices := math.prod(factors[axis] for axis in axes)):
            shown = f"{'·'.join(axes)} = {devices}"
            raise ValueError(
                f"{name} is {size}; on the mesh {mesh_text(mesh)} it must be a multiple of {shown}."
            )
