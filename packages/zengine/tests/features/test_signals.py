"""A signal to one rank, in any phase, makes all ranks save the same step and leave, or go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
import zengine
from zcomm.testing import run_ranks
from zengine.features.signals import Catcher, StoppedBySignal
from zengine.testing import Regression, rank_batch, small_engine

PHASES = ("initialize", "forward", "backward", "step", "save", "between")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


class Signalled(nn.Module):
    """`Regression` that signals its process in one phase of its second step, on rank 1 only."""

    def __init__(self, phase: str, number: int) -> None:
        super().__init__()
        self.net, self.phase, self.number, self.forwards = Regression(), phase, number, 0

    def send(self, phase: str) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if phase == self.phase and rank == torch.distributed.get_world_size() - 1:
            os.kill(os.getpid(), self.number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 2:
            self.send("forward")
        loss: torch.Tensor = self.net(x)
        if self.forwards == 2 and loss.requires_grad:
            loss.register_hook(lambda grad: self.send("backward"))
        return loss


class Sending(torch.optim.SGD):
    """SGD that signals in the second step."""

    model: Signalled
    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 2:
            self.model.send("step")
        return super().step(closure)


class State(Mapping[str, int]):
    """client_state that signals while it is saved."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        self.on_read = on_read

    def __getitem__(self, key: str) -> int:
        self.on_read()
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def _stops(folder: str, phase: str, config: dict[str, Any]) -> tuple[str, tuple[str, ...], int, int]:
    """Train six steps; return the checkpoint, the signals, the exit code and the number of steps done."""
    model = Signalled(phase, signal.SIGTERM)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        model.send("initialize")
        made = Sending(parameters, lr=0.1)
        made.model = model
        return made

    before = signal.getsignal(signal.SIGTERM)
    config = {"train_micro_batch_size_per_gpu": 2, "signals": {"save_dir": folder}, **config}
    engine = zengine.initialize(model=model, optimizer=optimizer, config=config)[0]
    assert signal.getsignal(signal.SIGTERM) is not before
    try:
        for index in range(6):
            if index == 1:
                model.send("between")
            engine.backward(engine(rank_batch(index)))
            engine.step()
            if phase == "save" and index == 1:
                engine.save_checkpoint(folder, "own", client_state=State(lambda: model.send("save")))
    except StoppedBySignal as stop:
        return stop.folder, stop.signals, int(str(stop.code)), engine.clock.steps
    finally:
        engine.close()
        assert signal.getsignal(signal.SIGTERM) is before
    raise AssertionError("no signal arrived")


def _resumes(folder: str, tag: str) -> tuple[int, dict[str, Any]]:
    engine = small_engine()
    _path, state = engine.load_checkpoint(folder, tag)
    steps = engine.clock.steps
    engine.close()
    return steps, state


@pytest.mark.parametrize(("phase", "stage"), [*((phase, 0) for phase in PHASES), ("backward", 3), ("save", 3)])
def test_a_signal_to_one_rank_in_any_phase_saves_on_all_and_leaves(tmp_path: Path, phase: str, stage: int) -> None:
    steps = {"initialize": 1, "save": 3}.get(phase, 2)
    config = {"zero_optimization": {"stage": stage}, "signals": {"save_dir": str(tmp_path), "exit_code": 75}}
    for folder, signals, code, done in run_ranks(_stops, 2, str(tmp_path), phase, config):
        assert (Path(folder).name, code, done) == (f"global_step{steps}", 75, steps)
        assert signals == ("SIGTERM on rank 1",)
    assert (tmp_path / "latest").read_text().strip() == f"global_step{steps}"
    zckpt.open_checkpoint(tmp_path / f"global_step{steps}").verify()


def _saves_and_goes_on(folder: str) -> tuple[list[str], int]:
    engine = small_engine(signals={"save_dir": folder, "sigterm": "none"}, checkpoint={"async_save": True})
    for index in range(3):
        if index == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        engine.backward(engine(rank_batch(index)))
        engine.step()
    engine.close()
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir()), engine.clock.steps


