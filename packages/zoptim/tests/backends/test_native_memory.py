"""The C kernels under AddressSanitizer and UndefinedBehaviorSanitizer, see csrc/drive.c."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from zoptim.backends import sources

CSRC = sources.CSRC
DRIVER = Path(__file__).resolve().parents[1] / "csrc" / "drive.c"
SANITIZERS = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
FLAGS = (
    "-O1", "-g", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra",
    "-Wno-psabi",  # vectors are passed between inlined functions only
    "-Wno-pass-failed",  # clang: sanitized loops are not vectorised
)  # fmt: skip
AVX2 = ("-mavx2", "-mfma", "-mbmi2")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
IS_X86 = platform.machine() in ("x86_64", "AMD64")
LEVELS = {"base": (), "v3": AVX2, "v4": (*AVX2, *AVX512)} if IS_X86 else {"base": ()}


@pytest.fixture
def compiler(tmp_path: Path) -> list[str]:
    """A C compiler that has the sanitizers."""
    command = shlex.split(os.environ.get("CC", "")) or [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if not command:
        pytest.skip("there is no C compiler")
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    command = command[: 1 if "CC" not in os.environ else None]
    built = subprocess.run([*command, *SANITIZERS, str(probe), "-o", str(tmp_path / "probe")], capture_output=True)
    if built.returncode or subprocess.run([str(tmp_path / "probe")], capture_output=True).returncode:
        pytest.skip(f"{command[0]} cannot build programs with AddressSanitizer")
    return command


def build(compiler: list[str], folder: Path) -> Path:
    """The driver with the kernels of every level.  A warning is an error."""
    (folder / "zk_table.h").write_text(sources.rules_text(include=True))
    common = [*compiler, *FLAGS, *SANITIZERS, "-Werror", f"-I{CSRC}", f"-I{folder}"]
    runtime = ['-DZK_SOURCE_HASH=""', *(["-DZK_HAS_X86"] if IS_X86 else [])]
    parts = {f"kern_{name}": [*flags, f"-DZK_SUFFIX=_{name}", str(CSRC / "kern.c")] for name, flags in LEVELS.items()}
    parts |= {"rt": [*runtime, str(CSRC / "rt.c")], "drive": [str(DRIVER)]}
    objects = [str(folder / f"{name}.o") for name in parts]
    running = [
        subprocess.Popen([*common, "-c", *what, "-o", target], stderr=subprocess.PIPE, text=True)
        for what, target in zip(parts.values(), objects)
    ]
    messages = [process.communicate()[1] for process in running]
    assert not any(process.returncode for process in running), "\n".join(messages)
    program = folder / "drive"
    subprocess.run([*common, *objects, "-o", str(program)], check=True)
    return program


@pytest.mark.skipif(not (CSRC / "kern.c").exists(), reason="needs the source tree")
def test_no_kernel_leaves_its_streams_and_all_levels_agree_in_every_combination_of_formats(
    compiler: list[str], tmp_path: Path
) -> None:
    environ = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run([str(build(compiler, tmp_path))], env=environ, capture_output=True, text=True, check=False)
    different = [line for line in done.stdout.splitlines() if line.startswith("DIFFERS")]
    assert not different, "\n".join(different[:10])
    assert done.returncode == 0, done.stderr[:4000]
    assert len(done.stdout.splitlines()) > 1000
