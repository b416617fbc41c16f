"""Speculative steps change no bit, whether they are confirmed or rolled back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import zpartition
from zcomm.testing import run_ranks
from zpartition import Offload, Speculation, Tier, ZeroPolicy
from zpartition.gradients.speculate import NO_SPECULATION, SpeculativeThread, start_speculation
from zpartition.memory.mover import PlainMover
from zpartition.testing import Net, backward, differing, fingerprint, make, train

HOST = Offload(states=Tier.HOST)
AHEAD = Offload(states=Tier.HOST, speculation=Speculation.LAST_BACKWARD)


class Dividing:
    """An adapter that divides gradients in place, as zoptim's for torch's optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.grad_scale = optimizer, None

    def step(self) -> None:
        if self.grad_scale is not None:
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.div_(self.grad_scale)
        self.optimizer.step()


def _run(offload: Offload, divisors: list[float], assumed: float | None) -> tuple[dict[str, Tensor], list[int]]:
    """Five steps whose gradients are divided by `divisors`, 0 for one that is left out."""
    model, optimizer, partition = make(offload, 2, torch.bfloat16)
    scaled: Any = Dividing(optimizer)
    partition.speculate(scaled, lambda: None if assumed is None else torch.tensor(assumed))
    for step, divisor in enumerate(divisors):
        backward(partition, model, 2 * step, 2)
        partition.finish_gradients()
        if divisor:
            scaled.grad_scale = None if divisor == 1 else torch.tensor(divisor)
            partition.apply(scaled.step)
            scaled.grad_scale = None
        partition.zero_grad()
    counts = [partition.speculative_step.num_confirmed, partition.speculative_step.num_rolled_back]
    found = fingerprint(partition, model)
    partition.close()
    return found, counts


def _differs(divisors: list[float], assumed: float | None) -> tuple[list[str], list[int]]:
    without, _ = _run(HOST, divisors, assumed)
    found, counts = _run(AHEAD, divisors, assumed)
    return differing(without, found), counts


@pytest.mark.parametrize(
    ("divisors", "assumed", "num_right"),
    [
        ([1, 1, 1, 1, 1], None, 5),
        ([4, 4, 4, 4, 4], 4.0, 5),
        ([4, 6, 4, 0, 4], 4.0, 3),  # one clipped, one not finite
        ([0, 6, 4, 4, 6], 4.0, 2),  # the very first guess is wrong: there was no state
    ],
)
def test_right_and_wrong_guesses_end_where_no_guess_does(
    divisors: list[float], assumed: float | None, num_right: int
) -> None:
    for wrong, (confirmed, retracted) in run_ranks(_differs, 2, divisors, assumed):
        assert not wrong
        assert confirmed * (5 - num_right) == retracted * num_right
        assert confirmed > 0


def _where_counts_differ() -> tuple[list[str], list[int], set[float]]:
    """Odd steps leave a layer out, so even ones update shards by two counts."""
    found = []
    for offload in (HOST, AHEAD):
        model, optimizer, partition = make(offload, 2, torch.bfloat16)
        train(partition, model, optimizer, range(7), 2)
        counts = [partition.speculative_step.num_confirmed, partition.speculative_step.num_rolled_back]
        found.append(fingerprint(partition, model))
        shards = list(zpartition.state_shards(optimizer, partition.holders))
        steps = {shard.tensor.item() for key, shard in shards if key == "step" and shard.name.startswith("rest")}
        partition.close()
    return differing(*found), counts, steps


def test_each_parameter_counts_its_own_updates_ahead_of_the_verdict_too() -> None:
    found = run_ranks(_where_counts_differ, 2)
    for wrong, (confirmed, retracted), _ in found:
        assert not wrong
        assert confirmed > 0
        assert retracted > 0
    assert set.union(*(steps for _, _, steps in found)) == {4}


