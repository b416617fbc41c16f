"""The chunked loss equals the loss from logits, and no tensor as large as the logits is created."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from zpartition.sequence import chunked_cross_entropy

TOKENS, WIDTH, VOCABULARY = 40, 6, 50


class Largest(TorchDispatchMode):
    """Records the largest tensor that is created inside, in elements."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [each for each in (out if isinstance(out, tuple | list) else [out]) if isinstance(each, Tensor)]
        self.numel = max(self.numel, *(each.numel() for each in made), 0)
        return out


def make(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, TOKENS // 2, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


LABELS = torch.arange(TOKENS).view(2, -1).masked_fill(torch.arange(TOKENS).view(2, -1) % 3 == 0, -100)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tile", [1, 7, 40, 1000])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_it_equals_torch_cross_entropy(dtype: torch.dtype, bound: float, tile: int, reduction: Any) -> None:
    hidden, weight, bias = make(dtype)
    expected = cross_entropy(
        linear(hidden, weight, bias).flatten(0, 1).double(), LABELS.flatten(), reduction=reduction
    )
    wanted = torch.autograd.grad(expected * 3, (hidden, weight, bias))
    loss = chunked_cross_entropy(hidden, weight, LABELS, bias=bias, tile_tokens=tile, reduction=reduction)
    grads = torch.autograd.grad(loss * 3, (hidden, weight, bias))
    scale = max(float(each.abs().max()) for each in wanted)
    assert float((loss - expected).abs().detach()) <= bound * float(expected.detach())
    assert max(float((a - b).abs().max()) for a, b in zip(grads, wanted)) <= bound * scale


def test_no_tensor_is_as_large_as_the_logits() -> None:
    hidden, weight, _ = make(torch.float32)
    with Largest() as plain:
        cross_entropy(linear(hidden, weight).flatten(0, 1), LABELS.flatten()).backward()
    with Largest() as ours:
        chunked_cross_entropy(hidden, weight, LABELS, tile_tokens=4).backward()
    assert plain.numel == TOKENS * VOCABULARY
    assert ours.numel == VOCABULARY * WIDTH  # the gradient of the head; a tile has 4 * VOCABULARY


def test_no_gradients_are_computed_under_no_grad() -> None:
    hidden, weight, _ = make(torch.float32)
    with torch.no_grad(), Largest() as seen:
        loss = chunked_cross_entropy(hidden, weight, LABELS, tile_tokens=2)
    assert not loss.requires_grad
    assert seen.numel == weight.numel()
    frozen = chunked_cross_entropy(hidden, weight.detach(), LABELS, tile_tokens=2)
    frozen.backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_mistakes_raise_with_the_numbers() -> None:
    hidden, weight, _ = make(torch.float32)
    with pytest.raises(ValueError, match=r"head weight \[6, 50\]"):
        chunked_cross_entropy(hidden, weight.T, LABELS)
    with pytest.raises(ValueError, match="labels range from 1 to 50; allowed are 0 to 49, and ignore_index=-100"):
        chunked_cross_entropy(hidden, weight, LABELS.masked_fill(LABELS == 2, 50))
    with pytest.raises(ValueError, match="tile_tokens=0"):
        chunked_cross_entropy(hidden, weight, LABELS, tile_tokens=0)


def test_under_autocast_it_equals_a_linear_layer_and_the_loss() -> None:
    hidden, weight, bias = make(torch.float32)
    for narrow in (False, True):  # a layer norm gives float32, a linear layer the dtype of autocast
        with torch.autocast("cpu", torch.bfloat16):
            x = hidden.bfloat16() if narrow else hidden
            plain = cross_entropy(linear(x, weight, bias).flatten(0, 1).float(), LABELS.flatten())
            ours = chunked_cross_entropy(x, weight, LABELS, bias=bias, tile_tokens=7)
        assert float((plain - ours).abs().detach()) < 1e-4
        grads = [torch.autograd.grad(loss, (hidden, weight, bias)) for loss in (plain, ours)]
        for wanted, found in zip(*grads):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0.02)
