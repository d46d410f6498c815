"""Models of each family against transformers' own: logits, gradients, greedy texts, there and back."""

import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import RopeScaling
from shardwright.models import family, moe
from shardwright.run.opening import MeshChoice, read_weights
from shardwright.run.step import trace_step
from shardwright.sampling import cache
from shardwright.tools import generate
from shardwright.tools.huggingface import families
from shardwright.tools.verify.meshes import abstract_mesh_of
from tests.support import huggingface_models as models
from tests.support import tiny
from tests.support.huggingface_models import assert_same, export, losses_and_gradients, to_run
from tests.support.verifying import verify

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 96, "bos_token_id": 3, "eos_token_id": 1, "pad_token_id": None,
    "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "beta_fast": 8.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 2.0],
    "long_factor": [1.5, 4.0], "original_max_position_embeddings": 64, "factor": 1.5,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
KINDS = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "Qwen3Moe": {"head_dim": 8, "moe_intermediate_size": 48, "norm_topk_prob": True} | EXPERTS,
    "Olmoe": EXPERTS,
    "Qwen2": {},
    "Mistral": {"sliding_window": 5},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Gemma2": {
        "sliding_window": 5, "head_dim": 8, "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 11, "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0, "tie_word_embeddings": True,
    },
    "Phi3": {"sliding_window": 5},
    "Phi3 longrope": {
        "rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "Llama yarn": {"rope_parameters": YARN, "head_dim": 16},
    "Llama dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64, "head_dim": 8,
    },
    "Gemma3": {
        "sliding_window": 5, "head_dim": 8, "query_pre_attn_scalar": 11, "num_hidden_layers": 8,
        "sliding_window_pattern": 3, "final_logit_softcapping": 2.0, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "GptOss default": {
        "sliding_window": 5, "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "GptOss": {
        "sliding_window": 5, "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 3, "rope_parameters": YARN | {"truncate": False},
    },
}  # fmt: skip
"""Of each: settings of a small one. The first word is the class."""


OURS = {
    "Qwen2": {"qkv_bias": True},
    "Mistral": {"window": 5},
    "Olmo2": {"norms": "after", "qk_norm_all": True},
    "SmolLM3": {"no_rope_every": 2},
    "Gemma2": {
        "norms": "both", "norm_offset": True, "embedding_scaled": True, "activation": "gelu", "window": 5,
        "full_every": 2, "attention_softcap": 0.5, "attention_scalar": 11, "logit_softcap": 2.0,
        "tied_embeddings": True,
    },
    "Gemma3": {
        "norms": "both", "norm_offset": True, "embedding_scaled": True, "activation": "gelu", "window": 5,
        "full_every": 3, "attention_scalar": 11, "qk_norm": True, "window_rope_base": 100.0, "d_head": 8,
        "rope_scaling": RopeScaling("linear", 8.0), "tied_embeddings": True,
    },
    "GptOss": {
        "qkv_bias": True, "out_bias": True, "sinks": True, "window": 5, "full_every": 2, "activation": "clamped",
        "rope_scaling": RopeScaling("yarn", 4.0, 24, truncate=False), "n_q_per_kv": 4, "d_head": 8,
        "experts": 8, "experts_per_token": 3, "expert_bias": True,
    },
    "Phi3": {"rotary_share": 0.5, "d_head": 8},
    "Mixtral": {"experts": 8, "experts_per_token": 3, "d_head": 8},
}  # fmt: skip
"""Settings of ours for each kind of math."""


def ours(name: str, **changes) -> family.ModelConfig:
    sizes = {"vocab": 64, "d_model": 32, "layers": 4, "n_kv": 4, "n_q_per_kv": 2, "d_head": 4, "d_ff": 48}
    settings = sizes | OURS[name] | changes
    return (moe if "experts" in settings else family).ModelConfig(**settings)


def config_of(name: str, **changes):
    """The configuration of a small model of transformers. It completes the dicts that it is given."""
    kind = name.split()[0].replace("Gemma3", "Gemma3Text")
    given = copy.deepcopy(SIZES | KINDS[name] | changes)
    return getattr(pytest.importorskip("transformers"), f"{kind}Config")(**given)


def for_length(c, length: int):
    """The model with RoPE for sequences of `length`, as transformers takes it from the text."""
    scaling = c.rope_scaling and dataclasses.replace(c.rope_scaling, length=length)
    return dataclasses.replace(c, rope_scaling=scaling)


