"""Models written for the version before: what has changed is named in a line, with what to write instead."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from models import gpt2
from shardwright.modeling.model import load_model, module_of

SOURCE = Path(gpt2.__file__).read_text()
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

    yield write
    sys.modules.pop("old_model", None)


def test_a_layer_that_takes_einsum_is_refused(written):
    assert SOURCE.count(CALL) == 1
    written(SOURCE.replace(CALL, "tokens: Tokens, attend: Callable, einsum: Callable)"))
    problem = "whose layer takes `einsum`; drop it, and call shardops.matmul in its place"
    with pytest.raises(ValueError, match=line(problem)):
        load_model(gpt2.ModelConfig(module="old_model"))


@pytest.mark.parametrize("name", ["gpt2", "moe", "family"])
@pytest.mark.parametrize("how", ["import {}", "from {} import Model"])
def test_an_import_of_a_model_that_moved_is_refused(written, name, how):
    written(how.format(name) + "\n")
    problem = f"which imports {name}; write `from models import {name}`"
    with pytest.raises(ValueError, match=line(problem)):
        module_of("old_model")


def test_another_import_that_fails_keeps_its_error(written):
    written("import nowhere\n")
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'"):
        module_of("old_model")
