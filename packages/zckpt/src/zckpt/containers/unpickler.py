"""A restricted unpickler: an interpreter of pickle instructions that calls only functions of a table.

Problem.  A pickle is a program.  The usual defence runs it in Python's own unpickler with a filter on names, and
every name that passes the filter is code.

Design.  The standard library's disassembler, which executes nothing, lists the instructions, and a small interpreter
runs them.  It makes numbers, strings and containers; a class or function that the program names is looked up in a
table (torch_file.py), whose entries are the only functions that run.  Any other name raises.

The work is bounded: keys are shallow and short (so hashing is cheap), containers are shared instead of copied, and a
budget in proportion to the program's length limits the values passed to all calls together, so no call can copy one
large value repeatedly.  Memory is bounded by the objects, not by the program: one byte of program makes a set of
200 bytes, so each instruction is charged what its object takes (`_COSTS`), and there is a limit of instructions too.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs

from zckpt.errors import CheckpointCorrupt

MAX_NBYTES = 1 << 26  # of a program, which holds no tensor data
MAX_OBJECT_NBYTES = 1 << 29  # of all objects that a program makes, also those that it drops
MAX_INSTRUCTIONS = 1 << 23  # seconds of work; a checkpoint of a hundred thousand tensors has half
_MAX_KEY = 1 << 12  # characters of a string, or bits of an int
_SIZED = (str, bytes, bytearray, tuple, list, dict, set, frozenset)
_MARK = object()

_COST = 16  # bytes of an instruction without an object of its own: its places on the stack and in containers
_COSTS = {
    **dict.fromkeys(("EMPTY_LIST", "LIST"), 88),
    **dict.fromkeys(("EMPTY_DICT", "DICT"), 96),
    **dict.fromkeys(("EMPTY_SET", "FROZENSET"), 248),
    **dict.fromkeys(("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"), 88),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), 136),  # an entry of a dict that doubles
    **dict.fromkeys(("SETITEM", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "BINPERSID"), 136),
}

Operation = Callable[["DataUnpickler", Any], None]


@final
@attrs.define(eq=False)
class Record:
    """An object of an unavailable class, as data.  Its repr is its kind only: shared content could be endless."""

    kind: str  # "module.Class"
    args: tuple[Any, ...] = attrs.field(default=(), repr=False)
    state: Any = attrs.field(factory=dict, repr=False)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the saved object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


@final
@attrs.frozen(eq=False)
class Constructor:
    """Replacement of a class or function that the program names; `make` is called instead."""

    name: str
    make: Callable[..., Any]


@final
@attrs.define(eq=False)
class DataUnpickler:
    """Interpreter of one pickle."""

    find: Callable[[str], Any]  # "module name" -> Constructor or value; raises CheckpointCorrupt if not allowed
    persistent: Callable[[Any], Any]  # persistent id -> value
    stack: list[Any] = attrs.field(factory=list, repr=False)  # no repr: shared content could be endless
    memo: dict[int, Any] = attrs.field(factory=dict, repr=False)
    left: int = 0  # values that may still be passed to calls

    def run(self, program: bytes) -> Any:
        """Run the program and return its object.  Raises CheckpointCorrupt with the byte position of the problem."""
        position, name, nbytes = 0, "", 0
        self.left = 8 * len(program) + 1000
        try:
            for number, (operation, argument, at) in enumerate(pickletools.genops(program)):
                position, name = at or 0, operation.name
                nbytes += _COSTS.get(name, _COST) + (sys.getsizeof(argument) if argument is not None else 0)
                if nbytes > MAX_OBJECT_NBYTES or number >= MAX_INSTRUCTIONS:
                    raise CheckpointCorrupt(
                        f"it makes objects of more than {MAX_OBJECT_NBYTES >> 20} MiB, or has more than "
                        f"{MAX_INSTRUCTIONS:,} instructions: no checkpoint needs that beside its tensors"
                    )
                if name == "STOP":
                    value = self.pop()
                    if self.stack:
                        raise ValueError(f"{len(self.stack)} values left on the stack")
                    return value
                if name not in _OPERATIONS:
                    raise CheckpointCorrupt(f"instruction {name} is not allowed: plain data does not need it")
                _OPERATIONS[name](self, argument)
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(f"{error} (byte {position} of its pickle)") from None
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
            raise CheckpointCorrupt(
                f"its pickle is invalid at byte {position} ({name or 'start'}): {type(error).__name__} {error}"
            ) from None
        except RecursionError:
            raise CheckpointCorrupt(f"its pickle is nested too deeply (byte {position})") from None
        raise CheckpointCorrupt("its pickle has no end")

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark in place of a value")
        return value

    def pop_mark(self) -> list[Any]:
        index = len(self.stack) - 1
        while self.stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise ValueError("no mark")
        items = self.stack[index + 1 :]
        del self.stack[index:]
        return items

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise TypeError(f"expected a {kind.__name__}")
        return self.stack[-1]

    def memoize(self, key: int) -> None:
        self.memo[key] = self.top(object)

    def reduce(self) -> None:
        args, constructor = self.pop(), self.pop()
        if not isinstance(constructor, Constructor) or not isinstance(args, tuple):
            raise CheckpointCorrupt(f"it calls a {type(constructor).__name__}, which is not a class or function")
        self.left -= len(args) + sum(len(each) for each in args if isinstance(each, _SIZED))
        if self.left < 0:
            raise CheckpointCorrupt(f"it passes large values repeatedly to {constructor.name!r} and others")
        self.stack.append(constructor.make(*args))

    def build(self) -> None:
        """Set the attributes of an object: kept for a record, ignored for plain containers."""
        state = self.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):
            raise CheckpointCorrupt(f"it sets attributes of a {type(target).__name__}")


def plain_key(value: Any) -> Any:
    """Check a key or a member of a set: a plain value or a short tuple of them, so that hashing is cheap."""
    if isinstance(value, tuple) and len(value) <= 16:
        return tuple(_plain(item) for item in value)
    return _plain(value)


def _plain(value: Any) -> Any:
    size = value.bit_length() if isinstance(value, int) else len(value) if isinstance(value, (str, bytes)) else 0
    if size <= _MAX_KEY and (value is None or isinstance(value, (str, int, float, bytes, Record))):
        return value
    raise TypeError(f"a {type(value).__name__} as a key")


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return ((plain_key(key), value) for key, value in zip(items[::2], items[1::2]))


def _push(unpickler: DataUnpickler, value: Any) -> None:
    unpickler.stack.append(value)


def _text(unpickler: DataUnpickler, value: Any) -> None:
    """Push an 8-bit string of Python 2."""
    unpickler.stack.append(value.decode("latin-1") if isinstance(value, bytes) else value)


def _tuple(count: int) -> Operation:
    def make(unpickler: DataUnpickler, _: Any) -> None:
        unpickler.stack.append(tuple(reversed([unpickler.pop() for _ in range(count)])))

    return make


def _stack_global(unpickler: DataUnpickler, _: Any) -> None:
    name, module = unpickler.pop(), unpickler.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError(f"a {type(name).__name__} in a {type(module).__name__} as a name")
    unpickler.stack.append(unpickler.find(f"{module} {name}"))


def _append(unpickler: DataUnpickler, _: Any) -> None:
    item = unpickler.pop()
    unpickler.top(list).append(item)


def _appends(unpickler: DataUnpickler, _: Any) -> None:
    items = unpickler.pop_mark()
    unpickler.top(list).extend(items)


def _set_item(unpickler: DataUnpickler, _: Any) -> None:
    value, key = unpickler.pop(), unpickler.pop()
    unpickler.top(dict)[plain_key(key)] = value


def _set_items(unpickler: DataUnpickler, _: Any) -> None:
    items = unpickler.pop_mark()
    unpickler.top(dict).update(_pairs(items))


def _add_items(unpickler: DataUnpickler, _: Any) -> None:
    items = unpickler.pop_mark()
    unpickler.top(set).update(map(plain_key, items))


def _new_object(unpickler: DataUnpickler, _: Any) -> None:
    unpickler.reduce()


def _new_object_with_keywords(unpickler: DataUnpickler, _: Any) -> None:
    if unpickler.pop():
        raise CheckpointCorrupt("it makes an object with keyword arguments, which no plain data does")
    unpickler.reduce()


_OPERATIONS: Mapping[str, Operation] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda unpickler, _: None),
    "MARK": lambda unpickler, _: unpickler.stack.append(_MARK),
    "POP": lambda unpickler, _: unpickler.stack.__delitem__(-1),
    "POP_MARK": lambda unpickler, _: unpickler.pop_mark().clear(),
    "DUP": lambda unpickler, _: unpickler.stack.append(unpickler.top(object)),
    **{name: (lambda unpickler, _, value=value: unpickler.stack.append(value))  # type: ignore[misc]
       for name, value in (("NONE", None), ("NEWTRUE", True), ("NEWFALSE", False))},
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"), _push),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), _push),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _text),
    "EMPTY_LIST": lambda unpickler, _: unpickler.stack.append([]),
    "EMPTY_DICT": lambda unpickler, _: unpickler.stack.append({}),
    "EMPTY_SET": lambda unpickler, _: unpickler.stack.append(set()),
    "EMPTY_TUPLE": _tuple(0),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda unpickler, _: unpickler.stack.append(tuple(unpickler.pop_mark())),
    "LIST": lambda unpickler, _: unpickler.stack.append(unpickler.pop_mark()),
    "DICT": lambda unpickler, _: unpickler.stack.append(dict(_pairs(unpickler.pop_mark()))),
    "FROZENSET": lambda unpickler, _: unpickler.stack.append(frozenset(map(plain_key, unpickler.pop_mark()))),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "ADDITEMS": _add_items,
    "GLOBAL": lambda unpickler, name: unpickler.stack.append(unpickler.find(name)),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": lambda unpickler, _: unpickler.reduce(),
    "NEWOBJ": _new_object,
    "NEWOBJ_EX": _new_object_with_keywords,
    "BUILD": lambda unpickler, _: unpickler.build(),
    "BINPERSID": lambda unpickler, _: unpickler.stack.append(unpickler.persistent(unpickler.pop())),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda unpickler, key: unpickler.memoize(key)),
    "MEMOIZE": lambda unpickler, _: unpickler.memoize(len(unpickler.memo)),
    **dict.fromkeys(
        ("GET", "BINGET", "LONG_BINGET"), lambda unpickler, key: unpickler.stack.append(unpickler.memo[key])
    ),
}  # fmt: skip
