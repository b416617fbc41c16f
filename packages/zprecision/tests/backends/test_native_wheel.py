"""The distribution: a wheel with the kernels of every level, and one of pure Python where there is no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
EXTENSION = "zprecision/_kernels.abi3.so"
MOST_KB = 400

pytestmark = pytest.mark.skipif(not (PROJECT / "hatch_build.py").exists(), reason="needs the source tree")

USE = """
import sys, torch, zprecision
assert zprecision.__file__.startswith(sys.argv[1]), zprecision.__file__
assert zprecision.kernels().cpu.startswith(sys.argv[2]), zprecision.kernels()
torch.manual_seed(0)
packed = zprecision.pack(zprecision.quantize(torch.randn(48, 256), "int4"))
product = zprecision.linear(torch.randn(5, 256), packed)
print(product.sum().item() if sys.argv[3] == "rounded" else product.numpy().tobytes().hex())
"""


def run(command: list[str], cwd: Path, **variables: str) -> str:
    environ = {**os.environ, **variables}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def built(folder: Path, **variables: str) -> tuple[Path, list[str], str]:
    """The unpacked wheel of a fresh checkout, its files, and what the build said."""
    hidden = shutil.ignore_patterns("__pycache__", "*.so")
    project = Path(shutil.copytree(PROJECT, folder / "zprecision", ignore=hidden))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    said = run(command, project, **variables)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
        assert wheel.stat().st_size < MOST_KB * 1000, f"{wheel.stat().st_size / 1000:.0f} KB"
        return folder / "site", [wheel.name, *packed.namelist()], said


def test_the_wheel_gives_the_same_bits_at_every_level(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    pytest.importorskip("cffi")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    site, files, _ = built(tmp_path)
    assert "-cp310-abi3-" in files[0]
    assert EXTENSION in files
    assert not [name for name in files if name.endswith(".c")]
    code = "import zprecision; print(*zprecision.kernels().levels)"
    levels = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(site)).split()
    use = [sys.executable, "-c", USE, str(site)]
    found = {run([*use, n, "bits"], tmp_path, PYTHONPATH=str(site), ZPRECISION_KERNELS=n) for n in levels}
    assert len(found) == 1


def test_without_a_compiler_the_wheel_is_pure_python_warns_once_and_uses_torch(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    site, files, said = built(tmp_path, CC="no-such-compiler")
    assert files[0].endswith("-py3-none-any.whl")
    assert EXTENSION not in files
    assert said.count("zprecision is built without its kernels and uses torch: CC names 'no-such-compiler'") == 1
    reason = "the extension zprecision._kernels is not built (reinstall zprecision with a C compiler on PATH"
    used = run([sys.executable, "-c", USE, str(site), reason, "rounded"], tmp_path, PYTHONPATH=str(site))
    assert used.count("RuntimeWarning: zprecision uses torch's operations, which are slower: the extension") == 1
    variables = {"PYTHONPATH": str(site), "ZPRECISION_KERNELS": "none"}
    chosen = run([sys.executable, "-c", USE, str(site), "ZPRECISION_KERNELS=none", "rounded"], tmp_path, **variables)
    assert "RuntimeWarning" not in chosen


def test_a_pure_wheel_is_built_on_request_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    _, files, said = built(tmp_path, ZBUILD="pure")
    assert files[0].endswith("-py3-none-any.whl")
    assert EXTENSION not in files
    assert "is built without" not in said
    with pytest.raises(AssertionError, match="ZBUILD=slim is unknown: set ZBUILD=pure"):
        built(tmp_path / "other", ZBUILD="slim")
