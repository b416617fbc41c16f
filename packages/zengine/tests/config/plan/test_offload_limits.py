"""Keys that limit offload and messages, from the config to what is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.config import Facts, load, resolve
from zengine.config.plan.plan import Plan
from zpartition.disk import DiskStore

CPU, CUDA = Facts(world_size=1, replicas=1), Facts(world_size=1, replicas=1, device_type="cuda")


def plan_of(facts: Facts, zero: dict[str, Any], **others: Any) -> Plan:
    return resolve(load({"train_batch_size": 1, "gradient_clipping": 1, "zero_optimization": zero, **others}), facts)


def idle(plan: Plan) -> list[str]:
    return [notice.split(": ")[1].split()[0] for notice in plan.notices if "no effect here" in notice]


FILES = {"device": "nvme", "nvme_path": "/fast"}


@pytest.mark.parametrize(
    ("aio", "calls", "num_bytes"),
    [
        ({}, 8, 1 << 20),
        ({"block_size": 1048576, "queue_depth": 8, "thread_count": 1}, 8, 1 << 20),
        ({"block_size": 131072, "queue_depth": 32, "intra_op_parallelism": 2}, 64, 131072),
        ({"block_size": 5000, "queue_depth": 1}, 1, 8192),
    ],
)
def test_calls_in_flight_are_deepspeeds(aio: dict[str, int], calls: int, num_bytes: int) -> None:
    """One request is split over the threads, each of which has so many calls in its queue."""
    offload = plan_of(CPU, {"stage": 2, "offload_optimizer": FILES}, aio=aio).zero.offload
    assert (offload.num_calls, offload.call_bytes) == (calls, num_bytes)


def test_keys_of_weights_on_nvme_act_there_and_say_where_they_do_not() -> None:
    limits = {"max_in_cpu": 1e9, "buffer_count": 4, "buffer_size": 2e8}
    plan = plan_of(CUDA, {"stage": 3, "offload_param": {**FILES, **limits}})
    assert (plan.zero.offload.host_weight_numel, plan.zero.offload.weight_staging_numel) == (10**9, 8 * 10**8)
    assert not idle(plan)
    plan = plan_of(CUDA, {"stage": 3, "offload_param": {"device": "cpu", **limits}})
    assert idle(plan) == [f"zero_optimization.offload_param.{key}" for key in limits]


def test_cores_of_the_update_act_with_super_offload() -> None:
    key = "zero_optimization.offload_optimizer.cpuadam_cores_perc"
    section = {"device": "cpu", "cpuadam_cores_perc": 0.75}
    plan = plan_of(CUDA, {"stage": 3, "offload_optimizer": {**section, "super_offload": True}})
    assert plan.zero.offload.num_cores(usable=8) == 6
    assert not idle(plan)
    assert plan_of(CUDA, {"stage": 3, "offload_optimizer": {"device": "cpu"}}).zero.offload.num_cores(8) == 0
    assert idle(plan_of(CUDA, {"stage": 3, "offload_optimizer": section})) == [key]
    assert key in idle(plan_of(CPU, {"stage": 3, "offload_optimizer": section}))
    assert key in idle(plan_of(CPU, {"stage": 2, "offload_optimizer": {**FILES, "cpuadam_cores_perc": 0.5}}))


def test_a_limit_of_gathers_at_stage_0_is_said_to_have_no_effect() -> None:
    assert idle(plan_of(CPU, {"stage": 0, "allgather_bucket_size": 5e8})) == [
        "zero_optimization.allgather_bucket_size"
    ]
    assert not idle(plan_of(CPU, {"stage": 1, "allgather_bucket_size": 5e8}))
    assert plan_of(CPU, {"stage": 1, "allgather_bucket_size": "auto"}).zero.gather_numel == 0


def _train(
    zero: dict[str, Any], aio: dict[str, int]
) -> tuple[dict[str, torch.Tensor], list[int], dict[str, int], Any]:
    """Weights, elements of the messages of updated weights, ledger, and options of the stores."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    sections = {"zero_optimization": zero, **({"aio": aio} if aio else {})}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}, **sections}
    made, create = [], DiskStore.create.__func__
    with pytest.MonkeyPatch.context() as patch:

        def noted(cls: type[DiskStore], folder: Any, options: Any, **more: Any) -> DiskStore:
            made.append((options.num_threads, options.chunk_bytes))
            return create(cls, folder, options, **more)

        patch.setattr(DiskStore, "create", classmethod(noted))
        engine = zengine.initialize(model=model, config=config)[0]
    with zcomm.traced([]) as records:
        for step in range(3):
            engine.backward(engine(torch.full((2, 32), 0.1 * step)).square().mean())
            engine.step()
    ledger = engine.parts.partition.ledger()
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()
    return weights, [each.numel for each in records if each.label.startswith("weights[")], ledger, made


def test_an_engine_gathers_in_messages_of_this_size_with_the_same_bits() -> None:
    whole, sent, *_ = run_ranks(_train, 2, {"stage": 2}, {})[0]
    same, pieces, *_ = run_ranks(_train, 2, {"stage": 2, "allgather_bucket_size": 512}, {})[0]
    assert max(pieces) <= 512 < max(sent)
    assert sum(pieces) == sum(sent)
    assert all(torch.equal(whole[name], same[name]) for name in whole)


def test_an_engine_keeps_so_many_weights_on_the_host_and_reads_in_such_calls(tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_unit_size": 1100}
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    whole, *_ = run_ranks(_train, 2, zero, {})[0]
    for max_in_cpu in (0, 1200, 10**9):
        section = {**files, "max_in_cpu": max_in_cpu}
        aio = {"block_size": 4096, "queue_depth": 2, "thread_count": 3}
        weights, _, ledger, made = run_ranks(_train, 2, {**zero, "offload_param": section}, aio)[0]
        assert all(torch.equal(whole[name], weights[name]) for name in whole)
        assert made == ([(6, 4096)] if max_in_cpu < 10**9 else [])
        on_host, on_disk = ledger.get("host parameters", 0) // 4, ledger.get("disk parameters", 0) // 8
        assert on_host + on_disk >= 4 * 1056 // 2
        assert on_host <= max_in_cpu
        assert (on_host > 0) == (max_in_cpu > 0)
        assert (on_disk > 0) == (max_in_cpu < 10**9)
