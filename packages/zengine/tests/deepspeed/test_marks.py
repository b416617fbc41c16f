"""What parameters tell other people's code at stage 3, when, and until when."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed.marks import Marked, is_marked, mark, unmark
from zengine.deepspeed.runtime.zero.partition_parameters import (
    PartitionedParamStatus,
    ZeroParamStatus,
    ZeroParamType,
)
from zpartition.experts import ExpertParameter
from zpartition.experts.stacked import mark_experts

HERE, AWAY = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.second(self.first(x).tanh()))


def config(stage: int = 3, persist: int = 0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": persist, "stage3_unit_size": 1}
    optimizer = {"type": "AdamW", "params": {"lr": 0.05}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero, **more}


def engine_of(*args: Any, **more: Any) -> Any:
    return deepspeed.initialize(model=Net(), config=config(*args, **more))[0]


def statuses(net: nn.Module) -> list[ZeroParamStatus]:
    return [param.ds_status for param in net.parameters()]


SCRIPT = """
import deepspeed, torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = {"train_batch_size": 1, "zero_optimization": zero}
engine = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
weight = engine.module.weight
assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
with deepspeed.zero.GatheredParameters([weight]):
    assert weight.ds_status == ZeroParamStatus.AVAILABLE
print("as ever")
"""


def test_a_script_that_imports_deepspeed_finds_the_marks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "zengine.as_deepspeed", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.split("\n")[-2:] == ["as ever", ""], done.stderr


def check_facts(persist: int) -> list[list[int]]:
    engine, plain = engine_of(3, persist), Net()
    net = engine.module
    sizes = []
    for param, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, nn.Parameter)
        assert type(param).__name__ == "Parameter"
        assert (param.ds_shape, param.ds_numel) == (other.shape, other.numel())
        assert param.ds_param_type is ZeroParamType.PARTITIONED
        assert param.ds_persist is (other.numel() < persist)
        assert param.ds_active_sub_modules == set()
        part = param.ds_tensor
        assert part.dim() == 1
        assert part.ds_numel == part.numel() == param.partition_numel()
        assert part.status is PartitionedParamStatus.AVAILABLE
        assert not part.requires_grad
        parts: list[list[float]] = zcomm.all_gather_object(part.tolist(), engine.parts.partition.group)
        assert torch.equal(torch.tensor([*itertools.chain(*parts)]), other.detach().flatten())
        sizes.append([len(each) for each in parts])
        assert param.ds_summary() == {
            "id": param.ds_id,
            "status": "NOT_AVAILABLE",
            "numel": other.numel(),
            "ds_numel": other.numel(),
            "shape": tuple(other.shape),
            "ds_shape": tuple(other.shape),
            "requires_grad": other.requires_grad,
            "grad_shape": None,
            "persist": param.ds_persist,
            "active_sub_modules": set(),
            "ds_tensor.shape": part.shape,
        }
    numbers = [param.ds_id for param in net.parameters()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    engine.destroy()
    return sizes


@pytest.mark.parametrize("persist", [0, 20])
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_say_what_deepspeeds_say(world: int, persist: int) -> None:
    for sizes in run_ranks(check_facts, world, persist):
        assert [sum(each) for each in sizes] == [60, 10, 60, 6, 36, 6]


class Product(torch.autograd.Function):
    """A linear layer whose backward asks whether the weight that it has saved is whole, as TRL's losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        assert not any(hasattr(other, "ds_status") for other in (x, weight.detach().clone()))
        with contextlib.nullcontext() if weight.ds_status == HERE else deepspeed.zero.GatheredParameters([weight]):
            return grads[0] @ weight, grads[0].t() @ x


class Fused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(Product.apply(self.first(x).tanh(), self.second.weight), self.small.weight)


