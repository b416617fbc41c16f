"""Compilation of a kernel and its disassembly: registers, shared memory, spills, and instructions.

NVRTC compiles exactly as the library does (`backends/gpu/compiler.py`).  Registers, stack and shared memory are those
that ptxas logs; nvdisasm lists the instructions.  Neither needs a GPU.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from gpumodel.listing import Body, bodies, parse

from zoptim.backends.gpu import compiler

__all__ = ["Compiled", "compile_program", "find_nvdisasm", "versions"]

_USED = re.compile(
    r"entry function '(\w+)' for.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


@attrs.frozen(kw_only=True)
class Compiled:
    """One kernel in machine code."""

    registers: int
    shared_bytes: int  # with the 1 KiB of the system
    spilled_bytes: int  # of stack and spills
    bodies: Sequence[Body]


def find_nvdisasm(given: str | None = None) -> str:
    """Return the path of nvdisasm: given, on PATH, or in an installed wheel.  Raises FileNotFoundError."""
    folders = [Path(folder) / "nvidia" / "cu13" / "bin" for folder in sys.path]
    found = (
        given
        or shutil.which("nvdisasm")
        or next((str(f / "nvdisasm") for f in folders if (f / "nvdisasm").is_file()), None)
    )
    if found is None or not os.access(found, os.X_OK):
        raise FileNotFoundError(
            f"nvdisasm is {'not at ' + given if given else 'not installed'}; "
            "pip install nvidia-cuda-nvdisasm (another environment will do) and give its path by --nvdisasm."
        )
    return found


def versions(nvdisasm: str) -> dict[str, str]:
    """Return the versions of the compiler and the disassembler."""
    said = subprocess.run([nvdisasm, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"V([\d.]+)", said)
    major, minor = importlib.import_module("cupy").cuda.nvrtc.getVersion()
    return {"nvrtc": f"{major}.{minor}", "nvdisasm": release[1] if release else "unknown"}


def compile_program(text: str, sm: int, nvdisasm: str) -> Mapping[str, Compiled]:
    """Return the kernels of a text, compiled for sm_`sm`."""
    code, log = compiler.compile_text(text, f"sm_{sm}", ["--ptxas-options=-v"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        listed = subprocess.run(
            [nvdisasm, "-c", "-hex", str(path)], capture_output=True, text=True, check=True
        ).stdout  # fmt: skip
    listings = parse(listed)
    found = {}
    for name, stack, stores, loads, registers, rest in _USED.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = Compiled(
            registers=int(registers), shared_bytes=int(shared[1] if shared else 0) + 1024,
            spilled_bytes=int(stack) + int(stores) + int(loads), bodies=bodies(*listings[name]),
        )  # fmt: skip
    return found
