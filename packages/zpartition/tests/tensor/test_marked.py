"""Marks of parameters that other code has split, as addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import zpartition
from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import addresses_of, model_parallel_group_of
from zpartition.tensor import adopt_marked_split
from zpartition.tensor.marked import Marks, plan_marked, read_marks
from zpartition.tensors.whole import part_of


def marked(param: Parameter, **marks: Any) -> Parameter:
    vars(param).update(marks)
    return param


def test_marks_are_read_by_new_and_old_names() -> None:
    weight = lambda: Parameter(torch.zeros(4, 6))  # noqa: E731
    new = marked(weight(), tensor_model_parallel=True, partition_dim=1, partition_stride=1)
    old = marked(weight(), model_parallel=True, partition_dim=1)
    unset = marked(weight(), tensor_model_parallel=False, partition_dim=-1, partition_stride=1)  # Megatron's defaults
    assert read_marks(new) == read_marks(old) == Marks((4, 6), True, 1, 1)
    assert read_marks(unset) == read_marks(weight()) == Marks((4, 6))
    assert read_marks(marked(Parameter(torch.zeros(4)), model_parallel=True)) == Marks((4,), True, 0, 1)


@pytest.mark.parametrize(("dim", "stride"), [(0, 1), (1, 1), (2, 1), (0, 2), (0, 3)])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_addresses_are_those_of_megatrons_slices(dim: int, stride: int, num_ranks: int) -> None:
    whole = torch.arange(36 * 6 * 12).view(36, 6, 12)
    chunks = whole.chunk(num_ranks * stride, dim)
    slices = [torch.cat(chunks[rank::num_ranks], dim) for rank in range(num_ranks)]
    everyone = [{"w": Marks(tuple(each.shape), True, dim, stride)} for each in slices]
    for rank, own in enumerate(slices):
        address = plan_marked(everyone, rank)["w"]
        assert (address.global_shape, address.shape, address.num_copies) == ((36, 6, 12), tuple(own.shape), 1)
        assert torch.equal(part_of(whole, address), own)


def test_slices_may_differ_in_width() -> None:
    whole = torch.arange(10.0).view(10, 1)
    gates, ups = whole[:5], whole[5:]
    slices = [torch.cat([gates[:3], ups[:3]]), torch.cat([gates[3:], ups[3:]])]
    everyone = [{"w": Marks(tuple(each.shape), True, 0, 2)} for each in slices]
    for rank, own in enumerate(slices):
        assert torch.equal(part_of(whole, plan_marked(everyone, rank)["w"]), own)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (Marks((4, 6), True, 2), None, r"w is marked as split and has partition_dim=2: .* \(0 to 1\)"),
        (Marks((4, 6), True), None, "partition_dim=-1"),
        (Marks((), True), None, "w is a scalar"),
        (Marks((4, 6), True, 1, 2), None, "partition_stride=2 along dimension 1: .* 2 parameters of stride 1"),
        (Marks((5, 6), True, 0, 2), None, "must divide the 5 elements"),
        (Marks((4, 6), True, 0, 0), None, "partition_stride=0"),
        (
            Marks((4, 6), True, 0),
            Marks((4, 6), True, 1),
            r"w is \[4, 6\], split along dimension 0 .* on tensor rank 0 and \[4, 6\], split along dimension 1",
        ),
        (Marks((4, 6), True, 0), Marks((4, 5), True, 0), r"\[4, 5\], split along dimension 0 .* on 1"),
        (Marks((4, 6)), Marks((5, 6)), r"w is \[4, 6\], not marked as split, on tensor rank 0"),
    ],
)
def test_what_makes_no_global_tensor_is_refused(one: Marks, other: Marks | None, message: str) -> None:
    everyone = [{"w": one}, {"w": other or one}]
    for rank in (0, 1):
        with pytest.raises(ValueError, match=message):
            plan_marked(everyone, rank)


def test_parameters_of_some_ranks_are_named() -> None:
    with pytest.raises(ValueError, match="b exists on tensor rank 1, not on 0"):
        plan_marked([{"a": Marks((1,))}, {"a": Marks((1,)), "b": Marks((2,))}], 0)


def _adopted() -> tuple[bool, bool, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    model.append(nn.Linear(3, 2))
    assert not adopt_marked_split(model, None)
    assert model_parallel_group_of(model).size == 1
    for param in model[0].parameters():
        marked(param, tensor_model_parallel=True, partition_dim=0)
    model[2].weight = model[0].weight  # tied
    has_split = adopt_marked_split(model, None)
    with pytest.raises(ValueError, match="hold other parts"):
        zpartition.shard(model)
    found = {name: (each.global_shape, each.num_copies) for name, each in addresses_of(model).items()}
    inner = addresses_of(model[2])["weight"].global_shape == (4, 3)
    return has_split, inner, found


def test_a_marked_model_is_a_split_model() -> None:
    for has_split, inner, found in run_ranks(_adopted, 2):
        assert has_split
        assert inner  # of a module inside, too
        split, whole = {"0.weight": ((4, 3), 1), "0.bias": ((4,), 1)}, {"1.weight": ((3, 2), 2), "1.bias": ((3,), 2)}
        assert found == {**split, **whole, "2.bias": ((2,), 2)}
