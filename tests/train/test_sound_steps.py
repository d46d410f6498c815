"""The steps of every shipped configuration are proved on meshes of any size; wrong edits of train.py are not."""

import dataclasses
import re
from pathlib import Path

import pytest
import tiny
from jax.sharding import AbstractMesh, AxisType
from recipes import module_of
from shipped import RUNS, load

import train
from shardwright.modeling.model import load_model
from shardwright.run.pipeline_config import PipelineConfig
from shardwright.run.soundness import find_unsound

SETTINGS = {  # what it is about: settings of training, of the model and of the optimizer, and the mesh
    "the demo": ({}, {}, {}, "r=2 d=2 t=2"),
    "d alone": ({}, {}, {}, "r=1 d=8 t=1"),
    "t alone": ({}, {}, {}, "r=1 d=1 t=8"),
    "one device": ({}, {}, {}, "r=1 d=1 t=1"),
    "microbatches": ({"microbatches": 2}, {}, {}, "r=2 d=2 t=2"),
    "gathered once a step": ({"gather_weights": "step"}, {}, {}, "r=2 d=2 t=2"),
    "blockwise": ({"attention": "blockwise"}, {}, {}, "r=2 d=2 t=2"),
    "loss in chunks": ({"loss_chunk": 4}, {}, {}, "r=2 d=2 t=2"),
    "fp8": ({"fp8": True}, {}, {}, "r=2 d=2 t=2"),
    "bf16": ({"compute_dtype": "bf16"}, {}, {}, "r=2 d=2 t=2"),
    "an average": ({"ema_decay": 0.9, "unroll": 3, "document_mask": False}, {}, {}, "r=2 d=2 t=2"),
    "muon": ({}, {}, {"algorithm": "muon"}, "r=2 d=2 t=2"),
    "tied": ({}, {"tied_embeddings": True, "logit_softcap": 5.0}, {"z_loss": 1e-3}, "r=1 d=4 t=2"),
    "QK-norm": ({}, {"qk_norm": True, "d_head": 8}, {}, "r=2 d=2 t=2"),
    "moments in bf16": ({}, {}, {"algorithm": "muon", "state_dtype": "bf16"}, "r=2 d=2 t=2"),
    "moments in bf16, t alone": ({}, {}, {"state_dtype": "bf16"}, "r=1 d=1 t=8"),
    "moments in bf16, stages": ({"microbatches": 2}, {"layers": 4}, {"state_dtype": "bf16"}, "r=1 d=2 t=2 p=2"),
    "moments in bf16, a ring": ({"microbatches": 2}, {"layers": 4}, {"state_dtype": "bf16"}, "r=1 d=2 t=2 p=2"),
    "stages": ({"microbatches": 2}, {"layers": 4}, {}, "r=1 d=2 t=2 p=2"),
    "stages, tied": ({"microbatches": 2}, {"layers": 4, "tied_embeddings": True}, {}, "r=2 t=2 p=2"),
    "stages, loss in chunks": ({"microbatches": 2, "loss_chunk": 4}, {"layers": 4}, {}, "r=1 d=2 t=2 p=2"),
    "four stages, t": ({"microbatches": 4}, {"layers": 4}, {}, "r=1 d=1 t=2 p=4"),
    "four stages": ({"microbatches": 4, "compute_dtype": "bf16"}, {"layers": 4}, {"z_loss": 1e-3}, "r=1 d=2 t=1 p=4"),
}
PIPELINES = {"zb_h1": 1, "zb_v": 2}  # schedules with halves of backwards, and their chunks
SETTINGS |= {name: ({"microbatches": 4}, {"layers": 4}, {}, "r=1 d=2 t=2 p=2") for name in PIPELINES}
UNEVEN = {  # layers of each stage, and the chunks of a device
    "stages of 1 and 3 layers": ([1, 3], 1),
    "stages of 1 and 2 layers": ([1, 2], 1),
    "stages of 3 layers in all, balanced": ("balanced", 1),
    "a ring of 1 or 2 layers": ([1, 2, 1, 2], 2),
}
SETTINGS |= {
    name: ({"microbatches": 2}, {"layers": sum(counts) if isinstance(counts, list) else 3}, {}, "r=1 d=2 t=2 p=2")
    for name, (counts, _) in UNEVEN.items()
}
HALVES = {  # schedules with halves of backwards: what their tasks pass on has other types of JAX
    "zb_h1 by blocks": ({"attention": "blockwise"}, {}, "r=1 d=2 t=2 p=2"),
    "zb_h1 without t": ({}, {"qk_norm": True, "d_head": 8}, "r=1 d=2 t=1 p=2"),
}
SETTINGS |= {
    name: ({"microbatches": 4, **training}, {"layers": 4, **model}, {}, mesh)
    for name, (training, model, mesh) in HALVES.items()
}
ONE_ENTRY = {  # a device holds one entry of: heads of keys, sequences, positions, d_ff, both heads, all of them
    "one head": ({}, {}, {}, "r=1 d=1 t=8"),
    "one head, which has one query": ({}, {"n_q_per_kv": 1}, {}, "r=1 d=1 t=8"),
    "one sequence": ({}, {}, {}, "r=2 d=4 t=1"),
    "one sequence and one head": ({}, {}, {}, "r=2 d=4 t=8"),
    "one position": ({"seq_len": 8}, {"n_kv": 16}, {}, "r=1 d=2 t=8"),
    "one column of d_ff": ({}, {"d_ff": 8, "n_kv": 16}, {}, "r=1 d=2 t=8"),
    "one row of d_model": ({}, {"d_model": 8}, {}, "r=1 d=8 t=1"),
    "one id": ({}, {"vocab": 8}, {}, "r=1 d=2 t=8"),
    "one of each": ({"seq_len": 8}, {"d_ff": 8, "vocab": 8, "n_q_per_kv": 1}, {}, "r=2 d=4 t=8"),
    "one entry, blockwise": ({"attention": "blockwise"}, {}, {}, "r=2 d=4 t=8"),
    "one entry, loss in chunks": ({"loss_chunk": 8}, {}, {}, "r=2 d=4 t=8"),
    "one entry, fp8": ({"fp8": True}, {}, {}, "r=2 d=4 t=8"),
    "one entry, muon": ({}, {}, {"algorithm": "muon"}, "r=2 d=4 t=8"),
    "one entry, bf16": ({"compute_dtype": "bf16"}, {}, {}, "r=2 d=4 t=8"),
    "one entry, microbatches": ({"microbatches": 2, "batch_size": 16}, {}, {}, "r=2 d=4 t=8"),
    "one entry, QK-norm": ({}, {"n_kv": 4, "qk_norm": True, "d_head": 32, "logit_softcap": 5.0}, {}, "r=1 d=8 t=4"),
    "one entry, stages": ({"microbatches": 2, "batch_size": 16}, {"n_kv": 4, "layers": 4}, {}, "r=2 d=4 t=4 p=2"),
}
SETTINGS |= ONE_ENTRY
SHORT = ("the demo", "stages of 1 and 3 layers", "one sequence and one head")
SLOW = {*ONE_ENTRY} - {*SHORT, "one position", "one of each", "one entry, stages"}
SLOW |= {
    "d alone",
    "loss in chunks",
    "muon",
    "moments in bf16",
    "moments in bf16, t alone",
    "stages, tied",
    "four stages",
}
LONG_RUNS = ("local_test_synthetic", "local_test_pipeline", "local_gpt2", "flat_tokens_c4_a100x8x4_84m")
"""Of the shipped configurations, those whose tests are not slow."""


