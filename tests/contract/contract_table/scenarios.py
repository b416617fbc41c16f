"""Scenarios of training: a model, the losses of a micro-step, and incidents.

The oracle uses a scenario with a plain module, the ranks use it with the engine.  Both call `prepare` before each
step and `losses` for each micro-step; only ranks have `Incident`s, which must leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import attrs
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zengine
from contract_table.loads import try_to_load

NUM_STEPS = 4
VOCABULARY, WIDTH, BATCH, LENGTH = 13, 16, 4, 7

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
# Four steps of Adam do not detect a wrong factor of the gradient; momentum does.
MOMENTUM = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A small language model; `forward` returns the mean loss of tokens (batch, length + 1)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, **how: Any) -> torch.Tensor:
        hidden = self.embed(tokens[:, :-1])
        for index, block in enumerate(self.blocks):
            hidden = self.run_block(index, block, hidden, **how)
        logits = self.head(self.norm(hidden))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def run_block(self, index: int, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return block(hidden)


class Checkpointed(Net):
    """Recomputes blocks in backward."""

    use_reentrant = False

    def run_block(self, index: int, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        again = checkpoint(block, hidden, use_reentrant=self.use_reentrant) if torch.is_grad_enabled() else None
        return block(hidden) if again is None else again


class CheckpointedReentrantly(Checkpointed):
    use_reentrant = True


class Skipping(Net):
    """Skips the second block on demand, and never uses one module."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)

    def run_block(self, index: int, block: nn.Module, hidden: torch.Tensor, *, skip: bool = False) -> torch.Tensor:
        return hidden if skip and index == 1 else block(hidden)


