"""The distribution: the source archive, the wheel built from it, and that wheel in use outside this tree."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
EXTENSION = "zoptim/_kernels.abi3.so"
LEVELS = {"x86_64": ("sse2", "avx2"), "aarch64": ("neon",), "arm64": ("neon",)}
MOST_KB = 360  # 180 of kernels (two instruction sets with fused loops, SSE2 without); Python, kernel text, licence

pytestmark = pytest.mark.skipif(not (PROJECT / "hatch_build.py").exists(), reason="needs the source tree")

STEP = """
import hashlib, sys, warnings, torch
warnings.simplefilter("error")
import zoptim
assert zoptim.__file__.startswith(sys.argv[1]), zoptim.__file__
assert zoptim.kernels().cpu == sys.argv[2], zoptim.kernels()
torch.manual_seed(0)
params = [torch.randn(n, requires_grad=True) for n in (7, 1000, 40_001)]
optimizer = zoptim.AdamW(params, lr=0.1, state_dtype="8bit")
for _ in range(3):
    for param in params:
        param.grad = torch.randn(param.shape)
    optimizer.step()
print(hashlib.sha256(b"".join(bytes(param.untyped_storage()) for param in params)).hexdigest())
"""


def run(command: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=600, check=False)


def must(command: list[str], cwd: Path, **variables: str) -> str:
    done = run(command, cwd, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_project(target: Path) -> Path:
    """Copy the project like a fresh checkout; other tests keep using the extension in place."""
    hidden = shutil.ignore_patterns("__pycache__", "*.so")
    return Path(shutil.copytree(PROJECT, target / "zoptim", ignore=hidden))


def built(folder: Path) -> tuple[Path, Path]:
    """The source archive, and the wheel that pip builds from it."""
    must([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], copy_project(folder))
    (archive,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    must([*pip, "-w", str(folder), str(archive)], folder)
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


def check_linkage(extension: Path) -> None:
    """Check that only libc is linked: no second OpenMP runtime, no torch of one version."""
    if sys.platform != "linux" or not shutil.which("readelf"):
        return
    lines = must(["readelf", "-d", str(extension)], extension.parent).splitlines()
    needed = [line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line]
    assert needed in (["libc.so.6"], ["libc.so"]), needed  # glibc, musl


def test_the_wheel_of_the_source_archive_serves_every_python_and_gives_the_same_bits_at_every_level(
    tmp_path: Path,
) -> None:
    pytest.importorskip("hatchling")
    archive, wheel = built(tmp_path)
    with tarfile.open(archive) as content:
        sources = [name.partition("/")[2] for name in content.getnames()]
    assert {"hatch_build.py", "src/zoptim/csrc/kern.c", "src/zoptim/csrc/zk_api.h"} <= set(sources)
    assert not [name for name in sources if name.endswith(".so")]

    assert "-cp310-abi3-" in wheel.name
    assert platform.machine() in wheel.name
    assert wheel.stat().st_size < MOST_KB * 1000, f"{wheel.stat().st_size / 1000:.0f} KB"
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(site)
    csrc = PROJECT / "src/zoptim/csrc"
    texts = {f"zoptim/csrc/{path.relative_to(csrc)}" for path in csrc.rglob("*.*") if path.suffix != ".c"}
    assert {EXTENSION, *texts} <= set(names)  # the GPU kernels are compiled from their text at run time
    check_linkage(site / EXTENSION)

    python = [sys.executable, "-X", "dev", "-c", STEP, str(site)]
    results = {
        level: must([*python, level], tmp_path, PYTHONPATH=str(site), ZOPTIM_KERNELS=level)
        for level in LEVELS.get(platform.machine(), ("portable",))
    }
    assert len(set(results.values())) == 1, results


def test_without_a_compiler_the_wheel_is_pure_python_warns_once_and_updates_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = run(build, copy_project(tmp_path), CC="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(
        "zoptim is built without its kernels and updates with torch: CC names"
    ) == 1
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    reason = "the extension zoptim._kernels is not built (reinstall zoptim from a wheel for this platform)"
    step = [sys.executable, "-c", STEP.replace('"error"', '"default"'), str(site), reason]
    done = run(step, tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning: AdamW updates parameter 0 of group 0 with plain torch operations") == 1


@pytest.mark.parametrize(
    ("variables", "code", "message"),
    [
        ({"PATH": "", "CC": ""}, 0, "found no C compiler: none of cc, gcc, clang is on PATH. Install one"),
        ({"CC": "no-such-compiler -m64"}, 0, "CC names 'no-such-compiler', which is not on PATH"),
        ({"CC": "false"}, 1, "the C compiler failed (exit code 1)"),
    ],
)
def test_a_compiler_that_is_missing_or_fails_is_named(
    variables: Mapping[str, str], code: int, message: str, tmp_path: Path
) -> None:
    """Without one, the package works: it updates with torch."""
    pytest.importorskip("hatchling")
    done = run([sys.executable, "hatch_build.py"], copy_project(tmp_path), **variables)
    assert done.returncode == code
    assert done.stderr.startswith("zoptim: "), done.stderr
    assert message in done.stderr
