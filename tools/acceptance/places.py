"""Paths and variables of the processes that run pieces.  Standard library only, besides tools/repo.py."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys

import repo

from simulated_cuda import environment

__all__ = ["CACHE", "RESULTS", "build_kernels", "child_environment", "commit", "sources_digest"]

RESULTS = repo.ROOT / "bench" / "results" / "gpu"
CACHE = repo.ROOT / ".cache" / "gpu_acceptance"
CONTRACT = repo.ROOT / "tests" / "contract"
KERNELS = tuple(path.parent.name for path in sorted(repo.ROOT.glob("packages/*/hatch_build.py")))


def child_environment(device: str, schedule: str) -> dict[str, str]:
    """Return the variables of a piece's process: the sources of this checkout, on a GPU or the simulated device."""
    paths = [*(str(repo.source_folder(name).parent) for name in repo.PACKAGES), str(repo.ROOT / "tools")]
    paths += [str(CONTRACT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits in every run
    environ["ZCOMM_TESTING_BACKEND"] = "cpu:gloo,cuda:nccl"
    if device == "simulated":
        environ |= {"SIMULATED_CUDA_SCHEDULE": schedule, "OMP_NUM_THREADS": "1"}
        environ = environment.simulated(environ)
    return environ


def build_kernels() -> dict[str, str]:
    """Compile the C kernels in place; return by package why that was not possible, "" where it was."""
    return {name: _build(name) for name in KERNELS}


def _build(name: str) -> str:
    missing = [module for module in ("cffi", "hatchling") if importlib.util.find_spec(module) is None]
    if missing:
        return f"C kernels of {name}: Python has no {' and no '.join(missing)}"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return f"C kernels of {name}: there is no C compiler"
    script = repo.package_folder(name) / "hatch_build.py"
    sources = [script, *repo.files(".c", ".h", under=repo.source_folder(name))]
    built = [path.stat().st_mtime for path in repo.source_folder(name).glob("*.so")]
    if built and min(built) >= max(path.stat().st_mtime for path in sources):
        return ""
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"C kernels of {name}: {done.stderr.strip()[-300:]}"


def sources_digest() -> str:
    """Return a digest of all that a piece executes: it names the sources where git cannot."""
    total = hashlib.sha256()
    for folder in ("packages", "tools", "tests/contract"):
        for path in repo.files(".py", ".c", ".h", ".cu", ".cpp", under=repo.ROOT / folder):
            is_test = path.suffix == ".py" and "tests" in path.relative_to(repo.ROOT).parts[2:3]
            if not is_test:
                total.update(path.relative_to(repo.ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def commit() -> str:
    """Return the commit, with "+" if the checkout differs from it; "unknown" without git."""
    git = ["git", "-C", str(repo.ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return "unknown" if head.returncode else head.stdout.strip() + ("+" if changed.stdout.strip() else "")
