"""The contract table of optimizers: a new optimizer is a new row of ROWS.

`test_flat*.py` test every row against the pure rules, torch, flat shards, the grad_scale protocol, state dicts and
torch's conventions.  `row`, `path` and `lab` are fixtures, because test files do not import each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import zoptim
from zoptim.rules.elementwise import AdamMoments, adagrad_rule, adam_rule, adamw_rule, lamb_rule, lion_rule, sgd_rule

Memory = Any  # the state of a rule for one tensor


@attrs.frozen
class Row:
    """One optimizer under contract."""

    name: str
    ours: type[zoptim.FlatOptimizer]
    options: dict[str, Any]
    rule: Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]  # pure; Memory None before the first update
    torch_class: type[torch.optim.Optimizer] | None  # None: torch has no such option
    pace: float = 0.05  # an lr with which a quadratic converges in 200 steps
    elementwise: bool = True  # the class attribute

    def make(self, params: list[Tensor], **more: Any) -> zoptim.FlatOptimizer:
        return self.ours(params, **self.options, **more)

    def make_torch(self, params: list[Tensor], **more: Any) -> torch.optim.Optimizer:
        if self.torch_class is None:
            pytest.skip("torch has no counterpart")
        return self.torch_class(params, **self.options, **more)


def adam_row(name: str, ours: Any, rule: Any, torch_class: Any, amsgrad: bool = False, **hyper: Any) -> Row:
    rule_hyper = {key: value for key, value in hyper.items() if key != "decoupled_weight_decay"}

    def step(param: Tensor, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return rule(param, grad, memory or AdamMoments.zeros(param, amsgrad=amsgrad), **rule_hyper)

    return Row(name, ours, {**hyper, **({"amsgrad": True} if amsgrad else {})}, step, torch_class)


def sgd_row(name: str, **hyper: Any) -> Row:
    def step(param: Tensor, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return sgd_rule(param, grad, memory, **hyper)

    return Row(name, zoptim.SGD, hyper, step, torch.optim.SGD)


def adagrad_row(name: str, **hyper: Any) -> Row:
    rule_hyper = {key: value for key, value in hyper.items() if key != "initial_accumulator_value"}

    def step(param: Tensor, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        first = torch.full_like(param, hyper.get("initial_accumulator_value", 0.0))
        count, total = memory or (0, first)
        new, total = adagrad_rule(param, grad, total, step=count, **rule_hyper)
        return new, (count + 1, total)

    return Row(name, zoptim.Adagrad, hyper, step, torch.optim.Adagrad, pace=0.5)


def lion_row(name: str, **hyper: Any) -> Row:
    def step(param: Tensor, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return lion_rule(param, grad, torch.zeros_like(param) if memory is None else memory, **hyper)

    return Row(name, zoptim.Lion, hyper, step, None)


def lamb_row(name: str, **hyper: Any) -> Row:
    def step(param: Tensor, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return lamb_rule(param, grad, memory or AdamMoments.zeros(param), **hyper)

    return Row(name, zoptim.LAMB, hyper, step, None, pace=0.01, elementwise=False)


ADAM = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
ROWS = [
    adam_row("AdamW", zoptim.AdamW, adamw_rule, torch.optim.AdamW, **ADAM),
    adam_row("AdamW amsgrad", zoptim.AdamW, adamw_rule, torch.optim.AdamW, amsgrad=True, **ADAM),
    adam_row("AdamW maximize", zoptim.AdamW, adamw_rule, torch.optim.AdamW, maximize=True, **ADAM),
    adam_row("AdamW uncorrected", zoptim.AdamW, adamw_rule, None, bias_correction=False, **ADAM),
    adam_row("Adam", zoptim.Adam, adam_rule, torch.optim.Adam, **ADAM),
    adam_row("Adam amsgrad", zoptim.Adam, adam_rule, torch.optim.Adam, amsgrad=True, maximize=True, **ADAM),
    adam_row("Adam uncorrected", zoptim.Adam, adam_rule, None, bias_correction=False, **ADAM),
    adam_row("Adam decoupled", zoptim.Adam, adamw_rule, torch.optim.Adam, decoupled_weight_decay=True, **ADAM),
    sgd_row("SGD", lr=0.1, weight_decay=0.1),
    sgd_row("SGD momentum", lr=0.1, momentum=0.9, weight_decay=0.1),
    sgd_row("SGD dampening", lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    sgd_row("SGD nesterov", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    adagrad_row("Adagrad", lr=0.1, weight_decay=0.1),
    adagrad_row("Adagrad decaying", lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-6),
    adagrad_row("Adagrad maximize", lr=0.1, maximize=True, weight_decay=0.01),
    lion_row("Lion", lr=1e-2, betas=(0.8, 0.98), weight_decay=0.1),
    lion_row("Lion maximize", lr=1e-2, maximize=True),
    lamb_row("LAMB", **ADAM),
    lamb_row("LAMB eps inside", **ADAM, eps_inside_sqrt=True, maximize=True),
    lamb_row("LAMB uncorrected", **ADAM, bias_correction=False, max_coeff=0.5),
]


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    """Every optimizer under contract."""
    return request.param


REPRESENTATIVES = ("AdamW", "Adam amsgrad", "SGD", "SGD momentum", "Adagrad decaying", "Lion", "LAMB")


@pytest.fixture(params=[row for row in ROWS if row.name in REPRESENTATIVES], ids=lambda row: row.name)
def kind(request: pytest.FixtureRequest) -> Row:
    """One row for each kind of state, for tests of state rather than arithmetic."""
    return request.param


@pytest.fixture(params=[row for row in ROWS if row.elementwise], ids=lambda row: row.name)
def elementwise(request: pytest.FixtureRequest) -> Row:
    """Every elementwise optimizer, whose shards may be cut anywhere."""
    return request.param


@pytest.fixture(params=[{}, {"foreach": True}], ids=["kernel", "torch"])
def path(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Constructor options that force each of the two update paths."""
    return dict(request.param)


