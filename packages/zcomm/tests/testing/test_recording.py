"""recorded(): counting and ordering."""

from __future__ import annotations

import torch

import zcomm
from zcomm.testing import recorded, run_ranks


def rank_communicates() -> dict[str, object]:
    zcomm.all_reduce(torch.zeros(1), label="before")
    with recorded() as communication:
        late = zcomm.all_reduce(torch.zeros(4), async_op=True, label="first")
        zcomm.all_gather(torch.zeros(6), torch.zeros(3), label="second")
        zcomm.all_reduce(torch.zeros(2), label="third")
        late.wait()
    zcomm.all_reduce(torch.zeros(1), label="after")
    return {
        "ops": communication.ops,
        "labels": communication.labels,
        "counts": [communication.count("all_reduce"), communication.count("broadcast"), communication.count()],
        "nbytes": [communication.nbytes("all_reduce"), communication.nbytes("all_gather"), communication.nbytes()],
        "ordered": [record.label for record in communication.records],
    }


def test_collectives_are_counted_and_listed_in_the_order_of_issue() -> None:
    assert run_ranks(rank_communicates, 2)[1] == {
        "ops": ["all_reduce", "all_gather", "all_reduce"],
        "labels": ["first", "second", "third"],
        "counts": [2, 0, 3],
        "nbytes": [24, 24, 48],
        "ordered": ["first", "second", "third"],
    }


def test_alone_nothing_is_recorded() -> None:
    with recorded() as communication:
        zcomm.all_reduce(torch.zeros(4))
    assert (communication.ops, communication.count(), communication.nbytes()) == ([], 0, 0)
