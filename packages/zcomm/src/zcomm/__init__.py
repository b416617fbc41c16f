"""Worlds, meshes, collectives, traces, and a rank harness for tests, on torch.distributed.

The package has five parts and holds no policy.  Launch and world: `init`, `World`, `detect`.  Meshes and groups:
`make_mesh` and its axes, `Groups`.  Collectives: flat, quantized and ragged ones, each with a group, a label and an
async handle, and `all_gather_object` for small host values; between CPU ranks of one host through shared memory
(`shared_empty`, `transport`).  Traces: `traced`.  Hangs: every rank raises `CollectiveFailed` with one diagnosis,
annotated by `context`; `abort` ends all waits.  `zcomm.testing`, imported separately, runs functions on real ranks in
hundredths of a second.

Every function takes torch's own ProcessGroup and DeviceMesh, so each part works alone in any program.
"""

import sys
from typing import TYPE_CHECKING

from zcomm.collectives.block_codes import BlockCode
from zcomm.collectives.compressed import CompressedAllReduce, SignLayout
from zcomm.collectives.error_feedback import ErrorFeedback
from zcomm.collectives.handles import DONE, CollectiveFailed, Handle, after
from zcomm.collectives.launches import launching, on_launch
from zcomm.collectives.objects import all_gather_object
from zcomm.collectives.quantized import all_gather_quantized, reduce_scatter_quantized
from zcomm.collectives.ragged import all_to_all_ragged_rows, all_to_all_v, gather_rows, return_ragged_rows
from zcomm.collectives.shared_tensors import shared_empty
from zcomm.collectives.sign_codes import pack_signs, unpack_signs
from zcomm.collectives.trace import Record, traced
from zcomm.collectives.verbs import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    group_rank,
    group_size,
    reduce_scatter,
    runs_in_order,
)
from zcomm.groups.axes import MPU_NAMES, Degrees, Groups, mpu_getter
from zcomm.groups.duplicates import consecutive_group, duplicate_group, duplicate_host_group, strided_group
from zcomm.groups.launch import Launch, detect
from zcomm.groups.mesh import axis_group, axis_rank, axis_size, make_mesh
from zcomm.groups.played import Communicator, PlayedCall, played_world
from zcomm.groups.rendezvous import RendezvousFailed
from zcomm.groups.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from zcomm.groups.world import World, init
from zcomm.hangs.abort import abort, close_on_failure, diagnose_failure, failure
from zcomm.hangs.fingerprint import context
from zcomm.hosts import this_host
from zcomm.shared.registry import transport, transport_reason

__version__ = "0.3.0"

__all__ = [
    "DONE",
    "MPU_NAMES",
    "BlockCode",
    "CollectiveFailed",
    "Communicator",
    "CompressedAllReduce",
    "Degrees",
    "ErrorFeedback",
    "Groups",
    "Handle",
    "Launch",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PlayedCall",
    "ProcessTopology",
    "Record",
    "RendezvousFailed",
    "SignLayout",
    "World",
    "abort",
    "after",
    "all_gather",
    "all_gather_object",
    "all_gather_quantized",
    "all_reduce",
    "all_to_all",
    "all_to_all_ragged_rows",
    "all_to_all_v",
    "axis_group",
    "axis_rank",
    "axis_size",
    "barrier",
    "broadcast",
    "close_on_failure",
    "consecutive_group",
    "context",
    "detect",
    "diagnose_failure",
    "duplicate_group",
    "duplicate_host_group",
    "failure",
    "gather_rows",
    "group_rank",
    "group_size",
    "init",
    "launching",
    "make_mesh",
    "mpu_getter",
    "on_launch",
    "pack_signs",
    "played_world",
    "reduce_scatter",
    "reduce_scatter_quantized",
    "return_ragged_rows",
    "runs_in_order",
    "shared_empty",
    "strided_group",
    "this_host",
    "traced",
    "transport",
    "transport_reason",
    "unpack_signs",
]

RENAMED = {  # old name -> new name, for one minor version
    "collect_runs": "all_to_all_ragged_rows",
    "return_runs": "return_ragged_rows",
    "exchange_slices": "all_to_all_v",
    "exchange": "all_gather_object",
    "give_up": "abort",
    "inquire": "diagnose_failure",
    "run": "consecutive_group",
    "run_mates": "strided_group",
    "twin": "duplicate_group",
    "host_twin": "duplicate_host_group",
}

if not TYPE_CHECKING:  # type checkers report old names as missing

    def __getattr__(name: str) -> object:
        if name in RENAMED:
            is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # of `from ... import name`
            error = ImportError if is_import else AttributeError
            raise error(f"zcomm.{name} was renamed in 0.3.0; use zcomm.{RENAMED[name]}.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
