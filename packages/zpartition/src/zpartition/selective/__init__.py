"""Selective updates: important columns on the device in every step, the rest on the host once in an interval."""

from zpartition.selective.updates import SelectiveUpdates

__all__ = ["SelectiveUpdates"]
