"""The bench of one piece: what it checks, measures and leaves out.

A piece is a function that takes a `Bench`.  It states claims with `check` and quantities with `figure`, and goes on
after a claim that does not hold, so that one run shows all faults.  On the simulated device `figure` runs nothing
less, but drops what was measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from acceptance.report import file_name
from acceptance.verdict import Figure, Judgement, State, Verdict

__all__ = ["Bench", "NotRunHere", "differing", "tensor_bytes"]

MOST_FAULTS = 20  # that a verdict quotes
Value = TypeVar("Value")


class NotRunHere(Exception):
    """Raised by a piece that this machine cannot run; the message is the reason."""


@attrs.define(eq=False)
class Bench:
    """Collects the outcome of one piece on `device`."""

    device: torch.device
    folder: Path  # empty, removed afterwards
    results: Path  # of the report, for files beside it
    is_simulated: bool
    checks: list[str] = attrs.field(factory=list)
    faults: list[str] = attrs.field(factory=list)
    figures: list[Figure] = attrs.field(factory=list)
    skipped: list[str] = attrs.field(factory=list)

    def choose(self, real: Value, tiny: Value) -> Value:
        """Return the size for a GPU, or the one for the simulated device."""
        return tiny if self.is_simulated else real

    def check(self, claim: str, faults: Iterable[str]) -> None:
        """State a claim; it holds if there are no faults."""
        found = list(faults)
        if found:
            self.faults += [f"{claim}: {fault}" for fault in found]
        else:
            self.checks.append(claim)

    def same_bits(self, claim: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        """State that tensors, on any devices, are equal bit for bit."""
        self.check(claim, differing(ours, theirs))

    def skip(self, part: str, reason: str) -> None:
        """Leave out a part: the piece counts as not run, whatever else it has shown."""
        self.skipped.append(f"{part}: {reason}")

    def figure(self, figure: Figure) -> None:
        """Keep a figure; on the simulated device nothing that was measured."""
        self.figures.append(attrs.evolve(figure, measured=None, peer=None) if self.is_simulated else figure)

    def keep(self, name: str, text: str) -> None:
        """Keep a file beside the report."""
        self.results.mkdir(parents=True, exist_ok=True)
        (self.results / f"{file_name(torch.cuda.get_device_name(self.device))}-{name}.json").write_text(text + "\n")

    def seconds(self, work: Callable[[], object], rounds: int = 5) -> float:
        """Return the median time of `work`, up to the end of what it has launched."""
        return statistics.median(self.times({"": work}, rounds)[""])

    def times(self, contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
        """Time contenders in turns, after one call of each that does not count."""
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for index in range(self.choose(rounds, 1) + 1):
            for name, work in contenders.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                work()
                torch.cuda.synchronize()
                taken[name] += [time.perf_counter() - start] if index else []
        return taken

    def verdict(self, piece: str, seconds: float) -> Verdict:
        """Conclude."""
        faults = [*self.faults]
        faults += [
            f"{each.name}: {each.measured:g} {each.unit}, ratio {each.ratio}; the goal is {each.bounds}"
            for each in self.figures
            if each.judgement is Judgement.FAILED
        ]
        state, reason = State.PASSED, ""
        if faults:
            more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
            state, reason = State.FAILED, "\n".join([*faults[:MOST_FAULTS], *more])
        elif self.skipped:
            state, reason = State.NOT_RUN, "; ".join(self.skipped)
        elif not self.checks and all(each.judgement is Judgement.NOT_MEASURED for each in self.figures):
            state, reason = State.NOT_RUN, "figures are measured on a GPU only"
        return Verdict(
            piece=piece,
            state=state,
            reason=reason,
            checks=tuple(self.checks),
            figures=tuple(self.figures),
            seconds=round(seconds, 1),
        )


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def differing(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[str]:
    """Return how tensors differ, bit by bit; [] if they do not."""
    if len(ours) != len(theirs):
        return [f"{len(ours)} tensors instead of {len(theirs)}"]
    faults = []
    for index, (one, other) in enumerate(zip(ours, theirs)):
        if one.dtype != other.dtype or one.shape != other.shape:
            faults.append(
                f"tensor {index}: {one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
            )
        elif num := int((tensor_bytes(one) != tensor_bytes(other)).sum()):
            faults.append(f"tensor {index} ({one.dtype}, {tuple(one.shape)}): {num} bytes differ")
    return faults
