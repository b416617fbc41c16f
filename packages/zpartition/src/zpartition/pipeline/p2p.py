"""Point-to-point messages between stages: through channels, or directly where both stages are on one rank.

A rank receives the messages of another in the order in which that one sends them, which its schedule gives, and keeps
those that it does not need yet.  So messages need no tags, which not every backend supports.
"""

from __future__ import annotations

from collections import deque
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition.pipeline.actions import ActionKind
from zpartition.pipeline.channels import Channels, PendingReceive
from zpartition.pipeline.module import PipelineModule
from zpartition.pipeline.schedule import Schedule

MessageKey = tuple[int, int, bool]  # (stage that receives, micro-batch, whether it is a gradient)


@final
@attrs.define(eq=False)
class P2P:
    """The messages of one batch."""

    rank: int
    num_ranks: int
    channels: Channels
    expected: dict[int, deque[MessageKey]] = attrs.field(factory=dict)  # by sending rank, in its order
    here: dict[MessageKey, Any] = attrs.field(factory=dict)  # received, or sent on this rank itself
    coming: dict[int, tuple[MessageKey, PendingReceive]] = attrs.field(
        factory=dict
    )  # by sending rank, what it sends next
    num_stages: int = 0

    @classmethod
    def of(cls, module: PipelineModule, group: ProcessGroup | None, device: torch.device) -> P2P:
        """Create for the ranks of a pipeline; a collective of them."""
        down = group if device.type == "cpu" else zcomm.duplicate_group(group)
        if module.pipeline_position.num_ranks > 1:
            zcomm.close_on_failure(group)
            zcomm.close_on_failure(down)
        channels = Channels(group, device, module.dynamic_shape, down)
        return cls(
            module.pipeline_position.rank, module.pipeline_position.num_ranks, channels, num_stages=module.num_stages
        )

    def begin(self, schedule: Schedule) -> None:
        """Start a batch: list the messages to expect, from the schedules of the other ranks."""
        self._clear()
        for rank, actions in enumerate(schedule.ranks):
            for action in actions:
                if action.kind is ActionKind.FORWARD and action.stage + 1 < schedule.stages:
                    self._add_expected(rank, (action.stage + 1, action.micro, False))
                elif action.kind.makes_gradient and action.stage:
                    self._add_expected(rank, (action.stage - 1, action.micro, True))
        self._post_next()

    def begin_evaluation(self, micro_batches: int) -> None:
        """Start an evaluation: forwards only, micro-batch by micro-batch through all stages."""
        self._clear()
        for micro in range(micro_batches):
            for stage in range(1, self.num_stages):
                self._add_expected((stage - 1) % self.num_ranks, (stage, micro, False))
        self._post_next()

    def _clear(self) -> None:
        self.here.clear()
        self.channels.forget_shapes()  # batches may differ, whatever micro-batches do
        self.expected = {rank: deque() for rank in range(self.num_ranks)}

    def _add_expected(self, sender: int, name: MessageKey) -> None:
        if name[0] % self.num_ranks == self.rank and sender != self.rank:
            self.expected[sender].append(name)

    def end(self) -> None:
        """Wait until no message of this rank is in flight."""
        self.channels.flush()
        self.here.clear()

    def abort(self) -> None:
        """Drop the messages of a failed batch without waiting.  `AbortGuard` informs the other ranks."""
        self.channels.in_flight.clear()
        self.here.clear()
        self.coming.clear()

    def send_activation(self, stage: int, micro: int, value: Any) -> None:
        """Send the input of `stage`."""
        self._send((stage, micro, False), value)

    def receive_activation(self, stage: int, micro: int) -> Any:
        """Receive the input of `stage`, as leaves of a new graph that hold gradients after the stage's backward."""
        return self._receive((stage - 1) % self.num_ranks, (stage, micro, False))

    def send_gradient(self, stage: int, micro: int, inputs: Any) -> None:
        """Send the gradient of the output of `stage`: the `.grad` of the next stage's `inputs`."""
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        made = tuple(None if part is None or not part.requires_grad else _gradient(part) for part in parts)
        self._send((stage, micro, True), made if isinstance(inputs, tuple) else made[0])

    def receive_gradient(self, stage: int, micro: int) -> Any:
        """Receive the gradient of the output of `stage`."""
        return self._receive((stage + 1) % self.num_ranks, (stage, micro, True))

    def _send(self, name: MessageKey, value: Any) -> None:
        to = name[0] % self.num_ranks
        if to == self.rank:
            self.here[name] = _detached(value)
        else:
            self.channels.send(value, to, edge=2 * name[0] + name[2])

    def _receive(self, source: int, name: MessageKey) -> Any:
        while name not in self.here:
            arrived, coming = self.coming.pop(source)
            self.here[arrived] = coming.wait()
            self._post_next(source)
        return self.here.pop(name)

    def _post_next(self, *sources: int) -> None:
        for source in sources or self.expected:
            if self.expected[source]:
                name = self.expected[source].popleft()
                self.coming[source] = name, self.channels.expect_receive(source, edge=2 * name[0] + name[2])


def _gradient(part: Tensor) -> Tensor:
    return torch.zeros_like(part) if part.grad is None else part.grad


def _detached(value: Any) -> Any:
    """Detach, as a message through a channel would be."""
    if isinstance(value, tuple):
        return tuple(_detached(part) for part in value)
    return None if value is None else value.detach().requires_grad_(value.requires_grad)
