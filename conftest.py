"""Loads the plugin that chooses and orders the tests (tools/schedule.py), here and in every worker."""

from __future__ import annotations

from schedule import (
    pytest_addoption,
    pytest_collection,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_report_header,
)

__all__ = [
    "pytest_addoption",
    "pytest_collection",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_report_header",
]
