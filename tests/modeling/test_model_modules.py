"""A module with a model of one's own (docs/models.md): its defects are named.

By mutations of gpt2.py.
"""

import importlib
import sys
import types
from pathlib import Path

import jax
import pytest

from shardwright.modeling.model import load_model
from shardwright.modeling.weights import initialize
from tests.support import tiny

SOURCE = (Path(__file__).parents[2] / "shardwright/models/gpt2.py").read_text()

OF_TWO_DIMS = """
        layers = dataclasses.replace(self.table.layers, w_up=Weight((8, 8), "matrix"))
        self.table = dataclasses.replace(self.table, layers=layers)"""
TABLE = "self.table = table_of(GPT2, config, lambda fan_in: config.init_std, changes)"

pytestmark = pytest.mark.quick


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Makes a copy of gpt2.py outside the repository, with (old, new) texts exchanged, the module
    `mine`.
    """

    def make(*changes):
        source = SOURCE
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        (tmp_path / "mine.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        return importlib.import_module("mine")

    return make


TWICE = TABLE.replace("config,", "dataclasses.replace(config, layers=2 * config.layers),")
IS = "model.module is 'mine', "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [("    heads: int = ", "    n_heads: int = ")],
            f"{IS}.*no ModelConfig.heads; see docs/mo",
        ),
        ([("def logits(", "def output(")], f"{IS}.*no Model.logits; see docs/models.md"),
        (
            [(TABLE, TWICE)],
            r"table has a stack of shape \(24, 768\) in `layers`; its first dim must",
        ),
        (
            [('"K": "heads",', '"K": "heads", "L": "layers",')],
            "^ModelConfig.dims names L, a dim of",
        ),
    ],
)
def test_a_part_that_is_missing_or_wrong(module, changes, message):
    mine = module(*changes)
    c = getattr(mine, "ModelConfig", types.SimpleNamespace)()
    c.module = "mine"
    with pytest.raises(ValueError, match=message):
        load_model(c)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [("import bias,", "import Weight, bias,"), (TABLE, TABLE + OF_TWO_DIMS)],
            "w_up: .* has 3 dims, but the Weight's shape is .8, 8.",
        ),
        (
            [('w_up: matrix["M/fsdp -> F/t"]', 'w_up: matrix["M -> F/t"]')],
            r"w_up: f32\['layers M F/t'\] is not sharded over d;",
        ),
    ],
)
def test_a_weight_that_is_not_of_its_type(module, changes, message):
    mine = module(*changes)
    c = mine.ModelConfig(vocab=64, positions=16, d_model=64, heads=8, layers=2)
    with (
        jax.set_mesh(tiny.mesh("d=4 t=2")),
        pytest.raises(ValueError, match=f"the model's table.*{message}"),
    ):
        jax.eval_shape(lambda: initialize(mine.Model(c).table, jax.random.key(0)))
