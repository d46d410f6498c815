"""Checkpoints: the format, meshes and several processes.

What kills and damage do is in test_resuming.py.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
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

from shardwright.program import checkpoint
from shardwright.program.checkpoint import Checkpointer
from tests.support.local_server import free_port

REPOSITORY = Path(__file__).parents[2]


def make_mesh(d, t):
    return jax.make_mesh(
        (d, t), ("d", "t"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[: d * t]
    )


SPECS = {
    "weights": {"w_q": P(None, ("t", "d"), None), "embed": P("t", "d"), "norm": P("t")},
    "optimizer": ({"step": P(), "zeros": P(("t", "d")), "mask": P("d")}, P(None, "t")),
}
NAMES = ["optimizer/0/mask", "optimizer/0/step", "optimizer/0/zeros", "optimizer/1"]
NAMES += ["weights/embed", "weights/norm", "weights/w_q"]


def make_state():
    rng = np.random.default_rng(0)
    w_q = rng.standard_normal((3, 16, 5)).astype(np.float32)
    w_q.reshape(-1)[:4] = [np.nan, -0.0, np.inf, 1e-42]
    embed = rng.standard_normal((32, 16)).astype(np.float32)
    norm = rng.standard_normal(8).astype(np.float16)
    numbers = {"step": np.int32(-7), "zeros": np.zeros(16, np.float32)}
    numbers |= {"mask": rng.integers(0, 2, 8).astype(bool)}
    keys = rng.integers(0, 2**32, (2, 8), dtype=np.uint32)
    return {"weights": {"w_q": w_q, "embed": embed, "norm": norm}, "optimizer": (numbers, keys)}


def placed(mesh, state=None):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state or make_state(), SPECS
    )


def like(mesh, state=None):
    def struct(x, spec):
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(struct, state or make_state(), SPECS)


def assert_bits_equal(state, expected):
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes()


def save(directory, step=3, state=None, metadata=None):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(step, state or placed(make_mesh(4, 2)), metadata or {})
    return directory / f"{step:010}"


def test_restores_on_any_mesh_bit_for_bit(tmp_path):
    save(tmp_path)
    for mesh in (make_mesh(2, 4), make_mesh(1, 1)):
        restored = Checkpointer(tmp_path).restore(3, like(mesh))
        assert_bits_equal(restored, make_state())
        for leaf, spec in zip(jax.tree.leaves(restored), jax.tree.leaves(SPECS), strict=True):
            assert leaf.sharding == NamedSharding(mesh, spec)


def test_zarr_python_reads_what_was_saved(tmp_path, monkeypatch):
    """Each shard has several chunks."""
    monkeypatch.setattr(checkpoint, "SMALL_BYTES", 0)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 100)
    group = zarr.open_group(save(tmp_path), mode="r")
    assert set(group) == {"weights", "optimizer"}
    for name, leaf in zip(NAMES, jax.tree.leaves(make_state()), strict=True):
        assert_bits_equal(group[name][...], leaf)
    assert group["weights/w_q"].chunks == (1, 2, 5)
    assert group["weights/embed"].chunks == (4, 4)
    assert_bits_equal(Checkpointer(tmp_path).restore(3, like(make_mesh(1, 8))), make_state())


def test_bf16_is_kept_bit_for_bit_and_tensorstore_reads_it(tmp_path):
    """All 2**16 numbers. zarr-python has no bfloat16."""
    numbers = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).reshape(256, 256)
    sharding, other = (NamedSharding(make_mesh(*shape), P("t", "d")) for shape in ((4, 2), (1, 8)))
    path = save(tmp_path, state={"moments": jax.device_put(numbers, sharding)})
    structs = {"moments": jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=other)}
    assert_bits_equal(Checkpointer(tmp_path).restore(3, structs)["moments"], numbers)
    at = {"driver": "file", "path": str(path / "moments")}
    found = tensorstore.open({"driver": "zarr3", "kvstore": at}).result().read().result()
    assert_bits_equal(found, numbers)


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
        chunk = content["chunk_grid"]["configuration"]["chunk_shape"]
        grid = [-(-a // b) for a, b in zip(content["shape"], chunk, strict=True)]
        files = [path / name / "c" / "/".join(map(str, i)) for i in np.ndindex(*grid)]
        sums = [google_crc32c.value(file.read_bytes()[:-4]) for file in files]
        about = {"shape": content["shape"], "dtype": content["data_type"], "chunk_shape": chunk}
        assert array == about | {"crc32c": "".join(f"{x:08x}" for x in sums)}
    kept = {key: value for key, value in manifest.items() if key != "sha256"}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
    assert manifest["sha256"] == hashlib.sha256(canonical).hexdigest()
    assert Checkpointer(tmp_path).metadata(3) == metadata


def test_saved_values_survive_donation(tmp_path):
    mesh = make_mesh(4, 2)
    clear = jax.jit(
        lambda state: jax.tree.map(lambda x: x ^ True if x.dtype == bool else x * 3, state),
        donate_argnums=0,
    )
    with Checkpointer(tmp_path) as checkpointer, jax.set_mesh(mesh):
        for step in range(2):
            state = placed(mesh)
            checkpointer.save(step, state, {})
            jax.block_until_ready(clear(state))
    for step in range(2):
        assert_bits_equal(Checkpointer(tmp_path).restore(step, like(mesh)), make_state())


def test_every_array_that_does_not_fit_is_named(tmp_path):
    save(tmp_path)
    other = make_state()
    other["weights"]["embed"] = np.zeros((64, 16), np.float32)
    other["weights"]["norm"] = np.zeros(8, np.float32)
    expected = like(make_mesh(4, 2), other)
    expected["weights"]["bias"] = expected["weights"].pop("w_q")
    with pytest.raises(ValueError, match="does not fit this run") as error:
        Checkpointer(tmp_path).restore(3, expected)
    assert str(error.value).splitlines()[1:-1] == [
        "  weights/bias: checkpoint does not have it, this run has 'float32[3, 16, 5]'",
        "  weights/embed: checkpoint has 'float32[32, 16]', this run has 'float32[64, 16]'",
        "  weights/norm: checkpoint has 'float16[8]', this run has 'float32[8]'",
        "  weights/w_q: checkpoint has 'float32[3, 16, 5]', this run does not have it",
    ]


@pytest.mark.parametrize("order", [None, [2, 0, 1]])
def test_an_array_of_small_shards_is_one_file(tmp_path, order):
    """Also a stack of layers whose rows are in another order at rest, which are those of the layers
    on the disk.
    """
    orders = {} if order is None else {"weights/w_q": np.array(order)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, placed(make_mesh(4, 2)), {}, orders)
    assert_bits_equal(
        Checkpointer(tmp_path).restore(3, like(make_mesh(2, 4)), orders), make_state()
    )
    path = tmp_path / "0000000003"
    chunks = [at for at in path.rglob("*") if at.is_file() and "c" in at.relative_to(path).parts]
    assert len(chunks) == len(NAMES)
    rows = make_state()["weights"]["w_q"]
    expected = rows[np.argsort(order)] if order else rows
    assert_bits_equal(zarr.open_array(path / "weights/w_q", mode="r")[...], expected)


OF_TWO = """
import os, resource, sys
rank = int(sys.argv[1])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, numpy as np
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=rank)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax.experimental import multihost_utils
from shardwright.program import checkpoint
checkpoint.COMMIT_TIMEOUT_S = 20
checkpointer = checkpoint.Checkpointer(sys.argv[3])
mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
values = np.arange(2**16, dtype=np.float32).reshape(256, 256)
sharding = NamedSharding(mesh, P("t", "d"))
x = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
checkpoint.SMALL_BYTES = 0

