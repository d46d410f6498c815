"""Every setting of a run, typed: what configs/*.yaml and the command line are checked against.

A field without a default has to be set by the run's configuration.
"""

import dataclasses
import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from attention import PATHS
from input_loader import DataConfig
from input_loader import fixed_settings as fixed_data_settings
from jax_extra import KEPT
from shardlib.schedules import schedule_of
from training_io import config_differences
from weights import KINDS

COMPUTE_DTYPES = {"bf16": "bfloat16", "f32": "float32"}


@dataclasses.dataclass
class RopeScaling:
    """Changes the rotary wavelengths of a model that was trained on shorter sequences."""

    kind: str
    """linear: positions divided by `factor` (arXiv 2306.15595). llama3: only long wavelengths, as Llama 3.1 does."""
    factor: float
    """How many times longer the sequences are than those of `original_length`; at least 1."""
    original_length: int = 8192
    """llama3: tokens in a sequence of the first training."""
    low_frequency_factor: float = 1.0
    """llama3: wavelengths above original_length / this are stretched by `factor`."""
    high_frequency_factor: float = 4.0
    """llama3: wavelengths below original_length / this stay; those between are interpolated."""


@dataclasses.dataclass
class ModelConfig:
    """The transformer of train.py. docs/models.md tells what the configuration of another model must have."""

    module: str = "train"
    """Python module with the model's math. The other fields of this section are those of its own ModelConfig."""
    vocab: int = dataclasses.field(kw_only=True)
    """Number of token ids that the model knows; at least the data's largest id + 1. Sharded over t."""
    d_model: int = dataclasses.field(kw_only=True)
    """Width of the residual stream. A multiple of t·d·p devices, since the final norm is sharded over all."""
    layers: int = dataclasses.field(kw_only=True)
    n_kv: int = dataclasses.field(kw_only=True)
    """Key/value heads. Sharded over t."""
    n_q_per_kv: int = dataclasses.field(kw_only=True)
    """Query heads for each key/value head: 1 is multi-head attention, more is grouped-query attention."""
    d_head: int = dataclasses.field(kw_only=True)
    """Entries of one head; even, since RoPE turns pairs."""
    d_ff: int = dataclasses.field(kw_only=True)
    """Hidden width of the SwiGLU block. Sharded over t."""
    rope_base: float = 10_000.0
    """Base of the rotary wavelengths (arXiv 2104.09864)."""
    rope_scaling: RopeScaling | None = None
    """Null: none."""
    norm_epsilon: float = 1e-5
    """Added to the mean square under the root of RMSNorm (arXiv 1910.07467)."""
    tied_embeddings: bool = False
    """Whether the embedding table is also the output projection."""
    embed_init_scale: float | None = None
    """Standard deviation of the embedding table at init; null: 1, or 1/sqrt(d_model) if tied."""
    weight_init_scale: float = 1.0
    """Factor on the 1/sqrt(fan-in) standard deviation of all other matrices at init."""
    qk_norm: bool = False
    """RMSNorm over each head of the queries and keys, before RoPE, as in Qwen3 (arXiv 2505.09388). Its weights are
    sharded over t and d: d_head is then a multiple of d·t devices."""
    logit_softcap: float | None = None
    """Logits x become softcap·tanh(x/softcap) (arXiv 2408.00118, section 2); null: they stay."""
    bos_id: int = 0
    """The token id that stands before the first of each document, in [0, vocab)."""

    sharded: ClassVar[dict[str, str]] = {"vocab": "t", "d_model": "t·d·p", "n_kv": "t", "d_ff": "t"}
    """Which sizes the axes of the mesh must divide."""

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.n_kv * self.n_q_per_kv

    def check(self, seq_len: int) -> None:
        """Raises ValueError for a setting out of its range, or one that cannot do sequences of `seq_len` tokens."""
        check_ranges("model", self, dict.fromkeys(("d_model", "n_kv", "n_q_per_kv", "d_head", "d_ff"), (1, 2**63)))
        positive = ("rope_base", "norm_epsilon", "embed_init_scale", "weight_init_scale", "logit_softcap")
        check_ranges("model", self, dict.fromkeys(positive, (0, math.inf)))
        if self.d_head % 2:
            raise ValueError(f"model.d_head is {self.d_head}; RoPE turns pairs of entries, so it must be even.")
        if self.logit_softcap == 0:
            raise ValueError("model.logit_softcap is 0, which would make all logits 0; null turns it off.")
        if self.rope_scaling is not None:
            names = ("factor", "original_length", "low_frequency_factor", "high_frequency_factor")
            check_ranges("model.rope_scaling", self.rope_scaling, dict.fromkeys(names, (1, math.inf)))
            if self.rope_scaling.kind not in ("linear", "llama3"):
                raise ValueError(f"model.rope_scaling.kind is {self.rope_scaling.kind!r}; choose linear or llama3.")


