"""Times of an inference engine's forward passes (`profile_model_time`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.utils.timer import SynchronizedWallClockTimer

__all__ = ["INFERENCE_MODEL_TIMER", "Watch"]

INFERENCE_MODEL_TIMER = "model-forward-inference"


@final
class Watch:
    """Times of forward passes."""

    def __init__(self, use_events: bool) -> None:
        self._timer = SynchronizedWallClockTimer.Timer(INFERENCE_MODEL_TIMER)
        self._timer.use_host_timer |= not use_events

    def start(self) -> None:
        self._wait()
        self._timer.start()

    def stop(self) -> None:
        self._wait()
        self._timer.stop()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time what runs inside, as one pass."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def times(self) -> list[float]:
        """Return the milliseconds of each pass, and forget them."""
        self._timer.elapsed(reset=False)
        found = list(self._timer.elapsed_records or ())
        self._timer.reset()
        return found

    def _wait(self) -> None:
        if self._timer.use_host_timer:
            get_accelerator().synchronize()
