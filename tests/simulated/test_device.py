"""The simulated device behaves as torch's CUDA: memory, random numbers, graphs, mixed devices, host waits."""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch
from torch import nn

from simulated_cuda.library import host_waits, set_schedule, stats


def test_a_model_trains_as_on_the_cpu_under_every_schedule() -> None:
    torch.manual_seed(0)
    on_cpu = nn.Sequential(nn.Linear(12, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 5))
    on_gpu = copy.deepcopy(on_cpu).to("cuda")
    data = torch.randn(7, 12)
    for schedule in ("early", "late", "random:3"):
        set_schedule(schedule)
        for module, values in ((on_cpu, data), (on_gpu, data.to("cuda"))):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            module.zero_grad()
            nn.functional.cross_entropy(module(values), torch.arange(7, device=values.device) % 5).backward()
            optimizer.step()
        for one, other in zip(on_cpu.parameters(), on_gpu.parameters()):
            assert other.is_cuda
            torch.testing.assert_close(one, other.cpu(), rtol=1e-5, atol=1e-5)


def test_a_tensors_address_is_its_memory() -> None:
    values = torch.arange(5, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    assert list((ctypes.c_int32 * 5).from_address(values.data_ptr())) == [0, 1, 2, 3, 4]
    assert values[2:].data_ptr() == values.data_ptr() + 8
    assert values.untyped_storage().nbytes() == 20


def test_views_share_storage_and_storages_can_be_swapped() -> None:
    flat = torch.zeros(12, device="cuda")
    flat[4:8].view(2, 2).t().fill_(3)
    assert flat.cpu().tolist() == [0] * 4 + [3] * 4 + [0] * 4
    other = torch.empty(0, device="cuda")
    other.set_(flat.untyped_storage(), 4, (2, 2), (2, 1))
    assert other.cpu().eq(3).all()
    other.data = torch.ones(3, device="cuda")
    assert other.cpu().tolist() == [1, 1, 1]


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.ones(())).cpu().eq(2).all()


def test_memory_readings_follow_allocations() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    values = torch.empty(1 << 18, device="cuda")
    assert torch.cuda.memory_allocated() == before + 2**20
    del values
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 2**20
    assert torch.cuda.memory_reserved() >= 2**20
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total == torch.cuda.get_device_properties(0).total_memory


def test_freed_memory_is_handed_out_again() -> None:
    first = torch.empty(70_001, device="cuda")
    address, num_reused = first.data_ptr(), stats()["num_reused"]
    del first
    assert torch.empty(70_001, device="cuda").data_ptr() == address
    assert stats()["num_reused"] == num_reused + 1


def test_random_numbers_have_a_state_of_their_own() -> None:
    torch.manual_seed(5)
    torch.cuda.manual_seed(7)
    state, host_state = torch.cuda.get_rng_state(), torch.get_rng_state()
    first = torch.rand(9, device="cuda")
    nn.functional.dropout(torch.ones(99, device="cuda"))
    assert torch.equal(torch.get_rng_state(), host_state)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(9, device="cuda").cpu(), first.cpu())
    generator = torch.Generator(device="cuda").manual_seed(7)
    assert torch.equal(torch.rand(9, device="cuda", generator=generator).cpu(), first.cpu())


@pytest.mark.parametrize("schedule", ["early", "late"])
def test_a_graph_repeats_its_work_on_the_same_memory(schedule: str) -> None:
    set_schedule(schedule)
    values, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = values * 2
        total.add_(nn.functional.softplus(doubled))
    assert total.cpu().eq(0).all(), "capture runs nothing"
    for value in (1.0, 2.0):
        values.fill_(value)
        graph.replay()
    expected = sum(nn.functional.softplus(torch.full((4,), 2 * value)) for value in (1.0, 2.0))
    assert torch.equal(total.cpu(), torch.as_tensor(expected))


def test_waits_of_the_host_are_counted_by_their_cause() -> None:
    before = host_waits().get("aten::_local_scalar_dense", 0)
    values = torch.ones(3, device="cuda")
    values.sum().item()
    assert host_waits()["aten::_local_scalar_dense"] == before + 1
    assert not torch.ones(1, device="cuda").mul(2).is_pinned()
    assert host_waits()["aten::_local_scalar_dense"] == before + 1
