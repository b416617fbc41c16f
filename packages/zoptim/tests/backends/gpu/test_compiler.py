from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from zoptim.backends.gpu import compiler


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((9, 0), "sm_90"),
        ((8, 9), "sm_89"),
        ((9, 3), "sm_90"),
        ((12, 1), "sm_120"),
        ((13, 0), "compute_120"),
    ],
)
def test_a_device_gets_its_own_code_or_that_of_its_family_or_ptx(capability: tuple[int, int], target: str) -> None:
    assert compiler.target(capability, (75, 80, 86, 89, 90, 100, 120)) == target


def test_a_device_that_is_too_old_raises() -> None:
    with pytest.raises(
        RuntimeError, match=r"compute capability 6\.1; the installed NVRTC compiles for 7\.5 and newer"
    ):
        compiler.target((6, 1), (75, 80))


def test_the_options_keep_the_bits_of_the_cpu() -> None:
    assert {"--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"} <= set(compiler.OPTIONS)


def test_the_name_in_the_cache_depends_on_text_architecture_and_compiler() -> None:
    names = {
        compiler.cache_name(text, architecture, version)
        for text in ("a", "b")
        for architecture in ("sm_80", "sm_90")
        for version in ((12, 8), (13, 0))
    }
    assert len(names) == 8
    assert all("/" not in name and name.endswith(".bin") for name in names)


def test_the_cache_folder_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("ZOPTIM_CACHE", raising=False)
    assert compiler.cache_folder() == Path("/x/zoptim")
    monkeypatch.setenv("ZOPTIM_CACHE", "/y")
    assert compiler.cache_folder() == Path("/y")


class FakeNvrtc(types.SimpleNamespace):
    """NVRTC's interface in CuPy, which records its calls."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self, fails: bool = False) -> None:
        super().__init__(compiled=[], destroyed=0, fails=fails)

    def getVersion(self) -> tuple[int, int]:  # noqa: N802
        return (13, 0)

    def getSupportedArchs(self) -> tuple[int, ...]:  # noqa: N802
        return (80, 90)

    def createProgram(self, text: str, name: str, headers: Any, includes: Any) -> str:  # noqa: N802
        return text

    def compileProgram(self, program: str, options: list[str]) -> None:  # noqa: N802
        self.compiled.append(options)
        if self.fails:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION")

    def getProgramLog(self, program: str) -> str:  # noqa: N802
        return "line 3: what is this"

    def getCUBIN(self, program: str) -> bytes:  # noqa: N802
        return b"cubin of " + program.encode()

    def getPTX(self, program: str) -> bytes:  # noqa: N802
        return b"ptx of " + program.encode()

    def destroyProgram(self, program: str) -> None:  # noqa: N802
        self.destroyed += 1


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvrtc:
    fake = FakeNvrtc()
    cuda = types.SimpleNamespace(nvrtc=fake)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    monkeypatch.setenv("ZOPTIM_CACHE", str(tmp_path / "cache"))
    return fake


def test_a_text_is_compiled_once_and_then_read(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    first = compiler.binary("text", (9, 0))
    assert first == b"cubin of text\0", "CuPy loses the last byte"
    assert compiler.binary("text", (9, 0)) == first
    assert nvrtc.compiled == [["--gpu-architecture=sm_90", *compiler.OPTIONS]]
    assert nvrtc.destroyed == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1, "no temporary file is left"


def test_a_newer_device_gets_ptx(nvrtc: FakeNvrtc) -> None:
    assert compiler.binary("text", (10, 0)) == b"ptx of text"


def test_a_cache_that_cannot_be_written_is_no_error(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert compiler.binary("text", (8, 0)) == b"cubin of text\0"
    assert compiler.binary("text", (8, 0)) == b"cubin of text\0"
    assert len(nvrtc.compiled) == 2


def test_an_error_carries_the_words_of_the_compiler(nvrtc: FakeNvrtc) -> None:
    nvrtc.fails = True
    with pytest.raises(RuntimeError, match=r"(?s)for sm_90 \(NVRTC_ERROR_COMPILATION\).*line 3: what is this"):
        compiler.binary("text", (9, 0))
    assert nvrtc.destroyed == 1