@dataclasses.dataclass
class OptimizerConfig:
    learning_rate: float
    """Peak learning rate, reached at the end of the warmup."""
    warmup_steps: int
    """Steps of linear warmup, at least 0. With a warmup, step 0 has learning rate 0."""
    schedule_steps: int | None = None
    """Step at which the learning rate reaches its floor, counted from step 0. More than warmup_steps. Not for
    schedule=constant, which has no floor."""
    schedule: str = "cosine"
    """After the warmup. cosine: half a cosine down to the floor (arXiv 1608.03983). linear: a line down to it.
    wsd: the peak, then a line down to the floor in the last cooldown_steps (arXiv 2405.18392). constant: the peak."""
    cooldown_steps: int | None = None
    """wsd: steps of its decay, before schedule_steps; at least 1."""
    final_fraction: float = 0.1
    """The floor of the decay as a fraction of the peak, in [0, 1]."""
    algorithm: str = "adamw"
    """adamw: all weights (arXiv 1711.05101). muon: matrices by Muon (arXiv 2502.16982), all else by AdamW."""
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay (arXiv 1711.05101), multiplied by the learning rate."""
    decay_on: list[str] = dataclasses.field(default_factory=lambda: list(KINDS))
    """The kinds of weights that decay: matrix, embedding, unembedding (tied tables too), vector (norms, biases)."""
    muon_momentum: float = 0.95
    """Nesterov momentum of the matrices' gradients, in [0, 1)."""
    muon_iterations: int = 5
    """Newton-Schulz iterations that orthogonalize an update, at least 1."""
    muon_rms: float = 0.2
    """Root mean square of the entries of a matrix's update, times the learning rate; 0.2 is about AdamW's, so that
    its learning rates serve (arXiv 2502.16982, section 2.2)."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it."""
    z_loss: float = 0.0
    """Factor on the squared log of the softmax normalizer (arXiv 2204.02311, section 5); 0 turns it off."""


@dataclasses.dataclass
class MeshConfig:
    """Devices along each axis; at most one may be -1, which takes what is left."""

    p: int = 1
    """Pipeline stages' devices: each holds some of the layers (docs/pipeline.md)."""
    r: int = 1
    d: int = -1
    t: int = 1


@dataclasses.dataclass
class PipelineConfig:
    """How microbatches go through the stages of a mesh with p; docs/pipeline.md. Without p nothing of it is used."""

    schedule: str = "interleaved_1f1b"
    """gpipe, 1f1b, eager_1f1b, interleaved_1f1b, or module:function of one's own (shardlib/schedules.py)."""
    virtual_stages: int = 1
    """v: stages of each device of p, at least 1; more than 1 for interleaved_1f1b only, or a schedule of one's own.
    With layers_per_stage=null the number of layers is a multiple of p·v."""
    layers_per_stage: Any = None
    """The layers of each of the p times virtual_stages stages, a list; balanced: as FLOPs say, for the last stage has
    the unembedding too. Null: all the same."""
    recompute: bool = False
    """Whether a stage's backward computes its forward again from what entered it. Otherwise the forward keeps what
    save_for_backward marks."""


