"""Tiled computation by DeepSpeed's names, on `zpartition.sequence.tiled`.

The classes have `apply` and no more.  `compute_params` are accepted and not needed: gradients of weights arrive once
by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from zpartition import sequence

__all__ = ["SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute"]

Reduction = Literal["mean", "sum"]


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Any] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Reduction | None = "mean",
) -> Tensor:
    """`fn(**tiles, **kwargs_to_pass)` for `shards` tiles of (batch, seqlen, ...) each, joined, and reduced if asked
    to.

    output_unshard_dimension: along which outputs are joined; 0: they are losses, one number each.
    Every tensor that requires a gradient gets one, not only grad_requiring_tensor_key.

    Raises ValueError if a tensor has another length, or for another reduction.
    """
    keys, tensors = list(kwargs_to_shard), list(kwargs_to_shard.values())
    if any(tensor.shape[1] != seqlen for tensor in tensors) or grad_requiring_tensor_key not in keys:
        shapes = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in kwargs_to_shard.items())
        raise ValueError(
            f"seqlen={seqlen}, grad_requiring_tensor_key={grad_requiring_tensor_key!r}: kwargs_to_shard has "
            f"{shapes}; all of (batch, seqlen, ...) and the key among them are needed."
        )

    def of_tiles(*tiles: Tensor) -> Tensor:
        return fn(**dict(zip(keys, tiles)), **kwargs_to_pass)

    parts = sequence.tiled(of_tiles, tensors, shards, dim=1)
    joined = torch.stack(parts) if output_unshard_dimension == 0 else torch.cat(parts, output_unshard_dimension)
    if output_reduction is None:
        return joined
    if output_reduction not in ("mean", "sum"):
        raise ValueError(f'output_reduction={output_reduction!r}: None, "mean" or "sum" is needed.')
    return joined.mean() if output_reduction == "mean" else joined.sum()


@final
class SequenceTiledCompute:
    """`sequence_tiled_compute`, as an autograd function is called."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[Any] | None,
        output_unshard_dimension: int,
        output_reduction: Reduction | None,
        *args: Any,
    ) -> Tensor:
        """args: values of `keys_to_shard`, then of `keys_to_pass`."""
        cut = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args[:cut])),
            dict(zip(keys_to_pass, args[cut:])),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


@final
class TiledMLP:
    """An MLP tile after tile; backward runs it again."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Any] | None = None,
    ) -> Tensor:
        """`fn(self, x)` for x (..., tokens, width), `shards` runs of tokens one after the other."""
        dim = x.dim() - 2
        return torch.cat(sequence.tiled(lambda tile: fn(self, tile), [x], shards, dim=dim), dim)


@final
class TiledFusedLogitsLoss:
    """A loss tile after tile, whose backward is done in the forward pass."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Any] | None = None,
        output_reduction: Reduction = "mean",
    ) -> Tensor:
        """The mean or sum of `fn(self, x, y)`, or `fn(self, x, y, mask)`, over `shards` runs of tokens.

        x: (batch, tokens, ...) hidden states; y: (batch, tokens, ...) labels; mask: (batch, tokens).  `fn` gets them
        with batch and tokens in one dim.

        Raises ValueError if they are not of the same tokens, or for another reduction.
        """
        tensors = [x, y] if mask is None else [x, y, mask]
        if any(tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2] for tensor in tensors):
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise ValueError(f"x, y and mask of shapes {shapes}: (batch, tokens, ...) of the same tokens are needed.")
        flat = [tensor.flatten(0, 1) for tensor in tensors]
        return sequence.tiled_loss(lambda *tiles: fn(self, *tiles), flat, shards, reduction=output_reduction)
