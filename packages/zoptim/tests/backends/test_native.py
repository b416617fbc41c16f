from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zoptim.backends import native, select, sources
from zoptim.backends.contract import Flag, Hyper, Streams
from zoptim.backends.cpu import CpuJob
from zoptim.backends.signals import Signals

LARGE = 40_001  # enough elements to wake a second thread


@pytest.fixture
def library() -> native.Library:
    found = native.library()
    if found is None:
        pytest.skip(f"without the C kernels: {native.reason_without()}")
    return found


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], native.Library | str]]:
    """Load the extension as a new process with this ZOPTIM_KERNELS; restore the old one at the end."""
    before = native.library()
    level = before.level() if before else ""

    def load(choice: str | None) -> native.Library | str:
        monkeypatch.delenv(native.VARIABLE, raising=False)
        if choice is not None:
            monkeypatch.setenv(native.VARIABLE, choice)
        return native._load.__wrapped__()

    yield load
    if before:
        before.set_level(level)


def each_way(library: native.Library) -> list[tuple[str, int]]:
    return [(level, threads) for level in library.levels for threads in (1, 2, 3)]


# Choosing ------------------------------------------------------------------------------------------------------


def test_the_best_level_is_used_unless_the_variable_names_another(library: native.Library, fresh: Callable) -> None:
    assert fresh(None).level() == library.levels[-1]
    for level in library.levels:
        assert fresh(level.upper()).level() == level
    assert fresh("").level() == library.levels[-1]


def test_none_means_as_if_there_were_no_extension(fresh: Callable) -> None:
    assert fresh("none") == "ZOPTIM_KERNELS=none is set"


def test_an_unknown_value_raises_with_the_allowed_ones(fresh: Callable) -> None:
    with pytest.raises(
        ValueError, match=r"ZOPTIM_KERNELS=avx51 names no .* Did you mean 'avx512'\? Allowed: avx512,"
    ):
        fresh("avx51")


def test_a_level_of_another_processor_raises(library: native.Library, fresh: Callable) -> None:
    foreign = next(level for level in native.LEVELS if level not in library.levels)
    with pytest.raises(
        ValueError, match=f"does not run zoptim's {foreign} kernels. Allowed: {', '.join(library.levels)}, none"
    ):
        fresh(foreign)
    with pytest.raises(ValueError, match=f"does not run zoptim's {foreign} kernels"), native.use_level(foreign):
        pass


def test_a_block_can_use_another_level_and_restores_the_old_one(library: native.Library) -> None:
    before = library.level()
    with native.use_level(library.levels[0]):
        assert library.level() == library.levels[0]
        with native.use_level("none"):
            assert native.library() is None
            assert native.reason_without() == "the kernels are switched off"
        assert native.library() is library
        assert library.level() == library.levels[0]
    assert library.level() == before
    assert native.reason_without() is None


def test_a_missing_extension_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch, fresh: Callable) -> None:
    monkeypatch.setitem(sys.modules, "zoptim._kernels", None)
    assert "zoptim._kernels" in fresh(None)
    with pytest.raises(ValueError, match=r"ZOPTIM_KERNELS=avx2 cannot be used: the extension zoptim\._kernels"):
        fresh("avx2")


def test_a_checkout_rejects_an_extension_that_is_older_than_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: native.Library
) -> None:
    csrc = tmp_path / "src" / "zoptim" / "csrc"
    csrc.mkdir(parents=True)
    monkeypatch.setattr(native, "PACKAGE", csrc.parent)
    (csrc / "kern.c").write_text("int one;\n")
    native._check_current("0123456789abcdef")  # an installed wheel: no build script, no question
    for name in ("hatch_build.py", "pyproject.toml"):
        (tmp_path / name).touch()
    native._check_current(sources.source_hash(tmp_path))
    with pytest.raises(ImportError, match=r"built from other sources .* Run python3 tools/dev\.py build"):
        native._check_current("0123456789abcdef")
    built_from = sources.source_hash(tmp_path)
    (csrc / "zk_gpu.h").touch()  # text for the GPU: compiled at run time
    native._check_current(built_from)
    (csrc / "kern.c").write_text("int two;\n")
    with pytest.raises(ImportError, match="other sources"):
        native._check_current(built_from)


def test_the_report_names_what_is_in_use(library: native.Library) -> None:
    report = select.kernels()
    assert report.cpu == library.level()
    assert report.levels == library.levels
    assert str(report).splitlines()[0].split() == ["cpu", library.level()]
    assert [line.split()[0] for line in str(report).splitlines()] == ["cpu", "available", "threads", "gpu"]
    with native.use_level("none"):
        report = select.kernels()
        assert (report.cpu, report.levels) == ("the kernels are switched off", ())
    if not torch.cuda.is_available():
        assert report.gpu
        assert not report.gpu.startswith("cupy 1")


def test_torchs_own_threads_are_found(library: native.Library) -> None:
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("this torch has no GNU OpenMP")
    assert library.threads == "torch's OpenMP pool"


def test_importing_zoptim_loads_nothing_compiled_and_the_variable_is_read_at_the_first_use() -> None:
    code = """
import sys, warnings, torch
warnings.simplefilter("error")  # torch itself warns, of NumPy, where that is absent
import zoptim
assert not {"zoptim._kernels", "_cffi_backend", "cffi", "cupy"} & set(sys.modules), "loaded at import"
from zoptim.backends import native
try:
    native.library()
except ValueError as error:
    print(error)
"""
    environ = {**os.environ, native.VARIABLE: "fast"}
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ZOPTIM_KERNELS=fast names no kernels of zoptim.")
    assert "ResourceWarning" not in done.stderr


