"""A model of one's own, with nothing but its math: the one that docs/models.md begins with."""

import contextlib
import importlib
import re
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
MINE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)[0]
SIZES = {
    "vocab": 64,
    "d_model": 32,
    "layers": 4,
    "n_kv": 4,
    "n_q_per_kv": 1,
    "d_head": 8,
    "d_ff": 8,
}


@contextlib.contextmanager
def imported(name: str, source: str, directory: Path):
    """The module of a source, from a file in `directory`."""
    (directory / f"{name}.py").write_text(source)
    sys.path.insert(0, str(directory))
    sys.modules.pop(name, None)
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(directory))
        sys.modules.pop(name, None)


def with_state(source: str) -> str:
    """A model's source with the state that docs/models.md adds to it."""
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.S)
    return changed(source, diff)


def changed(source: str, diff: str) -> str:
    """A source with the change of a diff, whose hunks begin with @@."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = (
            "".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +")
        )
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source
