"""Chunked cross-entropy: directly from hidden states and head weight, with the logits of a few tokens at a time.

The logits of S tokens over a vocabulary of V are the largest tensor of many models, and exist several times: as they
are, in float32, as probabilities, as gradients.  Only a number per token is needed, and the gradients of hidden
states and head.  These are computed in the forward pass, tile by tile, while a tile's probabilities exist: three
matrix products per tile instead of four with recomputation; backward only multiplies by the gradient of the loss.

    memory    tile_tokens * V in float32, the gradient of the hidden states, and one of the head in float32

The gradients of weight and bias come from one node of the graph, so hooks see them once.
"""

from __future__ import annotations

from typing import Any, Literal, final

import attrs
import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["chunked_cross_entropy"]


@final
@attrs.frozen
class Tiling:
    """Settings of one loss computation."""

    tokens: int  # of a tile
    ignored: int  # the label to ignore
    differentiates: bool  # in the forward pass


class _Chunked(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tiling: Tiling
    ) -> Tensor:
        """(n, width), (V, width), (V,) or None, (n,) -> () the sum."""
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        wide = torch.promote_types(weight.dtype, torch.float32)
        hidden, weight, bias = _as_autocast(hidden, weight, bias)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        wants = [tiling.differentiates and each for each in ctx.needs_input_grad[:3]]
        made = [
            torch.empty_like(hidden) if wants[0] else None,
            torch.zeros_like(weight, dtype=wide) if wants[1] else None,
            torch.zeros(len(weight), dtype=wide, device=weight.device) if wants[2] else None,
        ]
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(labels), tiling.tokens):
                here = slice(start, start + tiling.tokens)
                grad_logits, loss = _tile(hidden[here], weight, bias, labels[here], tiling.ignored)
                total += loss
                _add(made, here, grad_logits, hidden[here], weight)
        ctx.save_for_backward(*made)
        return total.to(wide)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = [
            None if made is None else (made * grad).to(dtype) for made, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        return *found, None, None


def _as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as a linear layer would here: nothing, or all to the dtype of autocast."""
    if not torch.is_autocast_enabled(hidden.device.type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _tile(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return (gradient of the sum by the logits (tokens, V), the sum) of a tile."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = labels != ignored
    local = labels.masked_fill(~counts, 0).unsqueeze(1)
    chosen = logits.gather(1, local).squeeze(1)
    lse = logits.logsumexp(1)
    loss = (lse - chosen).masked_fill(~counts, 0.0).sum(dtype=torch.float64)
    grad_logits = logits.sub_(lse.unsqueeze(1)).exp_()  # probabilities, where the logits were
    grad_logits.scatter_add_(1, local, grad_logits.new_full((), -1.0).expand(local.shape))
    return grad_logits.masked_fill_(~counts.unsqueeze(1), 0.0), loss


def _add(made: list[Tensor | None], here: slice, grad_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Add a tile to the gradients of hidden states, weight and bias."""
    narrow = grad_logits.to(weight.dtype)
    if made[0] is not None:
        torch.mm(narrow, weight, out=made[0][here])
    if made[1] is not None:
        made[1] += narrow.mT @ hidden
    if made[2] is not None:
        made[2] += grad_logits.sum(0)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    tile_tokens: int = 1024,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Compute torch's cross_entropy(hidden @ weight.T + bias, labels) without materializing all logits.

    hidden: (..., width).
    weight: (vocabulary, width).
    labels: (...) integers.
    The loss is () of at least float32.  If all labels are ignored the mean is NaN, as torch's; over sequence ranks
    use "sum" and `mean_over_sequence`.

    At ZeRO stage 3 the weight is available inside the forward of its module, or of a module around it.

    Raises:
        ValueError: shapes do not match, or a label is outside the vocabulary (checked on a CPU).
    """
    _check(hidden, weight, labels, ignore_index, tile_tokens, reduction)
    flat = labels.reshape(-1)
    tiling = Tiling(tile_tokens, ignore_index, torch.is_grad_enabled())
    total: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, flat, tiling
    )
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, tile_tokens: int, reduction: str
) -> None:
    if hidden.shape[:-1] != labels.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"the shapes of hidden states {list(hidden.shape)}, head weight {list(weight.shape)} and labels "
            f"{list(labels.shape)} do not match: (..., width), (vocabulary, width) and (...) are needed."
        )
    if tile_tokens < 1 or reduction not in ("mean", "sum"):
        raise ValueError(
            f"tile_tokens={tile_tokens}, reduction={reduction!r}: tile_tokens must be at least 1, and reduction "
            '"mean" or "sum".'
        )
    counted = labels[labels != ignore_index] if labels.is_cpu else labels[:0]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < len(weight):
        raise ValueError(
            f"labels range from {int(counted.min())} to {int(counted.max())}; allowed are 0 to {len(weight) - 1}, "
            f"and ignore_index={ignore_index}."
        )
