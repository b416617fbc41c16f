import json
import math

import torch

from zckpt.containers.unpickler import Record
from zckpt.interchange.engine_state import engine_objects, tied_weights, to_json


def test_values_that_json_has_are_themselves() -> None:
    for value in (None, True, 3, 0.5, "x", [1, [2]], {"a": {"b": []}}):
        assert to_json(value) == value


def test_the_four_marks() -> None:
    assert to_json((0.9, 0.95)) == {"$tuple": [0.9, 0.95]}
    assert to_json({1: "a"}) == {"$pairs": [[1, "a"]]}
    assert to_json({"$x": 1}) == {"$pairs": [["$x", 1]]}
    assert to_json(-math.inf) == {"$float": "-inf"}
    assert to_json(torch.tensor([2], dtype=torch.int64)) == {"$tensor": [2, "int64", [1]]}


def test_what_has_no_spelling_is_told() -> None:
    left: set[str] = set()
    value = {"a": [1, Record("x.Y")], "b": torch.ones(3), "c": b"bytes", "d": {1}}
    assert to_json(value, left, "client_state") == {"a": [1, None], "b": None, "c": None, "d": None}
    assert left == {"client_state.a[1]", "client_state.b", "client_state.c", "client_state.d"}


def test_a_value_that_shares_its_way_to_any_size_is_cut() -> None:
    value: object = "x"
    for _ in range(28):
        value = (value, value)
    left: set[str] = set()
    text = json.dumps(to_json(value, left, "v"))
    assert left
    assert len(text) < 50_000_000
    endless: list[object] = []
    endless.append(endless)
    left.clear()
    to_json(endless, left, "v")
    assert left


def test_objects_have_every_key_of_an_engine() -> None:
    made = engine_objects({"client_state": {"a": 1}}, {"from": "X"})
    assert set(made) == {
        *("client_state", "clock", "optimizer", "scheduler", "scaler", "features", "plan", "imported"),
    }
    assert made["client_state"] == {"a": 1}
    assert made["optimizer"] is None


def test_ties_are_told_with_whole_names_and_forged_ones_are_none() -> None:
    stored = {"model.embed", "optimizer.step.embed"}
    assert tied_weights({"tied": {"head": "embed", "out": "gone", "bad": 3, "embed": "embed"}}, stored) == {
        "model.head": "model.embed"
    }
    assert tied_weights({}, stored) == tied_weights({"tied": ["head", "embed"]}, stored) == {}
