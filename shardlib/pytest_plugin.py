"""pytest loads this where shardlib is installed: the fixture `assert_sound`."""

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def assert_sound() -> Callable[..., None]:
    """shardlib.testing.assert_sound.

    Call it as assert_sound(function, *args, meshes=["data=4", "data=2 model=2"], **specs).
    """
    # Not at the top: pytest imports this before any conftest.py, which may set what JAX reads when
    # it is imported.
    from shardlib.testing import assert_sound

    return assert_sound
