"""The steps of every shipped configuration compute on their mesh what one device computes."""

import dataclasses
import types

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import train
from shardwright.inspect.soundness import examine, find_unsound
from shardwright.modeling.model import load_model
from shardwright.optimizers import rates
from shardwright.program.config import PipelineConfig
from shardwright.program.step import Step, trace_step
from tests.support import tiny
from tests.support.edits import Change
from tests.support.recipes import ROOT, SOURCE, module_of, train_with
from tests.support.shipped import RUNS, load
from tests.support.traced_steps import GPT2

DEMO, STAGES = "r=2 d=2 t=2", "r=1 d=2 t=2 p=2"
# the mesh, and what is set beside: of training, the model, the optimizer or the pipeline
SETTINGS = {
    "the demo": (DEMO, {}),
    "one device": ("r=1 d=1 t=1", {}),
    "gathered once a step": (DEMO, {"gather_weights": "step", "microbatches": 2}),
    "blockwise": (DEMO, {"attention": "blockwise"}),
    "a ring over c": ("r=1 d=2 c=4", {"context": "ring", "attention_block": 2}),
    "ulysses": ("r=1 d=2 t=1 c=2", {"context": "ulysses"}),
    "1f1b": ("r=1 d=2 t=2 p=2", {"schedule": "1f1b", "microbatches": 4}),
    "loss in chunks, c": ("r=1 d=1 t=2 c=2", {"loss_chunk": 4}),
    "fp8": (DEMO, {"fp8": True}),
    "one document": (DEMO, {"unroll": 3, "document_mask": False, "qk_norm": True, "d_head": 8}),
    "averaged": ("r=1 d=2 t=1", {"eval_average": "ema", "average_steps": 100}),
    "tied": ("r=1 d=4 t=2", {"tied_embeddings": True, "logit_softcap": 5.0, "z_loss": 1e-3}),
    "a ring of stages": (STAGES, {"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    "stages": (STAGES, {}),
    "four stages": (
        "r=1 d=2 t=1 p=4",
        {"microbatches": 4, "compute_dtype": "bf16", "z_loss": 1e-3},
    ),
    # Schedules with halves of backwards: what their tasks pass on has other types of JAX.
    "zb_h1": (STAGES, {"microbatches": 4, "schedule": "zb_h1"}),
    "zb_v": (STAGES, {"microbatches": 4, "schedule": "zb_v", "virtual_stages": 2}),
    # A device holds one entry of: heads of keys and sequences, positions, d_ff and both heads, all
    # of them.
    "one sequence and one head": ("r=2 d=4 t=8", {}),
    "one position": ("r=1 d=2 t=8", {"seq_len": 8, "n_kv": 16}),
    "one of each": ("r=2 d=4 t=8", {"seq_len": 8, "d_ff": 8, "vocab": 8, "n_q_per_kv": 1}),
    "one entry, stages": ("r=2 d=4 t=4 p=2", {"batch_size": 16, "n_kv": 4}),
}
LONG_RUNS = ("local_test_synthetic", "local_test_pipeline", "flat_tokens_c4_a100x8x4_84m")
"""Of the shipped configurations, those whose tests are not slow."""


def mesh_of(text: str) -> AbstractMesh:
    sizes = {axis: int(n) for axis, n in (word.split("=") for word in text.split())}
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes)
    )


def with_settings(of, settings: dict):
    """A part of the configuration with those of the settings that it has."""
    return dataclasses.replace(
        of, **{k: v for k, v in settings.items() if k in of.__dataclass_fields__}
    )


def unsound(c, mesh: AbstractMesh, module=train) -> list[str]:
    return [
        str(finding)
        for finding in find_unsound(trace_step(c, load_model(c.model), mesh, spec=module.SPEC))
    ]


def step_of(settings: str, module=train, **given) -> Step:
    mesh, of_settings = SETTINGS[settings]
    given = given | of_settings
    if "p=" in mesh:
        given = {"microbatches": 2, "layers": 4} | given
    c = tiny.config(with_settings(tiny.model(module=module.__name__), given))
    c.training, c.optimizer = with_settings(c.training, given), with_settings(c.optimizer, given)
    c.pipeline = with_settings(PipelineConfig(), given)
    return trace_step(c, load_model(c.model), mesh_of(mesh), spec=module.SPEC)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_compute_what_one_device_computes(settings):
    """As they run, with schedules, rings and chunks; and the small ones that are run decide all
    about them.
    """
    found, undecided, *_ = examine(step_of(settings))
    assert (found, undecided) == ([], [])


@pytest.mark.long
def test_steps_of_a_gpu_compute_what_one_device_computes(monkeypatch):
    """Which fixes the layout of gradients. Kernels apart, all else is traced as on a CPU."""
    monkeypatch.setattr(rates, "target_device", lambda: types.SimpleNamespace(platform="gpu"))
    step = step_of("the demo", compute_dtype="bf16")
    assert "layout_constraint" in str(step.jaxpr)
    assert find_unsound(step) == []


def mesh_for(c, d: int, t: int) -> AbstractMesh:
    return mesh_of(f"r={c.mesh.r} d={d} t={t}" + (f" p={c.mesh.p}" if c.mesh.p > 1 else ""))


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    "name", [x if x in LONG_RUNS else pytest.param(x, marks=pytest.mark.slow) for x in RUNS]
)
def test_shipped_steps_compute_what_one_device_computes(name):
    c = load(name)
    for d in (2, 8) if "c4" in name else (2,):
        assert unsound(c, mesh_for(c, d, c.mesh.t)) == []


BEFORE_THE_STEP = {  # what an evaluation does with its batch, and whether that is found
    "targets=jnp.roll(batch.targets & 7, 1, -1)": False,
    "targets=batch.targets // "
    "jax.typeof(batch.targets).sharding.shard_shape(batch.targets.shape)[1]": True,
}


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(("change", "is_wrong"), BEFORE_THE_STEP.items(), ids=["right", "wrong"])
def test_operations_on_the_batch_are_checked_while_a_run_has_its_mesh(change, is_wrong):
    text = (ROOT / "train.py").read_text()
    for old, new in {
        "options)\n    @compute_scope(config.training.compute_dtype)": "options)\n    def "
        f"evaluation_step(w, batch):\n        return per_device(w, dataclasses.replace(batch, "
        f"{change}))\n\n    @compute_scope(config.training.compute_dtype)",
        "def evaluation_step(w: Of[Weights]": "def per_device(w: Of[Weights]",
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    with train_with({"train.py": text}) as module:
        c = step_of("the demo", module).config
        with jax.set_mesh(tiny.mesh("d=2 t=2")):
            step = trace_step(c, load_model(c.model), jax.sharding.get_mesh(), spec=module.SPEC)
            found = [str(finding) for finding in find_unsound(step)]
    assert len(found) == is_wrong
    assert all("mesh" in text for text in found), found


@pytest.mark.long
def test_stages_of_a_model_that_drops_entries_by_the_number_of_a_layer_are_right():
    c = tiny.config(GPT2, microbatches=2)
    c.training.seq_len = GPT2.positions
    assert unsound(c, mesh_of("r=1 d=2 t=1 p=2")) == []


@pytest.mark.long
def test_the_loop_around_the_steps_may_ask_for_the_machine():
    asks = Change(
        "state = run.begin()",
        "FOUND\nprint(jax.process_index(), jax.device_count())",
        within="train",
    )
    with module_of(asks.apply(SOURCE)) as module:
        assert find_unsound(step_of("the demo", module)) == []
