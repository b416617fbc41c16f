"""Point-to-point messages of a batch: activations and gradients between stages, and tied weights.

Messages go through channels, or directly where both stages are on one rank.  They need no tags, which not every
backend supports: both ranks know from the schedule which message comes next.

On a CPU each message travels by itself: it is sent when it is computed, and a receive is posted before it is waited
for, so that no message needs a handshake (`EarlyReceives`).  A rank receives a peer's messages in the order in which
the peer's schedule sends them, and keeps those that it does not need yet.  A GPU executes messages in the order of
their launches, which all ranks agree on (`AgreedOrder`; see launch_order.py).

The owner of a tied weight broadcasts it before a batch to the ranks of the other stages that use it.  They compute
with copies that no optimizer sees, and send back the gradients, which the owner accumulates by one more backward of
its parameter.  All ranks go through tied weights, their copies and parameters in one order, so these messages have an
agreed order, too.
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
from zpartition.pipeline.channels import TIED_EDGE, Channels, PendingReceive, PreparedSend
from zpartition.pipeline.launch_order import Launch, StageMessage, launch_order, sent_messages
from zpartition.pipeline.module import PipelineModule
from zpartition.pipeline.schedule import Schedule

MPGroups = tuple[ModelParallelGroup | None, ModelParallelGroup | None]  # that share activations, and gradients


@final
@attrs.define(eq=False)
class EarlyReceives:
    """Messages that each travel by themselves: the next one of every peer is always posted."""

    channels: Channels
    mp_groups: MPGroups
    expected: dict[int, deque[StageMessage]] = attrs.field(factory=dict)  # by sending rank, in its order
    arrived: dict[StageMessage, Any] = attrs.field(factory=dict)  # received, not needed yet
    pending: dict[int, tuple[StageMessage, PendingReceive]] = attrs.field(
        factory=dict
    )  # by sending rank, what it sends next

    def begin(self, schedule: Schedule, rank: int) -> None:
        """Start a batch: list the messages to expect, from the schedules of the other ranks."""
        self.clear()
        for source in range(len(schedule.ranks)):
            sent = (message for _, message in sent_messages(schedule, source))
            self.expected[source] = deque(message for message in sent if message.target == rank)
            self._post_next(source)

    def send(self, message: StageMessage, value: Any) -> None:
        """Send a message at once."""
        self.channels.send(value, message.target, message.edge, self.mp_groups[message.is_gradient])

    def receive(self, message: StageMessage) -> Any:
        """Wait for a message, and those that its sender sends before."""
        while message not in self.arrived:
            found, pending = self.pending.pop(message.source)
            self.arrived[found] = pending.wait()
            self._post_next(message.source)
        return self.arrived.pop(message)

    def proceed(self, num_actions: int) -> None:
        """Do nothing: no message waits for others."""

    def clear(self) -> None:
        """Drop the messages of a batch."""
        self.arrived.clear()
        self.pending.clear()

    def _post_next(self, source: int) -> None:
        if self.expected[source]:
            message = self.expected[source].popleft()
            mp_group = self.mp_groups[message.is_gradient]
            self.pending[source] = message, self.channels.expect_receive(source, message.edge, mp_group)


@final
@attrs.define(eq=False)
class AgreedOrder:
    """Messages in the order of `launch_order`.

    Invariant: what is launched is a prefix of this rank's launches.
    """

    channels: Channels
    mp_groups: MPGroups
    launches: deque[Launch] = attrs.field(factory=deque)  # still to come
    rank: int = -1  # of this process, in the batch
    done: int = 0  # actions of this rank that have been executed
    computed: dict[StageMessage, Any] = attrs.field(factory=dict)  # values to send, not launched yet
    pending: dict[StageMessage, PendingReceive] = attrs.field(factory=dict)  # launched, not waited for yet

    def begin(self, schedule: Schedule, rank: int) -> None:
        """Start a batch."""
        self.clear()
        self.rank = rank
        self.launches.extend(launch_order(schedule)[rank])
        self.proceed(0)

    def send(self, message: StageMessage, value: Any) -> None:
        """Send a message when it is its turn, the earliest at once."""
        self.computed[message] = value
        self._launch(self.done + 1)  # the action that has computed it is as good as over

    def receive(self, message: StageMessage) -> Any:
        """Wait for a message."""
        return self.pending.pop(message).wait()

    def proceed(self, num_actions: int) -> None:
        """Launch what precedes the next action of this rank, after `num_actions`."""
        self.done = num_actions
        self._launch(num_actions)
        assert not self.launches or self.launches[0].after > num_actions, "a message was not computed in time"

    def clear(self) -> None:
        """Drop the messages of a batch."""
        self.launches.clear()
        self.computed.clear()
        self.pending.clear()

    def _launch(self, num_actions: int) -> None:
        """Launch groups in order, as far as they may precede the actions after `num_actions` and are computed."""
        while self.launches and self.launches[0].after <= num_actions:
            messages = self.launches[0].messages
            if any(each.source == self.rank and each not in self.computed for each in messages):
                return
            sends: list[PreparedSend] = []  # prepared in the order of the launches: the first of an edge has a header
            receives: list[PendingReceive] = []
            for each in messages:
                mp_group = self.mp_groups[each.is_gradient]
                if each.source == self.rank:
                    value = self.computed.pop(each)
                    sends.append(self.channels.prepare(value, each.target, each.edge, mp_group))
                else:
                    self.pending[each] = PendingReceive(self.channels, each.source, each.edge, mp_group)
                    receives.append(self.pending[each])
            self.channels.exchange(sends, receives)
            self.launches.popleft()


@final
@attrs.define(eq=False)
class P2P:
    """The messages of one batch."""

    rank: int
    num_ranks: int
    channels: Channels
    messages: EarlyReceives | AgreedOrder  # to and from other ranks
    kept: dict[StageMessage, Any] = attrs.field(factory=dict)  # sent on this rank to itself

    @classmethod
    def of(
        cls,
        module: PipelineModule,
        group: ProcessGroup | None,
        device: torch.device,
        mp_groups: MPGroups = (None, None),
    ) -> P2P:
        """Create for the ranks of a pipeline; a collective of them."""
        position, in_order = module.pipeline_position, zcomm.runs_in_order(device, group)
        if position.num_ranks > 1:
            zcomm.close_on_failure(group)
            if in_order:  # NCCL makes a communicator in its first operation, in which all its ranks take part
                zcomm.barrier(group, label="pipeline")
        channels = Channels(group, device, module.dynamic_shape)
        make = AgreedOrder if in_order else EarlyReceives
        return cls(position.rank, position.num_ranks, channels, make(channels, mp_groups))

    def begin(self, schedule: Schedule) -> None:
        """Start a batch, or an evaluation."""
        self.kept.clear()
        self.messages.begin(schedule, self.rank)

    def proceed(self, num_actions: int) -> None:
        """Launch the messages that precede the next action of this rank, after `num_actions`."""
        self.messages.proceed(num_actions)

    def end(self) -> None:
        """Wait until no message of this rank is in flight; the next batch may have other shapes."""
        self.channels.flush()
        self.channels.forget_shapes()

    def abort(self) -> None:
        """Drop the messages of a failed batch without waiting.  `AbortGuard` informs the other ranks."""
        self.channels.in_flight.clear()
        self.channels.forget_shapes()
        self.kept.clear()
        self.messages.clear()

    def send_activation(self, stage: int, micro: int, value: Any) -> None:
        """Send the input of `stage`."""
        self._send(self._message(stage, micro, stage - 1, is_gradient=False), value)

    def receive_activation(self, stage: int, micro: int) -> Any:
        """Receive the input of `stage`, as leaves of a new graph that hold gradients after the stage's backward."""
        return self._receive(self._message(stage, micro, stage - 1, is_gradient=False))

    def send_gradient(self, stage: int, micro: int, inputs: Any) -> None:
        """Send the gradient of the output of `stage`: the `.grad` of the next stage's `inputs`."""
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        made = tuple(None if part is None or not part.requires_grad else _grad_or_zeros(part) for part in parts)
        message = self._message(stage, micro, stage + 1, is_gradient=True)
        self._send(message, made if isinstance(inputs, tuple) else made[0])

    def receive_gradient(self, stage: int, micro: int) -> Any:
        """Receive the gradient of the output of `stage`."""
        return self._receive(self._message(stage, micro, stage + 1, is_gradient=True))

    def _message(self, stage: int, micro: int, sender: int, *, is_gradient: bool) -> StageMessage:
        return StageMessage(stage, micro, is_gradient, sender % self.num_ranks, stage % self.num_ranks)

    def _send(self, message: StageMessage, value: Any) -> None:
        if message.target == self.rank:
            self.kept[message] = _detach(value)
        else:
            self.messages.send(message, value)

    def _receive(self, message: StageMessage) -> Any:
        return self.kept.pop(message) if message.source == self.rank else self.messages.receive(message)


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
