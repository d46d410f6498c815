"""All settings of a run with their types, against which configs/*.yaml and the command line are checked.

The configuration of a run has to set each field that has no default. The other sections are in ../modeling/settings.py,
../optimizers/config.py, ../cluster/config.py, shardwright_data/loader/config.py, and trackers.py.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
from hydra.core.config_store import ConfigStore
from jax.sharding import AbstractMesh
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jax_extra import KEPT
from shardlib.array_types import arrays_in
from shardlib.axes import PIPELINE_AXIS, axes_of_mesh, mesh_text
from shardlib.schedules import schedule_of
from shardwright.cluster.config import DistributedConfig, HardwareConfig, MeshConfig, check_distributed
from shardwright.modeling.attention import PATHS
from shardwright.modeling.context import STRATEGIES
from shardwright.modeling.model import COMPUTE_DTYPES, load_model, module_of
from shardwright.optimizers.config import OptimizerConfig, check_optimizer
from shardwright.run.changes import check_changes
from shardwright.run.trackers import TrackersConfig, check_trackers
from shardwright.settings.composing import wrong_setting
from shardwright.settings.differences import flat
from shardwright_data.checks import above_0, at_least_0, at_least_1, check_choice, check_range, check_ranges, within
from shardwright_data.loader import DataConfig


@dataclasses.dataclass
class TrainingConfig:
    """Settings of the training loop, its step, and what it does between steps."""

    batch_size: int = within(1, 2**24)
    """Sequences in a step, over all devices. A multiple of the r·d·e devices."""
    seq_len: int = within(1, 2**25)
    """Tokens in a sequence. A multiple of the c·t devices."""
    steps: int | None = at_least_1(None)
    """Length of the run in steps. Give one of steps, tokens and epochs."""
    tokens: int | None = within(1, 2**50, None)
    """Length of the run in tokens, padding included; a last batch that would exceed it is left out."""
    epochs: float | None = within(0, 2**20, None)
    """Length of the run in passes over the dataset."""
    changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Settings that change during the run, each by its whole name from a step on, such as
    [{step: 1000, training.seq_len: 2048}]. A resumed run may add some (docs/phases.md)."""
    seed: int = within(0, 2**63, 0)
    """Random seed of the initial weights, in [0, 2**63). JAX reads its lowest 32 bits."""
    init_from: str | None = None
    """Directory or URL of a run, or of a checkpoint, with the weights to begin with. Optimizer and data begin anew. Its
    model must be the same, but for what the next two settings allow. A resumed run reads its own checkpoint instead."""
    init_from_missing: str = "refuse"
    """Weights that init_from does not have. fresh: they begin as in a run without init_from, such as LoRA's factors or
    another head; of a table that is longer here, such as that of a longer vocabulary, the last rows do. refuse: an
    error."""
    init_from_unused: str = "refuse"
    """Weights that init_from has and the model does not. leave: they are not read. refuse: an error."""
    resume_step: int | None = at_least_0(None)
    """Step of the checkpoint that the run goes on from; later ones are set aside. If the latest was made by a run that
    went back to this step already, that one. Null: the latest that is whole."""
    other_source: bool = False
    """Whether a run may be resumed by source that computes something else than the source of its checkpoint."""
    reference: str | None = None
    """Directory or URL of a run, or of one of its checkpoints. The training step runs its model beside the one that is
    trained: a teacher or a reference policy, of any size with the same vocabulary. Its weights stay as they are, and
    training_loss in train.py gets its logits (docs/changing.md). Checkpoints keep its path, step and hash. Needs
    mesh.p=1. Null: none."""
    microbatches: int = within(1, 2**16, 1)
    """Parts of the batch that go through the model one after the other, or side_by_side at a time, each with the same
    consecutive sequences on every mesh. batch_size must be a multiple of r·d·e times this number. For interleaved_1f1b
    the number must be a multiple of p."""
    side_by_side: int = within(1, 2**16, 1)
    """Microbatches whose layers are computed side by side in training: collectives of one can run beside products of
    another (docs/performance.md). What all of them keep for their backward pass is in memory at once. It divides
    microbatches. Needs mesh.p=1: stages have an order of their own."""
    gather_weights: str = "auto"
    """layer: weights are cast, and gathered over d, where they are used, once for microbatches side by side. step: once
    a step, before the microbatches, and their gradients are scattered once after them; each device of d then holds all
    weights and gradients, in the compute dtype. auto: step where c, d and e are 1, else layer."""
    compute_dtype: str = "bf16"
    """bf16, or f32 for exact work. Weights and optimizer state are f32 with both. GPUs multiply f32 as TF32, TPUs as
    bf16, unless JAX_DEFAULT_MATMUL_PRECISION=highest is in the environment."""
    reduce_dtype: str = "compute"
    """Dtype in which the gradients of matrices are summed over d and r. compute: that of compute_dtype. f32: twice the
    bytes of bf16, and no rounding at each addition (docs/performance.md). A sum over microbatches is in f32, but of
    those side by side in compute_dtype."""
    attention: str = "auto"
    """Path of attention. einsum: with the scores of all pairs of positions in memory. blockwise: with one block of
    scores at a time. cudnn: NVIDIA's fused kernel. triton: a kernel for NVIDIA GPUs that knows documents. splash: one
    for TPUs. auto: the implementation that suits device, mask and seq_len, which the run prints when it starts
    (shardwright/modeling/attention.py)."""
    attention_block: int | None = at_least_1(None)
    """Largest number of positions in a block of blockwise attention, and of a ring. Null: that of the platform."""
    context: str = "gather"
    """How queries meet the keys of other devices where positions are sharded over c. gather: each device gathers all
    keys and values. ring: keys and values pass around. ulysses: each device has some heads of all positions
    (docs/long-context.md)."""
    document_mask: bool = True
    """Whether tokens attend only to tokens of their own document. false: a sequence counts as one document, which
    cudnn computes without a mask."""
    fp8: bool = False
    """Whether the products of a layer with its weights have operands rounded to FP8: faster on NVIDIA GPUs from Hopper
    on, slower elsewhere, and less exact (shardwright/modeling/fp8.py)."""
    loss_chunk: int | None = within(1, 2**25, None)
    """Positions of each sequence whose logits are in memory at a time: a multiple of c·t that divides seq_len. Null:
    all, which is faster while they fit."""
    save: str = "marked"
    """Values that the forward pass of a layer keeps for its backward pass, which computes the rest again. marked: those
    that the model marks with save_for_backward. offload: the same, in the memory of the device's host. It needs a loop
    over layers, and a mesh without stages. nothing: the layer's input only. dots: products with weights.
    everything: all that it needs."""
    unroll: int | None = within(1, 2**16, 1)
    """Layers in one iteration of the loop over layers, at least 1. Null: all, so that there is no loop. That takes
    longer to compile, and a GPU copies less of what is kept for the backward pass."""
    eval_batches: int = within(0, 2**31, 8)
    """Largest number of batches of the validation split in an evaluation; 0 for no evaluations."""
    eval_interval: int | None = at_least_1(None)
    """Steps between evaluations. There is one after the last step too. Null: only that one."""
    eval_epochs: float | None = above_0(None)
    """Passes over the dataset between evaluations, beside those of eval_interval. Null: none."""
    sample_interval: int | None = at_least_1(None)
    """Steps between samples, texts that the model writes into samples.jsonl. There are some before the first step and
    after the last too. Null: none."""
    sample_prompts: list[str] = dataclasses.field(default_factory=lambda: [""])
    """Beginnings of the samples. An empty one is the beginning of a document."""
    sample_tokens: int = within(1, 2**24, 64)
    """Tokens to add to each prompt, at least 1; fewer where a document ends."""
    sample_temperature: float = at_least_0(0.8)
    """Number that logits are divided by, at least 0; 0 always takes the likeliest token."""
    sample_top_k: int | None = at_least_1(None)
    """Number of the likeliest tokens to draw from, at least 1; null: all."""
    max_skipped: int | None = at_least_1(10)
    """A step whose loss or gradients are not finite is skipped: the state stays as it was. This number of them in a
    row, at least 1, ends the run; null: they never do."""
    spike_factor: float | None = above_0(1.5)
    """A loss that exceeds the lowest so far, of medians of 20 steps, by this factor is announced, with the command to
    replay the step; a norm of the gradients by ten times this factor. Nothing else changes. Null: none is."""
    microscope_interval: int | None = at_least_1(None)
    """Steps between looks at the step with the microscope, whose statistics are events in metrics.jsonl
    (docs/replay.md). Null: none."""
    log_interval: int = at_least_1(10)
    """Steps between printed lines."""
    checkpoint_interval: int = at_least_1(1000)
    """Steps between checkpoints. There is one after the last step too."""
    keep_checkpoints: int | None = at_least_1(3)
    """Number of the latest checkpoints that are kept, at least 1; null: all."""
    report: bool = True
    """Whether the run keeps a page in its directory, report.html, and makes it anew while it trains: at most once a
    minute, and in at most a thirtieth of the time (shardwright/run/page.py)."""


