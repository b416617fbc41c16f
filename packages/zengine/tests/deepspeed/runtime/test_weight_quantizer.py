"""WeightQuantization: DeepSpeed's law, groups by the role of a matrix, merged scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zengine.deepspeed.runtime.weight_quantizer import WeightQuantization


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_and_scales_follow_the_law(bits: int) -> None:
    data = normal(6, 8)
    codes, scales = WeightQuantization().quantize_data(data, bits, 4)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.int8, data.shape, (4, 1))
    for part, found, scale in zip(data.view(4, -1), codes.view(4, -1), scales.view(-1), strict=True):
        assert float(scale) == pytest.approx(2**bits / (2 * float(part.abs().max()) + 1e-5), rel=1e-6)
        wanted = (part * scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        assert torch.equal(found, wanted.to(torch.int8))
    rounded = codes.view(4, -1) / scales
    assert (rounded - data.view(4, -1)).abs().max() <= 1.01 / scales.min()  # the largest may lose a step


def test_groups_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match=r"quantize_data \(w\): 5 groups must divide the 48 elements"):
        WeightQuantization().quantize_data(normal(6, 8), 8, 5, "w")


@pytest.mark.parametrize(
    ("shape", "mp_size", "is_mlp", "is_qkv"),
    [((8, 2), 1, True, False), ((2, 8), 1, True, False), ((6, 2), 1, False, True), ((4, 2), 2, True, False)],
)
def test_roles_follow_from_shapes(shape: tuple[int, int], mp_size: int, is_mlp: bool, is_qkv: bool) -> None:
    quantizer = WeightQuantization(mp_size=mp_size)
    assert (quantizer.is_mlp(normal(*shape)), quantizer.is_qkv(normal(*shape))) == (is_mlp, is_qkv)


def megatron(layers: int, width: int = 4) -> dict[str, Tensor]:
    state = {"embed.weight": normal(10, width)}
    for layer in range(layers):
        state |= {
            f"layers.{layer}.attention.query_key_value.weight": normal(3 * width, width, seed=layer),
            f"layers.{layer}.attention.dense.weight": normal(width, width, seed=layer + 10),
            f"layers.{layer}.mlp.dense_h_to_4h.weight": normal(4 * width, width, seed=layer + 20),
            f"layers.{layer}.mlp.dense_4h_to_h.weight": normal(width, 4 * width, seed=layer + 30),
        }
    return state


def test_a_megatron_state_dict_is_quantized_in_place() -> None:
    plain, state = megatron(2), megatron(2)
    quantizer = WeightQuantization()
    found, scales = quantizer.sd_quantize_megatron(state, 8, 2)
    assert found is state
    assert scales.shape == (2, 4, 4)  # MLP matrices have twice the groups
    assert not scales[:, :2, 2:].any()
    assert torch.equal(state["embed.weight"], plain["embed.weight"])
    for layer in range(2):
        for place, name in enumerate(
            ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        ):
            codes, given = state[f"layers.{layer}.{name}.weight"], plain[f"layers.{layer}.{name}.weight"]
            groups = 2 if place < 2 else 4
            back = codes.view(groups, -1) * scales[layer, place, :groups].view(-1, 1)
            torch.testing.assert_close(back.view(given.shape), given, rtol=0, atol=1.01 * float(scales.max()))
    for rank, parts in enumerate(quantizer.merge_scales_split(2)):
        assert [part.shape for part in parts] == [(1, 4, 2)] * 2
        assert torch.equal(parts[0][0, 2], scales[0, 2, 2 * rank : 2 * rank + 2])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dense = nn.Linear(4, 12), nn.Linear(4, 4)
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)


class Policy:
    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def attention(self) -> tuple[Any, ...]:
        layer = self.layer
        return False, layer.qkv.weight, layer.qkv.bias, layer.dense.weight, layer.dense.bias, False

    def mlp(self) -> tuple[Any, ...]:
        layer = self.layer
        return False, layer.up.weight, layer.up.bias, layer.down.weight, layer.down.bias


def test_a_model_is_quantized_by_its_policy() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Layer(), Layer())
    before = model[0].dense.weight.detach().clone()
    found, scales = WeightQuantization().model_quantize(model, {Layer: Policy}, 8, 1)
    assert found is model
    assert scales.shape == (2, 4, 2)
    torch.testing.assert_close(
        model[0].dense.weight * scales[0, 1, 0], before, rtol=0, atol=1.01 * float(scales[0, 1, 0])
    )
    with pytest.raises(ValueError, match="pass quantize_policy="):
        WeightQuantization().model_quantize(model, None, 8, 1)
    with pytest.raises(ValueError, match="Sequential has no layer of a class of the policy: Linear"):
        WeightQuantization().model_quantize(nn.Sequential(), {nn.Linear: Policy}, 8, 1)
