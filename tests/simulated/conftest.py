"""Tests of the simulated CUDA device run on it: `tools/dev.py test --device simulated tests/simulated`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
if str(HERE) not in sys.path:  # stream_scenarios, here and in the rank processes
    sys.path.insert(0, str(HERE))

# Without the device only the tests that start it are collected.
WITHOUT_DEVICE = {"test_branches.py", "test_in_ci.py"}
collect_ignore = (
    []
    if "simulated_cuda.library" in sys.modules
    else [path.name for path in HERE.glob("test_*.py") if path.name not in WITHOUT_DEVICE]
)
