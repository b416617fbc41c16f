"""Warm rank process: a loop that runs one function after another.

A rank lives through many tests, so no state of a test may reach the next one: environment, working directory, import
path, seeds, default dtype, threads, gradient mode and signal handlers are reset for every job.  The process group of
a job is destroyed only when *every* rank has returned, on a signal of the parent: a rank that closed its sockets
early would break the last collective of a slower one.

The fork server preloads this module, which must only import: a thread pool started before the fork would hang the
children.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

from zcomm import compat
from zcomm.shared import registry
from zcomm.testing.failure import Ending, RankReport, describe, is_lost_peer
from zcomm.testing.reference import FunctionRef, resolve

# requests the Python stack; unlikely to be used by tests
DUMP_SIGNAL = int(getattr(signal, "SIGRTMIN", signal.SIGUSR2))
READY = b"ready"  # rank -> parent: connected to the others, about to call the function
BACKEND_VARIABLE = "ZCOMM_TESTING_BACKEND"  # of the ranks' default group, such as "cpu:gloo,cuda:nccl"
GO, FINISHED = b"go", b"finished"  # parent -> rank: all are ready; all have returned


@attrs.frozen
class Job:
    """One function for one rank."""

    rank: int
    world_size: int
    store_path: str  # file of the rendezvous
    timeout_s: float  # the parent's time limit; collectives get more, so that the parent is first
    function: FunctionRef
    arguments: bytes  # pickle of (args, kwargs), loaded after the function's module
    environ: dict[str, str]  # the caller's environment
    cwd: str
    path: list[str]  # the caller's sys.path


def serve(connection: Connection, stack_path: str) -> None:
    """Run jobs until the parent closes the connection.

    Leaves with os._exit after a failure, so that peers see it at once.
    """
    _set_up_process(stack_path)
    connection.send_bytes(READY)
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
            answer, ended_well = _run(job, connection)
            sys.stdout.flush()  # the output belongs to its test
            connection.send_bytes(answer)
            if not ended_well:
                os._exit(1)
            connection.recv_bytes()  # FINISHED
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        _clean_up()


def _set_up_process(stack_path: str) -> None:
    """Once per process: exit with the parent, ignore Ctrl-C, register the stack dump, collect no imported module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="zcomm-parent").start()
    stack_file = open(stack_path, "w")  # noqa: SIM115 - must stay open for the signal handler
    faulthandler.enable(file=stack_file)
    faulthandler.register(DUMP_SIGNAL, file=stack_file, all_threads=True)
    gc.freeze()  # what the fork server has imported: a million objects that every full pass would visit, and copy


def _end_with_parent() -> None:
    """Exit when the test process ends, however it ends, whatever the function is doing.

    A broken pipe would only be noticed between jobs, and the fork server lives as long as its children.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank was not started by multiprocessing"
    wait([parent.sentinel])
    os._exit(1)


def _run(job: Job, connection: Connection) -> tuple[bytes, bool]:
    """Run one job; return the pickled (ending, value or RankReport), and True if the function returned."""
    try:
        _prepare(job)
        function = resolve(job.function)
        args, kwargs = pickle.loads(job.arguments)
        _join(job)
        connection.send_bytes(READY)
        connection.recv_bytes()  # GO: no rank may fail while another is still connecting
        return _pickled(job, call(function, args, kwargs)), True
    except BaseException as error:
        ending = Ending.LOST_PEER if is_lost_peer(error) else Ending.RAISED
        report = RankReport(job.rank, ending, describe(error, hide=__file__), type(error).__name__)
        return pickle.dumps((ending, report)), False


def call(function: Any, args: Any, kwargs: Any) -> Any:
    """Call the function: a user's stack lies above this frame."""
    return function(*args, **kwargs)


def _pickled(job: Job, value: Any) -> bytes:
    try:
        return pickle.dumps((Ending.RETURNED, value))
    except Exception as error:
        raise TypeError(
            f"{job.function.qualname} returned a {type(value).__name__} that cannot be pickled ({error}). "
            "Return plain values or tensors."
        ) from error


def _prepare(job: Job) -> None:
    """Reset everything that a test may have changed."""
    os.environ.clear()
    os.environ.update(job.environ)
    os.chdir(job.cwd)
    sys.path[:] = job.path
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.get_default_device().type != "cpu":
        torch.set_default_device(None)
    torch.set_deterministic_debug_mode("default")  # not use_deterministic_algorithms: it imports the compiler, 2 s
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _join(job: Job) -> None:
    """Make the default process group of this job."""
    dist.init_process_group(
        job.environ.get(BACKEND_VARIABLE, "gloo"),
        store=compat.FileStore(job.store_path, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s + 60),
    )


def _clean_up() -> None:
    registry.close_all()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM"):
        number = getattr(signal, name, None)
        if number is not None and number != DUMP_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