# Both have the same shards of this: each writes half of the bytes.
replicas = jax.make_mesh((2, 4), ("r", "d"), axis_types=(AxisType.Explicit,) * 2)
on = NamedSharding(replicas, P(None, "d"))
odd = values.copy()  # -0.0, a NaN with a payload and the smallest number
odd.view(np.uint32)[0, :3] = 0x80000000, 0x7FC12345, 1
both = {"x": jax.make_array_from_callback(odd.shape, on, odd.__getitem__)}
with checkpoint.Checkpointer(f"{sys.argv[3]}/replicas") as of_replicas:
    of_replicas.save(5, both, {})
multihost_utils.sync_global_devices("saved")
like = {"x": jax.ShapeDtypeStruct(odd.shape, odd.dtype, sharding=on)}
for shard in of_replicas.restore(5, like)["x"].addressable_shards:
    assert np.asarray(shard.data).tobytes() == odd[shard.index].tobytes()

def told(action):
    try:
        action()
    except Exception as error:
        print("told:", type(error).__name__, error)
    multihost_utils.sync_global_devices("told")

if rank:
    checkpoint.Store.directories = None  # only the first lists what is there
assert checkpointer.latest_step() is None
checkpointer.save(1234567, {"x": x, "n": jax.device_put(np.int32(5), NamedSharding(mesh, P()))}, {"a": 1})
checkpointer.wait()
step = checkpointer.latest_step()
structs = {
    "x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("d", None))),
    "n": jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P())),
}
restored = checkpointer.restore(step, structs)
for shard in restored["x"].addressable_shards:
    assert (np.asarray(shard.data) == values[shard.index]).all()
