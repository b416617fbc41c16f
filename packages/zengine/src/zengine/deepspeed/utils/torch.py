"""`deepspeed.utils.torch`: helpers that depend on torch's version."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["is_functorch_transforming", "jit_script_compat", "register_grad_hook", "required_torch_version"]

Function = TypeVar("Function", bound=Callable[..., Any])


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Return True if torch's version is in the range; both ends are included, and one may be omitted.

    Raises AssertionError (DeepSpeed's) without a version.
    """
    assert min_version or max_version, "Must provide a min_version or max_version argument"
    here = _version(torch.__version__)
    return (not min_version or _version(min_version) <= here) and (not max_version or here <= _version(max_version))


def _version(text: str | float) -> tuple[int, ...]:
    """Return the release numbers of a version: "2.10.1+cu128" gives (2, 10, 1); zeros at the end are dropped."""
    found = re.match(r"\d+(\.\d+)*", str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a version: give one such as '2.4' or '2.10.1'.")
    numbers = [int(part) for part in found[0].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def is_functorch_transforming() -> bool:
    """Return True inside torch.func.grad, vmap and the like."""
    from zengine._compat import inside_functorch

    return inside_functorch()


def register_grad_hook(param: Any, hook: Callable[[Any], None]) -> Any:
    """Call `hook(param)` whenever backward has accumulated `param.grad`; return a handle with remove()."""
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(fn: Function) -> Function:
    """Return `fn` compiled by torch.compile, on its first call."""
    compiled: Any = torch.compile(fn)
    found: Function = compiled
    return found
