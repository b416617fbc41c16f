"""Between phases of a run: the memory of training lent to something else, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch

from zengine import checkpointing

if TYPE_CHECKING:
    from zengine.clock import Clock
    from zengine.engine import Engine
    from zengine.parts import Parts

_ALL = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


class EnginePhases:
    """Parking of an engine's states, and saves under way; mixed into `Engine`."""

    if TYPE_CHECKING:
        parts: Parts
        clock: Clock

    def wait_for_checkpoint(self) -> None:
        """Until what `save_checkpoint` writes in the background ("async_save") is durable.  All ranks.

        Raises:
            zckpt.CheckpointError: it failed, on every rank; earlier checkpoints are untouched.
        """
        self.parts.saver.wait()

    def restore_from_memory(self) -> dict[str, Any]:
        """Go back to the newest `save_checkpoint` of "async_save", from the copy in host memory.  All ranks.

        For a step that went wrong: weights, optimizer, schedule, scale, counters, random numbers and the order of
        data are as they were when that save was called.  Returns its client_state.

        Raises:
            ValueError: there is no copy.
            zckpt.CheckpointError: it does not fit this engine any more; nothing has changed.
        """
        return checkpointing.restore(cast("Engine", self))

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
        nvme_path: str = "",
    ) -> None:
        """Move the memory of training away, to the host or into files ("nvme"), until `reload_states`.  All ranks.

        include: any of optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer; default: all of them.
        non_blocking: DeepSpeed's; the copies are over when this returns in either case.

        Raises:
            ValueError: another name or device, or in the middle of a step.
        """
        names = [str(getattr(each, "value", each)) for each in (_ALL if include is None else include)]
        device = str(getattr(device, "value", device))
        unknown = sorted(set(names) - set(_ALL))
        if unknown or device not in ("cpu", "nvme") or (device == "nvme" and not nvme_path):
            given = f"include={names}, device={device!r}, nvme_path={nvme_path!r}"
            raise ValueError(
                f"offload_states({given}): include takes {', '.join(_ALL)}; "
                'device is "cpu", or "nvme" with a nvme_path'
            )
        self.clock.require_open("offload_states")
        self.parts.partition.offload_states(names, pin=pin_memory, directory=nvme_path if device == "nvme" else "")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has moved; nothing happens if there is nothing.  All ranks."""
        self.parts.partition.reload_states()
