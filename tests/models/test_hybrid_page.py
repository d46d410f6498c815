"""docs/hybrid.md: the template becomes a hybrid that is proved, causal and sampled."""

import re

import jax
import pytest

from shardwright.inspect.causality import find_leaks, small_program
from shardwright.inspect.soundness import examine
from shardwright.modeling.model import load_model
from shardwright.sampling import cache
from shardwright.tools.init.__main__ import TEMPLATE
from tests.support import tiny
from tests.support.own_model import SIZES, changed, imported
from tests.support.recipes import ROOT

PAGE = (ROOT / "docs/hybrid.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
MIXING = "\n\n".join(
    re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/mixing.md").read_text(), re.DOTALL | re.MULTILINE
    )
)


def hybrid() -> str:
    source = (TEMPLATE / "my_model.py").read_text()
    for diff in DIFFS:
        source = changed(source, re.sub(r"^$", " ", diff.rstrip("\n"), flags=re.MULTILINE) + "\n")
    return source


@pytest.mark.long
def test_it_is_proved_causal_and_sampled_as_the_forward_pass(tmp_path):
    with (
        imported("mixing", MIXING, tmp_path),
        imported("my_model", hybrid(), tmp_path) as module,
        jax.set_mesh(tiny.mesh("c=2 d=2 t=2")),
    ):
        c = tiny.config(module.ModelConfig(**SIZES | {"layers": 2, "d_head": 4}), microbatches=2)
        step = tiny.step(c)
        found, undecided, *_ = examine(step, ("training",))
        assert (found, undecided) == ([], [])
        assert find_leaks(small_program(step, "evaluation")) == []
        with jax.set_mesh(tiny.mesh("d=2 t=2")):
            cache.check_cache(tiny.forward_of(load_model(c.model), c.training), 24)
