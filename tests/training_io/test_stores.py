"""Checkpoints at URLs: of a server of S3, and of fsspec. Every failure is told with its place, or cured by retries."""

import resource
import shutil
import uuid

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr
from s3_server import S3Server

from training_io import stores
from training_io.checkpoint import Checkpointer
from training_io.checkpoint_care import copy, set_aside, size, verify
from training_io.initial_weights import find_checkpoint
from training_io.manifest import Damaged
from training_io.stores import open_store


@pytest.fixture
def server(monkeypatch):
    with S3Server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield server


@pytest.fixture(params=["s3", "memory", "local", "file"])
def place(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("server")
        return "s3://bucket/runs/my run/checkpoints"
    if request.param == "memory":
        return f"memory://{uuid.uuid4()}/checkpoints"
    return f"{'file://' if request.param == 'file' else ''}{tmp_path}/checkpoints"


def state(step=0):
    """One array of eight chunks, and a scalar."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    return {"a": {"x": jax.device_put(jnp.arange(64.0) + step, sharding)}, "n": jnp.int32(step)}


def like():
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state())


def save(place, *steps, keep=None):
    with Checkpointer(place, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"tokens": step})
    return checkpoints


def test_everything_works_at_every_kind_of_place(place):
    assert Checkpointer(place).steps() == []
    checkpoints = save(place, 1, 2, 3, keep=2)
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.metadata(3) == {"tokens": 3}
    restored = Checkpointer(place).restore(3, like())
    jax.tree.map(np.testing.assert_array_equal, restored, state(3))
    with pytest.raises(ValueError, match=r"cannot save step 3: .*checkpoints/0000000003 already holds a complete"):
        save(place, 3)
    assert verify(checkpoints.store, "0000000002") == []
    assert size(checkpoints.store, "0000000002")[0] == 64 * 4 + 8 * 4 + 4 + 4
    for name, step in ((f"{place}/0000000002", 2), (place.removesuffix("/checkpoints"), 3)):
        found, at = find_checkpoint(name)
        assert (found.steps(), at) == ([2, 3], step)
    keys = checkpoints.store.keys("0000000003")
    assert not [key for key in keys if "written" in key or "part" in key]
    aside = set_aside(checkpoints.store, [3])
    assert Checkpointer(place).steps() == [2]
    assert Checkpointer(aside).steps() == [3]
    jax.tree.map(np.testing.assert_array_equal, Checkpointer(aside).restore(3, like()), state(3))
    checkpoints.remove(2)
    assert Checkpointer(place).steps() == []


def test_a_checkpoint_without_its_manifest_is_invisible_and_cleaned(place):
    store = save(place, 1, 2).store
    if store.renames:
        store.rename("0000000002", "0000000002.tmp")
    else:
        store.remove_file("0000000002/zarr.json")
    checkpoints = Checkpointer(place)
    assert checkpoints.steps() == [1]
    checkpoints.remove_leftovers()
    assert {*store.directories()} == {"0000000001"}


def test_damage_at_a_url_is_told(place):
    store = save(place, 1, 2).store
    store.write("0000000002/a/x/c/3", store.read("0000000001/a/x/c/3"))
    with pytest.raises(Damaged, match=r"the array 'a/x': a/x/c/3 is one of another place or step"):
        Checkpointer(place).restore(2, like())


def test_a_copy_is_verified(place, tmp_path):
    source, target = save(place, 5).store, open_store(tmp_path / "copies")
    copy(source, "0000000005", target, "0000000005")
    jax.tree.map(np.testing.assert_array_equal, Checkpointer(tmp_path / "copies").restore(5, like()), state(5))
    group = zarr.open_group(tmp_path / "copies/0000000005", mode="r")
    np.testing.assert_array_equal(group["a/x"][...], state(5)["a"]["x"])
    with pytest.raises(ValueError, match="0000000005 is there already"):
        copy(source, "0000000005", target, "0000000005")
    target.remove("0000000005")
    copy(source, "0000000005", target, "0000000005")
    source.write("0000000005/n/c", b"12345678")
    target.remove("0000000005")
    with pytest.raises(Damaged, match="n/c is not what was written"):
        copy(source, "0000000005", target, "0000000005")
    assert Checkpointer(tmp_path / "copies").steps() == []


def test_zarr_reads_a_checkpoint_at_a_url():
    place = f"memory://{uuid.uuid4()}"
    save(place, 7)
    group = zarr.open_group(f"{place}/0000000007", mode="r")
    np.testing.assert_array_equal(group["a/x"][...], state(7)["a"]["x"])


@pytest.mark.slow
def test_a_server_that_answers_with_errors_is_asked_again(server):
    checkpoints = Checkpointer("s3://bucket/run")
    server.failures.update(PUT=5, GET=1)
    checkpoints.save(1, state(1), {})
    checkpoints.close()
    server.failures.update(GET=5)
    jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(1, like()), state(1))
    assert server.failures == {"PUT": 0, "GET": 0}


def test_the_manifest_is_the_last_that_a_store_without_rename_gets(server):
    save("s3://bucket/run", 1)
    writes = [path for method, path in server.requests if method == "PUT"]
    assert writes[-1] == "/bucket/run/0000000001/zarr.json"
    assert len(writes) == len({*writes}) == len(server.objects)


def test_requests_through_fsspec_are_repeated(monkeypatch):
    monkeypatch.setattr(stores, "FIRST_DELAY_S", 0.01)
    place, failures = f"memory://{uuid.uuid4()}", []
    save(place, 1)
    kind = type(fsspec.filesystem("memory"))
    pipe = kind.pipe_file

    def failing(self, path, value, **options):
        if len(failures) < 3:
            failures.append(path)
            raise ConnectionResetError("gone")
        return pipe(self, path, value, **options)

    monkeypatch.setattr(kind, "pipe_file", failing)
    save(place, 2)
    assert len(failures) == 3

    def refusing(self, path, value, **options):
        failures.append(path)
        raise PermissionError("not yours")

    monkeypatch.setattr(kind, "pipe_file", refusing)
    with pytest.raises(OSError, match=rf"0000000003 was not saved: .*cannot write {place}/0000000003/.*: not yours"):
        save(place, 3)
    assert Checkpointer(place).steps() == [1, 2]


@pytest.mark.slow
def test_an_address_where_nothing_answers_shows_in_seconds(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"s3://bucket/run cannot be reached: .* Check the address"):
        Checkpointer("s3://bucket/run")


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=rf"was not saved: .*cannot write {tmp_path}/file/.*: Not a directory"):
        save(tmp_path / "file", 1)
    with pytest.raises(OSError, match=rf"cannot write {tmp_path}/file/.probe-0: File exists"):
        Checkpointer(tmp_path / "file").probe()
    Checkpointer(tmp_path / "new").probe()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_removed_directory_is_made_anew(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state(1), {})
        checkpoints.wait()
        shutil.rmtree(tmp_path / "run")
        checkpoints.save(2, state(2), {})
    assert checkpoints.steps() == [2]


def test_a_write_that_fails_is_told_with_its_path(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(OSError, match=r"writing the array 'a/x' failed: cannot write .*/a/x/c/\d: File too large"):
            save(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
