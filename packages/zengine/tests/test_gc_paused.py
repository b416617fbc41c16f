"""`gc_paused` disables the collector inside and restores it afterwards."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from zengine.imports import gc_paused


def test_it_rests_inside_also_when_nested_and_after_an_exception():
    assert gc.isenabled()
    with gc_paused(), gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


class Node:
    itself: Node


@pytest.fixture
def thawed() -> Iterator[None]:
    """Let no object be frozen, as in a program that freezes none."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if is_frozen:
        gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_what_imports_make_inside_counts_as_old_and_is_collected_all_the_same(monkeypatch: pytest.MonkeyPatch):
    with gc_paused():
        monkeypatch.setitem(sys.modules, "imported_inside", sys)
        node, garbage = Node(), Node()
        node.itself, garbage.itself = node, garbage
        alive, dropped = weakref.ref(node), weakref.ref(garbage)
        del garbage
        assert dropped() is not None
    assert dropped() is None  # as the classes that attrs replaces
    assert gc.get_freeze_count() == 0
    del node
    gc.collect(0)
    assert alive() is not None
    gc.collect()
    assert alive() is None


def test_without_an_import_no_object_counts_as_older():
    with gc_paused():
        node = Node()
        node.itself = node
        alive = weakref.ref(node)
        del node
    gc.collect(0)
    assert alive() is None


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
