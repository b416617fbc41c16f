"""Keys of faults, ours: signals, and the comparison of replicas."""

from __future__ import annotations

import attrs

from zengine.config.grammar.kinds import COUNT, TEXT, choice, null_or, whole
from zengine.config.grammar.table import section, setting

ACTIONS = ("checkpoint_and_exit", "checkpoint", "exit", "none")
_ACTION = null_or(choice(*ACTIONS, fold=str.lower), "")


@attrs.frozen(kw_only=True)
class SignalSettings:
    """signals, ours: reaction to SIGTERM and SIGUSR1 at the end of the step in which one arrives on any rank."""

    save_dir: str = setting(
        null_or(TEXT, ""), "", "folder of the checkpoints; needed to save, and turns the defaults on", empty="(none)"
    )
    sigterm: str = setting(
        _ACTION,
        "",
        "checkpoint_and_exit, checkpoint (and go on), exit (without a save) or none",
        empty="(checkpoint_and_exit if save_dir is set)",
    )
    sigusr1: str = setting(_ACTION, "", "the same for SIGUSR1", empty="(checkpoint if save_dir is set)")
    exit_code: int = setting(whole(0, 255), 0, "exit code of all ranks after an exit")

    @property
    def actions(self) -> dict[str, str]:
        """The action for each signal that has one, by the signal's name."""
        default_term, default_usr1 = ("checkpoint_and_exit", "checkpoint") if self.save_dir else ("none", "none")
        found = {"SIGTERM": self.sigterm or default_term, "SIGUSR1": self.sigusr1 or default_usr1}
        return {name: action for name, action in found.items() if action != "none"}


@attrs.frozen(kw_only=True, slots=False)
class FaultKeys:
    """Keys of the top level that need no resolution: `Plan` has the same fields."""

    verify_replicas_every: int = setting(
        COUNT,
        0,
        "ours: steps between two bitwise comparisons of weights, buffers, optimizer state and options over "
        "data-parallel ranks; 0: never",
        empty="off",
    )
    signals: SignalSettings = section(SignalSettings)
