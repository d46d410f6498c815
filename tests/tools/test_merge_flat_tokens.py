"""Shards of a dataset, merged, against one process that wrote it all."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
from numpy_checks import check_modules
from tokenization import ROOT, config, random_texts, small, tree, write_jsonl

from shardwright_data import flat_tokens
from shardwright_data.flat_tokens import shards
from shardwright_data.text import definitions
from tools import merge_flat_tokens
from tools.huggingface_to_flat_tokens import __main__ as tool
from tools.huggingface_to_flat_tokens import splits
from tools.huggingface_to_flat_tokens.config import TokenizerConfig, TokenizerKind

check_modules(merge_flat_tokens, shards)

__all__ = ["small"]


@pytest.fixture(autouse=True)
def _few_states(small, monkeypatch):
    monkeypatch.setattr(splits, "STATE_SECONDS", 60.0)


def write_shards(out, files, count, which=None, **settings):
    for index in which if which is not None else range(count):
        tool.run(config(out, files, shard=f"{index}/{count}", **settings))


def merge(out, **settings):
    merge_flat_tokens.run(merge_flat_tokens.Config(out=str(out), **settings))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(definitions.train_bpe(random_texts(60), 280))
    return TokenizerConfig(kind=TokenizerKind.huggingface, name=str(path), end_token="<|end|>")


def documents(path) -> list[list[int]]:
    """The documents of a dataset, sorted: shards have them in another order than one process."""
    reader = flat_tokens.Reader(str(path), "train")
    return sorted(x.tolist() for x in reader.read(*reader.document_spans(np.arange(reader.num_documents))))


def assert_same_documents(found, expected):
    assert documents(found) == documents(expected)
    a, b = (flat_tokens.Reader(str(path), "train").attributes for path in (found, expected))
    assert a == b


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_merged_shards_have_what_one_process_writes(tmp_path, small, bpe, count, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["", *random_texts(70), "", ""])
    tool.run(config(tmp_path / "one", [source], tokenizer=bpe))
    write_shards(tmp_path / "many", [source], count, tokenizer=bpe)
    capsys.readouterr()
    merge(tmp_path / "many")
    assert_same_documents(tmp_path / "many", tmp_path / "one")
    assert f"documents of {count} shards; 5 documents without a token are left out" in capsys.readouterr().out
    assert (tmp_path / "many.shards").exists()


def test_max_tokens_is_divided_among_shards(tmp_path, small):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(150))
    write_shards(tmp_path / "many", [source], 3, train_max_tokens=4000, validation_max_tokens=2)
    sizes = []
    for index in range(3):
        directory = shards.Shard(index, 3).directory(str(tmp_path / "many"))
        sizes.append(flat_tokens.Reader(directory, "train").num_tokens)
    assert sizes == [1334, 1333, 1333]
    merge(tmp_path / "many")
    assert flat_tokens.Reader(str(tmp_path / "many"), "train").num_tokens == 4000
    assert flat_tokens.Reader(str(tmp_path / "many"), "validation").num_tokens == 2


def test_sources_in_files(tmp_path, small):
    """Pieces are files where a file can only be read from its beginning; shards without any are empty."""
    texts = random_texts(40)
    names = [write_jsonl(tmp_path / f"{i}.jsonl", texts[10 * i : 10 * i + 10]) for i in range(4)]
    subprocess.run(["gzip", *names], check=True)
    files = [f"{name}.gz" for name in names]
    tool.run(config(tmp_path / "one", files))
    write_shards(tmp_path / "many", files, 6)
    merge(tmp_path / "many")
    assert_same_documents(tmp_path / "many", tmp_path / "one")


@pytest.mark.long
def test_multirun(tmp_path):
    """As it is typed: a multirun writes the shards, a second command joins them."""
    for i, texts in enumerate((random_texts(30), random_texts(20, seed=1))):
        write_jsonl(tmp_path / f"{i}.jsonl", texts)
    command = [sys.executable, "-m", "tools.huggingface_to_flat_tokens"]
    settings = [f"out={tmp_path}/d", f"train.files=[{tmp_path}/*.jsonl]", "validation=null", "num_workers=1"]
    subprocess.run([*command, "--multirun", "shard=0/2,1/2", *settings], cwd=ROOT, check=True)
    merge(tmp_path / "d")
    made = config(tmp_path / "one", [f"{tmp_path}/*.jsonl"], tokenizer=TokenizerConfig())
    made.validation = None
    tool.run(made)
    assert_same_documents(tmp_path / "d", tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "d.shards").iterdir()) == ["0-of-2", "1-of-2", "multirun.yaml"]


# ---- errors -------------------------------------------------------------------------------------------------------


def test_missing_shards(tmp_path, small):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    with pytest.raises(ValueError, match=r"There are no shards in .*d.shards: write them with shard=0/n"):
        merge(tmp_path / "d")
    write_shards(tmp_path / "d", [source], 3, which=[0, 2])
    with pytest.raises(ValueError, match=r"d.shards lacks shards \[1\] of 3: write them with shard=1/3"):
        merge(tmp_path / "d")
    write_shards(tmp_path / "d", [source], 2, which=[0])
    with pytest.raises(ValueError, match=r"d.shards holds shards of 2 and of 3; delete those not meant"):
        merge(tmp_path / "d")


def test_shards_that_do_not_belong_together(tmp_path, small, bpe):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    write_shards(tmp_path / "d", [source], 2, which=[0])
    write_shards(tmp_path / "d", [source], 2, which=[1], validation_skip_documents=1)
    with pytest.raises(
        ValueError, match=r"1-of-2/train was made with other .*0-of-2/train: validation.skip_documents was"
    ):
        merge(tmp_path / "d")
    shutil.rmtree(tmp_path / "d.shards/1-of-2")
    write_shards(tmp_path / "d", [source], 2, which=[1], tokenizer=bpe)
    with pytest.raises(ValueError, match=r"1-of-2 and .*0-of-2 have different tokenizers"):
        merge(tmp_path / "d")
    assert not (tmp_path / "d/train").exists()


def test_unfinished_and_damaged_shards(tmp_path, small):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    write_shards(tmp_path / "d", [source], 2)
    shard = tmp_path / "d.shards/1-of-2"
    marker = (shard / "train/zarr.json").read_bytes()
    (shard / "train/zarr.json").unlink()
    with pytest.raises(ValueError, match="1-of-2/train is incomplete"):
        merge(tmp_path / "d")
    (shard / "train/zarr.json").write_bytes(marker)
    chunk = shard / "train/encoded_tokens/c/1"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])
    with pytest.raises(ValueError, match=r"1-of-2/train: cannot read tokens .*corrupt"):
        merge(tmp_path / "d")
    assert not (tmp_path / "d/train/zarr.json").exists()
    chunk.write_bytes(content)
    merge(tmp_path / "d")
    with pytest.raises(ValueError, match="d/train is already there"):
        merge(tmp_path / "d")
    merge(tmp_path / "d", overwrite=True, delete_shards=True)
    assert not (tmp_path / "d.shards").exists()
    tool.run(config(tmp_path / "one", [source]))
    assert_same_documents(tmp_path / "d", tmp_path / "one")


def test_shards_train_no_tokenizer(tmp_path, small):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    train = TokenizerConfig(kind=TokenizerKind.train_bpe, vocab_size=280)
    with pytest.raises(ValueError, match="train_bpe and shard contradict each other: train one tokenizer first"):
        write_shards(tmp_path / "d", [source], 2, tokenizer=train)


@pytest.mark.parametrize("shard", ["2/2", "1", "-1/2", "a/b", "0/0", "0/1000000000000"])
def test_bad_shards(tmp_path, shard):
    with pytest.raises(ValueError, match="it must be i/n with 0 ≤ i < n"):
        shards.Shard.parse(shard)


def test_a_dataset_is_copied_to_zarr_v2_and_back(tmp_path, small, bpe, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    tool.run(config(tmp_path / "v3", [source], tokenizer=bpe))
    tool.run(config(tmp_path / "v2", [source], tokenizer=bpe, zarr_format=2))
    merge(tmp_path / "copy", source=str(tmp_path / "v3"), zarr_format=2)
    assert tree(tmp_path / "copy") == tree(tmp_path / "v2")
    assert {name.rpartition("/")[2] for name in tree(tmp_path / "copy")} >= {".zgroup", ".zattrs", "tokenizer.json"}
    merge(tmp_path / "back", source=str(tmp_path / "copy"), zarr_format=3, delete_shards=True)
    assert tree(tmp_path / "back") == tree(tmp_path / "v3")
    merge(tmp_path / "same", source=str(tmp_path / "copy"))
    assert tree(tmp_path / "same") == tree(tmp_path / "v2")
    write_shards(tmp_path / "shards", [source], 2, tokenizer=bpe, zarr_format=2)
    merge(tmp_path / "shards")
    assert_same_documents(tmp_path / "shards", tmp_path / "v2")
    with pytest.raises(ValueError, match=r"source and out are both .*v2\. Copy to another path"):
        merge(tmp_path / "v2", source=str(tmp_path / "v2"), overwrite=True)
    assert tree(tmp_path / "copy") == tree(tmp_path / "v2")
