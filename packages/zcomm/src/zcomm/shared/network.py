"""Network: Gloo connections between the ranks of equal index on all hosts.

A Gloo back end of its own rather than a process group: torch's table of groups would keep it alive after the group
that it serves, and gives a group of the same ranks the same name when it is made again.  Its key in the store is a
random token drawn by one of the ranks, so it never meets keys of another network.

It moves bytes only and leaves sums to `levels.py`: Gloo's own sums depend on how a tensor is cut, and exchange plus
sum is faster (between two ranks of one machine, 32 MiB: allreduce 43 ms, two broadcasts 28 ms, alltoall 26 ms).
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

__all__ = ["Network", "NetworkWork"]

_CONNECT_S = 30.0  # limit for connecting; the ranks begin together and exchange the outcome


@final
@attrs.frozen(eq=False)
class NetworkWork:
    """Messages in flight."""

    network: Network
    works: Sequence[Any]  # torch.distributed.Work

    def wait(self) -> None:
        """Wait for the messages.  Raises SharedMemoryFailed.  May be interrupted, and called again."""
        for work in self.works:
            try:
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

    def gather(self, pieces: Sequence[Tensor]) -> NetworkWork:
        """Overwrite piece h on every host with that of host h.  Contiguous tensors, of equal length for one h."""
        return NetworkWork(self, [self._broadcast(piece, host) for host, piece in enumerate(pieces)])

    def broadcast(self, tensor: Tensor, host: int) -> NetworkWork:
        """Overwrite `tensor` on every host with that of `host`."""
        return NetworkWork(self, [self._broadcast(tensor, host)])

    def exchange(self, output: Tensor, input: Tensor, lengths: Sequence[int]) -> NetworkWork:
        """Send each host its piece of `input`, of `lengths` elements, and receive one from each.

        output: (size * n,), where n is the length of this host's piece; input: (sum of lengths,).
        """
        sent = [length * input.element_size() for length in lengths]
        received = [output.nbytes // self.size] * self.size
        work = self._live_link().alltoall_base(output.view(torch.uint8), input.view(torch.uint8), received, sent)
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

    def _broadcast(self, tensor: Tensor, host: int) -> Any:
        return compat.link_broadcast(self._live_link(), tensor.view(torch.uint8), host)
