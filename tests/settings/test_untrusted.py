"""Text of strangers, as a terminal may show it."""

import unicodedata

import pytest

from shardwright.data.untrusted import one_line, parse_json, shown
from shardwright.settings.program import refusal

pytestmark = pytest.mark.quick

BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"


def test_no_character_that_a_terminal_obeys_is_shown():
    """By the categories of Unicode: controls, surrogates, and separators of lines and
    paragraphs.
    """
    for code in (
        *range(0x3000),
        *range(0xD7F0, 0xE010),
        *range(0xFE00, 0x10100),
        0xE0001,
        0x10FFFF,
    ):
        sign = chr(code)
        obeyed = sign in BIDI or unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp")
        expected = "\ufffd" if obeyed and sign not in "\n\t" else sign
        assert shown(sign) == expected, hex(code)
    assert one_line("a\nb\tc\x1b[31md", 3) == "a⏎b…"
    assert shown("a\r\nb\rc\x1b[31m\x9b2J") == "a\nb\ufffdc\ufffd[31m\ufffd2J"


def test_a_message_that_quotes_data_is_shown_so():
    with pytest.raises(ValueError, match="is unknown") as raised:
        raise ValueError("the token '\x1b]0;owned\x07\u202e' is unknown.")
    assert refusal(raised.value) == "Error: the token '\ufffd]0;owned\ufffd\ufffd' is unknown."


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, "1" * 10**5, "nope"])
def test_json_that_python_cannot_take_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"deep|digits|Expecting"):
        parse_json(text)
