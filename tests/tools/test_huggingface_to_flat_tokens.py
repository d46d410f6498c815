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
import tokenizers
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
from tests.support.tokenization import write_jsonl

# Not text.definitions, whose large dictionaries take long to check.
check_modules(flat_tokens)
check_modules(sources, text_tokenizers, tool)

ROOT = Path(__file__).parents[2]
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
    """`(path, tokenizer)`: a small BPE, with tokens of several bytes."""
    definition = train_bpe([*TEXTS, (ROOT / "train.py").read_text()], 600)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(definition)
    return str(path), tokenizers.Tokenizer.from_str(definition)


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


def test_workers_change_nothing(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS * 2)
    config = TokenizerConfig(kind="huggingface", name=bpe[0])
    split = SplitConfig(files=[source], max_tokens=250)
    results = [
        run(tmp_path / f"d{num_workers}", split, tokenizer=config, num_workers=num_workers)
        for num_workers in (1, 2)
    ]
    assert results[0] == results[1]
    assert results[0][1]["num_tokens"] == 250


# ---- sources -------------------------------------------------------------------------------------


AB = {"files": ["a", "b"]}
A = {"files": ["a"]}
LINK = {"files": ["link"]}


@pytest.mark.parametrize(
    ("train", "validation", "expected"),
    [
        ({"files": ["b"]}, A, (["b0", "b1", "b2", "b3"], ["a0", "a1", "a2", "a3"])),
        (A | {"skip_documents": 2}, A | {"max_documents": 2}, (["a2", "a3"], ["a0", "a1"])),
        (A | {"max_documents": 2}, A | {"skip_documents": 2}, (["a0", "a1"], ["a2", "a3"])),
        (
            AB | {"skip_documents": 2},
            LINK | {"max_documents": 2},
            (["a2", "a3", "b0", "b1", "b2", "b3"], ["a0", "a1"]),
        ),
        (AB, LINK, None),
        (A | {"skip_documents": 2}, A | {"max_documents": 3}, None),
        (A | {"skip_documents": 2}, A | {"max_tokens": 4}, None),
        ({"files": ["b", "a"], "skip_documents": 2}, A | {"max_documents": 2}, None),
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


@pytest.mark.parametrize("keeps", [True, False])
def test_a_tokenizer_that_changes_text_is_reported(tmp_path, capsys, keeps):
    """Against what `tokenizers` decodes the ids of the probes to."""
    letters = {x: i for i, x in enumerate(definitions.BYTE_LETTERS.values())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if not keeps:
        tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = TokenizerConfig(kind="huggingface", name=str(tmp_path / "tokenizer.json"))
    run(tmp_path / "d", write_jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer=config)
    decoded = [tokenizer.decode(tokenizer.encode(text).ids) for text in PROBES]
    assert keeps == (decoded == list(PROBES))
    assert ("warning: the tokenizer changes text: " in capsys.readouterr().err) == (not keeps)


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


def test_max_tokens_is_exact(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 50)
    source = write_jsonl(tmp_path / "a.jsonl", ["", *TEXTS])
    config = TokenizerConfig(kind="huggingface", name=bpe[0])
    whole, _ = run(tmp_path / "whole", source, tokenizer=config)
    flat = [i for document in whole for i in document]
    ends = np.cumsum([len(document) for document in whole])
    for max_tokens in (1, int(ends[1]) - 1, int(ends[1]), int(ends[1]) + 1, len(flat)):
        split = SplitConfig(files=[source], max_tokens=max_tokens)
        documents, _ = run(tmp_path / f"{max_tokens}", split, tokenizer=config)
        assert [i for document in documents for i in document] == flat[:max_tokens]
        assert [len(document) for document in documents[:-1]] == [
            len(d) for d in whole[: len(documents) - 1]
        ]


# ---- errors --------------------------------------------------------------------------------------


AUSTEN = SplitConfig(files=[str(ROOT / "shardwright/shipped/austen_validation.jsonl.xz")])
BPE = TokenizerConfig(kind="train_bpe")


EOS = TokenizerConfig(end_token="<eos>")
NOTHING = SplitConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": None}, "train and validation are both null"),
        (
            {"train": NOTHING},
            r"train has neither files nor a source; give train.files=\[<file>\], ",
        ),
        ({"train": NOTHING, "dataset": "c4"}, "give train.source=<split of c4>, or train=null to"),
        ({"train": SplitConfig(files=["nothing/*"])}, r"No text file matches 'nothing/\*' in "),
        ({"train": SplitConfig(files=[__file__])}, r"or choose files of these kinds: .jsonl"),
        ({"train": None, "validation": AUSTEN, "tokenizer": BPE}, "give a training split"),
        ({"tokenizer": EOS}, "no token '<eos>' for tokenizer.end_token"),
    ],
)
def test_bad_settings(tmp_path, settings, message):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "new" / "d", **{"train": source} | settings)
    assert not (tmp_path / "new").exists()


def test_keeps_what_is_there(tmp_path, bpe):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    bytes_first, _ = run(tmp_path / "d", source)
    of_bpe = TokenizerConfig(kind="huggingface", name=bpe[0])
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
    tool.run(Settings(out=str(tmp_path / "d"), **more, tokenizer=of_bpe))
    assert read(tmp_path / "d", "validation")[0] == read(tmp_path / "d")[0]


def test_overwriting_trains_its_own_tokenizer(tmp_path, monkeypatch):
    """Also over work that was begun with another size, and not over a split that would stay."""
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS * 9)

    def trained(size):
        return TokenizerConfig(kind="train_bpe", vocab_size=size)

    with monkeypatch.context() as patch:
        patch.setattr(tool, "write_split", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "d", source, tokenizer=trained(300))
    _, attributes = run(tmp_path / "d", source, tokenizer=trained(320), overwrite=True)
    assert attributes["tokenizer"]["vocab_size"] == 320
    other = {"train": None, "validation": SplitConfig(files=[source]), "overwrite": True}
    with pytest.raises(ValueError, match=r"not the tokenizer .*, and train would keep"):
        tool.run(Settings(out=str(tmp_path / "d"), **other))


# ---- the examples --------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_on_its_example(tmp_path):
    command = [sys.executable, "-m", "tools.huggingface_to_flat_tokens", "--config-name=austen_bpe"]
    subprocess.run([*command, f"out={tmp_path}/d"], cwd=ROOT, check=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "d/tokenizer.json"))
    for split, novels in (("train", 246), ("validation", 24)):
        with lzma.open(ROOT / f"tests/data/austen_{split}.jsonl.xz") as lines:
            texts = [json.loads(line)["text"] for line in lines]
        documents, attributes = read(tmp_path / "d", split)
        assert len(documents) == novels == len(texts)
        assert attributes["tokenizer"]["vocab_size"] == 4096
        assert all(document[-1] == 1 for document in documents)
        assert tokenizer.decode(documents[3]) == texts[3]
