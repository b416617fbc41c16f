"""Published wheels: one with the transport where it can be compiled, one of pure Python elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent.parent
EXTENSION = "zcomm/_shared.abi3.so"
MOST_KB = 200

pytestmark = [
    pytest.mark.skipif(not (PROJECT / "hatch_build.py").exists(), reason="needs the source tree"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the transport is for Linux"),
]

# Two ranks made by hand, so that nothing of this tree is imported.
SUM = """
import os, sys
import torch, torch.distributed as dist
import zcomm
assert zcomm.__file__.startswith(sys.argv[1]), zcomm.__file__
child = os.fork()
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(child == 0), world_size=2)
tensor = torch.ones(100_000)
zcomm.all_reduce(tensor)
assert tensor.eq(2).all()
if child == 0:
    zcomm.barrier()
    os._exit(0)
print(zcomm.transport(), "|", zcomm.transport_reason())
zcomm.barrier()
assert os.waitpid(child, 0)[1] == 0
"""


def must(command: list[str], cwd: Path, **variables: str) -> tuple[str, str]:
    """Output and warnings of the command."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **variables}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def built(folder: Path, **variables: str) -> tuple[Path, str]:
    """The wheel of a fresh checkout, and what the build said.  The extension in place is left alone."""
    hidden = shutil.ignore_patterns("__pycache__", "*.so")
    project = Path(shutil.copytree(PROJECT, folder / "zcomm", ignore=hidden))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    said = must(command, project, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel, "".join(said)


def unpacked(wheel: Path, folder: Path) -> dict[str, int]:
    """Puts the wheel's files into `folder`; their sizes."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        return {info.filename: info.file_size for info in archive.infolist()}


def at_work(folder: Path, site: Path) -> str:
    command = [sys.executable, "-c", SUM, str(site), str(folder / "store")]
    return must(command, folder, PYTHONPATH=str(site))[0].strip()


def test_the_wheel_has_the_transport_for_every_python_and_uses_it(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    pytest.importorskip("cffi")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    wheel, _ = built(tmp_path)
    assert re.search(r"-cp310-abi3-linux_\w+\.whl$", wheel.name)
    files = unpacked(wheel, tmp_path / "site")
    assert 0 < files[EXTENSION] < MOST_KB * 1024
    assert "zcomm/csrc/zs_api.h" in files
    assert at_work(tmp_path, tmp_path / "site") == "shared memory | all 2 ranks are on one host"


def test_without_a_compiler_the_wheel_is_pure_python_and_works_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    wheel, said = built(tmp_path, CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert (
        "built without its shared-memory transport and uses Gloo: CC names 'no-such-compiler', which is not on PATH"
        in said
    )
    assert EXTENSION not in unpacked(wheel, tmp_path / "site")
    reason = "rank 0: the extension zcomm._shared is not built (reinstall zcomm-torch with a C compiler on PATH)"
    assert at_work(tmp_path, tmp_path / "site") == f"gloo | {reason}"
