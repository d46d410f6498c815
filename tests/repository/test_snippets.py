"""Python in the pages: each block runs in a test, or is compared with the source that it quotes."""

import doctest
import re
import textwrap
from pathlib import Path

import jax
import pytest

from shardwright.data import loader
from shardwright.modeling import masks
from tests.support import tiny
from tests.support.shipped import load

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
RUN_BY = {
    "changing.md": "optimizers/test_grpo.py",
    "evaluation.md": "tools/test_evaluate.py",
    "formats.md": "flat_tokens/test_flat_tokens.py",
    "huggingface.md": "models/test_huggingface_export.py",
    "mixing.md": "train/test_mixing_page.py",
    "models.md": "train/test_stacks.py",
    "ops.md": "shardlib/test_pages.py",
    "other-trainers.md": "repository/test_snippets.py",
    "parallelism.md": "shardlib/test_pages.py",
    "sharding-types.md": "shardlib/test_pages.py",
    "soundness.md": "inspect/test_selection.py",
}
"""The test of each page with Python in it. A block of huggingface.md and one of soundness.md are
tested here."""


def blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE
    )


def test_each_page_with_python_has_a_test():
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if "```python" in path.read_text()}
    assert pages == RUN_BY.keys()
    for page, test in RUN_BY.items():
        assert page in (ROOT / "tests" / test).read_text(), (
            f"tests/{test} does not read docs/{page}"
        )
    assert not [path for path in ROOT.glob("*.md") if "```python" in path.read_text()]


def test_a_loop_with_the_loader(monkeypatch):
    """The loader and the prefetcher, on the demo's dataset; the loop gets each batch once."""
    code = textwrap.dedent((loader.__doc__ or "").partition("own:\n\n")[2].rpartition("\n\n")[0])
    monkeypatch.chdir(ROOT)
    c = load("local_test_synthetic")
    names = {
        "jax": jax,
        "mesh": tiny.mesh("d=4 t=2"),
        "config": c,
        "saved_state": None,
        "start": 3,
        "m": 2,
        "seen": [],
    }
    names |= {"batch_size": 8, "seq_len": 64, "vocab_size": c.model.vocab}
    assert code.count("        ...  # train") == 1
    code = code.replace(
        "        ...  # train", "        seen.append((step, batch)); break  # train"
    )
    with jax.set_mesh(names["mesh"]):
        exec(code, names)
    ((step, batch),) = names["seen"]
    assert step == 3
    assert batch.targets.shape == (2, 4, 64)
    assert names["steps"] > 100


def test_the_scale_of_seqax():
    (code,) = blocks("other-trainers.md")
    names = {"masks": masks}
    exec(code, names)
    assert names["mask"].scale == 1.0


def test_functions_that_compute_the_same():
    (code,) = (block for block in blocks("soundness.md") if ">>>" in block)
    example = doctest.DocTestParser().get_doctest(code, {}, "soundness.md", None, 0)
    assert doctest.DocTestRunner().run(example) == (0, len(example.examples))