@dataclasses.dataclass
class TrainingConfig:
    batch_size: int
    """Sequences in a step, over all devices. A multiple of r·d devices."""
    seq_len: int
    """Tokens in a sequence. A multiple of t devices."""
    steps: int | None = None
    """Length of the run: one of this, tokens and epochs."""
    tokens: int | None = None
    """Length of the run in tokens, padding included; the last batch is left out if it would go beyond."""
    epochs: float | None = None
    """Length of the run in passes over the dataset."""
    seed: int = 0
    """Selects the weights at init, in [0, 2**63)."""
    init_from: str | None = None
    """A run's directory, or a checkpoint's, with the weights to begin with; the optimizer and the data begin anew. Its
    model must be the same. A run that is resumed goes on from its own checkpoint."""
    microbatches: int = 1
    """Parts of the batch that go through the model one after the other. batch_size is a multiple of them times r·d;
    for interleaved_1f1b they are a multiple of p."""
    gather_weights: str = "layer"
    """layer: weights are gathered over d where they are used, in each microbatch. step: once a step, ahead of the
    microbatches, their gradients scattered once after them; each device of d then holds all weights and gradients."""
    compute_dtype: str = "bf16"
    """bf16, or f32 for exact work. Weights and optimizer state are f32 either way."""
    attention: str = "auto"
    """einsum: with the scores of all pairs of positions in memory. blockwise: a block of them at a time (attention.py).
    cudnn: NVIDIA's fused kernel. auto: the one that suits device and seq_len; the run says at its start which."""
    document_mask: bool = True
    """Whether tokens see only those of their own document. false: a row of a batch is one text, with whatever documents
    it has; cudnn, to which documents are a mask of seq_len² entries a row, is then faster."""
    fp8: bool = False
    """Whether a layer's products with its weights are of operands rounded to FP8 (fp8.py): faster on NVIDIA GPUs from
    Hopper on, slower elsewhere, and never as exact."""
    loss_chunk: int | None = None
    """Positions of each sequence whose logits are in memory at a time: a multiple of t that divides seq_len. Null: all,
    which is faster while they fit."""
    save: str = "marked"
    """What a layer's backward pass gets from its forward pass, computing the rest again. marked: what the model marks
    with save_for_backward. nothing: the layer's input. dots: products with weights. everything: all that it needs."""
    unroll: int | None = 1
    """Layers in one turn of the loop over layers, at least 1; null: all, so that there is no loop. That compiles
    longer, and saves a GPU copying what is kept for the backward pass."""
    eval_batches: int = 8
    """Batches of the validation split, at most, in an evaluation; 0 for no evaluations."""
    eval_interval: int | None = None
    """Steps between evaluations; there is one after the last step too, and with null that one alone."""
    sample_interval: int | None = None
    """Steps between texts that the model writes into samples.jsonl, which has some from before the first step and after
    the last too. Null: none."""
    sample_prompts: list[str] = dataclasses.field(default_factory=lambda: [""])
    """What these texts begin with; an empty one is a document from its beginning."""
    sample_tokens: int = 64
    """Tokens to add to each, at least 1; fewer where a document ends."""
    sample_temperature: float = 0.8
    """What logits are divided by, at least 0; 0 always takes the likeliest token."""
    sample_top_k: int | None = None
    """Draw only from the likeliest this many tokens, at least 1; null: all."""
    log_interval: int = 10
    """Steps between progress lines where the output is no terminal."""
    checkpoint_interval: int = 1000
    """Steps between checkpoints; there is one after the last step too."""
    keep_checkpoints: int | None = 3
    """How many of the latest checkpoints are kept, at least 1; null: all."""


@dataclasses.dataclass
class HardwareConfig:
    name: str = "any"
    """What the run is meant for, in words."""
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """XLA's flags without their dashes, and what else XLA takes for a program, for the compilation of the steps. Left
    out are those that are null and, with a line that says so, those that the installed XLA does not know. Flags in the
    environment's XLA_FLAGS hold for all programs, and an unknown one there ends the run."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables, such as NCCL's, that are set before the devices start; one that is set already stays."""
    memory_fraction: float | None = None
    """Part of a GPU's memory that JAX reserves when it starts, in (0, 1]; null: JAX's own default, 0.75. Whoever sets
    XLA_PYTHON_CLIENT_MEM_FRACTION overrides it."""
    compilation_cache: str | None = "~/.cache/shardwright/compiled"
    """Directory in which compiled programs are kept, for the next run of the same step; null: none. It must be writable
    by nobody whom you would not let run programs as you. It grows; what is in it can be deleted at any time. A run of
    several processes, of which the first writes and all read, keeps none here, where hosts may each have their own:
    give a directory that they share. Whoever sets JAX_COMPILATION_CACHE_DIR overrides it."""


