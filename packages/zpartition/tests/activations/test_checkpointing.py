"""Checkpointed blocks give the same bits with every store, at every stage, and split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.activations import ArenaStore, Checkpointing, HostStore, SavedInputs, Variant, saved_numel
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor import parallelize
from zpartition.testing.tensor_models import PLAN, SEQUENCE, WIDTH, Language

WAYS: dict[str, Callable[[], Checkpointing]] = {
    "plain": Checkpointing,
    "reentrant": lambda: Checkpointing(variant=Variant.REENTRANT),
    "host": lambda: Checkpointing(saved_inputs=SavedInputs(store=HostStore())),
    "arena": lambda: Checkpointing(saved_inputs=SavedInputs(store=ArenaStore(2)), variant=Variant.REENTRANT),
}


class Block(nn.Module):
    """A block with dropout and arguments of several kinds; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor, factor: float, mask: Tensor | None, *, names: tuple[str, ...] = ()) -> Tensor:
        self.calls += 1
        y = nn.functional.dropout(self.linear(x * factor), 0.5) + len(names)
        return torch.tanh(y if mask is None else y.masked_fill(mask, 0.0)) + x


class Net(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.run, self.first = run, nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.first(x), torch.eye(6, dtype=torch.bool)
        for index, block in enumerate(self.blocks):
            x = self.run(block, x.t().t(), 1.0 + index, mask if index else None, names=("a",) * index)
        return x.square().mean()


@pytest.mark.parametrize("way", WAYS)
def test_tensors_in_keywords_get_their_gradients_once(way: str) -> None:
    def gradients(run: Callable[..., Any]) -> list[Tensor]:
        leaves = [torch.linspace(-1, 1, 4).add(offset).requires_grad_() for offset in (0.0, 0.5)]
        x, bias = leaves[0].sin(), leaves[1].cos()  # a graph before the block, which the loss uses again

        def block(x: Tensor, *, bias: Tensor, factor: float) -> Tensor:
            return torch.tanh(x * factor + bias)

        y = run(block, x, bias=bias, factor=2.0)
        y = run(block, y, factor=0.5, bias=bias)
        (y * bias + x).sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    found, wanted = gradients(WAYS[way]()), gradients(plain)
    assert len(found) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def gradients(run: Callable[..., Any]) -> tuple[list[Tensor], list[int]]:
    net = Net(run)
    torch.manual_seed(9)
    for _ in range(2):
        net(torch.randn(6, 3)).backward()
    return [param.grad for param in net.parameters()] + [torch.rand(2)], [block.calls for block in net.blocks]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_same_bits_with_dropout(way: str) -> None:
    wanted, once = gradients(plain)
    found, twice = gradients(WAYS[way]())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    assert (once, twice) == ([2] * 3, [4] * 3)


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_nest_and_are_off_under_no_grad(way: str) -> None:
    run = WAYS[way]()

    def halves(net: Net, nested: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        def half(x: Tensor) -> Tensor:
            for block in net.blocks[:2]:
                x = nested(block, x, 1.0, None)
            return net.blocks[2](x, 2.0, None)

        return half

    results = []
    for outer, inner in ((plain, plain), (run, run)):
        net, x = Net(plain), torch.ones(2, 6, requires_grad=True)
        torch.manual_seed(4)
        outer(halves(net, inner), x).sum().backward()
        results.append([x.grad, *(param.grad for param in net.blocks.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert net.blocks[0].calls == 3  # forward, again for the outer one, again for its own
    with torch.no_grad():
        run(net.blocks[0], torch.ones(2, 6), 1.0, None)
    assert net.blocks[0].calls == 4


@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_a_block_propagates_and_leaves_no_state(way: str) -> None:
    run, x = WAYS[way](), torch.ones(2, 6, requires_grad=True)

    def fails(y: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fails, x)
    wanted, _ = gradients(plain)
    found, _ = gradients(run)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


# -- over ranks ----------------------------------------------------------------------------------


@attrs.define(eq=False)
class Counting:
    """A store that counts the bytes it keeps."""

    num_bytes: int = 0

    def put(self, flat: Tensor) -> Callable[[], Tensor]:
        self.num_bytes += flat.untyped_storage().nbytes()
        return lambda: flat


class Checkpointed(Language):
    """A model with dropout between blocks, each of which may be checkpointed."""

    run: Any = staticmethod(plain)

    def features(self, tokens: Tensor) -> Tensor:
        x = self.start(self.embed(tokens) + self.position(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = nn.functional.dropout(self.run(block, x), 0.2)
        return self.finish(self.norm(x))


def trained(run: Callable[..., Any], stage: int, tensor: Any, data: Any) -> list[Tensor]:
    """Return the weights after two steps with two micro-steps each."""
    model = Checkpointed()
    model.run = run
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if zcomm.group_size(tensor) > 1:
        parallelize(model, PLAN, tensor)
    policy = ZeroPolicy(stage=stage, bucket_numel=2000, unit_numel=2000, persist_numel=20, max_live_numel=0)
    partition = zpartition.shard(model, optimizer, policy=policy, group=data)
    for step in range(2):
        for micro in range(2):
            torch.manual_seed(10 * step + micro + 100 * zcomm.group_rank(data))
            tokens = torch.randint(0, 29, (2, 8))
            with partition.micro_step(is_last=micro == 1):
                model(tokens).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    with zpartition.gathered(model):
        weights = [param.detach().clone() for param in model.parameters()]
    partition.close()
    return weights


def at_every_stage() -> int:
    for stage in (0, 2, 3):
        wanted = trained(plain, stage, zcomm.consecutive_group(1), None)
        for way in ("plain", "reentrant", "host"):
            found = trained(WAYS[way](), stage, zcomm.consecutive_group(1), None)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted)), (stage, way)
    return stage


def test_two_ranks_at_every_stage_get_the_same_bits() -> None:
    assert run_ranks(at_every_stage, 2) == [3, 3]


def split() -> list[int]:
    tensor, data, counted = zcomm.consecutive_group(2), zcomm.strided_group(2), []
    for stage in (1, 3):
        wanted = trained(plain, stage, tensor, data)
        for variant in Variant:
            store = Counting()
            keeping = SavedInputs(mp_group=ModelParallelGroup.of(tensor), store=store)
            found = trained(Checkpointing(saved_inputs=keeping, variant=variant), stage, tensor, data)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted)), (stage, variant)
            counted.append(store.num_bytes)
    return counted


def test_tensor_ranks_save_a_part_each_and_get_the_same_bits() -> None:
    wanted = 4 * 3 * saved_numel(2 * 8 * WIDTH, 2) * 8  # micro-steps, blocks, elements of a part, bytes
    assert run_ranks(split, 4) == [[wanted] * 4] * 4


def split_by_tokens() -> str:
    model = Checkpointed()
    parallelize(model, SEQUENCE, None)
    model.run = Checkpointing(saved_inputs=SavedInputs(mp_group=ModelParallelGroup.of(None)))
    loss = model(torch.arange(16).view(2, 8))
    with pytest.raises(ValueError, match=r"differ between the 2 tensor ranks.*sequence_dim") as caught:
        loss.backward()
    return str(caught.value)


def test_activations_that_differ_are_not_partitioned() -> None:
    first, second = run_ranks(split_by_tokens, 2)
    assert first == second


@pytest.mark.parametrize("way", ["plain", "host", "arena"])
def test_overwritten_inputs_raise_or_were_copied(way: str) -> None:
    """Without the error the block would be recomputed from other inputs."""
    leaf = torch.randn(3, 6, requires_grad=True)
    x = leaf * 1.0
    x += WAYS[way]()(torch.tanh, x)
    if way == "arena":
        x.sum().backward()
        expected = torch.autograd.grad((leaf + torch.tanh(leaf)).sum(), leaf)[0]
        torch.testing.assert_close(leaf.grad, expected)
        return
    with pytest.raises(RuntimeError, match=r"in.?place"):
        x.sum().backward()
