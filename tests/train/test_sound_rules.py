"""Rules of attention are checked on every path; and what the two traces of a check share does not
blind it.

Each edit of train.py is wrong: `old` becomes `new`, and a line of `new` must be named.
"""

import functools
import importlib
import re
import sys
from typing import NamedTuple

import jax
import pytest

from shardwright.modeling.model import load_model
from shardwright.program.step import trace_step
from tests.support import tiny
from tests.support.proofs import found_soon
from tests.support.recipes import SOURCE

RULE = "    mask = masks.AttentionMask(mask_mod=(masks.causal, masks.same_document))"
ATTEND = "attention(q, k, v, self.mask)"
EMBEDDED = '        return shardops.psum("B/b L/c/t M +p -> B/b L/c/t M", x)'
LOSS = '    return shardops.psum("+b +c ->", total) / forward.count'
MODEL = "Model = Llama\n"
AXES = "jax.sharding.get_abstract_mesh().shape"


def with_rule(changes: str) -> str:
    return f"attention(q, k, v, dataclasses.replace(self.mask, {changes}))"


PATHS = {  # name: the mesh, and settings of training
    "einsum": ("d=2 t=2", {}),
    "blockwise": ("d=2 t=2", {"attention": "blockwise"}),
    "gather": ("d=2 c=2 t=2", {}),
    "ring": ("d=2 c=2 t=2", {"context": "ring"}),
    "ulysses": ("d=2 c=2 t=2", {"context": "ulysses"}),
    "ulysses, blockwise": ("d=2 c=2 t=2", {"context": "ulysses", "attention": "blockwise"}),
}


def score(text):
    return (RULE, f"    mask = masks.AttentionMask(score_mod=lambda scores, q, k, heads: {text})")


WRONG_RULES = {
    "ALiBi by the heads of a device": score(
        "scores - 2.0 ** (-8.0 * (heads + 1) / heads.size) * (q.index - k.index)"
    ),
    "the number of a row": score(
        "scores * (1 + jnp.arange(scores.shape[0])[:, None, None, None, None])"
    ),
    "the index of a device": score("scores * (1 + lax.axis_index('t'))"),
    "a window of a device's positions": (
        ATTEND,
        with_rule("mask_mod=(masks.causal, masks.Window(q[:, :, 0].size // 64))"),
    ),
    "a scale of a device's heads": (ATTEND, with_rule("scale=q.shape[2] ** -0.5")),
    "a soft-cap of a device's heads": (
        ATTEND,
        with_rule("score_mod=masks.SoftCap(float(q.shape[2]))"),
    ),
    "a factor of a device's heads": (
        ATTEND,
        with_rule("score_mod=lambda scores, *_, n=q.shape[2]: scores * n"),
    ),
    "a condition of a device's heads": (
        ATTEND,
        with_rule("mask_mod=(masks.causal, lambda q, k, n=q.shape[2]: q.index - k.index < n)"),
    ),
    "sinks of a device's heads": (
        ATTEND,
        "attention(q, k, v, self.mask, sinks=jnp.float32(q).mean((1, 4)) * 0 + q.shape[2])",
    ),
    "learned by the place of a head": (
        ATTEND,
        "attention(q, k, v, dataclasses.replace(self.mask, score_mod=lambda s, q, k, h, b: s * "
        "b[..., None, None]), jnp.float32(q).max((1, 4)) * 0 + jnp.arange(q.shape[2])[:, None])",
    ),
}
RIGHT_RULES = {
    "ALiBi": score("scores - 2.0 ** (-8.0 * (heads + 1) / 16) * (q.index - k.index)"),
    "a window": (
        RULE,
        "    mask = masks.AttentionMask(mask_mod=(masks.causal, masks.same_document, "
        "masks.Window(4)))",
    ),
    "a soft-cap, made in the layer": (ATTEND, with_rule("score_mod=masks.SoftCap(5.0), scale=0.3")),
}
WRONG_PAIRS = [  # a rule and the path that it takes
    ("ALiBi by the heads of a device", "blockwise"),
    ("the number of a row", "blockwise"),
    ("the index of a device", "einsum"),
    ("a window of a device's positions", "ring"),
    ("a scale of a device's heads", "ulysses, blockwise"),
    ("a soft-cap of a device's heads", "gather"),
    ("a factor of a device's heads", "ulysses"),
    ("a condition of a device's heads", "einsum"),
    ("sinks of a device's heads", "ulysses"),
    ("learned by the place of a head", "blockwise"),
]
CALLED_LATER = (
    "a window of a device's positions",
    "a scale of a device's heads",
    "a soft-cap of a device's heads",
    "a factor of a device's heads",
    "a window, c",
    "a score, c",
    "the loss, stages",
)
"""Rules that are applied elsewhere, where no call leads from the edited line to the operation."""
RIGHT_PAIRS = [
    ("ALiBi", "blockwise"),
    ("a window", "ring"),
    ("a soft-cap, made in the layer", "ulysses"),
]
QUICK = ("a dict", "a window, c")
HELPER = "\n@functools.cache\ndef devices():\n    return shardops.axis_size('t')\n"
SEEN = ("\nSEEN = {}\n", "SEEN.setdefault('t', shardops.axis_size('t'))")
CLASS = "self.table = table_of(self.Weights, config, std_of_matrix, changes)"
WRONG_STATE = {  # what is kept of a trace: edits
    "a cache": ((MODEL, MODEL + HELPER), (LOSS, f"{LOSS} / devices()")),
    "a dict": ((MODEL, MODEL + SEEN[0]), (LOSS, f"{LOSS} / {SEEN[1]}")),
    "a dict from before the proof": (
        (MODEL, MODEL + SEEN[0]),
        (CLASS, f"{CLASS}\n        {SEEN[1]}"),
        (LOSS, f"{LOSS} / SEEN['t']"),
    ),
    "an attribute of a class": (
        (
            CLASS,
            f"{CLASS}\n        type(self).devices = getattr(type(self), 'devices', "
            "shardops.axis_size('t'))",
        ),
        (EMBEDDED, f"{EMBEDDED} * self.devices"),
    ),
}
WRONG_PRESENCE = {  # what depends on whether there is an axis: the mesh, and edits
    "the loss, e": ("d=2 e=2 t=2", (LOSS, f"{LOSS} * (2.0 if 'e' in {AXES} else 1.0)")),
    "the embedding, c": (
        "d=2 c=2 t=2",
        (EMBEDDED, f"{EMBEDDED} * (2.0 if 'c' in {AXES} else 1.0)"),
    ),
    "a window, c": (
        "d=2 c=2 t=2",
        (ATTEND, with_rule(f"mask_mod=(masks.causal, *[masks.Window(3)] * ('c' in {AXES}))")),
    ),
    "a score, c": (
        "d=2 c=2 t=2",
        (ATTEND, with_rule(f"score_mod=lambda s, *_: s * (2 if 'c' in {AXES} else 1)")),
    ),
    "the optimizer, e": (
        "d=2 e=2 t=2",
        ("+ config.adam_epsilon *", f"+ (3 if 'e' in {AXES} else 1) * config.adam_epsilon *"),
    ),
    "the loss, stages": ("p=2 d=2 t=2", (LOSS, f"{LOSS} * (4.0 if stages.has_stages() else 1.0)")),
}


