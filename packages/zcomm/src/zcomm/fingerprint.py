"""What a rank remembers of the collectives that it issued.

A collective hangs because of something that a rank did or left out *before*: the back end then knows a socket and a
time, and not which module was gathered, at which line, in which step.  So every collective leaves a fingerprint in a
ring of its group when it is issued: its number in the group, what was asked, what the caller said it was doing
(`context`) and the line of the user's program that led there.  After a failure the ranks compare their rings
(`diagnosis.py`).

A fingerprint is written on the hot path, so it holds references and does no formatting: the line is a code object
and an offset, found by walking frames and not by making a traceback, and becomes text when somebody asks.  It holds
no tensor.

Rejected: torch's flight recorder, which exists for NCCL only, knows no labels, and needs a tool to be read.
"""

from __future__ import annotations

import enum
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, final

import attrs

if TYPE_CHECKING:
    from zcomm.handles import Call

__all__ = ["context"]

RING_LENGTH = 256  # collectives a group remembers
_STACK_LENGTH = 4  # frames of the user's program that are told of a rank's position


class State(enum.IntEnum):
    """How far a collective is, as its own rank sees it."""

    ISSUED = 0  # given to the back end; nobody waits yet
    WAITING = 1  # a thread stands in wait(), or in the issue, which may wait for other ranks too
    DONE = 2  # waited for with success, or refused before it began
    FAILED = 3  # ended in an error, by the back end's time-out for example


@final
@attrs.define(eq=False)
class Fingerprint:
    """One collective of one group.  Holds no tensor."""

    ring: Ring  # of its group
    sequence: int  # place in the group's order of issue, from 1
    call: Call  # op, label, dtype, numel
    detail: Any  # the reduction or the sender, as torch has it; None if the op has neither
    context: str  # what the caller said it was doing
    code: CodeType | None  # function of the user's program that led here; None if there is none on this thread
    offset: int  # instruction in `code`
    state: State = State.WAITING

    @property
    def site(self) -> str:
        return place(self.code, self.offset) if self.code is not None else ""

    @property
    def detail_text(self) -> str:
        """ "sum", "max", "from rank 3", or nothing."""
        if self.detail is None:
            return ""
        return f"from rank {self.detail}" if isinstance(self.detail, int) else _enum_name(self.detail)


@final
@attrs.define(eq=False)
class Ring:
    """The last collectives of one group.  Written by any thread."""

    name: str  # torch's name of the group, the same on its ranks
    ranks: tuple[int, ...]  # members, as ranks of the world
    backend: str = ""  # as compat.backend_of says it; "" outside a world
    timeout_s: float = 0.0  # how long a collective of the group may take
    title: str = ""  # the group in words
    numbers: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))  # one at a time, without a lock
    last: deque[Fingerprint] = attrs.field(factory=lambda: deque(maxlen=RING_LENGTH))

    def add(self, call: Call, detail: Any) -> Fingerprint:
        """Remember a collective that the calling thread is about to issue."""
        code, offset = _program_site(sys._getframe(1))
        entry = Fingerprint(self, next(self.numbers), call, detail, _said, code, offset)
        self.last.append(entry)
        return entry

    def entries(self) -> list[Fingerprint]:
        """A copy in order of issue, made while other threads may write."""
        return sorted(self.last.copy(), key=lambda entry: entry.sequence)


_lock = threading.RLock()  # guards changes of _contexts and _said
_contexts: tuple[context, ...] = ()  # those open now, process-wide as traces are: autograd has threads of its own
_said = ""  # their texts, joined when they change so that no collective pays for it


@final
class context:  # noqa: N801 - a verb: `with zcomm.context("step 12"):`
    """Say what this process is doing, for the report of a collective that fails meanwhile.

        with zcomm.context("step 12"), zcomm.context("backward of blocks.3.mlp"):
            ...  # collectives issued here, on any thread, are "step 12, backward of blocks.3.mlp"

    Process-wide, because autograd runs hooks on threads of its own.  Costs about two microseconds; one object may be
    entered once at a time.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> context:
        _set_contexts(lambda: (*_contexts, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trail: TracebackType | None
    ) -> None:
        _set_contexts(lambda: tuple(other for other in _contexts if other is not self))


def _set_contexts(change: Callable[[], tuple[context, ...]]) -> None:
    global _contexts, _said
    with _lock:
        _contexts = change()
        _said = ", ".join([one.text for one in _contexts])


def said() -> str:
    """What the process is doing now, as far as anybody said."""
    return _said


def position(frame: FrameType | None) -> list[str]:
    """Where a thread is: the innermost frames of the user's program, and first the library they wait in, if any."""
    found: list[str] = []
    inner = frame
    while frame is not None and len(found) < _STACK_LENGTH:
        if not _is_library(frame.f_code.co_filename):
            found.append(place(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    if inner is not None and _is_library(inner.f_code.co_filename):
        found.insert(0, place(inner.f_code, inner.f_lasti))
    return found


def place(code: CodeType, offset: int) -> str:
    """`file.py:88 in function`."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            line = number
    return f"{short_path(code.co_filename)}:{line} in {code.co_name}"


def short_path(filename: str) -> str:
    """The path below the working folder or below where libraries lie; whole if it is elsewhere."""
    try:
        here = os.getcwd() + os.sep
    except OSError:  # the folder has been removed
        here = filename
    below_packages = filename.rpartition(f"-packages{os.sep}")[2]
    return below_packages.removeprefix(here).removeprefix(_STANDARD)


def _program_site(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """The innermost frame that belongs to no library."""
    known = _libraries
    while frame is not None:
        code = frame.f_code
        is_library = known.get(code.co_filename)
        if is_library is None:
            is_library = _is_library(code.co_filename)
        if not is_library:
            return code, frame.f_lasti
        frame = frame.f_back
    return None, 0


_LIBRARIES = ("zcomm", "zpartition", "zengine", "torch")  # whose lines tell a user nothing
_STANDARD = os.path.dirname(os.__file__) + os.sep
_libraries: dict[str, bool] = {}  # by file name: a process has few


def _is_library(filename: str) -> bool:
    """Whether a file belongs to us, to torch or to Python itself."""
    found = _libraries.get(filename)
    if found is None:
        modules = [sys.modules.get(name) for name in _LIBRARIES]
        files = [getattr(module, "__file__", None) for module in modules]
        folders = [os.path.dirname(file) + os.sep for file in files if file]
        standard = filename.startswith(_STANDARD) and "-packages" + os.sep not in filename
        found = standard or filename.startswith(("<frozen ", *folders))
        _libraries[filename] = found
    return found


def _enum_name(value: Any) -> str:
    return str(value).rpartition(".")[2].lower()
