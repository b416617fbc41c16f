"""`deepspeed.runtime.zero.tiling`: a linear layer as a grid of tiles, which stage 3 gathers one at a time.

Tile [row][column] maps one part of the input to one part of the output; a row's outputs are summed, rows are
concatenated.  The tiles of the last column have the bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zengine.deepspeed.runtime.partitioning import partition_uniform
from zengine.deepspeed.runtime.zero.partition_parameters import GatheredParameters

__all__ = ["TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"]


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: int | list[int], contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split the last dimension into parts of these sizes, as views unless `contiguous_split_chunks`."""
    parts = torch.split(tensor, partitions, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


class TiledLinear(nn.Module):
    """Linear layer of `out_splits` x `in_splits` tiles.

    input_is_already_split: forward takes a list of `in_splits` tensors.
    combine_out_splits: False makes forward return the list of `out_splits` outputs.
    linear_cls: class of a tile, called with (inputs, outputs, bias=, **kwargs).
    init_linear: whole layer whose weight and bias are copied.

    Raises RuntimeError if a number of splits is less than 1 or more than the features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(
                    f"TiledLinear: {name}_splits is {splits}; it must be from 1 to {name}_features, {features}"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = (
            partition_uniform(in_features, in_splits),
            partition_uniform(out_features, out_splits),
        )
        ins, outs = _sizes(self.in_parts), _sizes(self.out_parts)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(size, out, bias=bias and column == in_splits - 1, **kwargs)
                for column, size in enumerate(ins)
            )
            for out in outs
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return the layer's output, or the list of its parts."""
        outputs = [self._row_output(row, self._inputs(input_)) for row in range(self.out_splits)]
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _inputs(self, input_: Any) -> Sequence[Any]:
        if self.in_splits == 1:
            return [input_]
        if not self.input_is_already_split:
            return self._split_global_input(input_, _sizes(partition_uniform(input_.shape[-1], self.in_splits)))
        if len(input_) != self.in_splits:
            raise ValueError(f"TiledLinear: the input has {len(input_)} parts, and in_splits is {self.in_splits}")
        return input_  # type: ignore[no-any-return]

    def _row_output(self, row: int, inputs: Sequence[Any]) -> Any:
        output = None
        for column, tile in enumerate(_tiles(self.linears[row])):
            output = self._reduce_local_output(column, row, output, tile(inputs[column]))
        return output

    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Sequence[Any]:
        """Return the parts of the input; a subclass may override it for other types of inputs."""
        return split_tensor_along_last_dim(input, split_sizes)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """Return the sum of the outputs of a row so far; `current_out` is None for the first."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        """Return the rows' outputs as one tensor."""
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Copy weight and bias of a whole layer; at stage 3, rank 0's on every rank (a collective).

        Raises ValueError if the shapes differ, or only one of the two layers has a bias.
        """
        shape = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != shape or (other.bias is not None) != self.use_bias:
            wanted, given = ("with" if self.use_bias else "without"), ("without" if other.bias is None else "with")
            raise ValueError(
                f"copy_params_from(): needs a weight of shape {shape} {wanted} a bias, got "
                f"{tuple(other.weight.shape)} {given} one"
            )
        for row, start, stop in _spans(self.out_parts):
            tiles = _tiles(self.linears[row])
            for column, left, right in _spans(self.in_parts):
                with GatheredParameters(tiles[column].weight, modifier_rank=0):
                    tiles[column].weight.copy_(other.weight[start:stop, left:right])
            if self.use_bias:
                with GatheredParameters(tiles[-1].bias, modifier_rank=0):
                    tiles[-1].bias.copy_(other.bias[start:stop])


class TiledLinearReturnBias(TiledLinear):
    """TiledLinear whose tiles return (output, bias), as Megatron's layers do; the biases are not summed."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        output, bias = (None, None) if current_out is None else current_out
        new, new_bias = new_out
        return super()._reduce_local_output(in_id, out_id, output, new), bias if new_bias is None else new_bias

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        whole = super()._combine_output_splits([output for output, _ in outputs])
        return whole, super()._combine_output_splits(biases) if biases else None


def _sizes(bounds: list[int]) -> list[int]:
    return [stop - start for _, start, stop in _spans(bounds)]


def _spans(bounds: list[int]) -> list[tuple[int, int, int]]:
    """Return (number, start, stop) of every part."""
    return [(part, start, stop) for part, (start, stop) in enumerate(itertools.pairwise(bounds))]


def _tiles(row: nn.Module) -> list[Any]:
    return list(row.children())