def check_saved(persist: int) -> None:
    """Train with both kinds of weights: those of at least `persist` elements are sharded."""
    engines = [deepspeed.initialize(model=Fused(), config=config(3, persist))[0] for _ in range(2)]
    for _ in range(2):
        for engine in engines:
            engine.backward(engine(torch.ones(2, 6)).square().mean())
            assert engine.step()
    engines[0].destroy()
    assert "ds_status" in vars(torch.Tensor)
    engines[1].destroy()
    assert "ds_status" not in vars(torch.Tensor)


@pytest.mark.parametrize("persist", [0, 20, 1000])
@pytest.mark.parametrize("world", [1, 2])
def test_weights_that_custom_functions_have_saved_say_that_they_are_whole(world: int, persist: int) -> None:
    run_ranks(check_saved, world, persist)


def check_status(persist: int) -> None:
    engine = engine_of(3, persist)
    net = engine.module
    count = len(list(net.parameters()))
    seen = []
    net.second.register_forward_pre_hook(lambda module, _: seen.append([module.weight.ds_status]))
    assert statuses(net) == [AWAY] * count
    for _ in range(3):
        loss = engine(torch.ones(2, 6)).square().mean()
        assert statuses(net) == [AWAY] * count  # also with weights that stay for the backward
        engine.backward(loss)
        assert statuses(net) == [AWAY] * count
        engine.step()
        assert statuses(net) == [AWAY] * count
    with torch.no_grad():
        engine(torch.ones(2, 6))
    assert statuses(net) == [AWAY] * count
    assert seen == [[HERE]] * 4
    with deepspeed.zero.GatheredParameters(net.parameters()):
        assert statuses(net) == [HERE] * count
        with deepspeed.zero.GatheredParameters([net.first.weight]):
            pass
        assert statuses(net) == [HERE] * count
    with deepspeed.zero.GatheredParameters([net.first.weight]):
        assert net.first.weight.ds_status == ZeroParamStatus.AVAILABLE
        assert net.second.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with pytest.raises(KeyError), deepspeed.zero.GatheredParameters(net.parameters()):
        raise KeyError
    assert statuses(net) == [AWAY] * count
    engine.destroy()


@pytest.mark.parametrize("persist", [0, 1000])
@pytest.mark.parametrize("world", [1, 2])
def test_a_status_is_that_of_the_moment(world: int, persist: int) -> None:
    run_ranks(check_status, world, persist)


def check_gathering() -> None:
    engine, plain = engine_of(), Net()
    net = engine.module
    first, second = net.first.weight, net.second.weight
    assert first.all_gather() is None
    assert first.all_gather(async_op=True).wait() is None  # it is whole already
    assert torch.equal(first, plain.first.weight)
    assert (first.ds_status, second.ds_status) == (HERE, AWAY)
    second.all_gather(param_list=[first, second, net.frozen.bias])
    first.partition()
    assert (first.ds_status, second.ds_status) == (AWAY, HERE)
    assert torch.equal(second, plain.second.weight)
    with torch.no_grad():
        second.mul_(2)
    net.frozen.bias.partition(param_list=[second, net.frozen.bias], has_been_updated=True)
    second.partition()  # once more does nothing
    assert set(statuses(net)) == {AWAY}
    with deepspeed.zero.GatheredParameters(second):
        assert torch.equal(second, plain.second.weight * 2)
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(second), plain.second.weight * 2)
    engine.backward(engine(torch.ones(2, 6)).square().mean())
    assert engine.step()
    engine.destroy()


def check_owner() -> None:
    """The group of a weight is its engine's, whatever engines are made later; small weights are those that stay."""
    one = deepspeed.initialize(model=Net(), config=config(persist=20))[0]
    zero = {"stage": 3, "shard_group_size": 1}
    two = deepspeed.initialize(model=Net(), mesh_param=(1, 2), config={**config(), "zero_optimization": zero})[0]
    assert deepspeed.utils.groups.get_data_parallel_group().size() == 1  # of the latest engine
    assert {param.ds_process_group.size() for param in one.module.parameters()} == {2}
    assert {param.ds_process_group.size() for param in two.module.parameters()} == {1}
    assert [param.ds_persist for param in one.module.parameters()] == [False, True] * 2 + [False, True]
    assert one.optimizer.parameter_offload.persistent_parameters == [each.bias for each in one.module.children()]


