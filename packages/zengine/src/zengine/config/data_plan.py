"""What the data sections resolve to: frozen values, one for each thing that is made from them."""

from __future__ import annotations

from typing import Any

import attrs

from zengine.data.curriculum import By
from zengine.data.packing import Packing
from zengine.data.schedules import Schedule


@attrs.frozen(kw_only=True)
class MetricPlan:
    """One metric of a curriculum of samples."""

    name: str
    schedule: Schedule
    by: By
    parts: int  # of percentiles: the difficulty that stands for all samples
    samples_path: str  # "" with `metrics_path`: the lengths of the samples, measured at start
    metrics_path: str


@attrs.frozen(kw_only=True)
class PackingPlan:
    """Dynamic batching."""

    packing: Packing
    lengths_path: str  # "": measured at start
    lr_scaling: str  # "linear" | "sqrt" | "none"


@attrs.frozen(kw_only=True)
class LtdPlan:
    """Random-LTD."""

    schedule: Schedule
    num_layers: int
    layer_ids: tuple[int, ...]
    mask_name: str  # keyword of the mask; "": none
    is_causal: bool  # masks without a batch are triangles
    sequence_axis: int  # of the hidden state: 1, or 0 where the batch comes second


@attrs.frozen(kw_only=True)
class DataPlan:
    """How the loader walks through the data, and what features do to it.  An empty tuple says "off"."""

    drop_last: bool = False  # leave out the last, partial batch of an epoch
    seed: int = 1234  # of the order of samples (data_efficiency.seed)
    num_workers: int = 0  # processes that fetch samples
    pin_memory: bool = False  # page-locked batches
    prefetch: int = 1  # batches on the device ahead of their use; 0: batches stay on the host
    num_epochs: int = 1000  # of one iteration of a curriculum's loader
    metrics: tuple[MetricPlan, ...] = ()  # curriculum of samples
    packing: tuple[PackingPlan, ...] = ()  # dynamic batching: one or none
    seqlen: tuple[Schedule, ...] = ()  # curriculum of lengths: one or none
    ltd: tuple[LtdPlan, ...] = ()  # random-LTD: one or none
    rows: tuple[tuple[str, Any], ...] = attrs.field(default=(), eq=False)  # keys with their values, for people

    @property
    def needs_data(self) -> str:
        """The section that cannot act without training_data; "" if there is none."""
        if self.metrics:
            return "data_efficiency.data_sampling.curriculum_learning"
        return "data_efficiency.data_sampling.dynamic_batching" if self.packing else ""
