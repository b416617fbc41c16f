"""What leaves the device, by config and machine."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import Facts, load, resolve
from zengine.config.plan.plan import Plan
from zpartition import Offload, Speculation, Tier

CPU, CUDA = Facts(world_size=1, replicas=1), Facts(world_size=1, replicas=1, device_type="cuda")


def plan_of(facts: Facts, zero: dict[str, Any], **others: Any) -> Plan:
    return resolve(load({"train_batch_size": 1, "gradient_clipping": 1, "zero_optimization": zero, **others}), facts)


def test_on_a_cpu_nothing_is_moved_to_the_cpu_and_that_is_said() -> None:
    zero = {"stage": 3, "cpu_offload": True, "offload_param": {"device": "cpu"}}
    plan = plan_of(CPU, zero)
    assert plan.offloads == {"offload_optimizer": "cpu", "offload_param": "cpu"}
    assert (plan.zero.offload.states, plan.zero.offload.weights) == (Tier.DEVICE, Tier.DEVICE)
    said = [notice for notice in plan.notices if "computes on the CPU" in notice]
    assert [notice.split(": ")[1].split()[0] for notice in said] == [
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    ]


def test_on_a_gpu_states_go_to_the_host_as_the_section_says() -> None:
    section = {"device": "cpu", "ratio": 0.75, "pin_memory": False, "super_offload": True}
    plan = plan_of(CUDA, {"stage": 2, "offload_optimizer": section, "sub_group_size": 1e6})
    assert plan.zero.offload == Offload(
        states=Tier.HOST, ratio=0.75, pin=False, speculation=Speculation.LAST_BACKWARD, step_numel=1_000_000
    )
    assert not [notice for notice in plan.notices if "no effect" in notice]


@pytest.mark.parametrize("facts", [CPU, CUDA])
def test_files_are_files_on_every_machine(facts: Facts) -> None:
    section = {"device": "nvme", "nvme_path": "/fast", "buffer_count": 1, "super_offload": True}
    plan = plan_of(facts, {"stage": 2, "offload_optimizer": section}, aio={"thread_count": 6})
    expected = Offload(states=Tier.DISK, directory="/fast", buffer_count=2, num_threads=6)
    assert plan.zero.offload == expected
    assert [notice for notice in plan.notices if "super_offload has no effect here" in notice]
    assert [notice for notice in plan.notices if "buffer_count = 1 counts as 2" in notice]


def test_files_go_to_the_folder_of_the_section_that_has_files() -> None:
    states, weights = {"device": "cpu", "nvme_path": "/slow"}, {"device": "nvme", "nvme_path": "/fast"}
    plan = plan_of(CUDA, {"stage": 3, "offload_optimizer": states, "offload_param": weights})
    assert plan.zero.offload.directory == "/fast"
    (said,) = [notice for notice in plan.notices if "no effect" in notice]
    assert 'offload_optimizer.nvme_path has no effect here: offload_optimizer.device is "cpu"' in said


def test_each_section_says_whether_its_memory_is_pinned_and_the_optimizer_s_counts_for_both() -> None:
    weights = {"device": "cpu", "pin_memory": False}
    plan = plan_of(CUDA, {"stage": 3, "offload_param": weights})
    assert (plan.zero.offload.weights, plan.zero.offload.pin) == (Tier.HOST, False)
    assert not [notice for notice in plan.notices if "pin_memory" in notice]
    plan = plan_of(CUDA, {"stage": 3, "offload_param": weights, "offload_optimizer": {"device": "cpu"}})
    assert plan.zero.offload.pin
    assert [notice for notice in plan.notices if "offload_optimizer.pin_memory decides" in notice]


def test_what_tunes_an_offload_that_is_off_is_said_to_have_no_effect() -> None:
    plan = plan_of(CPU, {"stage": 2, "sub_group_size": 10}, aio={"intra_op_parallelism": 2})
    said = [notice for notice in plan.notices if "the optimizer is not offloaded" in notice]
    assert [notice.split(": ")[1].split()[0] for notice in said] == [
        "zero_optimization.sub_group_size",
        "aio.intra_op_parallelism",
    ]


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_weights_below_stage_3_stay_and_that_is_said_once(device: str) -> None:
    section = {"device": device, "pin_memory": False, "nvme_path": "/fast"}
    plan = plan_of(CUDA, {"stage": 2, "offload_param": section})
    assert plan.zero.offload == plan_of(CUDA, {"stage": 2}).zero.offload
    assert plan.offloads["offload_param"] == "none"
    (said,) = [notice for notice in plan.notices if "weights are sharded" in notice]
    assert said == (
        "dict: zero_optimization.offload_param has no effect here: weights are sharded, and offloaded, from stage 3 "
        "on (stage is 2)"
    )
    assert plan_of(CUDA, {"stage": 2, "offload_param": {"device": "nvme"}}).offloads["offload_param"] == "none"
