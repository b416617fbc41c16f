"""Network: Gloo connections between the ranks of equal index on all hosts.

A Gloo back end of its own rather than a process group: torch's table of groups would keep it alive after the group
that it serves, and gives a group of the same ranks the same name when it is made again.  Its key in the store is a
random token drawn by one of the ranks, so it never meets keys of another network.

It moves bytes only and leaves sums to `levels.py`: Gloo's own sums depend on how a tensor is cut.

[Note: long messages]  Gloo queues a receiver's "ready" behind the data that it sends to the same rank.  In Gloo's
alltoall, and where two ranks broadcast to each other, the rank that is first sends all its data before the other may
begin, so a long message uses one direction of a wire at a time.  Long messages are therefore sent and received pair
by pair, all receives posted first (8 MB each way at 1 Gbit/s: 64 ms instead of 128; at 10 Gbit/s 7.0 instead of 19,
allreduce 10.7).  Their wait cannot be cut into slices, since a receive that times out closes the connections: only
the thread of the task queue waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zcomm import compat, gloo
from zcomm.hangs.observer import ABORTED, observer
from zcomm.shared.failure import SharedMemoryFailed

__all__ = ["LONG_BYTES", "Network", "NetworkWork"]

LONG_BYTES = 128 * 1024  # longer messages are sent pair by pair
_CONNECT_S = 30.0  # limit for connecting; the ranks begin together and exchange the outcome


@final
@attrs.frozen(eq=False)
class NetworkWork:
    """Messages in flight."""

    network: Network
    works: Sequence[Any]  # torch.distributed.Work
    is_pairwise: bool = False  # sends and receives, whose wait cannot be cut

    def wait(self) -> None:
        """Wait for the messages.  Raises SharedMemoryFailed.

        May be called again, and, unless it is pairwise, interrupted.
        """
        for work in self.works:
            try:
                if self.is_pairwise:
                    work.wait()
                    continue
                while not gloo.wait_slice(work):
                    self.network.check()
            except SharedMemoryFailed:
                raise
            except RuntimeError as error:
                raise SharedMemoryFailed(self.network.error_text(error)) from error


@final
@attrs.define(eq=False)
class Network:
    """This rank's end.

    Invariant: `link` is None exactly when it is closed.
    """

    link: Any  # a Gloo back end
    ranks: tuple[int, ...]  # global ranks, by host
    host: int  # this rank's
    num_pairwise: int = 0  # rounds of pairwise messages so far: the next tag, equal on all hosts

    @classmethod
    def open(cls, key: str, ranks: tuple[int, ...], host: int, timeout_s: float) -> Network:
        """Connect `ranks`, a collective in which all pass the same key.

        timeout_s: time limit of a message.  Raises RuntimeError if they do not connect, well before that time has
        passed.
        """
        connect_s = min(_CONNECT_S, timeout_s / 4)
        link = compat.open_gloo_link(f"zcomm/{key}", host, len(ranks), connect_s=connect_s, timeout_s=timeout_s)
        return cls(link, ranks, host)

    @property
    def size(self) -> int:
        """Number of hosts."""
        return len(self.ranks)

    def gather(self, pieces: Sequence[Tensor], tag: int | None = None) -> NetworkWork:
        """Overwrite piece h on every host with that of host h.  Contiguous tensors, of equal length for one h.

        tag: of messages pair by pair, which may be in flight beside those with another tag; None: in order.
        """
        if tag is not None or max(piece.nbytes for piece in pieces) > LONG_BYTES:
            bytes_of = [piece.view(torch.uint8) for piece in pieces]
            return self._pairwise(bytes_of, [bytes_of[self.host]] * self.size, tag)
        return NetworkWork(self, [self._broadcast(piece, host) for host, piece in enumerate(pieces)])

    def broadcast(self, tensor: Tensor, host: int) -> NetworkWork:
        """Overwrite `tensor` on every host with that of `host`."""
        return NetworkWork(self, [self._broadcast(tensor, host)])

    def exchange(self, output: Tensor, pieces: Sequence[Tensor], tag: int | None = None) -> NetworkWork:
        """Send each host its piece, and receive one from each; tag: as in `gather`.

        output: (size, n), where n is the length of this host's piece; its own row is undefined afterwards.
        """
        sent = [piece.nbytes for piece in pieces]
        if tag is not None or max(sent) > LONG_BYTES:
            rows = [row.view(torch.uint8) for row in output]
            return self._pairwise(rows, [piece.view(torch.uint8) for piece in pieces], tag)
        input = torch.cat([piece.view(torch.uint8) for piece in pieces])
        received = [output.nbytes // self.size] * self.size
        work = self._live_link().alltoall_base(output.view(-1).view(torch.uint8), input, received, sent)
        return NetworkWork(self, [work])

    def barrier(self) -> NetworkWork:
        """Return work that ends when all hosts have called."""
        return NetworkWork(self, [compat.link_barrier(self._live_link())])

    def check(self) -> None:
        """Raise SharedMemoryFailed if the network is closed or the world aborted."""
        self._live_link()
        if observer().is_aborted():
            raise SharedMemoryFailed(ABORTED)

    def error_text(self, error: RuntimeError) -> str:
        """Message for an error of Gloo's."""
        others = [rank for host, rank in enumerate(self.ranks) if host != self.host]
        whom = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        return f"between hosts, with {whom}: {(str(error).splitlines() or [''])[0]}"

    def abort(self) -> None:
        """Close the connections: messages in flight fail here and on the other hosts."""
        if self.link is not None:
            compat.break_link(self.link, peer=(self.host + 1) % self.size)

    def close(self) -> None:
        """Release the connections.  Waits for messages in flight: abort first, if there are any."""
        self.link = None

    def _live_link(self) -> Any:
        if self.link is None:
            raise SharedMemoryFailed("this rank has closed the group.")
        return self.link

    def _pairwise(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int | None) -> NetworkWork:
        """Receive output h from host h and send it input h, for all other hosts: see [Note: long messages]."""
        link = self._live_link()
        if tag is None:
            tag, self.num_pairwise = self.num_pairwise % compat.NUM_LINK_TAGS, self.num_pairwise + 1
        others = [(self.host + step) % self.size for step in range(1, self.size)]
        try:
            works = [link.recv([outputs[host]], host, tag) for host in reversed(others) if outputs[host].numel()]
            works += [link.send([inputs[host]], host, tag) for host in others if inputs[host].numel()]
        except RuntimeError as error:
            raise SharedMemoryFailed(self.error_text(error)) from error
        return NetworkWork(self, works, is_pairwise=True)

    def _broadcast(self, tensor: Tensor, host: int) -> Any:
        return compat.link_broadcast(self._live_link(), tensor.view(torch.uint8), host)
