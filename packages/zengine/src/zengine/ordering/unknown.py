"""Unknown values: tensors with memory that nobody computes or touches.

Problem.  To see in which order a rank launches its collectives, its whole program must run, but not its arithmetic:
a thousand ranks of a large model fit neither time nor memory.  Tensors without memory (meta, fake) have no addresses,
by which stage 3 finds its weights, and cannot hold what a program knows without data, such as the names that ranks
exchange.

Design.  Every tensor is an ordinary CPU tensor, and every storage is either known or unknown.  What a program makes
from known values is computed as ever, if it is small.  Parameters, batches, random numbers and everything that
depends on them are unknown: their operations run on meta tensors, for the shapes, once for equal arguments, and the
results are memory that is reserved and never touched.  Views are real, so addresses are.

A program that reads an unknown value (`item`, `tolist`, a branch) takes a decision that depends on data.  `decide`
answers, or raises: no branch is taken by accident.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zengine._compat import dispatch_mode, storage_key

__all__ = ["Undecided", "UnknownValues"]

Decide = Callable[[Tensor, str], Any]  # (what is read, operation) -> a number, or nested lists of them

_LARGEST = 1 << 16  # elements that are computed, if they are known
_READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
_COUNTS = frozenset(
    {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
)  # shapes from values
_ORDERS = frozenset({"randperm"})  # computed, although they are random: orders of samples
_SEEDS = frozenset({"randint", "random_"})  # these, too, if they are small
_MOST_SEEDS = 4


class Undecided(RuntimeError):
    """A decision depends on data, and no oracle answers it."""


@attrs.frozen
class _Kind:
    """An operation by its schema."""

    is_view: bool  # results share memory with arguments, and nothing is written
    writes: tuple[int | str, ...]  # arguments that it changes, by position or name


@attrs.frozen
class _Result:
    """A result of an operation on unknown values."""

    source: int  # tensor argument that it is; -1: new memory
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@final
class UnknownValues:
    """Runs a program without arithmetic; see the module."""

    def __init__(self, decide: Decide, rules: dict[Any, Any]) -> None:
        """decide: answers what is read.  rules: shapes of results, by operation and shapes; shared and extended."""
        self._decide, self._rules = decide, rules
        self._unknown: dict[int, Any] = {}  # key of a storage -> a weak reference, which keeps the key unique
        self._computes = threading.local()  # .on: while `computing`

    @contextmanager
    def running(self) -> Iterator[None]:
        """Operations inside compute known values only."""
        before = {name: vars(Tensor).get(name) for name in ("tolist", "numpy")}
        base = {name: getattr(Tensor, name) for name in before}
        with dispatch_mode(self._answer):
            try:
                for name in before:
                    setattr(Tensor, name, self._reader(name, base[name]))
                yield
            finally:
                for name, was in before.items():
                    if was is None:
                        delattr(Tensor, name)
                    else:
                        setattr(Tensor, name, was)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute everything inside, on this thread, however large it is."""
        self._computes.on = True
        try:
            yield
        finally:
            self._computes.on = False

    def is_unknown(self, tensor: Tensor) -> bool:
        """Return whether the values of `tensor` depend on data."""
        return not tensor.is_meta and storage_key(tensor)[0] in self._unknown

    def mark(self, tensor: Tensor) -> Tensor:
        """Make the values of `tensor`, and of all that shares its memory, unknown; return it."""
        if not tensor.is_meta:
            key, make_reference = storage_key(tensor)
            if key not in self._unknown:
                self._unknown[key] = make_reference()
        return tensor

    def unmark(self, tensor: Tensor) -> None:
        """Make the values of `tensor` known: all of its memory has been written."""
        self._unknown.pop(storage_key(tensor)[0], None)

    # -- reading ---------------------------------------------------------------------------------

    def _reader(self, name: str, base: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.is_unknown(tensor):
                return base(tensor, *args, **kwargs)
            found = self._decide(tensor, name)
            return found if name == "tolist" else torch.tensor(found, dtype=tensor.dtype).numpy()

        return read

    # -- operations ------------------------------------------------------------------------------

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(self._computes, "on", False):
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        _collect(args, tensors)
        _collect(tuple(kwargs.values()), tensors)
        if any(tensor.is_meta for tensor in tensors) or str(kwargs.get("device", "")) == "meta":
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        unknown = [tensor for tensor in tensors if self.is_unknown(tensor)]
        if unknown and name in _READS:
            return self._decide(unknown[0], name)
        kind = _kind_of(func)
        if kind.is_view or (not unknown and self._is_small(func, kind, name, args, kwargs, tensors)):
            return func(*args, **kwargs)
        if unknown and name in _COUNTS:
            return self._counted(unknown[0], name)
        return self._skip(func, args, kwargs, tensors, kind)

    def _is_small(
        self, func: Any, kind: _Kind, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> bool:
        """Return whether to compute an operation on known values."""
        if torch.Tag.nondeterministic_seeded in func.tags and name not in _ORDERS | _SEEDS:
            return False
        if name in _SEEDS and not _is_seed(args):
            return False
        largest = max((tensor.numel() for tensor in tensors), default=0)
        if name.startswith(("empty", "new_empty")):
            return True  # takes no time
        if not tensors and args and isinstance(args[0], (list, tuple)):  # zeros, full, ...
            for size in args[0]:
                largest = max(largest, 1) * max(int(size), 1) if isinstance(size, int) else largest
        return largest <= _LARGEST

    def _counted(self, tensor: Tensor, name: str) -> Any:
        """Return the result of an operation whose shape depends on values."""
        count = int(self._decide(tensor, name))
        if name == "nonzero":
            return self._new((count, tensor.dim()), torch.int64)
        found = self._new((count,), tensor.dtype)
        return found if name == "masked_select" else (found, self._new(tuple(tensor.shape), torch.int64), found)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        self.mark(made)
        return made

    def _skip(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], kind: _Kind) -> Any:
        """Return results of the right shapes, with unknown values."""
        for place in kind.writes:
            value = kwargs.get(place) if isinstance(place, str) else (args[place] if place < len(args) else None)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, Tensor):
                    self.mark(tensor)
        key: Any = (func, _key(args), _key(tuple(kwargs.items())))
        try:
            rule = self._rules.get(key)
        except TypeError:  # an argument that cannot be hashed
            key = rule = None
        if rule is None:
            rule = _derive(func, args, kwargs, tensors)
            if key is not None:
                self._rules[key] = rule
        return _mapped(rule, lambda result: self._made(result, tensors))

    def _made(self, result: _Result, tensors: list[Tensor]) -> Tensor:
        if result.source >= 0:
            return tensors[result.source]
        made = torch.empty_strided(result.shape, result.stride, dtype=result.dtype)
        self.mark(made)
        return made


