"""The contract table on the device: every stage and tier trains like one process, with the same bits and messages.

The oracle computes on the CPU, whose products are summed in another order than a GPU's, so losses may differ four
times as much as between CPU ranks.  Bits are compared between rows on the device.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch

import zcomm
from acceptance.bench import Bench, NotRunHere
from zcomm.testing import run_ranks

__all__ = ["in_bfloat16", "in_float16", "in_float32", "nccl", "two_ranks"]

SLACK = 4.0
SCENARIOS = ("plain", "unused", "tied", "frozen", "several backwards", "checkpointed", "exceptions", "unfrozen later")
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
BACKEND = "ZCOMM_TESTING_BACKEND"


def in_float32(bench: Bench) -> None:
    """Train all rows in float32, alone, beside NCCL."""
    train(bench, 1, [torch.float32])


def in_bfloat16(bench: Bench) -> None:
    """Train all rows in bf16."""
    train(bench, 1, [torch.bfloat16])


def in_float16(bench: Bench) -> None:
    """Train all rows in fp16."""
    train(bench, 1, [torch.float16])


def two_ranks(bench: Bench) -> None:
    """Train all rows on two ranks.  NCCL rejects two ranks on one GPU, so Gloo carries the tensors of a GPU."""
    with backend(bench.choose("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl")):
        train(bench, 2, [torch.float32] if bench.is_simulated else [torch.float32, torch.bfloat16])


def train(bench: Bench, world_size: int, dtypes: list[torch.dtype]) -> None:
    """Train the rows of the table on the device, and compare them with the oracle and with each other."""
    rows, run, table = (
        importlib.import_module(name) for name in ("contract_table.rows", "contract_table.run", "test_table")
    )
    scenarios, accumulations = bench.choose((SCENARIOS, (1, 3)), (SCENARIOS[:1], (1,)))
    cases = [
        run.Case(row, scenario, dtype, accumulation)
        for dtype, row, scenario, accumulation in itertools.product(dtypes, rows.ROWS, scenarios, accumulations)
        if world_size in row.worlds and table.is_selected(row, scenario, dtype)
    ]
    by_rank = run_ranks(cases_on_device, world_size, cases, bench.device, timeout_s=400)
    names = ", ".join(str(dtype)[6:] for dtype in dtypes)
    claim = f"{len(cases)} runs in {names} on {world_size} rank{'s'[: world_size - 1]} equal one process"
    bench.check(claim, table.compare(cases, by_rank, bench.choose(SLACK, 1.0)))


def cases_on_device(cases: list[Any], device: torch.device) -> Any:
    """Run the cases as a rank on `device`, with deterministic kernels."""
    zcomm.init(device=device)  # a group of Gloo alone would be on the CPU
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_deterministic_debug_mode("warn")
    return importlib.import_module("contract_table.run").run_cases(cases)


def nccl(bench: Bench) -> None:
    """Send over NCCL as the only rank."""
    faults = run_ranks(nccl_faults, 1)[0]
    if bench.is_simulated and not faults:
        raise NotRunHere("the simulated device has Gloo in NCCL's place")
    bench.check("collectives of one rank over NCCL keep their values", faults)


def nccl_faults() -> list[str]:
    """Return the collectives whose result is not their input; NCCL launches them although the rank is alone."""
    dist: Any = torch.distributed
    faults = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        given = torch.arange(1, 65, device="cuda").to(dtype)
        for name in COLLECTIVES:
            result = given.clone()
            if name == "all_reduce":
                dist.all_reduce(result)
            elif name == "broadcast":
                dist.broadcast(result, 0)
            else:
                getattr(dist, name)(result.zero_(), given)
            faults += [] if torch.equal(result.cpu(), given.cpu()) else [f"{name} of {dtype}: {result.tolist()}"]
    zcomm.barrier()
    return faults


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Use a back end for the ranks that start inside."""
    before = os.environ.get(BACKEND)
    os.environ[BACKEND] = name
    try:
        yield
    finally:
        if before is not None:
            os.environ[BACKEND] = before
