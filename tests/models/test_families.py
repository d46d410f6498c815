"""Models of each family against transformers' own: there and back, logits, greedy texts."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import train
from shardlib.shardtypes import Of, f32
from shardwright.data.loader import TokenBatch
from shardwright.huggingface import as_transformers_reads, families
from shardwright.huggingface.check import mapping_of
from shardwright.modeling.model import load_model
from shardwright.models import family, gpt2
from shardwright.program.mesh_choice import MeshChoice
from shardwright.sampling import sampler
from shardwright.tools import generate
from tests.support import huggingface_models as models
from tests.support import tiny, transformers_models
from tests.support.huggingface_models import to_run
from tests.support.transformers_models import KINDS, config_of, logits_of_documents, theirs

LENGTH = 32


@functools.cache
def imported(name: str):
    return transformers_models.imported(theirs(name))


LOGITS = [(name, {}) for name in KINDS] + [("DeepseekV3", {"rope_interleave": False})]


def ours(name: str, **changes) -> family.ModelConfig:
    """Our settings for a family."""
    return dataclasses.replace(imported(name)[0], **changes)


@pytest.mark.parametrize("name", KINDS)
def test_there_and_back_is_the_same_to_the_bit(name, tmp_path):
    """Of each family: the export has its kind, its settings and its tensors."""
    model = theirs(name)
    model.save_pretrained(tmp_path)
    c, w = transformers_models.imported(model)
    kind = model.config.model_type
    module = {"gpt2": "gpt2"} | {of: found.module for of, found in families.KINDS.items()}
    assert (c.module, getattr(c, "family", kind)) == (module.get(kind, "train"), kind)
    mapping = mapping_of(c.module)
    content, tensors = mapping.to_huggingface(w, c)
    assert content["model_type"] == kind
    if hasattr(c, "family"):  # of a run from scratch, which has none
        found, _ = mapping.to_huggingface(w, dataclasses.replace(c, family=None))
        assert found["model_type"] == {"phi3": "mistral"}.get(kind, kind)  # the same math
    before = load_file(tmp_path / "model.safetensors")
    assert before.keys() == tensors.keys()
    assert all(np.array_equal(before[key], tensors[key]) for key in before)
    stated = {key: x for key, x in content.items() if x is not None or key == "q_lora_rank"}
    stated["bos_token_id"] = c.bos_id
    again, _ = mapping.from_huggingface(as_transformers_reads(stated), tensors)
    assert dataclasses.replace(again, module=c.module) == c


def test_every_family_is_compared():
    assert {config_of(name).model_type for name in KINDS} == {"gpt2", *families.KINDS}


@pytest.mark.parametrize(("name", "changes"), LOGITS)
def test_logits_are_those_of_transformers(name, changes, one_device):
    """Of two rows, longer than windows and what YaRN stretches; one has two documents.

    Gradients: tests/train/test_oracles.py. DeepSeek's RoPE usually turns neighbors, and halves
    without rope_interleave.
    """
    model = theirs(name, **changes)
    c, w = transformers_models.imported(model)
    starts = np.zeros((2, LENGTH), bool)
    starts[[0, 1, 1], [0, 0, 11]] = True
    targets = np.random.default_rng(0).integers(0, c.vocab, starts.shape).astype(np.uint32)
    batch = TokenBatch(targets=targets, is_seq_start=starts, loss_mask=np.ones_like(starts))
    expected = logits_of_documents(model, batch, c.bos_id).detach().numpy()
    assert np.abs(expected).max() > 0.5
    found = models.logits_of(c, seq_len=LENGTH, batch_size=2)(w, batch)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.long
def test_a_greedy_text_is_that_of_transformers(tmp_path, monkeypatch):
    """With a RoPE that turns halves. What is proved before: tests/sampling."""
    monkeypatch.setattr(sampler, "check_causal", lambda *_: "")
    monkeypatch.setattr(sampler.Programs, "_find_unsound", lambda self: [])
    model = theirs("DeepseekV3", rope_interleave=False)
    model.save_pretrained(tmp_path / "model")
    to_run(tmp_path / "model", tmp_path / "run", check=False)
    settings = generate.Settings(
        run=str(tmp_path / "run"),
        prompt_ids=[],
        max_tokens=12,
        temperature=0.0,
        stop=[],
        context=12,
        mesh=MeshChoice(r=8, d=1, t=1),
    )
    (text,) = generate.generate(settings)
    start = model.dummy_inputs["input_ids"].new_tensor([[model.config.bos_token_id]])
    greedy = model.generate(start, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert greedy[0, 1:].tolist() == text["ids"]


@pytest.fixture(scope="module")
def with_further(tmp_path_factory):
    """DeepSeek-V3 with a module that predicts the token after the next, under the names of the hub,
    and the parts of it: a model of one layer, and three weights more.
    """
    import torch

    at = tmp_path_factory.mktemp("further") / "model"
    model = theirs("DeepseekV3")
    one = theirs("DeepseekV3", num_hidden_layers=1, first_k_dense_replace=0)
    model.save_pretrained(at)
    m = model.config.hidden_size
    own = {name: 1 + 0.3 * torch.randn(m) for name in ("enorm", "hnorm")}
    own["eh_proj"] = 0.2 * torch.randn(m, 2 * m)
    own = {f"{name}.weight": x.requires_grad_() for name, x in own.items()}
    one.save_pretrained(at.parent / "one")
    saved, of_one = (load_file(at.parent / x / "model.safetensors") for x in ("model", "one"))
    layer = {name[15:]: x for name, x in of_one.items() if name.startswith("model.layers.0.")}
    layer |= {name: x.detach().numpy() for name, x in own.items()}
    layer["shared_head.norm.weight"] = of_one["model.norm.weight"]
    layer["embed_tokens.weight"] = saved["model.embed_tokens.weight"]
    layer["shared_head.head.weight"] = saved["lm_head.weight"]
    further = {f"model.layers.4.{name}": x for name, x in layer.items()}
    save_file(saved | further, at / "model.safetensors")
    content = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps(content | {"num_nextn_predict_layers": 1}))
    return at, model, one, own, further


def test_heads_for_further_tokens_are_left_out_by_name(with_further, tmp_path):
    at, model, *_, further = with_further
    text = to_run(at, tmp_path / "run", check=False)
    assert f"left out   {len(further)} tensors, such as {min(further)}, predict further" in text
    found = jax.tree.map(np.asarray, models.read(tmp_path / "run")[1])
    jax.tree.map(np.testing.assert_array_equal, found, transformers_models.imported(model)[1])


@pytest.mark.long
def test_a_module_for_further_tokens(with_further, tmp_path):
    """Of DeepSeek-V3 (arXiv 2412.19437, section 2.2): its names there and back, and its loss."""
    import torch

    at, model, one, own, _ = with_further
    assert "left out" not in to_run(at, tmp_path / "run", further=True)
    c, w = models.read(tmp_path / "run")
    w = jax.tree.map(np.asarray, w)
    content, tensors = families.to_huggingface(w, c)
    before = load_file(at / "model.safetensors")
    assert content["num_nextn_predict_layers"] == 1
    assert before.keys() == tensors.keys()
    assert all(np.array_equal(before[key], tensors[key]) for key in before)

    batch = tiny.host_batch(vocab=c.vocab)
    ce = functools.partial(torch.nn.functional.cross_entropy, reduction="sum")
    norm = functools.partial(torch.nn.functional.rms_norm, eps=model.config.rms_norm_eps)
    m = [model.config.hidden_size]
    hidden = []
    model.model.norm.register_forward_hook(lambda *given: hidden.append(given[-1]))
    total = 0
    for row, starts in enumerate(batch.is_seq_start):
        for part in np.split(np.arange(starts.size), np.flatnonzero(starts[1:]) + 1):
            ids = torch.tensor(batch.targets[row, part].astype(np.int64))
            counted = torch.tensor(batch.loss_mask[row, part])
            first = torch.cat([torch.tensor([c.bos_id]), ids[:-1]])
            total = total + ce(model(first[None]).logits[0][counted], ids[counted])
            nexts = norm(model.model.embed_tokens(ids), m, own["enorm.weight"])
            x = torch.cat([nexts, norm(hidden[-1][0], m, own["hnorm.weight"])], dim=-1)
            out = one.model(inputs_embeds=(x @ own["eh_proj.weight"].T)[None]).last_hidden_state[0]
            after = counted[1:]
            total = total + ce(model.lm_head(out)[:-1][after], ids[1:][after])
    loss = total / int(batch.loss_mask.sum())
    loss.backward()
    with jax.set_mesh(tiny.mesh("e=2 c=2 t=2")):
        run = tiny.config(c, seq_len=batch.targets.shape[1])
        kind = type(w)

        @tiny.per_device
        def step(w: Of[kind], batch: train.Batch) -> tuple[f32[""], Of[kind]]:
            forward = tiny.forward_of(load_model(c), run.training, in_training=True)
            return train.loss_and_gradients(w, batch, None, run, forward)[:2]

        found, g = step(tiny.place(w, kind), tiny.place_batch(run, batch))
    np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    expected = own["eh_proj.weight"].grad.numpy().T
    least = 4e-5 * np.abs(expected).max()
    np.testing.assert_allclose(g.further.w_join[0], expected, rtol=0, atol=least)


LINEAR = {"rope_type": "linear"}
OF_ROPE = ("rope_type", "factor", "mscale", "partial_rotary_factor")


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Llama", {"attention_bias": True}, "attention_bias is True, and this model has False: it"),
        ("Llama", {"rope_type": "proportional"}, "rope_type is 'proportional'; it can be default"),
        ("Llama", LINEAR | {"factor": 4.0, "mscale": 0.7}, "mscale is 0.7"),
        ("GPT2", {"activation_function": "relu"}, "activation_function is 'relu', and this model"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
        (
            "SmolLM3",
            {"no_rope_layers": [1, 0, 0, 1]},
            r"no_rope_layers is \[1, 0, 0, 1\]; it can only have 0 in every n-th layer, or 1 in",
        ),
        ("Qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("Qwen3Next", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], and this model has"),
    ],
)
def test_other_math_is_refused_by_name(name, changes, message):
    config = config_of(name).to_dict()
    of_rope = {key: changes[key] for key in changes if key in OF_ROPE}
    if of_rope:
        config["rope_parameters"] |= of_rope
    config |= {key: changes[key] for key in changes if key not in OF_ROPE}
    mapping = gpt2 if name == "GPT2" else families

    def read(config):
        mapping.from_huggingface(as_transformers_reads(config), {})

    with pytest.raises(ValueError, match=rf"^config.json.*{message}"):
        read(config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "Qwen2",
            {"norms": "after", "family": None},
            "model.norms is 'after'; qwen2 in transformers does not",
        ),
        ("Mistral", {"family": "smollm3"}, "model.window is 5; smollm3 in transformers"),
        ("Olmo2", {"family": "llama"}, "model.family is 'llama'; it can be mistral, qwen2"),
        ("DeepseekV3", {"correction_bias": False}, "correction_bias is False; deepseek_v3 in tran"),
    ],
)
def test_what_no_family_has_is_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        families.to_huggingface(None, ours(name, **changes))