def theirs(name: str, **changes):
    """A small model of transformers whose weights are all random: norms and biases too."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = getattr(transformers, f"{name.split()[0]}ForCausalLM")(config_of(name, **changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else 0.2 * noise)
            if key.endswith("gate_up_proj_bias"):  # so that 7 is a limit that is met
                parameter.mul_(30)
    return model


def their_logits(model, batch, bos_id: int):
    """Logits of a model of transformers by masks of its own, where each row is one document."""
    import torch

    ids = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)), constant_values=bos_id)
    return model(input_ids=torch.tensor(ids.astype(np.int64)), use_cache=False).logits


def imported(model, tmp_path) -> tuple:
    """Its ModelConfig and weights, as a run has them."""
    model.save_pretrained(tmp_path / "model")
    assert "with those of transformers: they differ by" in to_run(tmp_path / "model", tmp_path / "run")
    return models.read(tmp_path / "run")


LONG = ("Llama", "Mixtral", "Olmoe", "Gemma2", "GptOss")


@pytest.mark.long(every_case=True)(every_case=True)
@pytest.mark.parametrize("name", [x if x in LONG else pytest.param(x, marks=pytest.mark.slow) for x in KINDS])
def test_a_model_of_transformers_and_its_logits(name, one_device, tmp_path):
    """Logits and greedy text of a run are theirs; the export has the same tensors, to the bit, and the same class."""
    import transformers

    model = theirs(name)
    c, w = imported(model, tmp_path)
    kind = model.config.model_type
    module = families.KINDS[kind].module if kind in families.KINDS else "train"
    assert (c.module, getattr(c, "family", kind)) == (module, kind)
    batch, logits = models.rows(c), models.logits_of(for_length(c, models.LENGTH))
    expected = their_logits(model, batch, c.bos_id).detach().numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits(w, batch), expected, rtol=0, atol=1e-5 * np.abs(expected).max())

    drawing = {"max_tokens": 12, "temperature": 0.0, "stop": [], "context": 12, "mesh": MeshChoice(r=8, d=1, t=1)}
    (text,) = generate.generate(generate.Settings(run=str(tmp_path / "run"), prompt_ids=[], **drawing))
    start = model.dummy_inputs["input_ids"].new_tensor([[c.bos_id]])
    greedy = model.generate(start, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert greedy[0, 1:].tolist() == text["ids"]

    export(models.save(tmp_path / "again", w, c), tmp_path / "exported")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")) is type(model)
    before, after = (load_file(tmp_path / directory / "model.safetensors") for directory in ("model", "exported"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["r=2 d=2 t=2", pytest.param("e=2 c=2 t=2", marks=pytest.mark.slow)])
# Those of other experts have other names in memory than on disk: tests/models/test_experts.py.
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("Mixtral", "Qwen3Moe", "Olmoe")])
def test_gradients_are_those_of_transformers(name, mesh, one_device, tmp_path):
    model = theirs(name)
    c, w = imported(model, tmp_path)
    batch = tiny.host_batch()
    batch.is_seq_start[:] = np.arange(tiny.LENGTH) == 0
    with jax.set_mesh(tiny.mesh(mesh)):
        w = tiny.place(jax.tree.map(np.asarray, w), load_model(c).Weights)
        logits, loss, gradients = losses_and_gradients(w, batch, for_length(c, tiny.LENGTH))
    gradients = families.names_of(c).to_tensors(gradients, load_model(c).table)
    expected = their_logits(model, batch, c.bos_id)
    assert_same((logits, loss, gradients), expected, model, batch)


@pytest.mark.long
@pytest.mark.parametrize("sizes", ["r2 d2 c2 t2", pytest.param("p2 e2 t2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in OURS if name != "Mixtral"])
def test_steps_are_proved(name, sizes):
    """With no code that is taken to be right. A pattern that does not divide the layers has no stages."""
    c = tiny.config(ours(name), microbatches=2, batch_size=16)
    mesh = {word[0]: int(word[1:]) for word in sizes.split()}
    with abstract_mesh_of(dict.fromkeys("prdect", 1) | mesh):

        def prove():
            return find_unsound(trace_step(c, load_model(c.model)))

        if "p" in mesh and name == "Gemma3":
            with pytest.raises(ValueError, match=r"4 layers do not divide into 2 equal stages .* each a multiple of 4"):
                prove()
        else:
            assert [str(finding) for finding in prove()] == []


@pytest.mark.parametrize("name", ["GptOss", pytest.param("Gemma3", marks=pytest.mark.long)])
def test_logits_with_a_cache_are_those_without(name):
    """Of a pattern of three layers among four, and of sinks and experts."""
    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        cache.check_cache(tiny.forward(tiny.config(ours(name))), 16)


@pytest.mark.parametrize("name", ["Gemma3", "GptOss"])
def test_every_nth_layer_has_no_window(name):
    model = load_model(ours(name, layers=6, full_every=3))
    assert [model.window_at(place) for place in range(model.period)] == [5, 5, None]


def test_every_nth_layer_has_no_rope(one_device, monkeypatch):
    """Others rotate their queries and keys, in the order in which the layers are traced."""
    traced, attend, rotate = [], family.Model.attend, family.rope.rotate

    def noted_layer(self, x, w, tokens, attention):
        traced.append(tokens.index_in_period)
        return attend(self, x, w, tokens, attention)

    def noted_rotation(x, angles):
        traced.append("rotate")
        return rotate(x, angles)

    monkeypatch.setattr(family.Model, "attend", noted_layer)
    monkeypatch.setattr(family.rope, "rotate", noted_rotation)
    assert tiny.step(tiny.config(ours("SmolLM3", layers=3, no_rope_every=3))).other(name="logits").traced
    assert traced == [0, "rotate", "rotate", 1, "rotate", "rotate", 2]


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
        (
            "SmolLM3",
            {"no_rope_layers": [1, 0, 0, 1]},
            r"no_rope_layers is \[1, 0, 0, 1\]; it can only have 0 in every n-th layer, or 1 in all 4, so",
        ),
        ("Gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types is .*full_attention"),
        ("Gemma2", {"attention_bias": True}, "attention_bias is True"),
        ("Gemma2", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("Qwen2", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("Gemma3", {"layer_types": ["full_attention"] + ["sliding_attention"] * 7}, "layer_types is "),
        ("GptOss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("Olmo2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_other_math_is_refused_by_name(name, changes, message):
    config = config_of(name).to_dict()
    config["rope_parameters"] |= changes.pop("rope_scaling", {})
    with pytest.raises(ValueError, match=message):
        families.from_huggingface(config | changes, {})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen2", {"norms": "after"}, "model.norms is 'after'; qwen2 in transformers does not support it"),
        ("Mistral", {"full_every": 2}, "model.full_every is 2; mistral in transformers"),
        ("Mistral", {"family": "smollm3"}, "model.window is 5; smollm3 in transformers"),
        ("Mistral", {"logit_softcap": 3.0}, "model.logit_softcap is 3.0; mistral in transformers"),
        ("Olmo2", {"family": "llama"}, "model.family is 'llama'; it can be mistral, qwen2"),
        ("Mixtral", {"shared_experts": 1}, "model.shared_experts is 1; mixtral in transformers does not support it"),
        ("Mixtral", {"scores": "sigmoid"}, "model.scores is 'sigmoid'; mixtral in transformers"),
        ("Mixtral", {"normalize": False}, "model.normalize is False; mixtral in transformers"),
        ("Mixtral", {"sinks": True, "qk_norm_all": True}, "model.sinks is True; olmoe in transformers"),
    ],
)
def test_what_no_family_has_is_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        families.to_huggingface(None, ours(name, **changes))


def test_what_training_adds_to_experts_may_differ_from_the_checkpoint(one_device, tmp_path):
    c = ours("Mixtral")
    w = models.weights(c)
    other = dataclasses.replace(c, pools=2, capacity_factor=1.0, balance_loss=0.1)
    config = dataclasses.asdict(models.settings(other))
    found, _ = read_weights(models.save(tmp_path / "run", w, c), w, config)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, w))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_share": 0.3}, "model.rotary_share is 0.3, of d_head 4"),
        ({"full_every": 2, "window": None}, "model.full_every is 2, but no layer has a window"),
        ({"qk_norm": True, "qk_norm_all": True}, "both true"),
        ({"norms": "none"}, "model.norms is 'none'"),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    with pytest.raises(ValueError, match=message):
        ours("Mistral", **changes).check(seq_len=16)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("Gemma2", {"qkv_bias": True, "qk_norm_all": True, "no_rope_every": 4}, marks=pytest.mark.slow),
        ("Gemma3", {"layers": 6, "rotary_share": 0.5, "sinks": True, "out_bias": True, "n_q_per_kv": 4}),
        pytest.param("GptOss", {}, marks=pytest.mark.slow),
    ],
)
def test_a_step_with_all_switches_is_the_same_on_a_mesh(tmp_path, name, more):
    """In f64, on one device and on another mesh."""
    (tmp_path / "model").mkdir()
    model = dataclasses.asdict(ours(name, **more))
    (tmp_path / "model/all.yaml").write_text(json.dumps(model))
    sizes = ["verify.small=false", "training.batch_size=8", "training.seq_len=32"]
    done = verify(tmp_path, f"--config-dir={tmp_path}", "model=all", "verify.meshes=[e2c2t2]", "mesh.p=1", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
