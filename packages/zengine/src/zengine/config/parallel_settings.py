"""The settings that split a model over ranks: one class a section, and how many ranks each kind of split takes.

A degree that nobody can ask for yet is a plain field here, whose key the table (compat_parallel.py) refuses; the one
who brings the split makes it a `setting`, and everything behind it is there.
"""

from __future__ import annotations

import attrs

from zengine.config.kinds import whole
from zengine.config.table import setting


@attrs.frozen(kw_only=True)
class TensorRanks:
    """tensor_parallel.tp: DeepSpeed's second way to say the size."""

    tp_size: int = setting(whole(1), 1, "the same as autotp_size")


@attrs.frozen(kw_only=True)
class TensorParallel:
    """tensor_parallel: layers split over ranks that see the same samples."""

    autotp_size: int = setting(whole(0), 0, "ranks that share the layers of one copy; 0 and 1: every rank has all")
    tp: TensorRanks = TensorRanks()


@attrs.frozen(kw_only=True)
class PipelineStages:
    """pipeline."""

    stages: int = 1


@attrs.frozen(kw_only=True)
class ExpertParallel:
    """expert_parallel."""

    autoep_size: int = 1
