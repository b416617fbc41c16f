"""Base of DeepSpeed's two classes of Adam.

The device of the tensors selects the kernel, not the class: a `FusedAdam` with offloaded states runs the CPU kernel.
"""

from __future__ import annotations

import zoptim

__all__ = ["DeepSpeedAdam"]


class DeepSpeedAdam(zoptim.Adam):
    """Adam with DeepSpeed's state dict.  Checkpoints store the rule, so a run may switch to zoptim's or torch's.

    The mode (Adam or AdamW) belongs to the object: DeepSpeed's state dicts do not have it, and loading keeps it.
    """

    kept_options = (*zoptim.Adam.kept_options, "decoupled_weight_decay")

    @property
    def checkpoint_kind(self) -> str:
        """Rule of the state: "AdamW" or "Adam"."""
        return "AdamW" if self.adam_w_mode else "Adam"

    @property
    def adam_w_mode(self) -> bool:
        """True for AdamW."""
        return bool(self.param_groups[0]["decoupled_weight_decay"])
