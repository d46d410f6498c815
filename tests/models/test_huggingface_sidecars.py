"""What transformers' files say beside the weights survives import, training and export, as
transformers reads it.
"""

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from shardwright.data.loader import DataConfig
from shardwright.data.text.definitions import train_bpe
from shardwright.data.text.tokenizers import Tokenizer, open_tokenizer, tokenizer_of_run
from shardwright.huggingface import sidecars
from shardwright.program import resume
from shardwright.program.checkpoint import Checkpointer
from shardwright.program.resume import CARRIED, open_run
from shardwright.tools import generate
from tests.support import exact_step, tiny
from tests.support import huggingface_models as models
from tests.support.exact_step import exact
from tests.support.huggingface_models import export, to_run
from tests.support.written_datasets import write

__all__ = ["exact"]

pytestmark = pytest.mark.usefixtures("no_hashes")

ROOT = Path(__file__).parents[2]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MORE = ["<think>", "</think>", "<|tool|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% "
    "endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "It is a truth"}]

needs_transformers = pytest.mark.skipif(
    not models.COMPARES, reason="transformers and torch are the oracle"
)


def definition(special: list[str]) -> str:
    content = json.loads(train_bpe(["It is a truth universally acknowledged"] * 9, 300))
    flags = content["added_tokens"][0]
    size = max(content["model"]["vocab"].values()) + 1
    content["model"]["vocab"] |= {token: size + i for i, token in enumerate(special)}
    content["added_tokens"] += [
        flags | {"id": size + i, "content": token} for i, token in enumerate(special)
    ]
    return json.dumps(content)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A chat model as transformers saves it, in bf16, with a template, two EOS ids and settings to
    generate by.
    """
    torch = pytest.importorskip(
        "torch", reason="transformers' models need torch, installed on Python 3.11 only"
    )
    import transformers

    path = tmp_path_factory.mktemp("chat")
    of = tokenizers.Tokenizer.from_str(definition(SPECIAL))
    named = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "</s>",
        "padding_side": "left",
    }
    named["model_max_length"] = 4096
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=of, chat_template=TEMPLATE, **named
    )
    bos, pad, _, end = map(of.token_to_id, SPECIAL)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    ids = {"bos_token_id": bos, "eos_token_id": end, "pad_token_id": pad}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=320, head_dim=8, **sizes, **ids)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    how = model.generation_config
    how.eos_token_id, how.temperature, how.do_sample, how.suppress_tokens = (
        [end, pad],
        0.6,
        True,
        [bos],
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def change(path: Path, **changes) -> None:
    path.write_text(json.dumps(read_json(path) | changes))


# ---- there and back ------------------------------------------------------------------------------


def in_the_config(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    change(model / "tokenizer_config.json", chat_template=TEMPLATE)


def added_in_the_config(model: Path) -> None:
    """As transformers 4 wrote them. The ids are those that follow the vocabulary's."""
    path = model / "tokenizer_config.json"
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    known = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    new = {known.get_vocab_size() + i: (token, token == "<|tool|>") for i, token in enumerate(MORE)}
    old = {known.token_to_id(token): (token, True) for token in SPECIAL}
    tokens = {
        i: {"content": token, "special": special} | flags
        for i, (token, special) in (old | new).items()
    }
    change(path, added_tokens_decoder=tokens, extra_special_tokens=["<|tool|>"])


def in_files(model: Path) -> None:
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/rag.jinja").write_text(TEMPLATE.replace("\n", "\t"))
    size = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    (model / "added_tokens.json").write_text(
        json.dumps({token: size + i for i, token in enumerate(MORE)})
    )
    (model / "special_tokens_map.json").write_text(
        '{"additional_special_tokens": ["<think>"], "sep_token": "</think>"}'
    )


FORMS = {
    "files": (in_files,),
    "the config": (in_the_config, added_in_the_config),
}


@needs_transformers
@pytest.mark.parametrize("form", FORMS)
def test_an_export_of_an_import_is_what_transformers_read_before(chat, tmp_path, form):
    import transformers

    model = tmp_path / "model"
    shutil.copytree(chat, model)
    for changes in FORMS[form]:
        changes(model)
    check = form == "files"
    said = to_run(model, tmp_path / "run", check=check)
    assert "stop=" not in said
    assert "tokenizer=" not in said
    told = export(tmp_path / "run", tmp_path / "back", dtype=None, check=check)
    assert "left out" not in told
    a, b = (transformers.AutoTokenizer.from_pretrained(path) for path in (model, tmp_path / "back"))
    assert a.chat_template == b.chat_template
    for options in ({"tokenize": False}, {"add_generation_prompt": True}):
        assert a.apply_chat_template(CHAT, **options) == b.apply_chat_template(CHAT, **options)
    for name in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "padding_side",
        "model_max_length",
    ):
        assert getattr(a, name) == getattr(b, name) is not None
    assert a.special_tokens_map == b.special_tokens_map
    assert a.extra_special_tokens == b.extra_special_tokens
    assert repr(a.added_tokens_decoder) == repr(b.added_tokens_decoder)
    ours = open_tokenizer(
        "huggingface", f"{model}/tokenizer.json", end_token=[*a.get_added_vocab()][-1]
    )
    text = f"It is{''.join(MORE)} a <i> truth"
    assert ours.ids(text) == a(text, split_special_tokens=True)["input_ids"]
    assert a(text)["input_ids"] == b(text, add_special_tokens=False)["input_ids"]
    how, again = (
        transformers.GenerationConfig.from_pretrained(path) for path in (model, tmp_path / "back")
    )
    assert how.to_dict() == again.to_dict()
    config, exported = (
        transformers.AutoConfig.from_pretrained(path) for path in (model, tmp_path / "back")
    )
    for name in ("eos_token_id", "pad_token_id", "bos_token_id", "dtype"):
        assert getattr(config, name) == getattr(exported, name) is not None
    theirs, ours = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert x.dtype == ours[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(x.view(np.uint16), ours[name].view(np.uint16))


@needs_transformers
def test_what_another_tokenizer_gives_another_meaning_is_left_out_and_named(chat, tmp_path):
    to_run(chat, tmp_path / "run", check=False)
    swapped = [*SPECIAL[:2], *SPECIAL[:1:-1]]
    (tmp_path / "other.json").write_text(definition(swapped))
    said = export(
        tmp_path / "run", tmp_path / "other", check=False, tokenizer=str(tmp_path / "other.json")
    )
    assert "kept       of the import: generation_config.json, bf16" in said
    assert "left out   chat template, eos_token_id, pad_token_id, " in said
    assert said.count("left out") == 1
    how = read_json(tmp_path / "other/generation_config.json")
    assert how["temperature"] == 0.6
    assert how["eos_token_id"] is None
    assert "suppress_tokens" not in how
    assert read_json(tmp_path / "other/config.json").get("eos_token_id") is None
    of_tokenizer = read_json(tmp_path / "other/tokenizer_config.json")
    assert "chat_template" not in of_tokenizer
    assert "pad_token" not in of_tokenizer or of_tokenizer["pad_token"] in SPECIAL


def test_texts_end_at_the_ends_of_an_import_and_of_the_runs_documents():
    tokenizer = Tokenizer(definition(SPECIAL), end_token="</s>")
    of_documents, end = (tokenizer.special[token] for token in ("</s>", "<|im_end|>"))
    found = copy.deepcopy(sidecars.NOTHING)
    found["vocabulary"] = sidecars.vocabulary_of(tokenizers.Tokenizer.from_str(definition(SPECIAL)))
    found["generation_config"] = {"eos_token_id": [end, 7000]}
    saved: Any = SimpleNamespace(
        metadata={CARRIED: found}, config=SimpleNamespace(model=SimpleNamespace(vocab=320))
    )
    assert sidecars.ends_of(saved, tokenizer) == (of_documents, end)
    saved.metadata = {}
    assert sidecars.ends_of(saved, tokenizer) == (of_documents,)


# ---- files of strangers --------------------------------------------------------------------------


def test_a_checkpoint_of_a_stranger_is_checked_too(tmp_path, one_device):
    c = models.model("grouped")
    wrong = {"dtype": 5, "chat_templates": {"default": 5}, "vocabulary": []}
    wrong["tokenizer_config"] = {"extra_special_tokens": {"a": 5}}
    for i, (part, value) in enumerate(wrong.items()):
        kept = sidecars.NOTHING | {part: value}
        metadata = {"config": dataclasses.asdict(models.settings(c)), "loader": {}, CARRIED: kept}
        with Checkpointer(tmp_path / f"{i}/checkpoints") as checkpoints:
            checkpoints.save(5, {"weights": models.weights(c)}, metadata)
        with pytest.raises(
            ValueError, match=f"kept of the files of an imported model: {part}.* must be"
        ):
            export(tmp_path / f"{i}", tmp_path / "out", check=False, dtype=None)


# ---- runs ----------------------------------------------------------------------------------------


def test_runs_carry_it_from_checkpoint_to_checkpoint(tmp_path, exact, monkeypatch):
    """From an import to a run, and when that is resumed."""
    monkeypatch.setattr(resume, "read_weights", lambda path, like, *_: (like, {}))
    kept = sidecars.NOTHING | {"chat_templates": {"default": TEMPLATE}}
    with Checkpointer(tmp_path / "imported/checkpoints") as checkpoints:
        checkpoints.save(0, {"x": jnp.ones(2)}, {"config": {}, CARRIED: kept, "loader": {}})

    def train(steps: int) -> list:
        c = tiny.config(
            tiny.model(vocab=1280, layers=1),
            steps=steps,
            checkpoint_interval=2,
            eval_batches=0,
            init_from=str(tmp_path / "imported"),
        )
        c.data.filespec = str(ROOT / "synthetic_dataset.zarr")
        c.paths = dataclasses.replace(c.paths, model_name="tuned")
        exact_step.train_on("one device", c, tmp_path / "tuned")
        with Checkpointer(tmp_path / "tuned/checkpoints") as checkpoints:
            return [checkpoints.metadata(step).get(CARRIED) for step in checkpoints.steps()]

    assert train(2) == [kept]
    assert train(4) == [kept, kept]


# ---- dtype ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, one_device):
    c = models.model("grouped", layers=1)
    w = models.weights(c)
    return w, models.save(tmp_path / "run", w, c)


@pytest.mark.parametrize(
    ("compute", "imported", "step", "given", "expected"),
    [
        ("bf16", None, 5, None, "bf16"),
        ("bf16", "f16", 5, None, "f16"),
        ("f32", "f16", 0, None, "f16"),
        ("bf16", None, 5, "f32", "f32"),
    ],
)
def test_the_dtype_of_an_export(tmp_path, one_device, compute, imported, step, given, expected):
    """That in which the run computes, unless its weights are, or began as, those of an imported
    model. They are rounded as torch rounds them.
    """
    torch = pytest.importorskip("torch")
    c = models.model("grouped", layers=1)
    w = models.weights(c)
    metadata = {
        "config": dataclasses.asdict(models.settings(c, compute_dtype=compute)),
        "loader": {},
    }
    metadata |= {CARRIED: sidecars.NOTHING | {"dtype": imported}} if imported else {}
    with Checkpointer(tmp_path / "run/checkpoints") as checkpoints:
        checkpoints.save(step, {"weights": w}, metadata)
    said = export(tmp_path / "run", tmp_path / "out", dtype=given, check=False)
    assert f"written    {tmp_path}/out, in {expected}" in said
    assert (expected == "f32") == ("dtype=f32 would round no weight" not in said)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[expected]
    assert read_json(tmp_path / "out/config.json")["dtype"] == str(kind).removeprefix("torch.")
    found = load_file(tmp_path / "out/model.safetensors")["model.embed_tokens.weight"]
    rounded = torch.tensor(np.asarray(w.embed)).to(kind).view(torch.uint8).numpy()
    np.testing.assert_array_equal(found.view(np.uint8), rounded)


# ---- the tokenizer -------------------------------------------------------------------------------


def test_the_imported_tokenizer_is_that_of_the_run_unless_its_data_names_one(saved, tmp_path):
    _, run = saved
    (tmp_path / "run/tokenizer.json").write_text(definition(SPECIAL))
    imported = Tokenizer(definition(SPECIAL))
    with open_run(f"{run}/checkpoints/0000000005", None, trust=False) as opened:
        path = opened.tokenizer_file
        opened.config.data.filespec = None
        settings: Any = SimpleNamespace(tokenizer=None, prompt_ids=None)
        assert generate.read_tokenizer(settings, opened, print) == imported
    by_bytes = write(
        tmp_path / "bytes", attributes={"tokenizer": {"kind": "bytes", "end_token": "</s>"}}
    )
    nothing = write(tmp_path / "nothing", attributes={})
    assert tokenizer_of_run(DataConfig(), None, path) == imported
    assert tokenizer_of_run(DataConfig(filespec=nothing), None, path) == imported
    assert tokenizer_of_run(DataConfig(filespec=by_bytes), None, path).is_bytes
    assert tokenizer_of_run(DataConfig(), "bytes", path).is_bytes
