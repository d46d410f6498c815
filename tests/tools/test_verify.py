"""tools.verify: what it compares, and that it names the line or the tensor where an edited train.py
goes wrong.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardwright.tools.verify import ONE_DEVICE, all_meshes, error_of, on_host, small
from tests.support import tiny
from tests.support.edits import Change

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "train.py").read_text()


# ---- what is compared ----------------------------------------------------------------------------


def test_copies_of_an_array_must_be_equal():
    with jax.set_mesh(tiny.mesh("r=2 d=2 t=2")):
        sharding = jax.NamedSharding(tiny.mesh("r=2 d=2 t=2"), P("d"))
        at = sharding.addressable_devices_indices_map((4,))

        def block(i, index, extra):
            return jax.device_put(np.arange(4.0)[index] + extra * (i == 7), list(at)[i])

        def made(extra):
            return jax.make_array_from_single_device_arrays(
                (4,), sharding, [block(i, index, extra) for i, index in enumerate(at.values())]
            )

        np.testing.assert_array_equal(on_host(made(0)), np.arange(4.0))
        assert np.isnan(on_host(made(1))).tolist() == [False, False, True, True]


def test_differences_are_relative_to_the_largest_entry():
    assert error_of(np.array([1.0, 4.5]), np.array([1.0, 4.0])) == 0.125
    assert error_of(np.array([np.nan, 4.0]), np.array([1.0, 4.0])) == np.inf
    assert error_of(np.array([1.0, 4.0]), np.array([np.nan, 4.0])) == np.inf
    assert error_of(np.array([np.nan, 5.0]), np.array([np.nan, 4.0])) == 0.25


# ---- settings ------------------------------------------------------------------------------------


def test_every_mesh_divides_the_small_sizes():
    c = tiny.config(microbatches=2)
    small(c, 8)
    c.model.check(c.training.seq_len)
    meshes, others = all_meshes(c, 8)
    assert [mesh["p"] for mesh in meshes] == [1] * 10 + [2] * 6 + [4] * 3

    def sizes(**several):
        return ONE_DEVICE | several

    assert [mesh for mesh, _ in others] == [sizes(p=8)]
    assert "4 layers do not divide into 8 equal stages" in others[0][1]
    expected = [sizes(p=2, d=4), sizes(r=2, d=2, t=2), sizes(d=8), sizes(d=2, e=2, c=2)]
    assert all_meshes(c, 8, ["2x1x4x1", "2x2x2", "1x8x1", "c2d2e2"])[0] == expected
    message = "verify.meshes has 3x1x1; name a mesh of 8 devices, such as 1x1x8, .*such as c8"
    with pytest.raises(ValueError, match=message):
        all_meshes(c, 8, ["3x1x1"])


# ---- the program ---------------------------------------------------------------------------------

TINY = ("training.compute_dtype=bf16", "verify.small=true", "verify.meshes=[2x2x2]", "mesh.p=2")


def verify(directory: Path, name: str, *overrides: str) -> tuple[int, str]:
    """Runs the tool in `directory`: its train.py, if there is one, comes before the project's."""
    command = [sys.executable, "-m", "tools.verify", f"--config-name={name}", *TINY, *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_a_mesh_that_differs_is_named_with_the_line(tmp_path):
    """Of a model of one's own."""
    change = Change("attended[..., 0, :]", "FOUND * shardops.axis_size('t')", "Model.layer")
    before = (ROOT / "shardwright/models/gpt2.py").read_text()
    (tmp_path / "own").mkdir()
    (tmp_path / "own/mine.py").write_text(change.apply(before))
    own = ["model.module=own.mine", "verify.compiled=false"]
    status, text = verify(tmp_path, "local_gpt2", *own)
    ((node, *_), _) = change.place(before)
    assert status == 1, text
    assert f"DIFFERS on r=2 d=2 t=2: own/mine.py:{node.lineno}: " in text
    assert "1 of 1 meshes DIFFER." in text


@pytest.mark.long
def test_what_is_compiled_for_this_platform_alone_is_found_in_the_tensors(tmp_path):
    shifted = "jnp.roll(x, shardops.axis_size('t'), 2)"
    attended = f"lax.platform_dependent(FOUND, tpu=lambda x: x, cpu=lambda x: {shifted})"
    change = Change("attention(q, k, v, self.mask)", attended, "Llama.attend")
    (tmp_path / "train.py").write_text(change.apply(SOURCE))
    status, text = verify(tmp_path, "local_test_synthetic")
    assert status == 1, text
    differs = r"DIFFERS on r=2 d=2 t=2: in exact arithmetic as on one device; compiled, \d+ tensors"
    assert re.search(differs, text)
    assert "1 of 1 meshes DIFFER." in text
