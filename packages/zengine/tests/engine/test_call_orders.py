"""Orders of calls: each trains like a plain torch loop at every stage, with accumulation, on one and two ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.testing import small_engine

STEPS = 3
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


class Net(nn.Module):
    """Two layers and a parameter; `compute_loss` runs them without `forward`, and reads the weights of one itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.tail = nn.Linear(3, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(torch.tanh(self.body(x)) * self.gain)
        return out

    def compute_loss(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x)) * self.gain
        return loss_of(nn.functional.linear(hidden, self.tail.weight, self.tail.bias))

    def count(self) -> int:
        return sum(param.numel() for param in self.parameters())


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def method(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    engine.backward(engine.compute_loss(x))


def module(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    engine.backward(loss_of(engine.module(x)))


def methods_twice(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    engine.backward(engine.compute_loss(x))
    engine.backward(engine.compute_loss(y))


def scaled_method(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    engine.scale(engine.compute_loss(x)).backward()


def plain(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    loss_of(engine(x)).backward()


def plain_method(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    engine.compute_loss(x).backward()


def plain_twice(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    loss_of(engine(x)).backward()
    loss_of(engine(y)).backward()


def plain_reduced(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    loss_of(engine(x)).backward()
    engine.allreduce_gradients()


def evaluation_between(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    loss = loss_of(engine(x))
    with torch.no_grad():
        engine(y)
    engine.backward(loss)
    with torch.no_grad():
        engine(y)


def unused_forward_between(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    loss = loss_of(engine(x))
    engine(y)
    engine.backward(loss)


def sum_of_two(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    first, second = engine(x), engine(y)
    engine.backward(loss_of(first) + loss_of(second))


def two_after_two(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    first, second = engine(x), engine(y)
    engine.backward(loss_of(first))
    engine.backward(loss_of(second))


def retained(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    out = engine(x)
    engine.backward(loss_of(out), retain_graph=True)
    engine.backward(out.mean())


def retained_plain(engine: zengine.Engine, x: Tensor, y: Tensor) -> None:
    out = engine(x)
    loss_of(out).backward(retain_graph=True)
    out.mean().backward()


def one(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return net.compute_loss(x)


def both(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return net.compute_loss(x) + net.compute_loss(y)


def loss_and_mean(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return net.compute_loss(x) + net(x).mean()


Order = Callable[[zengine.Engine, Tensor, Tensor], None]
Loss = Callable[[Net, Tensor, Tensor], Tensor]
ORDERS: dict[Order, Loss] = {
    method: one,
    module: one,
    methods_twice: both,
    scaled_method: one,
    plain: one,
    plain_method: one,
    plain_twice: both,
    plain_reduced: one,
    evaluation_between: one,
    unused_forward_between: one,
    sum_of_two: both,
    two_after_two: both,
    retained: loss_and_mean,
    retained_plain: loss_and_mean,
}


def batches(index: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1 + index + rank, 6).view(2, 3)
    return x, x.flip(0).square()


def plain_torch(loss: Loss, accumulation: int, num_ranks: int) -> dict[str, Tensor]:
    """Weights after some steps on the batches of all ranks."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), **SGD["params"])
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank in range(num_ranks):
                value = loss(net, *batches(step * accumulation + micro, rank))
                (value / (accumulation * num_ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def _trains_like_torch(name: str) -> int:
    order = next(each for each in ORDERS if each.__name__ == name)
    num_ranks, rank = zcomm.group_size(), zcomm.group_rank()
    compared = 0
    for accumulation in (1, 3):
        wanted = plain_torch(ORDERS[order], accumulation, num_ranks)
        for stage in range(4):
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            engine = small_engine(
                Net(), zero_optimization=zero, gradient_accumulation_steps=accumulation, optimizer=SGD
            )
            for index in range(STEPS * accumulation):
                order(engine, *batches(index, rank))
                assert bool(engine.step()) == ((index + 1) % accumulation == 0)
            assert engine.micro_steps == STEPS * accumulation
            assert engine.global_samples == STEPS * accumulation * 2 * num_ranks
            torch.testing.assert_close(engine.state_dict(), wanted)
            engine.close()
            compared += 1
    return compared


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_order_of_calls_trains_like_plain_torch(order, world_size):
    assert run_ranks(_trains_like_torch, world_size, order.__name__) == [8] * world_size


def _counts_alone() -> int:
    engine = small_engine(Net(), zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    found = engine.count() if zcomm.group_rank() == 0 else 0
    with pytest.raises(TypeError, match="positional argument"):
        engine.compute_loss()
    method(engine, *batches(0, 0))
    assert engine.step()
    return found


def test_at_stage_3_one_rank_may_call_a_method_that_counts_and_a_failed_one_leaves_nothing_open():
    assert run_ranks(_counts_alone, 2) == [30, 0]
