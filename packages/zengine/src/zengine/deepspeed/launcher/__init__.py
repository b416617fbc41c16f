"""`deepspeed.launcher`: the command `deepspeed` on one host and on several; `zengine run` is zengine's own."""

from __future__ import annotations

from zengine.deepspeed.launcher import constants, launch, multinode_runner, runner

__all__ = ["constants", "launch", "multinode_runner", "runner"]
