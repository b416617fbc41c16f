"""The package imports its parts on first use, and says so of every public name."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import zckpt
import zckpt.interchange


def test_every_public_name_is_there_and_a_typo_is_not() -> None:
    for name in zckpt.__all__:
        assert getattr(zckpt, name) is not None
        assert name in dir(zckpt)
    assert callable(zckpt.views)
    with pytest.raises(AttributeError, match="'zckpt' has no attribute 'sav'"):
        zckpt.sav  # noqa: B018


def test_what_saves_is_imported_when_something_is_saved() -> None:
    code = (
        "import sys, zckpt; assert 'zckpt.saving.commit' not in sys.modules; zckpt.save; "
        "assert 'zckpt.saving.commit' in sys.modules; assert callable(zckpt.views)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", [zckpt, zckpt.interchange], ids=["zckpt", "interchange"])
def test_an_old_name_is_an_error_that_names_the_new_one(package: types.ModuleType) -> None:
    for old, new in package.RENAMED.items():
        assert new in package.__all__
        with pytest.raises(AttributeError, match=f"{package.__name__}.{old} has been renamed to .*{new}"):
            getattr(package, old)
        with pytest.raises(ImportError, match=f"cannot import name '{old}'"):
            exec(f"from {package.__name__} import {old}")


def test_importing_the_package_does_not_import_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, zckpt; assert 'torch' not in sys.modules"], check=True)
