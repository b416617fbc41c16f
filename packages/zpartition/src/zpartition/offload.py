"""Where masters, optimizer states, gradient accumulators and resting weights live, as a frozen value.

A *tier* is a kind of memory.  Training needs the states of an optimizer once a step and the gradients in between, so
both may live in slower memory, if what moves is hidden behind what computes (ZeRO-Offload, Ren et al. 2021;
ZeRO-Infinity, Rajbhandari et al. 2021).  `Offload()` moves nothing: it is the null object of `ZeroPolicy.offload`.

The tier is taken literally: on a module whose device is a CPU, HOST is other CPU memory, with real copies.  That is
of no use to anybody but tests, and lets all of this be tested without an accelerator.

Placement is by bucket.  `ratio` of the elements leaves the device (Twin-Flow of ZeRO-Offload++), the buckets first
whose gradients come first: those of the last ones, which backward cannot hide, stay.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs
from attrs.validators import and_, ge, instance_of, le

__all__ = ["NOTHING", "Offload", "Speculation", "Tier", "step_groups"]


class Tier(enum.Enum):
    """A kind of memory."""

    DEVICE = "device"  # where the module is
    HOST = "host"  # CPU memory, pinned where the module's device is CUDA
    DISK = "disk"  # files; CPU memory for what is being updated and its neighbours


class Speculation(enum.Enum):
    """Whether the optimizer runs ahead of the verdict on the gradients (SuperOffload, Lian et al. 2025)."""

    OFF = "off"
    LAST_BACKWARD = "last backward"  # a thread steps each bucket that has settled: costs a copy of the host's states


@attrs.frozen(kw_only=True)
class Offload:
    """What leaves the device.

    Raises:
        ValueError: a combination that has no meaning.
    """

    states: Tier = Tier.DEVICE  # masters and optimizer states; gradient accumulators then live on the host
    weights: Tier = Tier.DEVICE  # the shards that rest at stage 3
    ratio: float = attrs.field(default=1.0, validator=and_(ge(0.0), le(1.0)))  # share of the states that leaves
    step_numel: int = attrs.field(default=0, validator=ge(0))  # elements of one step call, at least a bucket
    buffer_count: int = attrs.field(
        default=3, validator=ge(2)
    )  # step calls whose states are in memory at once (DISK)
    pin: bool = attrs.field(default=True, validator=instance_of(bool))  # page-locked host memory on CUDA
    directory: str = ""  # of DISK: local and fast; each rank makes a folder of its own there
    num_threads: int = attrs.field(default=8, validator=ge(1))  # that read and write (DISK)
    speculation: Speculation = Speculation.OFF

    def __attrs_post_init__(self) -> None:
        if Tier.DISK in (self.states, self.weights) and not self.directory:
            raise ValueError(
                'Offload(states or weights=Tier.DISK) needs a directory="/fast/local/folder" to write to'
            )
        if self.speculation is not Speculation.OFF and self.states is not Tier.HOST:
            raise ValueError(
                f"Offload(speculation={self.speculation.name}, states={self.states.name}): only states on the host "
                "can be updated during backward, and undone. Use states=Tier.HOST, or Speculation.OFF."
            )

    @property
    def moves_states(self) -> bool:
        """Whether any optimizer state leaves the device."""
        return self.states is not Tier.DEVICE and self.ratio > 0

    @property
    def moves_all_states(self) -> bool:
        """Whether none stays on the device."""
        return self.moves_states and self.ratio == 1

    def place(self, numels: Sequence[int]) -> tuple[Tier, ...]:
        """The tier of the states of each bucket, given their elements; as close to `ratio` as whole buckets come."""
        tiers: list[Tier] = []
        target, gone = self.ratio * sum(numels), 0
        for numel in numels:
            leaves = self.moves_states and gone + numel / 2 < target
            tiers.append(self.states if leaves else Tier.DEVICE)
            gone += numel if leaves else 0
        return tuple(tiers)


NOTHING = Offload()


def step_groups(tiers: Sequence[Tier], numels: Sequence[int], step_numel: int) -> tuple[tuple[int, ...], ...]:
    """Which buckets one call of the optimizer's step updates, in order; every bucket once.

    Those on the device come first, all in one call: a GPU works on them while the host works on the others, which
    are taken as many at a time as fit into `step_numel` elements, and at least one.
    """
    device = tuple(index for index, tier in enumerate(tiers) if tier is Tier.DEVICE)
    groups = [device] if device else []
    group: list[int] = []
    size = 0
    for index, tier in enumerate(tiers):
        if tier is Tier.DEVICE:
            continue
        if group and size + numels[index] > step_numel:
            groups.append(tuple(group))
            group, size = [], 0
        group.append(index)
        size += numels[index]
    return tuple([*groups, tuple(group)] if group else groups)
