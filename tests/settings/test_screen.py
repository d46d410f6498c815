"""Tables on a terminal of 80 columns."""

import io

from rich.console import Console

from shardwright.settings.screen import print_table


def test_a_table_that_is_too_wide_has_its_names_and_all_digits():
    numbers = [f"0.0{i}23 – 0.0{i}56" for i in range(1, 7)]
    console = Console(file=io.StringIO(), width=80)
    print_table(console, ["", *"abcdef"], [["layers.attention_norm", *numbers]])
    printed = "".join(console.file.getvalue().split())
    columns = [line for line in console.file.getvalue().splitlines() if line.strip()]
    assert all(len(line) <= 80 for line in columns)
    assert all(part in printed for text in numbers for part in text.split())
    assert "".join(line[:10].strip() for line in columns[1:]).startswith("layers.att")