print("restored", step, int(restored["n"]))
told(lambda: checkpointer.save(1234567, {"x": x}, {}))

if rank == 1:
    shard = x.addressable_shards[0]
    chunk = "/".join(str(at.start // size) for at, size in zip(shard.index, shard.data.shape))
    with open(f"{sys.argv[3]}/0001234567/x/c/{chunk}", "r+b") as file:
        file.write(b"wrong")
multihost_utils.sync_global_devices("spoiled")
told(lambda: checkpointer.restore(1234567, structs))

if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, resource.RLIM_INFINITY))
checkpointer.save(1234569, {"x": x}, {})
told(checkpointer.wait)
print("latest:", checkpointer.latest_step())
"""


@pytest.mark.long
def test_two_processes_save_and_restore_and_tell_the_same(tmp_path):
    """Two JAX processes of 4 devices each."""
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OF_TWO, str(rank), address, str(tmp_path)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for i, output in enumerate(outputs):
        assert "restored 1234567 5" in output, output
        there, damage, full = [line for line in output.splitlines() if line.startswith("told: ")]
        assert f"ValueError {'process 0: ' * i}cannot save step 1234567: " in there
        assert "is not what was written: " in damage
        assert full.startswith("told: OSError File too large: ")
        assert "/x/c/" in full
        assert ("(of process 1)." in full) == (i == 0)
        assert "latest: 1234567" in output


def test_the_documented_example_reads_a_checkpoint(tmp_path, monkeypatch, capsys):
    save(tmp_path / "runs/my_run/checkpoints", 500, metadata={"seed": 7})
    document = (REPOSITORY / "docs/formats.md").read_text().partition("\n## Checkpoints\n")[2]
    (example,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    variables = {}
    exec(example, variables)
    assert_bits_equal(variables["embed"], make_state()["weights"]["embed"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "500 {'seed': 7}"
    assert [line.split()[0] for line in lines[1:]] == NAMES


def test_a_large_array_is_not_gathered_although_its_shards_are_small(monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST_GATHERED", 2**10)
    mesh = jax.make_mesh((8,), ("d",))
    rows = [64, 32]  # 2 KiB and 1 KiB
    arrays = (
        jax.device_put(np.zeros((n, 8), np.float32), NamedSharding(mesh, P("d"))) for n in rows
    )
    assert [checkpoint.is_small(x) for x in arrays] == [False, True]