@functools.cache
def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    writes: list[int | str] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else index)
    aliases = any(result.alias_info is not None for result in schema.returns)
    return _Kind(aliases and not writes, tuple(writes))


def _is_seed(args: Sequence[Any]) -> bool:
    """Return whether a random operation draws few whole numbers: `randint(..., size)` or `tensor.random_()`."""
    if isinstance(args[0], Tensor):
        return args[0].numel() <= _MOST_SEEDS
    sizes = next((each for each in args if isinstance(each, (list, tuple))), ())
    return math.prod(sizes) <= _MOST_SEEDS


def _collect(values: Any, into: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            into.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, into)


def _key(value: Any) -> Any:
    """Return what the shapes of results depend on."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset() == 0
    if isinstance(value, (list, tuple)):
        return type(value), *[_key(each) for each in value]
    return type(value), value


def _derive(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Run the meta kernel; return the structure of its results with a _Result for each tensor."""
    metas: dict[int, Tensor] = {}
    order: list[Tensor] = []

    def on_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in metas:
                span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()) if size)
                flat = torch.empty(max(span, 0), dtype=value.dtype, device="meta")
                metas[id(value)] = flat.as_strided(value.shape, value.stride())
            return metas[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)([on_meta(each) for each in value])
        return torch.device("meta") if isinstance(value, torch.device) else value

    given, named = [on_meta(value) for value in args], {name: on_meta(value) for name, value in kwargs.items()}
    if not tensors and any(argument.name == "device" for argument in func._schema.arguments):
        named["device"] = torch.device("meta")
    named = {name: value for name, value in named.items() if name != "generator"}
    order = [metas[id(tensor)] for tensor in tensors]
    try:
        found = func(*given, **named)
    except (RuntimeError, NotImplementedError) as error:
        raise Undecided(f"{func} depends on values, or has no shapes of its own: {error}") from error
    return _mapped(found, lambda result: _described(result, order))


def _described(result: Tensor, sources: list[Tensor]) -> _Result:
    shape, stride = tuple(result.shape), tuple(result.stride())
    for index, source in enumerate(sources):
        if result is source:
            return _Result(index, shape, stride, result.dtype)
    return _Result(-1, shape, stride, result.dtype)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (Tensor, _Result)):
        return change(value)
    return type(value)([_mapped(each, change) for each in value]) if isinstance(value, (list, tuple)) else value