def test_the_group_of_a_weight_is_that_of_its_engine() -> None:
    run_ranks(check_owner, 2)


def check_written_shards() -> None:
    """A change between evaluation and training shows what was written into shards meanwhile."""
    engine = engine_of()
    x = torch.ones(2, 6)
    with torch.no_grad():
        before = engine.eval()(x)  # the weights stay gathered
        for param in engine.module.parameters():
            param.ds_tensor.mul_(0)
        engine.train()
        assert not engine(x).any()
    assert before.any()
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_change_of_mode_shows_what_was_written_into_shards(world: int) -> None:
    run_ranks(check_written_shards, world)


@pytest.mark.parametrize("world", [1, 2])
def test_all_gather_and_partition_are_the_two_ends_of_a_block(world: int) -> None:
    run_ranks(check_gathering, world)


def check_end() -> None:
    engine = engine_of()
    net = engine.module
    assert isinstance(net.first.weight, Marked)
    assert list(net.first.ds_external_parameters()) == []
    assert net.first.ds_active_sub_modules == set()
    assert engine.optimizer.parameter_offload.module is net
    engine.close()
    for param in net.parameters():
        assert type(param) is nn.Parameter
        assert not [name for name in dir(param) if name.startswith("ds_")]
    for module in net.modules():
        assert not [name for name in vars(module) if name.startswith("ds_")]
    assert not hasattr(engine.optimizer, "parameter_offload")
    again = deepspeed.initialize(model=net, config=config())[0]
    assert net.first.weight.ds_status == AWAY
    dropped = weakref.ref(again)
    del again, engine
    gc.collect()
    assert dropped() is None
    assert not hasattr(net.first.weight, "ds_id")


@pytest.mark.parametrize("world", [1, 2])
def test_marks_go_with_the_engine(world: int) -> None:
    run_ranks(check_end, world)


def check_unmarked(stage: int) -> None:
    engines = [zengine.initialize(model=Net(), config=config(stage))[0]]
    if stage < 3:
        with deepspeed.zero.Init():
            net = Net()
        assert hasattr(net.first.weight, "ds_id")
        engines += [engine_of(stage), deepspeed.initialize(model=net, config=config(stage))[0]]
    for engine in engines:
        assert not any(hasattr(param, "ds_id") for param in engine.module.parameters())
        assert not any(hasattr(module, "ds_external_parameters") for module in engine.module.modules())
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            pass
        engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lower_stages_and_plain_zengine_mark_nothing(stage: int) -> None:
    run_ranks(check_unmarked, 2, stage)


def check_copies() -> None:
    engine = engine_of()
    net = engine.module
    for copied in (copy.deepcopy(net.first.weight), pickle.loads(pickle.dumps(net.frozen.bias))):
        assert type(copied) is nn.Parameter
        assert not hasattr(copied, "ds_id")
    with deepspeed.zero.GatheredParameters(net.parameters()):
        file = io.BytesIO()
        torch.save(dict(net.named_parameters()), file)
        twins = copy.deepcopy(dict(net.named_parameters()))
    file.seek(0)
    plain = dict(Net().named_parameters())
    for others in (torch.load(file, weights_only=True), twins):
        assert {type(param) for param in others.values()} == {nn.Parameter}
        assert all(torch.equal(param, plain[name]) for name, param in others.items())
    assert type(net.first.weight.detach()) is torch.Tensor
    assert type(net.first.weight.data) is torch.Tensor
    engine.destroy()


def test_copies_and_pickles_are_plain() -> None:
    run_ranks(check_copies, 2)