# Same bits -----------------------------------------------------------------------------------------------------


def noise(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A view that begins one element into its memory: kernels must not assume alignment."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel + 1, generator=generator).to(dtype)[1:]


def adam_streams(weight: torch.dtype, state: torch.dtype, copy: torch.dtype | None, is_split: bool) -> Streams:
    sizes = [3, 257, LARGE]
    states: tuple[list[Tensor], ...] = tuple([torch.zeros(n, dtype=state) for n in sizes] for _ in range(2))
    scales = tuple([torch.zeros(-(-n // 256)) for n in sizes] for _ in range(2)) if state is torch.uint8 else ()
    return Streams(
        weights=[noise(n, n, weight) for n in sizes],
        grads=[noise(n + 1, n, torch.float32 if weight is torch.float32 else weight) for n in sizes],
        states=states,
        scales=scales,
        remainders=[torch.zeros(n, dtype=torch.int16) for n in sizes] if is_split else [],
        copies=[torch.zeros(n, dtype=copy) for n in sizes] if copy else [],
        steps=[torch.zeros(()) for _ in sizes],
    )


@pytest.mark.parametrize(
    ("weight", "state", "copy", "is_split"),
    [
        (torch.float32, torch.float32, None, False),
        (torch.float32, torch.float32, torch.bfloat16, False),
        (torch.float32, torch.bfloat16, torch.float16, False),
        (torch.float32, torch.uint8, None, False),
        (torch.bfloat16, torch.float32, None, True),
        (torch.bfloat16, torch.uint8, torch.bfloat16, True),
        (torch.bfloat16, torch.bfloat16, None, False),
        (torch.float16, torch.float16, None, False),
    ],
)
def test_every_level_and_number_of_threads_gives_the_same_bits(
    library: native.Library, weight: torch.dtype, state: torch.dtype, copy: torch.dtype | None, is_split: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)
    results = {}
    for level, threads in each_way(library):
        streams = adam_streams(weight, state, copy, is_split)
        monkeypatch.setattr(native, "num_threads", lambda threads=threads: threads)
        with native.use_level(level):
            job = CpuJob("adam", Flag.DECOUPLED, streams)
            for _ in range(3):
                job.step(hyper, Signals())
        assert [int(step) for step in streams.steps] == [3, 3, 3]
        results[level, threads] = [tensor for tensors in streams.written() for tensor in tensors]
    first, *others = results.values()
    for other in others:
        assert all(
            torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) for a, b in zip(first, other)
        )


# Sums ----------------------------------------------------------------------------------------------------------

FORMATS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def squares(library: native.Library, rows: list[Tensor], threads: int = 1) -> float:
    numel = array("q", [row.numel() for row in rows])
    partials = library.ffi.new("double[]", sum(library.lib.zk_num_spans(n) for n in numel) or 1)
    pointers = library.ffi.from_buffer("uint64_t[]", array("Q", [row.data_ptr() for row in rows]))
    sizes = library.ffi.from_buffer("int64_t[]", numel)
    return library.lib.zk_squares(FORMATS[rows[0].dtype], len(rows), pointers, sizes, partials, threads)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_squares_are_near_those_of_float64_with_the_same_bits_everywhere(
    library: native.Library, dtype: torch.dtype
) -> None:
    rows = [noise(n, n, dtype) for n in (1, 0, 255, 1024, 16_385, LARGE)]
    expected = sum(float(row.double().square().sum()) for row in rows)
    sums = set()
    for level, threads in each_way(library):
        with native.use_level(level):
            sums.add(squares(library, rows, threads))
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_squares_show_an_element_that_is_not_finite_wherever_it_is(
    library: native.Library, dtype: torch.dtype, value: float
) -> None:
    for level in library.levels:
        with native.use_level(level):
            for position in (0, 16, 1023, 16_384, 20_000):
                rows = [torch.ones(5, dtype=dtype), torch.ones(20_001, dtype=dtype)]
                rows[1][position] = value
                assert not torch.tensor(squares(library, rows)).isfinite()


def test_squares_of_the_largest_and_smallest_floats_neither_overflow_nor_vanish(library: native.Library) -> None:
    for value in (3e38, 1e-40):
        row = torch.full((1000,), value)
        assert squares(library, [row]) == pytest.approx(1000 * float(row[0]) ** 2, rel=2e-7)


# Overlap -------------------------------------------------------------------------------------------------------


def test_overlap_is_found_as_by_comparing_all_with_all(library: native.Library) -> None:
    chance = random.Random(0)
    for _ in range(300):
        borders = sorted(chance.sample(range(64), 2 * chance.randint(0, 6)))
        written = list(zip(borders[::2], borders[1::2]))
        reads = [(chance.randint(0, 64), chance.randint(1, 5)) for _ in range(chance.randint(0, 4))]
        hits = [any(start < end and first < start + size for first, end in written) for start, size in reads]
        expected = hits.index(True) if True in hits else -1
        view = library.ffi.from_buffer
        found = library.lib.zk_find_overlap(
            len(written), view("uint64_t[]", array("Q", borders[::2])), view("uint64_t[]", array("Q", borders[1::2])),
            len(reads), view("uint64_t[]", array("Q", [r[0] for r in reads])),
            view("int64_t[]", array("q", [r[1] for r in reads])),
        )  # fmt: skip
        assert found == expected, (written, reads)
