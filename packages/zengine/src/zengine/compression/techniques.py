"""Compression techniques as values: what each does to the weight, the bias and the input of a layer.

A technique is frozen and knows no layer; learned scores, masks and ranges are parameters and buffers of the layer, so
that ZeRO shards them and checkpoints hold them.  `prepare` adds them under DeepSpeed's names, `release` removes them.

Masks are 1 for what is kept.  Learned scores (Movement pruning: Sanh et al. 2020) get the gradient of their mask:
d loss / d score = sum of d loss / d weight * weight over what the score keeps.

Rejected: torch.nn.utils.parametrize, which renames the parameter; subclasses of each kind of layer, as in DeepSpeed
(a swap of modules, which hooks, other subclasses and references to the module do not survive).
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from zengine._compat import backward_number
from zprecision import quantize
from zprecision.quant import simulate, simulate_format, straight_through

__all__ = [
    "ChannelMask",
    "HeadMask",
    "Mask",
    "RoundInput",
    "RoundToFormat",
    "RoundWeight",
    "RowMask",
    "SparseMask",
    "Technique",
    "keep_neighbours",
    "keep_share",
]

QuantizerKind: TypeAlias = Literal["symmetric", "asymmetric"]

RANGE_MOMENTUM = 0.95  # of the running range of activations


def keep_share(values: Tensor, ratio: float) -> Tensor:
    """Return the bool mask, of the shape of `values`, of the ceil(ratio * numel) largest; of equals the first."""
    order = values.detach().flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    mask[order[: math.ceil(ratio * values.numel())]] = True
    return mask.view(values.shape)


def keep_neighbours(values: Tensor, kept: int, of: int) -> Tensor:
    """Return the bool mask of the `kept` largest of every `of` neighbours, (out, ...) flattened to rows."""
    groups = values.detach().reshape(-1, of)
    order = groups.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order, True).view(values.shape)


@attrs.frozen(kw_only=True)
class Technique:
    """Does nothing, from `offset` applied steps on; subclasses change some of it."""

    name: ClassVar[str]  # its section in compression_training

    offset: int  # applied steps after which it is switched on

    def weight(self, layer: nn.Module, weight: Tensor) -> Tensor:
        """Return the weight that the layer uses."""
        return weight

    def bias(self, layer: nn.Module, bias: Tensor) -> Tensor:
        """Return the bias that the layer uses."""
        return bias

    def input(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the input that the layer uses."""
        return x

    def check(self, layer: nn.Module, name: str) -> None:
        """Raise ValueError for a layer that it cannot change."""

    def prepare(self, layer: nn.Module) -> None:
        """Add parameters and buffers to the layer."""

    def release(self, layer: nn.Module) -> None:
        """Remove what `prepare` added."""


# -- quantization --------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class RoundWeight(Technique):
    """Rounds the weight to few bits; the gradient passes straight through."""

    name = "weight_quantization"

    bits: int
    kind: QuantizerKind
    groups: int  # parts of the weight with a scale each; 0: one for each row

    def weight(self, layer: nn.Module, weight: Tensor) -> Tensor:
        return simulate(weight, self.bits, groups=self.groups or weight.shape[0], kind=self.kind)

    def check(self, layer: nn.Module, name: str) -> None:
        numel = weight_of(layer).numel()
        if numel % (self.groups or 1):
            raise ValueError(
                f"weight_quantization: quantize_groups = {self.groups} must divide the {numel} elements of the "
                f"weight of {name!r}; use a divisor, or leave the module out"
            )


@attrs.frozen(kw_only=True)
class RoundToFormat(Technique):
    """Rounds the weight as a format of inference does, bit for bit; the gradient includes that of the scales."""

    name = "weight_quantization"

    format: str

    def weight(self, layer: nn.Module, weight: Tensor) -> Tensor:
        return simulate_format(weight, self.format)

    def check(self, layer: nn.Module, name: str) -> None:
        shape = tuple(weight_of(layer).shape)
        if len(shape) != 2:
            raise ValueError(
                f"weight_quantization: format {self.format!r} is for matrices, and the weight of {name!r} is "
                f"{shape}; give this module bits, in another group"
            )
        quantize(torch.zeros(1, shape[1]), self.format)


