"""For tests of a project: is the training step of a configuration right on a mesh?"""

from pathlib import Path

from shardlib.testing import sizes_of
from shardwright.inspect import examine
from shardwright.program.step import open_steps
from shardwright.run.launch import composed


def assert_sound(name: str, mesh: str, *overrides: str, configs: str | Path = "configs") -> None:
    """Raises unless a run's step computes on a mesh what it computes on one device, and looks at no
    later token.

    It is the check that `train` makes before its first step. Nothing is compiled, and no devices
    are needed.

    Args:
        name: the configuration, a file of `configs` or one that comes with shardwright.
        mesh: the devices along each axis, such as `d=2 t=2`; others are 1.
        overrides: settings as on the command line, such as `training.microbatches=2`.
        configs: directory of the project's configurations.

    Raises:
        ValueError: a setting is wrong, or the step is rejected, with the line that does it.

    >>> assert_sound("local_test_synthetic", "d=2 t=2", "training.microbatches=2")
    checked    training and evaluation compute on this mesh what one device computes (...)
    causality  no position sees a later token or another document
    >>> assert_sound("local_test_synthetic", "d=2 t=2", "model.n_kv=3")
    Traceback (most recent call last):
    ValueError: model.n_kv is 3; on the mesh r=1 d=2 t=2 it must be a multiple of t = 2.
    """
    sizes = sizes_of(mesh)
    c = composed(
        name, *overrides, *(f"mesh.{axis}={size}" for axis, size in sizes.items()), own=configs
    )
    examine.check(open_steps(c, sizes))
