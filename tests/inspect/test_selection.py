"""Attention that selects blocks of earlier positions, and heads that read the next token: what is
said of them.

What is said of a selection is compared with what its logits do.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import train
from shardlib import shardops
from shardwright.data.loader import TokenBatch
from shardwright.inspect.causality import check_causal
from shardwright.inspect.soundness import check_steps
from tests.support import rule_models, tiny
from tests.support.recipes import ROOT, module_of

SIZE, TOP = 4, 2
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


class Selecting(train.Llama):
    """Native sparse attention (arXiv 2502.11089): compressed blocks, selected blocks and a window,
    in documents.

    On a mesh with c, each device gathers keys and values.
    """

    def layer(self, x, w, tokens, attention):
        return super().layer(x, w, tokens, functools.partial(self.sparse, tokens))

    def of_mask(self, chosen):
        """The choice by which what is read is masked."""
        return chosen

    def scored(self, scores, past):
        return jnp.where(past, scores, -jnp.inf)

    def sparse(self, tokens, q, k, v, mask):
        gather = functools.partial(shardops.all_gather, replicated=True)
        k, v = (gather("B/b L/c K/t D -> B/b L K/t D", x) for x in (k, v))
        document, at = tokens.document, tokens.mask_positions.index[0]
        documents = gather("B/b L/c -> B/b L", document)
        block, own = jnp.arange(k.shape[1] // SIZE), at[:, None] // SIZE
        past = (block < own) & (documents[:, ::SIZE][:, None] == document[:, :, None])
        past = past[:, None, None]

        of_blocks = [x.reshape(len(x), -1, SIZE, *x.shape[2:]).mean(2) for x in (k, v)]
        scores = jnp.einsum("blkqd,bnkd->bkqln", q, of_blocks[0])
        weights = jax.nn.softmax(jnp.where(past, scores, -1e9)) * past
        compressed = jnp.einsum("bkqln,bnkd->blkqd", weights, of_blocks[1])

        importance = jnp.where(block == own, jnp.inf, self.scored(scores, past)).sum(2)
        _, chosen = lax.top_k(importance, TOP)  # [B, K, L, TOP], the own block among them
        position, of_mask = (
            (x[..., None] * SIZE + jnp.arange(SIZE)).reshape(*x.shape[:-1], -1)
            for x in (chosen, self.of_mask(chosen))
        )
        keys, values = (
            jnp.take_along_axis(jnp.moveaxis(x, 2, 1)[:, :, None], position[..., None], axis=3)
            for x in (k, v)
        )
        found = jnp.take_along_axis(documents[:, None, None], position, axis=3)
        seen = (of_mask <= at[:, None]) & self.same(found, document[:, None, :, None])
        scores = jnp.where(seen[:, :, None], jnp.einsum("blkqd,bklsd->bkqls", q, keys), -jnp.inf)
        selected = jnp.einsum("bkqls,bklsd->blkqd", jax.nn.softmax(scores), values)

        index = jnp.arange(k.shape[1])
        seen = (
            (at[:, None] >= index)
            & (at[:, None] - index < SIZE)
            & (document[:, :, None] == documents[:, None])
        )
        scores = jnp.where(seen[:, None, None], jnp.einsum("blkqd,bskd->bkqls", q, k), -jnp.inf)
        window = jnp.einsum("bkqls,bskd->blkqd", jax.nn.softmax(scores), v)
        return (compressed + selected + window).astype(q.dtype)

    def same(self, found, document):
        return found == document


def other(**methods) -> type:
    return type(
        "Other", (Selecting,), {name: staticmethod(method) for name, method in methods.items()}
    )


LATER, OTHERS = r"test_selection.py:\d+: .*a later token", "in an earlier document"
WRONG = {
    "not masked": (other(of_mask=lambda chosen: 0 * chosen), LATER),
    "other documents": (other(same=lambda found, document: found >= 0), OTHERS),
}


def step_of(kind: type, mesh: str, length: int = tiny.LENGTH):
    config = rule_models.SIZES
    with jax.set_mesh(tiny.mesh(mesh)):
        return tiny.step_of(tiny.forward_of(kind(config), tiny.config(config).training), length)


def of_page(code: str):
    return module_of(IMPORTS + code, "mine")


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
@pytest.mark.parametrize("mesh", ["one device", "d=2 c=2 t=2"])
def test_native_sparse_attention_is_causal(mesh):
    with jax.set_mesh(tiny.mesh(mesh)):
        assert check_causal(step_of(Selecting, mesh)) == ""
        check_steps(step_of(Selecting, mesh))
    if mesh == "one device":
        assert changes(Selecting) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_other_selections_leak(name):
    kind, message = WRONG[name]
    assert changes(kind) > 1e-3
    with jax.set_mesh(tiny.mesh("one device")), pytest.raises(ValueError, match=message):
        check_causal(step_of(kind, "one device"))


@pytest.mark.long
def test_the_page_shows_how_to_mend_a_leak():
    with of_page(LEAKING) as mine, jax.set_mesh(tiny.mesh("one device")):
        with pytest.raises(ValueError, match=OTHERS):
            check_causal(step_of(mine.Blocks, "one device"))
        assert changes(mine.Blocks) > 1e-3
    past, choice = MENDED.splitlines()
    assert choice in LEAKING
    (line,) = re.findall(r"^ +(past = .*)\n", LEAKING, re.MULTILINE)
    with of_page(LEAKING.replace(line, past)) as mine, jax.set_mesh(tiny.mesh("one device")):
        assert check_causal(step_of(mine.Blocks, "one device")) == ""
        assert changes(mine.Blocks) < 1e-5
