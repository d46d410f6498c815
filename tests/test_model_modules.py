"""A module with a model of one's own (docs/models.md): its defects are named. By mutations of gpt2.py."""

import importlib
import sys
from pathlib import Path

import jax
import pytest
import tiny

import configuration
from weights import Weight, initialize

SOURCE = (Path(__file__).parent.parent / "gpt2.py").read_text()

pytestmark = pytest.mark.quick


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Makes a copy of gpt2.py outside the repository, with (old, new) texts exchanged, the module `mine`."""

    def make(*changes):
        source = SOURCE
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        (tmp_path / "mine.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        return importlib.import_module("mine")

    yield make
    sys.modules.pop("mine", None)


def test_as_it_is(module):
    assert configuration.model_of(module().__name__).ModelConfig().heads == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("    heads: int = 12", "    n_heads: int = 12")], "ModelConfig has no heads: a field or property"),
        ([("    bos_id: int = 50256", "    bos: int = 50256"), ("bos_id=config", "bos=config")], "no bos_id"),
        ([("def check(", "def checked("), ("sharded: Class", "shards: Class")], "no sharded, check"),
        ([("@dataclasses.dataclass\nclass ModelConfig", "class ModelConfig")], "ModelConfig is no dataclass"),
        ([("    numbers: LayerNumbers,\n", "")], "layers does not take .*numbers"),
        ([("def gather_ends(", "def gather_tables(")], "has no gather_ends"),
    ],
)
def test_a_part_that_is_missing(module, changes, message):
    module(*changes)
    any_text = ".*" if "no " in message else ""
    with pytest.raises(ValueError, match=f"model.module is 'mine', (whose|which) {any_text}{message}"):
        configuration.model_of("mine")


def test_no_module_of_that_name():
    with pytest.raises(ValueError, match=r"put nowhere\.py where you start, or its directory into PYTHONPATH"):
        configuration.model_of("nowhere")


@pytest.mark.parametrize(("old", "new"), [('"heads": "t"', '"heads": "td"'), ('"heads": "t"', '"n_heads": "t"')])
def test_a_sharded_that_names_nothing(module, old, new):
    c = tiny.config(module((old, new)).ModelConfig(module="mine"))
    with pytest.raises(ValueError, match=r"sharded of mine\.ModelConfig has .* maps names of settings to axes"):
        configuration.check_divides(c, {"r": 1, "d": 1, "t": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("w_up=into(hidden)", 'w_up=Weight((8, 8), "matrix")')], "w_up: .* has 3 dims, but"),
        ([('w_up: f32["M/d F/t"]', 'w_up: f32["M F/t"]')], r"w_up: f32\['layers M F/t'\] is not sharded over d;"),
        ([("return 4 * self.d_model", "return 3 * self.d_model + 1")], "w_up: .*F is 193, which t = 2 devices do not"),
        ([("@pytree_dataclass\nclass GPT2Layer", "@dataclasses.dataclass\nclass GPT2Layer")], "has a GPT2Layer where"),
    ],
)
def test_a_weight_that_is_not_of_its_type(module, changes, message):
    mine = module(*changes)
    c = mine.ModelConfig(vocab=64, positions=16, d_model=64, heads=8, layers=2)
    with jax.set_mesh(tiny.mesh("d=4 t=2")), pytest.raises(ValueError, match=f"weight_table.*{message}"):
        jax.eval_shape(lambda: initialize(mine.weight_table(c), jax.random.key(0)))


def test_a_kind_that_there_is_not():
    with pytest.raises(ValueError, match="a Weight of kind 'matrices'; choose one of matrix, embedding"):
        Weight((2, 2), "matrices")
