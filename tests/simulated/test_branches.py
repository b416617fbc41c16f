"""Branches on the device's type: the list of `branches.txt` is complete, and names tests that exist."""

from __future__ import annotations

from pathlib import Path

from simulated_cuda.branches import NOT_TAKEN, find_sites, read_list

ROOT = Path(__file__).parents[2]

# Branches of cuda that no test on the simulated device takes, and why not; "open" is work to do.
NOT_HERE = {
    "packages/zcomm/src/zcomm/collectives/verbs.py "
    "| barrier "
    "| device.type == 'cuda'": "open: a group of NCCL alone, on two ranks",
    "packages/zcomm/src/zcomm/testing/rank.py "
    "| _prepare "
    "| torch.get_default_device().type != 'cpu'": "undoes the default device of a test; none sets one there",
    "packages/zengine/src/zengine/commands/config.py "
    "| facts_of "
    "| device == 'cuda'": "a plan for a GPU that this machine lacks",
    "packages/zengine/src/zengine/config/plan/telemetry.py "
    "| profiling_notices "
    "| facts.device_type != 'cuda'": "open: a memory snapshot in an engine on the device",
    "packages/zengine/src/zengine/config/plan/zero.py "
    "| _idle_weight_keys "
    "| zero.offload_param.device == 'cpu'": "asks for a word of the config, not for a device",
    "packages/zengine/src/zengine/deepspeed_getters.py "
    "| PlanGetters "
    "| p.offloads.get('offload_optimizer', 'none') == 'cpu'": "asks for a word of the config, not for a device",
    "packages/zengine/src/zengine/features/profiler_window.py "
    "| ProfilerWindow._on_cuda "
    "| self._run.parts.world.device.type == 'cuda'": "open: Kineto knows no simulated device",
    "packages/zengine/src/zengine/planning/explanation.py "
    "| Explanation.text "
    "| self.facts.device_type == 'cuda'": "text only",
    "packages/zoptim/src/zoptim/backends/stats.py "
    "| _squares "
    "| grads[0].device.type == 'cpu'": "rows of dtypes that have no kernel, such as float64",
    "packages/zoptim/src/zoptim/optimizers/lamb.py "
    "| LAMB._update_cut "
    "| found_inf.device.type == 'cpu'": "open: LAMB with tensors cut between ranks, on the device",
    "packages/zpartition/src/zpartition/_compat.py "
    "| _is_for_the_cpu_kernel "
    "| tensor.is_cpu": "open: attention of sequence ranks",
    "packages/zpartition/src/zpartition/offload/offload_states.py "
    "| _tensors "
    "| each.param_placement.span.is_cpu": "open: states of stage 3 with weights on the device, moved to the host",
    "packages/zpartition/src/zpartition/tensor/random_state.py "
    "| _is_capturing "
    "| x.is_cuda": "open: tensor-parallel dropout in a captured graph",
    "packages/zprecision/src/zprecision/inspect.py "
    "| _chunk_numel "
    "| shard.device.type == 'cpu'": "open: checksums of shards on the device",
}


def test_the_list_has_every_branch_and_nothing_else() -> None:
    listed, sites = set(read_list()), {str(site) for site in find_sites()}
    remedy = "write the list again: see the module simulated_cuda.branches"
    assert sites - listed == set(), remedy
    assert listed - sites == set(), remedy


def test_every_branch_is_taken_on_the_device_or_says_why_not() -> None:
    assert {site for site, test in read_list().items() if test == NOT_TAKEN} == set(NOT_HERE)


def test_the_tests_that_take_branches_exist() -> None:
    tests = {test for test in read_list().values() if test != NOT_TAKEN}
    assert tests
    for test in sorted(tests):
        path, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2].partition('[')[0]}(" in (ROOT / path).read_text(), test
