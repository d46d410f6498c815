"""Checkpoints of a stranger: what no run writes is refused in one line, without much memory."""

import hashlib
import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import jax.numpy as jnp
import pytest

from configuration.program import refusal
from tools import checkpoint as tool
from training_io.checkpoint import Checkpointer
from training_io.checkpoint_care import copy, size, verify
from training_io.host_checkpoint import open_checkpoint
from training_io.manifest import Damaged
from training_io.stores import open_store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path):
    with tarfile.open(ROOT / "tests" / "data" / "checkpoint_of_3_steps.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "checkpoints" / "0000000003"


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def read(checkpoint: Path) -> str:
    """What a user is told who reads all arrays. Where an array is too large, tensorstore would end this process."""
    try:
        for array in open_checkpoint(checkpoint)[1].values():
            array[...]
    except OSError as error:
        return refusal(error)
    return ""


def shape(**sizes):
    """Gives the array another shape or chunk shape."""

    def change(array):
        array["shape"] = sizes.get("shape", array["shape"])
        array["chunk_grid"]["configuration"]["chunk_shape"] = sizes.get("chunk", sizes.get("shape"))

    return change


COMPRESSED = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip", "configuration": {"level": 5}}]
SHARDED = {"name": "sharding_indexed", "configuration": {"chunk_shape": [1, 1], "codecs": COMPRESSED[:1]}}
SHARDED["configuration"]["index_codecs"] = [*COMPRESSED[:1], {"name": "crc32c"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shape(shape=[2**40, 8]), "on disk, but float32[272, 8] in the manifest"),
        (shape(shape=[2**62, 8], chunk=[1, 8]), "has 4611686018427387904 chunks, more than 1048576"),
        (shape(shape=[272, 8], chunk=[2**33, 8]), "has chunks that are larger than it"),
        (lambda array: array.update(codecs=COMPRESSED), "codecs ['bytes', 'gzip']"),
        (lambda array: array.update(codecs=[SHARDED]), "codecs ['sharding_indexed']"),
        (lambda array: array.update(kvstore={"driver": "file", "path": "/etc/"}), "cannot open the array"),
        (lambda array: array.update(storage_transformers=[{"name": "x"}]), "cannot open the array"),
        (lambda array: array.update(data_type="float8_e5m2"), "has the dtype 'float8_e5m2'"),
    ],
)
def test_an_array_that_no_run_writes_is_refused_in_one_line(checkpoint, change, message):
    edit(checkpoint / "weights" / "embed" / "zarr.json", change)
    said = read(checkpoint)
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["../../secret", "/etc", "weights/../../../x", "weights/.x", "", "a//b"])
def test_a_name_that_leaves_the_checkpoint_is_refused(checkpoint, name):
    def change(content):
        arrays = content["attributes"]["arrays"]
        arrays[name] = arrays["weights/embed"]

    shutil.copytree(checkpoint / "weights" / "embed", checkpoint.parents[1] / "secret")
    edit(checkpoint / "zarr.json", change)
    with pytest.raises((OSError, ValueError), match=re.escape(f"{name!r} is no name of an array")) as error:
        open_checkpoint(checkpoint)
    assert "\n" not in str(error.value)


def test_a_link_that_leaves_the_checkpoint_is_refused(checkpoint):
    embed = checkpoint / "weights" / "embed"
    shutil.move(embed, checkpoint.parents[1] / "secret")
    os.symlink(checkpoint.parents[1] / "secret", embed)
    with pytest.raises(OSError, match=r"weights/embed/zarr.json is a link to .*secret.*, outside of the checkpoint"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**6, "1" * 10**6, "", "[]", "3", '{"attributes": {"arrays": 3}}', "\x00", "NaN"]
)
def test_a_manifest_that_is_none_is_refused_in_one_line(checkpoint, text):
    (checkpoint / "zarr.json").write_text(text)
    with pytest.raises((OSError, ValueError)) as error:
        open_checkpoint(checkpoint)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "arrays", [[], {"a": 3}, {"a": {}}, {"a": {"shape": 3, "dtype": "float32"}}, {"a": {"shape": [], "dtype": 3}}]
)
def test_a_manifest_with_odd_arrays_is_refused(checkpoint, arrays):
    edit(checkpoint / "zarr.json", lambda content: content["attributes"].update(arrays=arrays))
    with pytest.raises(OSError, match="is not a checkpoint manifest"):
        open_checkpoint(checkpoint)


# ---- checkpoints of version 2, with right checksums ------------------------------------------------------------------


@pytest.fixture
def signed(tmp_path):
    """A checkpoint of version 2, and a program that changes its manifest and its checksum."""
    with Checkpointer(tmp_path / "stranger") as checkpoints:
        checkpoints.save(7, {"a": {"x": jnp.arange(4.0)}}, {})
    directory = tmp_path / "stranger" / "0000000007"

    def change(**values):
        def sign(content):
            kept = content["attributes"] | values
            kept.pop("sha256")
            text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
            content["attributes"] = kept | {"sha256": hashlib.sha256(text.encode()).hexdigest()}

        edit(directory / "zarr.json", sign)

    return directory, change


