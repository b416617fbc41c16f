"""`.grad` shows the gradient that the step uses, or is a placeholder whose use raises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.gradients.placeholder import GradPlaceholder, HiddenGradientError


def make(stage: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, zpartition.Partition]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    return model, zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), policy=ZeroPolicy(stage=stage))


def loss_of(model: nn.Module) -> torch.Tensor:
    rows = torch.linspace(-1, 1 + zcomm.group_rank(), 6).view(2, 3)
    return model(rows.to(next(model.parameters()).dtype)).float().square().mean()


def norm_of_all_ranks() -> torch.Tensor:
    """The norm that clip_grad_norm_ finds in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    count = zcomm.group_size()
    for rank in range(count):
        (model(torch.linspace(-1, 1 + rank, 6).view(2, 3)).square().mean() / count).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _clips_or_raises(stage: int) -> str:
    model, partition = make(stage)
    with partition.micro_step():
        loss_of(model).backward()
    try:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    except HiddenGradientError as error:
        return str(error)
    torch.testing.assert_close(norm, norm_of_all_ranks())
    found = torch.cat([grad.flatten() for grad in partition.finish_gradients()])
    torch.testing.assert_close(found.norm(), torch.tensor(0.1))
    return "clipped"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_by_torch_clips_what_the_step_uses_or_raises(stage, world_size):
    told = run_ranks(_clips_or_raises, world_size, stage)
    if told != ["clipped"] * world_size:
        assert world_size == 2
        assert stage >= 1
        assert all("is sharded over 2 ranks" in each and "gradient_clipping" in each for each in told), told


def test_a_gradient_in_a_wider_dtype_and_a_scaled_one_are_told_of():
    model, partition = make(0, torch.bfloat16)
    with partition.micro_step():
        loss_of(model).backward()
    with pytest.raises(HiddenGradientError, match=r"0\.weight is not in \.grad: it is accumulated in torch.float32"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model, partition = make(0)
    with partition.micro_step(is_scaled=True):
        (loss_of(model) * 8).backward()
    with pytest.raises(HiddenGradientError, match="multiplied by the loss scale"):
        nn.utils.clip_grad_value_(model.parameters(), 0.1)


def test_a_loop_of_ones_own_over_gradients_is_told_as_well():
    model, partition = make(0, torch.bfloat16)
    with partition.micro_step():
        loss_of(model).backward()
    for use in (lambda g: g.norm(), lambda g: g + 1, lambda g: 2 * g, lambda g: g.mul_(2), lambda g: g.data.add_(1)):
        with pytest.raises(HiddenGradientError):
            use(model[0].weight.grad)
    assert "0.weight" in repr(model[0].weight.grad)
    assert model[0].weight.grad.shape == (4, 3)


def test_what_has_no_gradient_shows_none():
    model, partition = make(0, torch.bfloat16)
    with partition.micro_step():
        model[2](torch.ones(1, 4, dtype=torch.bfloat16)).sum().float().backward()
    assert model[0].weight.grad is None
    assert isinstance(model[2].weight.grad, GradPlaceholder)


def test_a_placeholder_goes_with_the_step_and_stands_in_no_backwards_way():
    model, partition = make(0, torch.bfloat16)
    for _ in range(2):
        with partition.micro_step():
            loss_of(model).backward()
    copy.deepcopy(model)
    model.zero_grad()
    assert model[0].weight.grad is None
    with partition.micro_step():
        loss_of(model).backward()
    partition.zero_grad()
    assert model[0].weight.grad is None


def test_a_backward_outside_of_the_step_that_would_mix_gradients_is_told():
    for dtype in (torch.float32, torch.bfloat16):
        model, partition = make(0, dtype)
        with partition.micro_step():
            loss_of(model).backward()
        with pytest.raises(HiddenGradientError, match="would mix local and reduced"):
            loss_of(model).backward()


def test_a_compiled_module_runs_while_its_gradients_are_hidden():
    model, partition = make(0, torch.bfloat16)
    wanted = loss_of(model)
    with partition.micro_step():
        loss_of(model).backward()
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(loss_of(compiled), wanted)


def _edits_a_plain_gradient(edit: str) -> str:
    model, partition = make(2)
    loss_of(model).backward()
    if edit == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif edit == "clip by value":
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    elif edit == "replace":
        for param in model.parameters():
            param.grad = 2 * param.grad
    try:
        partition.finish_gradients()
    except HiddenGradientError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("edit", ["clip", "clip by value", "replace", "none"])
def test_gradients_of_one_rank_that_were_edited_before_their_mean_was_taken_are_rejected(edit):
    for told in run_ranks(_edits_a_plain_gradient, 2, edit):
        if edit == "none":
            assert told == "taken"
        else:
            assert "was changed between loss.backward() and the step" in told
            assert "gradient_clipping" in told
    assert _edits_a_plain_gradient(edit) == "taken"  # alone, it is the mean


def _held(is_sparse: bool) -> tuple[list[str], int]:
    """Keep every step's gradients, as plain torch allows; returns what differs, and the buffers of the pool."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(6, 3, sparse=is_sparse), nn.Linear(3, 1))
    ours = copy.deepcopy(plain)
    policy = ZeroPolicy(sparse_gradients=zpartition.SparseGradients.ROWS)
    partition = zpartition.shard(ours, torch.optim.SGD(ours.parameters(), lr=0.1), policy=policy)
    optimizer, wrong, held = torch.optim.SGD(plain.parameters(), lr=0.1), list[str](), list[torch.Tensor]()
    wanted, num_buffers = list[torch.Tensor](), set[int]()
    for step in range(4):
        x = torch.tensor([step, step + 1, 0])
        with partition.micro_step():
            ours(x).square().sum().backward()
        plain(x).square().sum().backward()
        for (name, own), other in zip(ours.named_parameters(), plain.parameters()):
            dense = other.grad.to_dense() if other.grad.is_sparse else other.grad
            wrong += [f"{name} of step {step}"] * (not torch.allclose(own.grad, dense))
            held.append(own.grad)
            wanted.append(own.grad.clone())
        partition.finish_gradients()
        partition.apply(partition.optimizer.step)
        partition.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        num_buffers.add(partition.reducer.pool.num_made)
    wrong += [f"kept gradient {i}" for i, pair in enumerate(zip(held, wanted)) if not torch.equal(*pair)]
    return wrong, len(num_buffers)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_that_the_caller_keeps_over_steps_keep_their_values(is_sparse: bool, world_size: int) -> None:
    assert run_ranks(_held, world_size, is_sparse) == [([], 1)] * world_size
