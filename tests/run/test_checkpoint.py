import hashlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
import zarr
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from s3_server import S3Server

from shardwright.run import manifest
from shardwright.run.checkpoint import Checkpointer
from shardwright.run.checkpoint_care import verify
from shardwright.run.host_checkpoint import open_checkpoint
from shardwright.run.manifest import Damaged
from shardwright.settings.differences import config_differences

REPOSITORY = Path(__file__).parents[2]


def make_mesh(d, t):
    return jax.make_mesh((d, t), ("d", "t"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[: d * t])


SPECS = {
    "weights": {"w_q": P(None, ("t", "d"), None), "embed": P("t", "d"), "norm": P("t")},
    "optimizer": ({"step": P(), "zeros": P(("t", "d")), "mask": P("d")}, P(None, "t")),
}


def make_state():
    rng = np.random.default_rng(0)
    w_q = rng.standard_normal((3, 16, 5)).astype(np.float32)
    w_q.reshape(-1)[:4] = [np.nan, -0.0, np.inf, 1e-42]
    return {
        "weights": {
            "w_q": w_q,
            "embed": rng.standard_normal((32, 16)).astype(np.float32),
            "norm": rng.standard_normal(8).astype(np.float16),
        },
        "optimizer": (
            {
                "step": np.int32(-7),
                "zeros": np.zeros(16, np.float32),
                "mask": rng.integers(0, 2, 8).astype(bool),
            },
            rng.integers(0, 2**32, (2, 8), dtype=np.uint32),
        ),
    }


NAMES = [
    "optimizer/0/mask",
    "optimizer/0/step",
    "optimizer/0/zeros",
    "optimizer/1",
    "weights/embed",
    "weights/norm",
    "weights/w_q",
]


def placed(mesh, state=None):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state or make_state(), SPECS)


def like(mesh, state=None):
    def struct(x, spec):
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(struct, state or make_state(), SPECS)


def assert_bits_equal(state, expected):
    for (path, x), y in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype, path
        assert x.shape == y.shape, path
        assert x.tobytes() == y.tobytes(), path


def save(directory, step=3, state=None, metadata=None):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(step, state or placed(make_mesh(4, 2)), metadata or {})
    return directory / f"{step:010}"


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), (1, 1)])
def test_restores_on_any_mesh_bit_for_bit(tmp_path, shape):
    save(tmp_path)
    mesh = make_mesh(*shape)
    restored = Checkpointer(tmp_path).restore(3, like(mesh))
    assert_bits_equal(restored, make_state())
    for leaf, spec in zip(jax.tree.leaves(restored), jax.tree.leaves(SPECS), strict=True):
        assert leaf.sharding == NamedSharding(mesh, spec)


def test_restores_from_one_device_on_eight(tmp_path):
    save(tmp_path, state=placed(make_mesh(1, 1)))
    assert_bits_equal(Checkpointer(tmp_path).restore(3, like(make_mesh(4, 2))), make_state())


def test_zarr_python_reads_what_was_saved(tmp_path):
    path = save(tmp_path)
    group = zarr.open_group(path, mode="r")
    assert set(group) == {"weights", "optimizer"}
    for name, leaf in zip(NAMES, jax.tree.leaves(make_state()), strict=True):
        array = group[name]
        assert_bits_equal(array[...], leaf)
        assert_bits_equal(zarr.open_array(path / name, mode="r")[...], leaf)
        assert [codec.to_dict()["name"] for codec in array.metadata.codecs] == ["bytes", "crc32c"]
    assert group["weights/w_q"].shape == (3, 16, 5)
    assert group["weights/w_q"].chunks == (3, 2, 5)
    assert group["weights/embed"].chunks == (16, 4)
    assert len(list((path / "weights/embed/c").glob("*/*"))) == 8


