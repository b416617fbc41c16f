import pytest
import torch
from torch import nn

from zpartition.pipeline import LayerPartitionError, LayerSpec, TiedLayerSpec
from zpartition.pipeline.layers import build, weights_of

SPECS = [
    TiedLayerSpec("e", nn.Embedding, 5, 4),
    LayerSpec(nn.Linear, 4, 4),
    torch.tanh,
    nn.Linear(4, 2),
    TiedLayerSpec("e", nn.Embedding, 5, 4, forward_fn=lambda module, value: value @ module.weight.t()),
]


def test_weights_count_trainable_elements_without_building() -> None:
    before = torch.get_rng_state()
    assert weights_of(SPECS, "parameters") == [20, 20, 0, 10, 20]
    assert torch.equal(torch.get_rng_state(), before)
    assert weights_of(SPECS, "uniform") == [1] * 5
    assert weights_of(SPECS, "type:linear") == [0, 1, 0, 1, 0]
    with pytest.raises(LayerPartitionError, match="Embedding, Linear, tanh"):
        weights_of(SPECS, "type:conv")


def test_each_part_has_the_weights_of_the_whole_model() -> None:
    torch.manual_seed(0)
    whole = build(SPECS, set(range(5)), seed=None)
    torch.manual_seed(0)
    part = build(SPECS, {1, 2, 4}, seed=None)
    assert set(part) == {1, 2, 4}
    assert torch.equal(part[1].weight, whole[1].weight)
    assert torch.equal(part[4].weight, whole[0].weight)
    assert whole[0] is whole[4]
    assert (whole[2], whole[3]) == (torch.tanh, SPECS[3])


def test_seeded_layers_do_not_depend_on_other_layers() -> None:
    torch.manual_seed(0)
    first = build(SPECS, {1}, seed=7)[1].weight
    torch.rand(3)
    again = build(SPECS, set(range(5)), seed=7)[1].weight
    assert torch.equal(first, again)
    assert not torch.equal(first, build(SPECS, {1}, seed=8)[1].weight)


def test_a_spec_without_a_class_raises() -> None:
    with pytest.raises(TypeError, match="LayerSpec expects a module class as its first argument"):
        LayerSpec(3)  # type: ignore[arg-type]
    assert repr(SPECS[1]) == "LayerSpec(Linear)"
