"""Attentions that are looked up by name compute the same for pieces as for whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

import zcomm
from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.masks import MaskKind, Tokens
from zpartition.sequence.models import ModelAttention

LENGTH = 8
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])


class Layer(nn.Module):
    """Attributes of a layer that an attention function reads."""

    def __init__(self, groups: int, **attributes: Any) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        vars(self).update(attributes)


def core(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: list[Any] | None = None, **kwargs: Any
) -> Any:
    """Attention like Transformers' sdpa: repeats keys by the module's number of groups, and supports is_causal."""
    if sinks is not None:
        sinks.append((mask, kwargs))
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    is_causal = mask is None and getattr(module, "is_causal", True)
    out = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
    return out.transpose(1, 2), None


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _worst(heads: int, keys: int, positions: Tensor, mask: Tensor | None, own: Any, **attributes: Any) -> float:
    size, rank = zcomm.group_size(), zcomm.group_rank()
    wholes = [rand(seed, 2, count, LENGTH, 4).requires_grad_() for seed, count in enumerate((heads, keys, keys))]
    expected, _ = core(Layer(heads // keys, **attributes), *wholes, mask)
    expected.backward(rand(5, *expected.shape))
    layer = Layer(heads // keys, **attributes)
    parts = [x.detach().chunk(size, 2)[rank].clone().requires_grad_() for x in wholes]
    shared = ModelAttention.over(core, "sdpa", None)
    out, weights = shared(layer, *parts, own, position_ids=positions.chunk(size, 1)[rank])
    out.backward(rand(5, *expected.shape).chunk(size, 1)[rank])
    assert weights is None
    assert layer.num_key_value_groups == heads // keys
    pairs = [
        (out, expected.chunk(size, 1)[rank]),
        *((a.grad, b.grad.chunk(size, 2)[rank]) for a, b in zip(parts, wholes)),
    ]
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


def _all() -> dict[str, float]:
    straight = torch.arange(LENGTH).expand(2, LENGTH)
    triangle = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8])
    packed = triangle & (document.unsqueeze(2) == document.unsqueeze(1))
    near = triangle & ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-3)
    left = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8]).bool()
    seen = (triangle & left.unsqueeze(1)) | torch.eye(LENGTH, dtype=torch.bool)
    rank, half = zcomm.group_rank(), LENGTH // zcomm.group_size()
    part = left[:, half * rank : half * rank + half]
    return {
        "causal": _worst(4, 2, straight, None, None),
        "few keys": _worst(4, 1, straight, None, None),
        "uneven groups": _worst(6, 3, straight, None, None),
        "one row of positions": _worst(4, 4, straight[:1], None, None),
        "packed": _worst(4, 2, PACKED, packed.unsqueeze(1), None),
        "window": _worst(4, 2, straight, near, None, sliding_window=3),
        "padded": _worst(4, 2, straight, seen.unsqueeze(1), part),
        "both ways": _worst(4, 2, straight, None, None, is_causal=False),
    }


def test_attention_over_pieces_equals_the_whole() -> None:
    for found in run_ranks(_all, 2):
        for what, worst in found.items():
            assert worst < 1e-12, what


def _details() -> dict[str, Any]:
    rank = zcomm.group_rank()
    q, k, v = (rand(seed, 1, 4, 4, 4) for seed in range(3))
    positions = torch.arange(4 * rank, 4 * rank + 4).unsqueeze(0)
    layer, log, calls = Layer(1), [], []
    shared = ModelAttention.over(ModelAttention.over(core, "sdpa", None), "sdpa", None, disable_in_eval=True)
    assert shared.core is core
    with zcomm.traced(log):
        for number in (0, 1, 2, 0, 2):  # layers of one forward, and of another one with the same positions
            layer.layer_idx = number
            shared(layer, q, k, v, None, position_ids=positions, sinks=calls, s_aux=torch.arange(4))
    with pytest.raises(ValueError, match=r"needs position_ids.*SequenceBatches"):
        shared(layer, q, k, v, None)
    with pytest.raises(ValueError, match="position_bias covers pairs"):
        shared(layer, q, k, v, None, position_ids=positions, position_bias=q)
    with pytest.raises(ValueError, match="1 query heads cannot be split over 2"):
        shared(layer, q[:, :1], k[:, :1], v[:, :1], None, position_ids=positions)
    layer.eval()
    alone, _ = shared(layer, q, k, v, None)
    assert torch.equal(alone, core(layer, q, k, v, None)[0])
    return {
        "gathers": sum(record.op == "all_gather" for record in log),
        "positions": calls[0][1]["position_ids"].tolist(),
        "own sinks": calls[0][1]["s_aux"].tolist(),
    }


def test_positions_are_gathered_once_and_options_are_sliced() -> None:
    for rank, found in enumerate(run_ranks(_details, 2)):
        assert found == {
            "gathers": 2,
            "positions": [list(range(8))],
            "own sinks": [2 * rank, 2 * rank + 1],
        }


def test_each_attention_gets_its_kind_of_mask() -> None:
    tokens = Tokens.of(torch.arange(4).unsqueeze(0), torch.tensor([[True, True, True, False]]))

    def mask(name: str, mask_kind: MaskKind) -> Any:
        return ModelAttention(core, name, ModelParallelGroup(None))._mask(tokens, mask_kind)

    assert mask("sdpa", MaskKind()) is None
    assert mask("sdpa", MaskKind(window=2)).shape == (1, 1, 4, 4)
    assert mask("kernels/flash-attn3", MaskKind()).tolist() == [[True, True, True, False]]
    assert isinstance(mask("flex_attention", MaskKind()), BlockMask)
