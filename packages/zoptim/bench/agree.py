"""Before the clock runs: everybody must arrive at the same weights, or the times compare different work."""

from __future__ import annotations

import torch
from arena import Arena
from cases import Case
from contenders import Contender, Unavailable
from torch import Tensor

__all__ = ["refuse_differences"]

NUMELS = (3000, 1, 257, 2000)
NUM_STEPS = 3


def refuse_differences(case: Case, device: torch.device) -> None:
    """Run each contender on small memory of its own.  Raises RuntimeError where its weights are not ours."""
    first = torch.cat(Arena(NUMELS, device).get("weight", case.dtype)).float()
    expected: Tensor | None = None
    for contender in case.contenders:
        result = _result(contender, case, device) if device.type in contender.devices else None
        if result is None:
            continue
        if expected is None:
            expected = result
        scale = (expected - first).abs().max()
        error = (result - expected).abs().max() / scale
        if not (torch.isfinite(scale) and scale > 0 and error <= case.tolerance):
            raise RuntimeError(
                f"{contender.name} and {case.contenders[0].name} disagree on {case.name} after {NUM_STEPS} steps: by "
                f"{float(error):.3g} of the largest update; {case.tolerance:g} is allowed."
            )


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
