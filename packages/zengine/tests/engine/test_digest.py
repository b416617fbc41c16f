"""Equal values have equal digests, different values different ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zengine.engine.digest import SAMPLE_NUMEL, fingerprint, is_fixed, mix, to_plain, value_code


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (True, 1),
        (0.0, -0.0),
        (float("nan"), -float("nan")),
        ((0.9, 1), [0.9, 1.0]),
        (torch.tensor(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.arange(2), [0, 1]),
        ({"a": 1, "b": (2,)}, {"b": [2], "a": 1.0}),
        (object(), object()),
        (None, None),
    ],
)
def test_equal_values_have_one_code(one: object, other: object) -> None:
    assert value_code("lr", one) == value_code("lr", other)
    assert to_plain(one) == to_plain(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.1 + 2**-55),
        (-1, -2),
        (0.1, torch.tensor(0.1)),
        (np.float32(0.1), np.float32(0.2)),
        (torch.bfloat16, torch.float16),
        (None, 0),
        ("a", "b"),
        ((0.9, 0.999), (0.999, 0.9)),
        (float("nan"), float("inf")),
        ({"a": 1}, {"a": 2}),
    ],
)
def test_other_values_have_other_codes(one: object, other: object) -> None:
    assert value_code("lr", one) != value_code("lr", other)


def test_a_name_counts() -> None:
    assert value_code("0 lr", 0.1) != value_code("1 lr", 0.1)


def test_what_may_change_in_place_is_not_fixed() -> None:
    assert all(map(is_fixed, [1, 0.5, None, "text", True, (0.9, (1, "a"))]))
    assert not any(map(is_fixed, [[0.9], torch.tensor(1.0), (torch.tensor(1.0),), {}, ([],)]))


def test_salt_changes_all_bits_of_a_digest() -> None:
    one, other = (torch.tensor([mix(number, salt) & 0x3FFFF for salt in range(4096)]) for number in (1, 2))
    assert int((one == other).sum()) < 3  # expected 4096 / 2**18
    flips = sum((one >> bit & 1) != (other >> bit & 1) for bit in range(18)).sum() / (18 * 4096)  # type: ignore[union-attr]
    assert 0.48 < float(flips) < 0.52


def found(tensor: torch.Tensor, name: str = "x") -> int:
    return int(fingerprint(tensor, name))


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e4m3fn])
def test_each_element_counts_and_so_does_its_place(dtype: torch.dtype) -> None:
    numbers = torch.arange(1, 61).remainder(13)
    values = numbers.to(dtype)
    assert found(values) == found(values.clone())
    for index in (0, 31, 59):
        changed = numbers.clone()
        changed[index] = not numbers[index]
        assert found(changed.to(dtype)) != found(values)
    assert found(numbers.flip(0).to(dtype)) != found(values)


def test_sums_that_are_equal_do_not_hide_a_difference() -> None:
    assert found(torch.tensor([1, 2, 1])) != found(torch.tensor([2, 0, 2]))  # also sum(i * x) is the same
    every = {found(torch.tensor([a, b, c])) for a in range(8) for b in range(8) for c in range(8)}
    assert len({value & 0x3FFFF for value in every}) > 500  # of 512, in 2**18


def test_shape_dtype_and_name_count() -> None:
    values = torch.zeros(6)
    assert len({found(values), found(values.view(2, 3)), found(values.double()), found(values, "y")}) == 4
    assert found(torch.empty(0, 3)) != found(torch.empty(0, 4))


def test_zeros_are_one_number_and_so_are_nans() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all()
    assert len({found(value.view(1)) for value in nan}) == 1
    assert found(torch.tensor([0.0])) == found(torch.tensor([-0.0]))
    assert found(torch.tensor([float("inf")])) != found(nan[:1])


def test_of_a_large_tensor_elements_all_over_it_are_looked_at() -> None:
    values = torch.randn(64, 3 * SAMPLE_NUMEL // 64, generator=torch.Generator().manual_seed(0))
    assert found(values) == found(values.clone())
    changed = [found(values.clone().index_fill_(0, torch.tensor([row]), 0.0)) for row in range(64)]
    assert len({*changed, found(values)}) == 65
    changed = [found(values.clone().index_fill_(1, torch.tensor([column]), 0.0)) for column in range(values.shape[1])]
    assert found(values) not in changed  # no column is passed over


def test_what_is_not_dense_counts_by_its_shape() -> None:
    sparse = torch.eye(3).to_sparse()
    assert found(sparse) == found(2 * sparse) != found(torch.eye(4).to_sparse())
    assert found(torch.empty(3, device="meta")) == found(torch.empty(3, device="meta"))


def test_nothing_is_left_of_a_graph_and_nothing_is_written() -> None:
    values = torch.ones(3, requires_grad=True)
    assert not fingerprint(values, "x").requires_grad
    whole = torch.arange(5)
    fingerprint(whole, "x")
    assert whole.tolist() == [0, 1, 2, 3, 4]
