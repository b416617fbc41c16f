from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dev
import devenv
import pytest
from devenv import SetupError

DEV = Path(__file__).parents[2] / "tools" / "dev.py"


def run_dev(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEV), *arguments], capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.parametrize(
    ("argv", "parsed"),
    [
        (["test"], ("test", [], False)),
        (["test", "-k", "foo", "--here"], ("test", ["-k", "foo", "--here"], False)),
        (["train", "--steps", "20", "--help"], ("train", ["--steps", "20", "--help"], False)),
        (["--here", "check", "--fast"], ("check", ["--fast"], True)),
        (["--help"], ("help", [], False)),
        ([], ("help", [], False)),
    ],
)
def test_arguments_after_the_verb_go_to_the_verb(argv: list[str], parsed: tuple[str, list[str], bool]) -> None:
    assert dev.parse(argv) == parsed


def test_a_misspelt_verb_suggests_the_nearest_one() -> None:
    done = run_dev("tset")
    assert done.returncode == 2
    assert done.stderr == "dev: unknown verb 'tset': did you mean 'test'?\n"


def test_an_unknown_verb_lists_all_verbs() -> None:
    with pytest.raises(SetupError, match="choose one of train, test, check, build, bench, matrix, docs, clean"):
        dev.parse(["frobnicate"])


def test_the_usage_lists_every_verb_with_its_line() -> None:
    done = run_dev()
    assert done.returncode == 0
    for name, verb in dev.VERBS.items():
        assert f"  {name:7}{verb.__doc__}" in done.stdout


def test_the_tests_run_with_four_workers_by_default() -> None:
    command = dev.pytest_command("python", ["packages/zoptim", "-n", "0"])
    assert command[:5] == ["python", "-m", "pytest", "-n", "4"]
    assert command[-3:] == ["packages/zoptim", "-n", "0"]


def test_the_simulated_device_is_chosen_by_variables_and_a_plugin() -> None:
    assert dev.on_device(["-k", "mover"], {"A": "1"}) == (["-k", "mover"], {"A": "1"})
    arguments, environ = dev.on_device(["--device", "simulated", "tests/simulated", "-x"], {"PYTHONPATH": "mine"})
    assert arguments == ["-p", "simulated_cuda.plugin", "tests/simulated", "-x"]
    assert environ["PYTHONPATH"].startswith(str(DEV.parent / "simulated_cuda" / "site") + os.pathsep)
    assert environ["PYTHONPATH"].endswith(os.pathsep + "mine")
    chosen, _ = dev.on_device(["--device", "simulated"], {})
    assert "tests/simulated" in chosen, "without a path, the selection"
    with pytest.raises(SetupError, match="--device simulated"):
        dev.on_device(["--device", "gpu"], {})


def test_training_goes_to_the_launcher_of_the_main_job() -> None:
    command = dev.train_command("python", ["--steps", "20"])
    assert command == ["python", "tools/train/launch.py", "--steps", "20"]
    assert (devenv.ROOT / command[1]).is_file()


def test_here_runs_this_interpreter_with_the_sources_on_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    python, environ = dev.prepare(here=True)
    assert python == sys.executable
    parts = environ["PYTHONPATH"].split(os.pathsep)
    assert str(devenv.ROOT / "packages" / "zcomm" / "src") in parts
    assert len(parts) == 7
    assert parts[-1] == "/mine"


@pytest.mark.parametrize("verb", [dev.build, dev.clean])
def test_verbs_without_arguments_reject_them_before_doing_anything(verb: object) -> None:
    assert callable(verb)
    with pytest.raises(SetupError, match="takes no arguments"):
        verb(["everything"], False)


def test_the_exit_code_of_a_command_is_passed_on() -> None:
    assert dev.run([sys.executable, "-c", "import sys; sys.exit(3)"], dict(os.environ)) == 3
