"""What stages hand to each other: over a wire, or by hand where both are on one rank.

A rank reads what another one sent it in the order in which that one sent, which its schedule says, and keeps what it
does not want yet.  So messages need no tags, which not every backend has.
"""

from __future__ import annotations

from collections import deque
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm

from .actions import Kind
from .module import PipelineModule
from .schedule import Schedule
from .wires import Coming, Wires

Name = tuple[int, int, bool]  # (stage that receives, micro-batch, whether it is a gradient)


@final
@attrs.define(eq=False)
class Post:
    """The messages of one batch."""

    rank: int
    num_ranks: int
    wires: Wires
    expected: dict[int, deque[Name]] = attrs.field(factory=dict)  # by sending rank, in its order
    here: dict[Name, Any] = attrs.field(factory=dict)  # arrived, or handed over on this rank
    coming: dict[int, tuple[Name, Coming]] = attrs.field(factory=dict)  # by sending rank, what it sends next
    num_stages: int = 0

    @classmethod
    def of(cls, module: PipelineModule, group: ProcessGroup | None, device: torch.device) -> Post:
        """For the ranks of a pipeline; a collective of those."""
        down = group if device.type == "cpu" else zcomm.twin(group)
        if module.place.num_ranks > 1:
            zcomm.close_on_failure(group)
            zcomm.close_on_failure(down)
        wires = Wires(group, device, module.dynamic_shape, down)
        return cls(module.place.rank, module.place.num_ranks, wires, num_stages=module.num_stages)

    def begin(self, schedule: Schedule) -> None:
        """A batch: what will come, by the schedules of the others."""
        self._clear()
        for rank, actions in enumerate(schedule.ranks):
            for action in actions:
                if action.kind is Kind.FORWARD and action.stage + 1 < schedule.stages:
                    self._expect(rank, (action.stage + 1, action.micro, False))
                elif action.kind.makes_gradient and action.stage:
                    self._expect(rank, (action.stage - 1, action.micro, True))
        self._look_ahead()

    def begin_forward(self, micro_batches: int) -> None:
        """A batch that is only evaluated: micro-batch by micro-batch through all stages."""
        self._clear()
        for micro in range(micro_batches):
            for stage in range(1, self.num_stages):
                self._expect((stage - 1) % self.num_ranks, (stage, micro, False))
        self._look_ahead()

    def _clear(self) -> None:
        self.here.clear()
        self.wires.forget_shapes()  # batches may differ, whatever micro-batches do
        self.expected = {rank: deque() for rank in range(self.num_ranks)}

    def _expect(self, sender: int, name: Name) -> None:
        if name[0] % self.num_ranks == self.rank and sender != self.rank:
            self.expected[sender].append(name)

    def end(self) -> None:
        """Nothing of this rank's is under way any more."""
        self.wires.flush()
        self.here.clear()

    def abandon(self) -> None:
        """A batch that failed here or elsewhere: what was sent is no longer waited for.  `Alarm` tells the others."""
        self.wires.under_way.clear()
        self.here.clear()
        self.coming.clear()

    def give_value(self, stage: int, micro: int, value: Any) -> None:
        """The input of `stage`."""
        self._give((stage, micro, False), value)

    def take_value(self, stage: int, micro: int) -> Any:
        """Leaves of a graph of their own, so that their gradients are there after the stage's backward."""
        return self._take((stage - 1) % self.num_ranks, (stage, micro, False))

    def give_gradient(self, stage: int, micro: int, inputs: Any) -> None:
        """The gradient of the output of `stage`: what `inputs` of the next one have got."""
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        made = tuple(None if part is None or not part.requires_grad else _gradient(part) for part in parts)
        self._give((stage, micro, True), made if isinstance(inputs, tuple) else made[0])

    def take_gradient(self, stage: int, micro: int) -> Any:
        """The gradient of the output of `stage`."""
        return self._take((stage + 1) % self.num_ranks, (stage, micro, True))

    def _give(self, name: Name, value: Any) -> None:
        to = name[0] % self.num_ranks
        if to == self.rank:
            self.here[name] = _apart(value)
        else:
            self.wires.send(value, to, edge=2 * name[0] + name[2])

    def _take(self, source: int, name: Name) -> Any:
        while name not in self.here:
            arrived, coming = self.coming.pop(source)
            self.here[arrived] = coming.wait()
            self._look_ahead(source)
        return self.here.pop(name)

    def _look_ahead(self, *sources: int) -> None:
        for source in sources or self.expected:
            if self.expected[source]:
                name = self.expected[source].popleft()
                self.coming[source] = name, self.wires.expect(source, edge=2 * name[0] + name[2])


def _gradient(part: Tensor) -> Tensor:
    return torch.zeros_like(part) if part.grad is None else part.grad


def _apart(value: Any) -> Any:
    """As if it had come over a wire."""
    if isinstance(value, tuple):
        return tuple(_apart(part) for part in value)
    return None if value is None else value.detach().requires_grad_(value.requires_grad)
