"""Calls that end without a hook, parts of units called alone, and copies: no NaN is read, no unit stays unsharded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition._compat import outer_saved_tensor_hooks
from zpartition.weights.calls import ModuleHook, running_frame

STRICT = ZeroPolicy(stage=3, unit_numel=1300, persist_numel=0, max_live_numel=0)
WIDTH = 16


class Block(nn.Module):
    """A unit; what it does at last is checkpointed, so that backward begins by running parts of it by themselves."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=self.use_reentrant)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Reentrant(Block):
    use_reentrant = True


class Net(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def inputs() -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(7))


def make(kind: type[Block] = Block) -> tuple[Net, zpartition.Partition]:
    model = Net(kind)
    return model, zpartition.shard(model, policy=STRICT)


def is_clean(partition: zpartition.Partition) -> bool:
    """Whether no call is thought to run, no unit is held, and autograd saves as it always does."""
    calls = [*partition.unshard_hooks.running.open, *partition.unshard_hooks.dicts.open]
    held = [unit for unit in partition.unsharder.units.values() if unit.depth]
    return not calls and not held and outer_saved_tensor_hooks() is None


def _runs_parts() -> tuple[torch.Tensor, torch.Tensor, int]:
    model, partition = make()
    part = model.blocks[1].up
    with partition.micro_step():
        out = part(inputs())
        held = partition.unsharder.live_numel
        model(inputs())  # uses the buffers for others
        out.square().sum().backward()
    partition.finish_gradients()
    assert is_clean(partition)
    return out.detach(), zpartition.safe_get_full_grad(part.weight), held


def test_a_part_of_a_unit_may_be_called_from_outside() -> None:
    part = Net().blocks[1].up
    expected = part(inputs())
    expected.square().sum().backward()
    for out, gradient, held in run_ranks(_runs_parts, 2):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradient, part.weight.grad)
        assert held == 0


def _checkpoints_inside(kind: type[Block]) -> list[torch.Tensor]:
    model, partition = make(kind)
    with partition.micro_step():
        model(inputs()).backward()
    partition.finish_gradients()
    return [zpartition.safe_get_full_grad(param) for param in model.parameters()]


@pytest.mark.parametrize("kind", [Block, Reentrant])
def test_a_checkpoint_inside_a_unit_runs_its_parts_again(kind: type[Block]) -> None:
    model = Net(kind)
    model(inputs()).backward()
    for found in run_ranks(_checkpoints_inside, 2, kind):
        for gradient, param in zip(found, model.parameters()):
            torch.testing.assert_close(gradient, param.grad)


def _interrupts() -> tuple[float, float]:
    model, partition = make()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(inputs())
    assert partition.unshard_hooks.running.open, "torch calls no hook then"
    handle.remove()
    with partition.micro_step():
        loss = model(inputs())
        loss.backward()
    assert is_clean(partition)
    assert partition.unsharder.live_numel == 0
    return float(loss), float(Net()(inputs()))


def test_after_ctrl_c_in_a_forward_the_next_one_is_a_first_one() -> None:
    assert all(found == pytest.approx(expected) for found, expected in run_ranks(_interrupts, 2))


def _state_dicts_fail() -> bool:
    model, partition = make()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fail(*_: Any) -> None:
        raise ArithmeticError

    handles = [
        model.blocks[1].up.register_state_dict_post_hook(fail),
        model.blocks[1].up.register_load_state_dict_post_hook(fail),
    ]
    with pytest.raises(ArithmeticError):
        model.state_dict()
    with pytest.raises(ArithmeticError):
        model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in expected.items()})
    for handle in handles:
        handle.remove()
    found = model.state_dict()
    assert is_clean(partition)
    assert partition.unsharder.live_numel == 0
    changed = {name for name, tensor in expected.items() if not torch.equal(found[name], tensor)}
    return changed == {"first.weight", "first.bias", "blocks.0.up.weight", "blocks.0.up.bias"} | {
        "blocks.0.down.weight", "blocks.0.down.bias", "blocks.1.up.weight", "blocks.1.up.bias",
    }  # fmt: skip


def test_a_hook_that_fails_in_a_state_dict_leaves_nothing_held() -> None:
    assert run_ranks(_state_dicts_fail, 2) == [True, True]


COPIES: dict[str, Callable[[nn.Module], object]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.dumps(model.blocks[0].up._parameters),
    "keep_vars": lambda model: model.state_dict(keep_vars=True),
}
MESSAGES = {
    "deepcopy": r"would hold NaN for parameter 'weight', .* \(unit 'first'\). Make it inside zpartition.gathered",
    "pickle": r"would hold NaN for parameter 'weight', .* \(unit 'blocks.0'\)",
    "keep_vars": r"state_dict\(keep_vars=True\) would return parameter 'first.weight' itself",
}


def _copies() -> list[float]:
    model, partition = make()
    for name, message in MESSAGES.items():
        with pytest.raises(ValueError, match=message):
            COPIES[name](model)
        model.state_dict()
        assert is_clean(partition), name
    with zpartition.gathered(model):
        twin = copy.deepcopy(model)
        kept = float(model.state_dict(keep_vars=True)["first.weight"].sum())
    losses = [kept, 0.0]
    if zcomm.group_rank() == 0:  # a plain module: nothing of it communicates
        loss = twin(inputs())
        loss.backward()
        losses[1] = float(loss)
        assert all(type(child._parameters) is dict for child in twin.modules())
    return losses


def test_copies_are_rejected_while_weights_rest_and_plain_modules_inside_gathered() -> None:
    model = Net()
    expected = [float(model.first.weight.sum()), float(model(inputs()))]
    found = run_ranks(_copies, 2)
    assert found[0] == pytest.approx(expected)
    assert found[1] == pytest.approx([expected[0], 0.0])


def test_a_call_is_found_on_the_stack_and_a_copied_hook_does_nothing() -> None:
    seen: list[Any] = []
    hook = ModuleHook(lambda *_: seen.append(running_frame("_call_impl")))
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(hook)
    copy.deepcopy(module)(torch.ones(1, 2))
    assert not seen
    module(torch.ones(1, 2))
    assert seen[0].f_code is nn.Module._call_impl.__code__
    assert running_frame("_call_impl") is None


class Wrapper(nn.Module):
    """As PEFT's wrapper of a module that is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        source = "def adapter_state_dict(self):\n    return list(self.inner.state_dict())"
        found: dict[str, Any] = {"__name__": "peft.utils.other"}
        exec(source, found)
        self.adapter_state_dict = found["adapter_state_dict"].__get__(self)


def _names_on_one_rank() -> list[str]:
    model = nn.Sequential(Wrapper(), nn.Linear(WIDTH, WIDTH))
    zpartition.shard(model, policy=STRICT)
    return model[0].adapter_state_dict() if zcomm.group_rank(None) == 0 else []


def test_peft_reads_the_names_of_a_state_dict_on_one_rank() -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert run_ranks(_names_on_one_rank, 2) == [names, []]
