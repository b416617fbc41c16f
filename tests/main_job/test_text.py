"""The corpus, and the byte tables, which are the baselines."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from train.text import (
    SEPARATOR,
    Corpus,
    CorpusError,
    Windows,
    bigram,
    bits_per_byte,
    is_validation,
    python_sources,
    read_corpus,
    unigram,
)


@pytest.fixture
def library(tmp_path):
    """A small fake standard library: 60 modules, and files that must be excluded."""
    rng = random.Random(0)
    for i in range(60):
        folder = tmp_path / ("package" if i % 3 else ".")
        folder.mkdir(exist_ok=True)
        (folder / f"module_{i}.py").write_bytes(bytes(rng.choices(b"abc \n", k=200)))
    for left_out in ("test/test_a.py", "package/tests/test_b.py", "site-packages/other.py", "lib2to3/c.py"):
        (tmp_path / left_out).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left_out).write_text("left out")
    (tmp_path / "notes.txt").write_text("not Python")
    return tmp_path


def read(library) -> Corpus:
    return read_corpus(library, minimum_bytes=1000)


def test_every_file_is_in_exactly_one_split(library):
    corpus = read(library)
    both = [*corpus.train_files, *corpus.validation_files]
    assert sorted(both) == python_sources(library)
    assert len(set(both)) == 60
    assert corpus.validation_files
    assert all(map(is_validation, corpus.validation_files))
    assert not any(map(is_validation, corpus.train_files))


def test_the_splits_are_the_bytes_of_their_files(library):
    corpus = read(library)
    for half, names in ((corpus.train, corpus.train_files), (corpus.validation, corpus.validation_files)):
        assert bytes(half.tolist()).split(SEPARATOR) == [(library / name).read_bytes() for name in names]


def test_adding_a_file_moves_no_other_file_to_another_split(library):
    before = read(library)
    (library / "a_new_module.py").write_text("x = 1\n")
    after = read(library)
    assert set(before.train_files) <= set(after.train_files)
    assert set(before.validation_files) <= set(after.validation_files)


def test_the_fingerprint_sees_every_byte_and_every_name(library):
    first = read(library)
    assert read(library).fingerprint == first.fingerprint
    some = library / first.train_files[0]
    content = some.read_bytes()
    some.write_bytes(content[:-1] + b"z")
    changed = read(library).fingerprint
    some.write_bytes(content)
    some.rename(some.with_name("renamed.py"))
    renamed = read(library).fingerprint
    assert len({first.fingerprint, changed, renamed}) == 3
    first.check_same_as(first.fingerprint)
    with pytest.raises(CorpusError, match=rf"{changed}.*{first.fingerprint}.*start a new run"):
        first.check_same_as(changed)


def test_a_stripped_library_is_rejected_with_its_size_and_place(tmp_path):
    (tmp_path / "lonely.py").write_text("pass\n")
    with pytest.raises(CorpusError, match=rf"{tmp_path} are 5 bytes in 1 files; at least 1,000,000"):
        read_corpus(tmp_path)


def test_this_python_has_a_text_in_two_splits():
    corpus = read_corpus()
    share = corpus.validation.numel() / corpus.train.numel()
    assert corpus.train.numel() > 1_000_000
    assert 0.01 < share < 0.2


def test_windows_predict_every_byte_once_and_overlap_by_one():
    data = torch.arange(23, dtype=torch.uint8)
    windows = Windows(data, 5)
    assert len(windows) == 4
    guessed = torch.cat([windows[i][1:] for i in range(len(windows))])
    assert torch.equal(guessed, data[1:21])
    assert all(len(windows[i]) == 6 for i in range(len(windows)))
    with pytest.raises(IndexError, match="window 4 of 4"):
        windows[4]
    assert torch.equal(windows.stacked(2), torch.stack([windows[0], windows[2]]))
    assert windows.stacked(100).shape == (4, 6)


def test_a_text_shorter_than_a_window_is_rejected():
    with pytest.raises(ValueError, match="5 bytes has no window of context 5"):
        Windows(torch.zeros(5, dtype=torch.uint8), 5)


def test_byte_tables_equal_a_count_by_hand():
    train, held_out = b"abracadabra abracadabra", b"abrakadabra"
    k = 0.1
    singles, pairs = Counter(train), Counter(itertools.pairwise(train))
    firsts = Counter(train[:-1])
    guesses = list(itertools.pairwise(held_out))
    one = -sum(math.log2((singles[b] + k) / (len(train) + 256 * k)) for _, b in guesses) / len(guesses)
    two = -sum(math.log2((pairs[a, b] + k) / (firsts[a] + 256 * k)) for a, b in guesses) / len(guesses)

    data, windows = (torch.tensor(list(text), dtype=torch.uint8) for text in (train, held_out))
    assert bits_per_byte(unigram(data), windows[None]) == pytest.approx(one, rel=1e-12)
    assert bits_per_byte(bigram(data), windows[None]) == pytest.approx(two, rel=1e-12)


def test_tables_are_distributions_for_every_context():
    data = torch.randint(0, 200, (5000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for table in (unigram(data), bigram(data)):
        torch.testing.assert_close(table.exp2().sum(dim=1), torch.ones(256, dtype=torch.float64))
