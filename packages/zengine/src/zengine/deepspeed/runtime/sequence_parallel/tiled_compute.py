"""Tiled computation by DeepSpeed's names, on `zpartition.sequence.tiled`.

The classes have only `apply`.  `compute_params` is ignored: each weight's gradient is accumulated once anyway.
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
    """Call `fn(**tiles, **kwargs_to_pass)` on `shards` tiles of (batch, seqlen, ...) tensors; join and reduce.

    output_unshard_dimension: dim along which outputs are joined; 0: outputs are scalar losses.
    Every tensor that requires a gradient gets one, not only grad_requiring_tensor_key.

    Raises ValueError if a tensor has another length, or for another reduction.
    """
    keys, tensors = list(kwargs_to_shard), list(kwargs_to_shard.values())
    if any(tensor.shape[1] != seqlen for tensor in tensors) or grad_requiring_tensor_key not in keys:
        shapes = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in kwargs_to_shard.items())
        raise ValueError(
            f"seqlen={seqlen}, grad_requiring_tensor_key={grad_requiring_tensor_key!r}: kwargs_to_shard has "
            f"{shapes}; all must be (batch, seqlen, ...) and include that key."
        )

    def of_tiles(*tiles: Tensor) -> Tensor:
        return fn(**dict(zip(keys, tiles)), **kwargs_to_pass)

    parts = sequence.tiled(of_tiles, tensors, shards, dim=1)
    joined = torch.stack(parts) if output_unshard_dimension == 0 else torch.cat(parts, output_unshard_dimension)
    if output_reduction is None:
        return joined
    if output_reduction not in ("mean", "sum"):
        raise ValueError(f'output_reduction={output_reduction!r}: use None, "mean" or "sum".')
    return joined.mean() if output_reduction == "mean" else joined.sum()


@final
class SequenceTiledCompute:
    """`sequence_tiled_compute` with the call of an autograd function."""

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
        """Call it; args: values of `keys_to_shard`, then of `keys_to_pass`."""
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
    """MLP over tiles of tokens; backward recomputes it."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Any] | None = None,
    ) -> Tensor:
        """Call `fn(self, x)` for x (..., tokens, width) on `shards` consecutive tiles of tokens; join the results."""
        dim = x.dim() - 2
        return torch.cat(sequence.tiled(lambda tile: fn(self, tile), [x], shards, dim=dim), dim)


@final
class TiledFusedLogitsLoss:
    """Loss over tiles of tokens; its backward runs in the forward pass."""

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
        """Return the mean or sum of `fn(self, x, y)`, or `fn(self, x, y, mask)`, over `shards` tiles of tokens.

        x: (batch, tokens, ...) hidden states; y: (batch, tokens, ...) labels; mask: (batch, tokens).  `fn`
        receives them with batch and tokens flattened.

        Raises ValueError if shapes do not match, or for another reduction.
        """
        tensors = [x, y] if mask is None else [x, y, mask]
        if any(tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2] for tensor in tensors):
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise ValueError(
                f"x, y and mask of shapes {shapes}: they must be (batch, tokens, ...) with equal batch and tokens."
            )
        flat = [tensor.flatten(0, 1) for tensor in tensors]
        return sequence.tiled_loss(lambda *tiles: fn(self, *tiles), flat, shards, reduction=output_reduction)
