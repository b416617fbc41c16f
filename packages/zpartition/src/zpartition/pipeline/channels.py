"""Channels: tensors from one rank of a pipeline to another.

A message is a tensor or a tuple of tensors and None; floating tensors carry gradients back.

On a CPU messages travel independently.  Sends do not block, and a receive is posted before it is waited for
(`expect_receive`), so that a message needs no handshake.  A GPU executes messages in the order of their launches, on
which all ranks must agree; the caller decides it (`exchange`).  Several messages launched as one, in both directions
and with any ranks, proceed in any order; NCCL executes them as one kernel.

Shapes are sent with the first message of an edge, and with every message if they change (`dynamic_shape`); a change
without that raises on the sending rank.  Messages launched as one send all their shapes first, likewise as one.

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
@attrs.frozen(eq=False)
class PreparedSend:
    """A message that has been checked, and can be sent."""

    to: int  # receiving rank
    header: Tensor | None  # (_HEADER,) int64, if the receiver does not know the shapes
    parts: tuple[Tensor, ...]  # contiguous; without empty ones


@final
@attrs.define(eq=False)
class Channels:
    """The channels of one rank.  `flush` at the end of a batch waits for its sends."""

    group: ProcessGroup | None
    device: torch.device
    dynamic: bool = False
    known: dict[tuple[str, int, int], tuple[bool, Meta]] = attrs.field(
        factory=dict
    )  # (direction, peer, edge) -> last shapes
    in_flight: list[tuple[Any, Tensor]] = attrs.field(factory=list)
    compared: set[tuple[int, int]] = attrs.field(
        factory=set
    )  # (peer, edge) whose parts tensor ranks have compared in this batch

    def prepare(
        self, message: Message, to: int, edge: int, mp_group: ModelParallelGroup | None = None
    ) -> PreparedSend:
        """Check a message for rank `to` of the group; messages of an edge are sent in the order of preparation.

        edge: number of the connection, equal on both sides.
        mp_group: ranks that send the same message, each a part of its floating tensors.
        """
        parts, is_tuple = _split_message(message)
        meta = _make_meta(parts)
        before, header = self.known.get(("to", to, edge)), None
        if before is None or self.dynamic:
            header = _encode(is_tuple, meta).to(self.device)
            if mp_group is not None and mp_group.size > 1:
                _check_equal_shapes(header, mp_group)
            self.known["to", to, edge] = (is_tuple, meta)
        elif before != (is_tuple, meta):
            raise ValueError(
                f"a pipeline stage sends {_describe_meta(meta)} after {_describe_meta(before[1])}: micro-batches of "
                "different shapes need PipelineModule(dynamic_shape=True)"
            )
        sent = []
        for part in parts:
            if part is not None and part.numel():
                data = part.detach().contiguous()
                if mp_group is not None and _is_cut(part, mp_group):
                    if (to, edge) not in self.compared:
                        _check_equal(data, mp_group)
                    data = data.view(mp_group.size, -1)[mp_group.rank]
                sent.append(data.to(self.device))
        self.compared.add((to, edge))
        return PreparedSend(to, header, tuple(sent))

    def exchange(self, sends: Sequence[PreparedSend], receives: Sequence[PendingReceive]) -> None:
        """Launch messages as one; the receives must not have begun.

        Waits for the shapes that are not known.
        """
        asking = [each for number, each in enumerate(receives) if each.needs_header(receives[:number])]
        self._launch(
            [(each.header, each.to) for each in sends if each.header is not None],
            [(each, each.make_header()) for each in asking],
        )
        for each in asking:
            each.read_header()
        self._launch(
            [(part, each.to) for each in sends for part in each.parts],
            [(each, part) for each in receives for part in each.make_parts()],
        )

    def send(self, message: Message, to: int, edge: int, mp_group: ModelParallelGroup | None = None) -> None:
        """Send to rank `to` of the group; see `prepare`."""
        self.exchange([self.prepare(message, to, edge, mp_group)], [])

    def receive(self, source: int, edge: int) -> Message:
        """Receive from rank `source`; floating tensors that required gradients there require them here."""
        pending = PendingReceive(self, source, edge)
        self.exchange([], [pending])
        return pending.wait()

    def expect_receive(self, source: int, edge: int, mp_group: ModelParallelGroup | None = None) -> PendingReceive:
        """Return the next message of rank `source`, to be waited for; one at a time for each rank.

        Posts what can be posted now: the message, or its shapes.
        """
        pending = PendingReceive(self, source, edge, mp_group)
        self.post_receives(pending, [pending.make_header()] if pending.needs_header() else pending.make_parts())
        return pending

    def post_receives(self, pending: PendingReceive, made: Sequence[Tensor]) -> None:
        """Post receives into the memory that `pending` has made."""
        self._launch([], [(pending, data) for data in made])

    def _launch(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[PendingReceive, Tensor]]) -> None:
        """Post sends and receives as one operation, if the back end can.

        sent: with the receiving ranks.
        received: memory, with the messages that wait for it.
        """
        posted = [dist.P2POp(dist.isend, data, group=self.group, group_peer=to) for data, to in sent]
        posted += [dist.P2POp(dist.irecv, data, group=self.group, group_peer=each.source) for each, data in received]
        if not posted:
            return
        zcomm.launching("send" if sent else "receive", self.group)
        try:
            works = dist.batch_isend_irecv(posted)
        except RuntimeError as error:
            raise _message_error(error) from error
        if len(works) < len(posted):  # one for all of them
            works *= len(posted)
        self.in_flight += [(work, data) for work, (data, _) in zip(works, sent)]
        for work, (pending, _) in zip(works[len(sent) :], received):
            pending.works.append(work)

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
    header: Tensor | None = None  # memory for the shapes, while they are awaited
    shapes: tuple[bool, Meta] | None = None  # once its tensors are awaited
    parts: list[Tensor | None] = attrs.field(factory=list)  # memory for what comes
    works: list[Any] = attrs.field(factory=list)  # receives in flight
    pieces: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)  # (received part, memory for the whole tensor)

    def needs_header(self, earlier: Sequence[PendingReceive] = ()) -> bool:
        """Return whether the sender sends a header, given messages that are received before in the same operation."""
        if self.channels.dynamic:
            return True
        is_first = all((each.source, each.edge) != (self.source, self.edge) for each in earlier)
        return is_first and ("from", self.source, self.edge) not in self.channels.known

    def make_header(self) -> Tensor:
        """Return memory for the header: (_HEADER,) int64."""
        self.header = torch.empty(_HEADER, dtype=torch.int64, device=self.channels.device)
        return self.header

    def read_header(self) -> None:
        """Wait for the header."""
        self._wait_receives()
        assert self.header is not None
        self.shapes = self.channels.known["from", self.source, self.edge] = _decode(self.header.tolist())
        self.header = None

    def make_parts(self) -> list[Tensor]:
        """Return memory for the tensors that are sent, or their parts; the shapes must be known."""
        _, meta = self.shapes = self.shapes or self.channels.known["from", self.source, self.edge]
        made: list[Tensor] = []
        for each in meta:
            whole = (
                None if each is None else torch.empty(each[2], dtype=_DTYPES[each[0]], device=self.channels.device)
            )
            self.parts.append(whole)
            if whole is None or not whole.numel():
                continue
            if self.mp_group is not None and _is_cut(whole, self.mp_group):
                self.pieces.append((whole.new_empty(whole.numel() // self.mp_group.size), whole))
            made.append(self.pieces[-1][0] if self.pieces and self.pieces[-1][1] is whole else whole)
        return made

    def wait(self) -> Message:
        """Wait for the message and return it."""
        if self.header is not None:
            self.read_header()
            self.channels.post_receives(self, self.make_parts())
        self._wait_receives()
        for piece, whole in self.pieces:
            group = None if self.mp_group is None else self.mp_group.group
            zcomm.all_gather(whole.view(-1), piece, group, label="parts of a message between stages")
        assert self.shapes is not None
        is_tuple, meta = self.shapes
        for part, each in zip(self.parts, meta):
            if part is not None and each is not None:
                part.requires_grad_(bool(each[1]))
        return tuple(self.parts) if is_tuple else self.parts[0]

    def reply_header(self) -> list[int]:
        """Return the header that this message has, if it answers one that this rank has sent.

        Gradients have the shapes of the activations that were sent, and tied gradients those of the weights.  For
        an activation, which answers none, it is that of the last activation that this rank has sent.
        """
        known, is_gradient = self.channels.known, self.edge < TIED_EDGE and self.edge % 2 == 1
        if self.edge >= TIED_EDGE or is_gradient:
            key = "to", self.source, self.edge + is_gradient
        else:
            key = next(key for key in reversed(known) if key[0] == "to" and key[2] < TIED_EDGE and key[2] % 2 == 0)
        is_tuple, meta = known[key]
        if is_gradient:
            meta = tuple(None if each is None or not each[1] else (each[0], 0, each[2]) for each in meta)
        header: list[int] = _encode(is_tuple, meta).tolist()
        return header

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
