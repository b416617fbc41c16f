"""Memory of the switch to generation at stage 3, by the pages that the kernel counts for a rank's process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_lm import TinyLM, engine_of, train
from torch import nn

from zcomm.testing import end_ranks, run_ranks
from zengine.adapters import LoRAConfig, add_lora
from zengine.config import Facts, load, resolve
from zengine.planning.sizes import sizes, switch_bytes
from zengine.rollout import RolloutConfig, SamplingConfig

WIDTH, NUM_BLOCKS, CAPACITY = 512, 8, 40
FEW = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
ZERO = {"stage": 3, "stage3_unit_size": 2_500_000, "stage3_param_persistence_threshold": 0, **FEW}  # a block each
MODEL_BYTES = NUM_BLOCKS * 8 * WIDTH**2 * 4
TARGETS = ["q", "v", "grow", "shrink"]
MERGED_BYTES, SCRATCH_BYTES = NUM_BLOCKS * 6 * WIDTH**2 * 4, 2 * WIDTH**2 * 8
UNIT_BYTES = MODEL_BYTES // NUM_BLOCKS
CACHE_BYTES = 2 * NUM_BLOCKS * CAPACITY * WIDTH * 4  # keys and values of one slot


def sections(size: int) -> dict[str, Any]:
    hybrid = {"enabled": True, "max_out_tokens": CAPACITY, "inference_tp_size": size, "release_inference_cache": True}
    return {"hybrid_engine": hybrid, "zero_optimization": ZERO}


def _pages(*names: str) -> int:
    """Return the bytes of these kinds of pages of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0].rstrip(":") in names)


def _peak_beyond(run: Callable[[], Any]) -> int:
    """Return the most bytes that this process had while `run` ran, beyond those that it had before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _pages("RssAnon", "RssShmem")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run()
    return _pages("VmHWM") - _pages("RssFile") - before


def model(with_adapters: bool) -> nn.Module:
    made = TinyLM(WIDTH, NUM_BLOCKS)
    if with_adapters:
        add_lora(made, LoRAConfig(lora_r=2, target_mods=TARGETS))
    return made


def _switch(size: int, with_adapters: bool) -> list[int]:
    """Return the peaks of two later rollouts, before and after training, beyond the engine without gathered units."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # freed blocks above 64 KiB go back at once
    libc.prctl(41, 1, 0, 0, 0)  # no huge pages, into which the kernel joins small ones with gaps when it has time
    engine = engine_of(3, model(with_adapters), **sections(size))
    sampling, config = SamplingConfig(max_new_tokens=2), RolloutConfig(compare=0)

    def rollout() -> Any:
        return engine.rollout([[1, 2, 3]], n=1, sampling=sampling, config=config)

    rollout()  # recognizes the decoder
    train(engine, 1)
    rollout()  # recognizes it again, after the first step, and loads code
    peaks = []
    for steps in (0, 1):
        train(engine, steps)
        engine.parts.partition.unsharder.pool.clear()
        peaks.append(_peak_beyond(rollout))
    engine.close()
    return peaks


def planned(size: int, world: int, with_adapters: bool) -> int:
    """Return the bytes of the switch by the plan."""
    source = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, **sections(size)}
    plan = resolve(load(source), Facts(world_size=world, replicas=world))
    with torch.device("meta"):
        module = model(with_adapters)
    return switch_bytes(sizes(module, plan, world_size=world, device="cpu"), plan)


@pytest.fixture
def _own_processes() -> Iterator[None]:
    """Fresh ranks, ended afterwards: their malloc is changed for good."""
    end_ranks()
    yield
    end_ranks()


@pytest.mark.usefixtures("_own_processes")
@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize(("world", "size"), [(1, 1), (2, 1), (2, 2)])
def test_a_switch_takes_a_share_of_the_model_and_one_unit(world: int, size: int, with_adapters: bool) -> None:
    copied = 0 if world == 1 else MODEL_BYTES if size == 1 else MODEL_BYTES // size + UNIT_BYTES
    if with_adapters:
        copied += (MERGED_BYTES if size == 1 else 2 * WIDTH**2 * 4) + SCRATCH_BYTES
    assert planned(size, world, with_adapters) == pytest.approx(copied, rel=0.02)  # embeddings, norms, biases
    for peaks in run_ranks(_switch, world, size, with_adapters):
        for peak in peaks:
            if copied:
                wanted = planned(size, world, with_adapters) + CACHE_BYTES // size
                assert peak == pytest.approx(wanted, rel=0.05)
            else:
                assert peak <= CACHE_BYTES + 2**20  # weights are used where they are