class Buffered(Net):
    """Frozen running statistics, and a sum that bf16 cannot represent: each step adds its share of 100.3."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH).eval()  # one process has other batches than the ranks
        self.statistics.running_mean.fill_(0.1003)
        self.register_buffer("level", torch.zeros(()))
        self.last = -1  # step that was added

    def run_block(self, index: int, block: nn.Module, hidden: torch.Tensor, *, step: int = -1) -> torch.Tensor:
        if step > self.last:
            self.last = step
            self.level += 0.1 * (100.3 - self.level)
        if index == 1:
            hidden = self.statistics(hidden.flatten(0, 1)).view_as(hidden)
        return block(hidden) * (1 + self.level / 1000).to(hidden.dtype)


class Scenario:
    """The plain scenario; subclasses override single methods."""

    name = "plain"
    optimizer: dict[str, Any] = ADAMW
    num_losses = 1  # of a micro-step
    is_complete = True  # True: every trained parameter gets a gradient in every step
    is_planned = True  # True: the trained parameters are known before the first step

    def model(self) -> nn.Module:
        return Net()

    def cast(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Cast the model as the engine does."""
        return model.to(dtype)

    def prepare(self, model: nn.Module, step: int) -> None:
        """Run before the first micro-step of `step`."""

    def losses(self, run: nn.Module, tokens: torch.Tensor, step: int) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yield (loss, True if its graph is needed again) of one micro-step.  `run`: module or engine."""
        yield run(tokens), False

    def end_micro_step(self, engine: zengine.Engine) -> None:
        """Run after the backwards of a micro-step, on ranks only."""
        engine.step()

    def incident(self, step: int) -> Incident:
        """Return the failure of `step`, on ranks only."""
        return Incident()

    def before(self, engine: Any, step: int) -> None:
        """Run on ranks before `step`; must leave no trace."""


@attrs.frozen
class Incident:
    """No failure.  Subclasses raise during the last micro-step of a step."""

    error: type[Exception] | None = None
    match: str = ""
    restarts: bool = True  # True: the step is repeated; False: the micro-step

    def armed(self, model: nn.Module) -> AbstractContextManager[object]:
        """Raise the failure inside the block."""
        return nullcontext()


class Unused(Scenario):
    """A block unused in every other step, and a module never used; unused weights do not change."""

    name = "unused"
    is_complete = False

    def model(self) -> nn.Module:
        return Skipping()

    def losses(self, run: nn.Module, tokens: torch.Tensor, step: int) -> Iterator[tuple[torch.Tensor, bool]]:
        yield run(tokens, skip=step % 2 == 1), False


class UnusedWithMomentum(Unused):
    name = "unused, momentum"
    optimizer = MOMENTUM


class Tied(Scenario):
    name = "tied"

    def model(self) -> nn.Module:
        model = Net()
        model.head.weight = model.embed.weight
        nn.init.normal_(model.embed.weight, std=0.2)
        return model


class Frozen(Scenario):
    """A frozen block, and a frozen part of another."""

    name = "frozen"

    def model(self) -> nn.Module:
        model = Net()
        model.blocks[1].requires_grad_(False)
        model.blocks[0].up.weight.requires_grad_(False)
        return model


class Toggled(Scenario):
    """A block is frozen for two steps and trained afterwards."""

    name = "toggled"
    is_complete = False

    def prepare(self, model: nn.Module, step: int) -> None:
        model.blocks[1].requires_grad_(step not in (1, 2))


class Several(Scenario):
    """Three backwards in a micro-step: twice through one graph, and through another."""

    name = "several backwards"
    num_losses = 3

    def losses(self, run: nn.Module, tokens: torch.Tensor, step: int) -> Iterator[tuple[torch.Tensor, bool]]:
        loss = run(tokens)
        yield 0.5 * loss, True
        yield 0.25 * loss, False
        yield 0.25 * run(tokens.flip(0)), False


class TorchStyle(Scenario):
    """The optimizer's own methods instead of the engine's step."""

    name = "torch style"

    def end_micro_step(self, engine: zengine.Engine) -> None:
        assert engine.optimizer is not None
        engine.optimizer.step()
        engine.optimizer.zero_grad()


class WithCheckpoints(Scenario):
    name = "checkpointed"

    def model(self) -> nn.Module:
        return Checkpointed()


class WithReentrantCheckpoints(Scenario):
    name = "checkpointed, reentrant"

    def model(self) -> nn.Module:
        return CheckpointedReentrantly()


class Exceptions(Scenario):
    """Repeats the forward after a failed forward, and the step after a failed backward."""

    name = "exceptions"

    def incident(self, step: int) -> Incident:
        return {1: FailsInForward(), 2: FailsInBackward()}.get(step, Incident())


class UnfrozenLater(Frozen):
    """Two parts of the model are unfrozen later; masters and states are made then."""

    name = "unfrozen later"
    is_planned = False

    def prepare(self, model: nn.Module, step: int) -> None:
        if step == 1:
            model.blocks[0].requires_grad_(True)
        if step == 2:
            model.requires_grad_(True)


class RefusedLoad(Scenario):
    """Rejected loads of a damaged checkpoint, and of one with an impossible counter."""

    name = "refused load"
    is_planned = False  # saving states from disk needs one more buffer

    def before(self, engine: Any, step: int) -> None:
        if step == 2:
            try_to_load(engine)


class Buffers(Scenario):
    """Buffers, and weights of norms with running statistics, stay float32 in narrow models."""

    name = "buffers"

    def model(self) -> nn.Module:
        return Buffered()

    def cast(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        wide = torch.promote_types(dtype, torch.float32)
        for param in model.parameters():
            param.data = param.data.to(dtype)
        model.statistics.to(wide)
        model.level.data = model.level.to(wide)
        return model

    def losses(self, run: nn.Module, tokens: torch.Tensor, step: int) -> Iterator[tuple[torch.Tensor, bool]]:
        yield run(tokens, step=step), False


class OnPurpose(Exception):
    """Raised by an incident."""


def _fail(*_: Any) -> NoReturn:
    raise OnPurpose("on purpose")


@attrs.frozen
class FailsInForward(Incident):
    error: type[Exception] | None = OnPurpose
    match: str = "on purpose"
    restarts: bool = False

    @contextmanager
    def armed(self, model: nn.Module) -> Iterator[None]:
        handle = model.blocks[1].down.register_forward_pre_hook(_fail)
        try:
            yield
        finally:
            handle.remove()


@attrs.frozen
class FailsInBackward(Incident):
    error: type[Exception] | None = OnPurpose
    match: str = "on purpose"

    @contextmanager
    def armed(self, model: nn.Module) -> Iterator[None]:
        handle = model.blocks[1].up.weight.register_hook(_fail)
        try:
            yield
        finally:
            handle.remove()


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(),
        Unused(),
        UnusedWithMomentum(),
        Tied(),
        Frozen(),
        Toggled(),
        UnfrozenLater(),
        Several(),
        TorchStyle(),
        Exceptions(),
        WithCheckpoints(),
        WithReentrantCheckpoints(),
        RefusedLoad(),
        Buffers(),
    )
}


def batches(world_size: int, accumulation: int) -> torch.Tensor:
    """Tokens of (step, micro-step, rank): half pattern, half noise, so that losses fall and stay far from 0."""
    generator = torch.Generator().manual_seed(11)
    shape = (NUM_STEPS, accumulation, world_size, BATCH)
    starts = torch.randint(0, VOCABULARY, (*shape, 1), generator=generator)
    noise = torch.randint(0, VOCABULARY, (*shape, LENGTH), generator=generator)
    regular = (starts + 3 * torch.arange(LENGTH)) % VOCABULARY
    return torch.where(torch.rand(*shape, LENGTH, generator=generator) < 0.3, noise, regular)


def last_batch() -> torch.Tensor:
    """Return the batch evaluated after the last step, which shows its update."""
    return (torch.arange(BATCH).unsqueeze(1) + 3 * torch.arange(LENGTH)) % VOCABULARY
