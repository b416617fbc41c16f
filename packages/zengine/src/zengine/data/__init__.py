"""Data loading with a resumable order: bit for bit the same for any number of ranks and any batch size."""

from zengine.data.analysis import DataAnalyzer
from zengine.data.files.metrics import MetricError, MetricIndex, length_of
from zengine.data.loaders.base import Loader, StaleIterationError
from zengine.data.loaders.curriculum import CurriculumLoader
from zengine.data.loaders.delivery import ToDevice, delivery_to
from zengine.data.loaders.feed import Feed
from zengine.data.loaders.fetch import Fetching
from zengine.data.loaders.indexed import MapLoader
from zengine.data.loaders.make import make_loader
from zengine.data.loaders.packed import PackedLoader
from zengine.data.loaders.repeat import RepeatingLoader, forever
from zengine.data.loaders.sampled import SampledLoader
from zengine.data.loaders.stream import StreamLoader
from zengine.data.order.curriculum import By, CurriculumWalk, Limit
from zengine.data.order.order import Order, Ticket
from zengine.data.order.packing import PackedOrder, Packing, Picking
from zengine.data.order.schedules import Custom, FixedDiscrete, FixedRoot

__all__ = [
    "By",
    "CurriculumLoader",
    "CurriculumWalk",
    "Custom",
    "DataAnalyzer",
    "Feed",
    "Fetching",
    "FixedDiscrete",
    "FixedRoot",
    "Limit",
    "Loader",
    "MapLoader",
    "MetricError",
    "MetricIndex",
    "Order",
    "PackedLoader",
    "PackedOrder",
    "Packing",
    "Picking",
    "RepeatingLoader",
    "SampledLoader",
    "StaleIterationError",
    "StreamLoader",
    "Ticket",
    "ToDevice",
    "delivery_to",
    "forever",
    "length_of",
    "make_loader",
]
