"""Reading what a run left, whole or not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from zengine.reporting.runs import NoRunError, read_run


@pytest.mark.parametrize(
    ("place", "name"), [("a", "a"), ("a/run", "a"), ("a/record", "a"), ("a/DeepSpeedJobName", "a")]
)
def test_a_run_is_called_by_the_folder_that_has_a_name_of_its_own(tmp_path: Path, place: str, name: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    event = {"step": 1, "samples": 4, "time_s": 0.1, "values": {"train/loss": 2.5}}
    (tmp_path / place / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert read_run(tmp_path / place).name == name
    assert read_run(tmp_path / "a").name == "a"


def line(step: int, time_s: float = 0.0, **values: Any) -> str:
    return json.dumps({"step": step, "samples": step * 4, "time_s": time_s, "values": values}) + "\n"


def write(folder: Path, *lines: str, **files: Any) -> Path:
    (folder / "events.jsonl").write_text("".join(lines))
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


RECORD = {
    "started": "2026-01-01T00:00:00",
    "config": {"train_batch_size": 4},
    "plan": [["train_batch_size", 4, "dict"], ["steps_per_print", "never", "default"]],
    "environment": {"torch": "2.6", "world_size": 2},
}


def test_a_whole_run_has_no_remarks(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, line(1, 0.5, loss=2.0), line(2, 1.0, loss="NaN", lr="Infinity"), run=RECORD))
    assert run.remarks == ()
    assert run.name == tmp_path.name
    assert run.seconds == 1.0
    assert run.points("loss")[0] == (1.0, 2.0)
    assert math.isnan(run.points("loss")[1][1])
    assert run.points("lr") == [(2.0, math.inf)]
    assert run.points("absent", "lr") == run.points("lr")
    assert run.tags("l") == ["loss", "lr"]
    assert [(row.key, row.value, row.is_default) for row in run.plan] == [
        ("train_batch_size", "4", False),
        ("steps_per_print", "never", True),
    ]
    assert run.environment == {"torch": "2.6", "world_size": "2"}


def test_a_line_that_a_kill_cut_short_is_left_out_and_said(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, line(1), line(2), line(3)[:25], run=RECORD))
    assert [event.step for event in run.events] == [1, 2]
    assert run.remarks == ("the last line of events.jsonl is incomplete: the run was killed while writing it",)


@pytest.mark.parametrize(
    "damage",
    ["not json\n", "[]\n", '{"step": 1}\n', '{"step": "x", "samples": 1, "time_s": 1, "values": {}}\n', "\n"],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, damage: str) -> None:
    run = read_run(write(tmp_path, line(1), damage, line(2), run=RECORD))
    assert [event.step for event in run.events] == [1, 2]
    assert run.remarks == ("events.jsonl has lines that cannot be read and are left out: 2 of 3",)


def test_steps_that_were_done_again_count_as_they_were_done_last(tmp_path: Path) -> None:
    lines = [line(step, step * 1.0, loss=1.0) for step in (1, 2, 3, 4)]
    again = [line(step, time_s, loss=9.0) for step, time_s in ((3, 0.5), (4, 1.5))]
    run = read_run(write(tmp_path, *lines, *again, run=RECORD))
    assert run.points("loss") == [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0)]
    assert run.seconds == 4.0 + 1.5
    shorter = read_run(write(tmp_path, *lines, line(2, 0.5, loss=9.0), run=RECORD))
    assert [event.step for event in shorter.events] == [1, 2]  # what came after the checkpoint never happened


@pytest.mark.parametrize(
    ("record", "remark"),
    [("{", "run.json cannot be read"), ("[1]", "run.json does not hold an object"), ("", "run.json cannot be read")],
)
def test_a_damaged_record_leaves_the_curves(tmp_path: Path, record: str, remark: str) -> None:
    run = read_run(write(tmp_path, line(1), run=record))
    assert len(run.events) == 1
    assert run.remarks[0].startswith(remark)


def test_odd_contents_of_a_record_are_left_out(tmp_path: Path) -> None:
    odd = {"plan": [["a", 1], "b", ["c", None, "dict"]], "config": 3, "environment": ["x"]}
    run = read_run(write(tmp_path, line(1), run=odd))
    assert [row.key for row in run.plan] == ["c"]
    assert (run.config, run.environment) == ({}, {})


def test_damaged_profiles_are_left_out_and_said(tmp_path: Path) -> None:
    files = {"flops": {"modules": []}, "comms.rank0": {"rank": 0}, "comms.rank1": {"rank": 1, "messages": []}}
    run = read_run(write(tmp_path, line(1), run=RECORD, **files))
    assert run.flops == ()
    assert run.comms == {1: []}
    assert [remark.split(" has")[0] for remark in run.remarks] == ["flops.json", "comms.rank0.json"]


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, line(1), run=RECORD)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b"\xff\x00\x80")
    assert len(read_run(tmp_path).events) == 1


def test_a_folder_without_a_run_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match=r"jsonl_monitor"):
        read_run(tmp_path)
    with pytest.raises(NoRunError, match="no such folder"):
        read_run(tmp_path / "absent")


def test_the_record_alone_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RECORD))
    assert read_run(tmp_path).remarks == ("there is no events.jsonl: there are no curves",)


def test_a_folder_around_one_run_stands_for_it_and_around_several_names_them(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"config": "of something else"}')
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, line(1), run=RECORD)
        if name == "a":
            run = read_run(tmp_path)
            assert (run.name, run.folder, run.remarks) == (tmp_path.name, tmp_path / "a", ())
    with pytest.raises(NoRunError, match=r"contains 2 runs.*/a .*/b"):
        read_run(tmp_path)
