"""Unsharder: which units are unsharded when, and prefetching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from zcomm.testing import run_ranks
from zpartition import ParamSpec, ZeroPolicy, _compat, plan_layout
from zpartition.layout.ranks import Ranks
from zpartition.weights.sharded import ShardedStorage
from zpartition.weights.unshard import UNKNOWN_READER, Unit, Unsharder

NUMEL = 2048


def make(**fields: int) -> tuple[Unsharder, list[Unit]]:
    """Five units of 2,048 elements each."""
    policy = ZeroPolicy(stage=3, **fields)
    specs = [ParamSpec(f"p{i}", (NUMEL,), torch.float32, unit=f"u{i}") for i in range(5)]
    params = {spec.name: Parameter(torch.ones(NUMEL)) for spec in specs}
    storages = []
    for bucket in reversed(plan_layout(specs, world_size=2, num_shards=2).buckets):
        storages.append(ShardedStorage.of(bucket, params, policy, Ranks.of(None, policy)))
        storages[-1].adopt(None)
    module = nn.ModuleDict({f"u{i}": nn.Identity() for i in range(5)})
    unsharder = Unsharder.of(module, storages, policy, Ranks.of(None, policy), torch.device("cpu"))
    return unsharder, list(unsharder.units.values())


def whole(unsharder: Unsharder) -> str:
    return "".join(str(i) for i, unit in enumerate(unsharder.units.values()) if not unit.is_sharded)


@contextmanager
def running_nodes() -> Iterator[SimpleNamespace]:
    """Act as a backward of which node `number` runs."""
    node = SimpleNamespace(number=0)
    with mock.patch.multiple(_compat, is_in_backward=lambda: True, running_node=lambda: node.number):
        yield node


def _leaves_by_the_rules() -> list[str]:
    unsharder, units = make(max_live_numel=2 * NUMEL, prefetch_numel=0)
    seen = []
    for unit in units:
        unit.depth += 1
        unsharder.unshard(unit)
        unit.depth -= 1
        unsharder.reshard(unit)
        seen.append(whole(unsharder))
    unsharder.invalidate()
    assert unsharder.version == 1
    return [*seen, whole(unsharder)]


def test_what_fits_stays_and_an_update_makes_all_stale() -> None:
    assert run_ranks(_leaves_by_the_rules, 2) == [["0", "01", "01", "01", "01", ""]] * 2


def _gathers_ahead() -> tuple[list[str], int]:
    unsharder, units = make(max_live_numel=0, prefetch_numel=NUMEL)
    seen = []
    for order in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 3, 4)):
        for index in order:
            unsharder.unshard(units[index])
            seen.append(whole(unsharder))
            unsharder.reshard(units[index])
        unsharder.release_all()
        unsharder.end_step()
    return seen, unsharder.peak_numel


def test_the_second_step_gathers_ahead_and_a_new_way_is_followed() -> None:
    first = ["0", "1", "2", "3"]
    second = ["01", "12", "23", "3"]
    third = ["01", "13", "14"]  # a wrong guess stays until the end of the step
    assert run_ranks(_gathers_ahead, 2) == [(first + second + third, 2 * NUMEL)] * 2


def _keeps_to_two_units() -> tuple[list[str], int]:
    unsharder, units = make()
    seen = []
    for _ in range(2):
        for index in range(5):
            unsharder.unshard(units[index])
            seen.append(whole(unsharder))
            unsharder.reshard(units[index])
        with unsharder.backward():
            seen.append(whole(unsharder))
            for index in reversed(range(5)):
                unsharder.unshard(units[index])
                unsharder._release(units[index])
        unsharder.end_step()
    return seen, unsharder.peak_numel


def test_by_default_one_unit_is_gathered_ahead_and_the_last_ones_stay() -> None:
    first = ["0", "1", "2", "3", "4", ""]
    second = ["01", "12", "23", "34", "34", "34"]
    assert run_ranks(_keeps_to_two_units, 2) == [(first + second, 2 * NUMEL)] * 2


def _two_backwards() -> list[str]:
    unsharder, units = make(max_live_numel=0)
    seen = []
    for _ in range(2):
        for _ in range(2):
            for index in (0, 1):
                unsharder.unshard(units[index])
                unsharder.reshard(units[index])
            with unsharder.backward():
                unsharder.unshard(units[1])
                seen.append(whole(unsharder))
        unsharder.end_step()
    return seen


def test_nothing_is_gathered_ahead_across_the_end_of_a_backward() -> None:
    assert run_ranks(_two_backwards, 2) == [["1"] * 4] * 2


def _holds() -> list[str]:
    unsharder, units = make(max_live_numel=0, prefetch_numel=0)
    seen = []
    with unsharder.keep_unsharded(units[:2]):
        seen.append(whole(unsharder))
        unsharder.release_all()
        seen.append(whole(unsharder))
    seen.append(whole(unsharder))
    with pytest.raises(ArithmeticError), unsharder.keep_unsharded(units[2:3]):
        raise ArithmeticError
    return [*seen, whole(unsharder)]


def test_what_is_held_stays_until_the_block_ends() -> None:
    assert run_ranks(_holds, 2) == [["01", "01", "", ""]] * 2


def _backward_by_order(is_told: bool) -> list[str]:
    """Two steps over three units; gradients arrive on some ranks only."""
    unsharder, units = make(prefetch_numel=0)
    seen = []
    for _ in range(2):
        for unit in units[:3]:
            unsharder.unshard(unit)
            unsharder.reshard(unit)
        with unsharder.backward(), running_nodes() as node:
            for node.number, index in enumerate((2, 1, 2, 0)):
                unsharder.unshard(units[index])
                units[index].reader = node.number
                seen.append(whole(unsharder))
                if is_told or dist.get_rank() == 0:
                    unsharder.arrived(units[index].storages[0].bucket.index)
                unsharder.unshard(units[index])
        unsharder.end_step()
    return seen


def test_in_backward_the_order_of_uses_alone_says_what_is_released() -> None:
    first = ["2", "12", "12", "02"]  # two units have room
    second = ["2", "12", "2", "0"]  # what the last backward did not use again is released
    for is_told in (True, False):
        assert run_ranks(_backward_by_order, 2, is_told) == [first + second] * 2


def _unknown_reader() -> list[str]:
    unsharder, units = make(prefetch_numel=0)
    seen = []
    with unsharder.backward(), running_nodes() as node:
        for node.number, unit in enumerate(units):
            unsharder.unshard(unit)
            unit.reader = UNKNOWN_READER if unit is units[0] else node.number
            seen.append(whole(unsharder))
            if unit is units[3]:
                unsharder.arrived(units[0].storages[0].bucket.index)
    return seen


def test_a_unit_with_an_unknown_reader_stays_until_its_gradients_have_arrived() -> None:
    assert run_ranks(_unknown_reader, 2) == [["0", "01", "02", "03", "34"]] * 2


def _read_alone() -> tuple[list[str], int]:
    unsharder, units = make()
    seen = []
    for step in range(3):
        for unit in units[:2]:
            unsharder.unshard(unit)
            unsharder.reshard(unit)
        if step and dist.get_rank() == 0:
            with unsharder.keep_unsharded(units[1:2]):
                seen.append(whole(unsharder))
        seen += [whole(unsharder), ""][dist.get_rank() : 1]
        with unsharder.backward():
            unsharder.unshard(units[1])
        unsharder.end_step()
    return seen, len(unsharder.order)


def test_one_rank_may_read_what_is_whole_and_nothing_changes() -> None:
    expected = (["", "1", "1", "1", "1"], 4)
    assert run_ranks(_read_alone, 2) == [expected, ([], 4)]


def _reuse_distance() -> str:
    unsharder, units = make(max_live_numel=9 * NUMEL, max_reuse_numel=2 * NUMEL, prefetch_numel=0)
    for _ in range(2):  # in the second step the distances are known
        for index in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0):
            unsharder.unshard(units[index])
            unsharder.reshard(units[index])
            if len(unsharder.trace) == 5:
                seen = whole(unsharder)
        unsharder.invalidate()
        unsharder.end_step()
    return seen


def test_what_is_used_again_only_later_does_not_stay() -> None:
    assert run_ranks(_reuse_distance, 2) == ["34"] * 2


def _written() -> None:
    unsharder, units = make()
    with torch.no_grad():
        units[3].storages[0].params[0].zero_()
    with pytest.raises(ValueError, match=r"parameters of unit 'u3' were written while .* zpartition.gathered"):
        unsharder.check_unwritten()


def test_edits_of_resting_parameters_are_rejected() -> None:
    run_ranks(_written, 2)
