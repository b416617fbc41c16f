"""Verdicts of pieces, and their figures: values that go through JSON."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

__all__ = ["Figure", "Judgement", "State", "Verdict"]


class State(enum.Enum):
    """Outcome of a piece."""

    PASSED = "passed"  # every check held, no part was left out, and what was measured is within its bounds
    FAILED = "failed"  # a check or a figure did not hold, or the process crashed or was too slow
    NOT_RUN = "not run"  # wholly or in part, with the reason


class Judgement(enum.Enum):
    """Outcome of a figure."""

    PASSED = "passed"
    FAILED = "failed"
    MEASURED = "measured"  # without bounds
    NOT_MEASURED = "not measured"


@attrs.frozen(kw_only=True)
class Figure:
    """One quantity.  The bounds are of the ratio, or of the measured value if there is nothing to compare it with."""

    name: str
    unit: str
    measured: float | None = None  # None: not measured
    predicted: float | None = None  # by a model, before the run
    peer: float | None = None  # of what it is compared with, in the same run
    at_least: float | None = None
    at_most: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over the peer or, without one, over the prediction."""
        base = self.predicted if self.peer is None else self.peer
        return self.measured / base if self.measured is not None and base else None

    @property
    def judgement(self) -> Judgement:
        value = self.measured if self.ratio is None else self.ratio
        if value is None:
            return Judgement.NOT_MEASURED
        if self.at_least is None and self.at_most is None:
            return Judgement.MEASURED
        holds = (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)
        return Judgement.PASSED if holds else Judgement.FAILED  # NaN compares false

    @property
    def bounds(self) -> str:
        """The goal, for people."""
        parts = [f"at least {self.at_least:g}"] if self.at_least is not None else []
        parts += [f"at most {self.at_most:g}"] if self.at_most is not None else []
        return " and ".join(parts)


@attrs.frozen(kw_only=True)
class Verdict:
    """Outcome of one piece."""

    piece: str
    state: State
    reason: str = ""  # of a failed piece, or one that was not run
    checks: tuple[str, ...] = ()  # what held
    figures: tuple[Figure, ...] = ()
    seconds: float = 0.0
    output: str = ""  # the end of what a failed piece printed

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the judgement and ratio of each figure for readers of the file."""
        plain = attrs.asdict(self, filter=lambda field, _: field.name not in ("state", "figures"))
        figures = [
            attrs.asdict(each) | {"ratio": each.ratio, "judgement": each.judgement.value} for each in self.figures
        ]
        return plain | {"state": self.state.value, "figures": figures}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Verdict:
        names = {field.name for field in attrs.fields(Figure)}
        figures = tuple(
            Figure(**{key: each[key] for key in names if key in each}) for each in plain.get("figures", ())
        )
        rest: dict[str, Any] = {"checks": tuple(plain.get("checks", ()))}
        rest |= {key: plain[key] for key in ("piece", "reason", "seconds", "output") if key in plain}
        return cls(state=State(plain["state"]), figures=figures, **rest)