def _in_between(touch: str) -> tuple[list[str], list[int]]:
    found = []
    for offload in (HOST, AHEAD):
        model, optimizer, partition = make(offload, 1, torch.float32)
        train(partition, model, optimizer, range(1), 1)
        backward(partition, model, 0, 1)
        if touch == "another backward":
            partition.speculative_step.join()  # an update that has not begun would be cancelled, not rolled back
            backward(partition, model, 4, 1)
        partition.finish_gradients()
        if touch == "gradient":
            for storage in partition.storages:
                storage.master.grad *= 2
        elif touch == "option":
            optimizer.param_groups[0]["lr"] *= 2
        elif touch == "weight":
            zpartition.safe_set_full_fp32_param(model.last.bias, torch.ones(8))
        partition.apply(optimizer.step)
        partition.zero_grad()
        counts = [partition.speculative_step.num_confirmed, partition.speculative_step.num_rolled_back]
        found.append(fingerprint(partition, model))
        partition.close()
    return differing(*found), counts


def _is_undone() -> tuple[list[str], list[str], int]:
    found, before = [], {}
    for offload in (HOST, AHEAD):
        model, optimizer, partition = make(offload, 1, torch.float32)
        train(partition, model, optimizer, range(2), 1)
        before = fingerprint(partition, model)
        backward(partition, model, 3, 1)
        partition.speculative_step.join()  # an update that has not begun would be cancelled, not rolled back
        partition.rollback_speculation()
        undone = differing(before, fingerprint(partition, model))
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
        count = partition.speculative_step.num_rolled_back
        found.append(fingerprint(partition, model))
        partition.close()
    return undone, differing(*found), count


def _before_any_begins() -> tuple[list[str], list[int]]:
    """The thread is busy until another backward has ended."""
    found, counts = [], [0, 0]
    for offload in (HOST, AHEAD):
        model, optimizer, partition = make(offload, 1, torch.float32)
        train(partition, model, optimizer, range(1), 1)
        step, is_over = partition.speculative_step, threading.Event()
        before = [step.num_confirmed, step.num_rolled_back]
        if isinstance(step, SpeculativeThread):
            step.thread.submit(is_over.wait)
        backward(partition, model, 0, 1)
        backward(partition, model, 4, 1)
        is_over.set()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
        counts = [step.num_confirmed - before[0], step.num_rolled_back - before[1]]
        found.append(fingerprint(partition, model))
        partition.close()
    return differing(*found), counts


def test_updates_that_have_not_begun_are_cancelled_by_another_backward() -> None:
    for wrong, (confirmed, retracted) in run_ranks(_before_any_begins, 2):
        assert not wrong
        assert confirmed > 0
        assert retracted == 0


def test_before_a_save_within_a_step_updates_are_undone_and_made_again() -> None:
    for undone, wrong, count in run_ranks(_is_undone, 2):
        assert not undone
        assert not wrong
        assert count > 0


@pytest.mark.parametrize("touch", ["gradient", "option", "weight", "another backward"])
def test_what_changes_between_backward_and_step_is_seen(touch: str) -> None:
    for wrong, (_, retracted) in run_ranks(_in_between, 2, touch):
        assert not wrong
        assert retracted > 0


class Scribbling(torch.optim.SGD):
    """Writes into the gradients that it is given, where no version counter sees it, as fused kernels do."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.data.add_(param.data, alpha=0.5)
                    param.data.add_(param.grad, alpha=-group["lr"])


def _ended(offload: Offload, make_optimizer: Any, between: str) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that are inspected, and the masters after two steps with something in between."""
    model = Net(torch.bfloat16)
    optimizer = make_optimizer(model.parameters())
    policy = ZeroPolicy(stage=1, bucket_numel=3000, offload=offload)
    partition = zpartition.shard(model, optimizer, policy=policy)
    state = {**optimizer.state_dict(), "state": {}}
    inspected: list[Tensor] = []
    for step in range(2):
        if between == "two last backwards":
            backward(partition, model, 7 + step, 1)
            partition.finish_gradients()
        backward(partition, model, step, 1)
        inspected += [kept.clone() for kept in partition.finish_gradients()]
        if between == "option":
            optimizer.param_groups[0]["lr"] *= 0.5
        elif between == "weights" and step == 0:
            model.last.bias.data.fill_(0.25)
            partition.synchronise()
        elif between == "gathered" and step == 0:
            with zpartition.gathered(model.last, modifier_rank=0):
                model.last.bias.data.fill_(0.25)
        elif between == "state dict":
            optimizer.load_state_dict(state)
        if between in ("weights", "gathered", "state dict") and step == 0:
            partition.zero_grad()
        else:
            partition.apply(optimizer.step)
            partition.zero_grad()
    masters = [storage.master.detach().clone() for storage in partition.storages]
    partition.close()
    return inspected, masters


