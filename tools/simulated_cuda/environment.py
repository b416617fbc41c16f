"""The variables that put a process and its children on the simulated device, and the tests that run there.

Standard library only: `tools/dev.py` imports it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CACHE", "FIXED", "SELECTION", "SITE", "pytest_arguments", "simulated"]

SITE = Path(__file__).resolve().parent / "site"
CACHE = SITE.parent.parent.parent / ".cache" / "simulated_cuda"

# A few of each kind: continuous integration runs these.
FIXED = (
    *(
        f"tests/simulated/test_{name}.py"
        for name in ("order", "device", "waits", "host_waits", "captured_step", "quantized")
    ),
    "packages/zpartition/tests/memory/test_mover.py",
    "packages/zpartition/tests/activations",
    "packages/zoptim/tests/backends/gpu/test_launch_device.py",
    "packages/zprecision/tests/test_float8.py",
)
# What `tools/dev.py test --device simulated` runs if no path is given.
SELECTION = (
    *FIXED,
    "tests/simulated",
    "tests/contract/test_table.py::test_every_row_keeps_the_contract[1-float32-1]",
    "tests/contract/test_table.py::test_every_row_keeps_the_contract[1-float32-3]",
    "packages/zpartition/tests/memory",
    "packages/zpartition/tests/offload",
    "packages/zpartition/tests/selective",
    "packages/zpartition/tests/disk",
    "packages/zpartition/tests/tensor",
    "packages/zpartition/tests/experts",
    "packages/zpartition/tests/estimate",
    "packages/zprecision",
    "packages/zckpt/tests/saving",
    "packages/zckpt/tests/loading",
    "packages/zckpt/tests/sources",
    "packages/zckpt/tests/storage",
    "packages/zcomm/tests/collectives",
    "packages/zcomm/tests/groups/test_world.py::test_backend_and_device_follow_the_machine",
    "packages/zengine/tests/build/test_activation_checkpointing.py::test_a_block_is_timed_forwards_and_again",
    "packages/zengine/tests/build/test_assemble.py::test_8_bit_layers_are_refused_by_the_device_and_leave_the_module_free",
    "packages/zengine/tests/build/test_compile.py::test_a_backward_in_halves_is_not_compiled",
    "packages/zengine/tests/build/test_expert_parallel.py::test_a_stage_without_experts_goes_with_one_that_has_some",
    "packages/zengine/tests/build/test_loaders.py",
    "packages/zengine/tests/data",
    "packages/zengine/tests/features/test_zenflow.py",
    "packages/zengine/tests/features/test_trial_run.py::test_at_least_one_step_is_profiled",
    "packages/zengine/tests/engine/test_memory_errors.py::test_limits_count_the_memory_of_a_gpu",
    "packages/zengine/tests/planning/test_advice.py",
    "packages/zengine/tests/planning/test_forecast.py",
    "packages/zengine/tests/telemetry",
    "tests/tools/test_gpu_acceptance_pieces.py",
)


def simulated(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process on the simulated device."""
    paths = [str(SITE), str(SITE.parent.parent), *filter(None, [environ.get("PYTHONPATH")])]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "ZCOMM_TESTING_BACKEND": "cpu:gloo,cuda:nccl",
        # "binaries" of this device are paths of shared objects
        **{f"{name.upper()}_CACHE": str(CACHE / name) for name in ("zoptim", "zprecision")},
    }


def pytest_arguments(arguments: list[str], root: Path) -> list[str]:
    """Return pytest's arguments on the device: with its plugin, and with the selection if no path is given."""
    has_path = any((root / each.partition("::")[0]).exists() for each in arguments if not each.startswith("-"))
    return ["-p", "simulated_cuda.plugin", *arguments, *(() if has_path else SELECTION)]
