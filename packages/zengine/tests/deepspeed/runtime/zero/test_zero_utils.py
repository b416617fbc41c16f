"""Helpers of `deepspeed.runtime.zero.utils` and `.linear`."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

import zoptim
from zcomm import group_rank
from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed.runtime.zero import linear, utils

Pair = namedtuple("Pair", "first second")


def check_agreement() -> list[str]:
    rank = group_rank()
    utils.assert_ints_same_as_other_ranks([1, 2])
    assert utils.get_lst_from_rank0([rank, rank + 5]) == [0, 5]
    told = []
    for compare, given in (
        (utils.assert_ints_same_as_other_ranks, [1, rank]),
        (utils.assert_lst_len_same_as_other_ranks, [0] * (1 + rank)),
    ):
        with pytest.raises(RuntimeError) as error:
            compare(given)
        told.append(str(error.value))
    return told


def test_ranks_that_disagree_raise_with_both_values_on_every_rank():
    lists = "ranks disagree on a list: rank 0 has [1, 0], rank 1 has [1, 1]"
    lengths = "ranks disagree on a list length: rank 0 has 1, rank 1 has 2"
    assert run_ranks(check_agreement, 2) == [[lists, lengths]] * 2


def test_a_function_reaches_the_tensors_of_nested_values_only(caplog):
    given = {"a": [torch.ones(1), 2], "b": Pair(torch.ones(1), "text")}
    found = utils.apply_to_tensors_only(lambda tensor: tensor + 1, given)
    assert found is given
    assert (float(found["a"][0]), found["a"][1]) == (2.0, 2)
    assert (float(found["b"].first), found["b"].second) == (2.0, "text")
    thing = nn.Identity()
    for _ in range(2):
        assert utils.apply_to_tensors_only(torch.neg, thing, lambda value: f"{type(value).__name__}?") is thing
    assert [record.message for record in caplog.records if record.message.endswith("?")] in ([], ["Identity?"])


def test_a_marked_parameter_is_known_and_remembered_by_what_a_function_makes_of_it():
    with deepspeed.zero.Init():
        layer = nn.Linear(3, 2)
    assert utils.is_zero_param(layer.weight)
    assert not utils.is_zero_param(nn.Linear(3, 2).weight)
    assert not utils.is_zero_param("weight")
    with deepspeed.zero.GatheredParameters(layer.weight):
        made = utils.apply_to_tensors_only(lambda tensor: tensor * 1, layer.weight)
    assert made.ds_param_alias is layer.weight


def test_optimizers_in_deepspeeds_list_are_known_by_their_class():
    params = [nn.Parameter(torch.ones(2))]
    assert utils.is_zero_supported_optimizer(torch.optim.AdamW(params))
    assert utils.is_zero_supported_optimizer(zoptim.AdamW(params))
    assert not utils.is_zero_supported_optimizer(torch.optim.SGD(params, 0.1))


def test_defragment_makes_tensors_views_of_one_buffer():
    tensors = [torch.arange(3.0), torch.arange(2.0) + 7]
    places = utils.get_mapping_to_flat_buffer(tensors)
    assert [place[1:] for place in places] == [(0, 3), (3, 2)]
    buffer = utils.defragment(tensors)
    assert buffer.tolist() == [0, 1, 2, 7, 8]
    buffer[3] = 5
    assert tensors[1].tolist() == [5, 8]
    with pytest.raises(ValueError, match="one dtype and device"):
        utils.defragment([torch.ones(1), torch.ones(1).double()])


def test_linear_layers_are_torchs():
    torch.manual_seed(0)
    mine, x = linear.LinearModuleForZeroStage3(4, 3), torch.randn(2, 4)
    expected = nn.functional.linear(x, mine.weight, mine.bias)
    assert torch.equal(mine(x), expected)
    assert torch.equal(linear.zero3_linear_wrap(x, mine.weight, mine.bias), expected)
    by_function = torch.func.grad(lambda w: linear.LinearFunctionForZeroStage3.apply(x, w).sum())(
        mine.weight.detach()
    )
    assert torch.equal(by_function, x.sum(0).expand(3, 4))
