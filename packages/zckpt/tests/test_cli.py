"""The command line as scripts use it: arguments, exit status, stdout and stderr."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt import save, whole
from zckpt.cli import main
from zckpt.cli.output import ABSENT, CORRUPT, FAILED, OK, USAGE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        shards = [whole("w", torch.rand(3, 4)), whole("s", torch.tensor(1))]
        save(tmp_path, f"step-{step}", shards=shards, objects={"scheduler": {}}, rank_objects={"rng": 1}, step=step)
    return tmp_path


COMMANDS = ["ls", "inspect", "show", "verify", "diff", "export", "import", "prune"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_its_status(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == OK
    assert "exit status:" in out
    assert "2  wrong usage, no such checkpoint, or never committed" in out


def test_help_version_and_arguments_need_no_torch() -> None:
    for arguments in ("--help", "--version", "verify --help", "prune"):
        code = (
            "import sys\n"
            "from zckpt.cli import main\n"
            "try: main(sys.argv[1:])\n"
            "except SystemExit: pass\n"
            "assert not {'torch', 'numpy', 'attrs'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code, *arguments.split()], check=True, capture_output=True)


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (OK, f"zckpt {zckpt.__version__}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts_know_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as stopped:
        main(["--print-completion", shell])
    out = capsys.readouterr().out
    assert stopped.value.code == OK
    assert all(command in out for command in COMMANDS)


def test_completion_without_shtab_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stopped:
        main(["--print-completion", "bash"])
    assert stopped.value.code == USAGE
    assert "pip install 'zckpt[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "prune --last 1", "export --to hf"])
def test_nothing_there_is_status_two(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    verb, *options = command.split()
    for name in ("none", "empty") if verb != "prune" else ("none",):
        arguments = [verb, str(tmp_path / name), *options]
        assert main(arguments + ([str(tmp_path / "out")] if verb == "export" else [])) == ABSENT
    assert "is not a folder" in capsys.readouterr().err


def test_usage_errors_are_status_two(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["frob"], ["diff", str(root)], ["prune", str(root)]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == USAGE
    capsys.readouterr()
    assert main(["prune", str(root), "--last", "0"]) == USAGE
    assert main(["inspect", str(root / "step-1"), "--tag", "step-2"]) == USAGE
    assert main(["inspect", "nosuchscheme://x"]) == USAGE
    err = capsys.readouterr().err
    for words in ("last must be an int of at least 1, given 0", "leave out --tag, or pass the root", "cannot serve"):
        assert words in err


def test_a_refusing_disk_is_status_three(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import errno

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    assert main(["verify", str(root / "step-1")]) == FAILED
    assert "Permission denied (EACCES)" in capsys.readouterr().err


def test_damage_is_status_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "step-2" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["inspect", str(root / "step-2")]) == CORRUPT
    assert "damaged: " in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback(root: Path) -> None:
    command = [sys.executable, "-m", "zckpt", "inspect", str(root), "--tensors", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == FAILED


def test_it_runs_as_a_module(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((["verify", str(root)], OK), ([], USAGE)):
        monkeypatch.setattr(sys, "argv", ["zckpt", *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_module("zckpt", run_name="__main__")
        assert stopped.value.code == status
    out, err = capsys.readouterr()
    assert ("sound" in out, "usage: zckpt" in err) == (True, True)
