"""Worlds, meshes, collectives, traces, and a rank harness for tests, on torch.distributed.

The package answers five questions and holds no policy.  Who am I and who are the others: `init`, `World`,
`detect`.  How are we arranged: `make_mesh` and its axes.  What travels: the flat collectives, each with a group,
a label, an async handle and a skip at world size 1, and `exchange` for small host values; between CPU ranks of one
host through memory that they share (`shared_empty`, `transport`).  What did it cost: `traced`.  Why did it hang:
every rank's `CollectiveFailed`, in the words of `context`.  `zcomm.testing` runs functions on real ranks in
hundredths of a second; it is imported by itself.

Everything takes torch's own ProcessGroup and DeviceMesh, so any part works in a program that knows no other.
"""

from zcomm.axes import Degrees, Groups
from zcomm.blocks import BlockCode
from zcomm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    group_rank,
    group_size,
    reduce_scatter,
)
from zcomm.fingerprint import context
from zcomm.handles import DONE, CollectiveFailed, Handle, after
from zcomm.launch import Launch, detect
from zcomm.mesh import axis_group, axis_rank, axis_size, make_mesh
from zcomm.quantized import all_gather_quantized, reduce_scatter_quantized
from zcomm.rendezvous import RendezvousFailed
from zcomm.runs import collect_runs, return_runs
from zcomm.shared.registry import transport, transport_reason
from zcomm.shared.tensors import shared_empty
from zcomm.slices import exchange_slices
from zcomm.sparse import gather_rows
from zcomm.surrender import close_on_failure, failure, give_up, inquire
from zcomm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from zcomm.trace import Record, traced
from zcomm.twins import host_twin, run, run_mates, twin
from zcomm.values import exchange
from zcomm.world import World, init

__version__ = "0.2.0"

__all__ = [
    "DONE",
    "BlockCode",
    "CollectiveFailed",
    "Degrees",
    "Groups",
    "Handle",
    "Launch",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "ProcessTopology",
    "Record",
    "RendezvousFailed",
    "World",
    "after",
    "all_gather",
    "all_gather_quantized",
    "all_reduce",
    "all_to_all",
    "axis_group",
    "axis_rank",
    "axis_size",
    "barrier",
    "broadcast",
    "close_on_failure",
    "collect_runs",
    "context",
    "detect",
    "exchange",
    "exchange_slices",
    "failure",
    "gather_rows",
    "give_up",
    "group_rank",
    "group_size",
    "host_twin",
    "init",
    "inquire",
    "make_mesh",
    "reduce_scatter",
    "reduce_scatter_quantized",
    "return_runs",
    "run",
    "run_mates",
    "shared_empty",
    "traced",
    "transport",
    "transport_reason",
    "twin",
]
