"""DeepSpeed's names of compressed optimizers: alone on two ranks, and in an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zcomm
import zengine
import zoptim
from zcomm.collectives import sign_kernels
from zcomm.testing import run_ranks
from zengine.deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

GRADIENTS = ([0.1, -0.2, 0.3, 0.4], [0.3, 0.1, -0.1, 0.4])  # of two ranks
GOLDEN = {  # weights after calls of DeepSpeed 0.16.9: lr 0.1, betas 0.9 and 0.99, frozen at call 3, padded to 16
    2: [-0.1, 0.1, -0.1, -0.1],
    4: [-0.34061, 0.65836, -0.44652, -0.28765],
    7: [-0.91310, 2.94832, -1.59151, -0.57389],
}


def _golden() -> list[tuple[torch.Tensor, bool]]:
    param, engine = torch.zeros(4, requires_grad=True), SimpleNamespace(enable_backward_allreduce=True)
    optimizer = OnebitAdam([param], deepspeed=engine, lr=0.1, betas=(0.9, 0.99), freeze_step=3)
    found = []
    for _ in range(7):
        param.grad = torch.tensor(GRADIENTS[zcomm.group_rank()])
        if engine.enable_backward_allreduce:
            zcomm.all_reduce(param.grad)
            param.grad /= 2
        optimizer.step()
        found.append((param.detach().clone(), engine.enable_backward_allreduce))
    return found


def test_alone_it_computes_deepspeeds_numbers() -> None:
    for found in run_ranks(_golden, 2):
        for call, weights in GOLDEN.items():
            torch.testing.assert_close(found[call - 1][0], torch.tensor(weights), rtol=0, atol=5.2e-6)
        assert [reduces for _, reduces in found] == [True, True, False, False, False, False, False]


def _trains(cls: Any, options: dict[str, Any]) -> tuple[torch.Tensor, str]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = zengine.initialize(model=model, optimizer=cls(model.parameters(), **options), config=config)
    for step in range(5):
        x = torch.randn(1, 8, generator=torch.Generator().manual_seed(10 * step + zcomm.group_rank()))
        engine.backward(engine(x).square().mean())
        engine.step()
    found = model.weight.detach().clone()
    engine.close()
    return found, cls.checkpoint_kind


@pytest.mark.parametrize(
    ("cls", "options"),
    [(OnebitAdam, {"freeze_step": 2}), (ZeroOneAdam, {"var_update_scaler": 1}), (OnebitLamb, {"freeze_step": 2})],
)
def test_an_engine_trains_with_it(cls: Any, options: dict[str, Any]) -> None:
    (first, kind), (second, _) = run_ranks(_trains, 2, cls, options)
    assert torch.equal(first, second)
    assert issubclass(cls, getattr(zoptim, kind))


@pytest.mark.parametrize("cls", [OnebitAdam, ZeroOneAdam, OnebitLamb])
def test_what_deepspeed_ignores_is_rejected(cls: Any) -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0\): the engine clips"):
        cls([torch.zeros(1, requires_grad=True)], max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"put gradients into \.grad"):
        cls([torch.zeros(1, requires_grad=True)]).step(grads=[])
    with pytest.raises(RuntimeError, match="does not support amsgrad"):
        cls([torch.zeros(1, requires_grad=True)], amsgrad=True)


def _errors(by_torch: bool) -> list[list[float]]:
    """Errors after some steps, after a reset, and after a step more; weights at the end."""
    with pytest.MonkeyPatch.context() as patch:
        if by_torch:
            patch.setattr(sign_kernels.native, "unavailable_reason", lambda: "switched off")
        param = torch.nn.Parameter(torch.linspace(-1, 1, 40))
        optimizer = OnebitAdam([param], lr=0.01, freeze_step=2)
        known, found = optimizer.rank_tensors(), []

        def step(seed: int) -> None:
            generator = torch.Generator().manual_seed(10 * seed + torch.distributed.get_rank())
            param.grad = torch.randn(40, generator=generator)
            optimizer.step()
            found.extend(each.tolist() for each in known.values())

        for seed in range(5):
            step(seed)
        assert any(map(any, found[-2:]))
        optimizer.reset_ranks()
        assert not any(each.any() for each in known.values())
        step(5)
        return [*found, param.tolist()]


def test_errors_are_those_of_torchs_operations_and_can_be_reset() -> None:
    for ours, rule in zip(run_ranks(_errors, 2, False), run_ranks(_errors, 2, True)):
        for each, wanted in zip(ours, rule, strict=True):
            assert each == pytest.approx(wanted, rel=1e-4, abs=1e-6)
