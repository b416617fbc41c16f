"""Samples, tokens and FLOPs per second, from boundary to boundary.

The time of a step is all time since the previous boundary: waiting for data counts, because the user waits for it
too.  `paused()` excludes work that is not training (validation, checkpoints).  The first steps are not measured: the
first has no previous boundary, and early ones include allocation and compilation.  Rejected: timing from forward to
step only, which makes a data-starved run look fast; and synchronizing at each boundary, since the engine reads the
norm in the middle of each, so the host is ahead of the device by less than a step, always the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import attrs

WARMUP_STEPS = 2


@attrs.frozen(kw_only=True)
class Work:
    """Work of one step over all ranks; zero is unknown."""

    tokens: int = 0
    flops: float = 0.0  # by the formula, recomputation included
    useful_flops: float = 0.0  # by the formula, each operation once
    counted_flops: float = 0.0  # from counting the operations of one step

    def in_time(self, samples: int, ms: float) -> Rate:
        """Return the rate of a step that did this work in `ms` milliseconds."""
        return Rate(
            samples=samples,
            ms=ms,
            steps=1,
            tokens=self.tokens,
            flops=self.flops,
            useful_flops=self.useful_flops,
            counted_flops=self.counted_flops,
        )


@attrs.frozen(kw_only=True)
class Rate:
    """Samples of all ranks, their work and time.  Rates add up over steps."""

    samples: int = 0
    ms: float = 0.0
    steps: int = 0  # 0 means not measured
    tokens: int = 0  # these four as in `Work`
    flops: float = 0.0
    useful_flops: float = 0.0
    counted_flops: float = 0.0

    def __add__(self, other: Rate) -> Rate:
        return Rate(
            samples=self.samples + other.samples,
            ms=self.ms + other.ms,
            steps=self.steps + other.steps,
            tokens=self.tokens + other.tokens,
            flops=self.flops + other.flops,
            useful_flops=self.useful_flops + other.useful_flops,
            counted_flops=self.counted_flops + other.counted_flops,
        )

    def __bool__(self) -> bool:
        return self.steps > 0 and self.ms > 0

    def per_s(self, amount: float) -> float:
        """Return `amount` per second; 0 if nothing is measured."""
        return amount / self.ms * 1e3 if self else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.per_s(self.samples)

    @property
    def step_ms(self) -> float:
        """Mean milliseconds of a step."""
        return self.ms / self.steps if self else 0.0


@final
@attrs.define(eq=False)
class Throughput:
    """Measures each step after the warm-up."""

    _clock: Callable[[], float] = time.perf_counter  # seconds
    _warmup_steps: int = WARMUP_STEPS  # at least 1: the first step has no beginning
    total: Rate = attrs.field(factory=Rate, init=False)  # since the warm-up
    _seen: int = attrs.field(default=0, init=False)  # boundaries since the start or a reset
    _last_time: float = attrs.field(default=0.0, init=False)  # clock at the last boundary
    _last_samples: int = attrs.field(default=0, init=False)  # sample counter at the last boundary
    _pause: float = attrs.field(default=0.0, init=False)  # seconds since it that are not training
    _depth: int = attrs.field(default=0, init=False)  # pauses open now; the outermost is timed

    def step_end(self, samples: int, work: Work | None = None) -> Rate:
        """Return the rate of the step that ends at `samples` samples since the start of training."""
        now = self._clock()
        self._seen += 1
        elapsed_ms = (now - self._last_time - self._pause) * 1e3
        step = (work or Work()).in_time(samples - self._last_samples, elapsed_ms)
        self._last_time, self._last_samples, self._pause = now, samples, 0.0
        if self._seen <= self._warmup_steps:
            return Rate()
        self.total += step
        return step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from the throughput; blocks may be nested."""
        begin = self._clock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._pause += self._clock() - begin

    def reset(self) -> None:
        """Restart with a warm-up: the sample counter has jumped."""
        self.total, self._seen = Rate(), 0


@final
class NoThroughput:
    """Null object: measures nothing."""

    total = Rate()

    def step_end(self, samples: int, work: Work | None = None) -> Rate:
        return Rate()

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield

    def reset(self) -> None: ...
