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


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_merged_shards_are_what_one_process_writes(tmp_path, small, monkeypatch, bpe, count, capsys):
    monkeypatch.setattr(merge_flat_tokens, "BLOCK_TOKENS", 190)
    source = write_jsonl(tmp_path / "a.jsonl", ["", *random_texts(70), "", ""])
    tool.run(config(tmp_path / "one", [source], tokenizer=bpe))
    write_shards(tmp_path / "many", [source], count, tokenizer=bpe)
    capsys.readouterr()
    merge(tmp_path / "many")
    assert tree(tmp_path / "many") == tree(tmp_path / "one")
    assert f"documents of {count} shards; the shards left out " in capsys.readouterr().out
    assert (tmp_path / "many.shards").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_max_tokens_of_shards(tmp_path, small, bpe, kind):
    """Cut anywhere: at the end of a document, within one, within a character, at the last token."""
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(20))
    tokenizer = bpe if kind == "bpe" else TokenizerConfig(end_token="</s>")
    tool.run(config(tmp_path / "all", [source], tokenizer=tokenizer))
    reader = flat_tokens.Reader(str(tmp_path / "all"), "train")
    starts, lengths = reader.document_spans(np.arange(reader.num_documents))
    places = {1, int(starts[9]), int(starts[9]) - 1, int(starts[12] + lengths[12] // 2), *range(1000, 1003)}
    places |= {reader.num_tokens - 1, reader.num_tokens, reader.num_tokens + 1}
    for max_tokens in places:
        settings = {"tokenizer": tokenizer, "train_max_tokens": max_tokens, "validation_max_tokens": 1}
        settings["validation_max_documents"] = 1
        tool.run(config(tmp_path / f"one_{max_tokens}", [source], **settings))
        write_shards(tmp_path / f"many_{max_tokens}", [source], 3, **settings)
        merge(tmp_path / f"many_{max_tokens}")
        assert tree(tmp_path / f"many_{max_tokens}") == tree(tmp_path / f"one_{max_tokens}")


def test_shards_stop_when_the_others_have_enough(tmp_path, small):
    """Less and less, as they run one after the other here; but none too little."""
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(150))
    settings = {"train_max_tokens": 4000, "validation_max_tokens": 10}
    tool.run(config(tmp_path / "one", [source], **settings))
    write_shards(tmp_path / "many", [source], 4, **settings)
    sizes = []
    for index in range(4):
        directory = shards.Shard(index, 4).directory(str(tmp_path / "many"))
        reader = flat_tokens.Reader(directory, "train")
        sizes.append(reader.num_tokens)
        counts = shards.read_counts(directory, "train")
        assert counts.sum(axis=0).tolist() == [reader.num_tokens, reader.num_documents]
    assert sizes[0] >= 4000
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < sizes[3] < 2000
    merge(tmp_path / "many")
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


def test_what_is_known_to_stand_before_a_piece(tmp_path):
    """Against a walk over all pieces in order, of which each shard has told a different number."""
    count = 3
    told = [np.random.default_rng(index).integers(1, 100, (length, 2)) for index, length in enumerate((5, 2, 4))]
    for index in range(count):
        shards.write_counts(shards.Shard(index, count).directory(str(tmp_path / "d")), "train", told[index])
    for index in range(count):
        others = shards.OtherShards(str(tmp_path / "d"), "train", shards.Shard(index, count))
        for piece in range(len(told[index])):
            known = 0
            for place in range(piece * count + index):
                shard, its_piece = place % count, place // count
                known += told[shard][its_piece, 0] if its_piece < len(told[shard]) else 0
            assert others.tokens_before(piece, told[index][:piece, 0]) == known


def test_sources_in_files(tmp_path, small):
    """Pieces are files where a file can only be read from its beginning; shards without any are empty."""
    texts = random_texts(40)
    names = [write_jsonl(tmp_path / f"{i}.jsonl", texts[10 * i : 10 * i + 10]) for i in range(4)]
    subprocess.run(["gzip", *names], check=True)
    files = [f"{name}.gz" for name in names]
    tool.run(config(tmp_path / "one", files))
    write_shards(tmp_path / "many", files, 6)
    merge(tmp_path / "many")
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


def test_slices_cannot_lose_documents(tmp_path, small):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    settings = {"train_skip_documents": 7, "train_max_documents": 9}
    tool.run(config(tmp_path / "one", [source], **settings))
    write_shards(tmp_path / "many", [source], 3, **settings)
    merge(tmp_path / "many")
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


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
    assert tree(tmp_path / "d") == tree(tmp_path / "one")
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
    counts = shards.read_counts(str(shard), "train")
    shards.write_counts(str(shard), "train", counts[:-1])
    with pytest.raises(ValueError, match=r"1-of-2/train ends [\d,]+ tokens before the dataset is whole"):
        merge(tmp_path / "d")
    shards.write_counts(str(shard), "train", counts)
    merge(tmp_path / "d")
    with pytest.raises(ValueError, match="d/train is already there"):
        merge(tmp_path / "d")
    merge(tmp_path / "d", overwrite=True, delete_shards=True)
    assert not (tmp_path / "d.shards").exists()
    tool.run(config(tmp_path / "one", [source]))
    assert tree(tmp_path / "d") == tree(tmp_path / "one")


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
    assert tree(tmp_path / "shards") == tree(tmp_path / "v2")
    with pytest.raises(ValueError, match=r"source and out are both .*v2\. Copy to another path"):
        merge(tmp_path / "v2", source=str(tmp_path / "v2"), overwrite=True)
    assert tree(tmp_path / "copy") == tree(tmp_path / "v2")
