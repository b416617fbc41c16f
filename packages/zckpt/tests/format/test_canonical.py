import enum
import math

import numpy as np
import pytest
import torch

from zckpt import CheckpointInputError
from zckpt.format import canonical


class Color(enum.IntEnum):
    RED = 3


def test_plain_values_survive_and_tuples_become_lists() -> None:
    value = {"a": [1, 2.5, None, True, "é\ud800"], "b": {"c": (1, (2,))}, "big": 2**127, "z": -0.0, "e": Color.RED}
    made = canonical.plain(value, "objects")
    assert made["b"] == {"c": [1, [2]]}
    assert type(made["e"]) is int
    again = canonical.load(canonical.dump(made))
    assert again == made
    assert math.copysign(1, again["z"]) == -1


def test_plain_copies_deeply() -> None:
    value = {"a": [1]}
    made = canonical.plain(value, "objects")
    value["a"].append(2)
    assert made == {"a": [1]}


def test_equal_values_have_equal_bytes() -> None:
    assert canonical.dump({"b": 1, "a": 0.1}) == canonical.dump({"a": 0.1, "b": 1}) == b'{"a":0.1,"b":1}'


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": [0, float("nan")]}}, r"objects\['a'\]\['b'\]\[1\] is nan"),
        ({"a": float("-inf")}, r"objects\['a'\] is -inf"),
        ({"a": torch.zeros(1)}, r"objects\['a'\] is a torch.Tensor.*pass a tensor as a shard"),
        ({"a": np.int64(1)}, r"objects\['a'\] is a numpy.int64.*\.item\(\)"),
        ({"a": lambda: 0}, r"objects\['a'\] is a builtins.function"),
        ({"a": {1: 2}}, r"objects\['a'\] has a key 1 of type int"),
        ({"a": 1 << 5000}, r"integer of 5001 bits"),
    ],
)
def test_what_is_not_json_is_refused_with_its_key_path(value: object, words: str) -> None:
    with pytest.raises(CheckpointInputError, match=words):
        canonical.plain(value, "objects")


def test_an_object_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CheckpointInputError, match="deeper than 64"):
        canonical.plain(loop, "objects")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a":1,"b":2,"a":1}', "duplicate key 'a'"),
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"[1e999]", "too large for a float"),
        (b'["\xff"]', "not UTF-8 at byte 2"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1,]", "Expecting value|Illegal trailing comma"),
        (b"[1] 2", "Extra data"),
        (b"9" * 10_000, "digits"),
        (b"", "Expecting value"),
    ],
)
def test_a_strict_reader_refuses_what_is_not_strict_json(text: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        canonical.load(text)
