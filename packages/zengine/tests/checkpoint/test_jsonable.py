"""JSON encoding of small state."""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zckpt.interchange.engine_state import MARKS
from zengine.checkpoint.jsonable import RESERVED, decode, encode

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_everything_allowed_survives_json(value):
    assert decode(json.loads(json.dumps(encode(value), allow_nan=False))) == value


def test_tensors_keep_value_dtype_and_shape():
    for tensor in (
        torch.tensor(0.1),
        torch.tensor([3], dtype=torch.int64),
        torch.tensor(math.inf),
        torch.tensor(True),
    ):
        back = decode(json.loads(json.dumps(encode(tensor))))
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)


def test_tensors_of_several_elements_are_handed_to_the_caller_by_name():
    tensors: dict[str, torch.Tensor] = {}
    value = {"ema": [torch.arange(6.0).view(2, 3), torch.tensor(2)], "empty": torch.zeros(0, dtype=torch.int8)}
    text = json.dumps(encode(value, "client_state", tensors), allow_nan=False)
    assert [tuple(each.shape) for each in tensors.values()] == [(2, 3), (0,)]
    read: dict[str, torch.Tensor] = {}
    back = decode(json.loads(text), "client_state", read)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read[name].copy_(tensor)
    assert torch.equal(back["ema"][0], value["ema"][0])
    assert (back["ema"][1], back["empty"].shape, back["empty"].dtype) == (torch.tensor(2), (0,), torch.int8)
    with pytest.raises(
        ValueError, match=r"value is not a valid \$stored: 'model.weight' is not the name of a stored"
    ):
        decode({"$stored": ["model.weight", "float32", [1]]})


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"])
def test_tensors_without_plain_values_are_refused_with_their_place(tensor):
    with pytest.raises(TypeError, match=r"client_state\.a is a Tensor: a checkpoint holds .* paths and tensors;"):
        encode({"a": tensor}, "client_state", {})


def test_paths_dtypes_devices_and_numbers_of_numpy_survive():
    value = {"root": Path("a/b"), "dtype": torch.bfloat16, "device": torch.device("cuda", 1), "rate": np.float32(0.5)}
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_integer_keys_of_a_multi_step_schedule_stay_integers():
    assert decode(json.loads(json.dumps(encode(collections.Counter({3: 1, 7: 2}))))) == {3: 1, 7: 2}


def test_a_dict_that_looks_like_an_encoding_is_not_mistaken_for_one():
    assert decode(encode({"$tuple": [1]})) == {"$tuple": [1]}


@pytest.mark.parametrize(
    "bad", [object(), lambda: 0, {1, 2}, b"x", torch.zeros(2)], ids=lambda bad: type(bad).__name__
)
def test_anything_else_is_refused_with_its_place(bad):
    with pytest.raises(TypeError, match=rf"client_state\.a\[1\] is a {type(bad).__name__}"):
        encode({"a": [0, bad]}, "client_state")


def test_an_unknown_dtype_in_a_file_is_refused():
    with pytest.raises(ValueError, match="this torch has no dtype 'Tensor'"):
        decode({"$tensor": [1, "Tensor", []]})


def test_a_forged_shape_does_not_ask_for_memory():
    (key,) = encode(torch.ones(()))
    with pytest.raises(ValueError, match="a tensor with one number has the shape"):
        decode({key: [0.0, "float32", [10**13]]})


@pytest.mark.parametrize(
    "forged",
    [
        {"$tuple": 5},
        {"$pairs": [[[], 1]]},
        {"$pairs": {"a": 1}},
        {"$pairs": [1]},
        {"$float": []},
        {"$float": "much"},
        {"$tensor": [1]},
        {"$tensor": ["x", "float32", [1]]},
        {"$tensor": [1, "junk", []]},
        {"$tensor": [1, 5, []]},
        {"$tensor": [10**30, "int8", []]},
        {"$tensor": [1, "float32", "x"]},
    ],
    ids=str,
)
def test_what_was_never_encoded_is_refused_with_its_place(forged):
    with pytest.raises(ValueError, match=r"^state\.a\[1\] is not a valid \$"):
        decode({"a": [0, forged]}, "state")


def test_converters_know_the_same_marks() -> None:
    assert RESERVED == MARKS
