"""The tokenizer of a run's data; exported, it gives the ids that the run was trained on, after
model.bos_id.
"""

import json

import pytest
import tokenizers

from shardwright.data.loader import DataConfig, SourceConfig, StreamConfig
from shardwright.data.text import definitions
from shardwright.data.text.definitions import byte_definition, load_definition
from shardwright.data.text.tokenizers import Tokenizer, open_tokenizer, tokenizer_of_run
from shardwright.tools.checkpoint_to_huggingface import tokenizer_files
from tests.support.tokenization import PROBES
from tests.support.written_datasets import write

TEXTS = [
    *[text for text in PROBES if "<s>" not in text],
    "",
    "It is a truth universally acknowledged, naïve 東京",
]
BYTES = Tokenizer(byte_definition(), "</s>")


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer(definitions.train_bpe(TEXTS, 400), "<|end|>")


def ids_of(files, text):
    return tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"])).encode(text).ids


def test_what_a_tokenizer_put_around_text_is_left_out(bpe):
    """A dataset's ids are those of its text alone; they are neither cut nor padded."""
    tokenizer = tokenizers.Tokenizer.from_str(bpe.definition)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = tokenizer_files(bpe, 1)[0]["tokenizer.json"]["post_processor"]
    files, _ = tokenizer_files(Tokenizer(json.dumps(content)), 0)
    for text in TEXTS:
        assert ids_of(files, text) == [
            0,
            *load_definition(bpe.definition).encode(text, add_special_tokens=False).ids,
        ]


def test_a_begin_token_of_text_or_none_at_all_is_said(bpe):
    letter = load_definition(bpe.definition).token_to_id("a")
    files, notes = tokenizer_files(bpe, letter)
    assert notes == ["its bos_token 'a' is a token of text too"]
    assert "bos_token" not in files["tokenizer_config.json"]
    assert ids_of(files, "a")[0] == letter
    files, notes = tokenizer_files(bpe, 10_000)
    assert notes == [
        "it has no token of id 10000 (model.bos_id): put that id before the text's yourself"
    ]
    assert ids_of(files, "a") == [letter]


def test_transformers_opens_them(tmp_path, bpe):
    transformers = pytest.importorskip(
        "transformers", reason="opening needs transformers, installed on Python 3.11 only"
    )
    for name, known in (("bytes", BYTES), ("bpe", bpe)):
        files, notes = tokenizer_files(known, 0)
        assert not notes
        directory = tmp_path / name
        directory.mkdir()
        for file, content in files.items():
            (directory / file).write_text(json.dumps(content))
        (directory / "config.json").write_text('{"model_type": "llama"}')
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, known.end)
        for text in TEXTS:
            assert tokenizer(text)["input_ids"] == ids_of(files, text) == [0, *known.ids(text)]
            assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(("model_type", "warns"), [("llama", False), ("qwen2", True)])
def test_a_model_type_whose_tokenizer_transformers_replaces_is_warned_of(
    tmp_path, bpe, capsys, model_type, warns
):
    """AutoTokenizer splits numbers for each qwen2 as Qwen 2 does."""
    pytest.importorskip("torch", reason="transformers is installed on Python 3.11 only")
    for file, content in tokenizer_files(bpe, 0)[0].items():
        (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    expected = "AutoTokenizer opens it as Qwen2Tokenizer, with other ids for "
    assert [expected in line for line in definitions.differences(tmp_path)] == [True] * warns
    open_tokenizer("huggingface", str(tmp_path))
    assert (expected in capsys.readouterr().err) == warns


@pytest.mark.parametrize(("bos", "end", "pad"), [(0, "<|end|>", 1), (300, None, 0)])
def test_a_batch_of_a_bpe_is_padded(tmp_path, bpe, bos, end, pad):
    """At its end, where transformers masks it."""
    transformers = pytest.importorskip(
        "transformers", reason="padding needs transformers, installed on Python 3.11 only"
    )
    for file, content in tokenizer_files(Tokenizer(bpe.definition, end), bos)[0].items():
        (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["It is", "It is a truth universally"]
    batch, alone = tokenizer(texts, padding=True), tokenizer(texts[0])["input_ids"]
    padding = len(batch["input_ids"][1]) - len(alone)
    assert batch["input_ids"][0] == alone + [pad] * padding
    assert batch["attention_mask"][0] == [1] * len(alone) + [0] * padding
    assert tokenizer.pad_token_id == pad


def test_where_it_is_found(tmp_path, bpe):
    by_bytes = write(
        tmp_path / "bytes", attributes={"tokenizer": {"kind": "bytes", "end_token": "</s>"}}
    )
    by_bpe = write(
        tmp_path / "bpe", attributes={"tokenizer": {"kind": "train_bpe", "end_token": "<|end|>"}}
    )
    (tmp_path / "bpe" / "tokenizer.json").write_text(bpe.definition)
    nothing = write(tmp_path / "nothing", attributes={})

    def mixture(*names):
        return DataConfig(mixture={f"{i}": SourceConfig(name) for i, name in enumerate(names)})

    file = StreamConfig(
        tokenizer_kind="huggingface", tokenizer=f"{by_bpe}/tokenizer.json", end_token="<|end|>"
    )
    assert tokenizer_of_run(DataConfig(filespec=by_bytes)) == BYTES
    for data, named in [
        (DataConfig(filespec=by_bpe), None),
        (DataConfig(filespec=nothing), by_bpe),
        (mixture(by_bpe, by_bpe), None),
        (DataConfig(stream=file), None),
    ]:
        assert tokenizer_of_run(data, named) == bpe
    assert tokenizer_of_run(DataConfig(stream=StreamConfig())) == open_tokenizer("bytes")
    assert tokenizer_of_run(DataConfig(), f"{by_bpe}/tokenizer.json") == Tokenizer(bpe.definition)
    unknown = tokenizer_of_run(DataConfig(filespec=nothing))
    assert unknown.decode([5, 8]) == "5 8"
    with pytest.raises(ValueError, match="names none"):
        tokenizer_files(unknown, 0)
    (tmp_path / "lost").mkdir()
    lost = write(tmp_path / "lost", attributes={"tokenizer": {"kind": "train_bpe"}})
    for data, message in [
        (
            mixture(by_bpe, by_bytes),
            r"the datasets .* have different tokenizers. Give tokenizer=<name",
        ),
        (DataConfig(), r"the run has no data, because it was imported. Give tokenizer=<name"),
        (
            DataConfig(filespec=lost),
            r"of the dataset .*lost: .*/tokenizer.json is missing\. Give tokenizer=<name",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            tokenizer_of_run(data)
