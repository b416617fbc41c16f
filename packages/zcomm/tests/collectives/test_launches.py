"""Listeners that are told of each collective before it is issued."""

from __future__ import annotations

from typing import Any

import torch

import zcomm
from zcomm.testing import run_ranks


class Ear:
    """Hears launches."""

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def hear(self, op: str, group: Any) -> None:
        self.heard.append(op if group is None else f"{op} of a group")


def launches() -> list[str]:
    heard: list[str] = []
    ear, twin = Ear(heard), zcomm.duplicate_group()

    def send_first(op: str, group: Any) -> None:
        if op == "all_gather":
            zcomm.all_reduce(torch.zeros(1))

    zcomm.on_launch(ear.hear)
    remove = zcomm.on_launch(send_first)
    zcomm.all_reduce(torch.zeros(1), twin)
    zcomm.all_gather(torch.zeros(2), torch.zeros(1))
    remove()
    remove()
    zcomm.all_gather(torch.zeros(2), torch.zeros(1))
    zcomm.launching("send", twin)
    del ear
    zcomm.barrier()
    return heard


def test_listeners_hear_each_collective_before_it_is_issued() -> None:
    expected = ["all_reduce of a group", "all_gather", "all_reduce", "all_gather", "send of a group"]
    assert run_ranks(launches, 2) == [expected] * 2


def test_a_world_of_one_launches_nothing() -> None:
    heard: list[str] = []
    remove = zcomm.on_launch(lambda op, group: heard.append(op))
    zcomm.all_reduce(torch.zeros(1))
    remove()
    assert not heard
