"""Agreement: before timing, all contenders must compute the same weights; else times compare different work."""

from __future__ import annotations

import attrs
import torch
from arena import Arena
from cases import Case
from contenders import Contender, Unavailable
from torch import Tensor

__all__ = ["drop_disagreeing"]

NUMELS = (3000, 1, 257, 2000)
NUM_STEPS = 3


def drop_disagreeing(case: Case, device: torch.device) -> tuple[Case, list[str]]:
    """Return the case with the contenders that agree with ours, and a note for each other one.

    Every contender updates its own small memory.  Raises RuntimeError if no contender agrees with ours.
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
        except Exception as failure:  # a broken peer must not stop the others
            notes.append(f"{other.name} is left out: {type(failure).__name__}: {failure}")
            continue
        error = 0.0 if result is None else float((result - expected).abs().max() / scale)
        if error <= case.tolerance:  # NaN compares false
            kept.append(other)
        else:
            notes.append(
                f"{other.name} is left out: after {NUM_STEPS} steps of {case.name} its weights differ from ours by "
                f"{error:.3g} of the largest update; {case.tolerance:g} is allowed."
            )
    if notes and len(kept) == 1:
        raise RuntimeError("\n".join([f"no contender agrees with zoptim on {case.name}:", *notes]))
    return attrs.evolve(case, contenders=tuple(kept)), notes


def _result(contender: Contender, case: Case, device: torch.device) -> Tensor | None:
    """Return the weights after a few steps; None if the contender cannot run here."""
    arena = Arena(NUMELS, device)
    try:
        step = contender.prepare(arena)
    except Unavailable:
        return None
    for _ in range(NUM_STEPS):
        step()
    return torch.cat(arena.get("weight", case.dtype)).float()
