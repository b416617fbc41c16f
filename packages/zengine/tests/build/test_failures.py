"""A rank that fails alone in `initialize` tells the others; an error of all leaves the world usable."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, zengine
import torch.distributed as dist
from zengine.testing import Regression

GOOD = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0}
GOOD["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
BAD = {
    "key": {"config": {**GOOD, "stgae": 1}},
    "batch": {"config": {**GOOD, "train_batch_size": 7}},
    "model": {"model": "a name"},
    "optimizer": {"optimizer": lambda parameters: "no optimizer"},
}
phase, *bad_ranks = sys.argv[1:]
is_bad = os.environ["RANK"] in bad_ranks
try:
    zengine.initialize(**{"model": Regression(), "config": GOOD, **(BAD[phase] if is_bad else {})})
except Exception as error:
    print(type(error).__name__, error, "and is initialized" * dist.is_initialized(), flush=True)
if len(bad_ranks) == 2:
    engine = zengine.initialize(model=Regression(), config=GOOD)[0]
    print("then", engine.parts.world.world_size, "ranks")
elif is_bad:
    sys.stdin.read()  # until the others have ended, who do not learn of it from the end of this process
sys.exit(1)
"""


def _launch(phase: str, *bad_ranks: int) -> list[list[str]]:
    """Start two ranks without a launcher; return the lines that each prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, phase, *map(str, bad_ranks)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        last = sorted(range(2), key=bad_ranks.__contains__)
        outputs = {rank: children[rank].communicate(timeout=600) for rank in last}
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [1, 1], outputs
    return [outputs[rank][0].splitlines() for rank in range(2)]


@pytest.mark.parametrize(
    ("phase", "bad", "error"),
    [
        ("key", 0, "ConfigError the config dict: 1 problem"),
        ("batch", 1, "ConfigError the config dict: train_batch_size 7"),
        ("model", 1, "TypeError initialize() needs model="),
        ("optimizer", 1, "TypeError "),
    ],
)
def test_the_error_of_one_rank_reaches_the_others_while_it_lives(phase: str, bad: int, error: str) -> None:
    outputs = _launch(phase, bad)
    own, others = outputs[bad], outputs[1 - bad]
    assert own[0].startswith(error)
    assert others[0].startswith(
        f"CollectiveFailed initialize() ended, because another rank failed: rank {bad} failed in initialize(): "
        + error.split()[0]
    )
    assert f"Nothing is wrong on this rank, rank {1 - bad}." in "".join(others)


def test_the_same_error_everywhere_is_each_ranks_own_and_leaves_a_usable_world() -> None:
    for lines in _launch("key", 0, 1):
        assert lines[0].startswith("ConfigError")
        assert "and is initialized" not in "".join(lines)
        assert lines[-1] == "then 2 ranks"
