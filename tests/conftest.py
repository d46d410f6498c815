"""Every test sees eight simulated devices, whatever the machine; or TEST_DEVICES of them."""

import gc
import os
import sys
from pathlib import Path

import pytest

from shardlib.axes import register_axes
from tests.support.simulated import compiled_in, xla_flags

# The axes of the trainer, which specs in tests of shardlib name, also where there is no trainer.
GROUPS = {"b": ("r", "d", "e"), "fsdp": ("c", "d", "e")}
register_axes("rtcdep", either_order="tc", groups=GROUPS, spread_over="cdet")

# Both are read when jax is imported, which happens after this file. The device count holds for the
# CPU alone, so the CPU is the platform unless one is asked for, e.g. with JAX_PLATFORMS=cuda.
FLAGS = xla_flags(os.environ.get("TEST_DEVICES", "8"))
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What takes long is compiled once for all workers, sessions and programs that tests start. They
# find nothing of a run.
os.environ.update(compiled_in(str(Path(__file__).parents[1] / ".pytest_cache" / "compiled")))

# A trace makes many objects, most of which live on: looking for cycles among them took a sixth of
# the CPU time.
gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def own_modules_leave(tmp_path_factory):
    """What a test imports from a file that it wrote is gone after it, so that no other test counts
    it as its source.
    """
    known = set(sys.modules)
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]


@pytest.fixture
def one_device():
    """The mesh in force has one device."""
    import jax

    from tests.support import tiny

    with jax.set_mesh(tiny.mesh("one device")):
        yield


@pytest.fixture
def no_hashes(monkeypatch):
    """Programs that open a run do not trace its step for hashes, which take most of their time."""
    from shardwright.program.step import Step

    monkeypatch.setattr(Step, "hash", "")


@pytest.fixture
def not_remembered(monkeypatch):
    """No check asks whether it was made before: to know that, programs are traced and lowered, which
    takes longer than the check of a small one.
    """
    for module in ("causality", "soundness"):
        name = f"shardwright.inspect.{module}.remembered"
        monkeypatch.setattr(name, lambda step, what, find: (find(), ""))
