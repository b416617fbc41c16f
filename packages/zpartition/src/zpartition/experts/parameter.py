"""Which parameters are experts': a class of their own says it, so nothing has to be written on them or looked up."""

from __future__ import annotations

from typing import Any

from torch.nn import Parameter

__all__ = ["ExpertParameter", "as_experts"]


class ExpertParameter(Parameter):
    """A parameter that holds the weights of several experts, with the experts in front; otherwise as any other."""


def as_experts(param: Parameter) -> None:
    """The same object, known as experts' from now on; a class of its own (a quantised parameter's) stays.

    A class that merely adds names to a parameter (zengine.deepspeed's marks) says which it is as `stands_for`.
    """
    if getattr(type(param), "stands_for", type(param)) is Parameter:
        untyped: Any = param
        untyped.__class__ = ExpertParameter