def marked(name: str) -> list:
    if name in SHORT:
        return []
    return [pytest.mark.slow if name in SLOW or name in {*RUNS} - {*LONG_RUNS} else pytest.mark.long]


def mesh_of(text: str) -> AbstractMesh:
    sizes = {axis: int(n) for axis, n in (word.split("=") for word in text.split())}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def found(settings: str, module=train) -> list[str]:
    training, model, optimizer, mesh = SETTINGS[settings]
    seq_len = training.get("seq_len", tiny.LENGTH)
    c = tiny.config(
        tiny.model(**model, module=module.__name__), **{k: v for k, v in training.items() if k != "seq_len"}
    )
    c.training = dataclasses.replace(c.training, seq_len=seq_len)
    c.optimizer = dataclasses.replace(c.optimizer, **optimizer)
    if "ring" in settings:
        c.pipeline = PipelineConfig("interleaved_1f1b", 2)
    if settings in HALVES:
        c.pipeline = PipelineConfig("zb_h1")
    if settings in PIPELINES:
        c.pipeline = PipelineConfig(settings, PIPELINES[settings])
    if settings in UNEVEN:
        counts, virtual_stages = UNEVEN[settings]
        c.pipeline = PipelineConfig(virtual_stages=virtual_stages, layers_per_stage=counts)
    return [str(finding) for finding in find_unsound(module.programs, c, load_model(c.model), mesh_of(mesh))]


