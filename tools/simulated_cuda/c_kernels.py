"""What zoptim's C kernels read and write through pointers, told to the order checker at each call."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from simulated_cuda.library import host_access

__all__ = ["install_in_cpu", "install_in_stats"]

MOST_STATES = 3


def install_in_cpu(cpu: ModuleType) -> None:
    """Wrap the steps of jobs; `cpu` is the module zoptim.backends.cpu."""
    from zoptim.backends.contract import FORMAT_OF_DTYPE

    sizes = {number: dtype.itemsize for dtype, number in FORMAT_OF_DTYPE.items()}

    def touch(job: Any, rule: str) -> None:
        """Check the rows of a `zk_job`."""
        ffi = job._ffi
        fields = job._job
        states = [fields.states[k] for k in range(MOST_STATES)]
        for row in range(fields.num_rows):
            numel = fields.numel[row]
            parts = [(fields.grads, fields.grad, False), (fields.weights, fields.weight, True)]
            parts += [(fields.copies, fields.copy, True), *((state, fields.state, True) for state in states)]
            for addresses, number, writes in parts:
                if addresses != ffi.NULL and addresses[row]:
                    # A split master has weights of two bytes.
                    host_access(addresses[row], numel * sizes.get(number, 2), writes, f"the C kernel of {rule}")

    for name in ("step", "sums", "apply"):
        plain = getattr(cpu.CpuJob, name)

        def watched(self: Any, *args: Any, _plain: Any = plain, _name: str = name) -> Any:
            touch(self, _name)
            return _plain(self, *args)

        setattr(cpu.CpuJob, name, functools.wraps(plain)(watched))


def install_in_stats(stats: ModuleType) -> None:
    """Wrap the sum of squares; `stats` is the module zoptim.backends.stats."""
    from zoptim.backends.contract import FORMAT_OF_DTYPE

    sizes = {number: dtype.itemsize for dtype, number in FORMAT_OF_DTYPE.items()}
    plain = stats._squares_at

    @functools.wraps(plain)
    def squares_at(library: Any, kind: int, rows: Any, numel: Any, length: int) -> float:
        for row in range(length):
            host_access(int(rows[row]), numel[row] * sizes[kind], False, "the C kernel of squares")
        result: float = plain(library, kind, rows, numel, length)
        return result

    stats._squares_at = squares_at  # type: ignore[attr-defined]
