"""Modules that stage 3 shall gather as one, marked in a table beside them."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch import nn

from zengine.deepspeed import utils
from zengine.deepspeed.utils.leaves import leaf_names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def model() -> nn.Module:
    return nn.Sequential(Block(), nn.ReLU(), Block())


@pytest.mark.parametrize("wanted", [[Block], ["Block"], [Block, nn.Embedding]])
def test_modules_are_marked_by_class_and_by_the_name_of_a_class(wanted):
    net = model()
    found = utils.set_z3_leaf_modules(net, wanted)
    assert found == [net[0], net[2]] == utils.get_z3_leaf_modules(net)
    assert leaf_names(net) == ("0", "2")
    assert utils.unset_z3_leaf_modules(net, wanted) == found
    assert leaf_names(net) == ()


def test_modules_are_marked_by_name_by_suffix_and_alone():
    net = model()
    utils.set_z3_leaf_modules_by_name(net, ["0"])
    utils.set_z3_leaf_modules_by_suffix(net, ["2.inner"])
    utils.set_z3_leaf_module(net[1], True)
    assert leaf_names(net) == ("0", "1", "2.inner")
    utils.set_z3_leaf_module(net[1], False)
    assert not utils.z3_leaf_module(net[1])
    assert utils.z3_leaf_module(net[0])


def test_a_class_that_is_not_there_is_named_beside_those_that_are():
    with pytest.raises(ValueError, match=r"has no modules of the classes .*Embedding.*made of: Block, Linear, ReLU"):
        utils.set_z3_leaf_modules(model(), [nn.Embedding])
    assert utils.set_z3_leaf_modules(model(), [nn.Embedding], raise_if_not_found=False) == []


def test_marking_keeps_no_model_alive():
    net = model()
    utils.set_z3_leaf_modules(net, [Block])
    seen = weakref.ref(net[0])
    del net
    gc.collect()
    assert seen() is None
    assert leaf_names(None) == ()
