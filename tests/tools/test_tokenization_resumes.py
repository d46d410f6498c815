"""A run that was ended at any moment goes on with the same command, and ends with the bytes of one
that was not.
"""

import contextlib
import gzip
import os
import signal
import time

import numpy as np
import pytest
import tensorstore as ts

from shardwright.data import flat_tokens
from shardwright.data.flat_tokens import Writer, work_on, writer
from shardwright.data.text import definitions
from shardwright.data.text.worker_pool import map_in_order
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import TokenizerConfig
from tests.support.crashes import Crashed
from tests.support.tokenization import config, random_texts, small, tree, write_jsonl

__all__ = ["small"]


# ---- crashes -------------------------------------------------------------------------------------


class Store:
    """A tensorstore.KvStore whose writes may crash."""

    def __init__(self, kvstore, count):
        self._kvstore, self._count = kvstore, count
        self.write, self.delete_range = count(self._write), count(self._delete_range)

    @property
    def __class__(self):
        return ts.KvStore  # for the checks of annotations that other tests of the process turn on

    def __truediv__(self, path):
        return Store(self._kvstore / path, self._count)

    def __getattr__(self, name):
        return getattr(self._kvstore, name)

    def _write(self, key, content):
        written = self._kvstore.write(key, content)
        written.result()
        return written

    def _delete_range(self, keys):
        return self._kvstore.delete_range(keys)


def crash_at(patch, left):
    """Crashes the tool before or after one of its writes, after so many others."""

    def tick():
        nonlocal left
        left -= 1
        if left <= 0:
            raise Crashed

    def counted(function):
        def called(*args):
            tick()
            result = function(*args)
            tick()
            return result

        return called

    array = writer.GrowingArray
    for of, name in [(Writer, "save"), (Writer, "append_encoded"), (array, "_write_file")]:
        patch.setattr(of, name, counted(getattr(of, name)))
    for of in (writer, flat_tokens):

        def opened(*given, opens=of.open_kvstore):
            return Store(opens(*given), counted)

        patch.setattr(of, "open_kvstore", opened)


def source_of(kind, directory):
    """A source of random texts: its files and other settings."""
    path, texts = directory / f"a.{kind}", ["\U0010ffff", *random_texts(60)]  # the largest id first
    if kind == "parquet":
        pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=5)
    elif kind == "huggingface":
        pytest.importorskip("datasets")
        path.mkdir()
        write_jsonl(path / "a.jsonl", texts)
        return [], {"dataset": str(path), "train_source": "train", "validation_source": "train"}
    else:
        write_jsonl(path, texts)
        path.write_bytes(gzip.compress(path.read_bytes()))
    return [str(path)], {}


@pytest.mark.parametrize(
    ("kind", "most"),
    [("jsonl.gz", 700), ("parquet", None), ("huggingface", 700)],
)
def test_wherever_it_crashes_it_ends_with_the_bytes_of_an_unbroken_run(small, tmp_path, kind, most):
    files, settings = source_of(kind, tmp_path)
    options = settings | {"train_max_tokens": most, "validation_max_documents": 20}
    tool.run(config(tmp_path / "unbroken", files, **options))
    expected = tree(tmp_path / "unbroken")
    rng, out, whole = np.random.default_rng(0), tmp_path / "d", {}
    crashes, is_done = 0, False
    while not is_done and crashes < 60:
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crashed):
            crash_at(patch, rng.integers(1, 50))
            tool.run(config(out, files, **options))
            is_done = True
        crashes += not is_done
        assert {path: path.stat().st_mtime_ns for path in whole} == whole, "written again"
        for split in ("train", "validation"):
            if (out / split / "zarr.json").exists():
                of_split = {name for name in expected if name.startswith(f"{split}/")}
                found = {f"{split}/{name}": x for name, x in tree(out / split).items()}
                assert found == {name: expected[name] for name in of_split}, "readers see a part"
                whole |= {path: path.stat().st_mtime_ns for path in (out / split).rglob("*")}
    assert 1 < crashes < 60
    assert tree(out) == expected


def stopped(tmp_path, monkeypatch, **settings):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    with monkeypatch.context() as patch:
        crash_at(patch, 30)
        with pytest.raises(Crashed):
            tool.run(config(tmp_path / "d", [source], **settings))
    assert (tmp_path / "d/unfinished.json").exists()
    return source


def test_other_settings_and_a_changed_source_are_refused(tmp_path, small, monkeypatch):
    source = stopped(tmp_path, monkeypatch)
    other = write_jsonl(tmp_path / "b.jsonl", ["more"])
    before = tree(tmp_path / "d")
    for files, change, message in (
        ([source], {"tokenizer": TokenizerConfig()}, "tokenizer.end_token was </s>, is None"),
        ([source], {"train_max_tokens": 5}, "train.max_tokens was None, is 5"),
        ([source], {"validation_skip_documents": 1}, "validation.skip_documents was 0, is 1"),
        ([source, other], {}, r"train.files was \[.*a.jsonl'\], is \[.*b.jsonl'\]"),
    ):
        message = f"started with other settings: {message}. Give the same"
        with pytest.raises(ValueError, match=message):
            tool.run(config(tmp_path / "d", files, **change))
        assert tree(tmp_path / "d") == before
    with open(source, "a") as file:
        file.write('{"text": "one more"}\n')
    changed = r"train.files found was .*a.jsonl, \d+ bytes of .*, is .*, \d+ bytes"
    with pytest.raises(ValueError, match=changed):
        tool.run(config(tmp_path / "d", [source]))
    tool.run(config(tmp_path / "d", [source], overwrite=True))
    tool.run(config(tmp_path / "new", [source]))
    assert tree(tmp_path / "d") == tree(tmp_path / "new")


def test_another_tokenizer_of_the_same_name_is_refused(tmp_path, small, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text(definitions.train_bpe(random_texts(60), 270))
    tokenizer = TokenizerConfig(kind="huggingface", name=str(path))
    source = stopped(tmp_path, monkeypatch, tokenizer=tokenizer)
    path.write_text(definitions.train_bpe(random_texts(60), 275))
    changed = r"other settings: tokenizer.json was [0-9a-f]{64}, is [0-9a-f]{64}"
    with pytest.raises(ValueError, match=changed):
        tool.run(config(tmp_path / "d", [source], tokenizer=tokenizer))


def test_two_processes_do_not_write_one_dataset(tmp_path, small):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(6))
    message = r"Another process is writing .*d\. Wait for it or end it"
    with (
        work_on(str(tmp_path / "d"), {}, [], overwrite=False),
        pytest.raises(ValueError, match=message),
    ):
        tool.run(config(tmp_path / "d", [source]))
    tool.run(config(tmp_path / "d", [source]))


# ---- processes -----------------------------------------------------------------------------------


def square(x):
    time.sleep(0.001 * (x % 7))
    if x == 2000:
        os.kill(os.getpid(), signal.SIGKILL)
    return x * x


@pytest.mark.long
def test_results_are_in_order_few_are_held_and_a_killed_process_is_an_error():
    taken = 0

    def items():
        nonlocal taken
        for i in [*range(40), 2000, *range(20)]:
            taken += 1
            yield i

    found = map_in_order(square, items(), 2)
    for done in range(30):
        assert next(found) == (done, done * done)
        assert taken <= done + 3 * 2
    with pytest.raises(ValueError, match="One of 2 processes was killed"):
        list(found)
