"""Scenarios that use every wait of the product, alone or on two ranks; without a wait the checker finds a fault.

Where nothing but a clock of the host depends on a wait, a scenario counts the waits.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zpartition
import zprecision.policy
from simulated_cuda.library import host_waits, library, set_schedule, take_violations
from simulated_cuda.mutants import Mutant, applied
from zckpt.saving.background import HostMemory
from zengine.build.activation_checkpointing import _log_time
from zengine.data.loaders.fetch import make_prefetcher
from zengine.flops.meter import FlopsMeter
from zengine.flops.profiler import _timing
from zengine.inference.offload import DriveRest, HostRest, WeightStream
from zengine.telemetry.telemetry import _make_stopwatch
from zoptim.backends.gpu import SquaresJob
from zpartition.activations import ArenaStore, Checkpointing, HostStore
from zpartition.disk.store import DiskStore
from zpartition.layout.link import measure_link
from zpartition.layout.policy import Offload, Speculation, Tier
from zpartition.memory.mover import CudaMover
from zpartition.memory.placement import DiskParams, HostParams, StagingBuffers
from zpartition.pipeline import Schedule
from zpartition.pipeline.channels import Channels
from zpartition.pipeline.p2p import P2P, AgreedOrder
from zpartition.sequence import ring_attention

DEVICE = torch.device("cuda", 0)
CONTRACT = Path(__file__).parents[1] / "contract"
WORLD_SIZE = 2
Scenario = Callable[[], None]


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


def stream_blocks() -> None:
    """Run blocks whose weights rest on the host, two in turn on the device."""
    stream = WeightStream(HostRest(pins=True), DEVICE)
    blocks = [nn.Linear(64, 64) for _ in range(4)]
    for block in blocks:
        stream.park(block, tuple(block.parameters()))
    x = torch.ones(2, 64, device=DEVICE)
    with torch.no_grad():
        for block in blocks * 2:
            x = block(x)
    torch.cuda.synchronize()


def stream_blocks_from_a_drive() -> None:
    """Put blocks on a drive and fetch one; counts the waits, as errors of the drive show in them."""
    waits: list[str] = []

    def counted(name: str, transfer: Any) -> Any:
        return SimpleNamespace(wait=lambda: (waits.append(name), transfer.wait()))

    with tempfile.TemporaryDirectory() as folder:
        rest = DriveRest(folder, stages=True)
        write, read = rest.store.write, rest.store.read
        rest.store = SimpleNamespace(  # type: ignore[assignment]
            allocate=rest.store.allocate,
            buffer=rest.store.buffer,
            write=lambda *given: counted("write", write(*given)),
            read=lambda *given: counted("read", read(*given)),
        )
        for index in range(2):
            rest.put(index, torch.full((256,), index, dtype=torch.uint8))
        into = rest.buffer(256, DEVICE)
        rest.start(1, into)()
        assert waits == ["write", "write", "read"], waits
        assert into.cpu().eq(1).all()
        rest._end()  # removes the store


@contextlib.contextmanager
def training(offload: Offload | None = None, **zero: Any) -> Iterator[tuple[zengine.Engine, Callable[[], object]]]:
    """Yield an engine of the contract table with `offload`, or `zero` in its config; and its forward and backward."""
    if str(CONTRACT) not in sys.path:
        sys.path.insert(0, str(CONTRACT))
    run = importlib.import_module("contract_table.run")
    rows = importlib.import_module("contract_table.rows")
    scenarios = importlib.import_module("contract_table.scenarios")
    scenario = scenarios.SCENARIOS["plain"]
    row = rows.Row("", {"stage": 2, **zero}, offload=offload)
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


def squares_on_a_side_stream() -> None:
    """Read gradients on a stream, with tables that another stream has made and that are dropped meanwhile."""
    gradients = [torch.ones(300, device=DEVICE), torch.ones(5, device=DEVICE)]
    job, side = SquaresJob(gradients), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        job.measure()
    del job
    torch.empty(8, device=DEVICE)
    torch.cuda.synchronize()


# -- clocks of the host ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def device_waits(count: int) -> Iterator[None]:
    """Expect the host to wait for the device `count` times inside."""
    before = host_waits().get("synchronize the device", 0)
    yield
    found = host_waits().get("synchronize the device", 0) - before
    assert found == count, f"the host waited {found} times for the device, expected {count}"


def read_clocks() -> None:
    """Time what runs on the device by the host's clock."""
    with device_waits(1):
        _timing(DEVICE)[0]()
    with device_waits(2), _log_time(DEVICE, "forward"):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zprecision.policy, "_EDGE_ELSEWHERE", 8)
        patch.setattr(zprecision.policy, "_MIN_RUNS", 1)
        patch.setattr(zprecision.policy, "_BUDGET_S", 0.0)
        with device_waits(2 * 4):  # two dtypes, twice, before and after
            zprecision.policy.measure_bf16_speedup(DEVICE)
    meter = FlopsMeter(nn.Identity(), synchronize=torch.cuda.synchronize)
    meter.start()
    with device_waits(2):
        meter.model(torch.ones(1, device=DEVICE))
    meter.stop()
    with device_waits(2):
        Checkpointing(synchronize=torch.cuda.synchronize)(torch.sin, torch.ones(1, device=DEVICE))


