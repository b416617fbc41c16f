"""Channels: tensors from one rank of a pipeline to another.

Sends do not block, receives do: with a validated schedule no order of them can deadlock.  A message is a tensor or a
tuple of tensors and None; floating tensors carry gradients back.

On a CPU a receive is posted before it is waited for (`expect_receive`), so that a message needs no handshake.  A
GPU's queues execute in posting order, where an early receive would block the work behind it.  If two ranks each send
to the other first, both sends would block both receives; so on GPUs messages to lower ranks have their own process
group, and thereby their own queues (`down`).

Shapes are sent with the first message of an edge, and with every message if they change (`dynamic_shape`); a change
without that raises on the sending rank.

Tensor ranks have equal activations.  With their group (`mp_group`) each of them sends its part of a floating tensor
to the same tensor rank of the next stage, and these gather the parts: links between stages carry every byte once,
not once for each tensor rank.  These ranks compare the first message of every edge of a batch, and the shapes of each
message whose shapes are sent: unequal ones raise on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup

TIED_EDGE = 1 << 20  # the first edge of tied weights, far above those of stages
_MAX_DIMS = 8
_MAX_TENSORS = 16
_HEADER = 2 + _MAX_TENSORS * (3 + _MAX_DIMS)  # whole numbers
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)

Message = Any  # Tensor | tuple[Tensor | None, ...]
Meta = tuple[tuple[int, int, tuple[int, ...]] | None, ...]  # (dtype number, has a gradient, shape) of each


@final
@attrs.define(eq=False)
class Channels:
    """The channels of one rank.  `flush` at the end of a batch waits for its sends."""

    group: ProcessGroup | None
    device: torch.device
    dynamic: bool = False
    down: ProcessGroup | None = attrs.field(
        default=attrs.Factory(lambda self: self.group, takes_self=True)
    )  # the same ranks, for messages to lower ranks
    known: dict[tuple[str, int, int], tuple[bool, Meta]] = attrs.field(
        factory=dict
    )  # (direction, peer, edge) -> last shapes
    in_flight: list[tuple[Any, Tensor]] = attrs.field(factory=list)
    compared: set[tuple[int, int]] = attrs.field(
        factory=set
    )  # (peer, edge) whose parts tensor ranks have compared in this batch

    def send(self, message: Message, to: int, edge: int, mp_group: ModelParallelGroup | None = None) -> None:
        """Send to rank `to` of the group; `edge` numbers the connection, equal on both sides.

        mp_group: ranks that send the same message, each a part of its floating tensors.
        """
        parts, is_tuple = _split_message(message)
        meta = _make_meta(parts)
        before = self.known.get(("to", to, edge))
        if before is None or self.dynamic:
            header = _encode(is_tuple, meta).to(self.device)
            if mp_group is not None and mp_group.size > 1:
                _check_equal_shapes(header, mp_group)
            self._post(header, to)
            self.known["to", to, edge] = (is_tuple, meta)
        elif before != (is_tuple, meta):
            raise ValueError(
                f"a pipeline stage sends {_describe_meta(meta)} after {_describe_meta(before[1])}: micro-batches of "
                "different shapes need PipelineModule(dynamic_shape=True)"
            )
        for part in parts:
            if part is not None and part.numel():
                data = part.detach().contiguous()
                if mp_group is not None and _is_cut(part, mp_group):
                    if (to, edge) not in self.compared:
                        _check_equal(data, mp_group)
                    data = data.view(mp_group.size, -1)[mp_group.rank]
                self._post(data, to)
        self.compared.add((to, edge))

    def receive(self, source: int, edge: int) -> Message:
        """Receive from rank `source`; floating tensors that required gradients there require them here."""
        return self.expect_receive(source, edge).wait()

    def expect_receive(self, source: int, edge: int, mp_group: ModelParallelGroup | None = None) -> PendingReceive:
        """Return the next message of rank `source`, to be waited for; one at a time for each rank."""
        pending = PendingReceive(self, source, edge, mp_group)
        if not zcomm.runs_in_order(self.device, self.group):
            pending.begin()
        return pending

    def known_shapes(self, source: int, edge: int) -> tuple[bool, Meta] | None:
        """Return the shapes of the next message, if known."""
        return None if self.dynamic else self.known.get(("from", source, edge))

    def post_receive(self, source: int, data: Tensor) -> Any:
        """Post a receive into `data`; returns the handle."""
        group = self.group_for(source, self.rank)
        zcomm.launching("receive", group)
        try:
            return dist.irecv(data, group=group, group_src=source)
        except RuntimeError as error:
            raise _message_error(error) from error

    def _post(self, data: Tensor, to: int) -> None:
        data, group = data.to(self.device), self.group_for(self.rank, to)
        zcomm.launching("send", group)
        try:
            self.in_flight.append((dist.isend(data, group=group, group_dst=to), data))
        except RuntimeError as error:
            raise _message_error(error) from error

    @property
    def rank(self) -> int:
        """Rank of this process in `group`."""
        return dist.get_rank(self.group)

    def group_for(self, source: int, to: int) -> ProcessGroup | None:
        """Return the group in which `source` sends to `to`."""
        return self.group if source < to else self.down

    def flush(self) -> None:
        """Wait until all sends have completed."""
        _wait_all(work for work, _ in self.in_flight)
        self.in_flight.clear()

    def broadcast(self, data: Tensor, source: int) -> None:
        """Broadcast `data` of rank `source` to the group."""
        zcomm.launching("broadcast", self.group)
        _wait_all([dist.broadcast(data, group=self.group, group_src=source, async_op=True)])

    def forget_shapes(self) -> None:
        """Allow other shapes in the next batch.  All ranks of the pipeline call it."""
        self.known.clear()
        self.compared.clear()


@final
@attrs.define(eq=False)
class PendingReceive:
    """A message to be received: first its header, if shapes are not known, then its tensors."""

    channels: Channels
    source: int
    edge: int
    mp_group: ModelParallelGroup | None = None  # ranks that receive parts of the same message
    has_begun: bool = False
    parts: list[Tensor | None] = attrs.field(factory=list)  # memory for what comes
    works: list[Any] = attrs.field(factory=list)  # receives in flight
    pieces: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)  # (received part, memory for the whole tensor)

    def begin(self) -> None:
        """Post the receives that can be posted now."""
        self.has_begun = True
        known = self.channels.known_shapes(self.source, self.edge)
        if known is None:
            header = torch.empty(_HEADER, dtype=torch.int64, device=self.channels.device)
            self._receive(header)
        else:
            self._post_tensors(known[1])

    def wait(self) -> Message:
        """Wait for the message and return it."""
        if not self.has_begun:
            self.begin()
        if (known := self.channels.known_shapes(self.source, self.edge)) is None:
            self._wait_receives()
            (header,) = self.parts
            assert header is not None
            known = self.channels.known["from", self.source, self.edge] = _decode(header.tolist())
            self.parts.clear()
            self._post_tensors(known[1])
        self._wait_receives()
        for piece, whole in self.pieces:
            group = None if self.mp_group is None else self.mp_group.group
            zcomm.all_gather(whole.view(-1), piece, group, label="parts of a message between stages")
        is_tuple, meta = known
        for part, each in zip(self.parts, meta):
            if part is not None and each is not None:
                part.requires_grad_(bool(each[1]))
        return tuple(self.parts) if is_tuple else self.parts[0]

    def reply_header(self) -> list[int]:
        """Return the header that this message has, if it answers one that this rank has sent.

        Gradients have the shapes of the activations that were sent, and tied gradients those of the weights.
        """
        is_tied = self.edge >= TIED_EDGE
        is_tuple, meta = self.channels.known["to", self.source, self.edge if is_tied else self.edge + 1]
        if not is_tied:
            meta = tuple(None if each is None or not each[1] else (each[0], 0, each[2]) for each in meta)
        header: list[int] = _encode(is_tuple, meta).tolist()
        return header

    def _post_tensors(self, meta: Meta) -> None:
        for each in meta:
            if each is None:
                self.parts.append(None)
                continue
            made = torch.empty(each[2], dtype=_DTYPES[each[0]], device=self.channels.device)
            if self.mp_group is None or not _is_cut(made, self.mp_group):
                self._receive(made)
                continue
            self.parts.append(made)
            self.pieces.append((made.new_empty(made.numel() // self.mp_group.size), made))
            self._begin_receiving(self.pieces[-1][0])

    def _receive(self, data: Tensor) -> None:
        self.parts.append(data)
        self._begin_receiving(data)

    def _begin_receiving(self, data: Tensor) -> None:
        if data.numel():
            self.works.append(self.channels.post_receive(self.source, data))

    def _wait_receives(self) -> None:
        _wait_all(self.works)
        self.works.clear()


def _is_cut(tensor: Tensor, mp_group: ModelParallelGroup) -> bool:
    """Return whether the ranks of `mp_group` send parts of `tensor`, by its dtype and size."""
    return mp_group.size > 1 and tensor.is_floating_point() and tensor.numel() % mp_group.size == 0


def _check_equal_shapes(header: Tensor, mp_group: ModelParallelGroup) -> None:
    """Raise ValueError on every tensor rank if their messages differ in shapes or dtypes.  Collective.

    header: (_HEADER,) int64 of this rank's message.
    """
    headers = header.new_empty(mp_group.size, _HEADER)
    zcomm.all_gather(headers.view(-1), header, mp_group.group, label="shapes of messages between stages, compared")
    found = [_decode(row) for row in headers.tolist()]
    if any(each != found[0] for each in found):
        texts = "; ".join(f"rank {rank}: {_describe_meta(meta)}" for rank, (_, meta) in enumerate(found))
        raise ValueError(
            f"the {mp_group.size} tensor ranks of a pipeline stage hand on tensors of different shapes or dtypes "
            f"({texts}), so each of them cannot send a part. Give the tensor ranks of a replica the same batches, or "
            "set pipeline.pipe_partitioned and grad_partitioned to false."
        )


def _check_equal(data: Tensor, mp_group: ModelParallelGroup) -> None:
    """Raise ValueError on every tensor rank if parts of `data` do not make everyone's tensor.  Collective."""
    whole = torch.empty_like(data)
    part = data.view(mp_group.size, -1)[mp_group.rank]
    zcomm.all_gather(whole.view(-1), part, mp_group.group, label="parts of a message between stages, compared")
    differs = (whole.view(torch.uint8) != data.view(torch.uint8)).any().to(torch.float32).view(1)
    zcomm.all_reduce(differs, mp_group.group, op="max", label="messages between stages are the same")
    if differs.item():
        raise ValueError(
            f"the {mp_group.size} tensor ranks of a pipeline stage hand on different tensors of shape "
            f"{tuple(data.shape)}, so each of them cannot send a part: the layers split activations by tokens, or "
            "dropout drew different random numbers on each rank. Set pipeline.pipe_partitioned and grad_partitioned "
            "to false."
        )


