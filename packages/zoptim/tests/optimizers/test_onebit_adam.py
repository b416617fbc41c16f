"""1-bit Adam against golden values of DeepSpeed, its pure rule, and the holes that are closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import AdamMoments, OneBitAdam, WholeTensors, onebit_adam_rule
from zoptim.rules.onebit import is_settled, variance_floor

GRADIENTS = ([0.1, -0.2, 0.3, 0.4], [0.3, 0.1, -0.1, 0.4])  # of two ranks
# Weights after call 2, 3, ...: DeepSpeed 0.16.9 on two ranks, lr 0.1, betas 0.9 and 0.99, frozen at call 3.
GOLDEN = {
    2: [-0.1, 0.1, -0.1, -0.1],
    3: [-0.23469, 0.23469, -0.23469, -0.23469],
    4: [-0.34061, 0.65836, -0.44652, -0.28765],
    5: [-0.49949, 1.29391, -0.76430, -0.36709],
    7: [-0.91310, 2.94832, -1.59151, -0.57389],
}
GOLDEN_MOMENTA = {4: 0.029883, 5: 0.044828, 7: 0.066654}
GOLDEN_SQUARES = [7.96e-4, 4.975e-5, 1.99e-4, 3.184e-3]


class Server:
    """Compressed mean of two ranks in one process, padded to 16 elements as DeepSpeed pads 4."""

    def __init__(self) -> None:
        self.workers, self.servers = torch.zeros(2, 16).double(), torch.zeros(16).double()

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(16).double()
        for rank, value in enumerate(values):
            both = torch.nn.functional.pad(value.double().flatten(), (0, 16 - value.numel())) + self.workers[rank]
            sent = _coded(both)
            self.workers[rank] = both - sent
            total += sent / 2
        both = total + self.servers
        out = torch.cat([_coded(half) for half in both.chunk(2)])
        self.servers = both - out
        return out[: values[0].numel()].float().view(values[0].shape)


def _coded(values: Tensor) -> Tensor:
    scale = values.norm() / len(values) ** 0.5
    return torch.where(values >= 0, scale, -scale)


class Meeting:
    """Two threads meet; the second to come computes for both."""

    def __init__(self, compute: Callable[[list[Tensor]], Tensor]) -> None:
        self.compute, self.given, self.result = compute, dict[int, Tensor](), torch.zeros(0)
        self.barrier = threading.Barrier(2, timeout=300)

    def of(self, rank: int) -> Callable[[Sequence[Tensor]], None]:
        def mean(tensors: Sequence[Tensor]) -> None:
            for tensor in tensors:
                self.given[rank] = tensor.clone()
                if self.barrier.wait() == 0:
                    self.result = self.compute([self.given[0], self.given[1]])
                self.barrier.wait()
                tensor.copy_(self.result)
                self.barrier.wait()

        return mean


def _on_two_ranks(make: Callable[[int, WholeTensors], Any]) -> list[Any]:
    server = Server()
    meeting, exact = Meeting(server.mean), Meeting(lambda given: (given[0] + given[1]) / 2)
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        exchange = WholeTensors(meeting.of(rank), world_size=2, exact_mean=exact.of(rank))
        found[rank] = make(rank, exchange)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _golden(rank: int, exchange: WholeTensors) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    param = torch.zeros(4, requires_grad=True)
    optimizer = OneBitAdam([param], lr=0.1, betas=(0.9, 0.99), freeze_step=3)
    optimizer.connect(exchange)
    found = {}
    for call in range(1, 8):
        mean = [(a + b) / 2 for a, b in zip(*GRADIENTS)]
        param.grad = torch.tensor(GRADIENTS[rank] if optimizer.needs_local_gradients else mean)
        optimizer.step()
        state = optimizer.state[param] if call > 1 else {"exp_avg": param, "exp_avg_sq": param}
        found[call] = tuple(t.detach().clone() for t in (param, state["exp_avg"], state["exp_avg_sq"]))
    return found


def test_seven_calls_on_two_ranks_are_those_of_deepspeed() -> None:
    first, second = _on_two_ranks(_golden)
    assert torch.equal(first[1][0], torch.zeros(4)), "the first call only counts"
    torch.testing.assert_close(first[2][1], torch.tensor([0.02, -0.005, 0.01, 0.04]), rtol=0, atol=1e-6)
    torch.testing.assert_close(first[3][2], torch.tensor(GOLDEN_SQUARES), rtol=1e-6, atol=0)
    for call, weights in GOLDEN.items():
        torch.testing.assert_close(first[call][0], torch.tensor(weights), rtol=0, atol=5.2e-6)  # five decimals
        assert torch.equal(first[call][0], second[call][0])
    for call, size in GOLDEN_MOMENTA.items():
        torch.testing.assert_close(first[call][1].abs(), torch.full((4,), size), rtol=0, atol=1e-6)
        assert torch.equal(first[call][2], first[3][2]), "second moments are frozen"


def test_the_optimizer_follows_its_pure_rule() -> None:
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(5, 3, generator=generator), torch.randn(200, generator=generator)]
    own = [param.clone().requires_grad_() for param in params]
    halve: Any = lambda tensors: [tensor / 2 for tensor in tensors]  # noqa: E731
    optimizer = OneBitAdam(own, lr=0.05, freeze_step=4, weight_decay=0.1, eps=1e-6)
    optimizer.connect(WholeTensors(lambda tensors: [tensor.div_(2) for tensor in tensors]))
    moments = [AdamMoments.zeros(param) for param in params]
    for _ in range(8):
        grads = [torch.randn(param.shape, generator=generator) for param in params]
        for param, grad in zip(own, grads):
            param.grad = grad * 4
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.step()
        params, moments = onebit_adam_rule(
            params, grads, moments, mean=halve, freeze_step=4, lr=0.05, weight_decay=0.1, eps=1e-6
        )
        for param, expected, moment in zip(own, params, moments):
            torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)
            if param in optimizer.state:
                torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], moment.exp_avg_sq)


def test_a_second_moment_of_zero_at_the_freeze_does_not_move_weights_by_thousands() -> None:
    def moved(floors: bool, monkeypatch: pytest.MonkeyPatch) -> float:
        if not floors:
            monkeypatch.setattr("zoptim.optimizers.onebit_adam.variance_floor", lambda squares: 0.0)
        param = torch.zeros(400, requires_grad=True)
        optimizer = OneBitAdam([param], lr=0.1, freeze_step=3)
        optimizer.connect(WholeTensors(lambda tensors: [tensor.fill_(0.03) for tensor in tensors]))
        for _ in range(4):
            param.grad = torch.linspace(0.1, 1, 400)
            param.grad[:100] = 0.0
            optimizer.step()
        return float(param.detach().abs().max())

    with pytest.MonkeyPatch.context() as monkeypatch:
        assert moved(True, monkeypatch) < 2.0
        assert moved(False, monkeypatch) > 100_000


def test_the_floor_is_a_quantile_of_the_positive_values_and_at_least_a_fraction_of_the_mean() -> None:
    assert variance_floor(torch.tensor([0.0, 4.0, 2.0])) == 2.0, "few values: none is raised"
    assert variance_floor(torch.cat([torch.zeros(50), torch.arange(101.0, 1101.0)])) == 111.0
    assert variance_floor(torch.tensor([1e-9, 32.0, 32.0, 0.0])) == pytest.approx(0.5)
    assert variance_floor(torch.zeros(3)) == 1.0


def test_auto_freezes_when_second_moments_settle() -> None:
    param = torch.zeros(50, requires_grad=True)
    optimizer = OneBitAdam([param], freeze_step="auto", betas=(0.9, 0.9))
    generator, frozen_at = torch.Generator().manual_seed(0), 0
    for call in range(1, 200):
        param.grad = torch.randn(50, generator=generator)
        optimizer.step()
        frozen_at = frozen_at or call * optimizer.param_groups[0]["frozen"]
    assert 20 <= frozen_at <= 80, "10 calls between comparisons; sums reach 96% after 30"
    assert is_settled(1.0, 1.04)
    assert not is_settled(1.0, 1.05)
    assert not is_settled(0.0, 0.0)


def test_masks_and_exact_groups() -> None:
    masked, exact = torch.zeros(4, requires_grad=True), torch.zeros(2, requires_grad=True)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    groups = [{"params": [masked], "exp_avg_mask": mask}, {"params": [exact], "non_freeze": True}]
    optimizer = OneBitAdam(groups, lr=0.1, freeze_step=2)
    sent: list[int] = []

    def mean(tensors: Sequence[Tensor]) -> None:
        sent.append(len(tensors))
        tensors[0].fill_(1.0)

    optimizer.connect(WholeTensors(mean))
    for _ in range(4):
        masked.grad, exact.grad = torch.ones(4), torch.ones(2)
        optimizer.step()
    assert sent == [1, 1], "a group with non_freeze is not compressed"
    assert optimizer.state[masked]["exp_avg"].tolist() == mask.tolist()
    squares = optimizer.state[exact]["exp_avg_sq"]
    torch.testing.assert_close(squares, torch.full((2,), 1 - 0.999**3)), "and its second moments move on"
    state = optimizer.state_dict()
    state["param_groups"][0]["exp_avg_mask"] = None
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["exp_avg_mask"] is mask, "the program's mask stays, not the checkpoint's"


def test_a_loaded_run_continues() -> None:
    def run(optimizer: OneBitAdam, param: Tensor, calls: range) -> None:
        for call in calls:
            param.grad = torch.randn(64, generator=torch.Generator().manual_seed(call))
            optimizer.step()

    for cut in (1, 2, 3, 5):
        straight, resumed = torch.zeros(64, requires_grad=True), torch.zeros(64, requires_grad=True)
        whole, first = OneBitAdam([straight], freeze_step=3), OneBitAdam([resumed], freeze_step=3)
        run(whole, straight, range(8))
        run(first, resumed, range(cut))
        second = OneBitAdam([resumed], freeze_step=3)
        second.load_state_dict(first.state_dict())
        run(second, resumed, range(cut, 8))
        assert torch.equal(straight, resumed)


def test_a_skipped_step_changes_nothing() -> None:
    param = torch.zeros(4, requires_grad=True)
    optimizer = OneBitAdam([param], freeze_step=2)
    for call in range(5):
        param.grad, before = torch.ones(4), param.detach().clone()
        optimizer.found_inf = torch.tensor(float(call in (1, 4)))
        optimizer.step()
        assert torch.equal(param, before) == (call in (0, 1, 4))
    assert optimizer.param_groups[0]["calls"] == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"amsgrad": True}, RuntimeError, "1-bit Adam does not support amsgrad"),
        ({"freeze_step": 1}, ValueError, "freeze_step is 1; it must be a whole number >= 2"),
        ({"freeze_step": "soon"}, ValueError, 'a whole number >= 2 or "auto"'),
        ({"comm_backend_name": "smoke"}, ValueError, "comm_backend_name is 'smoke'; allowed: nccl"),
        ({"cuda_aware": 3}, TypeError, "cuda_aware is 3"),
        ({"betas": (1.0, 0.9)}, ValueError, "betas"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OneBitAdam([torch.zeros(1, requires_grad=True)], **options)


def test_configs_build_it() -> None:
    made = zoptim.make_optimizer(
        "OneBitAdam", [torch.zeros(1, requires_grad=True)], {"lr": 2e-4, "freeze_step": 400, "cuda_aware": False}
    )
    assert isinstance(made, OneBitAdam)
    assert made.freeze_step == 400
