"""Shards of a tokenization, merged: the bytes of one process; wrong shards are refused by name; jobs of engines."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardwright.data import flat_tokens
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import SplitConfig, TokenizerConfig
from tests.support.tokenization import SIZES, config, random_texts, small, tree, write_jsonl

__all__ = ["small"]

ROOT = Path(__file__).parents[2]
N = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Seven files, two of them with bad rows."""
    home = tmp_path_factory.mktemp("files")
    paths = [write_jsonl(home / f"{i}.jsonl", random_texts(12 + i, seed=i)) for i in range(7)]
    for i in (1, 6):
        with open(paths[i], "a") as file:
            file.write("{\n")
    return paths


@pytest.fixture(scope="module")
def written(files):
    """A directory with the dataset of one process, `one`, and the shards of another, `d`."""
    home = Path(files[0]).parent
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in SIZES:
            patch.setattr(module, name, value)
        tool.run(settings(home / "one", files))
        shards(home / "d", files, [2, 0, 1])
    return home


def settings(out, files, **more):
    more = {"validation": None, "max_bad_rows": 2} | more
    return dataclasses.replace(config(out, files), **more)


def shards(out, files, numbers=range(N)):
    """Writes shards; their paths."""
    for shard in numbers:
        tool.run(settings(out, files, num_shards=N, shard=shard))
    return [Path(f"{out}.shards/{shard:05}-of-{N:05}") for shard in numbers]


def copied(written, to):
    """A copy of the shards; their paths."""
    shutil.copytree(written / "d.shards", f"{to}.shards")
    return [Path(f"{to}.shards/{shard:05}-of-{N:05}") for shard in range(N)]


def test_merged_shards_are_what_one_process_writes(tmp_path, small, files, written):
    copied(written, tmp_path / "d")
    tool.run(settings(tmp_path / "d", files, num_shards=N))
    assert tree(tmp_path / "d") == tree(written / "one")
    assert len(tree(tmp_path / "d")) > 8
    assert json.loads((tmp_path / "d/train/zarr.json").read_text())["attributes"]["bad_rows"] == 2
    copied(written, tmp_path / "e")
    with pytest.raises(ValueError, match=r"its shards skipped 2 bad rows, more than max_bad_rows=1"):
        tool.run(settings(tmp_path / "e", files, num_shards=N, max_bad_rows=1))


def test_a_shard_may_hold_no_text(tmp_path, small):
    """The second has no row."""
    for name, texts in (("some", ["a", "", "b"]), ("none", [""] * 3)):
        files = [write_jsonl(tmp_path / f"{name}{i}.jsonl", [text] * (i != 1)) for i, text in enumerate(texts)]
        shards(tmp_path / name, files)
        if name == "some":
            tool.run(settings(tmp_path / "one", files))
            tool.run(settings(tmp_path / name, files, num_shards=N))
            assert tree(tmp_path / name) == tree(tmp_path / "one")
        else:
            with pytest.raises(ValueError, match="train: the source has no text"):
                tool.run(settings(tmp_path / name, files, num_shards=N))


def test_a_killed_merge_resumes(tmp_path, small, files, written, monkeypatch):
    copied(written, tmp_path / "d")
    save, append = flat_tokens.Writer.save, flat_tokens.Writer.append_split

    class Killed(BaseException):
        pass

    def killed(self, place):
        save(self, place)
        raise Killed

    appended = []
    monkeypatch.setattr(flat_tokens.Writer, "append_split", lambda w, r: (appended.append(r.path), append(w, r)))
    for _ in range(N):
        with monkeypatch.context() as patch:
            patch.setattr(flat_tokens.Writer, "save", killed)
            with pytest.raises(Killed):
                tool.run(settings(tmp_path / "d", files, num_shards=N))
    tool.run(settings(tmp_path / "d", files, num_shards=N))
    assert len(appended) == N  # no shard twice
    assert tree(tmp_path / "d") == tree(written / "one")


def of_another_run(paths, files):
    Path(files[4]).write_text(Path(files[4]).read_text() + '{"text": "more"}\n')


