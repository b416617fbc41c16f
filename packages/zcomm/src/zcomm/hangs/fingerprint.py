"""Fingerprints: a record of the collectives that a rank has issued.

A collective hangs because of something that a rank did or skipped *earlier*.  By then the back end knows a socket and
a time-out, but not the module, the source line or the training step.  So every collective leaves a fingerprint in its
group's ring when it is issued: its number in the group, its arguments, the caller's `context` and the line of the
user's program that led to it.  After a failure the ranks compare their rings (`diagnosis.py`).

Fingerprints are written on the hot path: they hold references and format nothing.  The source line is a code object
and an offset, found by walking frames without a traceback, and becomes text on demand.  No fingerprint holds a
tensor.

Rejected: torch's flight recorder (NCCL only, no labels, needs a separate tool).
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
from typing import Any, final

import attrs
import torch
from torch import Tensor

__all__ = ["context"]

RING_LENGTH = 256  # collectives that a group remembers
_STACK_LENGTH = 4  # frames of the user's program in a rank's position


@attrs.frozen(eq=False)
class Call:
    """Arguments of one collective, for error messages and trace records.  Holds no tensor."""

    op: str  # name of the public function
    label: str  # the caller's name for this call
    group_size: int  # ranks in the group
    dtype: str = ""  # of the payload, the larger of input and output, without "torch."; "" for a barrier
    numel: int = 0  # elements of the payload
    nbytes: int = 0  # bytes of the payload
    shape: tuple[int, ...] = ()  # of the payload
    device: torch.device | None = None  # of the payload

    @classmethod
    def of(cls, op: str, label: str, group_size: int, payload: Tensor) -> Call:
        dtype = str(payload.dtype).removeprefix("torch.")
        return cls(op, label, group_size, dtype, payload.numel(), payload.nbytes, payload.shape, payload.device)

    def __str__(self) -> str:
        payload = f" of {self.dtype}{list(self.shape)} on {self.device}" if self.dtype else ""
        return f"{call_name(self.op, self.label)}{payload} over {self.group_size} ranks"


def call_name(op: str, label: str) -> str:
    """Name of a collective in messages: `all_reduce 'grad_bucket[3]'`."""
    return f"{op} {label!r}" if label else op


class CallState(enum.IntEnum):
    """Progress of a collective on its own rank."""

    ISSUED = 0  # passed to the back end; no thread waits yet
    WAITING = 1  # a thread is in wait(), or in the issue, which may wait for other ranks too
    DONE = 2  # waited for with success, or rejected before it began
    FAILED = 3  # ended in an error, such as the back end's time-out


@final
@attrs.define(eq=False)
class Fingerprint:
    """One collective of one group.  Holds no tensor."""

    ring: Ring  # of its group
    sequence: int  # position in the group's order of issue, from 1
    call: Call  # op, label, dtype, numel
    detail: Any  # torch's reduction, or the sender's rank; None for other ops
    context: str  # the caller's `context`
    code: CodeType | None  # function of the user's program that led here; None if this thread has none
    offset: int  # instruction in `code`
    state: CallState = CallState.WAITING

    @property
    def site(self) -> str:
        return source_line(self.code, self.offset) if self.code is not None else ""

    @property
    def detail_text(self) -> str:
        """Text of `detail`: "sum", "max", "from rank 3", or ""."""
        if self.detail is None:
            return ""
        return f"from rank {self.detail}" if isinstance(self.detail, int) else _enum_name(self.detail)


@final
@attrs.define(eq=False)
class Ring:
    """The most recent collectives of one group.  Thread-safe."""

    name: str  # torch's name of the group, equal on its ranks
    ranks: tuple[int, ...]  # members, as global ranks
    backend: str = ""  # from compat.backend_of; "" outside a world
    timeout_s: float = 0.0  # time limit of the group's collectives
    title: str = ""  # the group in messages
    numbers: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))  # atomic, so no lock is needed
    last: deque[Fingerprint] = attrs.field(factory=lambda: deque(maxlen=RING_LENGTH))

    def add(self, call: Call, detail: Any) -> Fingerprint:
        """Record a collective that the calling thread is about to issue."""
        code, offset = _user_frame(sys._getframe(1))
        fingerprint = Fingerprint(self, next(self.numbers), call, detail, _context_text, code, offset)
        self.last.append(fingerprint)
        return fingerprint

    def entries(self) -> list[Fingerprint]:
        """Return a copy in order of issue; other threads may write meanwhile."""
        return sorted(self.last.copy(), key=lambda entry: entry.sequence)


_lock = threading.RLock()  # guards changes of _contexts and _context_text
_contexts: tuple[context, ...] = ()  # open contexts, process-wide as traces are: autograd has threads of its own
_context_text = ""  # their texts, joined on change so that no collective pays for it


@final
class context:  # noqa: N801 - a verb: `with zcomm.context("step 12"):`
    """Annotate the collectives issued inside the block, for the report of one that fails.

        with zcomm.context("step 12"), zcomm.context("backward of blocks.3.mlp"):
            ...  # collectives issued here, on any thread, are "step 12, backward of blocks.3.mlp"

    Process-wide, because autograd runs hooks on its own threads.  Costs about two microseconds.  One object may be
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
    global _contexts, _context_text
    with _lock:
        _contexts = change()
        _context_text = ", ".join([one.text for one in _contexts])


def current_context() -> str:
    """Texts of the open contexts, joined; "" without one."""
    return _context_text


def position(frame: FrameType | None) -> list[str]:
    """Source lines of a thread: the innermost frames of the user's program, after the library frame it waits in."""
    found: list[str] = []
    inner = frame
    while frame is not None and len(found) < _STACK_LENGTH:
        if not _is_library(frame.f_code.co_filename):
            found.append(source_line(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    if inner is not None and _is_library(inner.f_code.co_filename):
        found.insert(0, source_line(inner.f_code, inner.f_lasti))
    return found


def source_line(code: CodeType, offset: int) -> str:
    """Format an instruction as `file.py:88 in function`."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            line = number
    return f"{short_path(code.co_filename)}:{line} in {code.co_name}"


def short_path(filename: str) -> str:
    """Path relative to the working folder or to the library folder; absolute elsewhere."""
    try:
        here = os.getcwd() + os.sep
    except OSError:  # the folder has been removed
        here = filename
    below_packages = filename.rpartition(f"-packages{os.sep}")[2]
    return below_packages.removeprefix(here).removeprefix(_STANDARD)


def _user_frame(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """Find the innermost frame outside every library."""
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


_LIBRARIES = ("zcomm", "zpartition", "zengine", "torch")  # their lines do not help a user
_STANDARD = os.path.dirname(os.__file__) + os.sep
_libraries: dict[str, bool] = {}  # by file name: a process has few


def _is_library(filename: str) -> bool:
    """True for files of zcomm, zpartition, zengine, torch and the standard library."""
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