def read_timers() -> None:
    """Time phases by events, also on a stream that nobody has waited for."""
    set_schedule("late")
    stopwatch = _make_stopwatch(DEVICE)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stopwatch.phase_begin("forward")
            torch.ones(3, device=DEVICE).sum()
            stopwatch.phase_end("forward")
    stopwatch.phase_begin("step")
    stopwatch.phase_end("step")
    stopwatch.micro_ms()
    stopwatch.total_ms()
    torch.cuda.synchronize()


# -- two ranks -------------------------------------------------------------------------------------------------------


def communicate() -> None:
    """Read what collectives have made: at once, after a wait, and after work that follows a collective."""
    for is_late in (False, True):
        values = torch.ones(64, device=DEVICE)
        zcomm.all_reduce(values, async_op=is_late, label="first").wait()
        values.sum()


def communicate_in_turn() -> None:
    """Let work follow a collective, and another collective follow that; wait in each way that a handle has."""

    def poll(handle: zcomm.Handle) -> None:
        while not handle.is_done():
            time.sleep(1e-4)

    for ask in (lambda handle: None, poll, lambda handle: handle.wait_for(10.0), lambda handle: handle.proceed()):
        first, second = (torch.ones(64, device=DEVICE) for _ in range(2))

        def follow(first: torch.Tensor = first, second: torch.Tensor = second) -> zcomm.Handle:
            second.add_(first)
            return zcomm.all_reduce(second, async_op=True, label="second")

        handle = zcomm.after(zcomm.all_reduce(first, async_op=True, label="first"), follow)
        ask(handle)
        handle.wait()
        second.sum()
    message = zcomm.BlockCode(bits=8).encode(torch.ones(64, device=DEVICE))
    output = torch.empty(128, device=DEVICE)
    zcomm.all_gather_quantized(output, message)
    assert output.sub(1).abs().max() < 0.1


def trace_communication() -> None:
    """Time the wait of a stream for a collective."""
    records: list[zcomm.Record] = []
    with zcomm.traced(records):
        zcomm.all_reduce(torch.ones(64, device=DEVICE))
    torch.cuda.synchronize()
    begin, end = records[0].stall
    assert begin.elapsed_time(end) >= 0


LINK_WAITS = 2 * (6 + 3 + 4)  # before and after each message of three sizes


def time_a_link() -> None:
    """Measure the link between the ranks; the waits are those of its messages."""
    before = host_waits().get("synchronize the device", 0)
    measure_link(None, DEVICE)
    found = host_waits()["synchronize the device"] - before
    assert found == LINK_WAITS, f"the host waited {found} times for the device, expected {LINK_WAITS}"


def train_replicated() -> None:
    with training(stage=0) as (engine, losses):
        for _ in range(2):
            losses()
            engine.step()


