"""Every example in a README or a docstring runs and prints the documented output."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import repo

PACKAGE_READMES = [repo.package_folder(name) / "README.md" for name in repo.PACKAGES]
GUIDES = [repo.package_folder("zengine") / "DEEPSPEED.md"]
READMES = [repo.ROOT / "README.md", *PACKAGE_READMES, *GUIDES]
WITH_EXAMPLES = [
    path for name in repo.PACKAGES for path in repo.source_modules(name) if ">>> " in path.read_text(encoding="utf-8")
]


def place(path: Path) -> str:
    return path.relative_to(repo.ROOT).as_posix()


@pytest.mark.parametrize("path", PACKAGE_READMES, ids=place)
def test_the_readme_of_a_package_has_an_example_that_can_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "```python\n>>> " in text, f"{place(path)}: begin a ```python block with >>>"


@pytest.mark.parametrize("path", READMES, ids=place)
def test_the_example_of_a_readme_runs_as_a_doctest(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "doctest", str(path)]  # in a process of its own, because of its world
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=place)
def test_the_examples_of_a_module_run(path: Path) -> None:
    result = doctest.testmod(importlib.import_module(repo.module_name(path)))
    assert result.attempted > 0
    assert result.failed == 0