@dataclasses.dataclass
class PipelineConfig:
    """Settings of the stages of a mesh with p (docs/pipeline.md). Without p none of them has an effect."""

    schedule: str = "interleaved_1f1b"
    """gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_v, or your own as module:function (shardlib/schedules.py)."""
    virtual_stages: int = within(1, 2**10, 1)
    """Number v of stages on each device of p, at least 1: any number for interleaved_1f1b or your own schedule, 2 for
    zb_v, 1 for the others. The number of layers is a multiple of p·v."""


@dataclasses.dataclass
class PathsConfig:
    """Settings of the directory of a run."""

    root_working_dir: str = "runs"
    """Directory of all runs, in a file system. `~` at its beginning is your home."""
    model_name: str | None = None
    """The run's directory inside of root_working_dir. If it has a run, that is resumed. Null: name of the
    configuration, and the time."""
    checkpoints: str | None = None
    """Directory, or URL that tensorstore knows, such as s3://bucket/runs. The run's checkpoints are in it, in
    <model_name>/checkpoints; all other files stay in the run's directory. Null: they too."""


@dataclasses.dataclass
class Config:
    """All settings of a run, by section."""

    model: Any
    """The ModelConfig of the module that model.module names."""
    optimizer: OptimizerConfig
    mesh: MeshConfig
    data: DataConfig
    training: TrainingConfig
    hardware: HardwareConfig
    paths: PathsConfig
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    trackers: TrackersConfig = dataclasses.field(default_factory=TrackersConfig)


