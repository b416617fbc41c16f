"""An engine's members that read and write runs and weights; the work is done in `checkpointing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from zengine import checkpointing

if TYPE_CHECKING:
    from zengine.engine import Engine
    from zengine.parts import Parts


class EnginePersistence:
    """Checkpoints and state dicts; mixed into `Engine`."""

    if TYPE_CHECKING:
        module: nn.Module
        parts: Parts

    def save_checkpoint(
        self: Engine,  # type: ignore[misc]
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> str:
        """Save the whole run; every rank must call it. See `checkpointing.save`."""
        return checkpointing.save(self, save_dir, tag, client_state or {}, save_latest)

    def load_checkpoint(
        self: Engine,  # type: ignore[misc]
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Restore a run saved by `save_checkpoint`, at any world size and stage. See `checkpointing.load`."""
        what = checkpointing.What.choose(load_module_only, load_optimizer_states, load_lr_scheduler_states)
        return checkpointing.load(self, load_dir, tag, what, strict=load_module_strict)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's, with its own names: the engine stands in for the module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy weights (also with `assign`) and masters, in the module's dtype. All ranks call; rank 0's count."""
        result = self.module.load_state_dict(state_dict, strict=strict, assign=False)
        self.parts.partition.synchronise()
        return result