def flipped(paths, files):
    """A byte within the tokens, which the opening of a split does not read."""
    path = max((paths[1] / "train/encoded_tokens/c").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def without_its_first_mark(paths, files):
    """Tokens that were written with good checksums, but are not whole documents."""
    reader = flat_tokens.Reader(str(paths[1]), "train")
    tokens = reader.read(np.array([0]), np.array([reader.num_tokens]))
    identity = reader.attributes["shard"]
    shutil.rmtree(paths[1] / "train")
    with flat_tokens.Writer(str(paths[1]), "train") as writer:
        writer.append_encoded(np.concatenate([tokens[:1] & ~np.uint32(1), tokens[1:]]))
        writer.attributes.update(shard=identity)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda paths, files: shutil.rmtree(paths[1]), r"1 of 3 shards .* rewrite them:\nNo .*00001-of-00003/train"),
        (
            lambda paths, files: (shutil.rmtree(paths[1]), shutil.copytree(paths[0], paths[1])),
            r"00001-of-00003/train was made with shard 0, not 1\.",
        ),
        (lambda paths, files: next((paths[2] / "train/seq_starts/c").iterdir()).unlink(), r"00002-of-00003/train"),
        (flipped, r"00001-of-00003/train: cannot read tokens .* missing, truncated or corrupt"),
        (without_its_first_mark, r"00001-of-00003/train is damaged: tokens from 0 on contradict its attributes"),
        (of_another_run, r"3 of 3 shards .*00000-of-00003/train was made with train.files found \w+, not \w+"),
    ],
)
def test_a_wrong_shard_is_named(tmp_path, small, files, written, damage, message):
    paths = copied(written, tmp_path / "d")
    shutil.copy2(files[4], tmp_path / "whole")
    damage(paths, files)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        tool.run(settings(tmp_path / "d", files, num_shards=N))
    shutil.copy2(tmp_path / "whole", files[4])
    assert not (tmp_path / "d/train/zarr.json").exists()
    if damage is not flipped:
        return
    shutil.rmtree(paths[1], ignore_errors=True)
    shutil.rmtree(paths[2], ignore_errors=True)
    shards(tmp_path / "d", files, [1, 2])
    tool.run(settings(tmp_path / "d", files, num_shards=N))
    assert tree(tmp_path / "d") == tree(written / "one")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_shards": 8, "shard": 0}, r"shard=0 num_shards=8, but train has 7 files"),
        ({"num_shards": 3, "shard": 3}, r"shard=3 num_shards=3, but .*, and shard from 0 to num_shards - 1"),
        ({"shard": 0}, r"shard=0 num_shards=1, but .*: set num_shards from 2 to that"),
        (
            {"num_shards": 3, "shard": 1, "tokenizer": TokenizerConfig(kind="train_bpe")},
            "train_bpe needs all text in one",
        ),
        ({"num_shards": 3, "shard": 1, "max_tokens": 5}, r"train.max_tokens needs all text in one process"),
    ],
)
def test_what_cannot_be_sharded(tmp_path, files, more, message):
    more = dict(more)
    split = SplitConfig(files=files, max_tokens=more.pop("max_tokens", None))
    with pytest.raises(ValueError, match=message):
        tool.run(settings(tmp_path / "d", files, train=split, **more))


def test_shards_of_a_dataset_on_the_hub_need_its_revision():
    hub = tool.Settings(out="d", dataset="c4", num_shards=3, shard=0)
    with pytest.raises(ValueError, match=r"^dataset=c4 may change .* Give dataset_revision=<commit or tag>\.$"):
        tool.check_shards(hub, "train", 7)
    tool.check_shards(dataclasses.replace(hub, dataset_revision="607bd4c8"), "train", 7)


@pytest.mark.slow
def test_the_jobs_of_submitit(tmp_path, files):
    """The page's command, with the launcher that starts its jobs on this machine in place of Slurm."""
    reason = "hydra-submitit-launcher is not installed: pip install -e '.[slurm]'"
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason=reason)
    command = [sys.executable, "-m", "tools.huggingface_to_flat_tokens", "validation=null", "max_bad_rows=2"]
    command += [f"train.files=[{Path(files[0]).parent}/*.jsonl]"]
    jobs = ["--multirun", "hydra/launcher=submitit_local", f"shard=range(0,{N})"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for more in ([f"num_shards={N}", *jobs], [f"num_shards={N}"]):
        subprocess.run([*command, "out=d", *more], cwd=tmp_path, env=env, check=True)
    subprocess.run([*command, "out=one"], cwd=tmp_path, env=env, check=True)
    assert tree(tmp_path / "d") == tree(tmp_path / "one")
