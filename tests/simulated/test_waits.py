"""Every wait, record and record_stream of the product is needed: without it, a scenario is out of order.

The mutants come from the syntax tree (simulated_cuda.mutants).  One that survives must be in `PROVED`, with the proof
that it orders nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import zcomm
import zengine
from simulated_cuda.library import library, set_schedule, take_violations
from simulated_cuda.mutants import MODULES, Mutant, applied, find_mutants
from zckpt.saving.background import HostMemory
from zengine.data.loaders.fetch import make_prefetcher
from zpartition.activations import ArenaStore, HostStore
from zpartition.disk.store import DiskStore
from zpartition.layout.policy import Offload, Speculation, Tier
from zpartition.memory.mover import CudaMover
from zpartition.memory.placement import DiskParams, HostParams, StagingBuffers

DEVICE = torch.device("cuda", 0)
CONTRACT = Path(__file__).parents[1] / "contract"

# Mutants that violate no order, and why.
PROVED = {
    "mover.CudaMover._begin_down: self.in_flight.popleft()[0].synchronize()": "bounds the memory of temporaries; the "
    "streams order the copies (test_mover.py counts the temporaries)",
    "mover.CudaMover._end_down: self.down.record_event()": "is what the line above waits for",
}


def move() -> None:
    """Fetch, add and send through a mover as reduction and publication do."""
    mover = CudaMover.create(DEVICE, pin=True)
    host = mover.empty(4096, torch.float32)
    bucket = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    mover.fetch(host, bucket, 0.5)
    for _ in range(6):
        bucket.fill_(2)
        mover.add(host, bucket, 0.5)
    mover.wait_for(mover.ready())
    host.sum()
    mover.fetch(host, bucket, 1.0)
    mover.wait_host()
    host.mul_(2)
    targets = [torch.zeros(4096, device=DEVICE) for _ in range(4)]
    for value, target in enumerate(targets):
        mover.send(target, host.fill_(value))
    mover.wait_device()
    sum(target.sum() for target in targets)
    torch.cuda.synchronize()


def load_batches() -> None:
    """Read batches ahead from pinned memory, use each, and drop it."""
    batches = ({"tokens": torch.arange(64).pin_memory()} for _ in range(5))
    for batch in make_prefetcher(DEVICE, num_ahead=2, num_workers=1)(batches):
        batch["tokens"].float().sum()
        del batch
        torch.empty(8, device=DEVICE)
    torch.cuda.synchronize()


class Shard:
    """A shard of one tensor."""

    global_shape, box, span = (64,), ((0, 64),), (0, 64)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.name, self.tensor = "weight", tensor


def copy_for_a_background_save() -> None:
    """Copy to pinned memory as a background save does; its thread reads the copy, and training goes on."""
    weight = torch.ones(64, device=DEVICE)
    (copy,) = HostMemory().copy_shards([Shard(weight)])  # type: ignore[list-item]
    copy.tensor.numpy().sum()
    weight.add_(1)
    torch.cuda.synchronize()


def keep_activations() -> None:
    """Keep tensors on the host, change and free them, and take all but the first back; twice, into the same slots."""
    for store in (HostStore(), ArenaStore(7, on_host=True)):
        for _ in range(2):
            restores = []
            for value in range(7):
                flat = torch.full((96,), float(value), device=DEVICE)
                restores.append(store.put(flat))
                flat.fill_(-1)
            while len(restores) > 1:
                restores.pop()().sum()
                torch.empty(96, device=DEVICE).fill_(-1)
            del restores  # the first is on its way to the device
    torch.cuda.synchronize()


def keep_activations_of_two_streams() -> None:
    """Take tensors of one stream back on two streams in turn: each asks for what the other will use."""
    store, first = HostStore(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(first):
        restores = [store.put(torch.ones(96, device=DEVICE)) for _ in range(7)]
    while restores:
        for stream in (torch.cuda.default_stream(), first):
            with torch.cuda.stream(stream):
                if restores:
                    restores.pop()().sum()
                torch.empty(96, device=DEVICE).fill_(-1)
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with contextlib.closing(zcomm.init()):
        yield


def page_weights() -> None:
    """Load weights from the host and from files, use them, drop them, and load them again."""
    mover = CudaMover.create(DEVICE, pin=True)
    span = torch.arange(64.0, device=DEVICE)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(DiskStore.create(Path(folder) / "store")) as store,
    ):
        on_disk = DiskParams.of(span, mover, store, StagingBuffers(1000))
        store.commit()
        for placement in (HostParams.of(span, mover), on_disk):
            for _ in range(3):
                placement.prefetch()
                placement.load().sum()
                placement.unload()
                torch.empty(8, device=DEVICE)
    torch.cuda.synchronize()


@contextlib.contextmanager
def training(offload: Offload) -> Iterator[tuple[zengine.Engine, Callable[[], object]]]:
    """Yield an engine of the contract table with `offload`, and its next forward and backward."""
    if str(CONTRACT) not in sys.path:
        sys.path.insert(0, str(CONTRACT))
    run = importlib.import_module("contract_table.run")
    rows = importlib.import_module("contract_table.rows")
    scenarios = importlib.import_module("contract_table.scenarios")
    scenario = scenarios.SCENARIOS["plain"]
    row = rows.Row("offloaded", {"stage": 2}, offload=offload)
    with run._offloading(offload):
        config = run._config(run.Case(row, "plain", torch.float32, 1), scenario)
        engine, *_ = zengine.initialize(model=scenario.model(), config=config)
    tokens = scenarios.batches(1, 1)[0, 0, 0].to(DEVICE)

    def losses() -> None:
        for loss, again in scenario.losses(engine, tokens, 0):
            engine.backward(loss, retain_graph=again)

    yield engine, losses
    engine.close()
    torch.cuda.synchronize()


def train_with_states_on_the_host() -> None:
    with training(Offload(states=Tier.HOST, ratio=0.6, step_numel=1300)) as (engine, losses):
        for _ in range(3):
            losses()
            engine.step()


def train_ahead() -> None:
    """Step buckets in a thread during backward."""
    offload = Offload(states=Tier.HOST, speculation=Speculation.LAST_BACKWARD)
    with training(offload) as (engine, losses):
        for _ in range(3):
            losses()
            engine.step()


def publish() -> None:
    """Publish masters outside a step, then run the module."""
    with training(Offload(states=Tier.HOST)) as (engine, losses):
        engine.parts.partition.publish()
        losses()


def fail_in_an_update() -> None:
    """Run the module after an update that failed when some buckets were sent already."""
    with training(Offload(states=Tier.HOST, step_numel=1300)) as (engine, losses):
        losses()
        engine.parts.partition.finish_gradients()
        steps = iter([True])
        with pytest.raises(StopIteration):
            engine.parts.partition.apply(lambda: next(steps))
        with torch.no_grad():
            next(engine.module.parameters()).sum()
            sum(parameter.sum() for parameter in engine.module.parameters())


BY_TRAINING = (train_with_states_on_the_host, train_ahead, publish, fail_in_an_update)
# By the module of the mutants; by default BY_TRAINING.
SCENARIOS: dict[str, tuple[Callable[[], None], ...]] = {
    "zpartition.memory.mover": (move,),
    "zpartition.memory.placement": (page_weights,),
    "zpartition.activations.stores": (keep_activations, keep_activations_of_two_streams),
    "zckpt.saving.background": (copy_for_a_background_save,),
    "zengine.data.loaders.fetch": (load_batches,),
}
ALL_SCENARIOS = tuple(dict.fromkeys((*itertools.chain(*SCENARIOS.values()), *BY_TRAINING)))


def faults(scenarios: tuple[Callable[[], None], ...]) -> str:
    """Return the violations of the scenarios; the checker needs one schedule."""
    found: list[str] = []
    set_schedule("early")
    for scenario in scenarios:
        library().sim_set_stream(0)
        library().sim_reset_order()
        take_violations()
        try:
            scenario()
        except RuntimeError as error:  # a violation; also kept for take_violations
            if "simulated CUDA" not in str(error):
                raise
        found += take_violations()
        if found:
            break
    library().sim_reset_order()
    return "\n".join(found)


@pytest.mark.usefixtures("world")
def test_the_scenarios_are_in_order() -> None:
    assert faults(ALL_SCENARIOS) == ""


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("mutant", find_mutants(), ids=str)
def test_without_a_wait_a_scenario_is_out_of_order(mutant: Mutant) -> None:
    with applied(mutant):
        found = faults(SCENARIOS.get(mutant.module, BY_TRAINING))
    if str(mutant) in PROVED:
        assert found == "", f"{mutant} is needed: take it out of PROVED"
        return
    assert found, (
        f"nothing shows that {mutant} (line {mutant.line}) is missing: delete it, or prove that it orders nothing"
    )


def test_every_proof_is_of_a_mutant() -> None:
    assert set(PROVED) <= {str(each) for each in find_mutants()}
    assert set(SCENARIOS) <= set(MODULES)
