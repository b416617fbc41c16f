"""`set_z3_leaf_modules` and related functions: modules that stage 3 gathers as one unit, set before `initialize`.

DeepSpeed's flag on the modules marks them (Accelerate reads it).  `deepspeed.initialize` copies their names to the
config's `zero_optimization.leaf_module.names`; afterwards the config's modules are marked, too.  Unlike in DeepSpeed,
a missing name that raises marks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn
from torch.nn import Parameter

__all__ = [
    "get_z3_leaf_modules",
    "leaf_names",
    "mark_configured",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

Named = Mapping[str, nn.Module]

_MARK = "_z3_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    """Return True if `model` is marked."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: Parameter) -> bool:
    """Return True if a parameter belongs to a marked module of a stage-3 engine."""
    return hasattr(model, "ds_z3_leaf_module")


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark or unmark one module."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of these classes or class names; return them, inner ones first.

    Raises ValueError if there is none, TypeError for an entry that is neither a class nor a name.
    """
    return _flag_classes(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark modules of these classes; return them.  Raises like `set_z3_leaf_modules`."""
    return _flag_classes(model, list(leaf_module_classes), False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules (flag=False: unmark) by their names in `named_modules`; return (matched, missing names).

    Raises ValueError if any name is missing.
    """

    def named(modules: Named, name: str) -> list[nn.Module]:
        return [modules[name]] if name in modules else []

    return _flag_names(model, list(module_names), named, "named", flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark or unmark every module whose name ends in a suffix; return (matched, suffixes without a match)."""

    def ending(modules: Named, suffix: str) -> list[nn.Module]:
        return [module for name, module in modules.items() if name.endswith(suffix)]

    return _flag_names(model, list(module_name_suffixes), ending, "whose names end in", flag, raise_if_not_found)


def leaf_names(model: nn.Module | None) -> tuple[str, ...]:
    """Return the qualified names of the marked modules of `model`, outermost first; "" is `model` itself."""
    return () if model is None else tuple(name for name, module in model.named_modules() if z3_leaf_module(module))


def mark_configured(model: nn.Module, leaf_modules: Mapping[str, Sequence[str]]) -> None:
    """Mark the modules of a config: its "classes", "names" and "name_suffixes"."""
    set_z3_leaf_modules(model, leaf_modules["classes"], raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, leaf_modules["names"], raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, leaf_modules["name_suffixes"], raise_if_not_found=False)


def _flag_classes(model: nn.Module, wanted: list[type | str], flag: bool, raises: bool) -> list[nn.Module]:
    if invalid := [each for each in wanted if not isinstance(each, (type, str))]:
        raise TypeError(f"leaf_module_classes takes classes or names of classes, got {invalid[0]!r}")
    classes = tuple(each for each in wanted if isinstance(each, type))
    found: list[nn.Module] = []

    def collect(module: nn.Module) -> None:
        kind = type(module)
        if isinstance(module, classes) or {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"} & {*wanted}:
            found.append(module)

    model.apply(collect)  # in the order of DeepSpeed's list
    if not found and raises:
        raise _not_found(model, f"of the classes {wanted}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _flag_names(
    model: nn.Module,
    wanted: list[str],
    matching: Callable[[Named, str], list[nn.Module]],
    how: str,
    flag: bool,
    raises: bool,
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    matches = {each: matching(modules, each) for each in wanted}
    missing = [each for each in wanted if not matches[each]]
    if missing and raises:
        raise _not_found(model, f"{how} {missing}")
    found = (module for each in wanted for module in matches[each])
    flagged = list(dict.fromkeys(found))  # several suffixes may match a module
    for module in flagged:
        set_z3_leaf_module(module, flag)
    return flagged, missing


def _not_found(model: nn.Module, wanted: str) -> ValueError:
    inside = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
    return ValueError(f"{type(model).__name__} has no modules {wanted}. Its modules are of the classes {inside}.")
