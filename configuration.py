"""Every setting of a run, typed: what configs/*.yaml and the command line are checked against.

A field without a default has to be set by the run's configuration.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from input_loader import DataConfig
from input_loader import fixed_settings as fixed_data_settings

COMPUTE_DTYPES = {"bf16": "bfloat16", "f32": "float32"}


@dataclasses.dataclass
class ModelConfig:
    vocab: int
    """Number of token ids that the model knows; at least the data's largest id + 1. Sharded over t."""
    d_model: int
    """Width of the residual stream. A multiple of d·t devices, since the norm weights are sharded over both."""
    layers: int
    n_kv: int
    """Key/value heads. Sharded over t."""
    n_q_per_kv: int
    """Query heads for each key/value head: 1 is multi-head attention, more is grouped-query attention."""
    d_head: int
    """Entries of one head; even, since RoPE turns pairs."""
    d_ff: int
    """Hidden width of the SwiGLU block. Sharded over t."""
    rope_base: float = 10_000.0
    """Base of the rotary wavelengths (arXiv 2104.09864)."""
    norm_epsilon: float = 1e-5
    """Added to the mean square under the root of RMSNorm (arXiv 1910.07467)."""
    tied_embeddings: bool = False
    """Whether the embedding table is also the output projection."""
    embed_init_scale: float | None = None
    """Standard deviation of the embedding table at init; null: 1, or 1/sqrt(d_model) if tied."""
    weight_init_scale: float = 1.0
    """Factor on the 1/sqrt(fan-in) standard deviation of all other matrices at init."""


@dataclasses.dataclass
class OptimizerConfig:
    learning_rate: float
    """Peak learning rate, reached at the end of the warmup."""
    warmup_steps: int
    """Steps of linear warmup, at least 0. With a warmup, step 0 has learning rate 0."""
    cosine_steps: int
    """Step at which the cosine decay reaches its floor, counted from step 0. More than warmup_steps."""
    final_fraction: float = 0.1
    """The floor of the decay as a fraction of the peak, in [0, 1]."""
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay on all weights (arXiv 1711.05101), multiplied by the learning rate."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it."""
    z_loss: float = 0.0
    """Factor on the squared log of the softmax normalizer (arXiv 2204.02311, section 5); 0 turns it off."""


@dataclasses.dataclass
class MeshConfig:
    """Devices along each axis; at most one may be -1, which takes what is left."""

    r: int = 1
    d: int = -1
    t: int = 1


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
    microbatches: int = 1
    """Parts of the batch that go through the model one after the other. batch_size is a multiple of them times r·d."""
    gather_weights: str = "layer"
    """layer: weights are gathered over d where they are used, in each microbatch. step: once a step, ahead of the
    microbatches, their gradients scattered once after them; each device of d then holds all weights and gradients."""
    compute_dtype: str = "bf16"
    """bf16, or f32 for exact work. Weights and optimizer state are f32 either way."""
    eval_batches: int = 8
    """Batches of the validation split, at most, in an evaluation; 0 for no evaluations."""
    eval_interval: int | None = None
    """Steps between evaluations; there is one after the last step too, and with null that one alone."""
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
    hosts: int = 1
    """Processes. More than one: JAX finds the others by itself under Slurm, Open MPI, Kubernetes and on Cloud TPU."""
    coordinator: str | None = None
    """Elsewhere: address:port of process 0, the same on all."""
    host: int | None = None
    """Elsewhere: which process this is, in [0, hosts)."""
    xla_flags: str = ""
    """Put behind those in the environment's XLA_FLAGS before the devices start."""


@dataclasses.dataclass
class PathsConfig:
    root_working_dir: str = "runs"
    model_name: str | None = None
    """The run's directory in root_working_dir; a run that is there already is resumed. Null: config name and time."""


@dataclasses.dataclass
class Config:
    model: ModelConfig
    optimizer: OptimizerConfig
    mesh: MeshConfig
    data: DataConfig
    training: TrainingConfig
    hardware: HardwareConfig
    paths: PathsConfig


def with_defaults(saved: dict) -> dict:
    """A checkpoint's configuration, with the defaults of settings that did not exist yet when it was made."""
    filled = {}
    for section in dataclasses.fields(Config):
        defaults = {f.name: f.default for f in dataclasses.fields(section.type) if f.default is not dataclasses.MISSING}
        filled[section.name] = defaults | saved.get(section.name, {})
    return saved | filled


