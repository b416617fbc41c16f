"""The GPU kernels without a GPU: a launcher of the same protocol, whose device is a C compiler and fibers.

`shim` compiles each program once for all workers of a test run.  A `Case` makes streams of any formats: rows inside
larger tensors, to detect writes out of bounds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from zoptim.backends.contract import FORMAT_OF_DTYPE, Flag, Streams
from zoptim.backends.gpu.launch import Call
from zoptim.backends.gpu.source import Program

SHIM = Path(__file__).parents[2] / "shim"
# The exact arithmetic of the kernels, and a trap where a vector access is misaligned, as a GPU has it.
FLAGS = (
    "-std=gnu11", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
)  # fmt: skip

DTYPES: dict[str, torch.dtype | None] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "split": torch.bfloat16,
    "q8": torch.uint8,
    "-": None,
}


@attrs.define(eq=False)
class ShimLauncher:
    """A Launcher whose kernels are functions of shared objects."""

    compiler: str
    folder: Path  # shared by all workers
    launched: list[tuple[str, int]]  # kernel and number of blocks, in order

    def load(self, program: Program) -> Mapping[str, Any]:
        path = self._built(program.text())
        library = ctypes.CDLL(str(path))
        kernels = {name: getattr(library, name) for name in program.kernels}
        for function in kernels.values():
            function.argtypes = (ctypes.c_int64, ctypes.c_char_p)
        return kernels

    def launch(self, calls: Sequence[Call], buffers: Sequence[Tensor]) -> None:
        for kernel, num_blocks, args in calls:
            assert num_blocks > 0, "CUDA rejects an empty grid"
            self.launched.append((kernel.__name__, num_blocks))
            assert kernel(num_blocks, args) == 0, f"{kernel.__name__}: threads wait for others that are gone"

    def names(self) -> list[str]:
        """The kernels launched since the last call."""
        names = [name for name, _ in self.launched]
        self.launched.clear()
        return names

    def _built(self, text: str) -> Path:
        key = hashlib.sha256("\0".join([text, *(path.read_text() for path in sorted(SHIM.iterdir()))]).encode())
        path = self.folder / f"{key.hexdigest()[:24]}.so"
        if not path.exists():
            made = self.folder / f"{path.name}.{os.getpid()}"
            source = made.with_name(f"{made.name}.c")
            source.write_text(text)
            inputs = ["-include", "cuda_shim.h", str(source), str(SHIM / "shim.c")]
            subprocess.run([self.compiler, *FLAGS, f"-I{SHIM}", "-shared", *inputs, "-o", str(made)], check=True)
            source.unlink()
            made.replace(path)
        return path


@pytest.fixture(scope="session")
def shim_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "shim"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def shim(shim_folder: Path) -> ShimLauncher:
    compiler = next((found for name in ("gcc", "cc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler to run the GPU kernels with")
    return ShimLauncher(compiler, shim_folder, [])


@attrs.frozen(eq=False)
class Case:
    """One rule in one combination of formats, with the memory layout of its rows."""

    rule: str
    flags: int
    weight: str
    grad: str
    state: str
    copy: str = "-"
    numels: tuple[int, ...] = (1, 255, 256, 1027, 8192 + 515)
    offset: int = 0  # elements between an aligned address and the first one
    device: str = "cpu"

    @classmethod
    def of(cls, name: str, **more: Any) -> Case:
        """Parse rule and flags; weight, gradient, state and optional copy, as in "adam amsgrad: f32 bf16 q8"."""
        rule, formats = name.split(":")
        what, *flags = rule.split()
        return cls(
            what,
            sum(Flag[flag.upper()] for flag in flags),
            *formats.split(),
            **more,
        )

    def num_states(self) -> int:
        if self.state == "-":
            return 0
        two = 2 + bool(self.flags & Flag.AMSGRAD)
        return {"adam": two, "lamb": 2}.get(self.rule, 1)

    def is_square(self, k: int) -> bool:
        return self.rule == "adagrad" or (self.rule in ("adam", "lamb") and k > 0)

    def streams(self, seed: int = 0) -> Streams:
        """Random weights, gradients and moments; the first two rows share a step count, as rows of one tensor do."""
        generator = torch.Generator().manual_seed(seed)

        def rows(name: str, size: float = 1.0, floor: float | None = None) -> list[Tensor]:
            dtype = DTYPES[name]
            if dtype is None:
                return []
            total = [self.offset + numel + 16 for numel in self.numels]
            values = [torch.randn(n, generator=generator) * size for n in total]
            if floor is not None:
                values = [value.abs() + floor for value in values]
            cast = [value.to(dtype) if dtype.is_floating_point else value.mul(0).to(dtype) for value in values]
            return [v.to(self.device)[self.offset : self.offset + n] for v, n in zip(cast, self.numels)]

        steps = [torch.full((), float(3 + k), device=self.device) for k in range(len(self.numels))]
        states = range(self.num_states())
        splits = self.weight == "split"
        return Streams(
            weights=rows(self.weight),
            grads=rows(self.grad),
            states=tuple(rows(self.state, 0.1, 1e-8 if self.is_square(k) else None) for k in states),
            scales=tuple(self._scales() for _ in states) if self.state == "q8" else (),
            remainders=[row.view(torch.int16) for row in rows("bf16", 1e-3)] if splits else [],
            copies=rows(self.copy),
            steps=[steps[0], *steps[:-1]],
        )

    def _scales(self) -> list[Tensor]:
        return [torch.zeros(-(-numel // 256) + 2, device=self.device)[: -(-numel // 256)] for numel in self.numels]


def memory(streams: Streams) -> list[Tensor]:
    """All memory that a step might touch, gradients and surroundings of the rows included."""
    lists = [*streams.written(), streams.grads]
    return [tensor if tensor._base is None else tensor._base for tensors in lists for tensor in tensors]


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    return Case.of


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[[Streams, Streams], None]:
    """Bit for bit, NaN included, and the surroundings of the rows as well."""

    def check(ours: Streams, theirs: Streams) -> None:
        for position, (one, other) in enumerate(zip(memory(ours), memory(theirs))):
            same = one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
            differ = (one != other).sum()
            assert same, f"tensor {position} ({one.dtype}, {tuple(one.shape)}): {differ} elements differ"

    return check


assert set(FORMAT_OF_DTYPE) == {dtype for dtype in DTYPES.values() if dtype}, "a format without tests"
