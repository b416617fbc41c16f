"""`redundancy_clean`: the plain model that a compressed model has become.

Weights take the values that forward has used, technique by technique in the order in which they act, so outputs stay
the same.  Where a group names related modules, dimensions shrink:

| technique | of the module | of its related modules |
|---|---|---|
| row_pruning | rows, biases | columns of linear layers |
| head_pruning | columns of the heads | rows and biases of the heads, in each related list (query, key, value) |
| channel_pruning | output channels, biases | input channels of convolutions; all of a BatchNorm2d |

A row that is gone was 0 before the next layer; outputs are equal if what lies between the two (GELU, ReLU, a norm of
channels that is pruned as well) maps 0 to 0.  An attention must take its number of heads from its weights.

Rounded activations stay: the layer keeps rounding them in forward.

A weight with a `format` needs no cleaning to be served: loading it in that format gives the bits that forward used.
Formats of groups give the same bits once more from the cleaned weight; with one scale a row the last bit may differ.
"""

from __future__ import annotations

from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from zengine.compression.layers import CompressedLayer, layer_of
from zengine.compression.select import Match, Selection, read_section, select, unwrapped
from zengine.compression.techniques import ChannelMask, HeadMask, Mask, RoundInput, RowMask, Technique, weight_of

__all__ = ["narrow", "redundancy_clean"]

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def redundancy_clean(model: Model, config: Any, mpu: Any = None) -> Model:
    """Write the effect of the config's techniques into the weights of `model`, and return it.

    Called after training, with the config of `init_compression`: on the trained module, or on a new one that
    `init_compression` has prepared and that has loaded a checkpoint.  Layers that round no activations are plain
    layers afterwards, and weights that shrink are new parameters: the engine cannot train on.

    Raises:
        ConfigError: the config is invalid.
        ValueError: a layer of a technique is not compressed by it; weights are sharded; a related module cannot
            shrink.  The model is unchanged.
    """
    section, inner = read_section(config), unwrapped(model)
    selections = select(inner, section, mpu)
    _check_clean(inner, selections)
    for selection in selections:
        for match in selection.matches:
            _clean(inner, selection.technique, match)
    return model


def _check_clean(model: nn.Module, selections: list[Selection]) -> None:
    sharded = [name for name, param in model.named_parameters() if _is_hollow(param)]
    if sharded:
        raise ValueError(
            f"redundancy_clean(): the weights of {sharded[0]!r} are sharded. Close the engine first, or load a "
            "checkpoint into a new model"
        )
    for selection in selections:
        for match in selection.matches:
            for at, name in enumerate(match.names):
                layer, technique = _technique(model, name, selection.technique)
                if not isinstance(technique, Mask):
                    continue
                for names in match.related:
                    _check_related(technique, layer.layer, names[at], model.get_submodule(names[at]))


def _is_hollow(param: Tensor) -> bool:
    """Return True for a parameter without its values: on the meta device, or sharded at stage 3."""
    return param.is_meta or (param.dim() > 0 and param.numel() > 1 and not any(param.stride()))


def _technique(model: nn.Module, name: str, technique: str) -> tuple[CompressedLayer, Technique]:
    layer = layer_of(model.get_submodule(name))
    found = None if layer is None else layer.find(technique)
    if layer is None or found is None:
        raise ValueError(
            f"redundancy_clean(): {name!r} is not compressed by {technique}. Call init_compression() with the same "
            "config first, once"
        )
    return layer, found


def _check_related(technique: Mask, module: nn.Module, name: str, related: nn.Module) -> None:
    """Raise ValueError unless the related module can shrink with `module`."""
    if isinstance(technique, ChannelMask):
        fits = isinstance(related, nn.BatchNorm2d) or (isinstance(related, nn.Conv2d) and related.groups == 1)
        kinds = "BatchNorm2d and Conv2d with one group"
    else:
        weight = getattr(related, "weight", None)
        fits, kinds = isinstance(weight, Tensor) and weight.dim() == 2, "linear layers"
    if not fits:
        raise ValueError(
            f"{technique.name}: the related module {name!r} is a {type(related).__name__}; only {kinds} can shrink "
            "with it"
        )
    size = weight_of(related).shape[
        0 if isinstance(technique, HeadMask) or isinstance(related, nn.BatchNorm2d) else 1
    ]
    pruned = weight_of(module).shape[0]
    if isinstance(technique, HeadMask):
        if size != (columns := weight_of(module).shape[1]):
            raise ValueError(
                f"{technique.name}: the related module {name!r} has {size} outputs, and the heads have {columns}; "
                "only separate projections of as many heads can shrink, not fused ones and not shared keys and values"
            )
    elif size != pruned:
        what = "rows" if isinstance(technique, RowMask) else "channels"
        raise ValueError(
            f"{technique.name}: the related module {name!r} has {size} inputs, and {pruned} {what} are pruned; name "
            "the layer that reads them"
        )


def _clean(model: nn.Module, technique: str, match: Match) -> None:
    for at, name in enumerate(match.names):
        layer, found = _technique(model, name, technique)
        if isinstance(found, RoundInput):
            layer.replace(found, attrs.evolve(found, offset=-1))  # on, engine or not
            continue
        related = [model.get_submodule(names[at]) for names in match.related]
        if isinstance(found, Mask) and related:
            kept = found.mask(layer.layer).bool().view(-1)
            layer.remove(found)
            _shrink(found, layer.layer, related, kept)
        else:
            _write(layer, found)


def _write(layer: CompressedLayer, technique: Technique) -> None:
    """Write what one technique does into weight and bias."""
    module = layer.layer
    bias = getattr(module, "bias", None)
    weight = technique.weight(module, weight_of(module))
    new_bias = None if bias is None else technique.bias(module, bias)
    weight_of(module).copy_(weight)
    if bias is not None:
        bias.copy_(new_bias)
    layer.remove(technique)


def _shrink(technique: Mask, module: nn.Module, related: list[nn.Module], kept: Tensor) -> None:
    """Remove what is not kept from a module and its related ones."""
    if isinstance(technique, HeadMask):
        narrow(module, 1, _columns(kept, module, technique.heads, 1))
        for each in related:
            narrow(each, 0, _columns(kept, each, technique.heads, 0))
        return
    narrow(module, 0, kept)
    for each in related:
        narrow(each, 0 if isinstance(each, nn.BatchNorm2d) else 1, kept)


def _columns(kept: Tensor, module: nn.Module, heads: int, dim: int) -> Tensor:
    return kept.repeat_interleave(weight_of(module).shape[dim] // heads)


_SIZES = {  # attributes that follow a dim of the weight
    0: ("out_features", "out_channels", "num_features", "output_size"),
    1: ("in_features", "in_channels", "input_size"),
}


@torch.no_grad()
def narrow(module: nn.Module, dim: int, kept: Tensor) -> None:
    """Keep a part of a dim of the weight; of dim 0 also of biases and running statistics."""
    kept = kept.to(weight_of(module).device)
    index = (slice(None),) * dim + (kept,)
    parts = {"weight": index} | ({} if dim else dict.fromkeys(("bias", "running_mean", "running_var"), (kept,)))
    for name, part in parts.items():
        tensor = getattr(module, name, None)
        if isinstance(tensor, nn.Parameter):
            setattr(module, name, nn.Parameter(tensor[part].contiguous(), requires_grad=tensor.requires_grad))
        elif isinstance(tensor, Tensor):
            setattr(module, name, tensor[part].contiguous())
    for name in _SIZES[dim]:
        if hasattr(module, name):
            setattr(module, name, int(kept.sum()))
