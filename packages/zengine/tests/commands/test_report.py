"""`zengine report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zengine.cli import main, make_parser
from zengine.commands import CommandError, report


def call(*arguments: str) -> int:
    return report.run(make_parser().parse_args(["report", *arguments]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    event = {"step": 1, "samples": 4, "time_s": 0.1, "values": {"train/loss": 2.5}}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    return tmp_path


def test_the_page_goes_into_the_run_and_its_place_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(folder)) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert "2.5" in (folder / "report.html").read_text()


def test_the_page_of_the_main_job_stays_and_the_title_is_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """runs/one has a page of its own, and the record of the engine in a folder."""
    run = tmp_path / "one"
    (run / "record").mkdir(parents=True)
    event = {"step": 1, "samples": 4, "time_s": 0.1, "values": {"train/loss": 2.5}}
    (run / "record" / "events.jsonl").write_text(json.dumps(event) + "\n")
    (run / "report.html").write_text("the main job's")
    for folder in (run, run / "record"):
        assert call(str(folder)) == 0
        out = Path(capsys.readouterr().out.strip())
        assert out == run / "record" / "report.html"
        assert "<h1>one</h1>" in out.read_text()
        assert "<title>one: run report</title>" in out.read_text()
    assert (run / "report.html").read_text() == "the main job's"


def test_a_page_of_somebody_else_is_never_overwritten_and_ours_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = "<html><head><title>My report</title></head></html>"
    (folder / "report.html").write_text(theirs)
    for _ in range(2):
        assert call(str(folder)) == 0
        assert capsys.readouterr().out.strip() == str(folder / "zengine-report.html")
    assert (folder / "report.html").read_text() == theirs
    (folder / "report.html").unlink()
    for _ in range(2):
        assert call(str(folder)) == 0
        assert capsys.readouterr().out.strip() == str(folder / "report.html")


def test_the_page_goes_where_it_is_wanted(folder: Path) -> None:
    assert call(str(folder), str(folder), "--out", str(folder / "deep" / "both.html")) == 0
    assert "2 runs side by side" in (folder / "deep" / "both.html").read_text()


def test_a_mistake_is_told(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CommandError, match="no such folder"):
        call(str(tmp_path / "absent"))
    with pytest.raises(CommandError, match="zengine report: "):
        call(str(folder), "--out", str(folder))


def test_it_is_a_command_of_zengine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    assert main(["report", str(folder / "absent")]) == 1
    assert "no such folder" in capsys.readouterr().err
