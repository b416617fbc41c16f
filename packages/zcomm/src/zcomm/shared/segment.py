"""Anonymous shared memory between processes of one host.

`memfd_create` makes memory that belongs to descriptors and mappings alone: nothing appears in /dev/shm, whose size in
a container is 64 MiB, and nothing is left when every rank is killed.  Peers open it through /proc/<pid>/fd.  A token
at its start proves that it is the right memory, even if a pid means another process here (containers).  Once all have
mapped it the descriptor is closed, and the memory lives as long as its last mapping.

Rejected: POSIX shm_open (names, clean-up after a kill, /dev/shm); passing descriptors over a Unix socket (a socket
per pair, and the same rights are needed); one segment for all ranks (each rank then pays for pages of the others);
Python's mmap (it keeps a descriptor open for each mapping).
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import attrs

from zcomm.shared.native import Library

__all__ = ["Memory", "Offer", "Segment"]

TOKEN_BYTES = 16
_MEMORY = Path("/proc/meminfo")


@final
@attrs.frozen(eq=False)
class Memory:
    """A mapping.  Unmapped when nothing refers to `buffer` any more, including tensors."""

    buffer: Any  # writable bytes, for torch.frombuffer
    address: Any  # void *; does not keep the mapping alive

    @classmethod
    def map(
        cls, library: Library, descriptor: int, nbytes: int, on_unmap: Callable[[], None] | None = None
    ) -> Memory:
        """Map a descriptor's memory; `on_unmap` is called when it is unmapped.  Raises OSError."""
        ffi, lib = library.ffi, library.lib
        start = lib.zs_map(descriptor, nbytes)
        if start == ffi.NULL:
            raise OSError(ffi.errno, f"cannot map {nbytes} bytes: {os.strerror(ffi.errno)}")

        def undo(pointer: Any) -> None:
            if on_unmap is not None:
                on_unmap()
            lib.zs_unmap(pointer, nbytes)

        return cls(ffi.buffer(ffi.gc(start, undo), nbytes), start)


@attrs.frozen
class Offer:
    """Description of a segment for another process to map.  Travels as JSON."""

    pid: int
    descriptor: int
    token: str  # hexadecimal; at the start of the memory until `seal`
    nbytes: int

    def accept(self, library: Library) -> Memory:
        """Map the memory into this process.  Raises OSError if that fails or it is other memory."""
        descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != self.nbytes:
                raise OSError(f"descriptor {self.descriptor} of process {self.pid} is something else here")
            memory = Memory.map(library, descriptor, self.nbytes)
        finally:
            os.close(descriptor)
        if memory.buffer[:TOKEN_BYTES].hex() != self.token:
            raise OSError(f"descriptor {self.descriptor} of process {self.pid} is other memory here")
        return memory


@final
@attrs.define(eq=False)
class Segment:
    """Memory of this process that others may map: zeros, except for the token at its start until `seal`.

    Invariant: `descriptor` is open until `seal`, then -1.
    """

    memory: Memory
    nbytes: int  # whole pages
    descriptor: int
    token: bytes

    @classmethod
    def create(cls, library: Library, nbytes: int, on_unmap: Callable[[], None] | None = None) -> Segment:
        """Reserve at least `nbytes`.  Raises OSError without memory, rather than a SIGBUS at the first use.

        on_unmap: called when this process no longer uses the memory.
        """
        nbytes = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        _check_available_memory(nbytes)
        descriptor = os.memfd_create("zcomm", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            memory = Memory.map(library, descriptor, nbytes, on_unmap)
        except BaseException:
            os.close(descriptor)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        memory.buffer[:TOKEN_BYTES] = token
        return cls(memory, nbytes, descriptor, token)

    def offer(self) -> Offer:
        return Offer(os.getpid(), self.descriptor, self.token.hex(), self.nbytes)

    def seal(self) -> None:
        """Wipe the token and close the descriptor, once all peers have mapped the memory or none will."""
        if self.descriptor >= 0:
            self.memory.buffer[:TOKEN_BYTES] = bytes(TOKEN_BYTES)
            os.close(self.descriptor)
            self.descriptor = -1


def _check_available_memory(nbytes: int) -> None:
    """Raise OSError if the machine has less memory: the kernel would kill a process rather than fail."""
    for line in _MEMORY.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            room = int(line.split()[1]) * 1024
            if nbytes > room:
                raise OSError(errno.ENOMEM, f"{nbytes} bytes of shared memory are needed, {room} are available")
