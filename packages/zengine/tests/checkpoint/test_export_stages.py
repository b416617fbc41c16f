"""Export of all stages: tensors arrive on the first rank, one at a time and unchanged."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import pytest
import torch

import zcomm
from zcomm.testing import run_ranks
from zengine.checkpoint.export import from_all_stages
from zengine.checkpoint.weight_files import Entry
from zpartition import ModelParallelGroup

VALUES = (
    {"a": torch.arange(6.0).view(2, 3)},
    {"b": torch.tensor(7), "c": torch.ones(0, 4), "d": torch.tensor([True, False])},
    {"e": torch.full((3,), 1.5, dtype=torch.bfloat16)},
)


def gathered(sends: bool) -> tuple[list[tuple[str, ...]], list[torch.Tensor]]:
    own = VALUES[zcomm.group_rank()]
    entries = [Entry((name, f"also.{name}"), tuple(value.shape), value.dtype) for name, value in own.items()]
    stages, cpu = ModelParallelGroup.of(None), torch.device("cpu")
    found, values = from_all_stages(stages, entries, iter(own.values()), device=cpu, sends=sends)
    return [entry.names for entry in found], list(values)


def test_the_first_rank_has_all_and_the_others_have_their_own() -> None:
    for rank, (names, values) in enumerate(run_ranks(gathered, 3, True)):
        stages = VALUES if rank == 0 else VALUES[rank : rank + 1]
        expected = {name: each for stage in stages for name, each in stage.items()}
        assert names == [(name, f"also.{name}") for name in expected]
        for value, each in zip(values, expected.values(), strict=True):
            assert value.dtype == each.dtype
            assert torch.equal(value, each)


def test_copies_of_the_pipeline_keep_to_their_own() -> None:
    for rank, (names, values) in enumerate(run_ranks(gathered, 3, False)):
        assert [name for name, _ in names] == list(VALUES[rank])
        assert len(values) == len(names)


def gathered_by_ranks_without_memory(short: int) -> str:
    """What a rank is told when rank `short` has no memory for its last tensor."""
    own = VALUES[zcomm.group_rank()]

    def values() -> Iterator[torch.Tensor]:
        *some, last = own.values()
        yield from some
        if zcomm.group_rank() == short:
            raise MemoryError("no more of it")
        yield last

    entries = [Entry((name,), tuple(value.shape), value.dtype) for name, value in own.items()]
    _, found = from_all_stages(ModelParallelGroup.of(None), entries, values(), device=torch.device("cpu"), sends=True)
    with contextlib.suppress(MemoryError, RuntimeError):
        deque(found, 0)
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        zcomm.barrier()
    return str(caught.value)


@pytest.mark.parametrize("short", [0, 1])
def test_nobody_waits_for_a_rank_that_cannot_go_on(short: int) -> None:
    for text in run_ranks(gathered_by_ranks_without_memory, 3, short):
        assert f"rank {short} failed in an export of all stages: MemoryError: no more of it" in text


def test_one_stage_is_the_model() -> None:
    entries, values = [Entry(("a",), (1,), torch.float32)], iter([torch.ones(1)])
    assert from_all_stages(ModelParallelGroup(None), entries, values, device=torch.device("cpu"), sends=True) == (
        entries,
        values,
    )
