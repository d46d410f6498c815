"""From text to flat-tokens, against Python's UTF-8, `tokenizers` asked one document at a time, and
transformers.
"""

import json
import lzma
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from omegaconf import OmegaConf

from shardwright.data import flat_tokens
from shardwright.data.text import definitions, sources
from shardwright.data.text import tokenizers as text_tokenizers
from shardwright.data.text.definitions import PROBES, train_bpe
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import Settings, SplitConfig, TokenizerConfig
from tests.support.numpy_checks import check_modules
from tests.support.shipped import load

# Not text.definitions, whose large dictionaries take long to check.
check_modules(flat_tokens)
check_modules(sources, text_tokenizers, tool)

ROOT = Path(__file__).parents[2]
TEXTS = [
    "Hello, world!",
    "naïve café — 東京",
    "a",
    "x" * 300,
    " leading and trailing ",
    "</s>",
    "<|end|> is no end",
] * 3


def write_jsonl(path, texts, field="text"):
    path.write_text(
        "".join(json.dumps({field: text, "n": i}) + "\n" for i, text in enumerate(texts))
    )
    return str(path)


def read(out, split="train"):
    """The documents as lists of ids, and the attributes."""
    group = zarr.open_group(str(out), mode="r")[split]
    tokens, starts = group["encoded_tokens"][:], group["seq_starts"][:].astype(np.int64)
    np.testing.assert_array_equal(np.flatnonzero(tokens & 1), starts[:-1])
    return [
        document.tolist() for document in np.split(tokens >> 1, starts[1:-1])
    ], group.attrs.asdict()


def run(out, train, **settings):
    if isinstance(train, str):
        train = SplitConfig(files=[train])
    tool.run(
        Settings(
            **{"out": str(out), "train": train, "validation": None, "num_workers": 1} | settings
        )
    )
    return read(out)


