from __future__ import annotations

from pathlib import Path

import pytest
import sources

EXAMPLE = '''
"""A module."""
import torch
import zcomm
from typing import TYPE_CHECKING
from . import near
from ..far import thing
if TYPE_CHECKING:
    from zckpt import Checkpoint
else:
    import numpy

def public(a: zcomm.World, *, b, **c):
    """Two lines
    of docstring."""
    import cupy
    return zcomm.all_reduce(a, zcomm.testing)

class Shown:
    flag: bool

    def __init__(self, x): self.x = x

    def _hidden(self): return importlib.import_module("wandb")

    @classmethod
    def made(cls, x):
        def inner(y): return torch.distributed.fsdp(y)
        return inner(x)

__all__ = ["public", "Shown"]
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "src" / "zx" / "part" / "module.py"
    made.parent.mkdir(parents=True)
    made.write_text(EXAMPLE)
    return made


def test_imports_are_found_with_when_they_run(path: Path) -> None:
    found = {(i.module, i.name): (i.at_import, i.for_types) for i in sources.imports(path)}
    assert found["torch", ""] == (True, False)
    assert found["numpy", ""] == (True, False)
    assert found["zckpt", "Checkpoint"] == (False, True)
    assert found["cupy", ""] == (False, False)
    assert found["wandb", ""] == (False, False)


def test_relative_imports_are_given_by_their_absolute_name(path: Path) -> None:
    found = {(item.module, item.name) for item in sources.imports(path)}
    assert {("zx.part", "near"), ("zx.far", "thing")} <= found


def test_the_used_names_of_a_package_are_found_through_its_module(path: Path) -> None:
    assert sources.uses(path, "zcomm") == {"all_reduce", "testing", "World"}
    assert sources.uses(path, "zcomm", with_types=False) == {"all_reduce", "testing"}
    assert sources.uses(path, "zckpt") == {"Checkpoint"}
    assert sources.uses(path, "zckpt", with_types=False) == set()


def test_functions_are_measured_without_docstring_self_and_cls(path: Path) -> None:
    found = {f.name: f for f in sources.functions(path)}
    assert (found["public"].num_lines, found["public"].num_parameters) == (3, 3)
    assert found["Shown.__init__"].num_parameters == 1
    assert found["Shown.made"].num_parameters == 1
    assert found["Shown.made"].num_lines == 3


def test_public_functions_are_those_without_a_leading_underscore(path: Path) -> None:
    assert {f.name for f in sources.functions(path) if f.is_public} == {"public", "Shown.__init__", "Shown.made"}


def test_dotted_names_are_given_whole(path: Path) -> None:
    names = [name for name, _ in sources.dotted_names(path)]
    assert "torch.distributed.fsdp" in names
    assert "torch.distributed" not in names


def test_the_public_list_is_read_without_importing(path: Path) -> None:
    assert sources.public_names(path) == ["public", "Shown"]
    path.with_name("bare.py").write_text("x = 1\n")
    assert sources.public_names(path.with_name("bare.py")) is None