@pytest.mark.parametrize("between", ["nothing", "option", "two last backwards", "weights", "gathered", "state dict"])
def test_gradients_stay_what_was_reduced_and_edits_are_not_undone(between: str) -> None:
    for make_optimizer in (
        lambda params: Scribbling(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    ):
        found = [_ended(offload, make_optimizer, between) for offload in (HOST, AHEAD)]
        for plain, ahead in zip(*found, strict=True):
            assert all(map(torch.equal, plain, ahead))


def test_a_wait_that_is_interrupted_can_be_gone_through_again() -> None:
    model, _, partition = make(AHEAD, 0, torch.float32)
    before = [storage.master.detach().clone() for storage in partition.storages]
    backward(partition, model, 0, 1)
    index, future = next(iter(partition.speculative_step.futures.items()))  # type: ignore[attr-defined]

    class Once:
        """Ctrl-C comes while it is waited for the first time."""

        was_asked = False

        def cancel(self) -> bool:
            if not self.was_asked:
                self.was_asked = True
                raise KeyboardInterrupt
            return future.cancel()

        def exception(self) -> Any:
            return future.exception()

    partition.speculative_step.futures[index] = Once()  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        partition.zero_grad()
    partition.zero_grad()
    assert all(torch.equal(storage.master, old) for storage, old in zip(partition.storages, before))
    partition.close()


def test_between_backward_and_step_people_see_what_was() -> None:
    model, optimizer, partition = make(AHEAD, 0, torch.float32)
    train(partition, model, optimizer, range(1), 1)
    before = fingerprint(partition, model)
    backward(partition, model, 2, 1)
    assert not differing(before, fingerprint(partition, model))
    partition.close()


def test_an_optimizer_that_fails_fails_in_the_step() -> None:
    model, optimizer, partition = make(AHEAD, 0, torch.float32)
    scaled = Dividing(optimizer)

    def fails() -> None:
        raise ArithmeticError("no")

    scaled.step = fails  # type: ignore[method-assign]
    partition.speculate(scaled, lambda: None)
    before = [storage.master.detach().clone() for storage in partition.storages]
    backward(partition, model, 0, 1)
    partition.finish_gradients()
    with pytest.raises(ArithmeticError, match="no"):
        partition.apply(scaled.step)
    partition.zero_grad()
    assert all(torch.equal(storage.master, old) for storage, old in zip(partition.storages, before))
    partition.close()


class Reading(torch.optim.AdamW):
    """Says of itself that it does not write into gradients."""

    keeps_gradients = True


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, Reading])
def test_what_is_kept_to_be_put_back_is_planned(make_optimizer: Any) -> None:
    model = Net(torch.bfloat16)
    optimizer = make_optimizer(model.parameters())
    policy = ZeroPolicy(stage=1, bucket_numel=3000, offload=AHEAD)
    planned = zpartition.plan(model, policy=policy, world_size=1, optimizer=make_optimizer).elsewhere
    partition = zpartition.shard(model, optimizer, policy=policy)
    train(partition, model, optimizer, range(0, 4, 2), 1)
    assert partition.ledger()["host rollback"] == planned["host rollback"]
    partition.close()


def test_an_optimizer_that_looks_at_whole_tensors_is_not_run_ahead_and_that_is_said() -> None:
    class Whole(torch.optim.SGD):
        def place_over_ranks(self, segments: Any) -> None: ...

        def place_on_ranks(self, segments: Any, ranks: Any) -> None: ...

    optimizer = Whole([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.warns(UserWarning, match="speculation has no effect: Whole needs whole tensors"):
        assert start_speculation([], optimizer, optimizer, lambda: None, PlainMover()) is NO_SPECULATION
