"""`zengine new`: the script runs, goes on after a stop, grows to two ranks unchanged; files are never overwritten."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
from pathlib import Path

import pytest

from zcomm.testing import run_ranks
from zengine.cli import main
from zengine.commands.new import FILES
from zengine.reporting import write_report


def start(folder: str) -> tuple[float, str]:
    """Run the starter's script in its folder; return the held-out loss and the output."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        return runpy.run_path("train.py")["main"](), printed.getvalue()


def test_the_starter_learns_goes_on_and_grows_to_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(tmp_path / "one")]) == 0
    assert main(["new", str(tmp_path / "two")]) == 0
    assert f"  cd {tmp_path / 'two'}\n  python train.py" in capsys.readouterr().out
    [(loss, printed)] = run_ranks(start, 1, str(tmp_path / "one"))
    assert loss < 0.02
    assert "step 16 | " in printed
    [(again, printed)] = run_ranks(start, 1, str(tmp_path / "one"))
    assert again == loss
    assert "step" not in printed  # nothing was left to train
    assert write_report([tmp_path / "one/runs/first"]).is_file()
    [(both, _), (same, silence)] = run_ranks(start, 2, str(tmp_path / "two"))
    assert both == same == pytest.approx(loss, rel=1e-3)  # the order of sums differs
    assert silence == ""


def test_the_starters_config_has_no_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", str(tmp_path)])
    capsys.readouterr()
    assert main(["check", str(tmp_path / "config.json"), "--world", "2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'config.json'}: no problems at world size 2\n"
    steps = json.loads((tmp_path / "config.json").read_text())["scheduler"]["params"]["total_num_steps"]
    assert steps == 4 * 1024 // 32  # epochs, samples, batch of the script


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_exists_stays_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    assert main(["new", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["new", str(tmp_path / "file" / "below")]) == 1
    assert "cannot write to" in capsys.readouterr().err
