"""`deepspeed.ops.op_builder.builder`: what an op builder answers.

Nothing is compiled at run time: kernels come with the wheels, so a builder reports whether its op is built in.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, ClassVar

__all__ = ["NotImplementedBuilder", "OpBuilder", "make_builder", "probe_is_compatible"]


class OpBuilder:
    """An op of DeepSpeed.  `load()` returns the module that has it here."""

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""  # DeepSpeed's variable that asks for a build; without effect
    module: ClassVar[str] = ""  # that has the op; "": it is not available

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """Return the name of the module that has the op."""
        return self.module

    def sources(self) -> list[str]:
        """Return []: there is nothing to compile."""
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True if the op is available."""
        return bool(self.module)

    def load(self, verbose: bool = False) -> ModuleType:
        """Return the module that has the op: of an optimizer, its class.  Raises ValueError if there is none."""
        if not self.module:
            raise ValueError(
                f"{type(self).__name__}: zengine has no such op. Use torch's operations, which cover it; "
                "deepspeed.ops.__compatible_ops__ lists the ops that are available."
            )
        return importlib.import_module(self.module)


class NotImplementedBuilder(OpBuilder):
    """Builder of every op that is not available here."""

    NAME = "deepspeed_not_implemented"
    BUILD_VAR = "DS_BUILD_NOT_IMPLEMENTED"


def make_builder(class_name: str, op_name: str, module: str) -> type[OpBuilder]:
    """Return the builder class of an op."""
    members: dict[str, Any] = {"NAME": op_name, "BUILD_VAR": f"DS_BUILD_{op_name.upper()}", "module": module}
    return type(class_name, (OpBuilder,), {**members, "__module__": __name__, "__doc__": f"Builder of {op_name}."})


def probe_is_compatible(builder: OpBuilder, verbose: bool = False) -> bool:
    """Return `builder.is_compatible()`."""
    return builder.is_compatible(verbose)
