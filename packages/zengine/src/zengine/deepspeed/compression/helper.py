"""`deepspeed.compression.helper`: functions that find and replace layers, also of DeepSpeed-Chat's LoRA."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from zengine.deepspeed.utils.module_utils import recursive_getattr, recursive_setattr

__all__ = [
    "convert_conv1d_to_linear",
    "get_module_name",
    "is_module_compressible",
    "recursive_getattr",
    "recursive_setattr",
]


def is_module_compressible(module: nn.Module, mpu: object = None) -> bool:
    """Return True for layers with a weight that compression or LoRA can replace.

    mpu: also its ColumnParallelLinear and RowParallelLinear.
    """
    parallel = (getattr(mpu, name, None) for name in ("ColumnParallelLinear", "RowParallelLinear"))
    own = tuple(kind for kind in parallel if isinstance(kind, type))
    norms = (nn.BatchNorm2d,)
    return isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding, *norms, *own))


def get_module_name(
    group_name: str,
    model: nn.Module,
    key_word: str,
    exist_module_name: set[str],
    mpu: object = None,
    verbose: bool = True,
) -> tuple[list[str], set[str]]:
    """Return the replaceable layers whose name matches the regular expression `key_word`, and all found so far.

    exist_module_name: layers of other groups; a layer in two groups raises ValueError with `group_name`.
    """
    pattern = re.compile(key_word)
    named = [name for name, child in model.named_modules() if is_module_compressible(child, mpu)]
    found: Sequence[str] = [name for name in named if pattern.search(name)]
    if twice := sorted(set(found) & exist_module_name):
        raise ValueError(
            f"{', '.join(twice)} match {key_word!r} of {group_name}, and belong to another group already"
        )
    return list(found), exist_module_name | set(found)


@torch.no_grad()
def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace layers of `convert_type`, Transformers' Conv1D with weights (in, out), by nn.Linear; return `model`."""
    inner = getattr(model, "module", None)
    inner = inner if isinstance(inner, nn.Module) else model
    for name, old in [(name, each) for name, each in inner.named_modules() if isinstance(each, convert_type)]:
        weight, bias = old.get_parameter("weight"), getattr(old, "bias", None)
        inputs, outputs = weight.shape
        made = nn.Linear(inputs, outputs, bias=bias is not None, device=weight.device, dtype=weight.dtype)
        made.weight.copy_(weight.t())
        if bias is not None:
            made.bias.copy_(bias.view(-1))
        recursive_setattr(inner, name, made.train(old.training))
    return model
