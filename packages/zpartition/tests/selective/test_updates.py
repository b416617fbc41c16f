"""Selective updates against an oracle in one process: dense tensors, masks and two counts."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
from zcomm.testing import run_ranks
from zpartition import ColumnMoments, Offload, Partition, SelectivePolicy, Tier, ZeroPolicy, shard

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.95), 1e-8, 0.1
STEPS = 17


class Model(nn.Module):
    """Two matrices of odd shapes, biases, and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(23, 37)
        self.second = nn.Linear(37, 11)
        self.stack = nn.Parameter(torch.randn(3, 5, 7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        loss: Tensor = y.square().mean() + (self.stack * y[:, :7].mean(0)).square().mean()
        return loss


def inputs(step: int) -> Tensor:
    """Return the batch of all ranks, whose columns differ in size."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 23, generator=generator) * torch.logspace(-1, 1, 23).roll(step // 5)


def divisor_of(step: int) -> float:
    """Return the divisor of the step's gradients: every third one is clipped."""
    return 2.0 if step % 3 == 2 else 1.0


class Oracle:
    """ZenFlow's law on whole tensors, element by element, with weights that are shown apart from masters."""

    def __init__(self, policy: SelectivePolicy) -> None:
        self.policy, self.model = policy, Model()
        self.masters = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.masters.items()}
        self.pending = {name: torch.zeros_like(w) for name, w in self.masters.items()}
        self.masks: dict[str, Tensor] = {}
        self.later: dict[str, Tensor] = {}  # the rest's new weights that are not shown
        self.fast = self.slow = self.length = 0

    def adam(self, name: str, grad: Tensor, count: int, mask: Tensor) -> None:
        w, (m, v) = self.masters[name], self.moments[name]
        new_m, new_v = m * BETAS[0] + grad * (1 - BETAS[0]), v * BETAS[1] + grad * grad * (1 - BETAS[1])
        mean, square = new_m / (1 - BETAS[0] ** count), new_v / (1 - BETAS[1] ** count)
        new = w * (1 - LR * DECAY) - LR * mean / (square.sqrt() + EPS)
        for old, value in ((w, new), (m, new_m), (v, new_v)):
            old.copy_(torch.where(mask, value, old))

    def select(self, grads: dict[str, Tensor]) -> None:
        before = self.masks
        self.fast = self.fast if before else self.slow
        for name, grad in grads.items():
            mask = torch.ones_like(grad, dtype=torch.bool)
            if grad.dim() > 1:
                sums = grad.abs().flatten(1).sum(0)
                width = max(1, int(sums.numel() * self.policy.topk_ratio))
                chosen = torch.zeros_like(sums, dtype=torch.bool)
                chosen[sums.topk(width).indices] = True
                mask = chosen.expand(grad.shape[0], -1).reshape(grad.shape)
            was = before.get(name, mask)
            self.masks = {**self.masks, name: mask}
            for beta, moment in zip(BETAS, self.moments[name]):
                factor = (1 - beta**self.fast) / (1 - beta**self.slow) if self.slow else 1.0
                moment[mask & ~was] *= factor
                moment[~mask & was] /= factor

    @torch.no_grad()
    def step(self, index: int, grads: dict[str, Tensor]) -> None:
        policy = self.policy
        everywhere = {name: torch.ones_like(grad, dtype=torch.bool) for name, grad in grads.items()}
        if index < policy.warm_up:
            self.slow += 1
            for name, grad in grads.items():
                self.adam(name, grad, self.slow, everywhere[name])
            return self.show(everywhere)
        every = policy.select_every
        if index == policy.warm_up or (every and index % every == 0 and index > policy.warm_up):
            self.show_rest()
            self.select(grads)
        self.fast, self.length = self.fast + 1, self.length + 1
        for name, grad in grads.items():
            self.pending[name] += grad
            self.adam(name, grad, self.fast, self.masks[name])
        self.show(self.masks)
        ends = (index + 1 - policy.warm_up) % policy.update_every == 0 or (every and (index + 1) % every == 0)
        if ends:
            self.show_rest()
            self.slow += 1
            for name in grads:
                self.adam(name, self.pending[name] / self.length, self.slow, ~self.masks[name])
                self.later[name] = ~self.masks[name]
                self.pending[name].zero_()
            self.length = 0
            if not policy.overlap:
                self.show_rest()
        return None

    def show(self, masks: dict[str, Tensor]) -> None:
        for name, param in self.model.named_parameters():
            param.data.copy_(torch.where(masks[name], self.masters[name], param.data))

    def show_rest(self) -> None:
        if self.later:
            self.show(self.later)
            self.later = {}

    def train(self, steps: int) -> list[float]:
        losses = []
        for index in range(steps):
            loss = self.model(inputs(index))
            loss.backward()
            losses.append(loss.item())
            grads = {n: p.grad / divisor_of(index) for n, p in self.model.named_parameters() if p.grad is not None}
            self.step(index, grads)
            self.model.zero_grad()
        return losses


class Scaled:
    """An optimizer whose gradients are divided by `grad_scale`, in place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.grad_scale = optimizer, None

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and self.grad_scale is not None:
                    param.grad.mul_(1.0 / float(self.grad_scale))
        self.optimizer.step()


def build(policy: SelectivePolicy, stage: int, **more: Any) -> tuple[nn.Module, Any, Partition]:
    """Return the model, its scaled optimizer and its partition, in several buckets."""
    model = Model()
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": [*model.parameters()][1::2][:0]}]
    groups[1]["params"] = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    zero = ZeroPolicy(
        stage=stage,
        bucket_numel=500,
        unit_numel=500,
        persist_numel=0,
        offload=Offload(states=Tier.HOST, selective=policy),
        **more,
    )
    partition = shard(model, optimizer, policy=zero)
    scaled: Any = Scaled(optimizer)
    partition.updates.divide_by(scaled)
    return model, scaled, partition


def train(model: nn.Module, scaled: Any, partition: Partition, steps: range) -> list[float]:
    """Train; return the mean loss of each step."""
    losses = []
    size, rank = zcomm.group_size(None), zcomm.group_rank(None)
    for index in steps:
        with partition.micro_step():
            loss = model(inputs(index).chunk(size)[rank]) if size == 1 else _mean_loss(model, index, size, rank)
            loss.backward()
        losses.append(loss.item())
        partition.finish_gradients()
        scaled.grad_scale = None if divisor_of(index) == 1 else torch.tensor(divisor_of(index))
        partition.apply(scaled.step)
        scaled.grad_scale = None
        partition.zero_grad()
    return losses


def _mean_loss(model: nn.Module, index: int, size: int, rank: int) -> Tensor:
    """Return the loss of the whole batch: the stack's term is not a mean over samples."""
    loss: Tensor = model(inputs(index))
    return loss


def run(policy: SelectivePolicy, stage: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model, scaled, partition = build(policy, stage)
    losses = train(model, scaled, partition, range(steps))
    from zpartition import whole_state_dict

    weights = whole_state_dict(model)
    partition.close()
    return losses, weights


POLICIES = {
    "fixed": SelectivePolicy(topk_ratio=0.2, select_every=10, update_every=3),
    "warm up": SelectivePolicy(topk_ratio=0.3, select_every=6, update_every=4, warm_up=3),
    "overlap": SelectivePolicy(topk_ratio=0.2, select_every=8, update_every=3, warm_up=1, overlap=True),
    "once": SelectivePolicy(topk_ratio=0.1, update_every=2, moments=ColumnMoments.HOST),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_the_law_is_that_of_the_oracle(name: str, world: int, stage: int) -> None:
    oracle = Oracle(POLICIES[name])
    expected = oracle.train(STEPS)
    for losses, weights in run_ranks(run, world, POLICIES[name], stage, STEPS):
        assert losses == pytest.approx(expected, rel=2e-5)
        for key, param in oracle.model.named_parameters():
            torch.testing.assert_close(weights[key], param.data, rtol=2e-4, atol=2e-6)


def beside_the_thread() -> tuple[list[bool], bool]:
    """Hold the thread's update while steps go on; it is waited for at the end of the next interval."""
    model, scaled, partition = build(POLICIES["overlap"], 1)
    updates: Any = partition.updates
    train(model, scaled, partition, range(1))  # the warm-up
    gate, update = threading.Event(), updates._update_rest

    def held(*args: Any) -> None:
        assert gate.wait(60)
        update(*args)

    updates._update_rest = held
    train(model, scaled, partition, range(1, 4))  # the update begins in step 3
    under_way = []
    for step in (4, 5):
        train(model, scaled, partition, range(step, step + 1))
        under_way.append(not updates._running.done())
    gate.set()
    train(model, scaled, partition, range(6, 8))
    partition.close()
    return under_way, updates._running is None


def test_steps_go_on_beside_the_update_of_the_rest() -> None:
    assert run_ranks(beside_the_thread, 1) == [([True, True], True)]


def fails() -> str:
    model, scaled, partition = build(POLICIES["overlap"], 1)
    updates: Any = partition.updates
    train(model, scaled, partition, range(1))

    def failing(*args: Any) -> None:
        raise MemoryError("the rest does not fit")

    updates._update_rest = failing
    try:
        train(model, scaled, partition, range(1, 8))
    except MemoryError as error:
        return str(error)
    return "nothing raised"


def test_an_error_of_the_thread_is_raised_where_its_update_is_shown() -> None:
    assert run_ranks(fails, 1) == ["the rest does not fit"]


def told_of_other_counts() -> str:
    """Let the second rank's states have another number of updates before columns are selected."""
    model, scaled, partition = build(SelectivePolicy(topk_ratio=0.2, warm_up=2), 1)
    train(model, scaled, partition, range(2))
    for storage in partition.storages:
        scaled.optimizer.state[storage.master]["step"] += 3 * zcomm.group_rank(None)
    with pytest.raises(ValueError, match="the parameters have 2 to 5: some were unused") as caught:
        train(model, scaled, partition, range(2, 3))
    assert not partition.updates.selection.exists
    partition.close()
    return str(caught.value)


def test_all_ranks_are_told_if_one_has_other_counts() -> None:
    first, second = run_ranks(told_of_other_counts, 2)
    assert first == second


def test_the_policy_counts_steps_from_the_warm_up() -> None:
    policy = SelectivePolicy(topk_ratio=0.1, select_every=6, update_every=4, warm_up=3)
    assert [step for step in range(20) if policy.selects(step)] == [3, 6, 12, 18]
    assert [step for step in range(3, 20) if policy.ends_interval(step)] == [5, 6, 10, 11, 14, 17, 18]
    with pytest.raises(ValueError, match="longer ones never occur"):
        SelectivePolicy(topk_ratio=0.1, select_every=2, update_every=3)
    assert [SelectivePolicy(reserved_share=share).num_threads(8) for share in (0.0, 0.3, 0.5, 1.0)] == [0, 5, 4, 0]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_oracle_notices_the_selection(overlap: bool) -> None:
    policy = SelectivePolicy(topk_ratio=0.2, select_every=10, update_every=3, overlap=overlap)
    plain = Oracle(SelectivePolicy(topk_ratio=1.0, update_every=1)).train(STEPS)
    assert not math.isclose(Oracle(policy).train(STEPS)[-1], plain[-1], rel_tol=1e-3)
