"""Text on a terminal of 80 columns, on a narrow one, and in a file."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from shardwright.settings.words import for_console, for_stream, wrapped

UNIGRAM = "unigram    3.675 nats a token: a lower loss has learned more than how often each token comes"


class OnTerminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [20, 40, 80])
def test_lines_break_between_words_below_the_text_beside_their_label(width):
    first, *others = wrapped(UNIGRAM, width).split("\n")
    assert [first, *others] != [UNIGRAM]
    assert all(len(line) <= width for line in [first, *others])
    assert " ".join([first, *(line.removeprefix(" " * 11) for line in others)]) == UNIGRAM


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step 20/20  loss 3.1  grad", "step 20/20\nloss 3.1  grad"),
        ("    indented text of words", "    indented\n    text of\n    words"),
        ("report     /a/path-of-a-run (x)", "report\n           /a/path-of-a-run\n           (x)"),
        ("a\n\n  b  c", "a\n\n  b  c"),
    ],
)
def test_indents_paths_and_short_lines_stay(text, expected):
    assert wrapped(text, 14) == expected


def test_a_file_has_whole_lines_and_a_terminal_has_whole_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert for_stream(UNIGRAM, io.StringIO()) == UNIGRAM
    assert for_stream(UNIGRAM, OnTerminal()) == wrapped(UNIGRAM, 80)
    for terminal in (False, True):
        file, path = io.StringIO(), "/" + 99 * "p"
        console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
        console.print(Text(for_console(f"{UNIGRAM} {path}", console)), soft_wrap=True)
        lines = [line.strip() for line in file.getvalue().splitlines()]
        assert len(lines) == (3 if terminal else 1)
        assert " ".join(lines) == f"{UNIGRAM} {path}"
