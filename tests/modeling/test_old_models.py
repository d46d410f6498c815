"""Models written for the version before: what has changed is named in a line, with what to write instead."""

import dataclasses
import importlib
import re
import sys
import warnings
from pathlib import Path

import jax
import pytest
import tiny

from shardwright.modeling.model import load_model, module_of
from shardwright.models import gpt2

SOURCE = Path(gpt2.__file__).read_text()
SIZES = {"vocab": 64, "d_model": 32, "layers": 2, "heads": 4, "positions": 32}
CALL = "tokens: Tokens, attend: Callable)"

pytestmark = pytest.mark.quick


def line(problem: str) -> str:
    """The whole message, as a pattern."""
    return f"^model.module is 'old_model', {re.escape(problem)}; see docs/models.md for what a module must have\\.$"


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Writes the module `old_model` outside of the repository."""

    def write(source: str) -> None:
        (tmp_path / "old_model.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "old_model", raising=False)
        importlib.invalidate_caches()

    return write


def test_a_layer_that_takes_einsum_is_refused(written):
    assert SOURCE.count(CALL) == 1
    written(SOURCE.replace(CALL, "tokens: Tokens, attend: Callable, einsum: Callable)"))
    problem = "whose layer takes `einsum`; drop it, and call shardops.matmul instead"
    with pytest.raises(ValueError, match=line(problem)):
        load_model(gpt2.ModelConfig(module="old_model"))


@pytest.mark.parametrize("name", ["gpt2", "moe", "family"])
@pytest.mark.parametrize("how", ["import {}", "from {} import Model"])
def test_an_import_of_a_model_that_moved_is_refused(written, name, how):
    written(how.format(name) + "\n")
    problem = f"which imports {name}; import shardwright.models.{name} instead"
    with pytest.raises(ValueError, match=line(problem)):
        module_of("old_model")


def test_another_import_that_fails_keeps_its_error(written):
    written("import nowhere\n")
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'"):
        module_of("old_model")


OLD_NAMES = [  # as shardwright/models/gpt2.py has it, and as version 0.1 wrote it
    (
        "from shardwright.modeling.masks import CAUSAL",
        "from shardlib.layers import Extras\nfrom shardwright.modeling import rules",
    ),
    (
        "        return x + dropout(out,",
        "        assert tokens.place == 0\n        return Extras() and x + dropout(out,",
    ),
    (
        "attend(q[..., None, :], k, v, CAUSAL,",
        "attend(q[..., None, :], k, v, rules.Rule(visible=(rules.causal, rules.same_document), score=None),",
    ),
]


@pytest.mark.long
def test_the_names_of_version_0_1_trace_the_same_step_and_say_what_to_write(written):
    old = SOURCE
    for new_text, old_text in OLD_NAMES:
        assert old.count(new_text) == 1
        old = old.replace(new_text, old_text)
    written(old)
    c = gpt2.ModelConfig(**SIZES)
    with jax.set_mesh(tiny.mesh("one device")), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = tiny.step(tiny.config(dataclasses.replace(c, module="old_model"))).hash
        assert found == tiny.step(tiny.config(c)).hash
    said = {str(each.message) for each in caught if each.category is FutureWarning}
    assert {re.search(r"is now (?:masks\.)?([\w.]+)", text)[1] for text in said} == {
        "AttentionMask",
        "LayerAux.",
        "tokens.index_in_period.",
    }


def test_a_rule_that_no_layer_would_read_is_refused(written):
    """A model of version 0.1 that exchanges the rule of the Llama would train with the Llama's own mask."""
    written(
        "import train\nfrom shardwright.modeling import masks, settings\nModelConfig = settings.ModelConfig\n"
        "class Model(train.Llama):\n    rule = masks.AttentionMask(scale=1.0)\n"
    )
    with pytest.raises(ValueError, match=line("whose Model has a `rule`, which nothing reads; call it `mask`")):
        load_model(tiny.model(module="old_model"))
