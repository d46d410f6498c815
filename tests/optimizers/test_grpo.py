"""A loss that reads inputs of the dataset: docs/recipes/grpo.py, against torch and on several
meshes.
"""

import json
import re
import runpy
import sys

import jax
import numpy as np
import pytest

import train
from shardlib.shardtypes import f32
from shardwright.data.loader import DataConfig, make_loader
from shardwright.optimizers.rates import inputs_of_loss
from tests.support import dense, tiny
from tests.support.recipes import RECIPES, ROOT, module_of


@pytest.fixture(scope="module")
def answers():
    """Two batches of answers, in groups of 4, and a file of them."""
    rng = np.random.default_rng(3)

    def answer(i):
        prompt, length = rng.integers(1, 5), rng.integers(1, 11)
        log_p = -rng.uniform(3, 6, (2, length))  # of 64 tokens: both sides of the clipped range
        ids = rng.integers(0, 64, prompt + length).tolist()
        named = {
            "prompt": ids[:prompt],
            "answer": ids[prompt:],
            "group": i // 4,
            "reward": float(rng.integers(0, 3)),
        }
        return named | {"old_log_p": log_p[0].tolist(), "reference_log_p": log_p[1].tolist()}

    found = [answer(i) for i in range(2 * tiny.BATCH)]
    for x in found[4:8]:
        x["reward"] = 1.0  # all equal
    return found


@pytest.fixture(scope="module")
def data(answers, tmp_path_factory):
    """A dataset of them, by the command that the page shows."""
    directory = tmp_path_factory.mktemp("grpo")
    (directory / "answers.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in answers))
    command = ["grpo.py", f"{directory}/answers.jsonl", f"{directory}/data", str(tiny.BATCH)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        runpy.run_path(str(RECIPES / "grpo.py"), run_name="__main__")
    return str(directory / "data")


def config(data, **training):
    c = tiny.config(tiny.model(layers=2), **training)
    c.data = DataConfig(filespec=data, sequence_packing=False, shuffle=False, loss_mask="answer")
    c.optimizer = tiny.optimizer(loss="grpo:loss")
    return c


def loader(c, split="train"):
    names = tuple(inputs_of_loss(c.optimizer))
    return make_loader(
        c.data,
        split,
        tiny.BATCH,
        tiny.LENGTH,
        64,
        loss_inputs=names,
        microbatches=c.training.microbatches,
    )


def by_torch(logits, answers):
    """Equation 3 of the paper, answer by answer, and its gradients with respect to the logits."""
    torch = pytest.importorskip("torch")
    logits = torch.tensor(np.asarray(logits), requires_grad=True)
    total, was_clipped = torch.zeros(()), []
    for i, x in enumerate(answers):
        group = torch.tensor([y["reward"] for y in answers if y["group"] == x["group"]])
        spread = group.std(correction=0)
        advantage = (x["reward"] - group.mean()) / spread if spread > 0 else torch.zeros(())
        begin, count = len(x["prompt"]), len(x["answer"])
        log_p = torch.log_softmax(logits[i, begin : begin + count], -1)[
            torch.arange(count), torch.tensor(x["answer"])
        ]
        ratio = torch.exp(log_p - torch.tensor(x["old_log_p"]))
        clipped = torch.clamp(ratio, 0.8, 1.2)
        was_clipped += (clipped * advantage < ratio * advantage).tolist()
        log_r = torch.tensor(x["reference_log_p"]) - log_p
        divergence = torch.exp(log_r) - log_r - 1
        total = (
            total
            - (torch.minimum(ratio * advantage, clipped * advantage) - 0.04 * divergence).mean()
        )
    assert 0.1 < np.mean(was_clipped) < 0.9
    total = total / len(answers)
    total.backward()
    return total.item(), logits.grad.numpy()


@pytest.mark.long
def test_loss_and_gradients_are_those_of_torch(answers, data):
    """Inputs of a loss in stages: the loss of pairs in tests/train/test_changing.py."""
    c = config(data, microbatches=2, loss_chunk=8)
    host = loader(c).sequences(1, np.arange(tiny.BATCH))

    def per_device(w: train.Transformer, batch: train.Batch) -> tuple[f32[""], train.Transformer]:
        return tiny.loss_and_gradients(w, batch, c)

    with jax.set_mesh(tiny.mesh("d=2 c=2 t=2")):
        w = tiny.weights(c.model)
        found = jax.tree.map(np.asarray, tiny.per_device(per_device)(w, loader(c).load(1)))
        w = jax.tree.map(np.asarray, w)

    def logits(w):
        return dense.logits(w, dense.tokens_of(host), c.model)

    expected, g = by_torch(jax.jit(logits)(w), answers[tiny.BATCH :])
    of_theirs = jax.jit(lambda w, g: jax.vjp(logits, w)[1](g)[0])(w, g)
    np.testing.assert_allclose(found[0], expected, rtol=2e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (found[1], of_theirs)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5 * float(np.abs(theirs).max()))


@pytest.mark.long
def test_the_loss_of_the_page(data):
    """That of docs/changing.md, weighted by an input."""
    code, _ = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/changing.md").read_text(), re.DOTALL | re.MULTILINE
    )
    c = config(data)
    c.optimizer.loss = "weighted_loss:weighted"
    with module_of(
        f"from shardlib.shardtypes import f32\nfrom train import cross_entropy\n{code}",
        "weighted_loss",
    ):
        batch = loader(c).sequences(0, np.arange(tiny.BATCH))

        def per_device(
            w: train.Transformer, batch: train.Batch
        ) -> tuple[f32[""], train.Transformer]:
            return tiny.loss_and_gradients(w, batch, c)

        with jax.set_mesh(tiny.mesh("d=2 t=2")):
            w = tiny.weights(c.model)
            found, _ = tiny.per_device(per_device)(w, tiny.place_batch(c, batch))
    w = jax.tree.map(np.asarray, w)
    logits = jax.jit(lambda w: dense.logits(w, dense.tokens_of(batch), c.model))(w)
    log_p = jax.nn.log_softmax(logits)
    log_p = np.take_along_axis(log_p, batch.targets[..., None].astype(int), -1)[..., 0]
    weight = batch.loss_inputs[..., 0].view(np.float32)
    np.testing.assert_allclose(
        found, -(log_p * weight)[batch.loss_mask].sum() / batch.loss_mask.sum(), rtol=1e-5
    )