def train_sharded() -> None:
    with training(stage=2) as (engine, losses):
        for _ in range(2):
            losses()
            engine.step()


def train_with_sharded_weights() -> None:
    with training(stage=3, stage3_unit_size=1300, stage3_param_persistence_threshold=0) as (engine, losses):
        for _ in range(3):
            losses()
            engine.step()


def update_selectively() -> None:
    """Update columns beside a thread; edit weights while its update is not shown, and show loaded ones."""
    zenflow = {"topk_ratio": 0.5, "select_strategy": "step", "select_interval": 9, "update_interval": 2}
    offload = {"offload_optimizer": {"device": "cpu"}, "zenflow": {**zenflow, "overlap_step": True}}
    with training(stage=1, **offload) as (engine, losses):
        partition = engine.parts.partition
        for _ in range(4):
            losses()
            engine.step()
        first = next(engine.module.parameters())
        with zpartition.gathered([first], modifier_rank=0):
            first.data.mul_(0.5)
        losses()
        engine.step()
        updates: Any = partition.updates
        updates.prepare_shown(is_unshown=True)
        updates.load_state_dict(updates.state_dict())
        partition.publish()
        losses()


def release_weights_on_their_way() -> None:
    """Drop a unit that was asked for ahead, and use its buffer for another."""
    with training(stage=3, stage3_unit_size=1300, stage3_param_persistence_threshold=0) as (engine, losses):
        unsharder = engine.parts.partition.unsharder
        for unit in list(unsharder.units.values())[:2]:
            unsharder._gather(unit)
            unsharder._release(unit)
            for buffer in unsharder.pool.free:
                buffer.zero_()
        losses()
        engine.step()


