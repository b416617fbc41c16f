"""Every example in a README or a docstring runs and prints the documented output."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
import repo
import torch

import zcomm

PACKAGE_READMES = [repo.package_folder(name) / "README.md" for name in repo.PACKAGES]
GUIDES = [repo.package_folder("zengine") / "DEEPSPEED.md"]
READMES = [repo.ROOT / "README.md", *PACKAGE_READMES, *GUIDES]
WITH_EXAMPLES = [
    path for name in repo.PACKAGES for path in repo.source_modules(name) if ">>> " in path.read_text(encoding="utf-8")
]
MOST_USED = [  # of what a program calls by name; their examples are among those of their modules
    *(f"zcomm.{name}" for name in ("init", "make_mesh", "traced", "all_reduce", "all_gather", "reduce_scatter")),
    "zcomm.broadcast",
    *(
        f"zprecision.{name}"
        for name in ("inspect", "clip_divisor", "make_scaler", "quantize", "dequantize", "linear")
    ),
    *(f"zpartition.{name}" for name in ("shard", "ZeroPolicy", "Init", "gathered", "plan", "plan_traffic")),
    *(f"zpartition.safe_{name}" for name in ("get_full_fp32_param", "set_full_fp32_param", "get_full_grad")),
    "zpartition.whole_state_dict",
    *(f"zoptim.{name}" for name in ("AdamW", "SGD", "Lion", "Muon", "make_optimizer", "make_schedule")),
    "zoptim.WarmupCosineLR",
    *(f"zckpt.{name}" for name in ("save", "load", "find", "views", "save_async", "list_checkpoints", "prune")),
    *("zengine.initialize", "zengine.config.load", "zengine.config.resolve"),
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
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=place)
def test_the_examples_of_a_module_run(path: Path) -> None:
    result = doctest.testmod(importlib.import_module(repo.module_name(path)))
    close_world()
    assert result.attempted > 0
    assert result.failed == 0


def close_world() -> None:
    """Close the world that an example has made."""
    if torch.distributed.is_initialized():
        zcomm.init().close()


def test_the_most_used_names_have_an_example() -> None:
    assert len(MOST_USED) == 40
    public = (repo.ROOT / "tests/architecture/public_api.txt").read_text(encoding="utf-8").splitlines()
    assert [name for name in MOST_USED if name not in public] == []


@pytest.mark.parametrize("name", MOST_USED)
def test_the_example_of_a_name_runs_in_less_than_a_second(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    (example,) = doctest.DocTestFinder(recurse=False).find(found, name, globs={})
    assert example.examples, "no example"
    for _ in range(2):  # the first run may import
        start = time.process_time()
        assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
        close_world()
        seconds = time.process_time() - start
    assert seconds < 1
