"""Bucket size from a measured link.

Problem.  A bucket is sent when its last gradient has arrived, so nothing hides the last bucket: smaller ones leave
less after backward.  But every message costs time that does not depend on its length.  Which of the two weighs more
is a property of the network: a fixed number is wrong on most.

Design.  B bytes of gradients in buckets of s bytes cross a link with latency a and bandwidth b: the last message
takes a + s / b, the latencies of all take a B / s, and the sum is least at s = sqrt(a b B).  To the latency counts
what a message costs the processor that computes.  The rest of it and the bandwidth are measured with a few small
all_reduces of the group that reduces gradients (about 50 ms at most).  The ranks take the values of the slowest, so
all choose the same size.  The choice is never above the size that is derived from the model alone: that one bounds
the memory without a measurement, and is right inside a host, where nothing is measured.

The choice is opt-in (`BucketSizing.MEASURED`), because bits must depend on the config only: sums of gradients do
not depend on buckets where zcomm adds them, but the norm adds its blocks in the order of the buckets.

Rejected: measuring in the first steps (the layout would change after states exist); a table of networks by name.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

import attrs
import torch
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.layout import derive_bucket_numel
from zpartition.layout.policy import BucketSizing, ZeroPolicy

__all__ = ["LinkSpeed", "choose_bucket_numel", "measure_link", "with_measured_buckets"]

log = logging.getLogger("zpartition")

_MESSAGE_S = 5e-4  # CPU time of a message beside backward: Python, wake-ups of threads
_MIN_NUMEL = 1 << 17  # of a chosen bucket
_PADDING_SHARE = 64  # a bucket has at least this many times the elements that it may be padded by
_SMALL_NUMEL, _PROBE_NUMEL, _MAX_NUMEL = 1 << 10, 1 << 16, 1 << 21  # of the messages that are timed, float32
_LONG_S = 0.008  # of a long message, about


@attrs.frozen
class LinkSpeed:
    """What an all_reduce of n bytes takes: latency_s + n / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, short: tuple[int, float], long: tuple[int, float]) -> LinkSpeed:
        """Return the line through two (bytes, seconds)."""
        slope_s = max(long[1] - short[1], 1e-9) / (long[0] - short[0])
        return cls(max(short[1] - short[0] * slope_s, 1e-6), 1 / slope_s)


def choose_bucket_numel(numel: int, itemsize: int, link: LinkSpeed, world_size: int) -> int:
    """Return the size of a bucket for `numel` gradients of `itemsize` bytes; at most the derived one.  Pure."""
    best = math.sqrt((link.latency_s + _MESSAGE_S) * link.bytes_per_s * numel * itemsize) / itemsize
    least = max(_MIN_NUMEL, _PADDING_SHARE * 1024 * world_size)
    return min(max(round(best), least), derive_bucket_numel(numel))


def measure_link(group: ProcessGroup | None, device: torch.device) -> LinkSpeed:
    """Time a few all_reduces; a collective of `group`, which has at least two ranks.  All get the same result."""
    short_s = _time_message(_SMALL_NUMEL, 5, group, device)
    probe_s = _time_message(_PROBE_NUMEL, 2, group, device)
    numel = _PROBE_NUMEL
    while numel < _MAX_NUMEL and 2 * numel * probe_s / _PROBE_NUMEL <= _LONG_S:
        numel *= 2
    return LinkSpeed.of((4 * _SMALL_NUMEL, short_s), (4 * numel, _time_message(numel, 3, group, device)))


def with_measured_buckets(
    policy: ZeroPolicy, params: Iterable[torch.Tensor], group: ProcessGroup | None, device: torch.device
) -> ZeroPolicy:
    """Return `policy` with a bucket size for the gradients of `params`, if it asks for one.  A collective then.

    Not at stage 3, whose buckets are units; not with a given size; not in a world of one or inside a host.
    device: where gradients will be if the parameters have no memory yet.
    """
    if policy.bucket_sizing is BucketSizing.DERIVED or policy.bucket_numel or policy.shards_weights:
        return policy
    if zcomm.group_size(group) == 1:
        return policy
    zcomm.barrier(group)  # decides on the transport
    if zcomm.transport(group) == "shared memory":
        return policy
    params = list(params)
    numel = sum(param.numel() for param in params)
    itemsize = max(((policy.reduce_dtype or param.dtype).itemsize for param in params), default=4)
    link = measure_link(group, next((p.device for p in params if not p.is_meta), device))
    chosen = choose_bucket_numel(numel, itemsize, link, zcomm.group_size(group))
    if zcomm.group_rank(group) == 0:
        log.info(
            "buckets of %s elements: a message takes %.2f ms and %.0f MB/s",
            f"{chosen:,}",
            link.latency_s * 1e3,
            link.bytes_per_s / 1e6,
        )
    return attrs.evolve(policy, bucket_numel=chosen)


def _time_message(numel: int, rounds: int, group: ProcessGroup | None, device: torch.device) -> float:
    """Return the seconds of one all_reduce of float32: the best of some rounds, of the slowest rank."""
    message, times = torch.zeros(numel, device=device), []
    for _ in range(rounds + 1):  # the first warms up
        _synchronize(device)
        began_s = time.perf_counter()
        zcomm.all_reduce(message, group, label="link")
        _synchronize(device)
        times.append(time.perf_counter() - began_s)
    slowest = torch.tensor(min(times[1:]), dtype=torch.float64, device=device)
    zcomm.all_reduce(slowest, group, op="max", label="link")
    return slowest.item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
