"""Build of a package's C kernels, for wheels, for editable installs and in place.

Problem: one wheel must serve every Python from 3.10 on and every x86-64 processor, and building it must need only a C
compiler, cffi and hatchling: no torch (an isolated build would fetch gigabytes), no cmake.

Design: `[tool.zbuild]` in pyproject.toml lists the files and the flags; this file is the same in every package that
has kernels, because packages are built separately, and a test compares the copies.  cffi writes the glue from the
part of the header between its two markers, against the limited API.  One source is compiled once per instruction set
and the best is selected at run time.  The extension links only libc: Python passes the address of OpenMP's
`GOMP_parallel`.  The digest of the sources is compiled in, so a checkout detects an extension that is older than its
sources.  Without a compiler, cffi or Python.h, the build warns once and makes a pure Python wheel; with ZBUILD=pure
it makes one without a warning, for an index: the wheel of every platform that has none of its own.

    python hatch_build.py    builds the extension in place

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

import tomllib
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["zbuild"]
PACKAGE, _, NAME = TABLE["module"].partition(".")
SOURCE = ROOT / "src" / PACKAGE
CSRC = SOURCE / "csrc"
EXTENSION = SOURCE / f"{NAME}.abi3.so"
OLDEST_PYTHON = "cp310"
LIMITED_API = "-DPy_LIMITED_API=0x030a0000"

# -ffp-contract=off: the same bits on every instruction set.  -fno-math-errno, -fno-trapping-math: without them square
# roots and selections do not vectorize.  -g0: debug information would triple the file.  -Wno-psabi: vectors are only
# passed between inlined functions.
FLAGS = (
    "-O3", "-g0", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden",
    "-Wno-psabi",
)  # fmt: skip
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")


class BuildError(Exception):
    """The compiler failed; the message has its output."""


class Unavailable(Exception):
    """This machine has no means to build the extension; the package then works without it."""


def is_x86_64() -> bool:
    return wheel_platform().endswith(("x86_64", "amd64"))


def wheel_platform() -> str:
    """Return the platform part of the wheel's tag.  A universal2 Python gets code for one processor."""
    name = sysconfig.get_platform()
    if name.endswith("universal2"):
        name = "macosx-11.0-arm64" if platform.machine() == "arm64" else "macosx-10.9-x86_64"
    return name.replace("-", "_").replace(".", "_")


def kernel_sources() -> ModuleType:
    """Load the module that knows the sources by path: an isolated build has neither the package nor torch."""
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}_sources", ROOT / TABLE["sources"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_hash() -> str:
    """Return the digest of the compiled files; the package compares it in a checkout."""
    return str(kernel_sources().source_hash(ROOT))


def compiler() -> list[str]:
    """Return the command of the C compiler.  Raises `Unavailable` if there is none, or no Python.h."""
    if TABLE.get("linux-only") and not sys.platform.startswith("linux"):
        raise Unavailable(f"the kernels work on Linux, and this is {sys.platform}")
    given = shlex.split(os.environ.get("CC", ""))
    found = given or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    if given and not shutil.which(given[0]):
        raise Unavailable(f"CC names {given[0]!r}, which is not on PATH: set CC to a C compiler (gcc or clang)")
    if not found:
        raise Unavailable(
            "found no C compiler: none of cc, gcc, clang is on PATH. Install one (Debian and Ubuntu: apt install gcc "
            "libc6-dev; Fedora: dnf install gcc; macOS: xcode-select --install) or name it in CC"
        )
    if not any((Path(folder) / "Python.h").exists() for folder in include_folders()):
        raise Unavailable(
            f"found no Python.h in {', '.join(include_folders())}: install the headers of this Python (Debian and "
            "Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"
        )
    return found


def include_folders() -> list[str]:
    return sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})


