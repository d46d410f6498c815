"""Models of each family against transformers' own: there and back, logits, greedy texts."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardwright.data.loader import TokenBatch
from shardwright.huggingface import as_transformers_reads, families
from shardwright.huggingface.check import mapping_of
from shardwright.models import family, gpt2
from shardwright.program.mesh_choice import MeshChoice
from shardwright.sampling import sampler
from shardwright.tools import generate
from tests.support import huggingface_models as models
from tests.support import transformers_models
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


def test_heads_for_further_tokens_are_left_out_by_name(tmp_path):
    """As transformers leaves them out of DeepSeek-V3's model, whose files have them as one more
    layer.
    """
    model = theirs("DeepseekV3")
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    further = {
        name.replace("layers.3", "layers.4"): x
        for name, x in load_file(file).items()
        if "layers.3" in name
    }
    save_file(load_file(file) | further, file)
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"num_nextn_predict_layers": 1}))
    text = to_run(tmp_path / "model", tmp_path / "run")
    assert (
        f"left out   {len(further)} tensors, such as model.layers.4.input_layernorm.weight, "
        "predict further" in text
    )
    expected = transformers_models.imported(model)[1]
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(np.asarray, models.read(tmp_path / "run")[1]),
        expected,
    )


LINEAR = {"rope_type": "linear"}
OF_ROPE = ("rope_type", "factor", "mscale", "partial_rotary_factor")


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Llama", {"attention_bias": True}, "attention_bias is True, and this model has False: it"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and this model has 'silu'"),
        ("Llama", {"rope_type": "proportional"}, "rope_type is 'proportional'; it can be default"),
        ("Llama", LINEAR | {"factor": 4.0, "mscale": 0.7}, "mscale is 0.7"),
        ("GPT2", {"activation_function": "relu"}, "activation_function is 'relu', and this model"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
        (
            "SmolLM3",
            {"no_rope_layers": [1, 0, 0, 1]},
            r"no_rope_layers is \[1, 0, 0, 1\]; it can only have 0 in every n-th layer, or 1 in",
        ),
        (
            "Gemma2",
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types is .*full_attention",
        ),
        ("Qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("GptOss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
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
        ("Mixtral", {"shared_experts": 1}, "model.shared_experts is 1; mixtral in transformers"),
        ("DeepseekV3", {"correction_bias": False}, "correction_bias is False; deepseek_v3 in tran"),
    ],
)
def test_what_no_family_has_is_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        families.to_huggingface(None, ours(name, **changes))
