"""docs/hybrid.md: the template becomes a hybrid that is proved, causal and sampled; each error has
its message.
"""

import contextlib
import re

import jax
import pytest

from shardlib.parsing import ShardError
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
MESSAGES = [message.strip("` ") for message in re.findall(r"^\| (`.*?`+) \|", PAGE, re.MULTILINE)]
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
def project(directory, old: str = "", new: str = ""):
    """The settings of a run of the page's model, with an edit in one of its two files."""
    sources = {"mixing": MIXING, "my_model": hybrid()}
    if old:
        assert sum(source.count(old) for source in sources.values()) == 1
    with contextlib.ExitStack() as stack:
        for name, source in sources.items():
            module = stack.enter_context(
                imported(name, source.replace(old, new) if old else source, directory)
            )
        yield tiny.config(module.ModelConfig(**SIZES), microbatches=2)


def check_states(c) -> None:
    cache.check_cache(tiny.forward_of(load_model(c.model), c.training), 24)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", ["c=2 d=2 t=2", pytest.param("p=2 d=2 t=2", marks=pytest.mark.slow)]
)
def test_it_is_proved_and_causal(mesh, tmp_path):
    with project(tmp_path) as c, jax.set_mesh(tiny.mesh(mesh)):
        step = tiny.step(c)
        assert find_unsound(step) == []
        assert check_causal(step) == ""


@pytest.mark.long
def test_it_is_sampled_as_the_forward_pass(tmp_path):
    with project(tmp_path) as c, jax.set_mesh(tiny.mesh("d=2 t=2")):
        check_states(c)


def check_types(c) -> None:
    tiny.step(c).lower()


def check_documents(c) -> None:
    check_causal(tiny.step(c))


GATHERED = 'all_gather("K/t/fsdp -> K/t", w.a_log)'
EDITS = [
    ("x, of_layer, tokens, attention, f", "x, w.delta, tokens, attention, f", check_types),
    (f'jnp.exp(broadcast("K/t -> B/b L/c K/t", {GATHERED}))', f"jnp.exp({GATHERED})", check_types),
    ("jnp.where((positions >= n)[..., None, None], moved, 0)", "moved", check_documents),
    (
        "class ModelConfig(mixing.ModelConfig)",
        "class ModelConfig(mixing.settings.ModelConfig)",
        check_states,
    ),
    ('f"delta_{i}"', '"delta_0"', check_states),
]


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("index", range(5))
def test_an_error_has_the_message_shown(index, tmp_path):
    old, new, does = EDITS[index]
    assert len(MESSAGES) == len(EDITS)
    expected = pytest.raises((ShardError, ValueError))
    with project(tmp_path, old, new) as c, jax.set_mesh(tiny.mesh("d=2 t=2")), expected as rejected:
        does(c)
    assert MESSAGES[index] in str(rejected.value).split("\n", 1)[0]
