"""Worlds, meshes, collectives, traces, and a rank harness for tests, on torch.distributed.

The package answers four questions and holds no policy.  Who am I and who are the others: `init`, `World`,
`detect`.  How are we arranged: `make_mesh` and its axes.  What travels: the flat collectives, each with a group,
a label, an async handle and a skip at world size 1, and `exchange` for small host values.  What did it cost:
`traced`.  `zcomm.testing` runs functions on real ranks in hundredths of a second; it is imported by itself.

Everything takes torch's own ProcessGroup and DeviceMesh, so any part works in a program that knows no other.
"""

from zcomm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    group_rank,
    group_size,
    reduce_scatter,
)
from zcomm.handles import DONE, CollectiveFailed, Handle
from zcomm.launch import Launch, detect
from zcomm.mesh import axis_group, axis_rank, axis_size, make_mesh
from zcomm.rendezvous import RendezvousFailed
from zcomm.trace import Record, traced
from zcomm.values import exchange
from zcomm.world import World, init

__version__ = "0.1.0"

__all__ = [
    "DONE",
    "CollectiveFailed",
    "Handle",
    "Launch",
    "Record",
    "RendezvousFailed",
    "World",
    "all_gather",
    "all_reduce",
    "axis_group",
    "axis_rank",
    "axis_size",
    "barrier",
    "broadcast",
    "detect",
    "exchange",
    "group_rank",
    "group_size",
    "init",
    "make_mesh",
    "reduce_scatter",
    "traced",
]
