"""Played world: this process takes the part of one rank of a large world, and sends nothing.

    with zcomm.played_world(rank=17, size=1024, listen=launches.append):
        train()                       # every collective of rank 17 is announced, and answered at once

Problem.  A rank that launches a collective in another order than its peers stops a run of a thousand GPUs.  Such an
order is a property of the program, and can be compared without the GPUs if one process can run the program of any
rank.

Design.  A process group written in Python replaces the back end, below torch's own functions, so that messages of any
origin are seen: ours, the user's, those of threads.  Each one is announced as a `Launch` (communicator, operation,
bytes, dtype, line of code) before it is answered.  The answer is that of a world in which every rank sends what this
one sends: a gather repeats its input, a reduction leaves it as it is, a message received is what `answer` says, zeros
by default.  What other answers are possible is the caller's affair (`zengine.ordering`).

A communicator is named by its ranks and by the number of earlier groups of the same ranks, which is equal on all of
them, as torch's own names need not be.  Operations of one `batch_isend_irecv` have one number of launch, as NCCL
executes them as one; whoever calls it is told by the stack, so that no function of torch is replaced.

Rejected: torch's back end "fake" (it announces nothing, and a dispatch mode that would is local to a thread);
answers of ranks in other threads (torch's world and its modes are global, and a thousand engines do not fit).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import compat
from zcomm.groups import world as worlds
from zcomm.groups.launch import Launch as Environment
from zcomm.hangs import detector
from zcomm.hangs.fingerprint import CallState, source_line
from zcomm.hangs.observer import UNOBSERVED, NullObserver, install, observer
from zcomm.hangs.report import ranges
from zcomm.shared import registry

__all__ = ["Communicator", "PlayedCall", "played_world"]

_BACKEND, _HOST_BACKEND = compat.PLAYED, compat.PLAYED_HOST


@attrs.frozen(cache_hash=True)
class Communicator:
    """A process group, equal on all its ranks."""

    ranks: tuple[int, ...]  # global ranks, in the order of the group
    number: int  # groups of the same ranks that were made before
    is_on_host: bool = False  # Gloo beside a device's back end

    def __str__(self) -> str:
        return f"group {self.number} of ranks {ranges(self.ranks)}"


@attrs.frozen(kw_only=True)
class PlayedCall:
    """One operation that a rank has launched."""

    communicator: Communicator
    op: str  # torch's name: "allreduce", "send", ...; "new_group" when the group is made
    nbytes: int  # of this rank's larger side
    dtype: str  # without "torch."; "" without a payload
    detail: str  # reduction, or the sender; "" for others
    source: int  # sending rank of the group for send and recv; -1: all take part
    target: int  # receiving rank of the group
    label: str  # of zcomm's call; "" for calls of torch's functions
    thread: str  # name of the thread
    code: CodeType | None  # function that launched it, outside of zcomm and torch
    offset: int  # instruction in `code`
    launch: int = 0  # number of the launch on this rank; operations of one `batch_isend_irecv` share it

    @property
    def line(self) -> str:
        """Line of code, as "file.py:88 in function"."""
        return "" if self.code is None else source_line(self.code, self.offset)


_communicator = functools.cache(Communicator)  # one object each: comparing a thousand ranks takes time

Listener = Callable[[PlayedCall], None]
Answer = Callable[[PlayedCall, Sequence[Tensor], Sequence[Tensor]], None]  # (call, results, sent tensors)


def echo(call: PlayedCall, results: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    """Answer as if every rank had sent `sent`; received messages are zeros."""
    if call.op == "recv":
        for result in results:
            result.zero_()
        return
    total = torch.cat([part.detach().reshape(-1) for part in sent]) if len(sent) > 1 else None
    for result in results:
        source = (sent[0].detach() if total is None else total).reshape(-1)
        if not source.numel() or not result.numel() or result.data_ptr() == source.data_ptr():
            continue
        flat = result.detach().view(-1)
        for start in range(0, flat.numel(), source.numel()):
            flat[start : start + source.numel()].copy_(source[: flat.numel() - start])


@final
@attrs.define(eq=False)
class _Stage:
    """What a played world shares with its groups."""

    listen: Listener
    answer: Answer
    store: _Store = attrs.field(factory=lambda: _Store())  # torch holds its C++ part alone
    counts: Counter[tuple[int, ...]] = attrs.field(factory=Counter)  # groups made, by their ranks
    lock: threading.Lock = attrs.field(factory=threading.Lock)  # launches are announced one at a time
    num_launches: int = 0
    batches: dict[int, tuple[Any, int]] = attrs.field(
        factory=dict
    )  # by thread: frame of its last `batch_isend_irecv`, held so that no later one is taken for it, and its launch

    def launch_of(self, batch: Any) -> int:
        """Return the number of an operation's launch; `batch`: the frame of a batch, or None."""
        last, number = self.batches.pop(threading.get_ident(), (None, 0))
        if batch is None or batch is not last:
            self.num_launches += 1
            number = self.num_launches
        if batch is not None:
            self.batches[threading.get_ident()] = batch, number
        return number