def exchange_rounds(bits: int = 0) -> None:
    """Exchange weights of two groups beside training; look at the mean movement in flight, and at its effect."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "diloco": {
            "sync_every": 8,
            "sync_delay": 3,
            "fragments": 2,
            "quantize_bits": bits,
            "outer": {"lr": 1.0, "momentum": 0.0, "nesterov": False},
        },
    }
    engine, *_ = zengine.initialize(model=nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), config=config)
    rounds = next(each for each in engine._features if each.name == "diloco").rounds
    batch = torch.full((1, 64), 1.0 + zcomm.group_rank(), device=DEVICE)
    before = moved = torch.zeros(())
    for step in range(1, 8):
        engine.backward(engine(batch).square().mean())
        engine.step()
        if step == 4:  # the exchange begins
            held = rounds._fragments[rounds._pending.fragment]
            before = held.start.clone()
            moved = before - torch.cat([local for _, local in rounds._local(held)])
            zcomm.all_reduce(moved)
            moved /= WORLD_SIZE
        if step == 5 and not bits:
            assert list(rounds.pending_shards())
            torch.testing.assert_close(rounds._pending.mean, moved)
    error = float(moved.abs().max()) / 4 if bits else 1e-6
    torch.testing.assert_close(held.start, before - moved, rtol=0, atol=error)
    engine.close()
    torch.cuda.synchronize()


def exchange_quantized_rounds() -> None:
    """Exchange weights in two messages of 4 bits."""
    exchange_rounds(4)


def fail_in_a_backward() -> None:
    """Train on after a backward that failed when some gradients were on their way."""
    with training(stage=2) as (engine, losses):
        losses()
        engine.step()
        first = next(engine.module.parameters())

        def fail(_: torch.Tensor) -> None:
            raise KeyError("planned")

        with contextlib.closing(_Hook(first.register_hook(fail))), pytest.raises(KeyError, match="planned"):
            losses()
        losses()
        engine.step()


class _Hook:
    def __init__(self, handle: Any) -> None:
        self.close = handle.remove


def attend_in_a_ring() -> None:
    parts = [torch.randn(1, 2, 8, 4, device=DEVICE, requires_grad=True) for _ in range(3)]
    ring_attention(*parts, is_causal=True).sum().backward()
    for part in parts:
        assert part.grad is not None
        part.grad.sum()


def pass_messages() -> None:
    """Send tensors to the other stage of a pipeline and back, and change what was sent."""
    rank = zcomm.group_rank()
    channels = Channels(None, DEVICE)
    p2p = P2P(rank, 2, channels, AgreedOrder(channels, (None, None)))
    for _ in range(2):
        p2p.begin(Schedule.parse("0F0 0B0\n1F0 1B0"))
        value = torch.ones(6, device=DEVICE, requires_grad=True)
        p2p.proceed(0)
        if rank == 0:
            sent = value * 2
            p2p.send_activation(1, 0, sent)
            p2p.proceed(1)
            p2p.receive_gradient(0, 0).sum()
        else:
            value = p2p.receive_activation(1, 0)
            p2p.proceed(1)
            value.sum().backward()
            p2p.send_gradient(0, 0, value)
        p2p.proceed(2)
        p2p.end()
        if rank == 0:
            sent.detach().fill_(3)
    shared = torch.full((64,), float(rank), device=DEVICE)
    channels.broadcast(shared, 0)
    shared.sum()
    if rank == 0:
        channels.send(torch.ones(3, device=DEVICE), 1, 9)
        channels.flush()
    else:
        channels.receive(0, 9).sum()


BY_TRAINING: tuple[Scenario, ...] = (train_with_states_on_the_host, train_ahead, publish, fail_in_an_update)
# By the beginning of a mutant's module; else BY_TRAINING.
ALONE: dict[str, tuple[Scenario, ...]] = {
    "zpartition.memory.mover": (move,),
    "zpartition.memory.placement": (page_weights,),
    "zpartition.activations.stores": (keep_activations, keep_activations_of_two_streams),
    "zpartition.activations.checkpointing": (read_clocks,),
    "zckpt.saving.background": (copy_for_a_background_save,),
    "zengine.data.loaders.fetch": (load_batches,),
    "zengine.telemetry": (read_timers,),
    "zengine.flops": (read_clocks,),
    "zengine.build": (read_clocks,),
    "zengine.inference.offload": (stream_blocks, stream_blocks_from_a_drive),
    "zoptim.": (squares_on_a_side_stream,),
    "zprecision.": (read_clocks,),
}
ON_RANKS: dict[str, tuple[Scenario, ...]] = {
    "zcomm.": (communicate, communicate_in_turn, trace_communication),
    "zpartition.gradients.reducer": (train_sharded, fail_in_a_backward),
    "zpartition.layout.link": (time_a_link,),
    "zpartition.partition: handle.wait()": (train_sharded,),
    "zpartition.pipeline": (pass_messages,),
    "zpartition.rounds": (exchange_rounds, exchange_quantized_rounds),
    "zpartition.selective": (update_selectively,),
    "zpartition.sequence": (attend_in_a_ring,),
    "zpartition.weights": (train_with_sharded_weights, release_weights_on_their_way),
}


def scenarios_of(mutant: Mutant) -> tuple[bool, tuple[Scenario, ...]]:
    """Return if the scenarios of a mutant run on two ranks, and the scenarios."""
    text = f"{mutant.module}: {mutant.call}"
    for is_alone, table in ((False, ON_RANKS), (True, ALONE)):
        for beginning, scenarios in table.items():
            if text.startswith(beginning):
                return not is_alone, scenarios
    return False, BY_TRAINING


def faults(scenarios: tuple[Scenario, ...], mutant: Mutant | None = None) -> str:
    """Return violations and errors of the scenarios, without the wait of `mutant`; one schedule shows them all."""
    found: list[str] = []
    with contextlib.nullcontext() if mutant is None else applied(mutant):
        for scenario in scenarios:
            set_schedule("early")
            library().sim_set_stream(0)
            library().sim_reset_order()
            library().sim_raises(False)  # so that ranks stay together
            take_violations()
            try:
                scenario()
            except Exception as error:
                found.append(f"{scenario.__name__}: {type(error).__name__}: {error}")
            finally:
                library().sim_raises(True)
            found += take_violations()
            if found:
                break
    library().sim_reset_order()
    return "\n".join(found)
