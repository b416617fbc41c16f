"""A run that measures nothing gets the identity, and none of what measures is imported for it."""

from __future__ import annotations

import subprocess
import sys

import torch

from zengine.config import Facts, load, resolve
from zengine.telemetry import Silent, Telemetry, make_telemetry


def chosen(rank: int = 0, **config: object) -> object:
    plan = resolve(load({"train_batch_size": 1, **config}), Facts(world_size=1, replicas=1))
    sizes = {"micro_batch_size": 1, "batch_size": 1, "replicas": 1}
    return make_telemetry(plan.telemetry, device=torch.device("cpu"), rank=rank, **sizes)


def test_what_is_asked_for_decides():
    assert isinstance(chosen(), Silent)
    assert isinstance(chosen(steps_per_print=1), Telemetry)
    assert isinstance(chosen(rank=1, steps_per_print=1), Silent)


def test_silence_imports_no_sink():
    code = (
        "import sys, zengine.telemetry; assert 'zengine.telemetry.making' not in sys.modules; "
        "assert 'zengine.telemetry.sinks.tensorboard' not in sys.modules; zengine.telemetry.Telemetry"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
