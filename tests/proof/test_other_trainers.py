"""`check` on the shard_map parts of public JAX libraries (docs/other-trainers.md), where they are installed."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardlib.parsing import ShardError
from shardlib.proof.check import check
from tests.programs import other_trainers
from tests.programs.other_trainers import CASES, VERSIONS, Case, difference, number_text, version

PAGE = (Path(__file__).parents[2] / "docs" / "other-trainers.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 6][1:]


@pytest.mark.filterwarnings("ignore")  # of what the libraries still use
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_a_function_of_another_library(case: Case):
    if version(case.package) != VERSIONS[case.package]:
        pytest.skip(f"{case.package} {VERSIONS[case.package]} is not installed")
    said, message = other_trainers.verdict(case)
    assert (said, case.problem in message) == (case.verdict, True), message
    compared = number_text(difference(case))
    assert (compared == "equal") == case.is_equal
    assert other_trainers.row(case, said, compared) in ROWS


def test_the_page_shows_every_case():
    assert len(ROWS) == len(CASES)
    for case, row in zip(CASES, ROWS, strict=True):
        package, function, said, compared, reason = (cell.strip() for cell in row.strip("|").split("|"))
        assert (package, function, said, reason) == (case.package, case.function, case.verdict, case.reason)
        assert (compared == "equal") == case.is_equal
        assert bool(reason) == (said != "accepted" or not case.is_equal)
    equal = [case for case in CASES if case.is_equal]
    accepted = [case for case in equal if case.verdict == "accepted"]
    rejected = [case for case in CASES if not case.is_equal and case.verdict != "accepted"]
    counts = f"Of the {len(equal)} functions that compute the same on every mesh, {len(accepted)} are accepted. "
    counts += f"Of the {len(CASES) - len(equal)} that differ, {len(rejected)} are rejected;"
    assert counts in " ".join(PAGE.split())
    assert all(f"{package} {number}" in " ".join(PAGE.split()) for package, number in VERSIONS.items())


def programs() -> dict[str, object]:
    """The page's smallest programs."""
    found: dict[str, object] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), found)
    return found


BUGS = {"chunks": "is written, or taken|different", "dropped": "random", "log_sum_exp": None}


@pytest.mark.parametrize("name", BUGS)
def test_the_bugs_in_their_smallest_form(name):
    """Each differs on four devices; the proof rejects those that hold for finite numbers."""
    body: Any = programs()[name]
    specs: dict[str, Any] = {"in_specs": P("t"), "out_specs": P() if name == "log_sum_exp" else P("t")}
    x = jnp.where(jnp.arange(16) < 12, jnp.arange(16.0), -jnp.inf if name == "log_sum_exp" else 20.0)
    mesh = AbstractMesh((4,), ("t",), axis_types=(AxisType.Auto,))
    if BUGS[name]:
        with pytest.raises(ShardError, match=BUGS[name]):
            check(body, x, mesh=mesh, check_vma=False, **specs)
    else:
        check(body, x, mesh=mesh, check_vma=False, **specs)
    found = []
    for n in (4, 1):
        mesh = jax.make_mesh((n,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
        found.append(np.asarray(jax.jit(jax.shard_map(body, mesh=mesh, check_vma=False, **specs))(x)))
    assert np.isfinite(found[1]).all()
    assert not np.allclose(*found)
