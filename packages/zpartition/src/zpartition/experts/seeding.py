"""Random numbers that follow from a number that was drawn, also where nothing has been drawn yet.

Each expert of a stack is initialised under a seed of its own, which comes from one number of torch's generator.
Inside `Init` there are no numbers while a module is built; there the seeding is put onto the tape, between the steps
that fill the expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from zpartition.deferred import tape_in_progress
from zpartition.tape import is_meta

__all__ = ["drawn", "seeded"]


def drawn() -> Tensor:
    """A number from torch's generator, also where modules are being built on the meta device: () int64.

    It has no value yet where a tape is recorded.
    """
    return torch.randint(2**31, (), device="cpu")


@contextmanager
def seeded(number: Tensor, index: int) -> Iterator[None]:
    """Inside, random numbers follow from `number` and `index`; afterwards the generators are as they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    tape = tape_in_progress()
    if tape is not None and is_meta(number):
        with tape.record_seeded(number, partial(_seed, index, [])):
            yield
        return
    with torch.random.fork_rng(devices=devices):
        _seed(index, devices, int(number))
        yield


def _seed(index: int, devices: list[int], number: int) -> None:
    torch.default_generator.manual_seed(number * 1_000_003 + index)
    for device in devices:
        torch.cuda.default_generators[device].manual_seed(number * 1_000_003 + index)
