from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path

import devenv
import pytest
from devenv import SetupError

PYPROJECT = "packages/zx/pyproject.toml"


class FakeSetup:
    """A checkout in a temporary folder; records calls of `venv` and `pip` instead of running them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []  # one word for each set-up step that ran
        self.failing = ""  # a step whose command contains this word fails
        (root / "packages/zx").mkdir(parents=True)
        (root / "tools").mkdir()
        for name in ("constraints.txt", "requirements-dev.txt", PYPROJECT):
            (root / name).write_text(f"{name}\n")

    def call(self, command: Sequence[str], what: str, lock: int, cwd: Path | None = None) -> None:
        os.fstat(lock)  # the lock is held, and open
        text = " ".join(command)
        self.calls.append(
            next(word for word in ("venv ", "hatchling", "requirements-dev", "hatch_build") if word in text + " ")
        )
        if self.failing and self.failing in text:
            raise SetupError("no index")
        if "-m venv" in text:
            python = devenv.VENV / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
            (devenv.VENV / "pyvenv.cfg").write_text("home = somewhere\nversion = 3.11.7\n")

    def ensure(self) -> list[str]:
        """Run a set-up; return its steps."""
        self.calls.clear()
        devenv.ensure()
        return [call.strip() for call in self.calls]


FULL = ["venv", "hatchling", "requirements-dev"]
UPDATE = ["hatchling", "requirements-dev"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSetup:
    made = FakeSetup(tmp_path)
    venv = tmp_path / ".venv"
    for name, value in {
        "ROOT": tmp_path,
        "VENV": venv,
        "STAMP": venv / "dev-stamp",
        "MARKER": venv / "dev-unfinished",
    }.items():
        monkeypatch.setattr(devenv, name, value)
    monkeypatch.setattr(devenv, "LOG", tmp_path / ".cache" / "setup.log")
    monkeypatch.setattr(devenv, "call", made.call)
    monkeypatch.setattr(devenv, "__file__", str(tmp_path / "tools" / "devenv.py"))
    return made


def test_a_fresh_checkout_gets_everything_and_a_second_set_up_does_nothing(fake: FakeSetup) -> None:
    assert fake.ensure() == FULL
    assert fake.ensure() == []


@pytest.mark.parametrize("changed", ["constraints.txt", "requirements-dev.txt", PYPROJECT])
def test_a_changed_input_runs_pip_again_in_the_same_environment(fake: FakeSetup, changed: str) -> None:
    fake.ensure()
    (fake.root / changed).write_text("other\n")
    assert fake.ensure() == UPDATE
    assert fake.ensure() == []


def test_a_killed_set_up_is_repeated_from_scratch(fake: FakeSetup) -> None:
    fake.ensure()
    devenv.MARKER.touch()  # what a kill leaves behind
    (devenv.VENV / "half-copied").touch()
    assert fake.ensure() == FULL
    assert not (devenv.VENV / "half-copied").exists()


def test_a_killed_deletion_leaves_no_environment(fake: FakeSetup) -> None:
    fake.ensure()
    devenv.VENV.rename(devenv.DISCARDED)  # what the kill of a deletion leaves behind
    assert fake.ensure() == FULL
    devenv.discard()
    assert not devenv.VENV.exists()
    assert not devenv.DISCARDED.exists()


def test_a_set_up_that_failed_is_continued(fake: FakeSetup) -> None:
    fake.failing = "requirements-dev"
    with pytest.raises(SetupError, match="no index"):
        devenv.ensure()
    assert not devenv.is_current()
    fake.failing = ""
    assert fake.ensure() == UPDATE


def test_an_environment_that_could_not_be_made_is_made_again(fake: FakeSetup) -> None:
    fake.failing = "-m venv"
    with pytest.raises(SetupError):
        devenv.ensure()
    fake.failing = ""
    assert fake.ensure() == FULL


def test_an_environment_whose_interpreter_is_gone_is_made_again(fake: FakeSetup) -> None:
    fake.ensure()
    (devenv.VENV / "bin" / "python").unlink()
    assert fake.ensure() == FULL


def test_an_environment_of_another_checkout_is_made_again(fake: FakeSetup) -> None:
    fake.ensure()
    devenv.STAMP.write_text(devenv.STAMP.read_text().replace(str(fake.root), "/elsewhere/checkout"))
    assert fake.ensure() == FULL


def test_an_environment_made_by_hand_is_adopted(fake: FakeSetup) -> None:
    fake.ensure()
    devenv.STAMP.unlink()
    assert fake.ensure() == UPDATE


def test_kernels_are_built_when_their_sources_change_and_only_then(fake: FakeSetup) -> None:
    csrc = fake.root / "packages/zx/src/zx/csrc"
    csrc.mkdir(parents=True)
    (fake.root / "packages/zx/hatch_build.py").write_text("# builds\n")
    (csrc / "kernel.c").write_text("int one;\n")
    assert fake.ensure() == [*FULL, "hatch_build"]
    assert fake.ensure() == []
    (csrc / "kernel.c").write_text("int two;\n")
    assert fake.ensure() == ["hatch_build"]
    assert fake.ensure() == []


def test_a_second_set_up_waits_for_the_first(fake: FakeSetup, capsys: pytest.CaptureFixture[str]) -> None:
    order = []

    def wait() -> None:
        with devenv.exclusive():
            order.append("second")

    with devenv.exclusive():
        other = threading.Thread(target=wait)
        other.start()
        other.join(0.2)
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]
    assert "another set-up of this checkout is running" in capsys.readouterr().out


def test_the_digest_depends_on_names_contents_and_boundaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devenv, "ROOT", tmp_path)

    def digest(**contents: str) -> str:
        for name, text in contents.items():
            (tmp_path / name).write_text(text)
        return devenv.digest([tmp_path / name for name in contents])

    different = [
        digest(a="1", b="2"),
        digest(a="2", b="1"),
        digest(a="12", b=""),
        digest(a="", b="12"),
        digest(a="1"),
    ]
    assert len(set(different)) == len(different)
    assert digest(a="1", b="2") == different[0]
    assert devenv.digest([], "3.11.7") != devenv.digest([], "3.12.1")


def test_the_version_of_an_environment_is_read_from_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devenv, "VENV", tmp_path)
    assert devenv.venv_version() == ""
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\nexecutable = x\n")
    assert devenv.venv_version() == "3.11.7"


def test_children_see_the_environment_as_activated_and_no_foreign_settings() -> None:
    given = {"PATH": "/usr/bin", "KEPT": "1", **dict.fromkeys(devenv.FOREIGN_SETTINGS, "/else")}
    result = devenv.child_environment(given)
    assert result["PATH"].split(os.pathsep) == [str(devenv.VENV / "bin"), "/usr/bin"]
    assert result["KEPT"] == "1"
    assert not {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PYTHONDONTWRITEBYTECODE"} & set(result)


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0", "no package index in reach"),
        ("WARNING: Retrying ... NewConnectionError('refused')", "no package index in reach"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("The virtual environment was not created because ensurepip is not available", "python3-venv"),
    ],
)
def test_a_failed_step_is_explained_with_its_cause_and_its_last_lines(output: str, cause: str) -> None:
    message = devenv.explain("installing", 1, "first\n" * 50 + output)
    assert re.search(f"likely cause: .*{cause}", message)
    assert output in message
    assert message.count("first") < 15


def test_a_failed_step_without_a_known_cause_guesses_none() -> None:
    assert "likely" not in devenv.explain("installing", 1, "something odd")


def test_an_old_python_raises_with_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 8, 18))
    with pytest.raises(SetupError, match=r"Python 3\.8\.18.*needs Python 3\.11.*`python3\.11`"):
        devenv.check_python()


def test_set_up_imports_nothing_heavy() -> None:
    """Every command imports devenv, so its imports delay each verb."""
    code = "import sys; before = set(sys.modules); import dev; print(*sorted(set(sys.modules) - before))"
    folder = str(Path(__file__).parents[2] / "tools")
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    heavy = {"argparse", "dataclasses", "inspect", "json", "logging", "typing", "tempfile", "asyncio", "torch"}
    assert not heavy & set(done.stdout.split()), textwrap.shorten(done.stdout, 500)
