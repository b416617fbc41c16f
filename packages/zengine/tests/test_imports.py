"""Lazy names are imported once, on first use; unknown and old names raise."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from zengine.imports import lazy_attributes


def test_a_name_is_imported_on_first_use_and_kept(monkeypatch):
    package = types.ModuleType("lazy_example")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    package.__getattr__ = lazy_attributes(package.__name__, {"OrderedDict": "collections"})
    assert "OrderedDict" not in vars(package)
    from collections import OrderedDict

    assert package.OrderedDict is OrderedDict
    assert vars(package)["OrderedDict"] is OrderedDict
    with pytest.raises(AttributeError, match="module 'lazy_example' has no attribute 'Other'"):
        package.Other  # noqa: B018 - the look is the test


def test_an_old_name_is_an_error_that_has_the_new_one(monkeypatch):
    package = types.ModuleType("renamed_example")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    package.__getattr__ = lazy_attributes(package.__name__, {}, {"Old": "renamed_example.New"})
    with pytest.raises(
        AttributeError, match=r"renamed_example\.Old was renamed in 0\.3\.0; use renamed_example\.New\."
    ):
        package.Old  # noqa: B018 - the look is the test
    with pytest.raises(ImportError):
        from renamed_example import Old  # noqa: F401


def test_an_engine_of_a_whole_model_loads_nothing_that_splits_models():
    script = """
import logging, sys
logging.disable()
from torch import nn
import zengine
zengine.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
splits = ("tensor", "pipeline", "sequence", "experts", "activations")
print([name for name in sys.modules if name.startswith("zpartition.") and name.split(".")[1] in splits])
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