class Edited(NamedTuple):
    name: str
    lines: set[int]


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Makes a module of train.py after edits, a file like that of any user."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(*edits: tuple[str, str]) -> Edited:
        source = SOURCE
        for old, new in edits:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        (tmp_path / "an_edited_train.py").write_text(source)
        importlib.invalidate_caches()
        known = SOURCE.splitlines()
        return Edited(
            "an_edited_train",
            {i for i, line in enumerate(source.splitlines(), 1) if line not in known},
        )

    return make


def found(edit: Edited, mesh: str, **training) -> str:
    training |= {"microbatches": 2} if "p=" in mesh else {}
    with jax.set_mesh(tiny.mesh(mesh)):
        c = tiny.config(tiny.model(module=edit.name, layers=2), **training)
        module = importlib.import_module(edit.name)
        step = trace_step(c, load_model(c.model), tiny.mesh(mesh), spec=module.SPEC)
        return found_soon(step, functools.partial(is_named, edit))


def is_named(edit: Edited, text: str) -> bool:
    """The first finding is at a line that was edited, or at one that it calls."""
    first = text.partition("remedy: ")[0]
    return not edit.lines.isdisjoint(map(int, re.findall(rf"{edit.name}\.py:(\d+)", first)))


def cases(names) -> list:
    """Those that are not in QUICK are long."""

    def case(of, name):
        return pytest.param(*of, marks=[pytest.mark.long(every_case=True)] * (name not in QUICK))

    return [case((x,), x) if isinstance(x, str) else case(x, x[0]) for x in names]


@pytest.mark.parametrize(("name", "path"), cases(WRONG_PAIRS))
def test_a_wrong_rule_is_refused_at_its_line(edited, name, path):
    edit, (mesh, training) = edited(WRONG_RULES[name]), PATHS[path]
    text = found(edit, mesh, **training)
    assert text
    assert is_named(edit, text) == (name not in CALLED_LATER), text


@pytest.mark.parametrize(("name", "path"), cases(RIGHT_PAIRS))
def test_a_right_rule_is_accepted(edited, name, path):
    mesh, training = PATHS[path]
    assert found(edited(RIGHT_RULES[name]), mesh, **training) == ""


def test_the_numbers_of_a_rule_are_shown(edited):
    text = found(edited(WRONG_RULES["a soft-cap of a device's heads"]), "d=2 t=2")
    assert "div: a number that depends on the mesh: 4.0 here, 8.0 on one device" in text


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", cases(WRONG_STATE))
def test_what_a_trace_leaves_in_a_module_does_not_hide_the_mesh(edited, name):
    edit = edited(*WRONG_STATE[name])
    text = found(edit, "d=2 t=2")
    assert is_named(edit, text), text
    assert sys.modules[edit.name].Model, "the module of the run is in its place again"


@pytest.mark.parametrize("name", cases(WRONG_PRESENCE))
def test_nothing_depends_on_whether_the_mesh_has_an_axis(edited, name):
    mesh, change = WRONG_PRESENCE[name]
    edit = edited(change)
    text = found(edit, mesh)
    assert text
    assert is_named(edit, text) == (name not in CALLED_LATER), text
