"""The steps of every shipped configuration are proved on meshes of any size; wrong edits of train.py are refused."""

import dataclasses
import re
import types
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import train
from shardlib.shardtypes import ShardError
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.models import family, gpt2, moe
from shardwright.optimizers import rates
from shardwright.run.config import PipelineConfig
from shardwright.run.step import Step, trace_step
from tests.support import tiny
from tests.support.own_model import imported
from tests.support.proofs import found_soon
from tests.support.recipes import ROOT, SOURCE, module_of, train_with
from tests.support.shipped import RUNS, load
from tests.support.traced_steps import GPT2, program
from tests.support.wrong_edits import EDITS, OF_MODELS

DEMO, STAGES = "r=2 d=2 t=2", "r=1 d=2 t=2 p=2"
SETTINGS = {  # the mesh, and what is set beside: of training, the model, the optimizer or the pipeline
    "the demo": (DEMO, {}),
    "d alone": ("r=1 d=8 t=1", {}),
    "t alone": ("r=1 d=1 t=8", {}),
    "one device": ("r=1 d=1 t=1", {}),
    "microbatches": (DEMO, {"microbatches": 2}),
    "side by side": ("r=1 d=2 t=2", {"microbatches": 4, "side_by_side": 2}),
    "all side by side": (DEMO, {"microbatches": 2, "side_by_side": 2}),
    "gathered once a step": (DEMO, {"gather_weights": "step"}),
    "blockwise": (DEMO, {"attention": "blockwise"}),
    "loss in chunks": (DEMO, {"loss_chunk": 4}),
    "loss in chunks, c": ("r=1 d=1 t=2 c=2", {"loss_chunk": 4}),
    "fp8": (DEMO, {"fp8": True}),
    "bf16": (DEMO, {"compute_dtype": "bf16"}),
    "one document": (DEMO, {"unroll": 3, "document_mask": False}),
    "muon": (DEMO, {"algorithm": "muon"}),
    "tied": ("r=1 d=4 t=2", {"tied_embeddings": True, "logit_softcap": 5.0, "z_loss": 1e-3}),
    "QK-norm": (DEMO, {"qk_norm": True, "d_head": 8}),
    "a ring of stages": (STAGES, {"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    "stages": (STAGES, {}),
    "stages, tied": ("r=2 t=2 p=2", {"tied_embeddings": True}),
    "stages, loss in chunks": (STAGES, {"loss_chunk": 4}),
    "four stages, t": ("r=1 d=1 t=2 p=4", {"microbatches": 4}),
    "four stages": ("r=1 d=2 t=1 p=4", {"microbatches": 4, "compute_dtype": "bf16", "z_loss": 1e-3}),
    "zb_h1": (STAGES, {"microbatches": 4, "schedule": "zb_h1"}),
    "zb_v": (STAGES, {"microbatches": 4, "schedule": "zb_v", "virtual_stages": 2}),
    # Schedules with halves of backwards: what their tasks pass on has other types of JAX.
    "zb_h1 by blocks": (STAGES, {"microbatches": 4, "schedule": "zb_h1", "attention": "blockwise"}),
    "zb_h1 without t": ("r=1 d=2 t=1 p=2", {"microbatches": 4, "schedule": "zb_h1", "qk_norm": True, "d_head": 8}),
}
ALL = "r=2 d=4 t=8"
ONE_ENTRY = {  # a device holds one entry of: heads of keys, sequences, positions, d_ff, both heads, all of them
    "one head": ("r=1 d=1 t=8", {}),
    "one sequence": ("r=2 d=4 t=1", {}),
    "one sequence and one head": (ALL, {}),
    "one position": ("r=1 d=2 t=8", {"seq_len": 8, "n_kv": 16}),
    "one of each": (ALL, {"seq_len": 8, "d_ff": 8, "vocab": 8, "n_q_per_kv": 1}),
    "one entry, blockwise": (ALL, {"attention": "blockwise"}),
    "one entry, loss in chunks": (ALL, {"loss_chunk": 8}),
    "one entry, fp8": (ALL, {"fp8": True}),
    "one entry, muon": (ALL, {"algorithm": "muon"}),
    "one entry, QK-norm": ("r=1 d=8 t=4", {"n_kv": 4, "qk_norm": True, "d_head": 32, "logit_softcap": 5.0}),
    "one entry, stages": ("r=2 d=4 t=4 p=2", {"batch_size": 16, "n_kv": 4}),
}
SETTINGS |= ONE_ENTRY
SHORT = ("the demo", "stages", "one sequence and one head", "loss in chunks, c")
SLOW = {*ONE_ENTRY} - {*SHORT, "one position", "one of each", "one entry, stages"}
SLOW |= {"d alone", "t alone", "loss in chunks", "muon", "stages, tied", "stages, loss in chunks", "four stages, t"}
SLOW |= {"zb_h1 by blocks", "zb_h1 without t", "bf16", "all side by side"}
LONG_RUNS = ("local_test_synthetic", "local_test_pipeline", "flat_tokens_c4_a100x8x4_84m")
"""Of the shipped configurations, those whose tests are not slow."""


def marked(name: str) -> list:
    if name in SHORT:
        return []
    return [pytest.mark.slow if name in SLOW or name in {*RUNS} - {*LONG_RUNS} else pytest.mark.long]


def mesh_of(text: str) -> AbstractMesh:
    sizes = {axis: int(n) for axis, n in (word.split("=") for word in text.split())}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def with_settings(of, settings: dict):
    """A part of the configuration with those of the settings that it has."""
    return dataclasses.replace(of, **{k: v for k, v in settings.items() if k in of.__dataclass_fields__})


def unsound(c, mesh: AbstractMesh, module=train) -> list[str]:
    return [str(finding) for finding in find_unsound(trace_step(c, load_model(c.model), mesh, spec=module.SPEC))]


def step_of(settings: str, module=train, **given) -> Step:
    mesh, of_settings = SETTINGS[settings]
    given |= of_settings
    if "p=" in mesh:
        given = {"microbatches": 2, "layers": 4} | given
    c = tiny.config(with_settings(tiny.model(module=module.__name__), given))
    c.training, c.optimizer = with_settings(c.training, given), with_settings(c.optimizer, given)
    c.pipeline = with_settings(PipelineConfig(), given)
    return trace_step(c, load_model(c.model), mesh_of(mesh), spec=module.SPEC)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("settings", [pytest.param(s, marks=marked(s)) for s in SETTINGS])
def test_steps_are_proved(settings):
    """Of most with weights that layers gather: `auto` is compared with weights that are gathered ahead too."""
    gathered = {} if settings in (*SHORT, "one device", "d alone", "t alone") else {"gather_weights": "layer"}
    assert find_unsound(step_of(settings, **gathered)) == []


@pytest.mark.parametrize("settings", ["the demo", pytest.param("four stages", marks=pytest.mark.long)])
def test_steps_of_a_gpu_are_proved(settings, monkeypatch):
    """Which fixes the layout of gradients. Kernels apart, all else is traced as on a CPU."""
    monkeypatch.setattr(rates, "target_device", lambda: types.SimpleNamespace(platform="gpu"))
    step = step_of(settings, compute_dtype="bf16")
    assert "layout_constraint" in str(step.jaxpr)
    assert find_unsound(step) == []


def mesh_for(c, d: int, t: int) -> AbstractMesh:
    return mesh_of(f"r={c.mesh.r} d={d} t={t}" + (f" p={c.mesh.p}" if c.mesh.p > 1 else ""))


@pytest.mark.parametrize("name", [pytest.param(name, marks=marked(name)) for name in RUNS])
def test_shipped_steps_are_proved(name):
    c = load(name)
    for d in (2, 8) if "c4" in name else (2,):
        assert unsound(c, mesh_for(c, d, c.mesh.t)) == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marked(name)) for name in RUNS])
