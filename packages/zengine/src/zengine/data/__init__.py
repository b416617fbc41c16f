"""Data in an order that can be resumed: by any number of ranks, at any batch, bit for bit."""

from zengine.data.base import Loader, StaleIterationError
from zengine.data.indexed import MapLoader
from zengine.data.loader import make_loader
from zengine.data.order import Order, Ticket
from zengine.data.repeat import RepeatingLoader, forever
from zengine.data.stream import StreamLoader

__all__ = [
    "Loader",
    "MapLoader",
    "Order",
    "RepeatingLoader",
    "StaleIterationError",
    "StreamLoader",
    "Ticket",
    "forever",
    "make_loader",
]
