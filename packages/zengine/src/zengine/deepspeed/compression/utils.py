"""`deepspeed.compression.utils`: quantizers and masks as functions with straight-through gradients, by `apply`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zengine.compression.techniques import keep_share
from zprecision.quant import simulate, straight_through

__all__ = ["AsymQuantizer", "BinaryQuantizer", "SymQuantizer", "TernaryQuantizer", "TopKBinarizer"]


class TopKBinarizer:
    """Mask of the highest scores."""

    @staticmethod
    def apply(inputs: Tensor, threshold: float | Tensor, sigmoid: bool = False) -> Tensor:
        """Return 1 for the ceil(threshold * numel) highest of `inputs` and 0 for the others.

        threshold: in (0, 1]; with `sigmoid`, before the sigmoid.
        """
        share = 1 / (1 + math.exp(-float(threshold))) if sigmoid else float(threshold)
        return straight_through(inputs, keep_share(inputs, share).to(inputs.dtype))


def _limits(min_value: Tensor | None, max_value: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if min_value is None or max_value is None:
        return None
    return torch.as_tensor(min_value), torch.as_tensor(max_value)


class SymQuantizer:
    """Symmetric rounding."""

    @staticmethod
    def apply(
        input: Tensor,
        num_bits: int,
        min_value: Tensor | None = None,
        max_value: Tensor | None = None,
        num_groups: int = 1,
    ) -> Tensor:
        """Return `input` rounded to `num_bits`, at least 3, with a scale for each group or by a given range."""
        return simulate(input, num_bits, groups=num_groups, limits=_limits(min_value, max_value))


class AsymQuantizer:
    """Asymmetric rounding."""

    @staticmethod
    def apply(
        input: Tensor,
        num_bits: int,
        min_value: Tensor | None = None,
        max_value: Tensor | None = None,
        num_groups: int = 1,
    ) -> Tensor:
        """Return `input` rounded to `num_bits`, at least 3, with scale and zero point for each group, or a range."""
        limits = _limits(min_value, max_value)
        return simulate(input, num_bits, groups=num_groups, kind="asymmetric", limits=limits)


class TernaryQuantizer:
    """Rounding to three values."""

    @staticmethod
    def apply(
        input: Tensor, num_bits: int = 2, min_value: None = None, max_value: None = None, num_groups: int = 1
    ) -> Tensor:
        """Return `input` rounded to three values in each group; `num_bits` and ranges have no effect."""
        return simulate(input, 2, groups=num_groups)


class BinaryQuantizer:
    """Rounding to two values."""

    @staticmethod
    def apply(
        input: Tensor, num_bits: int = 1, min_value: None = None, max_value: None = None, num_groups: int = 1
    ) -> Tensor:
        """Return `input` rounded to two values in each group; `num_bits` and ranges have no effect."""
        return simulate(input, 1, groups=num_groups)
