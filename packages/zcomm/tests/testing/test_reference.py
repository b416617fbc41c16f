"""References: naming and finding functions."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import zcomm
from zcomm.testing.reference import FunctionRef, make_reference, resolve


def here() -> str:
    return "here"


class Box:
    @staticmethod
    def inside() -> str:
        return "inside"


def test_a_function_is_its_file_module_and_qualified_name() -> None:
    reference = make_reference(here)
    assert (reference.path, reference.qualname) == (os.path.abspath(__file__), "here")
    assert reference.module == __name__


def test_a_function_of_a_class_is_found() -> None:
    assert resolve(make_reference(Box.inside))() == "inside"


def test_an_installed_function_is_imported_by_name_and_not_loaded_twice() -> None:
    assert resolve(make_reference(zcomm.group_rank)) is zcomm.group_rank


def nested() -> types.FunctionType:
    def inner() -> None:
        """Nothing."""

    return inner


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda: None, "it is a lambda, and a rank process finds functions by file and name. Move it to the top"),
        (nested(), "nested.<locals>.inner: it is defined inside another function"),
        (functools.partial(here), r"takes a module-level function, got .*\(partial\)"),
        (Box().__init__, r"got .*\(method-wrapper\)"),
        (len, r"got len \(builtin_function_or_method\)"),
    ],
    ids=["lambda", "closure", "partial", "method", "builtin"],
)
def test_what_a_rank_could_not_find_is_rejected(fn: types.FunctionType, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_reference(fn)


def test_a_function_without_a_file_is_rejected() -> None:
    space: dict[str, types.FunctionType] = {"__name__": "typed_at_a_prompt"}  # type: ignore[dict-item]
    exec("def typed(): pass", space)
    with pytest.raises(TypeError, match="cannot send typed: it was not defined in a file"):
        make_reference(space["typed"])


@pytest.fixture
def loose_file(tmp_path: Path) -> Iterator[Path]:
    """A file that no import finds; its made-up module name is removed afterwards."""
    yield tmp_path / "loose.py"
    for name in ("madeup", "madeup.folder", "madeup.folder.loose"):
        sys.modules.pop(name, None)


def test_a_loose_file_is_loaded_by_path_once_and_again_when_it_changes(loose_file: Path) -> None:
    loose_file.write_text("def value():\n    return 1\n")
    reference = FunctionRef(str(loose_file), "madeup.folder.loose", "value")
    first = resolve(reference)
    assert first() == 1
    assert resolve(reference) is first
    loose_file.write_text("def value():\n    return 2\n")
    os.utime(loose_file, ns=(1, 1))
    assert resolve(reference)() == 2


def test_a_loose_module_is_importable_under_its_made_up_name(loose_file: Path) -> None:
    loose_file.write_text("class Thing: pass\ndef make(): return Thing()\n")
    made = resolve(FunctionRef(str(loose_file), "madeup.folder.loose", "make"))()
    import pickle

    assert type(pickle.loads(pickle.dumps(made))) is type(made)


def test_a_function_that_is_gone_is_named(loose_file: Path) -> None:
    loose_file.write_text("other = 1\n")
    with pytest.raises(LookupError, match="defines no value at its top level"):
        resolve(FunctionRef(str(loose_file), "madeup.folder.loose", "value"))


def test_a_file_that_fails_to_import_leaves_no_half_module(loose_file: Path) -> None:
    loose_file.write_text("raise OSError('broken file')\n")
    with pytest.raises(OSError, match="broken file"):
        resolve(FunctionRef(str(loose_file), "madeup.folder.loose", "value"))
    assert "madeup.folder.loose" not in sys.modules
