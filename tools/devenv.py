"""Development environment: one virtual environment in `.venv`, created and updated automatically.

Problem: the first command on a fresh clone, an interrupted set-up, and two set-ups at once must all end in the same
environment.  Design:

* A stamp inside `.venv` records its inputs.  If the stamp matches, set-up is three file reads.
* A marker inside `.venv` exists exactly while it is being changed.  A marker found at the start means that a set-up
  was killed.  pip takes a half-copied package for an installed one, so the whole environment is then made again.  A
  set-up that fails (no index, for example) removes its marker, because pip has rolled back.
* An advisory lock on the folder of this file serializes set-ups.  Children inherit the lock: a pip that outlives a
  killed parent still holds it.

Rejected: uv (several times faster, but one more tool to install and configure); tox and nox (an environment, and so a
torch, for every session).

Standard library only, and cheap to import, because every command of `dev.py` imports it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "dev-stamp"  # line 1: path of the checkout; line 2: digest of the inputs
MARKER = VENV / "dev-unfinished"  # exists while the environment is being changed
DISCARDED = ROOT / ".venv.old"  # an environment being deleted
LOG = ROOT / ".cache" / "setup.log"  # the full output of venv, pip and the kernel builds
OLDEST_PYTHON = (3, 11)
# Builds the packages without isolation, which is 25 s faster; versions come from the constraints.
BUILD_TOOLS = ("hatchling", "hatch-fancy-pypi-readme", "editables", "cffi")
FOREIGN_SETTINGS = (
    *("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIREMENT"),
    "PYTHONDONTWRITEBYTECODE",  # each of hundreds of processes would compile the packages, half a second
)


class SetupError(Exception):
    """Raised when the environment cannot be made; the message gives the reason and the remedy."""


def info(text: str) -> None:
    print(f"dev: {text}", flush=True)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Print `dev: text ... 1.2 s`, or `... failed after 1.2 s` if the body raises."""
    print(f"dev: {text} ... ", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print(f"failed after {time.monotonic() - start:.1f} s", flush=True)
        raise
    print(f"{time.monotonic() - start:.1f} s", flush=True)


def venv_python() -> str:
    return str(VENV / "bin" / "python")


def setup_inputs() -> list[Path]:
    """Return the files that determine the installed packages."""
    return [ROOT / "constraints.txt", ROOT / "requirements-dev.txt", *sorted(ROOT.glob("packages/*/pyproject.toml"))]


def digest(paths: Sequence[Path], salt: str = "") -> str:
    """Return the sha256 of the names and contents of `paths`; each part is preceded by its length."""
    total = hashlib.sha256()
    parts = [salt.encode()]
    for path in paths:
        parts += [path.relative_to(ROOT).as_posix().encode(), path.read_bytes()]
    for part in parts:
        total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()


def venv_version() -> str:
    """Return the interpreter version of the environment; "" without one."""
    with contextlib.suppress(OSError):
        for line in (VENV / "pyvenv.cfg").read_text().splitlines():
            key, _, value = line.partition("=")
            if key.strip() in ("version", "version_info"):
                return value.strip()
    return ""


def stamp_text() -> str:
    """Return the stamp of an up-to-date environment."""
    return f"{ROOT}\n{digest(setup_inputs(), venv_version())}\n"


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def is_current() -> bool:
    """True if `.venv` is complete and made from the present inputs."""
    if MARKER.exists() or not os.access(venv_python(), os.X_OK):
        return False
    return read_text(STAMP) == stamp_text()


def reason_to_remake() -> str:
    """Return why pip alone cannot repair `.venv`; "" if it can, or if there is no `.venv`."""
    if not VENV.exists():
        return ""
    if MARKER.exists():
        return "a set-up was interrupted"
    owner = read_text(STAMP).partition("\n")[0]
    if owner and owner != str(ROOT):
        return f"it belongs to {owner}"  # launchers in bin/ carry absolute paths
    probe = [venv_python(), "-c", "import pip, sys; sys.exit(sys.version_info < (3, 11))"]
    try:
        healthy = subprocess.run(probe, env=child_environment(), capture_output=True, check=False).returncode == 0
    except OSError:
        healthy = False
    return "" if healthy else "its interpreter or its pip does not work"


def child_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables for programs of `.venv`: as activated, without FOREIGN_SETTINGS."""
    result = {k: v for k, v in (os.environ if environ is None else environ).items() if k not in FOREIGN_SETTINGS}
    result["VIRTUAL_ENV"] = str(VENV)
    result["PATH"] = os.pathsep.join([str(VENV / "bin"), result.get("PATH", os.defpath)])
    result["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    result["PIP_NO_INPUT"] = "1"
    return result


@contextlib.contextmanager
def exclusive() -> Iterator[int]:
    """Hold the set-up lock of this checkout; wait, with a message, while another process holds it.

    Yields the descriptor, for children to inherit.  The kernel frees the lock when the last holder ends.
    """
    descriptor = os.open(Path(__file__).resolve().parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step("another set-up of this checkout is running; waiting for it"):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def call(command: Sequence[str], what: str, lock: int, cwd: Path = ROOT) -> None:
    """Run one step of the set-up, output to the log.  Raises SetupError with the last lines if it fails."""
    LOG.parent.mkdir(exist_ok=True)
    with step(what), LOG.open("ab") as log:
        start = log.tell()
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        done = subprocess.run(
            command, cwd=cwd, env=child_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=[lock], check=False,
        )  # fmt: skip
        if done.returncode:
            output = LOG.read_bytes()[start:].decode(errors="replace")
            raise SetupError(explain(what, done.returncode, output))


def explain(what: str, returncode: int, output: str) -> str:
    """Format the error of a failed step: step, likely cause, last lines of its output."""
    causes = {
        "no package index in reach has it: check the network and `python3 -m pip config list`": (
            "No matching distribution", "Could not find a version", "NewConnectionError", "Name or service not known",
            "name resolution", "Max retries exceeded", "ConnectTimeoutError", "ReadTimeoutError", "Read timed out",
        ),
        "the disk is full: the environment needs about 1.5 GB": ("No space left on device",),
        "this Python has no venv module: install your system's python3-venv package": ("ensurepip is not",),
    }  # fmt: skip
    likely = [cause for cause, signs in causes.items() if any(sign in output for sign in signs)]
    tail = "\n".join(f"    {line}" for line in output.strip().splitlines()[-12:])
    lines = [f"{what}: failed with exit code {returncode}", *(f"likely cause: {cause}" for cause in likely[:1])]
    return "\n".join([*lines, f"last lines of {LOG.relative_to(ROOT)}:", tail])


def ensure() -> None:
    """Bring `.venv` up to date with this checkout; takes milliseconds if it is.

    Raises SetupError.
    """
    if is_current() and not stale_kernels():
        return
    check_python()
    with exclusive() as lock:
        if not is_current():  # the other process may have finished the set-up
            install(lock)
        build_kernels(stale_kernels(), lock)


def check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        given = ".".join(map(str, sys.version_info[:3]))
        raise SetupError(
            f"this is Python {given} ({sys.executable}); the project needs Python 3.11 or newer: "
            "run the same command with `python3.11`"
        )


def install(lock: int) -> None:
    """Remove a broken environment, create, install with pip, stamp."""
    start = time.monotonic()
    reason = reason_to_remake()
    if reason:
        with step(f"removing .venv ({reason})"):
            discard()
    is_new = not VENV.exists()
    VENV.mkdir(exist_ok=True)
    MARKER.touch()
    if is_new:
        call([sys.executable, "-m", "venv", str(VENV)], f"making .venv with Python {sys.version.split()[0]}", lock)
    pip = [venv_python(), "-m", "pip", "install", "--no-color", "--progress-bar", "off"]
    try:
        call([*pip, "-c", "constraints.txt", *BUILD_TOOLS], "installing the build tools", lock)
        call(
            [*pip, "--no-build-isolation", "-r", "requirements-dev.txt"],
            "installing the six packages and what they need (about a minute if torch is cached)", lock,
        )  # fmt: skip
    except SetupError:
        MARKER.unlink()  # pip failed and rolled back: the environment is intact
        raise
    write_stamp(STAMP, stamp_text())
    MARKER.unlink()
    info(f"environment ready in {time.monotonic() - start:.0f} s")


def discard() -> None:
    """Rename and delete `.venv`, so that an interrupted deletion does not leave half of it in place."""
    shutil.rmtree(DISCARDED, ignore_errors=True)
    if VENV.exists():
        VENV.rename(DISCARDED)
        shutil.rmtree(DISCARDED)


def write_stamp(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


def kernel_packages() -> list[Path]:
    """Return the packages with compiled kernels; `hatch_build.py`, run as a script, builds them in place."""
    return [path.parent for path in sorted(ROOT.glob("packages/*/hatch_build.py"))]


def kernel_digest(package: Path) -> str:
    patterns = ("hatch_build.py", "pyproject.toml", "src/**/sources.py", "src/*/csrc/**/*")
    return digest([path for pattern in patterns for path in sorted(package.glob(pattern)) if path.is_file()])


def stale_kernels() -> list[Path]:
    """Return the packages whose kernels are older than their sources."""
    packages = kernel_packages()
    return [p for p in packages if read_text(VENV / f"dev-built-{p.name}") != kernel_digest(p)]


def build_kernels(packages: Sequence[Path], lock: int) -> None:
    for package in packages:
        call([venv_python(), "hatch_build.py"], f"building the kernels of {package.name}", lock, cwd=package)
        write_stamp(VENV / f"dev-built-{package.name}", kernel_digest(package))
