"""The saver is checked at each boundary, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zengine.features import BackgroundSaves


class Asked:
    times = 0

    def check(self) -> None:
        self.times += 1


def test_the_saver_is_asked_before_an_update() -> None:
    saver = Asked()
    run: Any = SimpleNamespace(parts=SimpleNamespace(checkpoints=saver))
    feature = BackgroundSaves()
    feature.attach(run)
    feature.forward_begin((), {})
    assert saver.times == 0
    feature.step_begin()
    assert saver.times == 1
