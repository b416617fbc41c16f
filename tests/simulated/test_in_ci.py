"""A fixed part of the tests runs on the simulated CUDA device in every run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulated_cuda.build import reason_without_build
from simulated_cuda.environment import FIXED, SELECTION

ROOT = Path(__file__).parents[2]
ON_DEVICE = "simulated_cuda.library" in sys.modules


@pytest.mark.timeout(1500)
@pytest.mark.skipif(ON_DEVICE, reason="this run is on the simulated device")
def test_the_fixed_part_passes_on_the_simulated_device() -> None:
    reason = reason_without_build()
    if reason is not None:
        pytest.skip(f"no simulated CUDA device: {reason}")
    command = [sys.executable, "tools/dev.py", "--here", "test", "--device", "simulated", "-q", "-n", "2", *FIXED]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_every_selected_path_exists() -> None:
    assert [path for path in SELECTION if not (ROOT / path.partition("::")[0]).exists()] == []
