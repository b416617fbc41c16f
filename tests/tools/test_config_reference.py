"""CONFIG.md is the page generated from the table."""

from __future__ import annotations

import config_reference


def test_the_page_is_up_to_date() -> None:
    present = config_reference.PAGE.read_text(encoding="utf-8")
    assert present == config_reference.page(), "run: python tools/config_reference.py --write"


def test_every_honoured_key_has_a_line_with_its_meaning() -> None:
    text = config_reference.page()
    for path, key in config_reference.keys_of(config_reference.Support.HONOURED):
        name = path.rpartition(".")[2]
        assert any(line.startswith(f"| `{name}` |") and key.doc[:20] in line for line in text.splitlines()), path


def test_a_bar_does_not_end_a_cell() -> None:
    assert config_reference.cell("a | b\nc") == "a \\| b c"
