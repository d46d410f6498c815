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


def write_files(directory, known, bos, model_type="llama"):
    files, _ = tokenizer_files(known, bos)
    for file, content in (files | {"config.json": {"model_type": model_type}}).items():
        (directory / file).write_text(json.dumps(content))
    return files


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_transformers_opens_them(tmp_path, bpe, name):
    transformers = pytest.importorskip("transformers")  # of Python 3.11 only
    known = {"bytes": BYTES, "bpe": bpe}[name]
    files = write_files(tmp_path, known, 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, known.end)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == ids_of(files, text) == [0, *known.ids(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(("model_type", "warns"), [("llama", False), ("qwen2", True)])
def test_a_model_type_whose_tokenizer_transformers_replaces_is_warned_of(
    tmp_path, bpe, capsys, model_type, warns
):
    """AutoTokenizer splits numbers for each qwen2 as Qwen 2 does."""
    pytest.importorskip("torch")  # of Python 3.11 only
    write_files(tmp_path, bpe, 0, model_type)
    expected = "AutoTokenizer opens it as Qwen2Tokenizer, with other ids for "
    assert [expected in line for line in definitions.differences(tmp_path)] == [True] * warns
    open_tokenizer("huggingface", str(tmp_path))
    assert (expected in capsys.readouterr().err) == warns


def dataset(path, end=None, definition=None, **tokenizer):
    attributes = {"tokenizer": tokenizer | {"end_token": end}} if tokenizer else {}
    write(path, attributes=attributes)
    if definition:
        (path / "tokenizer.json").write_text(definition)
    return str(path)


def test_where_it_is_found(tmp_path, bpe):
    by_bytes = dataset(tmp_path / "bytes", "</s>", kind="bytes")
    by_bpe = dataset(tmp_path / "bpe", "<|end|>", bpe.definition, kind="train_bpe")
    nothing = dataset(tmp_path / "nothing")
    lost = dataset(tmp_path / "lost", kind="train_bpe")

    def mixture(*names):
        return DataConfig(mixture={f"{i}": SourceConfig(name) for i, name in enumerate(names)})

    file = f"{by_bpe}/tokenizer.json"
    stream = StreamConfig(tokenizer_kind="huggingface", tokenizer=file, end_token="<|end|>")
    assert tokenizer_of_run(DataConfig(filespec=by_bytes)) == BYTES
    for data, named in [
        (DataConfig(filespec=by_bpe), None),
        (DataConfig(filespec=nothing), by_bpe),
        (mixture(by_bpe, by_bpe), None),
        (DataConfig(stream=stream), None),
    ]:
        assert tokenizer_of_run(data, named) == bpe
    assert tokenizer_of_run(DataConfig(stream=StreamConfig())) == open_tokenizer("bytes")
    assert tokenizer_of_run(DataConfig(), file) == Tokenizer(bpe.definition)
    unknown = tokenizer_of_run(DataConfig(filespec=nothing))
    assert unknown.decode([5, 8]) == "5 8"
    with pytest.raises(ValueError, match="names none"):
        tokenizer_files(unknown, 0)
    for data, message in [
        (mixture(by_bpe, by_bytes), "the datasets .* have different tokenizers"),
        (DataConfig(), "the run has no data, because it was imported"),
        (DataConfig(filespec=lost), r"of the dataset .*lost: .*/tokenizer.json is missing"),
    ]:
        with pytest.raises(ValueError, match=rf"{message}\. Give tokenizer=<name"):
            tokenizer_of_run(data)
