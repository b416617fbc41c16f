"""Copies between device and host: exact on a CPU, and on CUDA equal to a copy that waits."""

from __future__ import annotations

import pytest
import torch

from zpartition.mover import CudaMover, Mover, PlainMover, make_mover
from zpartition.offload import Offload, Tier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def mover_on(device: str) -> Mover:
    return make_mover(torch.device(device), Offload(states=Tier.HOST))


@pytest.mark.parametrize("device", DEVICES)
def test_fetched_and_added_gradients_are_those_of_plain_arithmetic(device: str) -> None:
    mover = mover_on(device)
    assert isinstance(mover, CudaMover if device == "cuda" else PlainMover)
    parts = [torch.randn(4096).bfloat16() for _ in range(9)]
    host = mover.empty(4096, torch.float32)
    expected = parts[0].float() * 0.25
    buffer = parts[0].to(device)
    mover.fetch(host, buffer, 0.25)
    for part in parts[1:]:
        buffer.copy_(part)  # the bucket is filled again at once
        mover.add(host, buffer, 0.25)
        expected.add_(part, alpha=0.25)
    mover.wait_host()
    assert torch.equal(host, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_sent_is_cast_and_the_host_may_write_on_at_once(device: str) -> None:
    mover = mover_on(device)
    weights = [torch.empty(numel, dtype=torch.bfloat16, device=device) for numel in (100, 4000, 50, 3000)]
    host, expected = torch.empty(4000), []
    for target in weights:
        part = host[: target.numel()]
        part.normal_()
        expected.append(part.bfloat16())
        mover.send(target, part)
    mover.wait_device()
    assert all(torch.equal(target.cpu(), value) for target, value in zip(weights, expected))


@pytest.mark.parametrize("device", DEVICES)
def test_a_mark_is_behind_what_was_fetched_before_it(device: str) -> None:
    mover = mover_on(device)
    host = mover.empty(1024, torch.float32)
    mover.fetch(host, torch.full((1024,), 3.0, device=device), 1.0)
    mover.wait_for(mover.ready())
    assert host.eq(3.0).all()
