"""From text to flat-tokens: which documents each split reads, and what is kept or refused."""

import itertools
import shlex

import numpy as np
import pytest
import tokenizers
import zarr
from omegaconf import OmegaConf

from shardwright.data import flat_tokens
from shardwright.data.text import sources
from shardwright.data.text import tokenizers as text_tokenizers
from shardwright.data.text.definitions import BYTE_LETTERS, train_bpe
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import Settings, SplitConfig, TokenizerConfig
from tests.support.numpy_checks import check_modules
from tests.support.shipped import load
from tests.support.tokenization import write_jsonl

# Not text.definitions, whose large dictionaries take long to check.
check_modules(flat_tokens)
check_modules(sources, text_tokenizers, tool)

TEXTS = ["Hello, world!", "naïve café — 東京", "a", "x" * 300, " leading and trailing ", "</s>"]
TEXTS = [*TEXTS, "<|end|> is no end"] * 3


def read(out, split="train"):
    """The documents as lists of ids, and the attributes."""
    group = zarr.open_group(str(out), mode="r")[split]
    tokens, starts = group["encoded_tokens"][:], group["seq_starts"][:].astype(np.int64)
    np.testing.assert_array_equal(np.flatnonzero(tokens & 1), starts[:-1])
    return [
        document.tolist() for document in np.split(tokens >> 1, starts[1:-1])
    ], group.attrs.asdict()


def run(out, train, **settings):
    split = SplitConfig(files=[train]) if isinstance(train, str) else train
    given = {"out": str(out), "train": split, "validation": None, "num_workers": 1}
    tool.run(Settings(**given | settings))
    return read(out)


def byte_ids(text):
    return [byte + 3 for byte in text.encode()]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """The path of a small BPE, with tokens of several bytes."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe(TEXTS, 400))
    return str(path)


# ---- tokenizers ----------------------------------------------------------------------------------


def test_bytes_are_those_of_byt5():
    transformers = pytest.importorskip("transformers")  # of Python 3.11 only
    # Its sentinel tokens would be read in the text; none are asked for.
    byt5 = transformers.ByT5Tokenizer(extra_ids=0)
    texts = [text for text in TEXTS if "</s>" not in text]
    encoded = text_tokenizers.open_tokenizer("bytes", end_token="</s>").encode(texts)
    expected = [byt5(text)["input_ids"] for text in texts]
    assert encoded.ids.tolist() == [i for ids in expected for i in ids]
    assert encoded.lengths.tolist() == [len(ids) for ids in expected]


def test_workers_change_nothing_and_max_tokens_is_exact(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS * 2)
    config = TokenizerConfig(kind="huggingface", name=bpe)
    split = SplitConfig(files=[source], max_tokens=100)
    results = [
        run(tmp_path / f"d{num_workers}", split, tokenizer=config, num_workers=num_workers)
        for num_workers in (1, 2)
    ]
    assert results[0] == results[1]
    assert results[0][1]["num_tokens"] == 100
    whole, _ = run(tmp_path / "whole", source, tokenizer=config)
    assert [*itertools.chain(*results[0][0])] == [*itertools.chain(*whole)][:100]


# ---- sources -------------------------------------------------------------------------------------


AB = {"files": ["a", "b"]}
A = {"files": ["a"]}
LINK = {"files": ["link"]}


@pytest.mark.parametrize(
    ("train", "validation", "expected"),
    [
        (A | {"skip_documents": 2}, A | {"max_documents": 2}, (["a2", "a3"], ["a0", "a1"])),
        (
            AB | {"skip_documents": 2},
            LINK | {"max_documents": 2},
            (["a2", "a3", "b0", "b1", "b2", "b3"], ["a0", "a1"]),
        ),
        (AB, LINK, None),
        (A | {"skip_documents": 2}, A | {"max_documents": 3}, None),
        (A | {"skip_documents": 2}, A | {"max_tokens": 4}, None),
    ],
)
def test_train_and_validation_read_no_document_twice(tmp_path, train, validation, expected):
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(4)])
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    splits = {}
    for name, split in (("train", train), ("validation", validation)):
        files = [str(tmp_path / f"{file}.jsonl") for file in split["files"]]
        splits[name] = SplitConfig(**split | {"files": files})
    settings = Settings(out=str(tmp_path / "d"), num_workers=1, **splits)
    if expected is None:
        with pytest.raises(ValueError, match=r"both read .*\.jsonl\. .*train\.skip_documents="):
            tool.run(settings)
        return
    tool.run(settings)
    for name, texts in zip(splits, expected, strict=True):
        assert read(tmp_path / "d", name)[0] == [byte_ids(text) for text in texts]


def test_a_tokenizer_that_changes_text_is_reported(tmp_path, capsys):
    letters = {x: i for i, x in enumerate(BYTE_LETTERS.values())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = TokenizerConfig(kind="huggingface", name=str(tmp_path / "tokenizer.json"))
    run(tmp_path / "d", write_jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer=config)
    assert "warning: the tokenizer changes text: " in capsys.readouterr().err


@pytest.mark.parametrize("end_token", [None, "</s>"])
def test_ends_with_what_training_needs(tmp_path, capsys, monkeypatch, end_token):
    """Its command and its lines are a configuration, and fit the dataset."""
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    _, attributes = run(tmp_path / "d, e", source, tokenizer=TokenizerConfig(end_token=end_token))
    out, err = capsys.readouterr()
    assert ("warning: tokenizer.end_token is null" in err) == (end_token is None)
    assert "the tokenizer changes" not in err
    assert f"{attributes['num_tokens']:,} tokens" in out
    assert "vocabulary: 259" in out
    text, command = out.partition("configuration:\n\n")[2].split("\nTry it: ")
    assert shlex.split(command)[:4] == ["python", "-m", "train", "--config-name=local_text"]
    c = load("local_text", *shlex.split(command)[4:])
    given = OmegaConf.create(text)
    assert c.data.filespec == given.data.filespec == str(tmp_path / "d, e")
    assert c.model.vocab == given.model.vocab == 320 > attributes["max_token_id"]
    assert c.model.bos_id == given.model.bos_id == (0 if end_token is None else 1)
    # there is nothing to validate on
    assert c.training.eval_batches == given.training.eval_batches == 0


# ---- errors --------------------------------------------------------------------------------------


def test_keeps_what_is_there(tmp_path, bpe):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    bytes_first, _ = run(tmp_path / "d", source)
    of_bpe = TokenizerConfig(kind="huggingface", name=bpe)
    for settings, message in [
        ({"text_separator": "x"}, "d/train exists already"),
        ({"tokenizer": of_bpe}, "tokenizer.json is not the tokenizer of the settings"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "d", source, **settings)
    assert read(tmp_path / "d")[0] == bytes_first
    run(tmp_path / "d", source, tokenizer=of_bpe, overwrite=True)
    more = {"train": None, "validation": SplitConfig(files=[source])}
    with pytest.raises(ValueError, match=r"tokenizer.json is not the tokenizer of the settings"):
        tool.run(Settings(out=str(tmp_path / "d"), **more))
    with pytest.raises(ValueError, match=r"not the tokenizer .*, and train would keep"):
        tool.run(Settings(out=str(tmp_path / "d"), **more, overwrite=True))
    tool.run(Settings(out=str(tmp_path / "d"), **more, tokenizer=of_bpe))
    assert read(tmp_path / "d", "validation")[0] == read(tmp_path / "d")[0]
