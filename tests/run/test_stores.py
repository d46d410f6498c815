"""Places of checkpoints: directories, and URLs.

What is saved is whole, failures are told, and one run has a place.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.data.untrusted import Damaged
from shardwright.program.checkpoint import OWNER, Checkpointer, find_checkpoint
from tests.support.s3_server import server

__all__ = ["server"]


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("server")
        return "s3://bucket/runs/my run/checkpoints"
    return f"file://{tmp_path}/checkpoints"  # without the scheme: test_checkpoint


def state(step=0):
    """One array of eight chunks, and a scalar."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    return {"a": {"x": jax.device_put(jnp.arange(64.0) + step, sharding)}, "n": jnp.int32(step)}


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
    restored = Checkpointer(place).restore(3, state())
    jax.tree.map(np.testing.assert_array_equal, restored, state(3))
    with pytest.raises(ValueError, match=r"cannot save step 3: .*/0000000003 exists already"):
        save(place, 3)
    assert checkpoints.verify(2) == []
    for name, step in ((f"{place}/0000000002", 2), (place.removesuffix("/checkpoints"), 3)):
        found, at = find_checkpoint(name)
        assert (found.steps(), at) == ([2, 3], step)
    aside = checkpoints.set_aside([3])
    assert Checkpointer(place).steps() == [2]
    assert Checkpointer(aside).steps() == [3]
    jax.tree.map(np.testing.assert_array_equal, Checkpointer(aside).restore(3, state()), state(3))
    checkpoints.store.remove("0000000002")
    assert Checkpointer(place).steps() == []


def test_the_manifest_is_the_last_that_a_store_without_rename_gets(server):
    save("s3://bucket/run", 1)
    writes = [path for method, path in server.requests if method == "PUT"]
    assert writes[-1] == "/bucket/run/0000000001/zarr.json"
    assert len(writes) == len({*writes}) == len(server.objects)


def test_the_run_that_started_last_saves(place):
    first, second = Checkpointer(place), Checkpointer(place)
    first.take_ownership()
    first.save(1, state(), {})
    first.wait()
    second.take_ownership()
    second.save(2, state(), {})
    second.wait()
    first.save(3, state(), {})
    with pytest.raises(
        OSError, match=rf"another run saves to .*: process {os.getpid()} on .*, since"
    ):
        first.wait()
    assert second.steps() == [1, 2]
    second.close()  # a run that hung must not go on among the checkpoints of a later one
    first.save(4, state(), {})
    with pytest.raises(OSError, match=r"another run saves to "):
        first.wait()
    first.store.write(OWNER, None)
    first.save(4, state(), {})
    first.wait()
    assert first.steps() == [1, 2, 4]


class Huge:
    """The content of an object of one TiB, of which a server sends small parts alone."""

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, part: slice) -> bytes:
        size = len(range(*part.indices(len(self))))
        assert size <= 2**20, "a whole object is asked for"
        return bytes(size)


@pytest.mark.parametrize("name", ["zarr.json", "a/x/c/0"])
def test_an_object_for_which_memory_has_no_room_is_damage(server, name):
    save("s3://bucket/run", 1)
    server.objects[f"/bucket/run/0000000001/{name}"] = Huge()
    with pytest.raises(Damaged, match=rf"{name} cannot be read: it has more than [\d,]+ bytes"):
        Checkpointer("s3://bucket/run").restore(1, state())
