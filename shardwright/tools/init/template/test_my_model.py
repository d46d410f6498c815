"""Checks that the training step computes on each mesh what it computes on one device, and looks at
no later token.
"""

import pytest

from shardwright.testing import assert_sound


@pytest.mark.parametrize("mesh", ["d=2 t=2", "d=2 c=2", "p=2 d=2"])
def test_the_step_is_right(mesh):
    assert_sound("my_run", mesh, "training.microbatches=2")