@dataclasses.dataclass
class DistributedConfig:
    """The processes of a run, on one host or on many. docs/multi-host.md tells how to start them."""

    auto: bool = False
    """Whether JAX finds out by itself who the processes are, as it can under Slurm, Open MPI, Kubernetes and on Cloud
    TPU. Otherwise there is one, or coordinator, count and id say it."""
    count: int | None = None
    """Processes of the run, at least 1. Null: one; with auto, as many as there are."""
    coordinator: str | None = None
    """address:port of process 0, the same in all processes; the port is one that is free there."""
    id: int | None = None
    """Which process this is, in [0, count)."""
    devices: str = "all"
    """all: a process uses all devices that it sees. one: that of its number on the host, of those that all processes
    there see; only with auto, under Slurm and Open MPI."""
    join_timeout: int = 300
    """Seconds, at least 1, that the processes have to find one another."""
    heartbeat_timeout: int = 60
    """Seconds, at least 1. Of a process that is not heard of for so long, the others say that it is gone, and end."""
    stall_timeout: int = 600
    """Seconds, at least 1. A process that lives, but is so long at one point of a step, has stalled, and all end."""
    pause_timeout: int = 3600
    """The same for what may take longer than a step: start, compilation, first step, checkpoints, validation."""

    @property
    def is_single(self) -> bool:
        """Whether there is one process for certain, which then looks for no others."""
        return not self.auto and self.count in (None, 1)


@dataclasses.dataclass
class PathsConfig:
    root_working_dir: str = "runs"
    model_name: str | None = None
    """The run's directory in root_working_dir; a run that is there already is resumed. Null: config name and time."""


@dataclasses.dataclass
class Config:
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


MODEL_SETTINGS = ("module", "vocab", "layers", "heads", "d_head", "bos_id", "sharded", "check")
"""What train.py and the tools ask of any ModelConfig."""

MODEL_FUNCTIONS = {
    "embed": ("w", "ids", "positions", "c", "row_seeds"),
    "layers": ("w", "x", "positions", "c", "attend", "caches", "numbers", "row_seeds"),
    "logits": ("w", "x", "c"),
    "gather_ends": ("w",),
}
"""The parts of a model's math, and their arguments. docs/models.md tells what each does."""


