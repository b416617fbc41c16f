"""A name is imported once, from its home; one that has none is no attribute."""

from __future__ import annotations

import sys
import types

import pytest

from zengine.lazily import importing


def test_a_name_is_imported_on_first_use_and_kept(monkeypatch):
    package = types.ModuleType("lazy_example")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    package.__getattr__ = importing(package.__name__, {"OrderedDict": "collections"})
    assert "OrderedDict" not in vars(package)
    from collections import OrderedDict

    assert package.OrderedDict is OrderedDict
    assert vars(package)["OrderedDict"] is OrderedDict
    with pytest.raises(AttributeError, match="module 'lazy_example' has no attribute 'Other'"):
        package.Other  # noqa: B018 - the look is the test
