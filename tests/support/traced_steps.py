"""The steps of a changed train.py, traced on meshes that have no devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from shardwright.cluster.config import HardwareConfig, MeshConfig
from shardwright.data.loader import DataConfig, batch_shapes
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import ModelConfig
from shardwright.models import gpt2
from shardwright.optimizers.config import OptimizerConfig
from shardwright.program.config import Config, PathsConfig, PipelineConfig, TrainingConfig
from tests.support.recipes import train_with

NAME = "mutated_train"
MESHES = [
    AbstractMesh((2,) * len(axes), axes, axis_types=(AxisType.Explicit,) * len(axes))
    for axes in (("r", "d", "t"), ("p", "r", "d", "t"))
]
SIZES = {
    "vocab": 20,
    "d_model": 8,
    "layers": 2,
    "n_kv": 2,
    "n_q_per_kv": 3,
    "d_head": 4,
    "d_ff": 12,
    "qk_norm": True,
}
GPT2 = gpt2.ModelConfig(vocab=20, positions=8, d_model=8, layers=2, heads=2, dropout=0.1, bos_id=0)
# name: whether the mesh has p, settings of training and pipeline, the model if it is not train.py's
CONFIGS = {
    "gathered in each layer": (False, {"gather_weights": "layer", "microbatches": 1}, {}, None),
    "gathered once a step": (False, {"gather_weights": "step", "microbatches": 2}, {}, None),
    "another model, with dropout": (False, {"microbatches": 2}, {}, GPT2),
    "stages": (True, {"gather_weights": "step", "microbatches": 2}, {}, None),
    "stages of another model, with dropout": (True, {"microbatches": 2}, {}, GPT2),
}
"""What a mutant is traced with: every collective of train.py is in one of them."""


@dataclasses.dataclass
class Program:
    """The training step and the evaluation step, traced."""

    jaxpr: str
    parts: tuple

    @functools.cached_property
    def stablehlo(self) -> str:
        """What the compiler is given."""
        return "".join(part.lower(lowering_platforms=("cpu",)).as_text() for part in self.parts)

    def is_same(self, other: "Program") -> bool:
        return self.jaxpr == other.jaxpr or self.stablehlo == other.stablehlo


def program(source: str, config: tuple, file: str = "train.py") -> Program:
    """The program with the text `source` of a file under one such as of CONFIGS.

    Raises what tracing raises.
    """
    stages, training, pipeline, model = config
    with train_with({file: source}, NAME) as module:
        c = Config(
            model=model or ModelConfig(module=NAME, **SIZES),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1, schedule_steps=2),
            mesh=MeshConfig(),
            data=DataConfig(filespec="unused"),
            training=TrainingConfig(batch_size=16, seq_len=4, steps=1, **training),
            hardware=HardwareConfig(),
            paths=PathsConfig(),
            pipeline=PipelineConfig(**pipeline),
        )
        with jax.sharding.use_abstract_mesh(MESHES[stages]):
            model = load_model(c.model)
            state = jax.eval_shape(lambda: module.init_state(jax.random.key(0), c, model))
            batch = batch_shapes(16, 4, c.training.microbatches)
            # First what is traced sooner, and refuses most mutants.
            evaluation = module.make_evaluation_step(c, model).trace(state.weights, batch)
            step = module.make_training_step(c, model).trace(
                state, batch, jax.ShapeDtypeStruct((), jnp.int32)
            )
    return Program(
        re.sub(r"0x[0-9a-f]+", "", f"{step.jaxpr}\n{evaluation.jaxpr}"), (step, evaluation)
    )
