"""Old public names: each raises an error that gives the new one."""

from __future__ import annotations

import importlib

import pytest

PACKAGES = [f"zpartition.{name}" for name in ("activations", "experts", "pipeline", "sequence", "tensor")]


@pytest.mark.parametrize("package", PACKAGES)
def test_an_old_name_raises_with_the_new_one(package: str) -> None:
    module = importlib.import_module(package)
    for old, new in module.RENAMED.items():
        assert hasattr(module, new), new
        assert new in module.__all__
        assert old not in module.__all__
        with pytest.raises(AttributeError, match=rf"{package}\.{old} has been renamed to {package}\.{new} "):
            getattr(module, old)
        with pytest.raises(ImportError, match=rf"{package}\.{old} has been renamed to {package}\.{new} "):
            exec(f"from {package} import {old}")


def test_a_name_that_never_was_raises_as_ever() -> None:
    module = importlib.import_module("zpartition.tensor")
    with pytest.raises(AttributeError, match=r"module 'zpartition.tensor' has no attribute 'nothing'"):
        _ = module.nothing
    assert not hasattr(module, "nothing")
