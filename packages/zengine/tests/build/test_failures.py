"""A rank that fails alone in `initialize` tells the others in seconds; an error of all leaves the world usable."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.testing import Regression

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
BAD: dict[str, dict[str, Any]] = {  # arguments of initialize that are wrong in another of its phases each
    "config": {"config": {**GOOD, "zero_optimization": {"stgae": 1}}},
    "batch": {"config": {**GOOD, "train_batch_size": 7}},
    "model": {"model": "a name"},
    "optimizer": {"optimizer": lambda parameters: "no optimizer"},
    "file": {"config": "no/such/config.json"},
}


def _initialize(**arguments: Any) -> Any:
    return zengine.initialize(**{"model": Regression(), "config": GOOD, **arguments})[0]


def _fails_alone(phase: str) -> tuple[str, str, float]:
    rank, began_s = torch.distributed.get_rank(), time.monotonic()
    with pytest.raises(Exception) as caught:
        _initialize(**(BAD[phase] if rank == 1 else {}))
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began_s


@pytest.mark.parametrize("phase", BAD)
def test_the_error_of_one_rank_reaches_the_others_in_seconds(phase: str) -> None:
    healthy, failing = run_ranks(_fails_alone, 2, phase)
    assert failing[0] in ("ConfigError", "TypeError", "ValueError")
    assert healthy[0] == "CollectiveFailed"
    assert healthy[1].startswith(
        "initialize() ended, because another rank failed: rank 1 failed in initialize(): "
        f"{failing[0]}: {failing[1].splitlines()[0]}"
    )
    assert healthy[1].endswith("Nothing is wrong on this rank, rank 0.")
    assert max(healthy[2], failing[2]) < 15


def _fails_everywhere() -> float:
    for phase in ("config", "optimizer"):
        with pytest.raises((zengine.ConfigError, TypeError)):
            _initialize(**BAD[phase])
    with _initialize() as engine:
        engine.backward(engine(torch.ones(2, 3)))
        return float(engine.step().loss)


def test_an_error_of_all_ranks_leaves_a_world_that_trains() -> None:
    losses = run_ranks(_fails_everywhere, 2)
    assert losses[0] == losses[1] > 0
    assert zcomm.failure() == ""


SCRIPT = """
import os, sys, zengine
from zengine.testing import Regression
config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
if os.environ["RANK"] in sys.argv[1:]:
    config["stgae"] = 1
try:
    zengine.initialize(model=Regression(), config=config)
except Exception as error:
    import torch.distributed as dist
    print(type(error).__name__, error, "initialized" * dist.is_initialized(), flush=True)
    sys.exit(1)
"""


def _launch(*bad_ranks: int) -> tuple[list[str], float]:
    """Start two ranks without a launcher; return their outputs and the seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    began_s = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *map(str, bad_ranks)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [1, 1]
    return outputs, time.monotonic() - began_s


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_cannot_read_its_config_joins_the_world_to_say_so(bad: int) -> None:
    outputs, took_s = _launch(bad)
    assert outputs[bad].startswith("ConfigError")
    assert "initialized" not in outputs[bad]
    assert f"rank {bad} failed in initialize(): ConfigError" in outputs[1 - bad]
    assert "stgae: unknown key" in outputs[1 - bad].replace(" = 1", "")
    assert took_s < 45


def test_the_same_wrong_config_everywhere_is_each_ranks_own_error() -> None:
    outputs, _ = _launch(0, 1)
    assert all(text.startswith("ConfigError") and "initialized" not in text for text in outputs)
