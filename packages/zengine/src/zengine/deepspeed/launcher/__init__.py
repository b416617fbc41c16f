"""`deepspeed.launcher`: the command `deepspeed` on one host and on several; `zengine run` is zengine's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import lazy_attributes

if TYPE_CHECKING:
    from zengine.deepspeed.launcher import constants, launch, multinode_runner, runner

__all__ = ["constants", "launch", "multinode_runner", "runner"]

__getattr__, __dir__ = lazy_attributes(__name__, {}, with_submodules=True)  # imported on first use
