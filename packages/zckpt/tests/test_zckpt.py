"""The package imports its parts on first use, for every public name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zckpt


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


def test_importing_the_package_does_not_import_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, zckpt; assert 'torch' not in sys.modules"], check=True)
