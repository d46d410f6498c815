"""docs/models.md quotes gpt2.py."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "models.md").read_text(), flags=re.S)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_what_it_quotes_is_there(number):
    assert BLOCKS[number] in (ROOT / "gpt2.py").read_text()


def test_it_quotes():
    assert len(BLOCKS) >= 5
