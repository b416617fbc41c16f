"""Compile the simulated device: once for each torch, Python and source, kept in `.cache/simulated_cuda`."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from simulated_cuda.environment import CACHE

__all__ = ["BuildError", "build", "reason_without_build", "torch_folder"]

HERE = Path(__file__).resolve().parent
# What each library is made of.  The second needs libtorch_python, which is loaded with torch.
PARTS = {"device": ("machine.cpp", "device.cpp", "operators.cpp"), "collectives": ("collectives.cpp",)}
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-DNDEBUG", "-w")
SUPPORTED = ("2.13.",)  # its internals change with every release


class BuildError(Exception):
    """Raised if the device cannot be compiled; the message ends with the compiler's output."""


def torch_folder() -> Path:
    """Return the folder of the installed torch, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("torch is not installed")
    return Path(found.origin).parent


def reason_without_build() -> str | None:
    """Return the reason why the device cannot be built here; None if it can."""
    if shutil.which(_compiler()) is None:
        return f"no C++ compiler: {_compiler()} is not on PATH"
    if not (torch_folder() / "include" / "ATen" / "ATen.h").exists():
        return "this torch is installed without its headers"
    version = importlib.metadata.version("torch")
    if not version.startswith(SUPPORTED):
        return f"written for torch {', '.join(each + 'x' for each in SUPPORTED)}; this is {version}"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "this torch is built with CUDA; the simulated device needs its CPU wheel"
    return None


def build() -> dict[str, Path]:
    """Return the libraries by name, compiled if they are not in the cache.  Raises BuildError."""
    reason = reason_without_build()
    if reason is not None:
        raise BuildError(f"the simulated CUDA device cannot be built: {reason}")
    folder = CACHE / _key()
    libraries = {name: folder / f"{name}.so" for name in PARTS}
    if all(path.exists() for path in libraries.values()):
        return libraries
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, path in libraries.items():
            if not path.exists():
                _compile(PARTS[name], path)
    return libraries


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _key() -> str:
    total = hashlib.sha256(" ".join((*FLAGS, sys.version, importlib.metadata.version("torch"))).encode())
    for path in sorted((HERE / "csrc").iterdir()):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def _compile(sources: tuple[str, ...], target: Path) -> None:
    """Compile the sources side by side, link them, and move the library into place."""
    include = torch_folder() / "include"
    paths = (include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    flags = [*FLAGS, *(f"-I{path}" for path in paths)]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{source}.o" for source in sources]
        running = [
            subprocess.Popen(
                [_compiler(), *flags, "-c", str(HERE / "csrc" / source), "-o", str(made)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for source, made in zip(sources, objects)
        ]
        outputs = [each.communicate()[0] for each in running]
        failed = [output for each, output in zip(running, outputs) if each.returncode]
        if failed:
            raise BuildError(f"the simulated CUDA device does not compile:\n{failed[0][-4000:]}")
        made = Path(scratch) / target.name
        linked = subprocess.run(
            [_compiler(), "-shared", "-o", str(made), *map(str, objects)], capture_output=True, text=True, check=False
        )
        if linked.returncode:
            raise BuildError(f"the simulated CUDA device does not link:\n{linked.stderr[-4000:]}")
        made.replace(target)
