"""A run that was ended at any moment goes on with the same command, and ends with the bytes of one
that was not.
"""

import contextlib
import gzip
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import time

import hypothesis
import hypothesis.strategies as some
import pytest
import tensorstore as ts

from shardwright.data import flat_tokens
from shardwright.data.flat_tokens import Writer, work_on, writer
from shardwright.data.text import definitions
from shardwright.data.text.worker_pool import map_in_order
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import TokenizerConfig
from tests.support.crashes import Crashed
from tests.support.tokenization import config, driver, random_texts, small, tree, write_jsonl

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

    for of, name in [
        (Writer, "save"),
        (Writer, "append_encoded"),
        (writer.GrowingArray, "_write_file"),
    ]:
        patch.setattr(of, name, counted(getattr(of, name)))
    for of in (writer, flat_tokens):
        patch.setattr(
            of, "open_kvstore", lambda *given, opens=of.open_kvstore: Store(opens(*given), counted)
        )


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """By source and setting: the source's settings, and what an unbroken run writes."""
    directory, found = tmp_path_factory.mktemp("wholes"), {}

    def get(kind, most):
        source, settings = source_of(kind, directory)
        options = settings | {"train_max_tokens": most, "validation_max_documents": 20}
        if (kind, most) not in found:
            tool.run(config(directory / f"{kind} {most}", source, **options))
            found[kind, most] = tree(directory / f"{kind} {most}")
        return source, options, found[kind, most]

    return get


def source_of(kind, directory):
    """A source of random texts: its files and other settings."""
    # the largest id comes first
    path, texts = directory / f"a.{kind}", ["\U0010ffff", *random_texts(60)]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        if not path.exists():
            parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=5)
        return [str(path)], {}
    if kind == "huggingface":
        pytest.importorskip("datasets")
        path.mkdir(exist_ok=True)
        if not (path / "a.jsonl").exists():
            write_jsonl(path / "a.jsonl", texts)
        return [], {"dataset": str(path), "train_source": "train", "validation_source": "train"}
    if not path.exists():
        write_jsonl(path, texts)
        if kind == "jsonl.gz":
            path.write_bytes(gzip.compress(path.read_bytes()))
    return [str(path)], {}


KINDS = ["jsonl", "jsonl.gz", "parquet", "huggingface"]


@pytest.mark.long
def test_wherever_it_crashes_it_ends_with_the_bytes_of_an_unbroken_run(small, wholes, tmp_path):
    numbers = itertools.count()

    @hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @hypothesis.given(
        some.sampled_from(KINDS), some.sampled_from([None, 700]), some.lists(some.integers(1, 250))
    )
    def crashes(kind, most, points):
        files, options, expected = wholes(kind, most)
        out = tmp_path / str(next(numbers))
        whole = {}
        for point in [*points, 10**6]:
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crashed):
                crash_at(patch, point)
                tool.run(config(out, files, **options))
            assert {path: path.stat().st_mtime_ns for path in whole} == whole, (
                "a whole split is not written again"
            )
            for split in ("train", "validation"):
                if (out / split / "zarr.json").exists():
                    assert tree(out / split) == below(expected, split), "what readers see is whole"
                    whole |= {path: path.stat().st_mtime_ns for path in (out / split).rglob("*")}
        assert tree(out) == expected

    crashes()


def test_each_start_goes_on_where_the_last_one_was(small, wholes, tmp_path):
    files, options, expected = wholes("jsonl", None)
    crashes = 0
    while not (tmp_path / "d/finished.json").exists() and crashes < 40:
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crashed):
            crash_at(patch, 40)
            tool.run(config(tmp_path / "d", files, **options))
        crashes += 1
    assert 5 < crashes < 40
    tool.run(config(tmp_path / "d", files, **options))
    assert tree(tmp_path / "d") == expected


def below(files, split):
    return {
        path.removeprefix(f"{split}/"): x
        for path, x in files.items()
        if path.startswith(f"{split}/")
    }


def stopped(tmp_path, monkeypatch, **settings):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    with monkeypatch.context() as patch:
        crash_at(patch, 30)
        with pytest.raises(Crashed):
            tool.run(config(tmp_path / "d", [source], **settings))
    assert (tmp_path / "d/unfinished.json").exists()
    return source


