"""docs/sharding-types.md: each block runs, or raises what its comment says; the messages of its
table exist.
"""

import linecache
import re
from pathlib import Path

import pytest

from shardlib.shardtypes import ShardError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sharding-types.md").read_text()
BLOCKS = [
    (TEXT[: match.start(1)].count("\n"), match[1])
    for match in re.finditer(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
]


@pytest.mark.long
@pytest.mark.quick
def test_every_block_of_the_tutorial():
    namespace: dict = {}
    raised = 0
    try:
        for line, code in BLOCKS:
            # Errors then point into the document, and `typed` finds the source of what it
            # decorates.
            source, file = "\n" * line + code, f"<docs/sharding-types.md:{line}>"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            program, expected = (
                compile(source, file, "exec"),
                re.search(r"# raises ShardError: (.*)", code),
            )
            if expected is None:
                exec(program, namespace)
            else:
                raised += 1
                with pytest.raises(ShardError, match=re.escape(expected[1])):
                    exec(program, namespace)
    finally:
        namespace["in_force"].close()  # leaves the mesh, if a block failed before it did so itself
    assert len(BLOCKS) >= 12
    assert raised == len(re.findall("# raises ShardError", TEXT))


@pytest.mark.quick
def test_messages_of_the_table():
    """Each is in a golden file, or in a block above. Dims and axes may have other names there."""
    golden = [path.read_text() for path in Path(__file__).parent.glob("refused_*.txt")]
    messages = "\n".join([*golden, *re.findall("# raises ShardError: (.*)", TEXT)])
    rows = re.findall(
        r"^\| (`.*?) \| .* \|$", TEXT.partition("## Reading an error")[2], re.MULTILINE
    )
    shown = [message for row in rows for message in re.findall("`(.*?)`", row)]
    assert len(shown) > 8
    for message in shown:

        def name(word):
            return r"\S+" if re.fullmatch(r"[A-Z](/\w)?|[dt],?", word) else re.escape(word)

        pattern = " ".join(name(word) for word in message.replace("…", " … ").split())
        assert re.search(pattern.replace(" … ", ".*").replace("…", ".*"), messages), message
