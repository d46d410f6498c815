"""What tools.forecast says of tokens that repeat."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwright.data.flat_tokens import Writer
from shardwright.tools.forecast import passes_of, warnings_of_repeats
from tests.support import tiny

pytestmark = pytest.mark.quick


def run_with(passes) -> Any:
    facts = {"parameters_without_embeddings": 10, "tokens": 100} | ({} if passes is None else {"passes": passes})
    return SimpleNamespace(about={"run": facts}, values={"loss": 3.0}, state="finished")


def test_tokens_that_repeat_are_told():
    assert warnings_of_repeats({"big": 0.5, "tiny": 1.0}, [run_with(None), run_with({"a": 1.0})]) == []
    found = warnings_of_repeats(
        {"big": 0.5, "tiny": 88.0}, [run_with({"a": 2.5}), run_with({"a": 0.5}), run_with(None)]
    )
    assert found[0] == "WARNING tokens repeat: this run reads tiny 88x"
    assert found[1] == "WARNING tokens repeat in 1 of the 3 runs"
    assert "each token as new" in found[2]


def test_passes_are_those_of_the_configuration(tmp_path, capsys):
    """8 sequences a step for 20 steps, of a dataset with 64."""
    c = tiny.config()
    c.data.filespec = str(tmp_path / "data.zarr")
    assert passes_of(c, 20) == {}
    assert "whether tokens repeat is unknown" in capsys.readouterr().out
    with Writer(c.data.filespec, "train") as writer:
        writer.append(np.ones(64 * tiny.LENGTH, np.uint32), np.array([64 * tiny.LENGTH]))
    assert passes_of(c, 20) == {c.data.filespec: 2.5}
