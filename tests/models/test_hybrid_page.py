"""docs/hybrid.md: the template becomes a hybrid that is proved, causal and sampled."""

import contextlib
import re

import jax
import pytest

from shardwright.inspect.causality import check_causal
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.sampling import cache
from shardwright.tools.init.__main__ import TEMPLATE
from tests.support import tiny
from tests.support.own_model import changed, imported
from tests.support.recipes import ROOT

PAGE = (ROOT / "docs/hybrid.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
MIXING = "\n\n".join(
    re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/mixing.md").read_text(), re.DOTALL | re.MULTILINE
    )
)
SIZES = {
    "vocab": 64,
    "d_model": 32,
    "layers": 2,
    "n_kv": 4,
    "n_q_per_kv": 1,
    "d_head": 4,
    "d_ff": 8,
}


def hybrid() -> str:
    source = (TEMPLATE / "my_model.py").read_text()
    for diff in DIFFS:
        source = changed(source, re.sub(r"^$", " ", diff.rstrip("\n"), flags=re.MULTILINE) + "\n")
    return source


@contextlib.contextmanager
def project(directory):
    """The settings of a run of the page's model."""
    sources = {"mixing": MIXING, "my_model": hybrid()}
    with contextlib.ExitStack() as stack:
        for name, source in sources.items():
            module = stack.enter_context(imported(name, source, directory))
        yield tiny.config(module.ModelConfig(**SIZES), microbatches=2)


def check_states(c) -> None:
    cache.check_cache(tiny.forward_of(load_model(c.model), c.training), 24)


@pytest.mark.long
def test_it_is_proved_causal_and_sampled_as_the_forward_pass(tmp_path):
    with project(tmp_path) as c, jax.set_mesh(tiny.mesh("c=2 d=2 t=2")):
        step = tiny.step(c)
        assert find_unsound(step) == []
        assert check_causal(step) == ""
        with jax.set_mesh(tiny.mesh("d=2 t=2")):
            check_states(c)
