"""Checkpoints of a stranger: what no run writes is refused in one line, without much memory."""

import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from configuration.program import refusal
from training_io.host_checkpoint import open_checkpoint

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
        (lambda array: array.update(data_type="bfloat16"), "has the dtype 'bfloat16'"),
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
