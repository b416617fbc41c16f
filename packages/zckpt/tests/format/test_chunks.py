import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from zckpt.format.chunks import BadChunk, ChunkChecks, Hasher, NoChecks, chunk_nbytes, digests, num_chunks


@given(st.integers(0, 1 << 40))
def test_a_chunk_is_a_power_of_two_and_a_small_share_of_its_piece(nbytes: int) -> None:
    chunk = chunk_nbytes(nbytes)
    assert chunk & (chunk - 1) == 0
    assert 4096 <= chunk <= 1 << 20
    assert chunk == 4096 or nbytes // chunk >= 128


def test_digests_are_xxh3_64_of_each_chunk() -> None:
    data = bytes(range(256)) * 10
    made = digests(memoryview(data), 1024)
    assert made == "".join(xxhash.xxh3_64_hexdigest(data[i : i + 1024]) for i in (0, 1024, 2048))
    assert xxhash.xxh3_64_hexdigest(b"") == "2d06800538d394c2"  # the published value
    assert digests(memoryview(b""), 1024) == ""


@given(st.integers(1, 5000), st.data())
def test_bounds_are_whole_chunks_until_they_are_known_to_be_sound(nbytes: int, data) -> None:
    content = memoryview(bytes(nbytes))
    checks = ChunkChecks(nbytes, 1024, digests(content, 1024))
    start = data.draw(st.integers(0, nbytes - 1))
    stop = data.draw(st.integers(start + 1, nbytes))
    low, high = checks.bounds(start, stop)
    assert low <= start < stop <= high
    assert low % 1024 == 0
    assert high % 1024 == 0 or high == nbytes
    assert high - low < stop - start + 2 * 1024
    assert not checks.is_verified(start, stop)
    checks.check(low, content[low:high])
    assert checks.is_verified(start, stop)
    assert checks.bounds(start, stop) == (start, stop)
    checks.check(start, content[start:stop])  # part of chunks that are sound: nothing to compare


def test_a_bad_chunk_is_named_by_its_bytes() -> None:
    content = bytearray(3000)
    checks = ChunkChecks(3000, 1024, digests(memoryview(content), 1024))
    content[2500] ^= 1
    checks.check(0, memoryview(content)[:2048])
    with pytest.raises(BadChunk, match=r"bytes 2,048 to 3,000: checksum is .*, expected ") as caught:
        checks.check(2048, memoryview(content)[2048:])
    assert (caught.value.begin, caught.value.end) == (2048, 3000)
    assert checks.is_verified(0, 2048)
    assert not checks.is_verified(0, 2049)


def test_unchecked_reads_what_is_wanted_and_believes_it() -> None:
    assert NoChecks().bounds(5, 7) == (5, 7)
    assert NoChecks().is_verified(0, 9)
    NoChecks().check(0, memoryview(b"x"))


def test_num_chunks_rounds_up() -> None:
    assert [num_chunks(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("chunk", [1024, 4096, 16384])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 16384, 40_000])
def test_data_in_parts_has_the_same_checksums(chunk: int, nbytes: int) -> None:
    content = memoryview(bytes(i * i % 251 for i in range(nbytes)))
    hasher = Hasher(chunk)
    for start in range(0, nbytes, 4096):
        hasher.update(content[start : start + 4096])
    assert hasher.digests() == digests(content, chunk)
