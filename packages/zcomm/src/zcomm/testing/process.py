"""One warm rank process, seen from the test process: start, messages, stack, end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import attrs

from zcomm.testing import rank as rank_module
from zcomm.testing.rank import DUMP_SIGNAL

RANK_NAME = "zcomm-rank"  # of the processes
START_LIMIT_S = 300.0  # for a process to start; the first also waits for the fork server to import torch
_PRELOAD = ["torch", "torch.distributed", "numpy", "zcomm", "zcomm.testing.rank"]
_preload: list[str] = []  # and those of `preload`


def preload(*modules: str) -> None:
    """Let the fork server import these modules, so that no rank spends time on it.

    Has no effect once a rank has started.  A module that cannot be imported is left out.  Importing one must start no
    thread: forked ranks would not have it.

    Raises:
        TypeError: something is not the name of a module.
    """
    for name in modules:
        if not isinstance(name, str):
            raise TypeError(f'preload takes names of modules, as in preload("torch", "my.module"), got {name!r}.')
    _preload.extend(name for name in modules if name not in _preload)


@attrs.define(eq=False)
class Rank:
    """One warm process."""

    process: BaseProcess
    connection: Connection  # jobs out, answers in
    stack_path: Path  # where the process writes its Python stack when asked, or when it crashes

    @classmethod
    def start(cls, stack_path: Path) -> Rank:
        """Fork a process from the fork server.  Not ready yet: see `await_ready`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, *(["pytest"] if "pytest" in sys.modules else []), *_preload])
        ours, theirs = context.Pipe()
        with _without_main_module():
            process = context.Process(
                target=rank_module.serve, args=(theirs, str(stack_path)), name=RANK_NAME, daemon=True
            )
            process.start()
        theirs.close()  # the end of the process then closes the connection
        return cls(process, ours, stack_path)

    def await_ready(self) -> None:
        if not self.connection.poll(START_LIMIT_S):
            raise RuntimeError(f"A rank process did not start within {START_LIMIT_S:.0f} s.\n{self.stack()}")
        try:
            self.connection.recv_bytes()
        except EOFError:
            raise RuntimeError(f"A rank process could not start: {self.exit_report()}") from None

    def send(self, message: bytes) -> None:
        """Send a message; the end of a process is noticed when its answer is awaited."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(message)

    def stack(self, within_s: float = 1.0) -> str:
        """Python stack of every thread in the process, most recent call first.

        A signal handler in C answers, so it works for a process that is stuck in native code too.
        """
        if self.process.pid is None or not self.process.is_alive():
            return "(the process is gone)"
        before = len(self.stack_path.read_text())
        os.kill(self.process.pid, DUMP_SIGNAL)
        deadline_s, text = time.monotonic() + within_s, ""
        while time.monotonic() < deadline_s:
            time.sleep(0.02)
            grown = self.stack_path.read_text()[before:]
            if grown and grown == text:
                return _user_frames(text) or "(not inside the function)"
            text = grown
        return "(no answer: the process is stopped, by SIGSTOP or a debugger)"

    def exit_report(self) -> str:
        """Exit code or signal of the process, and its Python stack if it crashed."""
        self.process.join(5.0)
        code = self.process.exitcode
        crash = _user_frames(self.stack_path.read_text())
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name} (signal {-code})\n{crash}"
        return f"the process exited with code {code} before the function returned\n{crash}"

    def kill(self) -> None:
        self.process.kill()

    def join(self) -> None:
        self.process.join(5.0)
        self.connection.close()


def _user_frames(stack: str) -> str:
    """Remove the harness from a stack (most recent call first): keep each thread's frames above `rank.call`.

    Harness threads outside the user's function are dropped.
    """
    threads = []
    for thread in stack.split("\n\n"):
        frames = thread.rstrip().split("\n")
        ours = [f'"{rank_module.__file__}"' in frame for frame in frames]
        if not any(ours):
            threads.append(frames)
        elif frames[ours.index(True)].endswith(" in call"):
            threads.append(frames[: ours.index(True)])
    return "\n\n".join("\n".join(frames) for frames in threads).strip()


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keep multiprocessing from executing the caller's main script in every new process.

    Functions travel by file path, so it is not needed; a script without an `if __name__ == "__main__"` guard would
    start itself again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
