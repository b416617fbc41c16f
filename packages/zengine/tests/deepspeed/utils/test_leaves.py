"""Modules that stage 3 shall gather as one: DeepSpeed's answers, and one unit at any place in the model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed import utils
from zengine.deepspeed.utils.leaves import leaf_names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Special(Block):
    pass


def model() -> nn.Module:
    return nn.Sequential(Block(), nn.ReLU(), Block())


@pytest.mark.parametrize("wanted", [[Block], ["Block"], [f"{__name__}.Block"], [Block, nn.Embedding]])
def test_modules_are_marked_by_class_and_by_the_name_of_a_class(wanted):
    net = model()
    found = utils.set_z3_leaf_modules(net, wanted)
    assert found == [net[0], net[2]] == utils.get_z3_leaf_modules(net)
    assert leaf_names(net) == ("0", "2")
    assert [getattr(module, "_z3_leaf", False) for module in net] == [True, False, True]  # as Accelerate's tests ask
    assert utils.unset_z3_leaf_modules(net, wanted) == found
    assert leaf_names(net) == ()


def test_a_class_takes_subclasses_along_and_its_name_does_not():
    net = nn.Sequential(Special(), Block())
    assert utils.set_z3_leaf_modules(net, ["Block"]) == [net[1]]
    assert utils.set_z3_leaf_modules(net, [Block]) == [net[0], net[1]]


def test_inner_modules_are_returned_before_outer_ones():
    net = nn.Sequential(Block())
    assert utils.set_z3_leaf_modules(net, [nn.Module]) == [net[0].inner, net[0], net]


def test_by_name_and_by_suffix_return_what_matched_and_what_did_not():
    net = model()
    assert utils.set_z3_leaf_modules_by_name(net, ["2", "0"]) == ([net[2], net[0]], [])
    assert utils.set_z3_leaf_modules_by_suffix(net, ["inner", "2.inner"]) == ([net[0].inner, net[2].inner], [])
    assert leaf_names(net) == ("0", "0.inner", "2", "2.inner")
    assert utils.set_z3_leaf_modules_by_name(net, ["0", "none"], raise_if_not_found=False) == ([net[0]], ["none"])
    assert utils.set_z3_leaf_modules_by_suffix(net, ["gone"], raise_if_not_found=False) == ([], ["gone"])


def test_a_flag_that_is_false_unmarks_by_name_by_suffix_and_alone():
    net = model()
    utils.set_z3_leaf_modules(net, [Block, nn.Linear])
    assert utils.set_z3_leaf_modules_by_name(net, ["0"], False) == ([net[0]], [])
    assert utils.set_z3_leaf_modules_by_suffix(net, ["0.inner"], flag=False) == ([net[0].inner], [])
    utils.set_z3_leaf_module(net[2], False)
    assert leaf_names(net) == ("2.inner",)
    assert not utils.z3_leaf_module(net[2])
    assert utils.z3_leaf_module(net[2].inner)


def test_one_name_that_is_not_there_is_an_error_although_others_are():
    net = model()
    with pytest.raises(ValueError, match=r"no modules named \['none'\].*of the classes Block, Linear, ReLU"):
        utils.set_z3_leaf_modules_by_name(net, ["0", "none"])
    with pytest.raises(ValueError, match=r"no modules whose names end in \['gone'\]"):
        utils.set_z3_leaf_modules_by_suffix(net, ["inner", "gone"])
    assert leaf_names(net) == ()


def test_a_class_that_is_not_there_is_named_beside_those_that_are():
    with pytest.raises(
        ValueError, match=r"has no modules of the classes .*Embedding.*of the classes Block, Linear, ReLU"
    ):
        utils.set_z3_leaf_modules(model(), [nn.Embedding])
    assert utils.set_z3_leaf_modules(model(), [nn.Embedding], raise_if_not_found=False) == []
    with pytest.raises(TypeError, match="classes or names of classes, got 3"):
        utils.set_z3_leaf_modules(model(), [3])


def test_marking_keeps_no_model_alive():
    net = model()
    utils.set_z3_leaf_modules(net, [Block])
    seen = weakref.ref(net[0])
    del net
    gc.collect()
    assert seen() is None
    assert leaf_names(None) == ()


# -- what a leaf does ----------------------------------------------------------------------------


class Choosing(nn.Module):
    """Which of its layers runs is up to the data, so ranks gather different ones where each is a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.layers)):
            if int(x.abs().sum() * 7 + index) % 2:
                x = self.layers[index](x).tanh()
        return self.out(x)


def batch(rank: int) -> torch.Tensor:
    return torch.full((1, 4), 1.0 + rank * 0.05)


def ways(net: Choosing, x: torch.Tensor) -> list[int]:
    """The layers that run."""
    called: list[int] = []
    hooks = [layer.register_forward_hook(lambda *_, i=i: called.append(i)) for i, layer in enumerate(net.layers)]
    net(x)
    for hook in hooks:
        hook.remove()
    return called


MARKERS: dict[str, Any] = {
    "alone": lambda net: utils.set_z3_leaf_module(net, True),
    "class": lambda net: utils.set_z3_leaf_modules(net, [Choosing]),
    "class name": lambda net: utils.set_z3_leaf_modules(net, ["Choosing"]),
    "name": lambda net: utils.set_z3_leaf_modules_by_name(net, [""]),
    "config": lambda net: None,
}


def trained(how: str) -> tuple[dict[str, torch.Tensor], set[str | None], bool]:
    net = Choosing()
    MARKERS[how](net)
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_unit_size": 4}
    if how == "config":
        zero["leaf_module"] = {"classes": ["Choosing"]}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": zero,
    }
    engine = deepspeed.initialize(model=net, config=config)[0]
    units = {bucket.unit for bucket in engine.parts.partition.layout.buckets}
    marked = utils.get_z3_leaf_modules(net) == [net]
    for _ in range(2):
        engine.backward(engine(batch(zcomm.group_rank())).square().mean())
        engine.step()
    found = engine.module_state_dict()
    engine.destroy()
    return found, units, marked


def in_one_process(world: int) -> dict[str, torch.Tensor]:
    net = Choosing()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(2):
        (sum(net(batch(rank)).square().mean() for rank in range(world)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", [*MARKERS])
def test_the_model_itself_as_a_leaf_is_one_unit_and_trains_like_one_process(how: str, world: int):
    assert world == 1 or ways(Choosing(), batch(0)) != ways(Choosing(), batch(1))
    expected = in_one_process(world)
    for found, units, marked in run_ranks(trained, world, how):
        assert units == {"" if world > 1 else None}  # one rank has nothing to gather
        assert marked
        torch.testing.assert_close(dict(found), dict(expected))
