import io
import json

import pytest

from zckpt.cli.output import Progress, count_text, print_json, size_text, some, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_sizes_have_three_digits() -> None:
    sizes = [0, 999, 1000, 5 << 20, 1497 << 20, 3 << 50]
    assert [size_text(size) for size in sizes] == ["0 B", "999 B", "0.977 KiB", "5 MiB", "1.46 GiB", "3 PiB"]
    assert (count_text(1, "rank"), count_text(2000, "rank")) == ("1 rank", "2,000 ranks")


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table([["a", "n", "b"], ["long", "1,000", ""]], right=(1,)) == ["a         n  b", "long  1,000"]


def test_long_lists_are_cut_and_say_so() -> None:
    assert some(["a", "b", "c"], 2) == ["a", "b", "... and 1 more"]
    assert some(["a", "b", "c"], 0) == some(["a", "b", "c"], 3) == ["a", "b", "c"]


def test_a_terminal_sees_a_bar_that_goes_away_and_a_file_sees_nothing() -> None:
    for stream, drawn in ((Terminal(), True), (io.StringIO(), False)):
        with Progress(100, "step-1", stream) as progress:
            progress.advance(40)
            progress.advance(60)
        text = stream.getvalue()
        assert ("] 100%  100 B of 100 B" in text) is drawn
        assert text.endswith("\r\x1b[K") is drawn
        assert bool(text) is drawn


def test_the_bar_in_words() -> None:
    progress = Progress(4 << 20, "x", io.StringIO(), done_nbytes=1 << 20)
    assert progress.line(2.0) == "x [#######.......................]  25%  1 MiB of 4 MiB, 512 KiB/s"
    assert Progress(0, "x", io.StringIO()).line(0.0) == "x [..............................]   0%  0 B of 0 B"


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"b": (1, 2), "a": None})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, 2]}
