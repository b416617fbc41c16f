"""The collector is disabled while an engine asks for it, and restored afterwards."""

from __future__ import annotations

import gc

import torch
from torch import nn

import zengine
from zengine.features import PythonGC

CONFIG = {"train_batch_size": 1, "gradient_clipping": 0, "disable_python_gc": True}


def make() -> zengine.Engine:
    return zengine.initialize(model=nn.Linear(1, 1), config=CONFIG)[0]


def test_it_is_off_until_the_last_engine_is_closed():
    assert gc.isenabled()
    first, second = make(), make()
    try:
        assert not gc.isenabled()
        assert first.config["disable_python_gc"] is True
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert first.collect_python_gc() >= 1
        first.close()
        first.close()
        assert not gc.isenabled()
    finally:
        second.close()
    assert gc.isenabled()


def test_it_is_on_again_after_an_engine_that_was_dropped_and_not_closed():
    engine = make()
    engine.backward(engine(torch.ones(1, 1)).sum())
    assert not gc.isenabled()
    del engine
    assert gc.isenabled()


def test_a_collector_that_the_caller_switched_off_stays_off():
    gc.disable()
    try:
        feature = PythonGC()
        feature.attach(None)
        feature.close()
        assert not gc.isenabled()
    finally:
        gc.enable()
