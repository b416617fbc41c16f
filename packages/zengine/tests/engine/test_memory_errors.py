"""A rank without memory raises one named error with owners, limits and remedies; the others raise it in seconds."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.engine.memory_errors import advice, is_out_of_memory, limits, wanted_bytes
from zengine.testing import Regression, rank_batch, small_engine

HUGE = 1 << 32  # float32 elements: 16 GiB


def limit_memory() -> None:
    """Limit this process to some hundred MiB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + (300 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


class Hungry(nn.Module):
    """`Regression` that asks for too much memory in one phase of its second step, on rank 1 only."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.net, self.phase, self.forwards = Regression(), phase, 0

    def eat(self, phase: str) -> None:
        if phase == self.phase and dist.get_rank() == 1:
            limit_memory()
            torch.zeros(HUGE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 2:
            self.eat("forward")
        loss: torch.Tensor = self.net(x)
        if self.forwards == 2:
            loss.register_hook(lambda grad: self.eat("backward"))
        return loss


class Step(torch.optim.SGD):
    model: Hungry
    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 2:
            self.model.eat("step")
        return super().step(closure)


def _runs_out(phase: str, stage: int) -> tuple[str, str, float]:
    model = Hungry(phase)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = Step(parameters, lr=0.1)
        made.model = model
        model.eat("initialize")
        return made

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
    began_s = time.monotonic()
    try:
        engine = zengine.initialize(model=model, optimizer=optimizer, config=config)[0]
        for index in range(3):
            began_s = time.monotonic()
            engine.backward(engine(rank_batch(index)))
            engine.step()
    except (zengine.OutOfMemory, zcomm.CollectiveFailed) as error:
        return type(error).__name__, str(error), time.monotonic() - began_s
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    raise AssertionError("nothing ran out of memory")


@pytest.mark.parametrize(("phase", "stage"), [("forward", 0), ("forward", 3), ("backward", 0), ("step", 1)])
def test_one_rank_without_memory_names_it_and_the_others_learn_it_in_seconds(phase: str, stage: int) -> None:
    other, own = run_ranks(_runs_out, 2, phase, stage)
    assert own[0] == "OutOfMemory"
    first, *rest = own[1].splitlines()
    assert first.startswith(f"rank 1 ran out of memory in {phase}() (micro-step 1 of 1, step 1): it wanted 16.00 GiB")
    assert "DefaultCPUAllocator: can't allocate memory" in first
    text = "\n".join(rest)
    assert "Memory of this rank by owner" in text
    assert "buckets: " in text
    assert "limit of virtual memory (ulimit -v): " in text
    assert '"train_micro_batch_size_per_gpu": 1 instead of 2, and "gradient_accumulation_steps": 2' in text
    assert other[0] == "CollectiveFailed"
    assert f"rank 1 ran out of memory in {phase}()" in other[1]
    assert max(other[2], own[2]) < 40  # far from the time limit of the collective that the other waits in


class Greedy(Regression):
    wants = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wants:
            torch.zeros(self.wants)
        return super().forward(x)


def _retries() -> float:
    model = Greedy()
    engine = small_engine(model)
    model.wants = 1 << 50
    with pytest.raises(torch.OutOfMemoryError, match=r"ran out of memory in forward\(\)"):
        engine(rank_batch(0))
    model.wants = 0
    engine.backward(engine(rank_batch(0)))
    report = engine.step()
    engine.close()
    assert report is not None
    return float(report.loss)


def test_ranks_that_all_run_out_can_try_again() -> None:
    first, second = run_ranks(_retries, 2)
    assert first == second


def _is_killed() -> str:
    engine = small_engine()
    engine.backward(engine(rank_batch(0)))
    engine.step()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.backward(engine(rank_batch(1)))
    engine.step()
    return "trained on"


def test_a_killed_rank_is_named_with_the_likely_reason() -> None:
    with pytest.raises(Exception, match="if memory was short, by the system") as caught:
        run_ranks(_is_killed, 2)
    assert "Rank 1 is gone: its process has ended" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 17179869184 bytes. Error", 17179869184),
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", 5 << 29),
        ("Unable to allocate 7.00 MiB for an array with shape", 7 << 20),
        ("std::bad_alloc", 0),
    ],
)
def test_allocators_say_how_much_they_wanted(text: str, wanted: int) -> None:
    assert wanted_bytes(text) == wanted
    assert is_out_of_memory(RuntimeError(text))


def test_other_errors_are_no_memory_errors() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(FileNotFoundError(2, "No such file"))
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(None)


def test_advice_follows_the_config() -> None:
    with small_engine(train_micro_batch_size_per_gpu=1, bf16={"enabled": True}) as engine:
        assert [line.split(":")[0] for line in advice(engine.plan)] == [
            "activation checkpointing of the model's blocks (model.gradient_checkpointing_enable())",
            '"zero_optimization"',
        ]


def test_limits_count_the_memory_of_a_gpu() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = limits(device)
    assert "available on this host" in found
    assert ("free on the device" in found) == (device.type == "cuda")
