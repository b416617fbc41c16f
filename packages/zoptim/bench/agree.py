"""Before the clock runs: everybody must arrive at the same weights, or the times compare different work."""

from __future__ import annotations

import attrs
import torch
from arena import Arena
from cases import Case
from contenders import Contender, Unavailable
from torch import Tensor

__all__ = ["without_strangers"]

NUMELS = (3000, 1, 257, 2000)
NUM_STEPS = 3


def without_strangers(case: Case, device: torch.device) -> tuple[Case, list[str]]:
    """The case with those who compute what we do, and a note for each who does not.

    Every contender updates a small memory of its own.  Raises RuntimeError where nobody agrees with ours.
    """
    ours = case.contenders[0]
    first = torch.cat(Arena(NUMELS, device).get("weight", case.dtype)).float()
    expected = _result(ours, case, device)
    if expected is None:
        return case, []
    scale = (expected - first).abs().max()
    kept, notes = [ours], []
    for other in case.contenders[1:]:
        try:
            result = _result(other, case, device) if device.type in other.devices else expected
        except Exception as failure:  # a broken peer must not cost the others their figures
            notes.append(f"{other.name} is left out: {type(failure).__name__}: {failure}")
            continue
        error = 0.0 if result is None else float((result - expected).abs().max() / scale)
        if error <= case.tolerance:  # false for NaN
            kept.append(other)
        else:
            notes.append(
                f"{other.name} is left out: after {NUM_STEPS} steps of {case.name} its weights differ from ours by "
                f"{error:.3g} of the largest update; {case.tolerance:g} is allowed."
            )
    if notes and len(kept) == 1:
        raise RuntimeError("\n".join([f"nobody computes the {case.name} that zoptim computes:", *notes]))
    return attrs.evolve(case, contenders=tuple(kept)), notes


def _result(contender: Contender, case: Case, device: torch.device) -> Tensor | None:
    """The weights after a few steps; None where the contender cannot run here."""
    arena = Arena(NUMELS, device)
    try:
        step = contender.prepare(arena)
    except Unavailable:
        return None
    for _ in range(NUM_STEPS):
        step()
    return torch.cat(arena.get("weight", case.dtype)).float()
