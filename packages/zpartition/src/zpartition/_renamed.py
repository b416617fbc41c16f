"""Public names of version 0.2 that have a new name since 0.3.  An old one raises an error that gives the new one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

__all__ = ["renamed"]


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of `module`; `names` maps each old name to the new one.

    `module.old` raises AttributeError and `from module import old` ImportError.  The latter is
    raised for calls by the import system, which drops the text of an AttributeError.
    """

    def getattr_(name: str) -> NoReturn:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        text = f"{module}.{name} was renamed in 0.3.0; use {module}.{names[name]}."
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise ImportError(text, name=module)
        raise AttributeError(text, name=name)

    return getattr_
