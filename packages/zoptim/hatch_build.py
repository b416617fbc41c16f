"""Build `zoptim._kernels`, the C kernels, for wheels, for editable installs and in place.

Problem: one wheel must serve every Python from 3.10 on and every x86-64 processor, and building it must need only a C
compiler, cffi and hatchling: no torch (an isolated build would fetch gigabytes), no cmake.

Design: cffi writes the glue from the part of `zk_api.h` between its two markers, against the limited API.  `kern.c`
is compiled once per instruction set; `rt.c` selects one at run time.  The extension links only libc: Python passes
the address of OpenMP's `GOMP_parallel`.  The digest of the sources is compiled in, so a checkout detects an extension
that is older than its sources.

    python hatch_build.py    builds src/zoptim/_kernels.abi3.so in place

The compiler is `$CC`, else the first of cc, gcc and clang on PATH.

Rejected: setuptools (its compiler flags include -g, which triples the file; per-file flags need a subclass),
scikit-build-core and meson-python (additional build tools; editable installs that rebuild at import race between
ranks), building at first use (needs a compiler on every node).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "src" / "zoptim" / "csrc"
EXTENSION = ROOT / "src" / "zoptim" / "_kernels.abi3.so"
OLDEST_PYTHON = "cp310"
LIMITED_API = "-DPy_LIMITED_API=0x030a0000"

# -ffp-contract=off: the same bits on every instruction set.  -fno-math-errno, -fno-trapping-math: without them
# square roots and selections do not vectorize.  -g0: debug information would triple the file.  -Wno-psabi: vectors
# are only passed between inlined functions.
FLAGS = (
    "-O3", "-g0", "-std=c11", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-Wno-psabi",
)  # fmt: skip
AVX2 = ("-mavx2", "-mfma", "-mbmi2")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
X86_LEVELS = {"base": ("-DZK_ONLY_PIECES",), "v3": AVX2, "v4": (*AVX2, *AVX512)}  # the names are those of rt.c


class BuildError(Exception):
    """The build of the kernels failed; the message names what is missing and the remedy."""


def is_x86_64() -> bool:
    return wheel_platform().endswith(("x86_64", "amd64"))


def wheel_platform() -> str:
    """Return the platform part of the wheel's tag.  A universal2 Python gets code for one processor."""
    name = sysconfig.get_platform()
    if name.endswith("universal2"):
        name = "macosx-11.0-arm64" if platform.machine() == "arm64" else "macosx-10.9-x86_64"
    return name.replace("-", "_").replace(".", "_")


def kernel_sources() -> ModuleType:
    """Load `zoptim/backends/sources.py` by path: an isolated build has neither zoptim nor torch."""
    path = ROOT / "src" / "zoptim" / "backends" / "sources.py"
    spec = importlib.util.spec_from_file_location("zoptim_sources", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_hash() -> str:
    """Return the digest of the compiled files; native.py compares it in a checkout."""
    return str(kernel_sources().source_hash(ROOT))


def compiler() -> list[str]:
    """Return the command of the C compiler.  Raises `BuildError` if there is none, or no Python.h."""
    given = shlex.split(os.environ.get("CC", ""))
    found = given if given and shutil.which(given[0]) else []
    if given and not found:
        raise BuildError(f"CC names {given[0]!r}, which is not on PATH: set CC to a C compiler (gcc or clang)")
    if not found:
        found = [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    if not found:
        raise BuildError(
            "zoptim compiles C kernels and found no C compiler: none of cc, gcc, clang is on PATH. Install one "
            "(Debian and Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc; macOS: xcode-select --install) "
            "or name it in CC"
        )
    if not any((Path(folder) / "Python.h").exists() for folder in include_folders()):
        raise BuildError(
            f"zoptim compiles C kernels and found no Python.h in {', '.join(include_folders())}: install the headers "
            "of this Python (Debian and Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"
        )
    return found


def include_folders() -> list[str]:
    return sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})


def write_glue(path: Path) -> None:
    """Write the C file of the Python module for `zk_api.h`.  Raises `BuildError` without cffi."""
    try:
        import cffi
    except ImportError:
        raise BuildError(
            "building zoptim's kernels needs cffi: pip install 'cffi>=1.15' (an isolated build installs it)"
        ) from None
    header = (CSRC / "zk_api.h").read_text()
    ffi = cffi.FFI()
    ffi.cdef(header.partition("/* cdef begin */")[2].partition("/* cdef end */")[0])
    ffi.set_source("zoptim._kernels", '#include "zk_api.h"', py_limited_api=True)
    with contextlib.redirect_stdout(io.StringIO()):  # cffi prints the path
        ffi.emit_c_code(str(path))


def objects(folder: Path) -> dict[Path, list[str]]:
    """Return object file -> arguments that compile it; `folder` has the generated files."""
    runtime = [f'-DZK_SOURCE_HASH="{source_hash()}"', *(["-DZK_HAS_X86"] if is_x86_64() else [])]
    headers = [f"-I{folder}", f"-I{CSRC}"]
    python_headers = [f"-I{place}" for place in include_folders()]
    result = {
        folder / "glue.o": [LIMITED_API, *headers, *python_headers, str(folder / "glue.c")],
        folder / "tensors.o": [LIMITED_API, *headers, *python_headers, str(CSRC / "tensors.c")],
        folder / "rt.o": [*runtime, *headers, str(CSRC / "rt.c")],
    }
    for level, flags in (X86_LEVELS if is_x86_64() else {"base": ()}).items():
        result[folder / f"kern_{level}.o"] = [*flags, f"-DZK_SUFFIX=_{level}", *headers, str(CSRC / "kern.c")]
    return result


def run(command: list[str]) -> None:
    """Run the compiler.  Raises `BuildError` with its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise BuildError(
            f"the C compiler failed (exit code {done.returncode})\n$ {shlex.join(command)}\n{done.stdout}"
        )


def build(target: Path = EXTENSION) -> None:
    """Write the glue, compile the objects in parallel, link, and replace `target` atomically.

    Raises `BuildError`.
    """
    command = compiler()
    with tempfile.TemporaryDirectory(prefix="zoptim-build-") as temporary:
        folder = Path(temporary)
        (folder / "zk_table.h").write_text(kernel_sources().rules_text(include=True))
        write_glue(folder / "glue.c")
        calls = [[*command, *FLAGS, "-c", *what, "-o", str(path)] for path, what in objects(folder).items()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, calls))
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-Wl,-s"]
        # linked in the target's folder, so that the replacement is one rename: a running process keeps the old file
        linked = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            run([*command, *shared, *(str(path) for path in objects(folder)), "-o", str(linked)])
            os.replace(linked, target)
        finally:
            linked.unlink(missing_ok=True)


def is_current() -> bool:
    """Return whether the extension in place was compiled from these sources."""
    return EXTENSION.exists() and source_hash().encode() in EXTENSION.read_bytes()


class KernelHook(BuildHookInterface):
    """The hook that hatchling calls for a wheel; `version` is "editable" for an editable install, else "standard"."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # pip builds an editable install twice: for its metadata and for the install
        if version != "editable" or not is_current():
            build()
        build_data["pure_python"] = False
        build_data["tag"] = f"{OLDEST_PYTHON}-abi3-{wheel_platform()}"
        build_data["artifacts"].append("src/zoptim/_kernels.abi3.so")


if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.exit(f"zoptim: {error}")