def register_schema() -> None:
    """Registers the types of all fields with Hydra. Required fields have no value, but overrides can set them."""
    schema = OmegaConf.structured(Config)
    for section in dataclasses.fields(Config):
        if section.name != "model":
            schema[section.name] = OmegaConf.structured(section.type)
    # Only the model's module knows its fields, and Hydra's composition chooses that module: see to_config.
    schema.model = OmegaConf.create({"module": "train"}, flags={"struct": False})
    ConfigStore.instance().store(name="config_schema", node=schema)


def to_config(composed: DictConfig) -> Config:
    """The configuration that Hydra composed, with types: for the model those of its own ModelConfig.

    Raises ValueError for a setting that is missing, unknown, or out of its range.
    """
    config = composed.copy()
    name = config.model.module
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"model.module is {name!r}; give the name of a Python module, such as train or gpt2.")
    module = module_of(name)
    try:
        config.model = OmegaConf.merge(OmegaConf.structured(module.ModelConfig), config.model)
    except OmegaConfBaseException as error:
        raise ValueError(wrong_setting(module.ModelConfig, error, prefix="model.")) from None
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"no value for {', '.join(missing)}; give {missing[0]}=<value>, or a group that sets it.")
    c: Any = OmegaConf.to_object(config)
    check_config(c)
    return c


