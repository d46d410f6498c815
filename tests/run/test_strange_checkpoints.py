"""Checkpoints of a stranger: what no run writes is refused in one line, and nothing outside is read or written."""

import contextlib
import json

import google_crc32c
import jax.numpy as jnp
import pytest
from signed_manifests import sign

from shardwright.run.checkpoint import Checkpointer
from shardwright.run.stores import Damaged
from tools import checkpoint as tool


@pytest.fixture
def signed(tmp_path):
    """A checkpoint, and a program that changes its manifest, and its checksum with it."""
    with Checkpointer(tmp_path / "stranger") as checkpoints:
        checkpoints.save(7, {"a": {"x": jnp.arange(4.0)}}, {})
    directory = tmp_path / "stranger" / "0000000007"

    def change(**values):
        sign(directory / "zarr.json", json.loads((directory / "zarr.json").read_text())["attributes"] | values)

    return directory, change


ARRAY = {"shape": [4], "dtype": "float32", "chunk_shape": [4], "crc32c": "00000000"}


@pytest.mark.parametrize(
    "arrays",
    [[], {"a": 3}, {"a": {}}]
    + [
        {"a": ARRAY | change}
        for change in (
            {"shape": [4.0]},
            {"shape": [-4]},
            {"shape": [2**62]},
            {"chunk_shape": [0]},
            {"chunk_shape": [4, 4]},
            {"dtype": "float8_e5m2"},
            {"crc32c": "xxxxxxxx"},
        )
    ],
)
def test_a_manifest_with_odd_arrays_is_refused_in_one_line(signed, arrays):
    directory, change = signed
    change(arrays=arrays)
    with pytest.raises(Damaged, match="is not the manifest that was written") as error:
        Checkpointer(directory.parent).manifest(7)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../../secret", "/etc", "a//b"])
def test_no_file_outside_of_the_checkpoint_is_read(signed, name):
    directory, change = signed
    (directory.parents[1] / "secret/c").mkdir(parents=True)
    (directory.parents[1] / "secret/c/0").write_bytes(bytes(20))
    change(arrays={name: ARRAY | {"crc32c": f"{google_crc32c.value(bytes(16)):08x}"}})
    with pytest.raises(OSError, match="Invalid key"):
        Checkpointer(directory.parent).verify(7)


def test_an_edited_manifest_is_told(signed):
    directory, _ = signed
    content = json.loads((directory / "zarr.json").read_text())
    content["attributes"]["metadata"] = {"tokens": 13}
    (directory / "zarr.json").write_text(json.dumps(content))
    with pytest.raises(Damaged, match="its own checksum differs"):
        Checkpointer(directory.parent).manifest(7)


def test_nothing_of_a_manifest_reaches_the_terminal_raw(signed, capsys):
    directory, change = signed
    for values in ({"step": "\x1b]0;x\x07\x1b[2J"}, {"step": 7, "saved_at": "\x1b[31m"}):
        change(**values)
        for verify in (False, True):
            with contextlib.suppress(SystemExit):
                tool.run(tool.Settings(str(directory), verify))
    assert capsys.readouterr().out.replace("\n", "").isprintable()
