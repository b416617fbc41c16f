"""`deepspeed.utils.numa`: cores of each NUMA node, and the numactl command that binds a rank to its cores.

The nodes are read from /sys, so `get_numa_cores` works without numactl.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

__all__ = ["check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]

_NODES = Path("/sys/devices/system/node")
_CORES = Path("/sys/devices/system/cpu")


def get_numa_cores() -> list[list[int]]:
    """Return the cores of each NUMA node, [] for a node of memory only; [] if the system has no such list."""
    folders = sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    texts = [(folder / "cpulist").read_text(encoding="ascii").strip() for folder in folders]
    return [parse_range_list(text) if text else [] for text in texts]


def check_for_numactl_pkg() -> bool:
    """Return True if the command numactl exists."""
    return shutil.which("numactl") is not None


def parse_range(rng: str) -> range:
    """Return the numbers of "3" or "2-4".  Raises ValueError for other text."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", rng)
    if found is None:
        raise ValueError(f"Bad range: '{rng}', range must be either a number or two number separated by dash")
    start, end = int(found[1]), int(found[2] or found[1])
    if start > end:
        raise ValueError(f"Bad range: '{rng}', range end must larger than or equal to start")
    return range(start, end + 1)


def parse_range_list(range_str: str) -> list[int]:
    """Return the numbers of "0,2-4,6".  Raises ValueError unless they ascend."""
    numbers: list[int] = []
    for part in map(parse_range, range_str.split(",")):
        if numbers and part[0] <= numbers[-1]:
            raise ValueError(
                f"Bad range: '{range_str}', sub ranges must not overlap with each other and should be in ascend order"
            )
        numbers.extend(part)
    return numbers


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return the cores per rank and the numactl command for one rank.

    bind_core_list: cores to split among the ranks, such as "0-7,16-23"; None: one thread of every physical core.
    The memory is bound too if one node (or the twins of a fake one) has all of the rank's cores; a node with cores
    that has a node of high-bandwidth memory only prefers that.

    Raises ValueError if KMP_AFFINITY is set, AssertionError (DeepSpeed's) if there are fewer cores than ranks.
    """
    if "KMP_AFFINITY" in os.environ:
        raise ValueError(
            "Environment variable KMP_AFFINITY conflicts with numactl, which sets the cores as well. Unset it "
            "before the launch: unset KMP_AFFINITY"
        )
    cores = list(range(_num_physical_cores())) if bind_core_list is None else parse_range_list(bind_core_list)
    share = len(cores) // num_local_procs
    assert share >= 1, "At least one core needs to be assigned to each rank"
    own = cores[share * local_rank : share * (local_rank + 1)]
    return share, ["numactl", *_memory_options(own, get_numa_cores()), "-C", _ranges(own)]


def _num_physical_cores() -> int:
    """Return the number of cores without their second threads."""
    twins = [path.read_text(encoding="ascii") for path in _CORES.glob("cpu[0-9]*/topology/thread_siblings_list")]
    return len(set(twins)) or os.cpu_count() or 1


def _memory_options(own: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[str]:
    """Return numactl's options that bind the memory of a rank with the cores `own`."""
    home = next((node for node, cores in enumerate(nodes) if set(own) <= set(cores)), None)
    if home is None:
        return []
    with_cores = [node for node, cores in enumerate(nodes) if cores]
    without = [node for node, cores in enumerate(nodes) if not cores]
    if without and len(without) == len(with_cores):  # each has a node of high-bandwidth memory
        return ["-p", str(dict(zip(with_cores, without))[home])]
    twins = next(run for run in _runs(nodes) if home in run)  # neighbours with the same cores: a fake NUMA
    return ["-m", ",".join(map(str, twins))]


def _runs(nodes: Sequence[Sequence[int]]) -> Iterable[list[int]]:
    """Yield runs of neighbouring nodes that have the same cores."""
    for _, run in groupby(range(len(nodes)), key=lambda node: list(nodes[node])):
        yield list(run)


def _ranges(cores: Sequence[int]) -> str:
    """Return "0-3,8" for [0, 1, 2, 3, 8]."""
    parts = []
    for _, run in groupby(enumerate(cores), key=lambda pair: pair[1] - pair[0]):
        members = [core for _, core in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)