@pytest.mark.long
@pytest.mark.parametrize("settings", [pytest.param(s, marks=marked(s)) for s in SETTINGS])
def test_steps_are_proved(settings):
    assert found(settings) == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marked(name)) for name in RUNS])
def test_shipped_steps_are_proved(name):
    c = load(name)
    r, t = c.mesh.r, c.mesh.t
    for d in (2, 8) if "c4" in name else (2,):
        sizes = {"r": r, "d": d, "t": t} | ({"p": c.mesh.p} if c.mesh.p > 1 else {})
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
        assert [str(f) for f in find_unsound(train.programs, c, load_model(c.model), mesh)] == []


AT_ONE_ENTRY = {  # of a shipped configuration on a mesh with t devices: what is set for a device to have one entry
    "one head": lambda c, t: {"n_kv": t, "heads": t},
    "one sequence": lambda c, t: {"batch_size": c.mesh.r * 2 * c.training.microbatches},
    "one position": lambda c, t: {"seq_len": t},
    "one column of d_ff": lambda c, t: {"d_ff": t},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marked(name)) for name in RUNS])
@pytest.mark.parametrize("what", ["all", *(pytest.param(what, marks=pytest.mark.slow) for what in AT_ONE_ENTRY)])
def test_shipped_steps_are_proved_at_one_entry(name, what):
    c, t = load(name), 8
    chosen = AT_ONE_ENTRY.values() if what == "all" else [AT_ONE_ENTRY[what]]
    new = {key: value for setting in chosen for key, value in setting(c, t).items()}
    change = lambda of: dataclasses.replace(of, **{k: v for k, v in new.items() if k in of.__dataclass_fields__})
    c = dataclasses.replace(c, model=change(c.model), training=change(c.training))
    c.training = dataclasses.replace(c.training, loss_chunk=None)  # which a sequence of t positions has not
    sizes = {"r": c.mesh.r, "d": 2, "t": t} | ({"p": c.mesh.p} if c.mesh.p > 1 else {})
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
    assert [str(f) for f in find_unsound(train.programs, c, load_model(c.model), mesh)] == []


WRONG = {  # an edit of train.py that the types accept, and what the check says of it
    "norm of positions": (
        "jnp.mean(jnp.square(x32), axis=-1, keepdims=True)",
        "jnp.mean(jnp.square(x32), axis=1, keepdims=True)",
        r"add: a partial sum over t .*\n  operand 1: f32\[B/r/d 1 M \+t\]",
    ),
    "softmax of local heads": (
        "weights = rules.softmax(scores, sinks)",
        "weights = jax.nn.softmax(scores, axis=1)",
        r"a maximum over this device's block is used before it is taken over t",
    ),
    "a device's batch": (
        "losses * mask)",
        "losses * mask / targets.shape[0])",
        r"div: a number that depends on the mesh was multiplied into a value",
    ),
    "positions of a block": (
        'return x + shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", out)',
        "x = x * (1 + jnp.arange(x.shape[1])[:, None].astype(x.dtype))\n"
        '        return x + shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", out)',
        r"positions count from the start of this device's block|holds? different entries",
    ),
    "devices of the mesh": (
        "new, grad_norm, rate = update_state(",
        "g = jax.tree.map(lambda x: x / (c.mesh.r * c.mesh.t), g)\n        new, grad_norm, rate = update_state(",
        r"div: a number that depends on the mesh was multiplied",
    ),
    "devices of the machine": (
        "new, grad_norm, rate = update_state(",
        "g = jax.tree.map(lambda x: x / jax.device_count(), g)\n        new, grad_norm, rate = update_state(",
        r"jax.device_count is the same on all meshes",
    ),
    "devices of the machine, in an optimizer": (
        "count = jnp.float32(step + 1)",
        "count = jnp.float32(step + jax.device_count())",
        r"jax.device_count is the same on all meshes",
    ),
    "one device's noise": (
        'hidden: act["B/r/d L F/t"] = (jax.nn.silu(jnp.float32(gate)) * up).astype(dtype)',
        "hidden = jax.nn.silu(gate) * up * jax.random.bernoulli(jax.random.key(0), 0.5, up.shape)",
        r"random_bits: dim 0 of the result has \d+ entries here and",
    ),
    "a sum that is taken twice": (
        'return shardops.psum("+p ->", total), reduced(g), layers',
        "g = jax.tree.map(lambda x: lax.psum(lax.pcast(x, 'r', to='varying'), 'r'), reduced(g))\n"
        '    return shardops.psum("+p ->", total), g, layers',
        r"psum\w*: a number that depends on the mesh was multiplied",
    ),
}


