"""Build of `zcomm._shared`, the shared-memory transport, for wheels, editable installs and in place.

Problem: the transport is useful wherever ranks share a host, but zcomm must install and work without it, on Gloo.
Design: cffi writes the glue from the part of `zs_api.h` between its two markers, against the limited API, so that one
wheel serves every Python from 3.10 on; the arithmetic is compiled once per instruction set.  Without Linux, a
compiler or Python.h, the build warns and makes a pure Python wheel.

    python hatch_build.py    builds src/zcomm/_shared.abi3.so in place

The compiler is `$CC`, else the first of cc, gcc and clang on PATH.  Rejected: the same as in zoptim's file of this
name, which this one follows; the two packages are built separately, so they share no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "src" / "zcomm" / "csrc"
EXTENSION = ROOT / "src" / "zcomm" / "_shared.abi3.so"
OLDEST_PYTHON = "cp310"
LIMITED_API = "-DPy_LIMITED_API=0x030a0000"

# -ffp-contract=off: the same bits on every instruction set.  -fno-trapping-math: without it selections do not
# vectorise.  -fwrapv: sums of integers wrap around.
FLAGS = (
    "-O3", "-g0", "-std=gnu11", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv",
    "-fvisibility=hidden", "-pthread", "-Wall", "-Wno-unknown-pragmas",
)  # fmt: skip
V3 = ("-mavx2", "-mf16c")
V4 = (*V3, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")


class BuildError(Exception):
    """Raised when the extension cannot be compiled; the message gives the reason."""


class Unavailable(Exception):
    """Raised when this machine has no means to build the extension; zcomm then works without it."""


def wheel_platform() -> str:
    """Platform part of the wheel's tag."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def source_hash() -> str:
    """Hash of the compiled files, 16 hexadecimal digits; shared/native.py computes the same in a checkout."""
    total = hashlib.sha256()
    for path in [ROOT / "hatch_build.py", *sorted(CSRC.glob("*.[ch]"))]:
        text = path.read_bytes()
        total.update(f"{path.name} {len(text)}\n".encode() + text)
    return total.hexdigest()[:16]


def include_folders() -> list[str]:
    return sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})


def compiler() -> list[str]:
    """Find the command of the C compiler.  Raises `Unavailable`."""
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"the shared-memory transport works on Linux, and this is {sys.platform}")
    given = shlex.split(os.environ.get("CC", ""))
    found = given or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    if not found or not shutil.which(found[0]):
        wanted = f"{given[0]}, which CC names," if given else "cc, gcc or clang"
        raise Unavailable(f"no C compiler: {wanted} is not on PATH")
    if not any((Path(folder) / "Python.h").exists() for folder in include_folders()):
        raise Unavailable(f"no Python.h in {', '.join(include_folders())}: install the headers of this Python")
    return found


def write_glue(path: Path) -> None:
    """Write the C file that makes `zs_api.h` a Python module.  Raises `Unavailable` without cffi."""
    try:
        import cffi
    except ImportError:
        raise Unavailable("no cffi: pip install 'cffi>=1.15'") from None
    header = (CSRC / "zs_api.h").read_text()
    ffi = cffi.FFI()
    ffi.cdef(header.partition("/* cdef begin */")[2].partition("/* cdef end */")[0])
    ffi.set_source("zcomm._shared", '#include "zs_api.h"', py_limited_api=True)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the name of its temporary file
        ffi.emit_c_code(str(path))


def objects(folder: Path) -> dict[Path, list[str]]:
    """Map each object file to the arguments that compile it."""
    is_x86 = wheel_platform().endswith("x86_64")
    includes = [f"-I{CSRC}", *(f"-I{place}" for place in include_folders())]
    x86 = ["-DZS_HAS_X86"] if is_x86 else []
    result = {
        folder / "glue.o": [LIMITED_API, *includes, str(folder / "glue.c")],
    }
    for name in ("zs_engine", "zs_barrier", "zs_steps", "zs_memory"):
        result[folder / f"{name}.o"] = [f'-DZS_SOURCE_HASH="{source_hash()}"', *x86, str(CSRC / f"{name}.c")]
    for level, flags in ({"base": (), "v3": V3, "v4": V4} if is_x86 else {"base": ()}).items():
        result[folder / f"zs_reduce_{level}.o"] = [*flags, f"-DZS_LEVEL={level}", str(CSRC / "zs_reduce.c")]
    return result


def run(command: list[str]) -> None:
    """Call the compiler.  Raises `BuildError` with its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise BuildError(
            f"the C compiler failed (exit code {done.returncode})\n$ {shlex.join(command)}\n{done.stdout}"
        )


def build(target: Path = EXTENSION) -> None:
    """Write the glue, compile, link, and replace the extension atomically.  Raises `BuildError`, `Unavailable`."""
    command = compiler()
    with tempfile.TemporaryDirectory(prefix="zcomm-build-") as temporary:
        folder = Path(temporary)
        write_glue(folder / "glue.c")
        for path, what in objects(folder).items():
            run([*command, *FLAGS, "-c", *what, "-o", str(path)])
        # linked beside its final place, so that the replacement is one rename: a running process keeps the old file
        linked = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            run([*command, "-shared", "-pthread", "-Wl,-s", *map(str, objects(folder)), "-o", str(linked)])
            os.replace(linked, target)
        finally:
            linked.unlink(missing_ok=True)


def is_current() -> bool:
    """True if the extension in place was compiled from these sources."""
    return EXTENSION.exists() and source_hash().encode() in EXTENSION.read_bytes()


class TransportHook(BuildHookInterface):
    """Hatchling's hook for wheels; `version` is "editable" for an editable install, else "standard"."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            # pip asks for an editable install twice: for its metadata and for itself
            if version != "editable" or not is_current():
                build()
        except (BuildError, Unavailable) as reason:
            self.app.display_warning(f"zcomm is built without its shared-memory transport and uses Gloo: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"{OLDEST_PYTHON}-abi3-{wheel_platform()}"
        build_data["artifacts"].append("src/zcomm/_shared.abi3.so")


if __name__ == "__main__":
    try:
        build()
    except Unavailable as reason:
        print(f"zcomm: the shared-memory transport is not built, Gloo is used: {reason}")
    except BuildError as error:
        sys.exit(f"zcomm: {error}")
