"""Datasets that several jobs wrote, joined into the one that a single process would write."""

import dataclasses
import json
import re
import shutil

import pytest

from shardwright.data.flat_tokens import Reader
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import Settings, TokenizerConfig
from tests.support.tokenization import config, make_small, random_texts, small, tree, write_jsonl

__all__ = ["small"]


def settings(out, files, **more):
    return dataclasses.replace(config(out, files), **{"validation": None, "max_bad_rows": 1} | more)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset of three files, `one`, and one of each of them, of which the first has a bad
    row.
    """
    place = tmp_path_factory.mktemp("made")
    files = [write_jsonl(place / f"{i}.jsonl", random_texts(12 + i, seed=i)) for i in range(3)]
    with open(files[0], "a") as file:
        file.write("{\n")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        tool.run(settings(place / "one", files))
        for i, file in enumerate(files):
            tool.run(settings(place / f"parts/{i}", [file]))
    return place


@pytest.fixture
def parts(tmp_path, made, small):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return [tmp_path / f"parts/{i}" for i in range(3)]


def joined(tmp_path, **more):
    tool.run(Settings(out=str(tmp_path / "d"), parts=[f"{tmp_path}/parts/*"], **more))


def test_parts_are_joined_into_what_one_process_writes(tmp_path, parts):
    joined(tmp_path)
    joined(tmp_path)  # does nothing more
    ours, one = tree(tmp_path / "d"), tree(tmp_path / "one")
    arrays = ("tokenizer.json", "train/encoded_tokens/", "train/seq_starts/")
    for path in one:
        assert not path.startswith(arrays) or ours[path] == one[path], path
    ours, theirs = (Reader(str(tmp_path / name), "train") for name in ("d", "one"))
    assert ours.fingerprint == theirs.fingerprint
    assert ours.attributes["bad_rows"] == 1
    assert ours.attributes["tokenizer"] == theirs.attributes["tokenizer"]


def flipped(parts):
    """A byte within the tokens, which the opening of a split does not read."""
    path = max(
        (parts[1] / "train/encoded_tokens/c").iterdir(), key=lambda path: path.stat().st_size
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def of_another_tokenizer(parts):
    source = write_jsonl(parts[1].parent.parent / "more.jsonl", ["a b"])
    shutil.rmtree(parts[1])
    tool.run(settings(parts[1], [source], tokenizer=TokenizerConfig("train_bpe", vocab_size=258)))


def contradicting(parts):
    path = parts[1] / "train/zarr.json"
    group = json.loads(path.read_text())
    group["attributes"]["max_token_id"] = 1
    path.write_text(json.dumps(group))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (of_another_tokenizer, "parts/1 has another tokenizer.json than .*parts/0"),
        (lambda parts: (parts[2] / "train/zarr.json").unlink(), "parts/2/train is incomplete"),
        (flipped, r"parts/1/train: cannot read tokens .* missing, truncated or corrupt"),
        (contradicting, r"parts/1/train is damaged: tokens from 0 on contradict its attributes"),
    ],
)
def test_a_wrong_part_is_named(tmp_path, parts, damage, message):
    damage(parts)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        joined(tmp_path)
    assert not (tmp_path / "d/train/zarr.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"parts": ["{0}/parts/*", "{0}/parts/0/../1"]}, "parts/0/../1 is named already"),
        ({"out": "{0}/parts/1"}, "parts/1 is out"),
    ],
)
def test_settings_that_lose_text_are_refused(tmp_path, parts, more, message):
    given = {"out": "{0}/d", "parts": ["{0}/parts/*"]} | more
    given["out"] = given["out"].format(tmp_path)
    given["parts"] = [pattern.format(tmp_path) for pattern in given["parts"]]
    with pytest.raises(ValueError, match=message):
        tool.run(Settings(**given))
    assert Reader(str(parts[1]), "train").num_tokens
