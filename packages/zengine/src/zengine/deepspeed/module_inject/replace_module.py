"""`deepspeed.module_inject.replace_module`: replaces layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from zengine.deepspeed.absent import absent
from zengine.deepspeed.module_inject.auto_tp import ReplaceWithTensorSlicing

__all__ = [
    "GroupQuantizer",
    "ReplaceWithTensorSlicing",
    "generic_injection",
    "replace_module",
    "replace_transformer_layer",
    "revert_transformer_layer",
]

GroupQuantizer = absent("module_inject.GroupQuantizer")
generic_injection = absent("module_inject.generic_injection")
replace_transformer_layer = absent("module_inject.replace_transformer_layer")
revert_transformer_layer = absent("module_inject.revert_transformer_layer")


def replace_module(
    model: nn.Module,
    orig_class: type[nn.Module] | None,
    replace_fn: Callable[..., nn.Module],
    _replace_policy: Any,
    checkpoint: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Replace each module of a class by `replace_fn(module, policy, layer_id, prefix=..., state_dict=...)`; return
    `model`.

    orig_class: the class, with `_replace_policy` passed on; None: `_replace_policy` maps classes to policies.
    checkpoint: state dict that is passed on; None: none.

    Raises ValueError if no module is of such a class.
    """
    policies: dict[Any, Any] = {orig_class: _replace_policy} if orig_class is not None else dict(_replace_policy)
    found = [(path, child) for path, child in model.named_modules() if type(child) in policies]
    outer = [(path, child) for path, child in found if not any(path.startswith(f"{top}.") for top, _ in found)]
    if not outer:
        names = ", ".join(kind.__name__ for kind in policies)
        raise ValueError(f"{type(model).__name__} contains no module of class {names}; nothing to replace")
    for number, (path, child) in enumerate(outer):
        new = replace_fn(child, policies[type(child)], number, prefix=f"{path}.", state_dict=checkpoint)
        model.set_submodule(path, new)
    return model
