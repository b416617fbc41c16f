"""Data in an order that can be resumed: by any number of ranks, at any batch, bit for bit."""

from zengine.data.analysis import DataAnalyzer
from zengine.data.base import Loader, StaleIterationError
from zengine.data.curriculum import By, CurriculumWalk, Limit
from zengine.data.curriculum_loader import CurriculumLoader
from zengine.data.delivery import ToDevice, delivery_to
from zengine.data.feed import Feed
from zengine.data.fetch import Fetching
from zengine.data.indexed import MapLoader
from zengine.data.loader import make_loader
from zengine.data.metrics import MetricError, MetricIndex, length_of
from zengine.data.order import Order, Ticket
from zengine.data.packed_loader import PackedLoader
from zengine.data.packing import PackedOrder, Packing, Picking
from zengine.data.repeat import RepeatingLoader, forever
from zengine.data.sampled import SampledLoader
from zengine.data.schedules import Custom, FixedDiscrete, FixedRoot
from zengine.data.stream import StreamLoader

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
