"""docs/refused.md: each of its functions gets the verdict that its name says, and a message that its table lists."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardlib.proof.check import prove_function
from shardlib.shardtypes import f32, i32
from tests.programs.program import abstract_mesh, program, traced

PAGE = Path(__file__).parents[2] / "docs" / "refused.md"
SECTIONS = dict(re.findall(r"^## (.*)\n\n(?:(?!#).*\n)*?```python\n((?:.*\n)*?)```", PAGE.read_text(), re.MULTILINE))
ROWS = re.findall(r"^\| (`.*`) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
RING = ("total = total + part  # rejected: ", "total = ")
"""The page shows the rejected ring in a comment."""


def findings(body):
    p = program(body, vma=False)

    def trace():
        return traced(p, jax.sharding.get_abstract_mesh().axis_sizes)

    return list(map(str, prove_function(trace, abstract_mesh(p, (2, 2)))))


def findings_of(section, verdict):
    names = {"jnp": jnp, "lax": lax, "f32": f32, "i32": i32}
    code = SECTIONS[section]
    if section == "Rings" and verdict == "rejected":
        assert RING[0] in code
        code = code.replace(*RING).replace("accepted", "rejected")
    exec(code, names)
    return findings(names[verdict])


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_rejected_has_a_message_of_the_table(section):
    link = f"(#{section.lower().replace(' ', '-')})"
    messages = [message for row, fixes in ROWS if link in fixes for message in re.findall(r"`(.*?)`", row)]
    found = findings_of(section, "rejected")
    assert found
    for finding in found:
        assert any(message in finding for message in messages), finding
        assert "remedy:" in finding


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_accepted(section):
    assert findings_of(section, "accepted") == []
