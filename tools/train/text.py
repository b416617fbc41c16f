"""Real text that every machine with Python already has: the sources of its standard library.

Problem: a training job that a newcomer can run needs text, and a fresh machine may have no network, no
data set and no tokenizer.  The standard library is about 12 MB of human writing (code, comments and
documentation), lies on every disk, and is read in place: nothing is copied or redistributed.

Design: one byte is one token (256 of them), so a loss divided by ln 2 is *bits per byte*, and a language
model, a table of byte pairs and a compressor can be compared without any conversion.  Files, not windows,
are dealt to the training and validation halves: neighbouring windows of one file share names and idioms, and
a split by window would measure memory.  A file's side depends only on a hash of its path, so it does not
change when other files come or go.

Curves are comparable only for equal text, and the library differs between Python versions; hence the
`fingerprint`, which travels in every checkpoint and report.

Rejected: a trained BPE (shorter sequences, but one more dependency, and a loss nobody can compare by eye);
tests/ of the library (three times the bytes, mostly tables of expected output).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 256  # one token per byte value
SEPARATOR = b"\0"  # between files; no Python source may contain it
MINIMUM_BYTES = 1_000_000  # below this the standard library has been stripped
VALIDATION_SHARE = 20  # one file in so many is held out
LEFT_OUT = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"})


class CorpusError(ValueError):
    """This machine's standard library cannot serve as a text."""


@attrs.frozen(kw_only=True, eq=False)
class Corpus:
    """The text in two halves that share no file."""

    train: Tensor  # (n,) uint8, the training files in path order, separated by a zero byte
    validation: Tensor  # (m,) uint8, the held-out files
    train_files: tuple[str, ...]  # paths below `root`, sorted
    validation_files: tuple[str, ...]
    root: str  # the folder that was read
    fingerprint: str  # 16 hex digits over every path, every byte and the split

    def check_same_as(self, fingerprint: str) -> None:
        """Raise CorpusError unless this is the text with that fingerprint: a run cannot change its text midway."""
        if self.fingerprint != fingerprint:
            raise CorpusError(
                f"this run's text has the fingerprint {fingerprint}, that of {self.root} is {self.fingerprint}: "
                f"another text, so the losses would not continue the curve. Resume with the Python that began the "
                f"run, or start a new run"
            )


def is_validation(relative_path: str) -> bool:
    """Which half a file belongs to: a function of its path alone, the same on every machine."""
    return hashlib.sha256(relative_path.encode()).digest()[0] % VALIDATION_SHARE == 0


def python_sources(root: Path) -> list[str]:
    """Paths of the .py files below root, relative and sorted; tests and installed packages left out."""
    found = []
    for folder, below, files in os.walk(root):
        below[:] = set(below) - LEFT_OUT  # pruned, not filtered: site-packages may hold 100,000 files
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def read_corpus(root: Path | None = None, *, minimum_bytes: int = MINIMUM_BYTES) -> Corpus:
    """Read and split the text below `root` (default: this Python's standard library).

    Raises CorpusError when there is less than `minimum_bytes` of it, or when one half would be empty.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    names = python_sources(root)
    contents = {name: (root / name).read_bytes() for name in names}
    total_bytes = sum(map(len, contents.values()))
    if total_bytes < minimum_bytes:
        raise CorpusError(
            f"the Python sources below {root} are {total_bytes:,} bytes in {len(names)} files; at least "
            f"{minimum_bytes:,} are needed. This Python seems to come without its library's sources (a minimal or "
            f"zipped build): install the full one (Debian: python3 with libpython3-stdlib, or python.org, pyenv, uv)"
        )
    digest = hashlib.sha256(f"1/{VALIDATION_SHARE}".encode())
    for name in names:
        digest.update(f"\0{name}\0{len(contents[name])}\0".encode() + contents[name])
    halves: dict[bool, list[str]] = {False: [], True: []}
    for name in names:
        halves[is_validation(name)].append(name)
    for side, members in halves.items():
        if not members:
            raise CorpusError(f"no file of {root} falls into the {'validation' if side else 'training'} half")

    def joined(members: list[str]) -> Tensor:
        return torch.frombuffer(bytearray(SEPARATOR.join(contents[name] for name in members)), dtype=torch.uint8)

    return Corpus(
        train=joined(halves[False]),
        validation=joined(halves[True]),
        train_files=tuple(halves[False]),
        validation_files=tuple(halves[True]),
        root=str(root),
        fingerprint=digest.hexdigest()[:16],
    )


class Windows(Dataset[Tensor]):
    """Fixed windows over a text: item i is (context + 1,) uint8, the last byte being the next item's first.

    A window holds both sides of the prediction: bytes [:-1] are read, bytes [1:] are to be guessed.  Every byte
    of the text but the first is guessed exactly once per epoch; a tail shorter than a window is dropped.
    """

    def __init__(self, data: Tensor, context: int) -> None:
        if data.numel() <= context:
            raise ValueError(f"a text of {data.numel()} bytes has no window of context {context} plus one byte")
        self.data = data
        self.context = context

    def __len__(self) -> int:
        return (self.data.numel() - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        return self.data[start : start + self.context + 1]

    def stacked(self, at_most: int) -> Tensor:
        """Up to `at_most` windows, evenly spread over the text: (n, context + 1) uint8."""
        count = min(at_most, len(self))
        return torch.stack([self[i * len(self) // count] for i in range(count)])


def unigram(data: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """log2 p(next): (256, 256) float64, every row alike.  Counts of `data` (n,) uint8, plus `smoothing` each."""
    counts = torch.bincount(data.long(), minlength=VOCABULARY).double() + smoothing
    return (counts / counts.sum()).log2().expand(VOCABULARY, VOCABULARY)


def bigram(data: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """log2 p(next | previous): (256, 256) float64, row = previous byte.  A byte never seen predicts evenly."""
    pairs = data[:-1].long() * VOCABULARY + data[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double() + smoothing
    return (counts / counts.sum(dim=1, keepdim=True)).log2()


def bits_per_byte(log2_table: Tensor, windows: Tensor) -> float:
    """What a byte table pays for the same guesses as the model: windows (n, context + 1) uint8."""
    return -log2_table[windows[:, :-1].long(), windows[:, 1:].long()].mean().item()