def test_shipped_steps_are_proved_at_one_entry(name):
    """One head, sequence, position and column of d_ff on each device."""
    c, t = load(name), 8
    one = {"n_kv": t, "heads": t, "batch_size": c.mesh.r * 2 * c.training.microbatches, "seq_len": t, "d_ff": t}
    c = dataclasses.replace(c, model=with_settings(c.model, one), training=with_settings(c.training, one))
    c.training.loss_chunk = None  # which a sequence of t positions has not
    assert unsound(c, mesh_for(c, 2, t)) == []


QUICK = (  # of each kind of edit a cheap one
    "a device's batch",
    "devices of the machine, in an optimizer",
    "devices of the machine",
    "a number of the mesh of the run",
    "softmax of local heads",
    "positions of a block",
    "one device's noise",
    "a choice by numbers of heads",
    "the embedding is scaled in what stages run alone",
)
PROVED = [
    pytest.param(edit, marks=[pytest.mark.long(every_case=True)] * (edit.name not in QUICK))
    for edit in EDITS
    if edit.gate == "proof"
]


LATE = (  # refused where most of the training step is traced
    "the loss is that of the last stage alone",
    "the gradient's norm leaves p out",
    "the gradient's norm is that of each stage",
    "the gradient's norm is reduced over t alone",
    "the logits are those of one stage",
    "the gradient's norm stays per device",
    "w_down is not gathered",
    "the count of targets stays per device",
)
TYPES = [edit for edit in EDITS if edit.gate == "types"]
SOON, LATER = ([edit for edit in TYPES if (edit.name in LATE) == is_late] for is_late in (False, True))


