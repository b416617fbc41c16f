"""The collector pauses while files are parsed: it would visit millions of nodes again and again, most of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _without_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()  # syntax trees live until the process ends
        gc.enable()
