"""Listings of nvdisasm: instructions with their control bits, control flow, and the path that an update takes.

Problem: a kernel's SASS has the fast path (aligned rows, whole groups), a path that checks bounds, and subroutines
for roots and quotients out of the fast range.  Only the first is executed for nearly all elements.

Design: a path through the control flow is chosen, not simulated.  Blocks that call subroutines or repair divergence
are removed.  Of the remaining paths through the loop that moves most bytes, the one with most bytes of wide accesses
is the fast path, because the path that checks bounds has none; of equal ones, the one with most instructions counts
(decay added to the gradient), and the one with fewest is reported beside it.

Control bits are those of 128-bit instructions since Volta (Jia et al., "Dissecting the NVIDIA Volta GPU architecture
via microbenchmarking", arXiv 1804.06826): stall cycles, and six barriers for results of variable latency.

Rejected: emulation of SASS (semantics of 100 opcodes to decide four branches); profiles (need a GPU).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

__all__ = ["Body", "Instruction", "bodies", "inner_loop", "parse"]

_LINE = re.compile(
    r"^\s+/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P(?:\d|T))\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<rest>[^;]*);"
    r"(?:\s*/\* 0x[0-9a-f]{16} \*/)?"
)
_CONTROL = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"^(?P<name>[.$\w]+):\s*$")
_TARGET = re.compile(r"`\((?P<name>[.$\w]+)\)")
_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')
NO_BARRIER = 7


@attrs.frozen(kw_only=True)
class Instruction:
    """One instruction of a listing."""

    address: int
    op: str  # with its modifiers, such as LDG.E.128
    operands: str = ""
    guard: str = ""  # predicate, such as !P0; "" if it always executes
    stall: int = 1  # cycles until the same warp may issue again
    write_barrier: int = NO_BARRIER  # released when the result is written
    wait_mask: int = 0  # barriers that must be released before it issues

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.op.split(".")[0]

    @property
    def modifiers(self) -> frozenset[str]:
        """The modifiers of the opcode."""
        return frozenset(self.op.split(".")[1:])

    @property
    def access_bytes(self) -> int:
        """Bytes per thread of an access to memory."""
        for name, width in {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}.items():
            if name in self.modifiers:
                return width
        return 4

    @property
    def is_wide(self) -> bool:
        """Whether it accesses global memory by zk_load* or zk_store*, as only the fast path does."""
        return self.name in ("LDG", "STG")

    @property
    def is_global(self) -> bool:
        """Whether it accesses device memory."""
        return self.name in ("LDG", "STG", "LD", "ST")


@attrs.frozen(kw_only=True)
class Body:
    """The paths of a kernel: a warp executes `before`, `loop` for each group, then `after`."""

    before: tuple[Instruction, ...]
    loop: tuple[Instruction, ...]  # empty if the kernel has no loop over memory
    after: tuple[Instruction, ...]
    fewest: int  # instructions of the shortest fast path through the loop


def parse(text: str) -> dict[str, tuple[list[Instruction], dict[str, int]]]:
    """Return kernel -> (instructions, label -> address) of `nvdisasm -c -hex`, without subroutines."""
    found: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    pending: list[str] = []
    is_open = False
    for line in text.splitlines():
        if line.startswith("//---") and ".text." in line:
            name = line.split(".text.")[1].split()[0]
            code, labels, is_open = [], {}, True
            found[name] = code, labels
        elif label := _LABEL.match(line):
            is_open = is_open and not label["name"].startswith("$__internal")
            pending.append(label["name"])
        elif is_open and (made := _LINE.match(line)):
            labels.update(dict.fromkeys(pending, int(made["at"], 16)))
            pending.clear()
            code.append(
                Instruction(
                    address=int(made["at"], 16), op=made["op"], operands=line.split(made["op"], 1)[1].strip(),
                    guard=made["guard"] or "",
                )
            )  # fmt: skip
        elif is_open and code and (control := _CONTROL.match(line)):
            code[-1] = _controlled(code[-1], int(control[1], 16))
    if not found:
        raise ValueError("the listing has no section .text.<kernel>; make it by `nvdisasm -c -hex file.cubin`.")
    return found


def _controlled(instruction: Instruction, high: int) -> Instruction:
    """Decode bits 105 to 121, which are bits 41 to 57 of the upper word."""
    return attrs.evolve(instruction, stall=high >> 41 & 15, write_barrier=high >> 46 & 7, wait_mask=high >> 52 & 63)


def bodies(code: Sequence[Instruction], labels: Mapping[str, int]) -> list[Body]:
    """Return the fast paths of a kernel: one for each loop that moves memory, most bytes first.

    A kernel without such a loop has one body, with an empty loop.
    """
    graph = _Graph.of(code, labels)
    found = []
    for header in graph.headers():
        longest = graph.path(header, {header}, longest=True)
        if longest is None or not any(i.is_global for i in longest):
            continue
        shortest = graph.path(header, {header}, longest=False) or longest
        before = graph.path(graph.entry, {header}, longest=True) or []
        found.append(
            Body(
                before=tuple(before), loop=tuple(longest), after=tuple(graph.path_to_exit(header)),
                fewest=len(shortest),
            )
        )  # fmt: skip
    found.sort(key=lambda body: _weight(body.loop), reverse=True)
    whole = graph.path(graph.entry, set(), longest=True) or []
    return found or [Body(before=tuple(whole), loop=(), after=(), fewest=0)]


def inner_loop(
    code: Sequence[Instruction], labels: Mapping[str, int], name: str, count: int, *, longest: bool = False
) -> list[Instruction]:
    """Return a path of most bytes through the smallest loop with `count` instructions of an opcode, on any path.

    Of equal paths, the longest or the shortest.  For kernels with several loops inside one, which `bodies` takes as a
    whole.  Raises ValueError if there is none.
    """
    graph = _Graph.of(code, labels)
    loops = {header: graph.inside(header) for header in graph.headers()}
    names = {header: [i.name for at in inside for i in graph.blocks[at]] for header, inside in loops.items()}
    fitting = [header for header, found in names.items() if found.count(name) >= count]
    if not fitting:
        raise ValueError(f"no loop has {count} instructions {name}")
    header = min(fitting, key=lambda each: len(names[each]))
    inside = loops[header]
    edges = {at: tuple(to for to in graph.edges[at] if to in inside) for at in inside}
    path = _Graph({at: graph.blocks[at] for at in inside}, edges, header).path(header, {header}, longest=longest)
    return path or []


def _weight(path: Iterable[Instruction], longest: bool = True) -> tuple[int, int, int]:
    """Order paths: bytes of wide accesses, bytes of other accesses, instructions."""
    wide = other = count = 0
    for i in path:
        count += 1
        if i.is_wide:
            wide += i.access_bytes
        elif i.is_global:
            other += i.access_bytes
    return wide, other, count if longest else -count


@attrs.frozen
class _Graph:
    """Basic blocks by address, without those that no fast path enters."""

    blocks: Mapping[int, tuple[Instruction, ...]]
    edges: Mapping[int, tuple[int, ...]]
    entry: int

    @classmethod
    def of(cls, code: Sequence[Instruction], labels: Mapping[str, int]) -> _Graph:
        """Divide `code` into blocks."""
        leaders = {code[0].address, *labels.values()}
        for before, here in itertools.pairwise(code):
            if before.name in ("BRA", "BRX", "EXIT", "RET", "CALL", "JMP"):
                leaders.add(here.address)
        blocks: dict[int, list[Instruction]] = {}
        for i in code:
            if i.address in leaders:
                blocks[i.address] = current = []
            current.append(i)
        kept = {at: tuple(block) for at, block in blocks.items() if not any(map(_is_slow, block))}
        following = dict(zip(blocks, [*blocks][1:]))
        edges = {
            at: tuple(to for to in _successors(block[-1], following.get(at), labels) if to in kept)
            for at, block in kept.items()
        }
        return cls(kept, edges, code[0].address)

    def headers(self) -> list[int]:
        """Return the targets of edges back to a block on the way from the entry."""
        found: dict[int, None] = {}
        done: set[int] = set()
        way: dict[int, Iterator[int]] = {self.entry: iter(self.edges[self.entry])}  # a stack
        while way:
            at = next(reversed(way))
            to = next(way[at], None)
            if to is None:
                done.add(at)
                del way[at]
            elif to in way:
                found[to] = None
            elif to not in done:
                way[to] = iter(self.edges[to])
        return [*found]

    def inside(self, header: int) -> set[int]:
        """Return the blocks of the loop that begins at `header`, with those of loops inside it."""
        before: dict[int, list[int]] = {at: [] for at in self.blocks}
        for at, targets in self.edges.items():
            for to in targets:
                before[to].append(at)
        found = {header}
        for tail in before[header]:
            way, todo = {header, tail}, [tail] if tail != header else []
            while todo:
                new = [at for at in before[todo.pop()] if at not in way]
                way.update(new)
                todo += new
            if header == self.entry or self.entry not in way:  # else it is an edge into the loop
                found |= way
        return found

    def path(self, start: int, goals: set[int], *, longest: bool) -> list[Instruction] | None:
        """Return the best path from `start` to (not into) one of `goals`, or to the end of the kernel if none."""
        on_way: set[int] = set()

        @functools.cache
        def best(at: int) -> tuple[tuple[int, int, int], tuple[int, ...]] | None:
            on_way.add(at)
            found: list[tuple[tuple[int, int, int], tuple[int, ...]]] = []
            if not goals and self.blocks[at][-1].name == "EXIT":
                found.append(((0, 0, 0), ()))
            for to in self.edges[at]:
                if to in goals:
                    found.append(((0, 0, 0), ()))
                elif to not in on_way and (rest := best(to)) is not None:
                    found.append(rest)
            on_way.discard(at)
            if not found:
                return None
            weight, way = max(found)
            own = _weight(self.blocks[at], longest)
            return (own[0] + weight[0], own[1] + weight[1], own[2] + weight[2]), (at, *way)

        chosen = best(start)
        return None if chosen is None else [i for at in chosen[1] for i in self.blocks[at]]

    def path_to_exit(self, header: int) -> list[Instruction]:
        """Return the shortest path from a loop's header to the end of the kernel, outside the loop's memory."""
        ways = _Graph({at: b for at, b in self.blocks.items() if at == header or not self._is_inside(header, at)},
                      self.edges, self.entry)  # fmt: skip
        trimmed = _Graph(
            ways.blocks,
            {at: tuple(to for to in self.edges[at] if to in ways.blocks) for at in ways.blocks},
            self.entry,
        )
        return trimmed.path(header, set(), longest=True) or []

    def _is_inside(self, header: int, at: int) -> bool:
        return header in self._reached(at) and at in self._reached(header)

    def _reached(self, start: int) -> set[int]:
        seen: set[int] = set()
        todo = list(self.edges[start])
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += self.edges[at]
        return seen


def _is_slow(i: Instruction) -> bool:
    """Whether a block with `i` is never entered; a call under a predicate is a branch that is not taken."""
    return i.name in ("CALL", "RET", "WARPSYNC") and i.op != "WARPSYNC.ALL" and not i.guard


def _successors(last: Instruction, following: int | None, labels: Mapping[str, int]) -> list[int]:
    """Return the addresses that may follow a block; divergence (BRA.DIV) is not followed."""
    next_ones = [] if following is None else [following]
    if last.name == "BRX" and (targets := _TARGETS.search(last.operands)):
        return [labels[name] for name in targets[1].split(",") if name in labels]
    if last.name == "EXIT":
        return next_ones if last.guard else []
    if last.name != "BRA" or "DIV" in last.modifiers:
        return next_ones
    target = _TARGET.search(last.operands)
    to = [labels[target["name"]]] if target and target["name"] in labels else []
    is_conditional = bool(last.guard) or "P" in last.operands.split("`")[0]
    return [*to, *next_ones] if is_conditional else to
