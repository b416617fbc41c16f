"""Point-to-point messages of a batch: activations and gradients between stages, and tied weights.

Messages go through channels, or directly where both stages are on one rank.  A rank receives a peer's messages in
the order in which the peer's schedule sends them, and keeps those that it does not need yet.  So messages need no
tags, which not every backend supports.

The owner of a tied weight broadcasts it before a batch to the ranks of the other stages that use it.  They compute
with copies that no optimizer sees, and send back the gradients, which the owner accumulates by one more backward of
its parameter.
"""

from __future__ import annotations

from collections import deque
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.pipeline.channels import TIED_EDGE, Channels, PendingReceive
from zpartition.pipeline.module import PipelineModule
from zpartition.pipeline.schedule import ActionKind, Schedule

MessageKey = tuple[int, int, bool]  # (stage that receives, micro-batch, whether it is a gradient)


@final
@attrs.define(eq=False)
class P2P:
    """The messages of one batch."""

    rank: int
    num_ranks: int
    channels: Channels
    expected: dict[int, deque[MessageKey]] = attrs.field(factory=dict)  # by sending rank, in its order
    arrived: dict[MessageKey, Any] = attrs.field(factory=dict)  # received, or sent on this rank itself
    pending: dict[int, tuple[MessageKey, PendingReceive]] = attrs.field(
        factory=dict
    )  # by sending rank, what it sends next
    num_stages: int = 0
    mp_groups: tuple[ModelParallelGroup | None, ModelParallelGroup | None] = (
        None,
        None,
    )  # that share activations, and gradients

    @classmethod
    def of(
        cls,
        module: PipelineModule,
        group: ProcessGroup | None,
        device: torch.device,
        mp_groups: tuple[ModelParallelGroup | None, ModelParallelGroup | None] = (None, None),
    ) -> P2P:
        """Create for the ranks of a pipeline; a collective of them."""
        down = zcomm.duplicate_group(group) if zcomm.runs_in_order(device, group) else group
        if module.pipeline_position.num_ranks > 1:
            zcomm.close_on_failure(group)
            zcomm.close_on_failure(down)
        channels = Channels(group, device, module.dynamic_shape, down)
        return cls(
            module.pipeline_position.rank,
            module.pipeline_position.num_ranks,
            channels,
            num_stages=module.num_stages,
            mp_groups=mp_groups,
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
        self.arrived.clear()
        self.channels.forget_shapes()  # shapes may differ between batches
        self.expected = {rank: deque() for rank in range(self.num_ranks)}

    def _add_expected(self, sender: int, name: MessageKey) -> None:
        if name[0] % self.num_ranks == self.rank and sender != self.rank:
            self.expected[sender].append(name)

    def end(self) -> None:
        """Wait until no message of this rank is in flight."""
        self.channels.flush()
        self.arrived.clear()

    def abort(self) -> None:
        """Drop the messages of a failed batch without waiting.  `AbortGuard` informs the other ranks."""
        self.channels.in_flight.clear()
        self.arrived.clear()
        self.pending.clear()

    def send_activation(self, stage: int, micro: int, value: Any) -> None:
        """Send the input of `stage`."""
        self._send((stage, micro, False), value)

    def receive_activation(self, stage: int, micro: int) -> Any:
        """Receive the input of `stage`, as leaves of a new graph that hold gradients after the stage's backward."""
        return self._receive((stage - 1) % self.num_ranks, (stage, micro, False))

    def send_gradient(self, stage: int, micro: int, inputs: Any) -> None:
        """Send the gradient of the output of `stage`: the `.grad` of the next stage's `inputs`."""
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        made = tuple(None if part is None or not part.requires_grad else _grad_or_zeros(part) for part in parts)
        self._send((stage, micro, True), made if isinstance(inputs, tuple) else made[0])

    def receive_gradient(self, stage: int, micro: int) -> Any:
        """Receive the gradient of the output of `stage`."""
        return self._receive((stage + 1) % self.num_ranks, (stage, micro, True))

    def _send(self, name: MessageKey, value: Any) -> None:
        to = name[0] % self.num_ranks
        if to == self.rank:
            self.arrived[name] = _detach(value)
        else:
            self.channels.send(value, to, 2 * name[0] + name[2], self.mp_groups[name[2]])

    def _receive(self, source: int, name: MessageKey) -> Any:
        while name not in self.arrived:
            key, pending = self.pending.pop(source)
            self.arrived[key] = pending.wait()
            self._post_next(source)
        return self.arrived.pop(name)

    def _post_next(self, *sources: int) -> None:
        for source in sources or self.expected:
            if self.expected[source]:
                name = self.expected[source].popleft()
                edge, mp_group = 2 * name[0] + name[2], self.mp_groups[name[2]]
                self.pending[source] = name, self.channels.expect_receive(source, edge, mp_group)


@final
@attrs.define(eq=False)
class TiedWeights:
    """Tied weights of this rank, owned and copied."""

    module: PipelineModule
    channels: Channels

    @property
    def has_copies(self) -> bool:
        """True if this rank owns weights that another one copies: then a batch ends with one more backward here."""
        return any(self._copy_ranks(key) for key in self.module.owned)

    def broadcast(self) -> None:
        """Send the owners' weights to the copies.  All ranks of the pipeline call it."""
        for key, number in self._keys():
            owner = self._rank(self.module.ties.owner[key])
            if owner == self.module.pipeline_position.rank:
                for rank in self._copy_ranks(key):
                    for place, param in enumerate(self._params(self.module.owned[key])):
                        self.channels.send(param.detach(), rank, TIED_EDGE + number * 1000 + place)
            elif key in self.module.tied_copies:
                for place, (holder, name) in enumerate(_parameter_slots(self.module.tied_copies[key])):
                    _set_parameter(holder, name, self.channels.receive(owner, TIED_EDGE + number * 1000 + place))

    def reduce_gradients(self) -> None:
        """Add the gradients of the copies to those of the owners."""
        for key, number in self._keys():
            owner = self._rank(self.module.ties.owner[key])
            if owner == self.module.pipeline_position.rank:
                params = self._params(self.module.owned[key])
                for rank in self._copy_ranks(key):
                    got = [self.channels.receive(rank, TIED_EDGE + number * 1000 + at) for at in range(len(params))]
                    pairs = [(param, each) for param, each in zip(params, got) if param.requires_grad]
                    torch.autograd.backward([param for param, _ in pairs], [each for _, each in pairs])
            elif key in self.module.tied_copies:
                for place, param in enumerate(self._params(self.module.tied_copies[key])):
                    gradient = torch.zeros_like(param) if param.grad is None else param.grad
                    self.channels.send(gradient.detach(), owner, TIED_EDGE + number * 1000 + place)
                    param.grad = None

    def _keys(self) -> list[tuple[str, int]]:
        return [(key, number) for number, key in enumerate(sorted(self.module.ties.owner))]

    def _rank(self, stage: int) -> int:
        return stage % self.module.pipeline_position.num_ranks

    def _copy_ranks(self, key: str) -> list[int]:
        ranks = {self._rank(stage) for stage in self.module.ties.users[key]}
        return sorted(ranks - {self._rank(self.module.ties.owner[key])})

    def _params(self, module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters())


def _grad_or_zeros(part: Tensor) -> Tensor:
    return torch.zeros_like(part) if part.grad is None else part.grad


def _detach(value: Any) -> Any:
    """Detach, as a message through a channel would be."""
    if isinstance(value, tuple):
        return tuple(_detach(part) for part in value)
    return None if value is None else value.detach().requires_grad_(value.requires_grad)


def _parameter_slots(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the (module, name) of each parameter, in the order of `module.parameters()`."""
    names = [name for name, _ in module.named_parameters()]
    return [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]


def _set_parameter(holder: nn.Module, name: str, value: Tensor) -> None:
    """Set the parameter's data, or replace it if it has no memory yet (built inside `Init`)."""
    param = holder.get_parameter(name)
    if param.is_meta:
        setattr(holder, name, nn.Parameter(value.detach(), requires_grad=param.requires_grad))
        return
    param.data, param.grad = value, None