@attrs.frozen(kw_only=True)
class RoundInput(Technique):
    """Rounds the input; the gradient passes straight through.

    Dynamic: a scale for each token, of images for each sample.  Static: one running range, which the first batch
    initializes and training updates; every rank has the range of its own batches, and checkpoints that of rank 0.
    """

    name = "activation_quantization"

    bits: int
    kind: QuantizerKind
    is_static: bool
    momentum: float = RANGE_MOMENTUM  # share of the old range

    def input(self, layer: nn.Module, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        if not self.is_static:
            each = x.shape[-1] if weight_of(layer).dim() == 2 else x[0].numel()
            return simulate(x, self.bits, groups=x.numel() // each, kind=self.kind)
        return self.by_range(x, layer.get_buffer("activation_limits"), is_training=layer.training)

    def by_range(self, x: Tensor, limits: Tensor, *, is_training: bool) -> Tensor:
        """Return `x` rounded by the range `limits`, (2,), which follows `x` in training.

        Before any training forward, when there is no range yet, it is that of `x`.
        """
        if is_training and not backward_number():  # not in a recomputation
            self._follow(limits, x.detach())
        if not is_training:
            limits = _known(limits, x.detach())
        low, high = limits.unbind()
        return simulate(x, self.bits, kind=self.kind, limits=(low, high))

    @torch.no_grad()
    def _follow(self, limits: Tensor, x: Tensor) -> None:
        seen = torch.stack(x.aminmax()).to(limits.dtype)
        limits.copy_(_known(limits, x) * self.momentum + seen * (1 - self.momentum))

    def prepare(self, layer: nn.Module) -> None:
        if self.is_static:
            layer.register_buffer("activation_limits", torch.zeros(2, device=weight_of(layer).device))

    def release(self, layer: nn.Module) -> None:
        if self.is_static:
            del layer.activation_limits


def _known(limits: Tensor, x: Tensor) -> Tensor:
    """Return a range, or that of `x` if it is empty."""
    return torch.where(limits[0] == limits[1], torch.stack(x.aminmax()).to(limits.dtype), limits)


# -- pruning -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Mask(Technique):
    """Sets parts of the weight to 0; subclasses say which parts there are."""

    scores_name: ClassVar[str]  # of the learned scores, a parameter of the layer
    mask_name: ClassVar[str]  # of the mask that the initial weights gave, a buffer of the layer

    ratio: float  # share that is kept
    is_learned: bool  # by scores; False: by the sizes of the initial weights

    def sizes(self, weight: Tensor) -> Tensor:
        """Return the size of every part."""
        raise NotImplementedError

    def score_shape(self, weight: Tensor) -> tuple[int, ...]:
        """Return the shape of the learned scores."""
        return tuple(self.sizes(weight).shape)

    def spread(self, mask: Tensor, weight: Tensor) -> Tensor:
        """Return the mask of parts in a shape that multiplies the weight."""
        return mask

    def choose(self, values: Tensor) -> Tensor:
        """Return the bool mask of the parts with the largest values."""
        return keep_share(values, self.ratio)

    def mask(self, layer: nn.Module) -> Tensor:
        """Return the mask of parts: bool, or with learned scores in their dtype, with gradients."""
        if not self.is_learned:
            return layer.get_buffer(self.mask_name)
        scores: Tensor = getattr(layer, self.scores_name)
        return straight_through(scores, self.choose(scores).to(scores.dtype))

    def weight(self, layer: nn.Module, weight: Tensor) -> Tensor:
        return weight * self.spread(self.mask(layer), weight)

    def prepare(self, layer: nn.Module) -> None:
        weight = weight_of(layer)
        if not self.is_learned:
            layer.register_buffer(self.mask_name, self.choose(self.sizes(weight.detach())))
            return
        scores = nn.Parameter(torch.empty(self.score_shape(weight), dtype=weight.dtype, device=weight.device))
        nn.init.kaiming_uniform_(scores, a=math.sqrt(5))
        layer.register_parameter(self.scores_name, scores)

    def release(self, layer: nn.Module) -> None:
        delattr(layer, self.scores_name if self.is_learned else self.mask_name)


@attrs.frozen(kw_only=True)
class SparseMask(Mask):
    """Keeps single weights: the largest share, or N of M neighbours in a row.

    With `follows` the choice is made from the present weights in each forward, and gradients pass straight through to
    all of them (Zhou et al. 2021, without their decay), so that a weight can come back.
    """

    name, scores_name, mask_name = "sparse_pruning", "sparse_mask_scores", "sparse_pruning_mask"

    neighbours: tuple[int, int] | None = None  # N, M
    follows: bool = False

    def sizes(self, weight: Tensor) -> Tensor:
        return weight.abs()

    def choose(self, values: Tensor) -> Tensor:
        return super().choose(values) if self.neighbours is None else keep_neighbours(values, *self.neighbours)

    def mask(self, layer: nn.Module) -> Tensor:
        return self.choose(self.sizes(weight_of(layer).detach())) if self.follows else super().mask(layer)

    def weight(self, layer: nn.Module, weight: Tensor) -> Tensor:
        if not self.follows:
            return super().weight(layer, weight)
        return straight_through(weight, weight.detach() * self.choose(self.sizes(weight.detach())))

    def check(self, layer: nn.Module, name: str) -> None:
        shape = weight_of(layer).shape
        row = math.prod(shape[1:])
        if self.neighbours is not None and row % self.neighbours[1]:
            raise ValueError(
                f"sparse_pruning: block_pattern '{self.neighbours[0]}:{self.neighbours[1]}' needs rows of a multiple "
                f"of {self.neighbours[1]} weights, and {name!r} has {row} (its weight is {tuple(shape)}); leave the "
                "module out"
            )

    def prepare(self, layer: nn.Module) -> None:
        if not self.follows:
            super().prepare(layer)

    def release(self, layer: nn.Module) -> None:
        if not self.follows:
            super().release(layer)


@attrs.frozen(kw_only=True)
class RowMask(Mask):
    """Keeps whole rows, outputs of a linear layer, and their biases."""

    name, scores_name, mask_name = "row_pruning", "row_mask_scores", "row_pruning_mask"

    def sizes(self, weight: Tensor) -> Tensor:
        return weight.abs().sum(1, keepdim=True)

    def spread(self, mask: Tensor, weight: Tensor) -> Tensor:
        return mask.view(-1, 1)

    def bias(self, layer: nn.Module, bias: Tensor) -> Tensor:
        return bias * self.mask(layer).view(-1)


@attrs.frozen(kw_only=True)
class ChannelMask(Mask):
    """Keeps whole output channels of a convolution, and their biases."""

    name, scores_name, mask_name = "channel_pruning", "channel_mask_scores", "channel_pruning_mask"

    def sizes(self, weight: Tensor) -> Tensor:
        return weight.abs().sum((1, 2, 3), keepdim=True)

    def bias(self, layer: nn.Module, bias: Tensor) -> Tensor:
        return bias * self.mask(layer).view(-1)


@attrs.frozen(kw_only=True)
class HeadMask(Mask):
    """Keeps the columns of whole heads in the projection after attention."""

    name, scores_name, mask_name = "head_pruning", "head_pruning_scores", "head_pruning_mask"

    heads: int

    def score_shape(self, weight: Tensor) -> tuple[int, ...]:
        return (1, self.heads)

    def spread(self, mask: Tensor, weight: Tensor) -> Tensor:
        return mask.view(-1).repeat_interleave(weight.shape[1] // self.heads)

    def check(self, layer: nn.Module, name: str) -> None:
        columns = weight_of(layer).shape[1]
        if columns % self.heads:
            raise ValueError(
                f"head_pruning: num_heads = {self.heads} must divide the {columns} inputs of {name!r}; pass the "
                "heads of the model"
            )


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight of a layer."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight
