"""Time of a kernel on a device: bounds of each resource, and the warps of one scheduler played in order.

Problem: a kernel at 90% of the issue slots and 60% of the memory latency reaches neither bound, so the largest of the
bounds is optimistic exactly where two are close, and these kernels are.

Design: the bounds say what limits; a simulation says how much is lost.  One scheduler (a quarter of a multiprocessor)
executes the paths of its resident warps: an instruction issues when its warp's stall count and barriers allow, when
its pipe is free, and at most one a cycle; accesses to memory queue for the scheduler's share of bandwidth, and loads
return a latency later; stores are posted.  Nothing is fitted.  A kernel of many blocks is extrapolated from the
difference of two simulated lengths, so filling and draining are counted once.

Rejected: mean-value analysis (assumes random service times, and loses 10% where both resources are exact); a model of
caches and DRAM pages (every stream is read once, in order).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
from gpumodel.hardware import PIPES, Device, Guess, Occupancy, pipe_of
from gpumodel.listing import NO_BARRIER, Body, Instruction

__all__ = ["Bounds", "Point", "Work", "bounds", "point", "seconds", "throughput"]

SCHEDULERS = 4  # of a multiprocessor
BARRIERS = 6  # of a warp
ROUNDS = 2  # rounds of resident blocks in the shorter simulation, and that many more in the longer one


@attrs.frozen(kw_only=True)
class Work:
    """What a kernel does: the paths of a warp, and how blocks share the elements."""

    body: Body
    elements: int  # of a warp and pass of the loop
    passes: int  # of the loop per block
    block_elements: int
    block_warps: int
    bytes_per_element: float
    scalar_bytes: int = 4  # of an access that all lanes make to one address


@attrs.frozen(kw_only=True)
class Point:
    """A device with one value of each guess."""

    device: Device
    bandwidth: float  # bytes per cycle, all multiprocessors
    clock: float
    memory_cycles: float
    launch_us: float


def point(device: Device, end: str = "value") -> Point:
    """Return the device at one end of its guesses: low, value or high."""

    def at(guess: Guess) -> float:
        return float(getattr(guess, end))

    clock = at(device.clock)
    return Point(
        device=device, bandwidth=at(device.attainable) / clock, clock=clock,
        memory_cycles=at(device.memory_ns) * 1e-9 * clock, launch_us=at(device.launch_us),
    )  # fmt: skip


# Bounds -------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Bounds:
    """Cycles of one scheduler for one pass of one warp, by resource; latency is divided by the resident warps."""

    cycles: dict[str, float]

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        return max(self.cycles, key=lambda name: self.cycles[name])


def bounds(work: Work, resident: Occupancy, at: Point) -> Bounds:
    """Return the bounds of memory, issue slots, each pipe, and latency (Little's law)."""
    share = at.bandwidth / at.device.multiprocessors / SCHEDULERS
    cost = dict.fromkeys(PIPES[at.device.sm], 0.0)
    for i in work.body.loop:
        cost[pipe_of(i.name)] += _interval(i, at.device.sm)
    del cost["control"]
    return Bounds(
        cycles={
            "memory": work.elements * work.bytes_per_element / share,
            "issue": float(len(work.body.loop)),
            **cost,
            "latency": alone(work.body.loop, at) / (resident.warps / SCHEDULERS),
        }
    )


def alone(path: Sequence[Instruction], at: Point) -> float:
    """Return the cycles of a path for a warp that has the device to itself."""
    free = attrs.evolve(at, bandwidth=math.inf)
    return _Scheduler(free, 1).run([[_steps(path, free, in_loop=True, scalar_bytes=4)]])


# Simulation ---------------------------------------------------------------------------------------------

# One instruction, ready to be issued: (pipe, cycles in the pipe, stall, barrier, latency, wait mask, bytes)
_Step = tuple[str, float, int, int, float, int, float]


def _interval(i: Instruction, sm: int) -> float:
    pipe = pipe_of(i.name)
    cycles = PIPES[sm][pipe]
    # A multiprocessor and its first-level cache exchange 128 bytes a cycle: for a scheduler, a byte of each thread.
    return max(cycles, float(i.access_bytes)) if i.is_global else cycles


def _steps(path: Sequence[Instruction], at: Point, *, in_loop: bool, scalar_bytes: int) -> list[_Step]:
    has_wide = any(i.is_wide for i in path)
    device = at.device
    made = []
    for i in path:
        latency, num_bytes = 0.0, 0.0
        if i.is_global and in_loop:
            num_bytes = scalar_bytes if has_wide and not i.is_wide else 32.0 * i.access_bytes
            latency = at.memory_cycles
        elif i.is_global:
            latency = device.l2_cycles
        elif i.name in ("LDS", "SHFL"):
            latency = device.shared_cycles
        elif pipe_of(i.name) == "xu":
            latency = device.xu_cycles
        elif i.write_barrier != NO_BARRIER:
            latency = device.special_cycles
        made.append(
            (pipe_of(i.name), _interval(i, device.sm), max(1, i.stall), i.write_barrier, latency, i.wait_mask,
             num_bytes)
        )  # fmt: skip
    return made


class _Scheduler:
    """A quarter of a multiprocessor: its clock, its pipes, and its share of the memory."""

    def __init__(self, at: Point, sharing: float) -> None:
        """`sharing` schedulers divide the bandwidth."""
        self._bandwidth = at.bandwidth / sharing
        self._between_blocks = at.device.block_cycles

    def run(self, slots: Sequence[Sequence[Sequence[_Step]]]) -> float:
        """Play the warps: slot -> the programs it executes one after another.  Return the cycles until all end."""
        pipes = dict.fromkeys(("fma", "imad", "alu", "xu", "fp64", "lsu", "uniform", "control"), 0.0)
        memory = now = last = 0.0
        waiting = [iter(programs) for programs in slots]
        program = [next(w, None) for w in waiting]
        index = [0] * len(slots)
        ready = [0.0] * len(slots)  # when the next instruction may issue, but for its pipe
        barriers = [[0.0] * BARRIERS for _ in slots]
        alive = [k for k, p in enumerate(program) if p]
        while alive:
            chosen, when = alive[0], math.inf
            for k in alive:  # in order of age
                steps = program[k]
                assert steps is not None
                start = max(ready[k], pipes[steps[index[k]][0]])
                if start < when:
                    chosen, when = k, start
                    if start <= now:
                        break
            steps = program[chosen]
            assert steps is not None
            pipe, interval, stall, barrier, latency, _, num_bytes = steps[index[chosen]]
            start = max(when, now)
            now = start + 1
            pipes[pipe] = start + interval
            done = start + latency
            if num_bytes:
                memory = max(memory, start) + num_bytes / self._bandwidth
                done = memory + latency
            if barrier < BARRIERS:
                barriers[chosen][barrier] = max(barriers[chosen][barrier], done)
            index[chosen] += 1
            following = start + stall
            if index[chosen] == len(steps):
                last = max(last, following, memory)
                program[chosen] = next(waiting[chosen], None)
                index[chosen] = 0
                following += self._between_blocks
                alive.remove(chosen)
                if program[chosen] is None:
                    continue
                alive.append(chosen)
                steps = program[chosen]
                assert steps is not None
            mask = steps[index[chosen]][5]
            if mask:
                own = barriers[chosen]
                for k in range(BARRIERS):
                    if mask >> k & 1 and own[k] > following:
                        following = own[k]
            ready[chosen] = following
        return last


def _simulate(work: Work, resident: Occupancy, at: Point, blocks: int, busy: int) -> float:
    """Return the cycles of `blocks` blocks on each of `busy` multiprocessors."""
    parts = [
        _steps(part, at, in_loop=k == 1, scalar_bytes=work.scalar_bytes)
        for k, part in enumerate((work.body.before, work.body.loop, work.body.after))
    ]
    program = [*parts[0], *(parts[1] * work.passes), *parts[2]]
    slots: list[list[list[_Step]]] = [[] for _ in range(min(blocks, resident.blocks))]
    for k in range(blocks):
        slots[k % len(slots)].append(program)
    warps = work.block_warps // SCHEDULERS
    return _Scheduler(at, busy * SCHEDULERS).run([slot for slot in slots for _ in range(warps)])


def seconds(work: Work, resident: Occupancy, at: Point, numels: Sequence[int]) -> list[float]:
    """Return the time of one launch for each number of elements, with caches that hold none of them."""
    all_of_them = at.device.multiprocessors
    shorter = ROUNDS * resident.blocks
    short, long = (_simulate(work, resident, at, n, all_of_them) for n in (shorter, 2 * shorter))
    # no block is faster than its bytes
    least = work.block_elements * work.bytes_per_element * all_of_them / at.bandwidth
    slope = max((long - short) / shorter, least)
    found = []
    for numel in numels:
        blocks = -(-numel // work.block_elements)
        each = blocks / all_of_them
        if each > shorter:
            cycles = short + (each - shorter) * slope
        else:
            # a round that is not full is as long as its share of the blocks: memory serves all of them alike
            busy, floor = min(blocks, all_of_them), math.floor(each)
            cycles = _simulate(work, resident, at, math.ceil(each), busy)
            if floor >= 1:
                lower = _simulate(work, resident, at, floor, busy)
                cycles = lower + (cycles - lower) * (each - floor)
        found.append(max(cycles, blocks / all_of_them * least) / at.clock + at.launch_us * 1e-6)
    return found


def throughput(work: Work, seconds: float, numel: int) -> float:
    """Return bytes per second."""
    return work.bytes_per_element * numel / seconds