def test_bf16_is_kept_bit_for_bit_and_tensorstore_reads_it(tmp_path):
    """All 2**16 numbers. zarr-python has no bfloat16, and reads the other arrays."""
    numbers = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).reshape(256, 256)
    sharding, other = (NamedSharding(make_mesh(*shape), P("t", "d")) for shape in ((4, 2), (1, 8)))
    state = {"moments": jax.device_put(numbers, sharding), "weights": jax.device_put(np.ones((8, 8)), sharding)}
    path = save(tmp_path, state=state)
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=other)
    assert_bits_equal(Checkpointer(tmp_path).restore(3, jax.tree.map(struct, state))["moments"], numbers)
    at = {"driver": "file", "path": str(path / "moments")}
    assert_bits_equal(tensorstore.open({"driver": "zarr3", "kvstore": at}).result().read().result(), numbers)
    assert_bits_equal(np.asarray(open_checkpoint(path)[1]["moments"]), numbers)
    assert np.all(zarr.open_group(path, mode="r")["weights"][...] == 1)


def grid(content):
    chunk = content["chunk_grid"]["configuration"]["chunk_shape"]
    return [-(-a // b) for a, b in zip(content["shape"], chunk, strict=True)]


def test_manifest(tmp_path):
    metadata = {"config": {"lr": 1e-3, "name": "ä"}, "tokens": 12}
    path = save(tmp_path, metadata=metadata)
    manifest = json.loads((path / "zarr.json").read_text())["attributes"]
    assert dict(zarr.open_group(path, mode="r").attrs) == manifest
    assert manifest["format"] == "pytree-zarr-checkpoint"
    assert manifest["format_version"] == 3
    assert manifest["step"] == 3
    assert sorted(manifest["arrays"]) == NAMES
    for name, array in manifest["arrays"].items():
        content = json.loads((path / name / "zarr.json").read_text())
        files = [path / name / "c" / "/".join(map(str, i)) for i in np.ndindex(*grid(content))]
        assert array == {
            "shape": content["shape"],
            "dtype": content["data_type"],
            "chunk_shape": content["chunk_grid"]["configuration"]["chunk_shape"],
            "crc32c": "".join(f"{google_crc32c.value(file.read_bytes()[:-4]):08x}" for file in files),
        }
    kept = {key: value for key, value in manifest.items() if key != "sha256"}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
    assert manifest["sha256"] == hashlib.sha256(canonical).hexdigest()
    assert Checkpointer(tmp_path).metadata(3) == metadata


def test_names_come_from_dataclass_fields(tmp_path):
    from dataclasses import dataclass

    @jax.tree_util.register_dataclass
    @dataclass
    class Layer:
        w_q: jax.Array

    path = save(tmp_path, state={"layers": Layer(jnp.ones(4))})
    assert zarr.open_array(path / "layers/w_q", mode="r")[...].tolist() == [1, 1, 1, 1]


def test_only_complete_checkpoints_are_listed(tmp_path):
    checkpointer = Checkpointer(tmp_path / "new")
    assert checkpointer.steps() == []
    assert checkpointer.latest_step() is None
    for step in (10, 9):
        save(tmp_path, step)
    (tmp_path / "0000000011.tmp").mkdir()
    (tmp_path / "0000000012").mkdir()
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.steps() == [9, 10]
    assert checkpointer.latest_step() == 10
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 12 in .*; there are \[9, 10\]"):
        checkpointer.metadata(12)


def test_saved_values_survive_donation(tmp_path):
    mesh = make_mesh(4, 2)
    clear = jax.jit(
        lambda state: jax.tree.map(lambda x: x ^ True if x.dtype == bool else x * 3, state), donate_argnums=0
    )
    with Checkpointer(tmp_path) as checkpointer, jax.set_mesh(mesh):
        for step in range(3):
            state = placed(mesh)
            checkpointer.save(step, state, {})
            state = jax.block_until_ready(clear(state))
    for step in range(3):
        assert_bits_equal(Checkpointer(tmp_path).restore(step, like(mesh)), make_state())


def test_restored_arrays_can_be_donated(tmp_path):
    # Leaves that several devices hold whole share one host buffer while they are restored.
    mesh = make_mesh(4, 2)
    path = save(tmp_path, state={"x": jax.device_put(jnp.arange(4096.0), NamedSharding(mesh, P()))})
    struct = {"x": jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=NamedSharding(mesh, P()))}
    double = jax.jit(lambda state: {"x": state["x"] * 2}, donate_argnums=0)
    restored = Checkpointer(path.parent).restore(3, struct)
    for factor in (2, 4, 8):
        restored = double(restored)
        for shard in restored["x"].addressable_shards:
            np.testing.assert_array_equal(shard.data, np.arange(4096.0) * factor)


def test_a_failed_write_is_told_and_leaves_nothing_visible(tmp_path):
    mesh = make_mesh(4, 2)
    sharding = NamedSharding(mesh, P("d"))
    state = {"small": jax.device_put(jnp.ones(8), sharding), "big": jax.device_put(jnp.ones(2**18), sharding)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, {})
    checkpointer.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # a write past this size fails, as on a full disk
    try:
        checkpointer.save(2, state, {})
        with pytest.raises(
            OSError, match=r"0000000002 was not saved: writing the array 'big' failed: .*File too large"
        ):
            checkpointer.save(3, state, {})
        checkpointer.wait()  # told once
        checkpointer.save(4, state, {})
        with pytest.raises(OSError, match="0000000004 was not saved"):
            checkpointer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Checkpointer(tmp_path).steps() == [1]
    save(tmp_path, 5, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000001", "0000000005"]


@pytest.mark.long
def test_a_save_killed_before_its_commit_is_invisible_and_cleaned(tmp_path):
    program = f"""
        import time
        import jax.numpy as jnp
        from shardwright.run import checkpoint
        checkpointer = checkpoint.Checkpointer({str(tmp_path)!r})
        checkpointer.save(1, {{"x": jnp.ones(4)}}, {{}})
        checkpointer.wait()
        checkpoint.commit = lambda *_: time.sleep(60)
        checkpointer.save(2, {{"x": jnp.ones(4)}}, {{}})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=REPOSITORY)
    written = tmp_path / "0000000002.tmp" / "x" / "c" / "0"
    deadline = time.monotonic() + 60
    while not written.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert written.exists()
    assert Checkpointer(tmp_path).latest_step() == 1
    save(tmp_path, 2, {"x": jnp.zeros(4)})
    assert not written.exists()
    assert Checkpointer(tmp_path).latest_step() == 2


def test_a_checkpoint_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """tensorstore syncs each file that it writes, and the directory above it. The other directories are synced here."""
    events, sync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.fstat(file).st_ino) or sync(file))
    monkeypatch.setattr(Path, "rename", lambda path, target: events.append("rename") or rename(path, target))
    save(tmp_path, 1, {"a": {"x": jnp.ones((4, 4))}})
    names = {path.stat().st_ino: str(path.relative_to(tmp_path)) for path in (tmp_path, *tmp_path.rglob("*"))}
    found = [names.get(event, event) for event in events]
    assert found[-2:] == ["rename", "."]
    assert {*found[:-2]} == {name for name in names.values() if name != "." and Path(tmp_path, name).is_dir()}


def edit(change):
    """Changes JSON in a file, as an editor does who does not know of checksums."""

    def spoil(path, older):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoil


def flip(path, older):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def exchange(path, older):
    other = next(file for file in path.parent.iterdir() if file != path and file.is_file())
    mine = path.read_bytes()
    assert mine != other.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


DAMAGES = {
    "a flipped bit": ("weights/embed/c/1/2", flip),
    "a truncated chunk": ("optimizer/1/c/0/1", lambda path, older: path.write_bytes(path.read_bytes()[:-5])),
    "an empty chunk": ("optimizer/0/step/c", lambda path, older: path.write_bytes(b"")),
    "a longer chunk": ("weights/norm/c/0", lambda path, older: path.write_bytes(path.read_bytes() + b"1234")),
    "a missing chunk": ("weights/w_q/c/0/3/0", lambda path, older: path.unlink()),
    "a missing chunk of zeros": ("optimizer/0/zeros/c/0", lambda path, older: path.unlink()),
    "two chunks exchanged": ("weights/embed/c/0/1", exchange),
    "a chunk of an older step": ("weights/embed/c/0/1", lambda path, older: shutil.copy(older, path)),
    "a scalar of an older step": ("optimizer/0/step/c", lambda path, older: shutil.copy(older, path)),
    "an array of an older step": (
        "weights/w_q",
        lambda path, older: shutil.copytree(older, path, dirs_exist_ok=True),
    ),
    "metadata of another array": (
        "weights/embed/zarr.json",
        lambda path, older: shutil.copy(path.parents[1] / "norm/zarr.json", path),
    ),
    "no metadata": ("weights/norm/zarr.json", lambda path, older: path.unlink()),
    "another shape": ("weights/embed/zarr.json", edit(lambda content: content.update(shape=[16, 32]))),
    "an older manifest": ("zarr.json", lambda path, older: shutil.copy(older, path)),
    "a manifest cut off": ("zarr.json", lambda path, older: path.write_text(path.read_text()[:50])),
    "a manifest of another step": ("zarr.json", edit(lambda content: content["attributes"].update(step=4))),
    "a manifest with other metadata": (
        "zarr.json",
        edit(lambda content: content["attributes"]["metadata"].update(tokens=13)),
    ),
    "a manifest with another checksum": (
        "zarr.json",
        edit(lambda content: content["attributes"]["arrays"]["weights/norm"].update(crc32c="0" * 16)),
    ),
    "a manifest that says it is of version 1": (
        "zarr.json",
        edit(lambda content: content["attributes"].update(format_version=1)),
    ),
    "a manifest without its checksum": ("zarr.json", edit(lambda content: content["attributes"].pop("sha256"))),
    "a deep manifest": ("zarr.json", lambda path, older: path.write_text("[" * 10**6)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_is_silent(tmp_path, damage):
    other = jax.tree.map(lambda x: x ^ True if x.dtype == bool else x + np.ones((), x.dtype), make_state())
    older = save(tmp_path, 2, placed(make_mesh(4, 2), other), {"tokens": 10})
    path = save(tmp_path, 3, metadata={"tokens": 12})
    file, spoil = DAMAGES[damage]
    spoil(path / file, older / file)
    checkpoints = Checkpointer(tmp_path)
    if file.endswith("/zarr.json"):  # the manifest says what that file does
        assert_bits_equal(checkpoints.restore(3, like(make_mesh(2, 4))), make_state())
    else:
        with pytest.raises(Damaged, match=r"^\S.*\.$") as told:
            checkpoints.restore(3, like(make_mesh(2, 4)))
        assert ("the array" if file != "zarr.json" else str(path / file)) in str(told.value)
    assert len(verify(checkpoints.store, path.name)) >= 1
    assert verify(checkpoints.store, older.name) == []
    assert_bits_equal(checkpoints.restore(2, like(make_mesh(2, 4))), other)


def test_a_checkpoint_of_a_later_version_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 4)
    save(tmp_path)
    with pytest.raises(ValueError, match=r"version 4; this program reads .* versions \(2, 3\)\."):
        Checkpointer(tmp_path).metadata(3)


def test_every_array_that_does_not_fit_is_named(tmp_path):
    path = save(tmp_path)
    other = make_state()
    other["weights"]["embed"] = np.zeros((64, 16), np.float32)
    other["weights"]["norm"] = np.zeros(8, np.float32)
    expected = like(make_mesh(4, 2), other)
    expected["weights"]["bias"] = expected["weights"].pop("w_q")
    with pytest.raises(ValueError, match="does not fit this run") as error:
        Checkpointer(tmp_path).restore(3, expected)
    assert str(error.value) == (
        f"the checkpoint {path} does not fit this run:\n"
        "  weights/bias: not in the checkpoint, expected float32[3, 16, 5]\n"
        "  weights/embed: float32[32, 16] in the checkpoint, expected float32[64, 16]\n"
        "  weights/norm: float16[8] in the checkpoint, expected float32[8]\n"
        "  weights/w_q: float32[3, 16, 5] in the checkpoint, not expected\n"
        "Run with the model and optimizer that wrote it, or start a new run from another checkpoint."
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": np.ones(3)}, "cannot save 'w': it is a ndarray"),
        ({"w": jnp.ones(3, jnp.float8_e5m2)}, "cannot save 'w': zarr readers do not share a float8_e5m2 type"),
        ({"k": jax.eval_shape(lambda: 0)}, "cannot save 'k': it is a ShapeDtypeStruct"),
        ({"a/b": jnp.ones(3)}, r"a leaf at \"\['a/b'\]\" has no usable name"),
        ({"..": jnp.ones(3)}, "no usable name"),
        ({"zarr.json": jnp.ones(3)}, "no usable name"),
        ({"zarr.json": {"x": jnp.ones(3)}}, "no usable name"),
        (jnp.ones(3), "no usable name"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, state, message):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=message):
        checkpointer.save(0, state, {})
    assert list(tmp_path.iterdir()) == []


def test_user_mistakes_are_explained(tmp_path):
    state = {"x": jnp.ones(3)}
    save(tmp_path, 1, state)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"cannot save step 1: .*/0000000001 is there already"):
            checkpointer.save(1, state, {})
        with pytest.raises(ValueError, match="step -1 is outside"):
            checkpointer.save(-1, state, {})
        with pytest.raises(ValueError, match="metadata cannot be written as JSON"):
            checkpointer.save(2, state, {"loss": float("nan")})
        with pytest.raises(ValueError, match="restore needs a sharding for 'x'"):
            checkpointer.restore(1, {"x": jax.ShapeDtypeStruct((3,), jnp.float32)})
    with pytest.raises(ValueError, match=r"nonsense://x cannot be opened: .* Correct the address"):
        Checkpointer("nonsense://x")


def run_processes(tmp_path, program, count=2):
    """Runs a program in `count` JAX processes of 4 devices each; returns what each one printed, once all have ended."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    head = """
        import os, sys
        rank = int(sys.argv[1])
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
        import jax, numpy as np
        jax.distributed.initialize(sys.argv[2], num_processes=int(sys.argv[3]), process_id=rank)
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from shardwright.run import checkpoint
        checkpoint.COMMIT_TIMEOUT_S = 20
        checkpointer = checkpoint.Checkpointer(sys.argv[4])
        mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
        values = np.arange(2**16, dtype=np.float32).reshape(256, 256)
        sharding = NamedSharding(mesh, P("t", "d"))
        x = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    """
    arguments = [f"localhost:{port}", str(count), str(tmp_path)]
    script = textwrap.dedent(head) + textwrap.dedent(program)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for rank in range(count)
    ]
    try:
        return [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.long
def test_two_processes_save_and_restore_together(tmp_path):
    outputs = run_processes(
        tmp_path,
        """
        assert checkpointer.latest_step() is None
        checkpointer.save(1234567, {"x": x, "n": jax.device_put(np.int32(5), NamedSharding(mesh, P()))}, {"a": 1})
        checkpointer.close()
        step = checkpointer.latest_step()
        structs = {
            "x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("d", None))),
            "n": jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P())),
        }
        restored = checkpointer.restore(step, structs)
        for shard in restored["x"].addressable_shards:
            assert (np.asarray(shard.data) == values[shard.index]).all()
        print("restored", step, int(restored["n"]))
        """,
    )
    for output in outputs:
        assert "restored 1234567 5" in output, output
    group = zarr.open_group(tmp_path / "0001234567", mode="r")
    np.testing.assert_array_equal(group["x"][...], np.arange(2**16, dtype=np.float32).reshape(256, 256))
    assert group["n"][()] == 5
    assert not list(tmp_path.glob("*/.*"))


@pytest.mark.long
def test_two_processes_save_and_restore_at_a_url(monkeypatch):
    with S3Server() as server:
        for name, value in {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        outputs = run_processes(
            "s3://bucket/run",
            """
            checkpointer.save(7, {"x": x}, {})
            checkpointer.wait()
            struct = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("d", None)))}
            restored = checkpointer.restore(checkpointer.latest_step(), struct)
            for shard in restored["x"].addressable_shards:
                assert (np.asarray(shard.data) == values[shard.index]).all()
            print("restored")
            """,
        )
        assert all("restored" in output for output in outputs), outputs
        assert "/bucket/run/0000000007/zarr.json" in server.objects
        assert not [path for path in server.objects if "written" in path]


@pytest.mark.long
def test_damage_that_one_process_sees_is_told_by_all(tmp_path):
    outputs = run_processes(
        tmp_path,
        """
        from jax.experimental import multihost_utils
        checkpointer.save(1, {"x": x}, {})
        checkpointer.wait()
        if rank == 1:
            shard = x.addressable_shards[0]
            chunk = "/".join(str(at.start // size) for at, size in zip(shard.index, shard.data.shape))
            with open(f"{sys.argv[4]}/0000000001/x/c/{chunk}", "r+b") as file:
                file.write(b"wrong")
        multihost_utils.sync_global_devices("spoiled")
        try:
            checkpointer.restore(1, {"x": x})
        except OSError as error:
            print("told:", error)
        """,
    )
    assert all("told: cannot read the array 'x': a chunk is not what was written" in output for output in outputs), (
        outputs
    )


@pytest.mark.long
def test_a_failure_in_one_process_is_told_to_all(tmp_path):
    outputs = run_processes(
        tmp_path,
        """
        import resource
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, resource.RLIM_INFINITY))
        checkpointer.save(1, {"x": x}, {})
        try:
            checkpointer.wait()
        except OSError as error:
            print("told:", error)
        print("latest:", checkpointer.latest_step())
        """,
    )
    assert "another process failed to write its part" in outputs[0], outputs[0]
    assert "writing the array 'x' failed" in outputs[1], outputs[1]
    assert all("latest: None" in output for output in outputs)


@pytest.mark.long
def test_an_error_of_process_0_as_a_save_begins_fails_the_save_of_all(tmp_path):
    outputs = run_processes(
        tmp_path,
        """
        from shardwright.run.stores import Store
        directories, failures = Store.directories, ["Input/output error"] * (rank == 0)
        def failing(self):
            if failures:
                raise OSError(5, failures.pop())
            return directories(self)
        Store.directories = failing
        checkpointer.save(1, {"x": x}, {})
        try:
            checkpointer.wait()
        except OSError as error:
            print("told:", error)
        checkpointer.save(2, {"x": x}, {})
        checkpointer.wait()
        try:
            checkpointer.save(2, {"x": x}, {})
        except ValueError as error:
            print("refused:", error)
        print("latest:", checkpointer.latest_step())
        """,
    )
    for output in outputs:
        assert "0000000001 was not saved: [Errno 5] Input/output error" in output, output
        assert "0000000002 is there already" in output, output
        assert "latest: 2" in output, output


def test_config_differences():
    saved = {"model": {"layers": 2, "d_model": 64}, "optimizer": {"lr": 0.001, "betas": [0.9, 0.95]}, "mesh": {"d": 4}}
    current = {
        "model": {"layers": 2, "d_model": 64},
        "optimizer": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8},
        "mesh": {"d": 8},
        "optimizers": {"x": 1},
    }
    assert config_differences(saved, current, ("model", "optimizer", "mesh.t")) == [
        "optimizer.eps: checkpoint does not have it, this run has 1e-08",
        "optimizer.lr: checkpoint has 0.001, this run has 0.01",
    ]
    assert config_differences(saved, current, ("mesh.d",)) == ["mesh.d: checkpoint has 4, this run has 8"]
    assert config_differences(current, saved, ("optimizer.eps",)) == [
        "optimizer.eps: checkpoint has 1e-08, this run does not have it"
    ]
    assert config_differences(saved, saved, ("model", "optimizer", "mesh")) == []


def test_the_documented_example_reads_a_checkpoint(tmp_path, monkeypatch, capsys):
    save(tmp_path / "runs/my_run/checkpoints", 500, metadata={"seed": 7})
    document = (REPOSITORY / "docs/pytree-zarr-checkpoint.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    variables = {}
    exec(example, variables)
    assert_bits_equal(variables["embed"], make_state()["weights"]["embed"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "500 {'seed': 7}"
    assert [line.split()[0] for line in lines[1:]] == NAMES


def test_only_the_latest_are_kept(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for step in (1, 5, 20, 100):
            checkpoints.save(step, placed(make_mesh(4, 2)), {})
            checkpoints.wait()
            assert len(checkpoints.steps()) <= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000020", "0000000100"]
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)