def test_sigusr1_saves_and_training_goes_on(tmp_path: Path) -> None:
    for names, steps in run_ranks(_saves_and_goes_on, 2, str(tmp_path)):
        assert (names, steps) == (["global_step2"], 3)
    assert _resumes(str(tmp_path), "global_step2") == (2, {"signals": ["SIGUSR1 on rank 0", "SIGUSR1 on rank 1"]})


def test_exit_leaves_without_a_save_so_that_the_loop_can_save_its_own_state(tmp_path: Path) -> None:
    engine = small_engine(signals={"sigusr1": "exit"})
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGUSR1)
    engine.backward(engine(rank_batch(0)))
    with pytest.raises(StoppedBySignal) as caught:
        engine.step()
    assert (caught.value.folder, caught.value.code, caught.value.signals) == ("", 0, ("SIGUSR1 on rank 0",))
    engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    engine.close()
    assert _resumes(str(tmp_path), "global_step1") == (1, {"epoch": 3})


SCRIPT = """
import os, signal, sys
from zengine.testing import rank_batch, small_engine
engine = small_engine(signals={"save_dir": sys.argv[1], "exit_code": 3})
for index in range(1000):
    engine.backward(engine(rank_batch(index)))
    engine.step()
    print(engine.clock.steps, flush=True)
"""


def test_a_process_ends_with_the_exit_code_and_a_committed_checkpoint(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as told:
        child = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, stderr=told, text=True
        )
    assert child.stdout is not None
    assert child.stdout.readline() == "1\n"
    child.terminate()
    last = int((child.stdout.read().split() or ["1"])[-1])  # communicate() would lose what readline read ahead
    code, err = child.wait(timeout=600), (tmp_path / "stderr").read_text()
    assert code == 3, err
    assert "SIGTERM on rank 0: saved" in err
    assert "Traceback" not in err
    assert (tmp_path / "latest").read_text().strip() == f"global_step{last + 1}"


def test_forked_children_end_at_a_signal() -> None:
    engine = small_engine(signals={"sigterm": "exit"})
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    engine.close()


def test_the_last_of_several_engines_restores_the_handler() -> None:
    first, second = (small_engine(signals={"sigterm": "exit"}) for _ in range(2))
    first.close()
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    second.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    dropped = small_engine(signals={"sigterm": "exit"})
    assert dropped.clock.steps == 0
    del dropped
    import gc

    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_failed_initialize_restores_the_handler() -> None:
    with pytest.raises(ValueError, match="no optimizer"):
        small_engine(signals={"sigterm": "exit"}, optimizer={"type": "no optimizer"})
    with pytest.raises(TypeError, match="the schedule"):
        zengine.initialize(
            model=Regression(),
            lr_scheduler=lambda optimizer: _raise(TypeError("the schedule")),
            config={
                "train_batch_size": 2,
                "signals": {"sigterm": "exit"},
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            },
        )


def _raise(error: Exception) -> None:
    raise error


def test_another_thread_cannot_install_handlers() -> None:
    caught: list[Exception] = []

    def run() -> None:
        try:
            Catcher((signal.SIGTERM,)).open()
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert 'section "signals" needs initialize() in the main thread' in str(caught[0])


def test_a_save_needs_a_folder() -> None:
    with pytest.raises(
        zengine.ConfigError, match=r"signals\.sigterm = .checkpoint., but signals\.save_dir is not set"
    ):
        small_engine(signals={"sigterm": "checkpoint"})
    with pytest.raises(zengine.ConfigError, match=r"signals\.exit_code = 3, but signals\.save_dir is not set"):
        small_engine(signals={"exit_code": 3})
    with pytest.raises(zengine.ConfigError, match='Did you mean "sigterm"'):
        small_engine(signals={"SIGTERM": "exit"})


def test_without_the_section_nothing_is_attached() -> None:
    with small_engine() as engine:
        assert [type(each).__name__ for each in engine._features] == ["OptimizerCalls"]
        assert engine.plan.signals.actions == {}
