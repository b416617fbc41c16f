"""The GPU kernels without a GPU: a launcher of the same protocol, whose device is a C compiler and fibers."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from zprecision.backends.gpu.launch import Program

SHIM = Path(__file__).parents[2] / "shim"
# The exact arithmetic of the kernels, and a trap where a vector access is misaligned, as a GPU has it.
FLAGS = (
    "-std=gnu11", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
)  # fmt: skip


@attrs.define(eq=False)
class ShimLauncher:
    """A Launcher whose kernels are functions of shared objects."""

    compiler: str
    folder: Path  # shared by all workers
    launched: list[tuple[Program, int]] = attrs.field(factory=list)  # with the number of blocks, in order
    functions: dict[Program, Any] = attrs.field(factory=dict)

    def launch(self, program: Program, num_blocks: int, args: bytes) -> None:
        assert num_blocks > 0, "CUDA rejects an empty grid"
        self.launched.append((program, num_blocks))
        if program not in self.functions:
            function = getattr(ctypes.CDLL(str(self._built(program.text()))), program.kernel)
            function.argtypes = (ctypes.c_int64, ctypes.c_char_p)
            self.functions[program] = function
        assert self.functions[program](num_blocks, args) == 0, "threads wait for others that are gone"

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
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "zprecision-shim"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def shim(shim_folder: Path) -> ShimLauncher:
    """The launcher; `launched` is of this test."""
    compiler = next((found for name in ("gcc", "cc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler to run the GPU kernels with")
    return ShimLauncher(compiler, shim_folder)


@pytest.fixture
def normal() -> Callable[..., Tensor]:
    """`normal(*shape, seed=0)`: the same values from N(0, 1) in every test."""

    def make(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return make