@pytest.mark.quick
@pytest.mark.parametrize("edits", [SOON, pytest.param(LATER, marks=pytest.mark.long)], ids=["soon", "late"])
def test_wrong_edits_do_not_trace(edits):
    accepted = []
    for edit in edits:
        try:
            program(edit.source, ("p" in edit.where[0], {"microbatches": 2}, {}, None), edit.file)
            accepted.append(f"{edit}: traces")
        except (ShardError, TypeError, ValueError) as error:
            accepted += [f"{edit}: {error}"] * (edit.message not in str(error))
    assert not accepted, "\n".join(accepted)


@pytest.mark.parametrize("edit", PROVED, ids=str)
def test_a_wrong_edit_is_refused_at_its_line(edit):
    def is_refused(text: str) -> bool:
        lines = {int(line) for line in re.findall(r"^\S.*?:(\d+): ", text, re.MULTILINE)}
        # A choice shows where its result meets another.
        return bool(re.search(edit.message, text)) and ("choice" in edit.name or bool(lines & edit.lines()))

    with train_with({edit.file: edit.source}) as module:
        for settings in edit.where:
            text = found_soon(step_of(settings, module), is_refused)
            assert is_refused(text), text


QUERIES = {  # of the mesh on which the step runs, which a trace for one device gets too
    "by name": "shardops.planned_devices('d')",
    "by an alias": "vars(__import__('shardlib.values').values)['planned_devices']('d')",
    "by a function of a library": "jax.tree.map(shardops.planned_devices, 'd')",
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_step_cannot_ask_for_the_mesh_on_which_it_runs(query):
    old = '"B/b L/c -> +b +c", losses * targets.counted)'
    new = old.replace("counted)", f"counted / {query})")
    assert SOURCE.count(old) == 1
    line = SOURCE[: SOURCE.index(old)].count("\n") + 1
    refused = pytest.raises(ShardError, match=f":{line}: planned_devices is the same on all meshes")
    with train_with({"train.py": SOURCE.replace(old, new)}) as module, refused:
        find_unsound(step_of("the demo", module))


BEFORE_THE_STEP = {  # what an evaluation does with its batch, and whether that is found
    "targets=jnp.roll(batch.targets & 7, 1, -1)": False,
    "targets=batch.targets // jax.typeof(batch.targets).sharding.shard_shape(batch.targets.shape)[1]": True,
}


@pytest.mark.parametrize(("change", "is_wrong"), BEFORE_THE_STEP.items(), ids=["right", "wrong"])
def test_operations_on_the_batch_are_proved_while_a_run_has_its_mesh(change, is_wrong):
    text = (ROOT / "train.py").read_text()
    for old, new in {
        "options)\n    @compute_scope(config.training.compute_dtype)": "options)\n    def evaluation_step(w, batch):\n"
        f"        return per_device(w, dataclasses.replace(batch, {change}))\n\n"
        "    @compute_scope(config.training.compute_dtype)",
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


SIZES = {"vocab": 64, "d_model": 32, "layers": 2, "n_kv": 4, "n_q_per_kv": 2, "d_head": 16, "d_ff": 32}
CAPS = {"attention_softcap": 5.0, "logit_softcap": 5.0}
EXPERTS = {"experts": 8, "experts_per_token": 2, "capacity_factor": 2.0, "pools": 4, "shared_experts": 1}
LOSSES = {"balance_loss": 0.1, "router_z_loss": 0.1, "correction_bias": True}
MODELS = {
    "train": lambda: train.ModelConfig(**SIZES, qk_norm=True, logit_softcap=5.0),
    "gpt2": lambda: gpt2.ModelConfig(vocab=64, positions=16, d_model=32, layers=2, heads=4, dropout=0.1),
    "family": lambda: family.ModelConfig(**SIZES, **CAPS, window=4, embedding_scaled=True, qk_norm_all=True),
    "moe": lambda: moe.ModelConfig(**SIZES, **EXPERTS, **LOSSES),
}
LONG_EDITS = ("moe: no slots on a mesh", "train: RoPE by the devices of t")


def marks_of(edit) -> list:
    every_case = {"every_case": True} if edit.name in LONG_EDITS else {}
    return [] if edit.name == "family: mean of local heads" else [pytest.mark.long(**every_case)]


@pytest.mark.parametrize("edit", [pytest.param(edit, marks=marks_of(edit)) for edit in OF_MODELS], ids=str)
def test_a_wrong_edit_of_a_model_is_refused_at_its_line(edit, tmp_path):
    (name,) = edit.where
    c, mesh = MODELS[name](), mesh_of("r=1 d=2 e=2 t=2" if name == "moe" else "r=1 d=2 t=2")
    c.module = f"edited_{name}"

    def is_named(text: str) -> bool:
        lists = re.findall(rf"edited_{name}\.py:(\d+(?:, \d+)*)", text)
        return bool(edit.lines(edit.message) & {int(number) for numbers in lists for number in numbers.split(", ")})

    with imported(c.module, edit.source, tmp_path) as edited:  # a file, as a user's is
        try:
            trainer = edited if name == "train" else train
            text = found_soon(trace_step(tiny.config(c), load_model(c), mesh, spec=trainer.SPEC), is_named)
        except ShardError as error:
            text = str(error)
    assert is_named(text), text
    assert "per_device" not in text


def test_a_layer_that_differs_between_stages_is_refused():
    old = "        x = save_for_backward(x + self.attend(x, w, tokens, attention))\n"
    assert SOURCE.count(old) == 1
    scaled = old.replace("= save", "= (1.0 + shardops.axis_index('p')) * save")
    differs = pytest.raises(ShardError, match="the value differs between devices of p")
    with module_of(SOURCE.replace(old, scaled)) as module, differs:
        unsound(tiny.config(tiny.model(layers=4, module=module.__name__), microbatches=2), mesh_of(STAGES), module)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("ids", ["jax.numpy.arange(len(layer_ids))", "layer_ids + 1", "layer_ids"])
def test_stages_that_number_their_layers_otherwise_are_refused(ids):
    """By the number of its layer, each drops entries of its own."""
    old, file = "self.forward.tokens(*microbatch), layer_ids)", "shardwright/run/stages.py"
    c = tiny.config(GPT2, microbatches=2)
    c.training.seq_len, source = GPT2.positions, (ROOT / file).read_text()
    assert source.count(old) == 1
    with train_with({file: source.replace(old, old.replace("layer_ids", ids))}) as module:
        text = "\n".join(unsound(c, mesh_of("r=1 d=2 t=1 p=2"), module))
    assert (text == "") == (ids == "layer_ids"), text


@pytest.mark.long
def test_the_loop_around_the_steps_may_ask_for_the_machine():
    old = "        state = run.begin("
    source = Path(train.__file__).read_text()
    assert source.count(old) == 1
    with module_of(source.replace(old, f"        print(jax.process_index(), jax.device_count())\n{old}")) as module:
        assert find_unsound(step_of("the demo", module)) == []