def check_init() -> None:
    with deepspeed.zero.Init():
        net = Net()
    plain = Net()
    assert [param.ds_status for param in net.parameters()] == [AWAY] * 6
    assert [param.ds_shape for param in net.parameters()] == [param.shape for param in plain.parameters()]
    share = net.first.weight.ds_tensor
    assert (share.is_meta, share.numel()) == (True, -(-net.first.weight.numel() // zcomm.group_size()))
    assert net.first.weight.partition_numel() == -(-plain.first.weight.numel() // zcomm.group_size())
    numbers = [param.ds_id for param in net.parameters()]
    assert numbers == sorted(set(numbers))
    assert not hasattr(net, "ds_external_parameters")
    with deepspeed.zero.GatheredParameters(net.first.weight, modifier_rank=0):
        assert net.first.weight.ds_status == HERE
        assert torch.equal(net.first.weight, plain.first.weight)
        if zcomm.group_rank() == 0:
            net.first.weight.data.fill_(0.5)
    net.first.weight.all_gather()
    assert bool((net.first.weight == 0.5).all())
    net.first.weight.partition()
    assert [param.ds_status for param in net.parameters()] == [AWAY] * 6
    engine = deepspeed.initialize(model=net, config=config())[0]
    assert [param.ds_id for param in net.parameters()] == numbers
    with deepspeed.zero.GatheredParameters(net.first.weight):
        assert bool((net.first.weight == 0.5).all())
    engine.destroy()
    assert not is_marked(net.first.weight)
    with deepspeed.zero.Init(module=net):
        pass
    assert hasattr(net.first.weight, "ds_id")
    assert not hasattr(nn.Linear(2, 2).weight, "ds_id")


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_built_inside_init_is_marked_until_the_engine_ends(world: int) -> None:
    run_ranks(check_init, world)


def test_experts_are_known_as_such_with_marks_and_without() -> None:
    with deepspeed.zero.Init():
        weight = nn.Linear(2, 2).weight
    number = weight.ds_id  # type: ignore[attr-defined]
    mark_experts(weight)
    assert type(weight) is ExpertParameter
    mark(weight)
    assert isinstance(weight, ExpertParameter)
    assert weight.ds_id == number
    unmark([weight])
    assert type(weight) is ExpertParameter
    assert not hasattr(weight, "ds_id")


def check_lists() -> None:
    net = Net()
    deepspeed.zero.register_external_parameter(net.second, net.first.weight)
    deepspeed.utils.set_z3_leaf_module(net.second, True)
    engine = deepspeed.initialize(model=net, config=config())[0]
    ((_, found),) = net.second.ds_external_parameters()
    assert found is net.first.weight
    with deepspeed.zero.GatheredParameters([net.frozen.weight], fwd_module=net.second):
        pass
    assert len(net.second.ds_external_parameters()) == 2
    deepspeed.zero.unregister_external_parameter(net.second, net.first.weight)
    assert [each is net.frozen.weight for _, each in net.second.ds_external_parameters()] == [True]
    with pytest.raises(RuntimeError, match="was not registered with Linear"):
        deepspeed.zero.unregister_external_parameter(net.second, net.first.weight)
    assert deepspeed.utils.z3_leaf_parameter(net.second.bias)
    assert net.second.bias.ds_z3_leaf_module is net.second
    assert not deepspeed.utils.z3_leaf_parameter(net.first.bias)
    engine.destroy()
    assert not deepspeed.utils.z3_leaf_parameter(net.second.bias)


def test_external_parameters_and_leaf_modules_are_listed() -> None:
    run_ranks(check_lists, 2)


def check_compiled() -> tuple[int, float]:
    engine = engine_of(3, 1000)  # everything stays whole: one graph
    explained = torch._dynamo.explain(engine.module)(torch.ones(2, 6))
    compiled = torch.compile(engine.module, backend="eager", fullgraph=True)
    same = torch.equal(compiled(torch.ones(2, 6)), engine.module(torch.ones(2, 6)))
    engine.destroy()
    return explained.graph_break_count, float(same)


def test_marks_break_no_graph() -> None:
    assert run_ranks(check_compiled, 1) == [(0, 1.0)]