def model_of(name: str):
    """The module of this name, with the math of a model. Raises ValueError if there is none, or a part is missing."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f"model.module is {name!r}, and Python finds no module of that name; put {name}.py where you start, or its "
            "directory into PYTHONPATH."
        ) from None
    missing = [part for part in ("ModelConfig", "weight_table", *MODEL_FUNCTIONS) if not hasattr(module, part)]
    if missing:
        raise ValueError(f"model.module is {name!r}, which has no {', '.join(missing)}; see docs/models.md.")
    if not dataclasses.is_dataclass(module.ModelConfig):
        raise ValueError(f"model.module is {name!r}, whose ModelConfig is no dataclass; see docs/models.md.")
    known = {*dir(module.ModelConfig), *(field.name for field in dataclasses.fields(module.ModelConfig))}
    missing = [part for part in MODEL_SETTINGS if part not in known]
    if missing:
        raise ValueError(
            f"model.module is {name!r}, whose ModelConfig has no {', '.join(missing)}: a field or property each; see "
            "docs/models.md."
        )
    for name, arguments in MODEL_FUNCTIONS.items():
        try:
            inspect.signature(getattr(module, name)).bind(*arguments)
        except TypeError as error:
            raise ValueError(
                f"model.module is {module.__name__!r}, whose {name} does not take ({', '.join(arguments)}): {error}; "
                "see docs/models.md."
            ) from None
    return module


def to_config(composed: DictConfig) -> Config:
    """What Hydra composed, typed: the model section by the model's own ModelConfig, the rest was by the schema.

    Raises ValueError for a setting that is missing, unknown, or out of its range.
    """
    config = composed.copy()
    module = model_of(config.model.module)
    try:
        config.model = OmegaConf.merge(OmegaConf.structured(module.ModelConfig), config.model)
    except OmegaConfBaseException as error:
        known = ", ".join(field.name for field in dataclasses.fields(module.ModelConfig))
        remedy = f" There are {known}." if isinstance(error, ConfigKeyError) else ""
        raise ValueError(f"model.{error.full_key}: {str(error).splitlines()[0]}.{remedy}") from None
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"no value for {', '.join(missing)}.")
    c: Config = OmegaConf.to_object(config)
    check_config(c)
    return c


RETIRED = {"hardware": ("xla_flags", "hosts", "coordinator", "host")}
"""Settings that there were once. None of them says what a run computes."""


def with_defaults(saved: dict) -> dict:
    """A checkpoint's configuration, with the defaults of settings that did not exist yet when it was made."""
    filled = {}
    for section in dataclasses.fields(Config):
        given = saved.get(section.name, {})
        kind = model_of(given.get("module", "train")).ModelConfig if section.name == "model" else section.type
        defaults = {f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
        made = {f.name: f.default_factory() for f in dataclasses.fields(kind) if callable(f.default_factory)}
        kept = {name: value for name, value in given.items() if name not in RETIRED.get(section.name, ())}
        filled[section.name] = defaults | made | kept
    return saved | filled


def fixed_settings(saved: dict, current: dict) -> tuple[str, ...]:
    """What a checkpoint's configuration and that of the run that goes on from it must agree on, as dotted names.

    Free are mesh, processes, logging, microbatches, and the length of the run.
    """
    data = tuple(f"data.{name}" for name in fixed_data_settings(saved["data"], current["data"]))
    training = tuple(
        f"training.{name}" for name in ("batch_size", "seq_len", "seed", "compute_dtype", "document_mask", "fp8")
    )
    # Nothing reads it any more, and where it points to may be gone: it may be left out, but not say something else.
    training += ("training.init_from",) if current["training"].get("init_from") is not None else ()
    return ("model", "optimizer", *data, *training)


def check_resumes(saved: dict, c: Config, directory: Path) -> None:
    """Raises ValueError if `c` differs from the configuration of the run in `directory` in what must stay."""
    saved, current = with_defaults(saved), dataclasses.asdict(c)
    differences = config_differences(saved, current, fixed_settings(saved, current))
    if differences:
        raise ValueError(
            f"the run in {directory} was made with another configuration:\n  "
            + "\n  ".join(differences)
            + "\nChange these back to resume it, or start another run with a new paths.model_name."
        )


def fixed_by_weights(config: dict) -> tuple[str, ...]:
    """What a run and the one whose weights it starts from (training.init_from) must agree on, as dotted names.

    The model, without how its weights were first drawn, and what further training is there to change: RoPE scaling, for
    longer sequences, and dropout.
    """
    free = ("embed_init_scale", "weight_init_scale", "rope_scaling", "dropout")
    return tuple(f"model.{name}" for name in config["model"] if name not in free)


_UPPER = {2**31: "below 2**31", 2**63: "below 2**63", math.inf: "finite", math.nextafter(1, 2): "at most 1"}
"""How messages say the ends of ranges."""


def check_ranges(section: str, settings, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises ValueError for a field of `settings` that is outside its [low, end). None is in every range."""
    for name, (low, end) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not low <= value < end:  # NaN is in no range
            upper = _UPPER.get(end, f"below {end}")
            raise ValueError(f"{section}.{name} is {value}; it must be at least {low} and {upper}.")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError for a value that is none of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}.")


def check_config(c: Config) -> None:
    """Raises ValueError for a setting out of its range."""
    count = (1, 2**63)
    check_ranges("model", c.model, {"vocab": count, "layers": count, "bos_id": (0, c.model.vocab)})
    c.model.check(c.training.seq_len)
    check_optimizer(c.optimizer)
    names = ("batch_size", "seq_len", "steps", "tokens", "microbatches", "log_interval", "eval_interval")
    names += ("checkpoint_interval", "keep_checkpoints", "sample_interval", "sample_tokens", "sample_top_k")
    names += ("loss_chunk", "unroll")
    check_ranges("training", c.training, dict.fromkeys(names, count) | {"sample_temperature": (0, math.inf)})
    check_ranges("training", c.training, {"eval_batches": (0, 2**63), "seed": (0, 2**63), "epochs": (0, math.inf)})
    check_pipeline(c.pipeline)
    check_distributed(c.distributed)
    fraction = c.hardware.memory_fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"hardware.memory_fraction is {fraction}; it must be above 0 and at most 1.")
    check_choice("training.gather_weights", c.training.gather_weights, ("layer", "step"))
    if c.training.gather_weights == "step" and not hasattr(model_of(c.model.module), "gather_layers"):
        raise ValueError(f"training.gather_weights is step, but the model {c.model.module} has no gather_layers.")
    check_choice("training.compute_dtype", c.training.compute_dtype, tuple(COMPUTE_DTYPES))
    check_choice("training.attention", c.training.attention, PATHS)
    check_choice("training.save", c.training.save, tuple(KEPT))
    if getattr(c.model, "dropout", 0) and c.training.attention not in ("auto", "einsum"):
        raise ValueError(
            f"training.attention is {c.training.attention}, which has no dropout, and model.dropout {c.model.dropout}; "
            "choose einsum or auto, or set model.dropout=0."
        )
    if c.training.loss_chunk is not None and c.training.seq_len % c.training.loss_chunk:
        raise ValueError(
            f"training.loss_chunk is {c.training.loss_chunk}; it must divide training.seq_len = {c.training.seq_len}."
        )
    if not c.distributed.is_single and c.paths.model_name is None:
        raise ValueError("distributed says that there are several processes; give paths.model_name, the same in all.")
    if c.paths.model_name == "":
        raise ValueError("paths.model_name is empty; give the run a name.")


def check_pipeline(c: PipelineConfig) -> None:
    """Raises ValueError for a setting out of its range."""
    check_ranges("pipeline", c, {"virtual_stages": (1, 2**63)})
    schedule_of(c.schedule)
    counts = c.layers_per_stage
    is_list = isinstance(counts, list) and all(type(n) is int and n > 0 for n in counts)
    if not (counts is None or counts == "balanced" or is_list):
        raise ValueError(
            f"pipeline.layers_per_stage is {counts!r}; give a list of the layers of each stage, at least 1 each, "
            "balanced, or null for the same number in all."
        )


def check_distributed(c: DistributedConfig) -> None:
    """Raises ValueError for a setting out of its range, or that others contradict."""
    seconds = dict.fromkeys(("join_timeout", "heartbeat_timeout", "stall_timeout", "pause_timeout"), (1, 2**31))
    check_ranges("distributed", c, {"count": (1, 2**31), "id": (0, c.count or 2**31), **seconds})
    check_choice("distributed.devices", c.devices, ("all", "one"))
    given = {f"distributed.{name}": getattr(c, name) for name in ("coordinator", "count", "id")}
    if c.auto:
        for name in ("distributed.coordinator", "distributed.id"):
            if given[name] is not None:
                raise ValueError(f"{name} is {given[name]}; set distributed.auto=false, or leave it out.")
        return
    if c.devices == "one":
        raise ValueError("distributed.devices is one, which needs distributed.auto=true.")
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < 3 and c.count != 1:
        said = ", ".join(f"{name} is {value}" for name, value in given.items() if value is not None)
        raise ValueError(
            f"{said}; give {' and '.join(missing)} too, or distributed.auto=true alone where JAX finds the processes "
            "by itself: under Slurm, Open MPI, Kubernetes, and on Cloud TPU."
        )
    if c.coordinator is not None:
        address, _, port = c.coordinator.rpartition(":")
        if not address or not (port.isdecimal() and 1 <= int(port) < 2**16):
            raise ValueError(
                f"distributed.coordinator is {c.coordinator!r}; write it as address:port, the port in [1, 65535]."
            )


def check_optimizer(c: OptimizerConfig) -> None:
    """Raises ValueError for a setting out of its range."""
    count, fraction, positive = (1, 2**63), (0, 1), (0, math.inf)
    check_ranges("optimizer", c, {"adam_b1": fraction, "adam_b2": fraction, "muon_momentum": fraction})
    check_ranges("optimizer", c, {"warmup_steps": (0, 2**63), "schedule_steps": count, "cooldown_steps": count})
    check_ranges("optimizer", c, {"muon_iterations": count, "final_fraction": (0, math.nextafter(1, 2))})
    names = ("learning_rate", "adam_epsilon", "weight_decay", "clip_norm", "z_loss", "muon_rms")
    check_ranges("optimizer", c, dict.fromkeys(names, positive))
    check_choice("optimizer.algorithm", c.algorithm, ("adamw", "muon"))
    check_choice("optimizer.schedule", c.schedule, ("cosine", "linear", "wsd", "constant"))
    for kind in c.decay_on:
        check_choice("optimizer.decay_on", kind, KINDS)
    needed = {"schedule_steps": c.schedule != "constant", "cooldown_steps": c.schedule == "wsd"}
    for name, wanted in needed.items():
        if wanted != (getattr(c, name) is not None):
            raise ValueError(
                f"optimizer.schedule is {c.schedule} and optimizer.{name} {getattr(c, name)}; "
                + (f"give {name}." if wanted else "leave it null.")
            )
    if c.schedule_steps is not None and c.warmup_steps >= c.schedule_steps - (c.cooldown_steps or 0):
        until = f"optimizer.schedule_steps {c.schedule_steps}" + (
            f", cooldown {c.cooldown_steps}" * bool(c.cooldown_steps)
        )
        raise ValueError(
            f"optimizer.warmup_steps is {c.warmup_steps} and {until}; the warmup must end before the decay does."
        )


def check_divides(c: Config, mesh: Mapping[str, int], of_batch: bool = True) -> None:
    """Raises ValueError for a size that the axes of the mesh do not divide, or a `sharded` that names none.

    `of_batch`: also for those of a batch, not only of weights.
    """
    for name, axes in c.model.sharded.items():
        if not hasattr(c.model, name) or not set(axes.split("·")) <= {"p", *mesh}:
            raise ValueError(
                f"the sharded of {c.model.module}.ModelConfig has {name!r}: {axes!r}; it maps names of settings to "
                "axes of the mesh, with · between them: t, d, t·d or t·d·p."
            )
    model = {f"model.{name}": axes for name, axes in c.model.sharded.items()}
    if getattr(c.model, "qk_norm", False):
        model["model.d_head"] = "t·d"
    training = {"training.seq_len": "t", "training.batch_size": "r·d·training.microbatches"}
    if c.training.loss_chunk is not None:
        training["training.loss_chunk"] = "t"
    mesh = {"p": 1, **mesh}
    shown = {axis: size for axis, size in mesh.items() if axis != "p" or size > 1}
    factors = {**mesh, "training.microbatches": c.training.microbatches}
    for name, axes in {**model, **(training if of_batch else {})}.items():
        section, field = name.split(".")
        axes = "·".join(axis for axis in axes.split("·") if axis in shown or axis not in mesh)
        value, devices = getattr(getattr(c, section), field), math.prod(factors[axis] for axis in axes.split("·"))
        if value % devices:
            raise ValueError(
                f"{name} is {value}; on the mesh {' '.join(f'{axis}={size}' for axis, size in shown.items())} it must "
                f"be a multiple of {axes} = {devices}."
            )


def check_booleans(overrides: Sequence[str], config) -> None:
    """Raises ValueError for an override like `data.shuffle=2`, which OmegaConf would take for true."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if isinstance(OmegaConf.select(config, key), bool) and value.lower().strip("'\"") not in ("true", "false"):
            raise ValueError(f"{key} is {value}; it must be true or false.")


def register_schema() -> None:
    """Tells Hydra the types of all fields; required ones are there but missing, so that an override can name them."""
    schema = OmegaConf.structured(Config)
    for section in dataclasses.fields(Config):
        if section.name != "model":
            schema[section.name] = OmegaConf.structured(section.type)
    # Which fields the model has, only its own module knows, and a composition can still name it: see to_config.
    schema.model = OmegaConf.create({"module": "train"}, flags={"struct": False})
    ConfigStore.instance().store(name="config_schema", node=schema)