@pytest.mark.parametrize("edit", WRONG)
def test_a_wrong_edit_is_refused_at_its_line(edit):
    old, new, message = WRONG[edit]
    source = Path(train.__file__).read_text()
    assert source.count(old) == 1
    changed = source.replace(old, new)
    first = changed[: changed.index(new)].count("\n") + 1
    with module_of(changed) as module:
        text = "\n".join(found("the demo", module))
    assert re.search(message, text), text
    lines = [int(line) for line in re.findall(r"^\S.*?:(\d+): ", text, re.MULTILINE)]
    assert set(lines) & set(range(first, first + new.count("\n") + 1)), text


@pytest.mark.long
@pytest.mark.parametrize(("axes", "is_right"), [("t", False), pytest.param("t p", True, marks=pytest.mark.long)])
def test_a_size_in_the_loss_counts_the_parts_of_all_stages(axes, is_right):
    """All stages compute the loss together, each with its part of the vocabulary."""
    old = "    return log_normalizer - at_target + z_loss"
    new = f"""    whole = logits.shape[-1] * shardops.axis_size("{axes}")
    minus_mean = shardops.einsum_unreduced("B/r/d L V/t/p -> B/r/d L +t +p", -logits / whole)
    at_target = at_target - 0.1 * shardops.psum("B/r/d L +t +p -> B/r/d L", minus_mean)
{old}"""
    source = Path(train.__file__).read_text()
    assert source.count(old) == 1
    with module_of(source.replace(old, new)) as module:
        text = "\n".join(found("stages", module))
    assert (text == "") == is_right, text
    assert is_right or "div: a number that depends on the mesh was multiplied into a value" in text, text


@pytest.mark.long
def test_the_loop_around_the_steps_may_ask_for_the_machine():
    old = "        state = run.begin("
    source = Path(train.__file__).read_text()
    assert source.count(old) == 1
    with module_of(source.replace(old, f"        print(jax.process_index(), jax.device_count())\n{old}")) as module:
        assert found("the demo", module) == []


CHOICES = {  # a choice by the size of a device's block: settings in which it is another one than on one device
    "operations": ("the demo", "t alone"),
    "numbers of heads": ("one head",),
    "numbers of sequences": ("one sequence", "one of each"),
}
EDITS = {
    "operations": (
        "        hidden: act[",
        "        gate = gate if x.shape[1] == 16 else jnp.sin(gate)\n        hidden: act[",
        "operations|another one on this mesh",
    ),
    "numbers of heads": (
        "    heads = rules.head_numbers(*q.shape[2:4])",
        "    scores = scores * (0.5 if k.shape[2] == 1 else 0.25)\n    heads = rules.head_numbers(*q.shape[2:4])",
        "a number that depends on the mesh",
    ),
    "numbers of sequences": (
        "losses * mask)",
        "losses * mask * (3.0 if losses.shape[0] == 1 else 2.0))",
        "a number that depends on the mesh",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_choice_by_the_size_of_a_block_is_refused(edit):
    old, new, message = EDITS[edit]
    source = Path(train.__file__).read_text()
    assert source.count(old) == 1
    with module_of(source.replace(old, new)) as module:
        for settings in CHOICES[edit]:
            text = "\n".join(found(settings, module))
            assert re.search(message, text), text
