"""The line that is overwritten."""

import io
import sys

import pytest

from zengine.telemetry.sinks.live import NoLiveLine, PlainLine, RichLine, make_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_log_gets_only_what_stays(capsys):
    line = make_line(io.StringIO())
    assert isinstance(line, NoLiveLine)
    line.show(lambda: 1 / 0)
    line.print_above("step 1")
    line.close()
    assert capsys.readouterr().out == "step 1\n"


def test_a_terminal_without_rich_is_written_with_carriage_returns(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(make_line(Terminal()), PlainLine)


def screen(text):
    """The lines that one sees: a carriage return goes back to the start of the line."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_a_newer_text_replaces_the_older_but_not_too_often():
    clock, stream = Clock(), Terminal()
    line = PlainLine(stream, clock)
    line.show(lambda: "a long text about step 1")
    line.show(lambda: 1 / 0)  # too early: it is not even made
    clock.now = 1.0
    line.show(lambda: "step 2")
    assert screen(stream.getvalue()) == ["step 2"]
    line.print_above("this stays\nand this")
    clock.now = 2.0
    line.show(lambda: "step 3")
    assert screen(stream.getvalue()) == ["this stays", "and this", "step 3"]
    line.close()
    line.close()
    assert screen(stream.getvalue()) == ["this stays", "and this", ""]


def test_rich_draws_it_where_it_is_installed():
    pytest.importorskip("rich")
    clock, stream = Clock(), Terminal()
    line = make_line(stream)
    assert isinstance(line, RichLine)
    line._clock = clock
    clock.now = 5.0
    line.show(lambda: "step 1 [not markup]")
    line.show(lambda: 1 / 0)
    line.print_above("this stays [too]")
    line.close()
    assert "step 1 [not markup]" in stream.getvalue()
    assert "this stays [too]" in stream.getvalue()