def check_config(c: Config) -> None:
    """Raises ValueError for a setting out of its range."""
    for section in dataclasses.fields(c):
        check_ranges(section.name, getattr(c, section.name))
    check_range("model.vocab", c.model.vocab)
    check_range("model.layers", c.model.layers, 1, 2**16)
    check_range("model.bos_id", c.model.bos_id, 0, c.model.vocab)
    c.model.check(c.training.seq_len)
    check_optimizer(c.optimizer)
    for name, value in flat(dataclasses.asdict(c)).items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} is {value!r}; give a finite number, a text or null: a checkpoint is JSON."
            ) from None
    try:
        schedule_of(c.pipeline.schedule)
    except ValueError as error:
        raise ValueError(f"pipeline.schedule: {error}") from error
    check_distributed(c.distributed)
    check_trackers(c.trackers)
    check_choice("training.init_from_missing", c.training.init_from_missing, ("fresh", "refuse"))
    check_choice("training.init_from_unused", c.training.init_from_unused, ("leave", "refuse"))
    check_choice("training.gather_weights", c.training.gather_weights, ("auto", "layer", "step"))
    check_choice("training.compute_dtype", c.training.compute_dtype, tuple(COMPUTE_DTYPES))
    check_choice("training.reduce_dtype", c.training.reduce_dtype, ("compute", "f32"))
    check_choice("training.attention", c.training.attention, PATHS)
    check_choice("training.context", c.training.context, tuple(x for x in STRATEGIES if x != "whole"))
    check_choice("training.save", c.training.save, tuple(KEPT))
    if c.training.microbatches % c.training.side_by_side:
        raise ValueError(
            f"training.side_by_side is {c.training.side_by_side}; it must divide training.microbatches = "
            f"{c.training.microbatches}."
        )
    if c.training.side_by_side > 1 and c.mesh.p > 1:
        raise ValueError(
            f"training.side_by_side is {c.training.side_by_side}, and mesh.p is {c.mesh.p}: stages have an order of "
            "microbatches of their own. Set training.side_by_side=1."
        )
    in_loop = c.training.unroll is not None and (c.training.unroll < c.model.layers or c.model.layers == 1)
    if c.training.save == "offload" and not (in_loop and c.mesh.p == 1):
        raise ValueError(
            "training.save is offload, which saves no memory without a loop over layers, or with stages. Set "
            "training.unroll=1 and mesh.p=1, or choose marked."
        )
    if c.training.loss_chunk is not None and c.training.seq_len % c.training.loss_chunk:
        raise ValueError(
            f"training.loss_chunk is {c.training.loss_chunk}; it must divide training.seq_len = {c.training.seq_len}."
        )
    if not c.distributed.is_single and c.paths.model_name is None:
        raise ValueError("distributed says that there are several processes; give paths.model_name, the same in all.")
    check_changes(c, check_config)


def check_divides(c: Config, mesh: Mapping[str, int], of_batch: bool = True, of_sequences: bool = True) -> None:
    """Raises ValueError for a size of the model, the batch or the sequences that the axes of the mesh do not divide.

    `of_batch`, `of_sequences`: whether to check the size of the batch and those of sequences too, not only of weights.
    """
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # types with all their axes
        weights = arrays_in(type(table := load_model(c.model).table), table)
    settings = {dim: f"model.{name}" for dim, name in getattr(c.model, "dims", {}).items()}
    sized = [(path, zip(array.spec.dims, weight.shape, strict=False)) for path, array, weight in weights]
    sizes = [(settings.get(dim.name, f"{dim.name} of {path}"), n, dim.axes) for path, dims in sized for dim, n in dims]
    sizes = [size for size in sizes if PIPELINE_AXIS not in size[2][:1]]  # stages may have other numbers of layers
    t, in_ring = c.training, c.training.context == "ring" and mesh.get("c", 1) > 1
    if of_batch:
        sizes.append(("training.batch_size", t.batch_size, ("r", "d", "e", "training.microbatches")))
    if of_sequences:
        sizes.append(("training.seq_len", t.seq_len, ("c", "t")))
        sizes += [] if t.loss_chunk is None else [("training.loss_chunk", t.loss_chunk, ("c", "t"))]
        sizes += [("training.seq_len", t.seq_len, ("2", "c"))] if in_ring else []  # a device has two chunks
    factors = {"training.microbatches": t.microbatches, "2": 2, **axes_of_mesh(mesh)}
    of_mesh = [(name, size, [axis for axis in axes if axis in factors]) for name, size, axes in sizes]
    for name, size, axes in sorted(of_mesh, key=lambda found: -len(found[2])):  # so that one message has all axes
        if size % (devices := math.prod(factors[axis] for axis in axes)):
            shown = f"{'·'.join(axes)} = {devices}"
            raise ValueError(f"{name} is {size}; on the mesh {mesh_text(mesh)} it must be a multiple of {shown}.")
