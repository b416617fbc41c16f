"""Batches on their way to a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from zengine.data.loaders.fetch import DevicePrefetcher, _StreamCopy, make_prefetcher, no_prefetch


def test_on_a_cpu_and_without_prefetch_batches_come_as_they_are() -> None:
    assert make_prefetcher(torch.device("cpu"), num_ahead=3, num_workers=2) is no_prefetch
    assert make_prefetcher(torch.device("cuda"), num_ahead=0, num_workers=2) is no_prefetch
    batches = iter([1])
    assert no_prefetch(batches) is batches


@pytest.mark.parametrize(("num_workers", "fetched"), [(0, [1, 2, 3, 4]), (2, [3, 4, 4, 4])])
def test_batches_are_fetched_ahead_only_if_workers_make_them(num_workers: int, fetched: list[int]) -> None:
    """Without workers the dataset draws from this process's generators, which must be where the caller is."""
    count = 0

    def source() -> Iterator[dict[str, torch.Tensor]]:
        nonlocal count
        for value in range(4):
            count += 1
            yield {"x": torch.full((2,), value)}

    prefetch = make_prefetcher(torch.device("meta"), num_ahead=2, num_workers=num_workers)
    seen = [(batch["x"].device.type, count) for batch in prefetch(source())]
    assert seen == [("meta", number) for number in fetched]


def test_on_streams_a_batch_is_waited_for_and_its_memory_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that make an overlapped copy safe, in their order, without a device."""
    calls: list[str] = []

    class Stream:
        device = torch.device("cpu")

        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> str:
            calls.append(f"{self.name} records")
            return "arrival"

        def wait_event(self, event: str) -> None:
            calls.append(f"{self.name} waits for {event}")

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        calls.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("compute"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: calls.append(f"kept for {stream.name}"))
    copier = _StreamCopy(Stream("copies"))
    sent = copier.start({"x": torch.ones(2)}, torch.device("cpu"))
    assert calls == ["on copies", "copies records"]
    assert copier.finish(sent)["x"].tolist() == [1, 1]
    assert calls[2:] == ["compute waits for arrival", "kept for compute"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_values_arrive_on_the_stream_that_computes() -> None:
    host = [torch.full((1 << 20,), float(value)).pin_memory() for value in range(8)]
    for value, batch in enumerate(DevicePrefetcher(device=torch.device("cuda"), num_ahead=2)(iter(host))):
        assert float(batch.sum()) == value * (1 << 20)
