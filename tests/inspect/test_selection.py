"""Attention that selects blocks of earlier positions: what is said of it is compared with what its
logits do, before and after the page mends its leak.
"""

import re

import jax
import numpy as np
import pytest

from shardwright.data.loader import TokenBatch
from shardwright.inspect.causality import check_causal
from tests.support import rule_models, tiny
from tests.support.recipes import ROOT, module_of

pytestmark = pytest.mark.usefixtures("not_remembered")

PAGE = (ROOT / "docs/soundness.md").read_text().partition("### Attention that selects blocks")[2]
(MENDED,) = re.findall(
    r"^```python\n(.*?)^```", PAGE.partition("\n## ")[0], re.DOTALL | re.MULTILINE
)
LEAKING = """\
class Blocks(Llama):
    def layer(self, x, w, tokens, attention):
        return super().layer(x, w, tokens, functools.partial(self.of_blocks, tokens))

    def of_blocks(self, tokens, q, k, v, mask, size=4, top=2):
        at, document = jnp.arange(k.shape[1]), tokens.document
        means = k.reshape(len(k), -1, size, *k.shape[2:]).mean(2)
        block = jnp.arange(means.shape[1])
        past = (block < at[:, None] // size)[None]
        scores = jnp.einsum("blkqd,bnkd->bkqln", q, means)
        _, chosen = lax.top_k(jnp.where(past[:, None, None], scores, -jnp.inf), top)
        seen = jnp.any(chosen[..., None] == block, -2) | (block == at[:, None] // size)
        seen = jnp.repeat(seen, size, -1) & (at[:, None] >= at)
        seen &= (document[:, :, None] == document[:, None])[:, None, None]
        scores = jnp.where(seen, jnp.einsum("blkqd,bskd->bkqls", q, k), -jnp.inf)
        return jnp.einsum("bkqls,bskd->blkqd", jax.nn.softmax(scores), v).astype(q.dtype)
"""
IMPORTS = (
    "import functools\nimport jax\nimport jax.numpy as jnp\nfrom jax import lax\nfrom train "
    "import Llama\n\n\n"
)


def of_page(code: str):
    return module_of(IMPORTS + code, "mine")


def causality_of(kind: type) -> str:
    """What the check of causality says; raises ValueError of a leak."""
    config = rule_models.SIZES
    return check_causal(tiny.step_of(tiny.forward_of(kind(config), tiny.config(config).training)))


def changes(kind: type) -> float:
    """Largest change of logits, over the largest one, by tokens that their positions must not
    see.
    """
    c = rule_models.SIZES
    ids = np.random.default_rng(0).integers(0, c.vocab, (2, tiny.LENGTH)).astype(np.uint32)
    starts = np.zeros(ids.shape, bool)
    starts[:, 0] = starts[0, 5] = starts[1, 6] = True
    document = np.cumsum(starts, 1)
    of = tiny.forward_of(kind(c), tiny.config(c).training)

    @tiny.per_device
    def run(w: of.model.Weights, batch: TokenBatch) -> tiny.train.act["B/r/d L V/t/p"]:
        return of.logits(of.gatherable(w), of.tokens(batch))

    def draw(x):
        return jax.random.normal(jax.random.fold_in(jax.random.key(3), sum(x.shape)), x.shape)

    with jax.set_mesh(tiny.mesh("one device")):
        w = jax.tree.map(draw, of.model.table)
        before = np.asarray(run(w, TokenBatch(ids, starts, starts)))
        found = 0.0
        for position in range(tiny.LENGTH):
            for delta in (1, 7, 13):
                moved = ids.copy()
                moved[:, position] = (ids[:, position] + delta) % c.vocab
                after = np.asarray(run(w, TokenBatch(moved, starts, starts)))
                unseen = (np.arange(tiny.LENGTH) <= position) | (
                    document != document[:, position, None]
                )
                found = max(found, float(np.abs(after - before)[unseen].max()))
    return found / np.abs(before).max()


@pytest.mark.long
def test_the_page_shows_how_to_mend_a_leak():
    with of_page(LEAKING) as mine, jax.set_mesh(tiny.mesh("one device")):
        with pytest.raises(ValueError, match="in an earlier document"):
            causality_of(mine.Blocks)
        assert changes(mine.Blocks) > 1e-3
    past, choice = MENDED.splitlines()
    assert choice in LEAKING
    (line,) = re.findall(r"^ +(past = .*)\n", LEAKING, re.MULTILINE)
    with of_page(LEAKING.replace(line, past)) as mine, jax.set_mesh(tiny.mesh("one device")):
        assert causality_of(mine.Blocks) == ""
        assert changes(mine.Blocks) < 1e-5
