"""An elastic job loses a host and gains one, and its losses stay those of an undisturbed run.

It goes on from its newest checkpoint each time.  With diloco a host is a replica group.  Losing one costs the round
that has not ended: the others go on from the weights of the last exchange.

Each "host" is a `zengine run --elastic` of its own on loopback.  The first one keeps the list of hosts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = """
import sys
import time
from pathlib import Path

import torch
import zengine
from torch import nn
from zengine.data import forever

folder, last, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch):
        return (self.layers(batch[:, :4]) - batch[:, 4:]).square().mean()


config = {
    "elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2, 3], "version": 0.1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 1},
}
data = list(torch.randn(96, 5, generator=torch.Generator().manual_seed(1)))
engine, _, loader, _ = zengine.initialize(model=Net(), training_data=data, config=config)
if folder.exists() and any(folder.iterdir()):
    engine.load_checkpoint(str(folder))
batches = iter(forever(loader))
while engine.global_steps < last and not (folder.parent / "enough").exists():
    engine.backward(engine(next(batches)))
    report = engine.step()
    if report is not None:
        if engine.global_rank == 0:  # before the save: a step that is killed in between is made and written again
            with open(folder.parent / "losses", "a") as lines:
                lines.write(f"{report.step} {engine.world_size} {report.loss!r}\\n")
        engine.save_checkpoint(str(folder))
        time.sleep(pause_s)
engine.close()
"""


ROUND = 4  # steps
EVEN = '"max_train_batch_size": 12, "micro_batch_sizes": [1, 2, 3]'
UNEVEN = '"max_train_batch_size": 3, "micro_batch_sizes": [3]'  # two ranks take one sample and two
GROUPS = SCRIPT.replace('"zero_optimization": {"stage": 1}', f'"diloco": {{"sync_every": {ROUND}}}').replace(
    "        engine.save_checkpoint(str(folder))\n",
    f"        if report.step % {ROUND} == 0:\n            engine.save_checkpoint(str(folder))\n",
)


@contextlib.contextmanager
def host(folder: Path, port: int, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one host of the job."""
    command = [sys.executable, "-m", "zengine", "run", "--elastic", "1:2", "--nproc", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            [*command, str(folder / "train.py"), str(folder / "checkpoints"), "10000", "0.2"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            end(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_store(port: int) -> None:
    """Wait until the list of hosts is kept: of two on loopback, the one that binds the port first keeps it."""
    deadline = time.monotonic() + 300
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline, f"nothing listens at port {port}"
        time.sleep(0.1)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a host: torchrun and its ranks at once."""
    for pid in [*children(process), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def history(folder: Path) -> list[tuple[int, int, float]]:
    """Return (step, world size, loss) of every line so far."""
    path = folder / "losses"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), int(world), float(loss)) for step, world, loss in map(str.split, lines)]


def wait_for(folder: Path, reached: Callable[[list[tuple[int, int, float]]], bool], what: str) -> None:
    deadline = time.monotonic() + 600
    while not reached(history(folder)):
        assert time.monotonic() < deadline, (what, history(folder)[-3:], logs(folder))
        time.sleep(0.2)


def logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log")))


def worlds(lines: list[tuple[int, int, float]]) -> list[int]:
    """Return the world sizes in their order, each change once."""
    found: list[int] = []
    for _, world, _ in lines:
        if found[-1:] != [world]:
            found.append(world)
    return found


@pytest.mark.parametrize("batch", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hosts_come_and_go_and_losses_stay_those_of_one_rank(tmp_path: Path, batch: str) -> None:
    assert SCRIPT.count(EVEN) == 1
    job, alone = tmp_path / "job", tmp_path / "alone"
    for folder in (job, alone):
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT.replace(EVEN, batch))
    port = free_port()
    with host(job, port, "first") as first:
        wait_for(job, lambda lines: len(lines) > 1, "the first host trains alone")
        with host(job, port, "second"):
            wait_for(job, lambda lines: [world for _, world, _ in lines[-3:]] == [2] * 3, "a second one joins")
        wait_for(job, lambda lines: worlds(lines) == [1, 2, 1] and lines[-1][0] > 5, "the first goes on alone")
        with host(job, port, "third") as third:
            wait_for(job, lambda lines: worlds(lines) == [1, 2, 1, 2], "a third one joins")
            (job / "enough").touch()
            assert first.wait(timeout=600) == third.wait(timeout=600) == 0, logs(job)
    found = {step: loss for step, _, loss in history(job)}
    assert sorted(found) == list(range(1, len(found) + 1))  # no step is missing

    command = [sys.executable, str(alone / "train.py"), str(alone / "checkpoints"), str(len(found)), "0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for step, world, loss in history(alone):
        assert world == 1
        assert found[step] == pytest.approx(loss, rel=1e-5), step


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_lost_replica_group_costs_one_round(tmp_path: Path) -> None:
    assert GROUPS.count("diloco") == 1
    assert GROUPS.count(f"% {ROUND} == 0") == 1
    (tmp_path / "train.py").write_text(GROUPS)
    port = free_port()
    with host(tmp_path, port, "first") as first:
        wait_for_store(port)
        with host(tmp_path, port, "second"):
            steps = ROUND + 2  # with an exchange among them
            wait_for(tmp_path, lambda lines: [world for _, world, _ in lines[-steps:]] == [2] * steps, "two train")
        wait_for(tmp_path, lambda lines: worlds(lines)[-2:] == [2, 1] and lines[-1][0] > 4 * ROUND, "one goes on")
        (tmp_path / "enough").touch()
        assert first.wait(timeout=600) == 0, logs(tmp_path)
    lines = history(tmp_path)
    change = max(index for index in range(1, len(lines)) if lines[index - 1][1] == 2 and lines[index][1] == 1)
    assert lines[change][0] % ROUND == 1  # begins at an exchange
    assert 0 <= lines[change - 1][0] - lines[change][0] + 1 <= ROUND  # steps that are lost
    assert "was saved by 2 replica groups, and this run has 1" in (tmp_path / "first.log").read_text()
    assert lines[-1][2] < lines[0][2]