@pytest.fixture
def lab() -> type[Lab]:
    """The tools of the contract tests."""
    return Lab


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Use one thread: on tiny tensors threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SHAPES = [(7,), (3, 5), (), (0,), (64,), (2, 3, 4, 5)]


class Lab:
    """Deterministic parameters and gradients, and comparisons that report distances."""

    shapes = SHAPES

    @staticmethod
    def make_params(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]

    @staticmethod
    def make_grads(step: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
        """Gradients of very different sizes, the same in every dtype: exactly representable in float32."""
        generator = torch.Generator().manual_seed(100 + step)
        sizes = [10.0 ** ((step + i) % 5 - 3) for i in range(len(shapes))]
        return [size * torch.randn(shape, generator=generator) for size, shape in zip(sizes, shapes)]

    @staticmethod
    def run(optimizer: Any, params: list[Tensor], steps: range, shapes: list[tuple[int, ...]] = SHAPES) -> None:
        for step in steps:
            for param, grad in zip(params, Lab.make_grads(step, shapes)):
                param.grad = grad.to(param.dtype)
            optimizer.step()

    @staticmethod
    def state_keys(state_dict: dict[str, Any]) -> dict[int, set[str]]:
        return {index: set(state) for index, state in state_dict["state"].items() if state}

    @staticmethod
    def assert_bitwise(actual: list[Tensor], expected: list[Tensor]) -> None:
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e), f"differ by up to {(a - e).abs().max()}"

    @staticmethod
    def assert_near(actual: list[Tensor], expected: list[Tensor], rtol: float, atol: float) -> None:
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.detach().double(), e.detach().double(), rtol=rtol, atol=atol)

    @staticmethod
    def snapshot(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
        """Copies of weights and every state tensor."""
        state = [value for param in params for _, value in sorted(optimizer.state[param].items())]
        return [tensor.detach().clone() for tensor in [*params, *state]]


@pytest.fixture
def team() -> type[Team]:
    """Ranks that are threads."""
    return Team


@attrs.define(eq=False)
class Team:
    """Threads as ranks, with flat shards of concatenated tensors, cut at `cuts`.

    Counts are totals of all ranks.
    """

    shapes: list[tuple[int, ...]]
    cuts: list[int]  # where each rank's shard begins; the last ends with the tensors
    reduced: list[int] = attrs.field(factory=list)  # elements of each sum
    exchanged: list[int] = attrs.field(factory=list)  # elements of each exchange that travelled
    given: dict[int, Any] = attrs.field(factory=dict)
    barrier: Any = attrs.field(init=False)

    @barrier.default
    def _barrier(self) -> threading.Barrier:
        return threading.Barrier(len(self.cuts), timeout=300)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return list(zip(self.cuts, [*self.cuts[1:], sum(torch.Size(shape).numel() for shape in self.shapes)]))

    def segments(self) -> list[list[zoptim.Segment]]:
        """[rank]: its segments."""
        found: list[list[zoptim.Segment]] = []
        for low, high in self.bounds:
            found.append([])
            start = 0
            for index, shape in enumerate(self.shapes):
                end = start + torch.Size(shape).numel()
                first, last = max(start, low), min(end, high)
                if first < last:
                    found[-1].append(zoptim.Segment(first - low, shape, index, (first - start, last - start)))
                start = end
        return found

    def shards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return [flat[low:high].clone() for low, high in self.bounds]

    def place_segments(self, rank: int, optimizer: Any, shard: Tensor) -> None:
        optimizer.place_on_ranks({shard: self.segments()}, Member(self, rank, len(self.cuts)))

    def train(self, make: Callable[[list[Tensor]], Any], steps: range, dtype: torch.dtype = torch.float32) -> Any:
        """(shards, optimizers) of all ranks after `steps` with the lab's weights and gradients."""
        shards = [shard.requires_grad_() for shard in self.shards(Lab.make_params(self.shapes, dtype))]
        optimizers = [make([shard]) for shard in shards]
        for rank, (shard, optimizer) in enumerate(zip(shards, optimizers)):
            self.place_segments(rank, optimizer, shard)
        self.go_on(shards, optimizers, steps)
        return shards, optimizers

    def go_on(self, shards: list[Tensor], optimizers: list[Any], steps: range) -> None:
        def go(rank: int) -> None:
            for step in steps:
                shards[rank].grad = self.shards(Lab.make_grads(step, self.shapes))[rank].to(shards[rank].dtype)
                optimizers[rank].step()

        self.together(go)

    def together(self, go: Callable[[int], None]) -> None:
        failures: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                go(rank)
            except BaseException as failure:
                failures.append(failure)
                self.barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(len(self.cuts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def meet(self, rank: int, mine: Any) -> list[Any]:
        """Exchange values: return those of all ranks, by rank."""
        self.given[rank] = mine
        self.barrier.wait()
        found = [self.given[other] for other in range(len(self.cuts))]
        self.barrier.wait()
        return found


@attrs.frozen(eq=False)
class Member:
    """One rank of a team: an implementation of zoptim.shards.ranks.Ranks."""

    team: Team
    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor) -> None:
        given = self.team.meet(self.rank, tensor.clone())
        tensor.copy_(torch.stack(given).sum(dim=0))
        if self.rank == 0:
            self.team.reduced.append(tensor.numel())

    def exchange(self, outgoing: Tensor, numels: Sequence[Sequence[int]]) -> Tensor:
        assert outgoing.numel() == sum(numels[self.rank])
        given = self.team.meet(self.rank, (outgoing, numels))
        assert all(other == numels for _, other in given), "all ranks know the same table"
        if self.rank == 0:
            self.team.exchanged.append(sum(map(sum, numels)))
        parts = []
        for source, (sent, _) in enumerate(given):
            start = sum(numels[source][: self.rank])
            parts.append(sent[start : start + numels[source][self.rank]])
        return torch.cat(parts)