_stage: _Stage | None = None  # of the present played world; torch makes groups by a global table, too


class _PlayedGroup(compat.ProcessGroup):  # type: ignore[misc]  # a class of torch, see there
    """Process group that announces and answers its operations."""

    def __init__(self, stage: _Stage, rank: int, ranks: Sequence[int], *, is_on_host: bool) -> None:
        super().__init__(rank, len(ranks))
        self._played_stage, self._played_rank = stage, rank
        key = tuple(ranks)
        self.communicator = _communicator(key, stage.counts[key], is_on_host)
        stage.counts[key] += 1

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the back end."""
        return _HOST_BACKEND if self.communicator.is_on_host else _BACKEND

    def _play(
        self, op: str, results: Sequence[Tensor], sent: Sequence[Tensor], detail: str = "", peers: Any = (-1, -1)
    ) -> Any:
        stage = self._played_stage
        payload = max(results, sent, key=lambda side: sum(each.nbytes for each in side))
        (code, offset), batch = _launching_line()
        with stage.lock:
            call = PlayedCall(
                communicator=self.communicator,
                op=op,
                nbytes=sum(each.nbytes for each in payload),
                dtype=str(payload[0].dtype).removeprefix("torch.") if payload else "",
                detail=detail,
                source=peers[0],
                target=peers[1],
                label=_label(),
                thread=threading.current_thread().name,
                code=code,
                offset=offset,
                launch=stage.launch_of(batch),
            )
            stage.listen(call)
        with torch.no_grad():
            stage.answer(call, results, sent)
        return _done(list(results))

    # torch calls these by name; older versions by the second name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Sum, or other reductions."""
        return self._play("allreduce", _list(tensors), _list(tensors), _reduction(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduction to one rank."""
        return self._play("reduce", tensors, tensors, f"{_reduction(opts)} to {opts.rootRank}")

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Broadcast."""
        return self._play("broadcast", tensors, tensors, f"from {opts.rootRank}")

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather into lists."""
        return self._play("allgather", [each for part in outputs for each in part], inputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Gather into one tensor."""
        return self._play("allgather", [output], [input])

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce lists; each rank gets its part."""
        return self._play("reduce_scatter", outputs, [each for part in inputs for each in part], _reduction(opts))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Reduce one tensor; each rank gets its part."""
        return self._play("reduce_scatter", [output], [input], _reduction(opts))

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(self, output: Any, input: Any, received: Any, sent: Any, opts: Any = None) -> Any:
        """Exchange of slices, which need not be equal: only the sum over all ranks is comparable, so no bytes."""
        is_even = not received and not sent
        return self._play("alltoall" if is_even else "alltoall of unequal slices", [output], [input])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Exchange of lists."""
        return self._play("alltoall of unequal slices", outputs, inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather to one rank."""
        return self._play("gather", [each for part in outputs for each in part], inputs, f"to {opts.rootRank}")

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Scatter from one rank."""
        sent = [each for part in inputs for each in part]
        return self._play("scatter", outputs, sent or outputs, f"from {opts.rootRank}")

    def barrier(self, opts: Any = None) -> Any:
        """Barrier."""
        return self._play("barrier", [], [])

    def send(self, tensors: Any, target: int, tag: int = 0) -> Any:
        """Message to one rank."""
        return self._play("send", [], tensors, peers=(self._played_rank, target))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Message from one rank."""
        return self._play("recv", tensors, [], peers=(source, self._played_rank))


@final
class _Store(compat.Store):  # type: ignore[misc]  # likewise
    """Store of a world whose other ranks have always just done what this one does."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._values.get(key, b"")

    def add(self, key: str, amount: int) -> int:
        """Count so that no two results divided by the ranks of a group are equal."""
        with self._lock:
            number = int(self._values.get(key, b"0")) + 1
            self._values[key] = str(number).encode()
        return number << 20

    def wait(self, keys: Any, timeout: Any = None) -> None:
        """Return at once."""

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


@contextmanager
def played_world(rank: int, size: int, *, listen: Listener, answer: Answer = echo) -> Iterator[worlds.World]:
    """Play rank `rank` of `size` inside the block: torch's default group, and all groups made of it, send nothing.

    listen: receives each operation before it is answered.
    answer: fills the results of an operation from what this rank sends.

    Raises RuntimeError if a default group exists already.
    """
    global _stage
    if dist.is_initialized():
        raise RuntimeError("played_world() needs a process without a process group: call it before zcomm.init().")
    _register()
    before = observer()
    _stage = _Stage(listen, answer)
    install(NullObserver())  # records what the label of a launch is read from; compares nothing
    try:
        dist.init_process_group(_BACKEND, store=_stage.store, rank=rank, world_size=size)
        group = dist.group.WORLD
        launch = Environment(rank, size, rank, size, "127.0.0.1", 1, _BACKEND)
        detector.install_silent(group, rank, size)
        yield worlds.install(worlds.World(launch, _BACKEND, torch.device("cpu"), group, 600.0))
    finally:
        registry.close_all()
        detector.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
        install(before)
        _stage = None


def _make_group(options: Any, _: Any, *, is_on_host: bool = False) -> _PlayedGroup:
    assert _stage is not None, "a played group outside of a played world"
    ranks = options.global_ranks_in_group or range(options.group_size)
    return _PlayedGroup(_stage, options.group_rank, list(ranks), is_on_host=is_on_host)


def _register() -> None:
    if not hasattr(dist.Backend, _BACKEND.upper()):
        make_on_host = functools.partial(_make_group, is_on_host=True)
        for name, make in ((_BACKEND, _make_group), (_HOST_BACKEND, make_on_host)):
            dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu", "cuda"])


def _done(results: list[Tensor]) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(results)
    return compat.work_of(future)


def _label() -> str:
    """Return the label of zcomm's call that is being issued; "" outside of one."""
    last = UNOBSERVED.last[-1] if UNOBSERVED.last else None
    return last.call.label if last is not None and last.state is CallState.WAITING else ""


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduction(opts: Any) -> str:
    found = None if opts is None else opts.reduceOp
    return next((name for name in ("sum", "max", "min", "product", "avg") if found == _op(name)), "")


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper(), None)


_OWN = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (os.path.dirname(__file__), torch.__file__, os.__file__)
)


_BATCH = inspect.unwrap(dist.batch_isend_irecv).__code__


def _launching_line() -> tuple[tuple[CodeType | None, int], Any]:
    """Find the innermost frame outside of zcomm, torch and the standard library, and torch's frame of a batch."""
    frame: Any = sys._getframe(2)
    batch = None
    while frame is not None:
        name = frame.f_code.co_filename
        is_library = name.startswith(_OWN) and not (
            name.startswith(_OWN[2]) and "-packages" + os.sep in name and not name.startswith(_OWN[1])
        )
        if not is_library and not name.startswith("<"):
            return (frame.f_code, frame.f_lasti), batch
        batch = frame if frame.f_code is _BATCH else batch
        frame = frame.f_back
    return (None, 0), batch
