"""Tests of the simulated CUDA device run on it: `tools/dev.py test --device simulated tests/simulated`."""

from __future__ import annotations

import sys

# Without the device only the test that starts it is collected.
collect_ignore = (
    []
    if "simulated_cuda.library" in sys.modules
    else [
        "test_order.py",
        "test_device.py",
        "test_acceptance.py",
        "test_waits.py",
        "test_two_ranks.py",
        "test_paths.py",
    ]
)
