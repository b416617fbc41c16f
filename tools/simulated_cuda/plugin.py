"""Pytest on the simulated device: each test has a schedule, and fails on an access that nothing orders.

The schedule of a test follows from its name, so that a failure repeats and a run of many tests takes all schedules.
SIMULATED_CUDA_SCHEDULE chooses one for all tests.  The order is proved under every schedule; the schedules are for
bits.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
import torch  # noqa: F401 - loads the device

from simulated_cuda.library import library, set_schedule, take_violations
from simulated_cuda.ranks import SCHEDULE_VARIABLE

SCHEDULES = ("early", "late", "random:1", "random:2")


def schedule_of(name: str) -> str:
    """Return the schedule of the test `name`: the variable's, or one that its name chooses."""
    return SCHEDULES[zlib.crc32(name.encode()) % len(SCHEDULES)]


def pytest_report_header() -> str:
    return f"device: simulated CUDA, schedule: {os.environ.get(SCHEDULE_VARIABLE) or 'by the name of the test'}"


@pytest.fixture(autouse=True)
def _simulated_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose the schedule, and fail the test if an access was out of order, even if it swallowed the error."""
    schedule = os.environ.get(SCHEDULE_VARIABLE) or schedule_of(request.node.nodeid)
    monkeypatch.setenv(SCHEDULE_VARIABLE, schedule)
    set_schedule(schedule)
    library().sim_set_stream(0)
    take_violations()
    yield
    found = take_violations()
    library().sim_reset_order()  # what a failed test left in flight is not the next one's concern
    if found:
        pytest.fail("\n".join(["an access is not ordered:", *found]), pytrace=False)
