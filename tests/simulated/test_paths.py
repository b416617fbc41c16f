"""Paths of cuda that the packages' own tests, whose inputs are on the CPU, do not take."""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path

import pytest
import torch

import zckpt
import zcomm
import zengine
import zengine.config
import zengine.planning.measured as measured
import zoptim
import zprecision
import zprecision.policy
from simulated_cuda.library import host_waits
from simulated_cuda.torch_cuda import CAPABILITY, NAME, TOTAL_MEMORY
from zengine.build.activation_checkpointing import _log_time
from zengine.commands.config import facts_of
from zengine.commands.env import _gpus, problems
from zengine.commands.plan import _room
from zengine.flops.profiler import _timing
from zengine.planning.explanation import explain
from zengine.telemetry.instants import DeviceInstants
from zengine.telemetry.telemetry import _make_stopwatch
from zoptim.rules.muon import compute_format
from zpartition.activations.stores import ArenaStore, HostStore
from zpartition.activations.streams import RandomStreams
from zpartition.disk.memory import MemorySpan
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.random_state import rank_random_state
from zprecision._compat import has_scaled_matmul
from zprecision.float8 import _device_name

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("store", [HostStore(), ArenaStore(2, on_host=True), ArenaStore(2)], ids=repr)
def test_stored_activations_come_back_and_their_slots_are_used_again(store: HostStore | ArenaStore) -> None:
    for value in range(4):
        flat = torch.full((32,), float(value), device=DEVICE)
        restore = store.put(flat)
        flat.fill_(-1)
        back = restore()
        del restore
        assert back.device == DEVICE
        assert back.eq(value).all()


def test_named_random_streams_are_the_devices() -> None:
    streams = RandomStreams(DEVICE)
    streams.seed_model_parallel(3, rank=1)
    before = torch.cuda.get_rng_state()
    with streams.fork():
        first = torch.rand(4, device=DEVICE)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    streams.reseed(3, rank=1)
    with streams.fork():
        assert torch.equal(torch.rand(4, device=DEVICE), first)


def test_gradients_on_the_device_are_inspected_there() -> None:
    grads = [torch.full((300,), 2.0, device=DEVICE), torch.full((5,), 1.0, device=DEVICE)]
    stats = zoptim.grad_stats(grads)
    assert stats.norm.device == DEVICE
    assert stats.norm.item() == pytest.approx(1205**0.5)
    assert stats.divisor(max_norm=1.0, loss_scale=4.0).item() == pytest.approx(1205**0.5, rel=1e-5)
    assert zoptim.sum_of_squares(grads).item() == pytest.approx(1205)
    assert compute_format(torch.zeros(2, 2, device=DEVICE)).dtype is torch.bfloat16


def test_hardware_questions_are_answered_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_scaled_matmul(DEVICE)
    assert _device_name(DEVICE) == f"{NAME} of capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    monkeypatch.setattr(zprecision.policy, "_EDGE_ELSEWHERE", 8)
    monkeypatch.setattr(zprecision.policy, "_BUDGET_S", 0.0)
    assert zprecision.policy.measure_bf16_speedup(DEVICE) > 0
    (name, text), *more = _gpus()
    assert (name, more) == ("cuda:0", [])
    assert NAME in text
    assert "bf16" not in dict(problems())
    facts = facts_of(zengine.config.load({"train_batch_size": 1}), 1)
    assert facts.device_type == "cuda"
    assert _room(argparse.Namespace(memory="", world=1), facts) == TOTAL_MEMORY


def test_tensors_of_the_device_are_quantized_without_the_kernels_of_the_cpu() -> None:
    weight, x = torch.arange(96.0).view(3, 32), torch.linspace(-1, 1, 32).view(1, 32)
    expected = zprecision.quantize(weight, zprecision.Int8(group=32))
    found = zprecision.quantize(weight.to(DEVICE), zprecision.Int8(group=32))
    assert found.codes.device == DEVICE
    assert torch.equal(found.codes.cpu(), expected.codes)
    product = zprecision.linear(x.to(DEVICE), found)
    assert product.device == DEVICE
    torch.testing.assert_close(product.cpu(), zprecision.linear(x, expected))


def test_timers_wait_for_the_device(caplog: pytest.LogCaptureFixture) -> None:
    before = host_waits().get("synchronize the device", 0)
    synchronize, _ = _timing(DEVICE)
    synchronize()
    with caplog.at_level(logging.INFO), _log_time(DEVICE, "checkpointed forward"):
        torch.ones(3, device=DEVICE).sum()
    assert host_waits()["synchronize the device"] == before + 3
    assert isinstance(_make_stopwatch(DEVICE)._device, DeviceInstants)


