import errno
import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch

from zckpt import CheckpointCorrupt, CheckpointReadError, Shard, find, save, whole
from zckpt.loading import run_reads
from zckpt.storage import frugal_reader
from zckpt.storage.frugal_reader import TRIAL_NBYTES, Access, FrugalReader, Way
from zckpt.storage.local_files import PlainReader
from zckpt.storage.storage import LOCAL

_NBYTES = 300_001
_WINDOW = 1 << 16
_PAGE = 4096
_TRIAL = 1000
_ONCE = Access(True)


@attrs.define
class Machine:
    """What reads cost, which pages are cached, and what was read past the cache: all that a reader can learn.

    The cache is a model: the kernel's own evicts late and reads ahead when a machine is busy.
    """

    page_s: float = 1e-9  # processor time of a byte through the cache
    code: int = 0  # error of a direct read
    cpu_s: float = 0.0
    pages: dict[int, set[int]] = attrs.field(factory=dict)  # of each file, by its inode: the cached ones
    direct: list[tuple[int, int]] = attrs.field(factory=list)  # (offset, bytes) of each direct read
    ahead: list[bool] = attrs.field(factory=list)  # each advice

    def preadv(self, real: Callable[..., int]) -> Callable[..., int]:
        def read(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                self.direct.append((offset, len(buffers[0])))
                if self.code:
                    raise OSError(self.code, os.strerror(self.code))
                return real(fd, buffers, offset)
            cached, first = self.pages.setdefault(os.fstat(fd).st_ino, set()), offset // _PAGE
            if flags:
                assert flags == os.RWF_NOWAIT
                missing = next(page for page in itertools.count(first) if page not in cached)
                if missing == first:
                    raise BlockingIOError(errno.EAGAIN, "not cached")
                return real(fd, [buffers[0][: missing * _PAGE - offset]], offset)
            count = real(fd, buffers, offset)
            cached.update(range(first, -(-(offset + count) // _PAGE)))
            self.cpu_s += count * self.page_s
            return count

        return read

    def hold(self, path: Path, start: int = 0, stop: int = _NBYTES) -> None:
        """Bytes of a file are cached from now on, in whole pages."""
        self.pages.setdefault(path.stat().st_ino, set()).update(range(start // _PAGE, -(-stop // _PAGE)))

    def evict(self, path: Path) -> None:
        self.pages.pop(path.stat().st_ino, None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(os.urandom(_NBYTES))
    return tmp_path / "f"


@pytest.fixture
def machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pages are expensive, trials and windows are small, and the kernel does not read ahead, whatever the advice."""
    skip_without_direct_reads(path)
    made = Machine()
    monkeypatch.setattr(os, "preadv", made.preadv(os.preadv))
    monkeypatch.setattr(frugal_reader.time, "thread_time", lambda: made.cpu_s)
    monkeypatch.setattr(frugal_reader, "WINDOW_NBYTES", _WINDOW)
    monkeypatch.setattr(FrugalReader, "step_nbytes", 8192)
    for way in TRIAL_NBYTES:
        monkeypatch.setitem(TRIAL_NBYTES, way, _TRIAL)
    real = PlainReader.read_ahead
    monkeypatch.setattr(PlainReader, "read_ahead", lambda self, on: (made.ahead.append(on), real(self, False)))
    return made


def skip_without_direct_reads(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        pytest.skip("this file system has no O_DIRECT")


def read(
    path: Path, steps: list[tuple[int, int]], access: Access = _ONCE, way: Way | None = None
) -> tuple[bytes, Way]:
    """Bytes of a file in steps of (offset, bytes), and the way at the end.  way: instead of the first one."""
    parts = []
    with LOCAL.open(path, access=access) as reader:
        assert isinstance(reader, FrugalReader)
        reader.way = way or reader.way
        for offset, nbytes in steps:
            parts.append(bytearray(nbytes))
            reader.read_into(offset, memoryview(parts[-1]))
            if reader.window is not None:
                assert len(reader.window) == _WINDOW, "one bounded buffer"
        assert reader.nbytes == _NBYTES
        return b"".join(parts), reader.way


def in_steps(start: int, stop: int, nbytes: int) -> list[tuple[int, int]]:
    return [(at, min(nbytes, stop - at)) for at in range(start, stop, nbytes)]


@pytest.mark.parametrize("step", [1, 7, 4096, 10_001, _WINDOW, _WINDOW + 1, _NBYTES])
@pytest.mark.parametrize("span", [(0, _NBYTES), (1, 290_000), (4096, 8192), (0, 0)], ids=str)
@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 100_003])
def test_bytes_are_those_of_the_file_at_every_alignment(
    path: Path, machine: Machine, start: int, span: tuple[int, int], step: int
) -> None:
    stop = _NBYTES if step > 100 else start + 3000
    found, way = read(path, in_steps(start, stop, step), Access(True, (span,) if span[1] else ()), Way.DIRECT)
    assert found == path.read_bytes()[start:stop]
    assert way is Way.DIRECT
    assert all(offset % 4096 == 0 and nbytes % 4096 == 0 for offset, nbytes in machine.direct)


@pytest.mark.parametrize("is_cached", [True, False])
def test_the_kernels_own_cache_serves_what_it_holds(
    path: Path, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_direct_reads(path)
    windows: list[int] = []
    real = FrugalReader._read_window
    monkeypatch.setattr(FrugalReader, "_read_window", lambda *args: (windows.append(args[1]), real(*args))[1])

    def is_read_past_the_cache() -> bool:
        windows.clear()
        if is_cached:
            path.read_bytes()
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with LOCAL.open(path, access=_ONCE) as reader:
            assert isinstance(reader, FrugalReader)
            reader.way = Way.DIRECT
            found = bytearray(_NBYTES)
            for offset, nbytes in in_steps(0, _NBYTES, 10_001):
                reader.read_into(offset, memoryview(found)[offset : offset + nbytes])
        assert found == path.read_bytes()
        return bool(windows)

    # A busy machine evicts pages of its own accord, or keeps them for a while: asked again
    assert any(is_read_past_the_cache() is not is_cached for _ in range(20))


def test_a_window_reaches_over_tensors_to_the_end_of_its_span_and_no_further(path: Path, machine: Machine) -> None:
    spans = ((0, 150_000), (200_000, 230_000))
    steps = in_steps(0, 150_000, 1000) + in_steps(200_000, 230_000, 999) + [(250_000, 10)]
    found, _ = read(path, steps, Access(True, spans), Way.DIRECT)
    data = path.read_bytes()
    assert found == data[:150_000] + data[200_000:230_000] + data[250_000:250_010]
    assert machine.direct == [
        (0, 65_536), (65_536, 65_536), (131_072, 20_480), (196_608, 36_864), (249_856, 4096),
    ]  # fmt: skip


def test_the_kernel_reads_ahead_through_the_cache_only(path: Path, machine: Machine) -> None:
    read(path, in_steps(0, _NBYTES, 5000))
    assert machine.ahead == [True, False, False], "as opened; then a probe; then past the cache"
    machine.page_s = 0.0
    machine.ahead.clear()
    machine.evict(path)
    assert read(path, in_steps(0, _NBYTES, 5000))[1] is Way.CACHE
    assert machine.ahead[:2] == [True, False]
    assert all(machine.ahead[2:])


def test_pages_that_become_expensive_are_left_later(path: Path, machine: Machine) -> None:
    machine.page_s = 0.05e-9
    with LOCAL.open(path, access=Access(True)) as reader:
        assert isinstance(reader, FrugalReader)
        for offset, nbytes in in_steps(0, 200_000, 500):
            if offset == 100_000:
                assert reader.way is Way.CACHE
                machine.page_s = 1e-9
            reader.read_into(offset, memoryview(bytearray(nbytes)))
        assert reader.way is Way.DIRECT


def test_what_is_cached_is_read_from_the_cache_up_to_its_last_page(path: Path, machine: Machine) -> None:
    machine.hold(path, 0, 40_960)
    machine.hold(path, 102_400, 143_360)
    span = ((0, _NBYTES),)
    found, _ = read(path, in_steps(0, _NBYTES, _NBYTES), Access(True, span))
    assert found == path.read_bytes()
    read_twice = [at for at, nbytes in machine.direct if at < 40_960]
    assert not read_twice
    machine.direct.clear()
    machine.hold(path)
    _, way = read(path, in_steps(0, _NBYTES, 5000), Access(True, span))
    assert way is Way.PROBE, "cached bytes say nothing of fresh pages"
    assert machine.direct == []


def test_cached_bytes_that_cost_like_fresh_ones_are_being_read_ahead_and_no_longer_looked_up(
    path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(path, [(0, 5000)])
    machine.hold(path)  # as an advance of the kernel would
    monkeypatch.setattr(frugal_reader.time, "thread_time", iter(range(10_000)).__next__)
    with LOCAL.open(path, access=Access(True)) as reader:
        assert isinstance(reader, FrugalReader)
        reader.way = Way.DIRECT
        machine.direct.clear()
        for offset, nbytes in in_steps(0, 100_000, 500):
            reader.read_into(offset, memoryview(bytearray(nbytes)))
    assert machine.direct[0][0] == 0
    assert len(machine.direct) > 10


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_rejects_is_read_plainly_and_a_disk_that_fails_is_an_error(
    path: Path, machine: Machine, code: int
) -> None:
    machine.code = code
    steps = in_steps(0, _NBYTES, 50_000)
    if code == errno.EINVAL:
        found, way = read(path, steps)
        assert (found, way) == (path.read_bytes(), Way.SETTLED)
        assert len(machine.direct) == 1, "it does not try again"
    else:
        with pytest.raises(OSError, match="f'") as caught:
            read(path, steps)
        assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("kept", [0, 4096, 100_000])
def test_a_file_that_ends_too_soon_is_an_error_of_direct_reads_too(path: Path, machine: Machine, kept: int) -> None:
    with LOCAL.open(path, access=Access(True, ((0, _NBYTES),))) as reader:
        assert isinstance(reader, FrugalReader)
        reader.way = Way.DIRECT
        reader.read_into(0, memoryview(bytearray(10_000)))
        os.truncate(path, kept)
        with pytest.raises(OSError, match="file ends before byte"):
            reader.read_into(10_000, memoryview(bytearray(_NBYTES - 10_000)))


def test_a_name_that_is_another_file_by_now_is_read_as_it_was_opened(path: Path) -> None:
    plain = LOCAL.open(path)
    path.unlink()
    path.write_bytes(b"other")
    assert isinstance(plain, PlainReader)
    with FrugalReader.over(plain, Access(True)) as reader:
        assert reader is plain


def test_a_file_system_without_direct_reads_is_read_plainly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def reject(name: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT", str(name))
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", reject)
    with LOCAL.open(path, access=Access(True)) as reader:
        assert isinstance(reader, PlainReader)
        part = bytearray(_NBYTES)
        reader.read_into(0, memoryview(part))
    assert part == path.read_bytes()


def tensors() -> dict[str, torch.Tensor]:
    """Sizes around windows, chunks and batches of small tensors."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 3, 5000, 16_384, 16_385, 40_001, 7, 60_000, 2)
    return {f"w{n}": torch.rand(size, generator=generator) for n, size in enumerate(sizes)}


@pytest.mark.parametrize("verify", [True, False, "first"])
@pytest.mark.parametrize("part", [False, True])
def test_a_load_past_the_cache_is_bit_equal_and_reads_the_wanted_bytes_only(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, verify: bool | str, part: bool
) -> None:
    monkeypatch.setattr(run_reads, "_THREAD_NBYTES", 1 << 18)
    expected = tensors()
    folder = save(tmp_path, "a", tensors=expected)
    for file in folder.glob("*.safetensors"):
        machine.evict(file)
    span = {name: (len(each) // 3, len(each) - len(each) // 4) if part else (0, len(each)) for name, each in
            expected.items()}  # fmt: skip
    live = [
        Shard(name, (len(each),), ((0, len(each)),), span[name], torch.zeros(span[name][1] - span[name][0]))
        for name, each in expected.items()
    ]
    machine.direct.clear()
    find(tmp_path).read(live, verify=verify)  # type: ignore[arg-type]
    for shard in live:
        assert shard.tensor.equal(expected[shard.name][slice(*shard.span)]), shard.name
    wanted = sum(shard.tensor.nbytes for shard in live)
    direct = sum(nbytes for _, nbytes in machine.direct)
    if verify == "first":
        assert direct < wanted / 10, "the first pass has filled the cache"
    else:
        assert wanted / 2 < direct < 1.05 * wanted + 2 * 4096 * len(machine.direct)


def test_damage_is_found_before_a_tensor_is_modified(tmp_path: Path, machine: Machine) -> None:
    save(tmp_path, "a", tensors={"a": torch.rand(90_000), "b": torch.rand(90_000)})
    file = tmp_path / "a" / "rank00000.safetensors"
    with open(file, "r+b") as raw:
        raw.seek(-5, os.SEEK_END)
        raw.write(b"\xff")
    machine.evict(file)
    live = {"a": torch.zeros(90_000), "b": torch.zeros(90_000)}
    with pytest.raises(CheckpointCorrupt, match="tensor 'b'"):
        find(tmp_path).read([whole(name, each) for name, each in live.items()], verify="first")
    assert not any(each.any() for each in live.values())


def test_a_checkpoint_that_shrinks_while_it_is_read_is_a_named_error(tmp_path: Path, machine: Machine) -> None:
    save(tmp_path, "a", tensors={"w": torch.rand(90_000)})
    found = find(tmp_path)
    file = tmp_path / "a" / "rank00000.safetensors"
    os.truncate(file, 100_000)
    machine.evict(file)
    with pytest.raises(CheckpointReadError, match=r"rank00000\.safetensors.*file ends before byte"):
        found.read([whole("w", torch.zeros(90_000))])
    assert machine.direct


def test_only_loads_that_share_no_bytes_may_bypass_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Access] = []
    real = FrugalReader.over
    monkeypatch.setattr(FrugalReader, "over", lambda plain, access: opened.append(access) or real(plain, access))
    values = torch.arange(100_000.0)
    save(tmp_path, "a", tensors={"w": values})
    for verify, expected in ((True, [True, True]), (False, [True]), ("first", [])):
        got = torch.zeros(100_000)
        opened.clear()
        found = find(tmp_path)
        found.read([whole("w", got)], verify=verify)  # type: ignore[arg-type]
        assert torch.equal(got, values)
        assert [each.is_once for each in opened] == expected, "the header, where checksums are compared; the tensor"
        assert not opened or opened[-1].spans == ((opened[-1].spans[0][0], opened[-1].spans[0][0] + 400_000),)
    opened.clear()
    find(tmp_path).verify()
    assert opened == []
