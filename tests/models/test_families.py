"""Models of each family against transformers' own: logits, greedy texts, there and back.

Gradients: test_oracles.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardlib.shardtypes import ShardError
from shardwright.data.checks import check_ranges
from shardwright.huggingface import families
from shardwright.inspect.causality import check_causal
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import RopeScaling
from shardwright.models import delta, family, mla, moe
from shardwright.program.mesh_choice import MeshChoice
from shardwright.program.resume import read_weights
from shardwright.program.step import trace_step
from shardwright.sampling import cache
from shardwright.tools import generate
from tests.support import huggingface_models as models
from tests.support import tiny, transformers_models
from tests.support.huggingface_models import export, to_run
from tests.support.transformers_models import KINDS, config_of, logits_of_documents, theirs

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
    "Qwen2Moe": {
        "qkv_bias": True, "experts": 8, "experts_per_token": 3, "normalize": False, "shared_experts": 2,
        "shared_scored": True, "d_head": 8,
    },
    "Glm4Moe": {
        "qk_norm": True, "rotary_share": 0.5, "d_head": 8, "experts": 8, "experts_per_token": 3, "scores": "sigmoid",
        "groups": 4, "groups_per_token": 2, "correction_bias": True, "shared_experts": 2, "dense_layers": 1,
    },
    "DeepseekV3": {
        "n_q_per_kv": 1, "d_head": 6, "kv_rank": 16, "q_rank": 24, "d_turned": 2, "d_value": 3, "experts": 8,
        "experts_per_token": 3, "scores": "sigmoid", "groups": 4, "groups_per_token": 2, "correction_bias": True,
        "shared_experts": 1, "dense_layers": 1, "rope_scaling": RopeScaling("yarn", 4.0, 8, mscale_all_dim=0.8),
    },
    "Qwen3Next": {
        "layers": 2, "deltas": 2, "chunk": 4, "key_heads": 4, "values_per_key": 2, "d_key": 6, "d_value": 4,
        "d_head": 8,
        "gated": True, "qk_norm": True, "norm_offset": True, "rotary_share": 0.25, "experts": 8,
        "experts_per_token": 3, "shared_experts": 1, "shared_scored": True,
    },
}  # fmt: skip
"""Settings of ours for each kind of math."""


def ours(name: str, **changes) -> family.ModelConfig:
    sizes = {
        "vocab": 64,
        "d_model": 32,
        "layers": 4,
        "n_kv": 4,
        "n_q_per_kv": 2,
        "d_head": 4,
        "d_ff": 48,
    }
    settings = sizes | OURS[name] | changes
    marks = {"deltas": delta, "kv_rank": mla, "experts": moe}
    return next((module for mark, module in marks.items() if mark in settings), family).ModelConfig(
        **settings
    )


def imported(model, tmp_path) -> tuple:
    """Its ModelConfig and weights, as a run has them."""
    model.save_pretrained(tmp_path / "model")
    assert "with those of transformers: they differ by" in to_run(
        tmp_path / "model", tmp_path / "run"
    )
    return models.read(tmp_path / "run")


LONG = ("Llama", "Olmoe", "Gemma2", "GptOss", "DeepseekV3")


OF_FAMILIES = [name for name in KINDS if name != "GPT2"]


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    "name", [x if x in LONG else pytest.param(x, marks=pytest.mark.slow) for x in OF_FAMILIES]
)
def test_a_model_of_transformers_and_its_logits(name, one_device, tmp_path):
    """Logits and greedy text of a run are theirs; the export has the same tensors, to the bit, and
    the same class.
    """
    import transformers

    model = theirs(name)
    c, w = imported(model, tmp_path)
    kind = model.config.model_type
    module = families.KINDS[kind].module if kind in families.KINDS else "train"
    assert (c.module, getattr(c, "family", kind)) == (module, kind)
    batch, logits = models.rows(c), models.logits_of(c)
    expected = logits_of_documents(model, batch, c.bos_id).detach().numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(
        logits(w, batch), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )

    drawing = {
        "max_tokens": 12,
        "temperature": 0.0,
        "stop": [],
        "context": 12,
        "mesh": MeshChoice(r=8, d=1, t=1),
    }
    (text,) = generate.generate(
        generate.Settings(run=str(tmp_path / "run"), prompt_ids=[], **drawing)
    )
    start = model.dummy_inputs["input_ids"].new_tensor([[c.bos_id]])
    greedy = model.generate(start, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert greedy[0, 1:].tolist() == text["ids"]

    export(models.save(tmp_path / "again", w, c), tmp_path / "exported")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")) is type(
        model
    )
    before, after = (
        load_file(tmp_path / directory / "model.safetensors") for directory in ("model", "exported")
    )
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)


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
    config.write_text(json.dumps(content | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"the files have 5 layers; config\.json asks for 4"):
        to_run(tmp_path / "model", tmp_path / "run")
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


def test_rope_may_turn_halves_where_it_usually_turns_neighbors(tmp_path):
    """By the setting rope_interleave of transformers."""
    theirs("DeepseekV3", rope_interleave=False).save_pretrained(tmp_path / "model")
    assert "with those of transformers: they differ by" in to_run(
        tmp_path / "model", tmp_path / "run"
    )


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("name", "more", "sizes"),
    [
        ("Gemma2", {"qkv_bias": True, "qk_norm_all": True, "no_rope_every": 4}, "d2 c2 t2"),
        ("Gemma3", {}, "p2 e2 t2"),
        (
            "Gemma3",
            {"rotary_share": 0.5, "sinks": True, "out_bias": True, "n_q_per_kv": 4},
            "r2 d2 c2 t2",
        ),
        ("GptOss", {}, "r2 d2 c2 t2"),
        ("Olmo2", {}, "r2 d2 c2 t2"),
        ("Phi3", {}, "p2 e2 t2"),
        ("Qwen2Moe", {"qk_norm": True}, "d2 e2 t2"),
        ("DeepseekV3", {"norms": "both"}, "p2 e2 t2"),
        pytest.param("Qwen3Next", {"correction_bias": True}, "p2 d2 e2 t2", marks=pytest.mark.slow),
        (
            "DeepseekV3",
            {"q_rank": None, "dense_layers": 0, "window": 5, "full_every": 2, "d_value": 9},
            "d2 c2 t2",
        ),
    ],
)
def test_steps_are_proved(name, more, sizes):
    """With no code that is taken to be right.

    A pattern that does not divide the layers has no stages.
    """
    c = tiny.config(ours(name, **more), microbatches=2, batch_size=16)
    mesh = {word[0]: int(word[1:]) for word in sizes.split()}
    with tiny.abstract_mesh(dict.fromkeys("prdect", 1) | mesh):

        def prove():
            return find_unsound(trace_step(c, load_model(c.model)))

        if "p" in mesh and name == "Gemma3":
            with pytest.raises(
                ValueError,
                match=r"4 layers do not divide into 2 equal stages .* each a multiple of 4",
            ):
                prove()
        else:
            assert [str(finding) for finding in prove()] == []


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", ["GptOss", "Gemma3", "DeepseekV3", "Qwen3Next"])
def test_logits_with_a_cache_are_those_without(name):
    """Of a pattern of three layers among four, and of sinks and experts."""
    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        cache.check_cache(tiny.forward(tiny.config(ours(name))), 16)


@pytest.mark.long
def test_chunks_of_a_delta_net_keep_documents_apart(monkeypatch):
    """By the check of causality, which sees the leak of a chunk that reads the matrix of another
    document.
    """
    c, in_chunks = tiny.config(ours("Qwen3Next", layers=1)), delta.in_chunks
    with jax.set_mesh(tiny.mesh("d=2 t=2")):
        assert check_causal(tiny.step(c)) == ""
        monkeypatch.setattr(
            delta, "in_chunks", lambda *given: in_chunks(*given[:5], 0 * given[5], given[6])
        )
        with pytest.raises(ShardError, match="in an earlier document"):
            check_causal(tiny.step(c))


def test_every_nth_layer_has_no_rope_or_no_window(one_device, monkeypatch):
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
    assert (
        tiny.step(tiny.config(ours("SmolLM3", layers=3, no_rope_every=3)))
        .other(name="logits")
        .traced
    )
    assert traced == [0, "rotate", "rotate", 1, "rotate", "rotate", 2]
    windowed = load_model(ours("GptOss", layers=6, full_every=3))
    assert [windowed.window_at(place) for place in range(windowed.period)] == [5, 5, None]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
        (
            "SmolLM3",
            {"no_rope_layers": [1, 0, 0, 1]},
            r"no_rope_layers is \[1, 0, 0, 1\]; it can only have 0 in every n-th layer, or 1 in "
            r"all 4, so",
        ),
        (
            "Gemma2",
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types is .*full_attention",
        ),
        ("Gemma2", {"attention_bias": True}, "attention_bias is True"),
        ("Gemma2", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("Qwen2", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            "Gemma3",
            {"layer_types": ["full_attention"] + ["sliding_attention"] * 7},
            "layer_types is ",
        ),
        ("GptOss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("Olmo2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            "Qwen3Next",
            {"layer_types": ["linear_attention"] * 8},
            "layer_types is .* in every n-th layer, n > 1",
        ),
        (
            "Qwen3Next",
            {"mlp_only_layers": [1]},
            r"mlp_only_layers is \[1\], and this model has \[\]",
        ),
        ("DeepseekV3", {"attention_bias": True}, "attention_bias is True"),
        (
            "Qwen2Moe",
            {"shared_expert_intermediate_size": 50},
            "50, which is no multiple of moe_intermediate_size = 24",
        ),
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
        (
            "Qwen2",
            {"norms": "after"},
            "model.norms is 'after'; qwen2 in transformers does not support it",
        ),
        ("Mistral", {"full_every": 2}, "model.full_every is 2; mistral in transformers"),
        ("Mistral", {"family": "smollm3"}, "model.window is 5; smollm3 in transformers"),
        ("Mistral", {"logit_softcap": 3.0}, "model.logit_softcap is 3.0; mistral in transformers"),
        ("Olmo2", {"family": "llama"}, "model.family is 'llama'; it can be mistral, qwen2"),
        (
            "Mixtral",
            {"shared_experts": 1},
            "model.shared_experts is 1; mixtral in transformers does not support it",
        ),
        ("Mixtral", {"scores": "sigmoid"}, "model.scores is 'sigmoid'; mixtral in transformers"),
        ("Mixtral", {"normalize": False}, "model.normalize is False; mixtral in transformers"),
        (
            "Mixtral",
            {"sinks": True, "qk_norm_all": True},
            "model.sinks is True; olmoe in transformers",
        ),
        (
            "DeepseekV3",
            {"correction_bias": False},
            "model.correction_bias is False; deepseek_v3 in transformers",
        ),
        ("Qwen3Next", {"window": 5}, "model.window is 5; qwen3_next in transformers"),
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
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, w)
    )


def test_a_delta_net_refuses_part_of_a_sequence():
    with (
        jax.set_mesh(tiny.mesh("d=2 c=2")),
        pytest.raises(ValueError, match=r"mesh\.c is 2, but a delta net"),
    ):
        tiny.step(tiny.config(ours("Qwen3Next"))).calls  # noqa: B018


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "DeepseekV3",
            {"sinks": True},
            "model.sinks is True, which latent attention does not have; set it to False",
        ),
        (
            "DeepseekV3",
            {"rotary_share": 0.5, "d_head": 8},
            "model.rotary_share is 0.5, which latent attention",
        ),
        ("DeepseekV3", {"n_q_per_kv": 2}, "model.n_q_per_kv is 2; each head has a key of its own"),
        (
            "DeepseekV3",
            {"d_turned": 6},
            "model.d_turned is 6; it must be less than model.d_head = 6",
        ),
        (
            "DeepseekV3",
            {"d_turned": 3},
            "model.d_turned is 3, so RoPE would rotate 3 entries of a head",
        ),
        (
            "Phi3",
            {"rotary_share": 0.4},
            "model.rotary_share is 0.4, so RoPE would rotate 3 entries of a head",
        ),
        ("Qwen3Next", {"no_rope_every": 2}, "blocks of delta nets and attention are all alike"),
        ("Qwen3Next", {"qkv_bias": True}, "model.gated and model.qkv_bias are both true"),
    ],
)
def test_settings_of_other_attention_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        ours(name, **changes).check(seq_len=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_share": 0.3}, "model.rotary_share is 0.3, so RoPE would rotate 1 entries"),
        ({"full_every": 2, "window": None}, "model.full_every is 2, but no layer has a window"),
        ({"qk_norm": True, "qk_norm_all": True}, "both true"),
        (
            {"shared_scored": True, "experts": 4, "experts_per_token": 1},
            "model.shared_experts is 0",
        ),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    with pytest.raises(ValueError, match=message):
        ours("Mistral", **changes).check(seq_len=16)


def test_a_choice_that_does_not_exist():
    with pytest.raises(
        ValueError, match=r"model\.norms is 'none'; choose one of before, after, both"
    ):
        check_ranges("model", ours("Mistral", norms="none"))
