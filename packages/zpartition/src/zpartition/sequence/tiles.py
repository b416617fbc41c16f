"""Tiled computation: token-wise functions run on some tokens at a time, which bounds their intermediate memory.

An MLP widens each token fourfold or more; at long sequences that is most of a layer's memory.  `tiled` runs any such
function tile by tile, keeps its inputs, and recomputes each tile in backward (torch's own checkpoint: random numbers
and autocast are restored).  One graph holds all tiles, so the gradient of a weight is summed in it and arrives once:
hooks of ZeRO, DDP or FSDP work unchanged.

`tiled_loss` is for functions that end in a loss: each tile's backward runs in the forward pass, as in chunked.py, for
any function.  The weights whose gradients it returns are found in the graph of the first tile.

Rejected: a Function that runs `torch.autograd.backward` on each tile, as other libraries do: gradients of weights
arrive tile by tile, outside the graph, and a partition must know which tile is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

__all__ = ["tiled", "tiled_loss"]

Reduction = Literal["mean", "sum"]


def tiled(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], num_tiles: int, *, dim: int = 1
) -> tuple[Tensor, ...]:
    """Return `function(*tiles)` for each tile of all `tensors` along `dim`, in order.

    num_tiles: maximum number of tiles; the last may be shorter.  Backward runs `function` again.

    Raises:
        ValueError: lengths differ, or there are no tiles.
    """
    rows = _split_into_tiles(tensors, num_tiles, dim)
    if not torch.is_grad_enabled():
        return tuple(function(*row) for row in rows)
    return tuple(checkpoint(function, *row, use_reentrant=False) for row in rows)


class _KnownGradients(Function):
    """A value whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: Sequence[Tensor | None], *_inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*grads)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *(None if each is None else (each * grad).to(each.dtype) for each in ctx.saved_tensors)


def tiled_loss(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    num_tiles: int,
    *,
    dim: int = 0,
    reduction: Reduction = "sum",
) -> Tensor:
    """Return the sum or mean of the losses `function(*tiles)`, (), differentiated in this call; backward scales.

    The first of `tensors` is differentiated (hidden states), the others (labels, a mask) are not; weights that
    `function` uses are.

    Raises:
        ValueError: lengths differ, a loss is no scalar, or another reduction.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction={reduction!r} must be "mean" (of the tiles\' losses) or "sum".')
    rows = _split_into_tiles(tensors, num_tiles, dim)
    factor = 1.0 / len(rows) if reduction == "mean" else 1.0
    if not torch.is_grad_enabled():
        return torch.stack([_scalar(function(*row)) for row in rows]).sum() * factor
    return _differentiate(function, tensors[0], rows, factor, dim)


def _differentiate(
    function: Callable[..., Tensor], x: Tensor, rows: Sequence[Sequence[Tensor]], factor: float, dim: int
) -> Tensor:
    """Return the loss of all tiles, with the gradients of `x` and of the weights in the tiles' graphs."""
    total, of_x = torch.zeros((), device=x.device), []
    weights: dict[int, Tensor] = {}
    of_weights: dict[int, Tensor] = {}
    for first, *rest in rows:
        tile = first.detach().requires_grad_(x.requires_grad)
        loss = _scalar(function(tile, *rest)) * factor
        found = {id(leaf): leaf for leaf in _leaves(loss) if leaf is not tile}
        weights.update(found)
        wanted = [*([tile] if x.requires_grad else []), *found.values()]
        grads = list(torch.autograd.grad(loss, wanted, allow_unused=True)) if wanted else []
        if x.requires_grad:
            got = grads.pop(0)
            of_x.append(torch.zeros_like(tile) if got is None else got)
        for key, got in zip(found, grads):
            if got is not None:
                of_weights[key] = of_weights[key].add_(got) if key in of_weights else got.clone()
        total = total + loss.detach()
    known = [torch.cat(of_x, dim) if of_x else None, *(of_weights.get(key) for key in weights)]
    value: Tensor = _KnownGradients.apply(total, known, x, *weights.values())  # type: ignore[no-untyped-call]
    return value


def _leaves(output: Tensor) -> list[Tensor]:
    """Return the leaves of a graph, each once, in traversal order."""
    found: list[Tensor] = []
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        waiting.extend(following for following, _ in node.next_functions)
    return found


def _split_into_tiles(tensors: Sequence[Tensor], num_tiles: int, dim: int) -> list[tuple[Tensor, ...]]:
    lengths = [tensor.shape[dim] for tensor in tensors]
    if num_tiles < 1 or len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(
            f"{num_tiles} tiles of tensors of lengths {lengths} (dim {dim}): at least one tile and equal lengths of "
            "at least one token are needed."
        )
    each = -(-lengths[0] // num_tiles)
    return list(zip(*(torch.split(tensor, each, dim) for tensor in tensors)))


def _scalar(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(f"the function of a tile returned shape {list(loss.shape)}; a scalar loss is needed.")
    return loss.reshape(())