def fixed_settings(saved: dict, current: dict) -> tuple[str, ...]:
    """What a checkpoint's configuration and that of the run that goes on from it must agree on, as dotted names.

    Free are mesh, hosts, logging, microbatches, and the length of the run.
    """
    data = tuple(f"data.{name}" for name in fixed_data_settings(saved["data"], current["data"]))
    training = tuple(f"training.{name}" for name in ("batch_size", "seq_len", "seed", "compute_dtype"))
    return ("model", "optimizer", *data, *training)


def check_config(c: Config) -> None:
    """Raises ValueError for a setting out of its range."""
    integers = {
        "model": ("vocab", "d_model", "layers", "n_kv", "n_q_per_kv", "d_head", "d_ff"),
        "training": (
            "batch_size",
            "seq_len",
            "steps",
            "tokens",
            "microbatches",
            "log_interval",
            "eval_interval",
            "checkpoint_interval",
        ),
        "hardware": ("hosts",),
    }
    ranges = {f"{section}.{name}": (1, 2**63) for section, names in integers.items() for name in names}
    ranges |= {"training.keep_checkpoints": (1, 2**63), "training.eval_batches": (0, 2**63)}
    ranges |= {"training.seed": (0, 2**63), "hardware.host": (0, c.hardware.hosts), "training.epochs": (0, math.inf)}
    ranges |= {"optimizer.adam_b1": (0, 1), "optimizer.adam_b2": (0, 1), "optimizer.warmup_steps": (0, 2**63)}
    ranges |= {"optimizer.final_fraction": (0, math.nextafter(1, 2))}
    for name in ("learning_rate", "adam_epsilon", "weight_decay", "clip_norm", "z_loss"):
        ranges[f"optimizer.{name}"] = (0, math.inf)
    for name in ("rope_base", "norm_epsilon", "embed_init_scale", "weight_init_scale"):
        ranges[f"model.{name}"] = (0, math.inf)
    for name, (low, end) in ranges.items():
        section, field = name.split(".")
        value = getattr(getattr(c, section), field)
        if value is not None and not low <= value < end:  # NaN is in no range
            raise ValueError(f"{name} is {value}; it must be at least {low} and below {end}.")
    if c.model.d_head % 2:
        raise ValueError(f"model.d_head is {c.model.d_head}; RoPE turns pairs of entries, so it must be even.")
    if c.optimizer.warmup_steps >= c.optimizer.cosine_steps:
        raise ValueError(
            f"optimizer.warmup_steps is {c.optimizer.warmup_steps} and optimizer.cosine_steps "
            f"{c.optimizer.cosine_steps}; the warmup must end before the decay does."
        )
    choices = {"gather_weights": ("layer", "step"), "compute_dtype": tuple(COMPUTE_DTYPES)}
    for name, allowed in choices.items():
        value = getattr(c.training, name)
        if value not in allowed:
            raise ValueError(f"training.{name} is {value!r}; choose one of {', '.join(allowed)}.")
    if c.hardware.hosts > 1 and c.paths.model_name is None:
        raise ValueError(f"hardware.hosts is {c.hardware.hosts}; give paths.model_name, so that all hosts agree on it.")
    if c.paths.model_name == "":
        raise ValueError("paths.model_name is empty; give the run a name.")


def check_divides(c: Config, mesh: Mapping[str, int]) -> None:
    """Raises ValueError for a size that the axes of the mesh do not divide."""
    r, d, t = mesh["r"], mesh["d"], mesh["t"]
    for name, axes, devices in (
        ("model.vocab", "t", t),
        ("model.d_model", "t·d", t * d),
        ("model.n_kv", "t", t),
        ("model.d_ff", "t", t),
        ("training.seq_len", "t", t),
        ("training.batch_size", "r·d·training.microbatches", r * d * c.training.microbatches),
    ):
        section, field = name.split(".")
        value = getattr(getattr(c, section), field)
        if value % devices:
            raise ValueError(
                f"{name} is {value}; on the mesh r={r} d={d} t={t} it must be a multiple of {axes} = {devices}."
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
        schema[section.name] = OmegaConf.structured(section.type)
    ConfigStore.instance().store(name="config_schema", node=schema)