def byte_ids(text):
    return [byte + 3 for byte in text.encode()]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """`(path, tokenizer)`: a small BPE, with tokens of several bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    definition = train_bpe([*TEXTS, Path(__file__).read_text()], 600)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(definition)
    return str(path), tokenizers.Tokenizer.from_str(definition)


# ---- tokenizers ----------------------------------------------------------------------------------


def test_bytes_are_those_of_byt5():
    transformers = pytest.importorskip("transformers")
    # Its sentinel tokens would be read in the text; none are asked for.
    byt5 = transformers.ByT5Tokenizer(extra_ids=0)
    texts = [text for text in TEXTS if "</s>" not in text]
    encoded = text_tokenizers.open_tokenizer("bytes", end_token="</s>").encode(texts)
    expected = [byt5(text)["input_ids"] for text in texts]
    assert encoded.ids.tolist() == [i for ids in expected for i in ids]
    assert encoded.lengths.tolist() == [len(ids) for ids in expected]


def test_huggingface_tokenizer(tmp_path, bpe):
    path, oracle = bpe
    config = TokenizerConfig(kind="huggingface", name=path, end_token="<|end|>")
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    documents, attributes = run(tmp_path / "d", source, tokenizer=config)
    for text, ids in zip(TEXTS, documents, strict=True):
        assert ids.pop() == 1
        # No id of a special token, though the text quotes one.
        assert min(ids) > 1
        assert oracle.decode(ids) == text
        if "<|" not in text:
            assert ids == oracle.encode(text).ids
    assert attributes["num_documents"] == len(TEXTS)
    expected = {"kind": "huggingface", "name": path, "vocab_size": 600, "end_token": "<|end|>"}
    assert {key: attributes["tokenizer"][key] for key in expected} == expected
    assert attributes["source"] == [source]
    assert (tmp_path / "d/tokenizer.json").read_text() == Path(path).read_text()


# ---- sources -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "validation", "is_apart"),
    [
        ({"files": ["a"], "max_documents": 2}, {"files": ["a"], "skip_documents": 2}, True),
        ({"files": ["a", "b"], "skip_documents": 2}, {"files": ["link"], "max_documents": 2}, True),
        ({"files": ["a", "b"]}, {"files": ["link"]}, False),
        ({"files": ["a"], "skip_documents": 2}, {"files": ["a"], "max_documents": 3}, False),
        ({"files": ["a"], "skip_documents": 2}, {"files": ["a"], "max_tokens": 4}, False),
        ({"files": ["b", "a"], "skip_documents": 2}, {"files": ["a"], "max_documents": 2}, False),
    ],
)
def test_train_and_validation_read_no_document_twice(tmp_path, train, validation, is_apart):
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(4)])
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    of_splits = {"train": train, "validation": validation}
    for name, split in of_splits.items():
        of_splits[name] = SplitConfig(
            **split | {"files": [str(tmp_path / f"{file}.jsonl") for file in split["files"]]}
        )
    settings = Settings(out=str(tmp_path / "d"), num_workers=1, **of_splits)
    if not is_apart:
        with pytest.raises(ValueError, match=r"both read .*\.jsonl\. .*train\.skip_documents="):
            tool.run(settings)
        return
    tool.run(settings)
    for name, split in of_splits.items():
        stems = [Path(file).resolve().stem for file in split.files]
        texts = [f"{stem}{i}" for stem in stems for i in range(4)][split.skip_documents :]
        expected = [byte_ids(text) for text in texts[: split.max_documents]]
        assert read(tmp_path / "d", name)[0] == expected


def test_documents_without_tokens_have_no_end_either(tmp_path, bpe, capsys):
    """Of this tokenizer, which strips text, documents of spaces alone have no token."""
    normalizer = {"type": "Strip", "strip_left": True, "strip_right": True}
    definition = json.dumps(json.loads(bpe[1].to_str()) | {"normalizer": normalizer})
    (tmp_path / "tokenizer.json").write_text(definition)
    oracle = type(bpe[1]).from_str(definition)
    texts = ["  ", "one", " ", "", "\n\t", "two ", None, "   "]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    name, kind = str(tmp_path / "tokenizer.json"), "huggingface"
    settings = TokenizerConfig(kind=kind, name=name, end_token="<|end|>")
    documents, attributes = run(tmp_path / "d", source, tokenizer=settings)
    assert documents == [[*oracle.encode(text).ids, 1] for text in ("one", "two ")]
    assert attributes["num_documents"] == 2
    assert "6 empty documents skipped" in capsys.readouterr().out


def t5(t):
    return t.models.Unigram(
        [(piece, -1.0) for piece in ["<unk>", "▁", *"aAbcefé", "2", "▁b"]], 0, False
    ), {
        "normalizer": t.normalizers.NFKC(),
        "pre_tokenizer": t.pre_tokenizers.Sequence(
            [t.pre_tokenizers.WhitespaceSplit(), t.pre_tokenizers.Metaspace()],
        ),
        "decoder": t.decoders.Metaspace(),
    }


def of_bytes(t):
    vocab = {x: i for i, x in enumerate(definitions.BYTE_LETTERS.values())}
    parts = {
        "pre_tokenizer": t.pre_tokenizers.ByteLevel(add_prefix_space=False),
        "decoder": t.decoders.ByteLevel(),
    }
    return t.models.BPE(vocab, []), parts


def sentencepiece(t):
    pieces = [*(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcAef", "<unk>"]
    vocab = {x: i for i, x in enumerate(pieces)}
    decoders = [
        t.decoders.Replace("▁", " "),
        t.decoders.ByteFallback(),
        t.decoders.Fuse(),
        t.decoders.Strip(" ", 1, 0),
    ]
    return t.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"), {
        "normalizer": t.normalizers.Sequence(
            [t.normalizers.Prepend("▁"), t.normalizers.Replace(" ", "▁")]
        ),
        "decoder": t.decoders.Sequence(decoders),
    }


@pytest.mark.parametrize("make", [t5, of_bytes, sentencepiece])
def test_a_tokenizer_that_changes_text_is_reported(tmp_path, capsys, make):
    """Against what `tokenizers` decodes the ids of the probes to."""
    t = pytest.importorskip("tokenizers")
    model, parts = make(t)
    tokenizer = t.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = TokenizerConfig(kind="huggingface", name=str(tmp_path / "tokenizer.json"))
    run(tmp_path / "d", write_jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer=config)
    is_kept = [
        tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
        for text in PROBES
    ]
    assert ("warning: the tokenizer changes text: " in capsys.readouterr().err) == (
        not all(is_kept)
    )
    assert all(is_kept) == (make in (of_bytes, sentencepiece))


@pytest.mark.parametrize("end_token", [None, "</s>"])
def test_ends_with_what_training_needs(tmp_path, capsys, end_token):
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


def test_max_tokens_is_exact(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 50)
    source = write_jsonl(tmp_path / "a.jsonl", ["", *TEXTS])
    config = TokenizerConfig(kind="huggingface", name=bpe[0])
    whole, _ = run(tmp_path / "whole", source, tokenizer=config)
    flat = [i for document in whole for i in document]
    ends = np.cumsum([len(document) for document in whole])
    for max_tokens in (1, int(ends[1]) - 1, int(ends[1]), int(ends[1]) + 1, len(flat)):
        split = SplitConfig(files=[source], max_tokens=max_tokens)
        workers = 2 if max_tokens == len(flat) else 1
        out = tmp_path / f"{max_tokens}"
        documents, _ = run(out, split, tokenizer=config, num_workers=workers)
        assert [i for document in documents for i in document] == flat[:max_tokens]
        assert [len(document) for document in documents[:-1]] == [
            len(d) for d in whole[: len(documents) - 1]
        ]


# ---- errors --------------------------------------------------------------------------------------


AUSTEN = SplitConfig(files=[str(ROOT / "shardwright/shipped/austen_validation.jsonl.xz")])
BPE = TokenizerConfig(kind="train_bpe")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": None}, "train and validation are both null"),
        (
            {"train": SplitConfig()},
            r"train has neither files nor a source; give train.files=\[<file>\], or train=null to",
        ),
        (
            {"train": SplitConfig(files=["nothing/*.jsonl"])},
            r"No text file matches 'nothing/\*.jsonl' in ",
        ),
        (
            {"train": None, "validation": AUSTEN, "tokenizer": BPE},
            "tokenizer.kind is train_bpe; give a training split",
        ),
        (
            {"tokenizer": TokenizerConfig(end_token="<eos>")},
            "no token '<eos>' for tokenizer.end_token",
        ),
    ],
)
def test_bad_settings(tmp_path, settings, message):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "new" / "d", **{"train": source} | settings)
    assert not (tmp_path / "new").exists()


def test_another_tokenizer_is_refused_unless_all_is_overwritten(tmp_path, bpe):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    bytes_first, _ = run(tmp_path / "d", source)
    of_bpe = TokenizerConfig(kind="huggingface", name=bpe[0])
    message = r"tokenizer.json is not the tokenizer of the settings"
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "d", source, tokenizer=of_bpe)
    assert read(tmp_path / "d")[0] == bytes_first
    run(tmp_path / "d", source, tokenizer=of_bpe, overwrite=True)
    more = {"train": None, "validation": SplitConfig(files=[source])}
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=message):
            tool.run(Settings(out=str(tmp_path / "d"), **more, overwrite=overwrite))
    tool.run(Settings(out=str(tmp_path / "d"), **more, tokenizer=of_bpe))
    assert read(tmp_path / "d", "validation")[0] == read(tmp_path / "d")[0]


# ---- the examples --------------------------------------------------------------------------------


@pytest.mark.long
def test_an_example_trains_its_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    command = [sys.executable, "-m", "tools.huggingface_to_flat_tokens"]
    command += ["--config-name=austen_bpe", f"out={tmp_path}/d"]
    subprocess.run(command, cwd=ROOT, check=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "d/tokenizer.json"))
    assert tokenizer.id_to_token(0) == "<|begin|>"
    for split, novels in (("train", 246), ("validation", 24)):
        with lzma.open(ROOT / f"tests/data/austen_{split}.jsonl.xz") as lines:
            texts = [json.loads(line)["text"] for line in lines]
        documents, attributes = read(tmp_path / "d", split)
        assert len(documents) == novels == len(texts)
        assert attributes["max_token_id"] < attributes["tokenizer"]["vocab_size"] == 4096
        assert all(document[-1] == 1 for document in documents)
        assert tokenizer.decode(documents[3]) == texts[3]
        assert attributes["num_tokens"] < 0.4 * sum(len(text.encode()) for text in texts)
