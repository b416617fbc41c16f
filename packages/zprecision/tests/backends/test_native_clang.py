"""The sources in the dialect of clang, the compiler of macOS: it lacks some of gcc's functions."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SOURCES = PROJECT / "src" / "zprecision" / "csrc"
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
LEVELS = {"base": (), "v3": AVX2, "v4": AVX512, "vnni": (*AVX512, "-mavx512vnni")}
IS_X86 = platform.machine() in ("x86_64", "AMD64")

pytestmark = [
    pytest.mark.skipif(shutil.which("clang") is None, reason="no clang"),
    pytest.mark.skipif(not SOURCES.is_dir(), reason="needs the source tree"),
]


@pytest.mark.parametrize("name", sorted(path.stem for path in SOURCES.glob("*.c")))
def test_clang_accepts_every_level(name: str) -> None:
    for level, flags in LEVELS.items():
        command = ["clang", "-std=gnu11", "-fsyntax-only", "-Wno-psabi", f"-DZQ_SUFFIX=_{level}"]
        defines = ['-DZQ_SOURCE_HASH=""', "-DZQ_HAS_X86"] if IS_X86 else ['-DZQ_SOURCE_HASH=""']
        given = [*command, *defines, *flags, str(SOURCES / f"{name}.c")]
        done = subprocess.run(given, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        if not IS_X86:
            return
