"""Checks of JSON values; errors name the location."""

from typing import Any

import pytest

from zckpt import CheckpointCorrupt, CheckpointStateError, Node

TOP = Node({"a": {"b": [1, "x", None]}, "n": 2.5}, "file: objects", CheckpointStateError)


def test_a_value_is_found_by_its_path() -> None:
    items = TOP.member("a").member("b").items()
    assert [item.value for item in items] == [1, "x", None]
    assert items[1].where == "file: objects['a']['b'][1]"
    assert (items[0].integer(), items[1].text(), TOP.member("n").number()) == (1, "x", 2.5)


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (lambda: TOP.member("c"), "file: objects: has no 'c'"),
        (lambda: TOP.member("n").members(), r"file: objects\['n'\]: must be an object, is 2.5"),
        (lambda: TOP.member("n").integer(), r"file: objects\['n'\]: must be an integer"),
        (lambda: TOP.member("n").number(3), r"file: objects\['n'\]: must be a finite number of at least 3, is 2.5"),
        (lambda: TOP.member("a").items(), r"file: objects\['a'\]: must be an array, is dict"),
        (lambda: TOP.member("c", True).number(), r"objects\['c'\]: must be a finite number, is True"),
        (lambda: TOP.member("c", 10**400).number(), r"objects\['c'\]: must be a finite number"),
    ],
)
def test_a_demand_that_is_not_met_names_the_place(demand: Any, message: str) -> None:
    with pytest.raises(CheckpointStateError, match=message):
        demand()


def test_a_member_may_have_a_default() -> None:
    assert TOP.member("c", {}).members() == {}


def test_without_another_class_it_is_damage() -> None:
    with pytest.raises(CheckpointCorrupt, match="top level: must be a string, is 5"):
        Node(5, "").text()
