"""Command table: names, exit status, output streams."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zengine
from zengine.cli import COMMANDS, main
from zengine.commands import CommandError


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself_under_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: zengine {name}")


def test_the_list_of_commands_says_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name in COMMANDS:
        told = out.partition(f"\n    {name} ")[2] or out.partition(f"\n    {name}\n")[2]
        assert told.split()[0] not in COMMANDS, name


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"zengine {zengine.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_shell_gets_a_script_with_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as caught:
        main(["--print-completion", shell])
    assert caught.value.code == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)


def test_completion_without_shtab_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as caught:
        main(["--print-completion", "bash"])
    assert caught.value.code == 1
    assert "pip install shtab" in capsys.readouterr().err


def test_help_imports_no_torch() -> None:
    script = """
import contextlib, io, sys
from zengine.cli import COMMANDS, main
for arguments in ([], *([name] for name in COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*arguments, "--help"])
assert 'torch' not in sys.modules and 'numpy' not in sys.modules, sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("arguments", [[], ["explain", "x.json"], ["check", "x.json", "--world-size", "0"], ["x"]])
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: zengine" in capsys.readouterr().err


def test_what_a_person_can_mend_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise CommandError("mend this")

    monkeypatch.setattr("zengine.commands.config.run_check", run)
    assert main(["check", "x.json"]) == 1
    assert capsys.readouterr() == ("", "mend this\n")


def test_the_module_runs(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text('{"train_batch_size": 8}')
    command = [sys.executable, "-m", "zengine", "check", "good.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "zengine", "env"], stdout=pipe, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")
