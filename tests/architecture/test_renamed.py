"""An old public name raises an error that names the new one, as an attribute and in `from ... import`."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

PACKAGES = ("zcomm", "zprecision", "zpartition", "zoptim", "zckpt", "zengine")


def _renames() -> list[tuple[str, str, str]]:
    """Yield (module, old name, dotted path of the new name) of every table RENAMED."""
    found = []
    for package in map(importlib.import_module, PACKAGES):
        modules = [
            package.__name__,
            *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.") if m.ispkg),
        ]
        for name in modules:
            table = vars(importlib.import_module(name)).get("RENAMED", {})
            found += [(name, old, new if "." in new else f"{name}.{new}") for old, new in table.items()]
    return found


RENAMES = _renames()


def test_the_walk_reaches_every_package() -> None:
    assert {module.partition(".")[0] for module, _, _ in RENAMES} == set(PACKAGES)


@pytest.mark.parametrize(("module", "old", "new"), RENAMES)
def test_an_old_name_raises_an_error_that_names_the_new_one(module: str, old: str, new: str) -> None:
    home, _, name = new.rpartition(".")
    assert hasattr(importlib.import_module(home), name)
    package = importlib.import_module(module)
    assert old not in getattr(package, "__all__", [])
    text = re.escape(f"{module}.{old} was renamed in 0.3.0; use {new}.")
    with pytest.raises(AttributeError, match=text):
        getattr(package, old)
    with pytest.raises(ImportError, match=text):
        exec(f"from {module} import {old}")


@pytest.mark.parametrize("module", sorted({module for module, _, _ in RENAMES}))
def test_a_name_that_never_was_has_no_attribute(module: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        importlib.import_module(module).nothing  # noqa: B018