def write_glue(path: Path) -> None:
    """Write the C file of the Python module for the header.  Raises `Unavailable` without cffi."""
    try:
        import cffi
    except ImportError:
        raise Unavailable("found no cffi: pip install 'cffi>=1.15' (an isolated build installs it)") from None
    header = (CSRC / TABLE["header"]).read_text(encoding="utf-8")
    ffi = cffi.FFI()
    ffi.cdef(header.partition("/* cdef begin */")[2].partition("/* cdef end */")[0])
    ffi.set_source(TABLE["module"], f'#include "{TABLE["header"]}"', py_limited_api=True)
    with contextlib.redirect_stdout(io.StringIO()):  # cffi prints the path
        ffi.emit_c_code(str(path))


def objects(folder: Path) -> dict[Path, list[str]]:
    """Return object file -> arguments that compile it; `folder` has the generated files."""
    prefix = TABLE["prefix"]
    shared = [*TABLE["flags"], f"-I{folder}", f"-I{CSRC}"]
    once = [f'-D{prefix}_SOURCE_HASH="{source_hash()}"', *([f"-D{prefix}_HAS_X86"] if is_x86_64() else [])]
    python = [LIMITED_API, *(f"-I{place}" for place in include_folders())]
    result = {folder / "glue.o": [*shared, *python, str(folder / "glue.c")]}
    for name in TABLE.get("python", ()):
        result[folder / f"{name}.o"] = [*shared, *python, str(CSRC / f"{name}.c")]
    for name in TABLE["once"]:
        result[folder / f"{name}.o"] = [*shared, *once, str(CSRC / f"{name}.c")]
    for level, flags in levels().items():
        define = TABLE["level-define"].format(level)
        for name in TABLE["levels-of"]:
            result[folder / f"{name}_{level}.o"] = [*shared, *flags, define, str(CSRC / f"{name}.c")]
    return result


def levels() -> dict[str, list[str]]:
    """Return instruction set -> flags; "AVX512" stands for the common ones of AVX-512."""
    table: dict[str, list[str]] = TABLE["levels"] if is_x86_64() else {"base": []}
    return {
        level: [flag for word in flags for flag in (AVX512 if word == "AVX512" else (word,))]
        for level, flags in table.items()
    }


def run(command: list[str]) -> None:
    """Run the compiler.  Raises `BuildError` with its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise BuildError(
            f"the C compiler failed (exit code {done.returncode})\n$ {shlex.join(command)}\n{done.stdout}"
        )


def build(target: Path = EXTENSION) -> None:
    """Write the glue, compile the objects in parallel, link, and replace `target` atomically.

    Raises `BuildError` and `Unavailable`.
    """
    command = compiler()
    with tempfile.TemporaryDirectory(prefix=f"{PACKAGE}-build-") as temporary:
        folder = Path(temporary)
        for name, text in getattr(kernel_sources(), "generated", dict)().items():
            (folder / name).write_text(text, encoding="utf-8")
        write_glue(folder / "glue.c")
        calls = [[*command, *FLAGS, "-c", *what, "-o", str(path)] for path, what in objects(folder).items()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, calls))
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-Wl,-s"]
        shared += TABLE.get("link", ())
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


def is_pure_wanted() -> bool:
    """Return whether ZBUILD asks for a wheel without the extension.  Raises `ValueError` for an unknown value."""
    given = os.environ.get("ZBUILD", "")
    if given not in ("", "pure"):
        raise ValueError(f"ZBUILD={given} is unknown: set ZBUILD=pure for a wheel without compiled code, or unset it")
    return given == "pure"


class KernelHook(BuildHookInterface):
    """The hook that hatchling calls for a wheel; `version` is "editable" for an editable install, else "standard"."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if is_pure_wanted():
            return
        try:
            # pip builds an editable install twice: for its metadata and for the install
            if version != "editable" or not is_current():
                build()
        except (BuildError, Unavailable) as reason:
            self.app.display_warning(f"{PACKAGE} is built {TABLE['without']}: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"{OLDEST_PYTHON}-abi3-{wheel_platform()}"
        build_data["artifacts"].append(EXTENSION.relative_to(ROOT).as_posix())


if __name__ == "__main__":
    try:
        build()
    except Unavailable as reason:
        print(f"{PACKAGE}: built {TABLE['without']}: {reason}", file=sys.stderr)
    except BuildError as error:
        sys.exit(f"{PACKAGE}: {error}")