@pytest.mark.parametrize(
    "key", ["ln/../../../../owned", "../owned/zarr.json", "/owned/zarr.json", "owned", ".x/zarr.json"]
)
def test_a_file_that_is_none_of_a_checkpoint_is_not_copied(signed, tmp_path, key):
    directory, change = signed
    (directory / "d1/d2/d3/d4").mkdir(parents=True)
    (directory / "ln").symlink_to("d1/d2/d3/d4")
    (directory / "owned").write_text("x")
    change(files={key: hashlib.sha256(b"x").hexdigest()})
    with pytest.raises(Damaged, match=f"{re.escape(repr(key))} is no file of a checkpoint"):
        copy(open_store(directory.parent), directory.name, open_store(tmp_path / "mine/runs"), directory.name)
    assert not (tmp_path / "mine").exists()


def test_nothing_is_changed_outside_of_the_place(tmp_path):
    outside, store = tmp_path / "outside", open_store(tmp_path / "place")
    outside.mkdir()
    (outside / "kept").write_text("")
    (tmp_path / "place/inside").mkdir(parents=True)
    (tmp_path / "place/link").symlink_to(outside)
    (tmp_path / "place/inside/loop").symlink_to("loop")
    (tmp_path / "place/inside/file.part").symlink_to(outside / "new")
    for key in ("../outside/kept", "link/kept", "inside/../../outside/kept", f"{outside}/kept", "link/deep/kept"):
        for action in (store.remove_file, store.remove, lambda key: store.write(key, b"x")):
            with pytest.raises(OSError, match=r"outside of .*place. Nothing is changed there"):
                action(key)
        with pytest.raises(OSError, match="Nothing is changed there"):
            store.rename("inside", key)
        with pytest.raises(OSError, match="Nothing is changed there"):
            store.rename(key, "new")
    with pytest.raises(OSError, match="cannot write"):
        store.write("inside/file", b"x")
    store.remove("link")
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert [path.name for path in (tmp_path / "place").iterdir()] == ["inside"]


@pytest.mark.parametrize("name", ["zarr.json", "a/zarr.json", "a/x/c/0"])
def test_a_file_that_is_too_large_is_refused_before_it_takes_memory(signed, name):
    directory, _ = signed
    os.truncate(directory / name, 2**40)  # sparse, and more than a machine has
    store = open_store(directory.parent)
    assert re.search(rf"{name} has 1,099,511,627,776 bytes, more than the ", verify(store, directory.name)[0])


def test_a_pipe_in_the_place_of_a_file_is_a_missing_file(signed):
    """To open it for reading would wait for a process that writes."""
    directory, _ = signed
    for name in ("a/x/c/0", "zarr.json"):
        (directory / name).unlink()
        os.mkfifo(directory / name)
        (problem,) = verify(open_store(directory.parent), directory.name)
        assert f"{name} is missing" in problem


def test_the_chunks_of_a_small_file_are_not_counted_without_end(checkpoint, tmp_path):
    edit(checkpoint / "weights" / "embed" / "zarr.json", shape(shape=[2**62], chunk=[1]))
    change = lambda content: content["attributes"]["arrays"]["weights/embed"].update(shape=[2**62])
    edit(checkpoint / "zarr.json", change)
    store = open_store(checkpoint.parent)
    assert "has 4611686018427387904 chunks, more than 1048576" in verify(store, checkpoint.name)[0]
    for action in (
        lambda: size(store, checkpoint.name),
        lambda: copy(store, checkpoint.name, open_store(tmp_path / "mine"), checkpoint.name),
    ):
        with pytest.raises(Damaged, match="chunks, more than 1048576"):
            action()


@pytest.mark.parametrize("key", ["crc32c", "chunk_shape", "files", "saved_at", "sha256"])
def test_version_1_has_nothing_of_version_2(signed, key):
    directory, _ = signed

    def downgrade(content):
        attributes = content["attributes"]
        attributes["format_version"] = 1
        for name in {"files", "saved_at", "sha256"} - {key}:
            del attributes[name]
        for name in {"crc32c", "chunk_shape"} - {key}:
            del attributes["arrays"]["a/x"][name]

    edit(directory / "zarr.json", downgrade)
    with pytest.raises(Damaged, match=f"is of version 1, but has {key}, which"):
        open_checkpoint(directory)


def test_nothing_of_a_manifest_reaches_the_terminal_raw(signed, capsys):
    directory, change = signed
    for values in ({"step": "\x1b]0;x\x07\x1b[2J"}, {"step": 7, "saved_at": "\x1b[31m"}, {"saved_at": 3}):
        change(**values)
        for action in ("list", "verify"):
            with pytest.raises(SystemExit):
                tool.run(tool.Config(str(directory), action))
    told = capsys.readouterr().out
    assert told.count("DAMAGED") == 6
    assert told.replace("\n", "").isprintable()
