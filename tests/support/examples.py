"""Examples in docstrings, as doctests."""

import doctest


def run(name: str, doc: str | None, names: dict) -> int:
    """Runs the example in a docstring, which may define further names; returns its number of
    statements.
    """
    test = doctest.DocTestParser().get_doctest(doc or "", names, name, f"<docstring of {name}>", 0)
    test.globs = names
    shown: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    result = runner.run(test, out=shown.append, clear_globs=False)
    assert result.failed == 0, "".join(shown)
    return result.attempted
