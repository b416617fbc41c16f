"""Data loading in a resumable order: the same samples, bit for bit, at any world size and batch size."""

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.data.analysis import DataAnalyzer
    from zengine.data.loaders.base import Loader, RepeatingLoader, StaleIterationError, forever
    from zengine.data.loaders.curriculum import CurriculumLoader
    from zengine.data.loaders.factory import LoaderFactory, make_loader
    from zengine.data.loaders.fetch import BatchFetcher, DevicePrefetcher, make_prefetcher
    from zengine.data.loaders.indexed import MapLoader, SampledLoader
    from zengine.data.loaders.packed import PackedLoader
    from zengine.data.loaders.stream import StreamLoader
    from zengine.data.metrics import MetricError, MetricIndex, length_of
    from zengine.data.order.curriculum import CurriculumOrder, DifficultyType, Limit
    from zengine.data.order.order import BatchIndices, Order
    from zengine.data.order.packing import PackedOrder, Packing, PickingOrder
    from zengine.data.order.schedules import Custom, FixedDiscrete, FixedRoot

__all__ = [
    "BatchFetcher",
    "BatchIndices",
    "CurriculumLoader",
    "CurriculumOrder",
    "Custom",
    "DataAnalyzer",
    "DevicePrefetcher",
    "DifficultyType",
    "FixedDiscrete",
    "FixedRoot",
    "Limit",
    "Loader",
    "LoaderFactory",
    "MapLoader",
    "MetricError",
    "MetricIndex",
    "Order",
    "PackedLoader",
    "PackedOrder",
    "Packing",
    "PickingOrder",
    "RepeatingLoader",
    "SampledLoader",
    "StaleIterationError",
    "StreamLoader",
    "forever",
    "length_of",
    "make_loader",
    "make_prefetcher",
]

RENAMED = {
    "By": "zengine.data.DifficultyType",
    "CurriculumWalk": "zengine.data.CurriculumOrder",
    "Feed": "zengine.data.LoaderFactory",
    "Fetching": "zengine.data.BatchFetcher",
    "Picking": "zengine.data.PickingOrder",
    "Ticket": "zengine.data.BatchIndices",
    "ToDevice": "zengine.data.DevicePrefetcher",
    "delivery_to": "zengine.data.make_prefetcher",
}

_HOME_OF = homes_below(
    __name__,
    {
        "analysis": "DataAnalyzer",
        "loaders.base": "Loader RepeatingLoader StaleIterationError forever",
        "loaders.curriculum": "CurriculumLoader",
        "loaders.factory": "LoaderFactory make_loader",
        "loaders.fetch": "BatchFetcher DevicePrefetcher make_prefetcher",
        "loaders.indexed": "MapLoader SampledLoader",
        "loaders.packed": "PackedLoader",
        "loaders.stream": "StreamLoader",
        "metrics": "MetricError MetricIndex length_of",
        "order.curriculum": "CurriculumOrder DifficultyType Limit",
        "order.order": "BatchIndices Order",
        "order.packing": "PackedOrder Packing PickingOrder",
        "order.schedules": "Custom FixedDiscrete FixedRoot",
    },
)  # imported on first use: the config needs the orders, and neither loaders nor torch

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, RENAMED)