def test_the_planner_reads_the_allocators_peak() -> None:
    meter = measured._CudaMeter()
    meter.reset()
    before = meter.current()
    values = torch.empty(1 << 18, device=DEVICE)
    assert meter.current() - before == values.nbytes
    del values
    assert meter.peak() - before >= 2**20


def test_states_move_to_the_host_and_back() -> None:
    zcomm.init()
    model = torch.nn.Linear(32, 8)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    data = torch.ones(4, 32, device=DEVICE, dtype=torch.bfloat16)
    zcomm.barrier()
    with contextlib.closing(engine):
        for offloads in (False, True):
            if offloads:
                allocated = torch.cuda.memory_allocated()
                engine.offload_states()
                offloaded = torch.cuda.memory_allocated()
                assert offloaded < allocated
                engine.reload_states()
                states_bytes = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
                assert torch.cuda.memory_allocated() >= offloaded + states_bytes
            engine.backward(engine(data).float().square().mean())
            engine.step()
        assert engine.get_global_grad_norm() is not None
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    zcomm.init().close()


def test_lamb_skips_by_a_flag_on_the_device() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 4, device=DEVICE))
    optimizer = zoptim.LAMB([weight], lr=0.1)
    for flag in (1.0, 0.0):
        weight.grad = torch.ones_like(weight)
        optimizer.found_inf = torch.full((), flag, device=DEVICE)
        optimizer.step()
        assert weight.eq(1).all().item() == bool(flag)


def test_the_planner_measures_training_on_the_device() -> None:
    zcomm.init()
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}

    def start(model: torch.nn.Module) -> zengine.Engine:
        return zengine.initialize(model=model, config=config)[0]

    class Loss(torch.nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values).square().mean()

    found = measured.measure(
        lambda: Loss(64, 64), lambda size: torch.ones(size, 64), start, micro_batch=2, device="cuda"
    )
    assert found.peak >= found.between_steps > 4 * 64 * 64 * 3
    zcomm.init().close()


def test_a_region_of_a_file_is_not_read_into_device_memory() -> None:
    with pytest.raises(ValueError, match="pass a contiguous CPU tensor"):
        MemorySpan.of(torch.zeros(4, device=DEVICE), 16)


def test_sequence_ranks_draw_their_own_numbers_on_both_devices() -> None:
    with contextlib.ExitStack() as stack:
        state = torch.cuda.get_rng_state()
        stack.enter_context(rank_random_state(ModelParallelGroup(None), DEVICE))
        assert not torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_gradients_are_read_by_torch_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoptim.backends.stats.backends.reason_without_kernels", lambda device: "no CuPy")
    assert zoptim.grad_stats([torch.full((9,), 2.0, device=DEVICE)]).norm.item() == 6
    stats = zprecision.inspect([torch.full((4096,), 2.0, device=DEVICE, dtype=torch.bfloat16)])
    assert stats.norm.item() == pytest.approx(128, rel=1e-7)


def test_a_plan_for_this_device_says_so_and_another_devices_plan_too(tmp_path: Path) -> None:
    config = zengine.config.load({"train_batch_size": 1, "profiler": {"enabled": True, "memory_snapshot": True}})
    facts = facts_of(config, 1, "cuda")
    plan = zengine.config.resolve(config, facts)
    assert not any("memory_snapshot" in notice for notice in plan.notices)
    assert "(GPU)" in explain(config, plan, facts, torch.nn.Linear(2, 2), "a model").text()


def test_a_plan_for_a_device_that_is_not_here_expects_fast_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert facts_of(zengine.config.load({"train_batch_size": 1}), 1, "cuda").bf16_is_faster


def test_the_profiler_traces_a_window_on_the_device(tmp_path: Path) -> None:
    window = {"enabled": True, "start_step": 1, "steps": 1, "folder": str(tmp_path), "memory_snapshot": True}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "profiler": window}
    with contextlib.closing(zengine.initialize(model=torch.nn.Linear(32, 8), config=config)[0]) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 32, device=DEVICE)).square().mean())
            engine.step()
    assert [path for path in tmp_path.iterdir() if "trace" in path.name]
    zcomm.init().close()


def test_the_threads_of_a_checkpoint_work_on_the_callers_stream(tmp_path: Path) -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        values = {name: torch.full((3_000_000,), 1.0, device=DEVICE).mul_(index) for index, name in enumerate("abc")}
        zckpt.save(tmp_path, "saved", tensors=values)
        live = {name: torch.zeros_like(value) for name, value in values.items()}
        zckpt.load(tmp_path, tensors=live)
        assert all(live[name].equal(values[name]) for name in values)
