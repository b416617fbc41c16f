"""torch_autocast.lower_precision_safe_modules: a name that means nothing is refused.

A class that exists and that the model does not use is fine: the default names four, and few models have them all.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable

from torch import nn

__all__ = ["refuse_unknown_classes"]


def refuse_unknown_classes(names: Iterable[str], module: nn.Module) -> None:
    """ValueError for a name that is neither that of a class in `module` nor the path of any class."""
    kinds = {type(child) for child in module.modules()}
    known = {kind.__name__ for kind in kinds} | {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    for name in names:
        if name not in known and not _is_importable(name):
            torchs = {f"torch.nn.{kind.__name__}" for kind in kinds if kind.__module__.startswith("torch.nn.")}
            close = difflib.get_close_matches(name, sorted(known | torchs), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"torch_autocast.lower_precision_safe_modules names {name!r}, which is no class of this model and "
                f"cannot be imported: write a class as 'Linear' or 'torch.nn.Linear'.{hint}"
            )


def _is_importable(name: str) -> bool:
    path, _, last = name.rpartition(".")
    try:
        return bool(path) and isinstance(getattr(importlib.import_module(path), last, None), type)
    except ImportError:
        return False