@pytest.mark.long
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
        with pytest.raises(
            ValueError, match=f"started with other settings: {message}. Give the same"
        ):
            tool.run(config(tmp_path / "d", files, **change))
        assert tree(tmp_path / "d") == before
    shutil.copytree(tmp_path / "d", tmp_path / "e")
    # What the result does not depend on may be another.
    tool.run(config(tmp_path / "d", [source], num_workers=2))
    tool.run(config(tmp_path / "unbroken", [source]))
    assert tree(tmp_path / "d") == tree(tmp_path / "unbroken")
    with open(source, "a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(
        ValueError, match=r"train.files found was .*a.jsonl, \d+ bytes of .*, is .*, \d+ bytes"
    ):
        tool.run(config(tmp_path / "e", [source]))
    tool.run(config(tmp_path / "e", [source], overwrite=True))
    tool.run(config(tmp_path / "new", [source]))
    assert tree(tmp_path / "e") == tree(tmp_path / "new")


def test_another_tokenizer_of_the_same_name_is_refused(tmp_path, small, monkeypatch):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(definitions.train_bpe(random_texts(60), 270))
    tokenizer = TokenizerConfig(kind="huggingface", name=str(path))
    source = stopped(tmp_path, monkeypatch, tokenizer=tokenizer)
    path.write_text(definitions.train_bpe(random_texts(60), 275))
    with pytest.raises(
        ValueError, match=r"other settings: tokenizer.json was [0-9a-f]{64}, is [0-9a-f]{64}"
    ):
        tool.run(config(tmp_path / "d", [source], tokenizer=tokenizer))


def test_a_finished_dataset_is_not_written_again(tmp_path, small, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    tool.run(config(tmp_path / "d", [source]))
    whole = tree(tmp_path / "d")
    capsys.readouterr()
    tool.run(config(tmp_path / "d", [source]))
    told = [f"{tmp_path}/d/{name}: complete\n" for name in ("train", "validation")]
    assert "".join([*told, "vocabulary: "]) in capsys.readouterr().out
    with pytest.raises(ValueError, match="d/train exists already"):
        tool.run(config(tmp_path / "d", [source], train_max_tokens=50))
    tool.run(config(tmp_path / "d", [source], overwrite=True))
    assert "complete" not in capsys.readouterr().out
    assert tree(tmp_path / "d") == whole


def test_two_processes_do_not_write_one_dataset(tmp_path, small):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(6))
    message = r"Another process is writing .*d\. Wait for it or end it"
    with (
        work_on(str(tmp_path / "d"), {}, [], overwrite=False),
        pytest.raises(ValueError, match=message),
    ):
        tool.run(config(tmp_path / "d", [source]))
    tool.run(config(tmp_path / "d", [source]))


@pytest.mark.long
def test_a_late_error_can_be_gone_on_from(tmp_path, small):
    """A full disk, made of a limit on the size of files, is named; with room again the same command
    goes on.
    """
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    tool.run(config(tmp_path / "unbroken", [source]))
    command, env = driver(tmp_path, 0)
    run = [*command, f"out={tmp_path}/d", f"train.files=[{source}]", f"validation.files=[{source}]"]
    run += ["tokenizer.end_token='</s>'", "num_workers=1"]
    limit = f"ulimit -f 2; exec {shlex.join(run)}"
    result = subprocess.run(
        ["bash", "-c", limit], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "File too large" in result.stderr
    subprocess.run(run, env=env, cwd=tmp_path, check=True)
    assert tree(tmp_path / "d") == tree(tmp_path / "unbroken")


# ---- processes -----------------------------------------------------------------------------------


def square(x):
    time.sleep(0.001 * (x % 7))
    if x == 1000:
        raise ValueError(f"{x} is too much")
    if x == 2000:
        os.kill(os.getpid(), signal.SIGKILL)
    return x * x


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (1000, "1000 is too much"),
        pytest.param(
            2000,
            "One of 2 processes was killed, maybe because memory ran out",
            marks=pytest.mark.long,
        ),
    ],
)
def test_results_are_in_order_few_are_held_and_errors_are_raised(last, message):
    taken = 0

    def items():
        nonlocal taken
        for i in [*range(40), last, *range(20)]:
            taken += 1
            yield i

    found = map_in_order(square, items(), 2)
    for done in range(30):
        assert next(found) == (done, done * done)
        assert taken <= done + 3 * 2
    with pytest.raises(ValueError, match=message):
        list(found)
    assert list(map_in_order(square, [], 2)) == []
