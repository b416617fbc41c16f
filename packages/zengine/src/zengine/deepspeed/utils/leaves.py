"""`set_z3_leaf_modules` and its family: modules that stage 3 shall gather as one, said before `initialize`.

DeepSpeed writes a flag onto the modules; here it is a table beside them, which `deepspeed.initialize` turns into the
config's `zero_optimization.leaf_module.names`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import nn

__all__ = [
    "get_z3_leaf_modules",
    "leaf_names",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

_leaves: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether `model` was marked."""
    return model in _leaves


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or unmark it."""
    _leaves.add(model) if flag else _leaves.discard(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules within `model`."""
    return [module for module in model.modules() if module in _leaves]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of these classes (or names of classes); returns them.  ValueError if there is none."""
    wanted = list(leaf_module_classes)
    classes = tuple(each for each in wanted if isinstance(each, type))
    names = {each for each in wanted if isinstance(each, str)}

    def fits(_: str, module: nn.Module) -> bool:
        own = {
            name for cls in type(module).__mro__ for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
        }
        return isinstance(module, classes) or bool(names & own)

    return _marked(model, fits, f"of the classes {wanted}", raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their qualified names; returns them."""
    wanted = set(module_names)
    return _marked(model, lambda name, _: name in wanted, f"named {sorted(wanted)}", raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules whose qualified names end so; returns them."""
    ends = tuple(module_name_suffixes)
    return _marked(model, lambda name, _: name.endswith(ends), f"whose names end in {ends}", raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark modules of these classes; returns them."""
    found = set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        _leaves.discard(module)
    return found


def leaf_names(model: nn.Module | None) -> tuple[str, ...]:
    """Qualified names of the marked modules within `model`, outermost first."""
    if model is None:
        return ()
    return tuple(name for name, module in model.named_modules() if name and module in _leaves)


def _marked(
    model: nn.Module, fits: Callable[[str, nn.Module], bool], wanted: str, raise_if_not_found: bool
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if not found and raise_if_not_found:
        inside = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"{type(model).__name__} has no modules {wanted}. It is made of: {inside}.")
    _leaves.update(found)
    return found
