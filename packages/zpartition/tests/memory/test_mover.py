"""Copies between device and host: exact on a CPU, and on CUDA equal to a copy that waits."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from zpartition._compat import TorchDispatchMode, tree_flatten
from zpartition.layout.policy import Offload, Tier
from zpartition.memory.mover import IN_FLIGHT, NUM_STAGES, CudaMover, Mover, PlainMover, make_mover

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


# -- the order on CUDA, without a GPU ------------------------------------------------------------


class Stream:
    """Work in the order in which it was put there, done when somebody needs it: as late as a GPU may be.

    A stream that is `prompt` does its work at once, as far as what it waits for allows: as early as a GPU may be.
    """

    def __init__(self, device: Any = None, *, prompt: bool | None = None) -> None:
        self.prompt = Stream.sides_are_prompt if prompt is None else prompt
        self.work: list[Callable[[], object]] = []
        self.num_done = 0
        self.own: set[int] = set()  # memory that it may read without a word to the allocator

    sides_are_prompt = False

    def put(self, work: Callable[[], object]) -> None:
        self.work.append(work)
        if self.prompt:
            self.run(len(self.work))

    def run(self, stop: int) -> None:
        while self.num_done < stop:
            self.num_done += 1
            self.work[self.num_done - 1]()

    def synchronize(self) -> None:
        self.run(len(self.work))

    def wait_stream(self, other: Stream) -> None:
        self.put(functools.partial(other.run, len(other.work)))

    def record_event(self) -> Event:
        return Event(self, len(self.work))


@attrs.frozen
class Event:
    """Nothing to wait for unless it was recorded."""

    stream: Stream | None = None
    stop: int = 0

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.stop)


class Gpu(TorchDispatchMode):
    """CPU memory that only streams write to: what touches the device's tensors is put to the current stream.

    Memory that was allocated for one stream and is used by another without `record_stream` is an error.
    """

    def __init__(self, *, is_late: bool) -> None:
        super().__init__()
        Stream.sides_are_prompt = not is_late
        self.current = self.compute = Stream(prompt=is_late)
        self.memory: dict[int, Tensor] = {}  # the device's, by address; kept, so that no address is used twice
        self.recorded: set[int] = set()  # addresses that `record_stream` was told of
        self.is_working = False

    def tensor(self, values: Tensor) -> Tensor:
        """On the device, for as long as the test takes."""
        made = values.clone()
        self.memory[made.untyped_storage().data_ptr()] = made
        return made

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        places = {each.untyped_storage().data_ptr() for each in tensors} & self.memory.keys()
        if self.is_working or func.is_view or not (places or self.current is not self.compute):
            return func(*args, **kwargs)
        for place in places:
            is_temporary = place in self.compute.own and self.current is not self.compute
            assert not is_temporary or place in self.recorded, "record_stream is missing"
        name = func._schema.name
        if name.endswith("_"):
            self.current.put(functools.partial(self._work, func, args, kwargs))
            return args[0]
        made = torch.full_like(tensors[0], torch.nan, dtype=kwargs.get("dtype") or tensors[0].dtype)
        self.memory[made.untyped_storage().data_ptr()] = made
        self.current.own.add(made.untyped_storage().data_ptr())
        if name == "aten::clone":
            self.current.put(functools.partial(self._work, torch.ops.aten.copy_.default, (made, args[0]), {}))
        return made

    def _work(self, func: Any, args: Any, kwargs: Any) -> None:
        before, self.is_working = self.is_working, True
        try:
            func(*args, **kwargs)
        finally:
            self.is_working = before


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> Iterator[tuple[Gpu, CudaMover]]:
    made = Gpu(is_late=is_late)
    with monkeypatch.context() as patch:
        fake = types.SimpleNamespace(Stream=Stream, Event=Event)
        patch.setattr("zpartition.memory.mover._cuda", lambda: fake)
        patch.setattr(torch.cuda, "stream", made.stream)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: made.compute)
        patch.setattr(
            Tensor, "record_stream", lambda each, stream: made.recorded.add(each.untyped_storage().data_ptr())
        )
        mover = CudaMover.create(torch.device("cpu"), False)
        with made:
            yield made, mover


@pytest.mark.parametrize("is_late", [True, False], ids=["late copies", "late kernels"])
def test_gradients_come_in_order_however_late_streams_are(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    parts = [torch.full((64,), float(number)) for number in range(1, 12)]
    with gpu(monkeypatch, is_late=is_late) as (device, mover):
        host, other = torch.full((64,), torch.nan), torch.full((64,), torch.nan)
        bucket = device.tensor(torch.full((64,), torch.nan))
        divisor = device.tensor(torch.full((1,), torch.nan))
        divisor.fill_(8.0)
        seen = torch.zeros(1)
        mover.fetch(seen, divisor, 1.0)
        for number, part in enumerate(parts):
            bucket.fill_(float(part[0]))
            (mover.add if number else mover.fetch)(host, bucket, 0.5)
        mark = mover.ready()
        bucket.fill_(-1.0)
        mover.fetch(other, bucket, 1.0)
        assert len(mover.in_flight) <= IN_FLIGHT + 1
        assert mover.in_flight_bytes <= 4 * 64 * (IN_FLIGHT + 1)
        mover.wait_for(mark)
        came, factor = host.tolist(), seen.tolist()  # what another thread would read now
        mover.wait_host()
    assert factor == [8.0]
    assert came == (0.5 * torch.stack(parts).sum(0)).tolist()
    assert other.eq(-1.0).all()


@pytest.mark.parametrize("is_late", [True, False], ids=["late copies", "late kernels"])
def test_weights_come_in_order_however_late_streams_are(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    with gpu(monkeypatch, is_late=is_late) as (device, mover):
        weights = [device.tensor(torch.zeros(numel)) for numel in (8, 64, 16, 32, 64)]
        read = [device.tensor(torch.full_like(each, torch.nan)) for each in weights]
        host = torch.zeros(64)
        for step in (1.0, 2.0):
            for number, target in enumerate(weights):
                host.fill_(step * 10 + number)  # at once, though the copy before may be under way
                mover.send(target, host[: target.numel()])
            mover.wait_device()
            for copy, target in zip(read, weights):
                copy.copy_(target)  # a kernel of the next forward, which a send of the next step must not overtake
            if step == 1.0:
                first = [device.tensor(torch.full_like(each, torch.nan)) for each in read]
                for copy, target in zip(first, read):
                    copy.copy_(target)
        device.compute.synchronize()
    assert [each.unique().tolist() for each in first] == [[10.0], [11.0], [12.0], [13.0], [14.0]]
    assert [each.unique().tolist() for each in read] == [[20.0], [21.0], [22.0], [23.0], [24.0]]
    assert mover.staging_bytes == NUM_STAGES * 4 * 64
