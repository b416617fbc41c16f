"""Init recording: the operations that would fill a module's tensors, replayed later; see init.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zpartition import _compat
from zpartition._compat import tree_flatten, tree_map_only

__all__ = ["GeneratorMarks", "InitRecording", "Key", "Ref", "is_meta", "key_of"]

_META = torch.device("meta")
# In-place operations that overwrite all of the old content.
_OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_",
                         "log_normal_", "cauchy_", "geometric_"})  # fmt: skip

Key = int  # identity of a meta tensor's storage


@attrs.frozen(eq=False)
class Ref:
    """A meta tensor with its strides at the time of an operation."""

    key: Key
    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Ref:
        offset = int(tensor.storage_offset())
        return cls(key_of(tensor), tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), offset)

    def seen_in(self, flat: Tensor) -> Tensor:
        """Return the real tensor in the bytes of its storage."""
        return flat.view(self.dtype).as_strided(self.size, self.strides, self.offset)


@attrs.frozen(eq=False)
class RecordedOp:
    """One operation."""

    run: Callable[..., Any]
    args: tuple[Any, ...]  # with a Ref in the place of each tensor, like kwargs
    kwargs: dict[str, Any]
    outputs: tuple[Ref, ...]
    touched: frozenset[Key]  # storages that it reads or writes
    overwritten: Key | None  # storage whose old content it ignores
    generator: Tensor | None  # state of the random generator, if user code set it
    follows: int | None = None  # number of the operation whose state it continues, if not the previous one


@attrs.frozen(eq=False)
class GeneratorMark:
    """State of the random generator after a recorded operation that draws numbers."""

    step: int  # its number
    start: Tensor  # state set by user code, from which its numbers follow


@final
@attrs.define(eq=False)
class GeneratorMarks:
    """The random generator during recording: nothing is drawn, but user code may save and restore its state.

    After each operation that will draw, the generator is advanced by one number, so that its state identifies the
    operation it follows; a state that is not known was set by user code.
    """

    known: dict[bytes, GeneratorMark] = attrs.field(factory=dict)  # by hash of the state that represents it
    last: bytes = b""  # hash of the state after the last step that draws
    mark: GeneratorMark | None = None  # of that step

    def mark_draw(self, step: RecordedOp, number: int) -> RecordedOp:
        """Return operation `number`, which draws, with the origin of its random numbers."""
        state = torch.get_rng_state()
        key, mark = _hash(state), self.known.get(_hash(state))
        if mark is None:
            step = attrs.evolve(step, generator=state)
        elif key != self.last:
            step = attrs.evolve(step, follows=mark.step)
        _compat.draw_one()
        self.last = _hash(torch.get_rng_state())
        self.mark = self.known[self.last] = GeneratorMark(number, state if mark is None else mark.start)
        return step

    def rewind(self) -> None:
        """Reset the generator to its state before the recording, until the operations are replayed."""
        mark = self.known.get(_hash(torch.get_rng_state()))
        self.known.clear()
        if mark is not None:
            torch.set_rng_state(mark.start)
            self.mark = mark
            self.follow(mark.start)

    def follow(self, start: Tensor) -> None:
        """Let the generator end behind the last operation of a replay, if it is at `start` before."""
        if self.mark is not None:
            self.last = _hash(start)
            self.known = {self.last: attrs.evolve(self.mark, start=start)}

    def copy(self) -> GeneratorMarks:
        return attrs.evolve(self, known=dict(self.known))

    def end(self) -> int | None:
        """Return the operation that the generator will follow; None if user code has used it since."""
        mark = self.known.get(_hash(torch.get_rng_state()))
        return None if mark is None else mark.step


@final
@attrs.define(eq=False)
class InitRecording:
    """Operations that would have filled the tensors of a block."""

    steps: list[RecordedOp] = attrs.field(factory=list)
    constants: dict[Key, Tensor] = attrs.field(factory=dict)  # real values
    storages: dict[Key, Any] = attrs.field(factory=dict)  # kept, so that no identity is reused
    marks: GeneratorMarks = attrs.field(factory=GeneratorMarks)
    is_own: bool = True  # the numbers are those that this process would have drawn
    before: Callable[[Key], Tensor | None] = attrs.field(default=lambda _: None)  # content before the first step
    num_replays: int = 0  # how often its operations ran, here or in a recording that absorbed it

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute an operation on the meta device, and record it."""
        args, kwargs = tree_map_only(Tensor, self._on_meta, (args, kwargs))
        noted = tree_map_only(Tensor, Ref.of, (args, kwargs))
        if "device" in kwargs or any(argument.name == "device" for argument in func._schema.arguments):
            kwargs = {**kwargs, "device": _META}
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        for tensor in (*given, *made):
            self.storages.setdefault(key_of(tensor), tensor.untyped_storage())
        keys = set(map(key_of, given))
        is_view = bool(keys) and not func._schema.is_mutable and all(key_of(tensor) in keys for tensor in made)
        if not is_view:
            touched = frozenset(map(key_of, (*given, *made)))
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            overwritten, outputs = _overwritten(func, args, given), tuple(map(Ref.of, made))
            noted_args, noted_kwargs = noted
            step = RecordedOp(func, noted_args, noted_kwargs, outputs, touched, overwritten, None)
            self.steps.append(self.marks.mark_draw(step, len(self.steps)) if is_random else step)
        return result

    def record_filling(self, run: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record a function that fills `tensor` with random numbers in a data-dependent way."""
        self.storages.setdefault(key_of(tensor), tensor.untyped_storage())
        overwritten = key_of(tensor) if _is_whole(tensor) else None
        touched = frozenset({key_of(tensor)})
        step = RecordedOp(run, (Ref.of(tensor), *args), kwargs, (), touched, overwritten, None)
        self.steps.append(self.marks.mark_draw(step, len(self.steps)))
        return tensor

    @contextmanager
    def record_seeded(self, number: Tensor, seed: Callable[[int], None]) -> Iterator[None]:
        """Record a block whose random numbers follow `seed(value of number)`; later ones continue the outer sequence.

        number: (), of integers, in this recording.
        """
        kept: list[Tensor] = []

        def begin(value: Tensor) -> None:
            kept.append(torch.get_rng_state())
            seed(int(value))

        def end() -> None:
            torch.set_rng_state(kept.pop())

        outside = self.marks.last, self.marks.mark
        touched = frozenset({key_of(number)})
        with torch.random.fork_rng(devices=[]):
            step = RecordedOp(begin, (Ref.of(number),), {}, (), touched, None, None)
            self.steps.append(self.marks.mark_draw(step, len(self.steps)))
            yield
        self.steps.append(RecordedOp(end, (), {}, (), frozenset(), None, None))
        self.marks.last, self.marks.mark = outside

    def replay(self, deliver: Callable[[Key, Tensor], None], *, wanted: frozenset[Key]) -> None:
        """Execute all operations, and deliver every storage of `wanted` when it is finished: (key, flat uint8).

        The generator ends where the plain build would have left it, unless user code used it since, or the numbers
        are another rank's.  The order is equal on all ranks that recorded the same operations.
        """
        self.num_replays += 1
        real = dict(self.constants)
        order = _early(self.steps)
        steps = [self.steps[number] for number in order]
        last, final = _last_touches(steps)
        ends, states = self.marks.end(), dict[int | None, Tensor]()
        kept = {step.follows for step in steps} | {ends}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for index, (number, step) in enumerate(zip(order, steps)):
                if step.generator is not None or step.follows is not None:
                    torch.set_rng_state(states[step.follows] if step.generator is None else step.generator)
                self._run(step, real)
                if number in kept:
                    states[number] = torch.get_rng_state()
                for key in step.touched:
                    if (index, key) in last:
                        content = real.pop(key, None)
                        if content is not None and key in wanted and final[key] == index:
                            deliver(key, content)
                        del content  # before the next one is made
        for key in self.storages:
            if key in wanted and key not in final:
                deliver(key, real[key] if key in real else self._first(key))
        if ends is not None and self.is_own:
            torch.set_rng_state(states[ends])

    def absorb(self, other: InitRecording) -> None:
        """Continue with the operations of `other`, whose block has ended; `other` must not be used any more."""
        shift, mine, theirs = len(self.steps), self.before, other.before
        for step in other.steps:
            self.steps.append(step if step.follows is None else attrs.evolve(step, follows=step.follows + shift))
        for state, mark in other.marks.known.items():
            self.marks.mark = self.marks.known[state] = attrs.evolve(mark, step=mark.step + shift)
        self.constants.update(other.constants)
        self.storages.update(other.storages)
        self.is_own = self.is_own and other.is_own
        other.num_replays += 1

        def before(key: Key) -> Tensor | None:
            found = mine(key)
            return theirs(key) if found is None else found

        self.before = before

    def evaluate(self, tensor: Tensor) -> Tensor | None:
        """Compute the value of one tensor now; None if that needs random numbers."""
        needed, chosen = {key_of(tensor)}, []
        for step in reversed(self.steps):
            if step.touched & needed and _writes(step, needed):
                if _is_random(step):
                    return None
                needed |= step.touched
                chosen.append(step)
        real = {key: content.clone() for key, content in self.constants.items() if key in needed}
        with torch.no_grad():
            for step in reversed(chosen):
                self._run(step, real)
        key = key_of(tensor)
        return Ref.of(tensor).seen_in(real[key] if key in real else self._first(key)).clone()

    # -- helpers ---------------------------------------------------------------------------------

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a meta tensor in place of a real one."""
        if is_meta(tensor):
            return tensor
        stand_in = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        self.storages[key_of(stand_in)] = stand_in.untyped_storage()
        flat = torch.empty(stand_in.untyped_storage().nbytes(), dtype=torch.uint8)
        Ref.of(stand_in).seen_in(flat).copy_(tensor.detach())
        self.constants[key_of(stand_in)] = flat
        return stand_in

    def _first(self, key: Key) -> Tensor:
        """Return the bytes of a storage before any operation."""
        found = self.before(key)
        return torch.empty(self.storages[key].nbytes(), dtype=torch.uint8) if found is None else found

    def _run(self, step: RecordedOp, real: dict[Key, Tensor]) -> None:
        def made(ref: Ref) -> Tensor:
            if ref.key not in real:
                real[ref.key] = self._first(ref.key)
            return ref.seen_in(real[ref.key])

        args, kwargs = tree_map_only(Ref, made, (step.args, step.kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        given = {leaf.key for leaf in tree_flatten((step.args, step.kwargs))[0] if isinstance(leaf, Ref)}
        results = [leaf for leaf in tree_flatten(step.run(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
        for ref, result in zip(step.outputs, results):
            if ref.key not in given:
                made(ref).copy_(result)


def is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # `tensor.is_meta` is False inside `Init`


def key_of(tensor: Tensor) -> Key:
    return _compat.storage_key(tensor)


def _hash(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def _early(steps: Sequence[RecordedOp]) -> list[int]:
    """Return an order of the operations that finishes tensors early: each operation as soon as its inputs exist.

    Casts, and shards of experts, are recorded last; executed last, they would need the whole model in memory.
    Operations on the same storage keep their order, and so do those that draw random numbers.
    """
    places: list[tuple[int, int]] = []
    latest: dict[Key, int] = {}  # place of the last operation on each storage; later ones come behind it
    for index, step in enumerate(steps):
        before = [latest[key] for key in step.touched if key in latest]
        place = index if _is_random(step) or not before else max(before)
        latest.update(dict.fromkeys(step.touched, place))
        places.append((place, index))
    return [index for _, index in sorted(places)]


def _last_touches(steps: Sequence[RecordedOp]) -> tuple[set[tuple[int, Key]], dict[Key, int]]:
    """Return (operation, storage) after which the content is not needed; and the last operation of each storage."""
    found: set[tuple[int, Key]] = set()
    final: dict[Key, int] = {}
    needed: dict[Key, bool] = {}  # by the next step that touches the storage
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        for key in step.touched:
            if not needed.get(key, False):
                found.add((index, key))
            final.setdefault(key, index)
            needed[key] = key != step.overwritten
    return found, final


def _writes(step: RecordedOp, keys: set[Key]) -> bool:
    """Return whether an operation changes one of these storages, as far as its schema tells."""
    schema = getattr(step.run, "_schema", None)
    return schema is None or schema.is_mutable or any(output.key in keys for output in step.outputs)


def _is_random(step: RecordedOp) -> bool:
    tags = getattr(step.run, "tags", None)
    return tags is None or torch.Tag.nondeterministic_seeded in tags


def _overwritten(func: Any, args: tuple[Any, ...], given: Sequence[Tensor]) -> Key | None:
    """Return the storage that `func` fills without reading it."""
    if func._schema.name.rpartition("::")[2] not in _OVERWRITES or not args or not isinstance(args[0], Tensor):
        return None
    key = key_of(args[0])
    return key if _is_whole(args[0]) and sum(key_of(tensor) == key for tensor in given) == 1 else None


def _is_whole(tensor: Tensor) -> bool:
    """Return whether `tensor` covers all of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
