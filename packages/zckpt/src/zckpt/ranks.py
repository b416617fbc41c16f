"""The ranks of a save or load, and the vote on its outcome.

No communication library is required: `Peers` is any object with a rank, a world size and an `exchange` of JSON
values.  `ALONE` is a world of one and runs the same code; `group_peers` wraps a torch process group.

A save or a load consists of a few stages.  In each, every rank does its part and the ranks exchange the outcome
(`Vote`): either all succeed, or all raise one error that names the first rank that failed and the reason.  Without
the vote the healthy ranks would continue, commit half a checkpoint, or hang in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

import attrs
import torch
import torch.distributed as dist

from zckpt.errors import CheckpointError, error_class, os_error_path, os_error_text
from zckpt.format import canonical
from zckpt.format.canonical import JSON


class Peers(Protocol):
    """The ranks that save or load one checkpoint together."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, value: JSON) -> list[JSON]:
        """All-gather: the values of all ranks in rank order.  Every rank calls it; raises if a rank does not."""
        ...


@final
@attrs.frozen
class Alone:
    """A world of one.  `exchange` still makes the JSON round trip, as on many ranks."""

    rank: int = 0
    world_size: int = 1

    def exchange(self, value: JSON) -> list[JSON]:
        return [canonical.load(canonical.dump(value))]


ALONE = Alone()


def group_peers(group: dist.ProcessGroup | None = None) -> Peers:
    """The ranks of an initialized process group (None: the default group).

    A background save communicates from its own thread.  Give it a group that nothing else uses, such as
    `torch.distributed.new_group(backend="gloo")`; otherwise its messages mix with those of the training.  If a rank
    dies, the others raise after the timeout of the group.
    """
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    return _GroupPeers(group, device, dist.get_rank(group), dist.get_world_size(group))


@attrs.frozen
class Vote:
    """The peers of one save or load, and the texts of its errors."""

    peers: Peers
    task: str  # the operation, for errors: "save of 'step-3' into runs/a"
    failure: type[CheckpointError]  # class that wraps foreign errors

    def run(self, stage: str, work: Callable[[], JSON]) -> list[JSON]:
        """Run `work` and exchange the outcome; return the results in rank order, or raise the common error.

        KeyboardInterrupt and SystemExit are sent to the peers as a failure and re-raised unchanged on this rank.
        """
        failure: BaseException | None = None
        try:
            answer = {"ok": work()}
        except BaseException as error:
            failure = error
            answer = {"failed": self._describe(error)}
        answers = self._exchange(stage, answer, failure)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        broken = [(rank, each["failed"]) for rank, each in enumerate(answers) if "failed" in each]
        if broken:
            raise self._common_error(stage, broken) from failure
        return [each["ok"] for each in answers]

    def _exchange(self, stage: str, answer: JSON, failure: BaseException | None) -> list[JSON]:
        rank, world_size = self.peers.rank, self.peers.world_size
        try:
            answers = self.peers.exchange(answer)
        except Exception as lost:
            own = f"; earlier error on this rank: {failure}" if failure is not None else ""
            raise self.failure(
                f"{self.task} failed while {stage}: rank {rank} lost its peers ({type(lost).__name__}: {lost}){own}",
                rank=rank,
            ) from lost
        if len(answers) != world_size:
            raise self.failure(
                f"{self.task}: exchange() returned {len(answers)} values for a world of {world_size} ranks"
            )
        return answers

    def _describe(self, error: BaseException) -> JSON:
        if isinstance(error, CheckpointError):
            return {"kind": type(error).__name__, "text": str(error), "path": error.path}
        if isinstance(error, OSError):
            return {"kind": self.failure.__name__, "text": os_error_text(error), "path": os_error_path(error)}
        return {"kind": self.failure.__name__, "text": f"{type(error).__name__}: {error}", "path": ""}

    def _common_error(self, stage: str, broken: list[tuple[int, JSON]]) -> CheckpointError:
        rank, first = broken[0]
        others = ", ".join(str(other) for other, _ in broken[1:])
        also = f" (also failed: rank {others})" if others else ""
        return error_class(first["kind"])(
            f"{self.task} failed while {stage}: rank {rank}: {first['text']}{also}",
            rank=rank,
            path=first["path"],
        )


@final
@attrs.frozen(eq=False)
class _GroupPeers:
    """JSON over all_gather: the lengths first, then the texts, padded to the longest."""

    group: dist.ProcessGroup | None
    device: torch.device  # device that the backend communicates from
    rank: int
    world_size: int

    def exchange(self, value: JSON) -> list[JSON]:
        text = torch.frombuffer(bytearray(canonical.dump(value)), dtype=torch.uint8)
        mine = torch.tensor([len(text)], dtype=torch.int64, device=self.device)
        lengths = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(lengths, mine, group=self.group)
        sizes = [int(each) for each in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(text)] = text
        texts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(texts, padded, group=self.group)
        return [canonical.load(bytes(each[:size].cpu().numpy())) for each, size in zip(texts, sizes)]