def _wait_all(works: Iterable[Any]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise _message_error(error) from error


def _message_error(error: RuntimeError) -> zcomm.CollectiveFailed:
    """Build the error for a failed message; asks the other ranks for the cause."""
    first = (str(error).splitlines() or [""])[0]
    return zcomm.CollectiveFailed(
        f"a message between stages of a pipeline failed: {first}\n{zcomm.diagnose_failure()}"
    )


def _split_message(message: Message) -> tuple[Sequence[Tensor | None], bool]:
    parts = message if isinstance(message, tuple) else (message,)
    bad = [type(each).__name__ for each in parts if not isinstance(each, Tensor | None)]
    if bad or len(parts) > _MAX_TENSORS:
        raise TypeError(
            f"a pipeline stage must return a tensor or a tuple of at most {_MAX_TENSORS} tensors, got "
            + (f"a tuple of {len(parts)}" if not bad else f"a {bad[0]} among them")
        )
    return parts, isinstance(message, tuple)


def _make_meta(parts: Sequence[Tensor | None]) -> Meta:
    for part in parts:
        if part is not None and (part.dtype not in _DTYPES or part.dim() > _MAX_DIMS):
            raise TypeError(f"a pipeline stage returns {part.dtype} of {part.dim()} dims: it cannot be sent")
    return tuple(
        None if part is None else (_DTYPES.index(part.dtype), int(part.requires_grad), tuple(part.shape))
        for part in parts
    )


def _encode(is_tuple: bool, meta: Meta) -> Tensor:
    row = [int(is_tuple), len(meta)]
    for each in meta:
        dtype, has_gradient, shape = (-1, 0, ()) if each is None else each
        row += [dtype, has_gradient, len(shape), *shape, *[0] * (_MAX_DIMS - len(shape))]
    return torch.tensor(row + [0] * (_HEADER - len(row)))


def _decode(row: list[int]) -> tuple[bool, Meta]:
    found: list[tuple[int, int, tuple[int, ...]] | None] = []
    for number in range(row[1]):
        dtype, has_gradient, dims, *shape = row[2 + number * (3 + _MAX_DIMS) :][: 3 + _MAX_DIMS]
        found.append(None if dtype < 0 else (dtype, has_gradient, tuple(shape[:dims])))
    return bool(row[0]), tuple(found)


def _describe_meta(meta: Meta) -> str:
    return ", ".join("None" if each is None else f"{list(each[2])} {_DTYPES[each[0]]}" for each in meta)
