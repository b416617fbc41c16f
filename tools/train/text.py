"""Training text: the sources of Python's standard library, which every machine with Python has.

Problem: a training job for newcomers needs text, and a fresh machine may have no network, no data set and no
tokenizer.  The standard library is about 12 MB of code, comments and documentation, present on every machine, and is
read in place: nothing is copied or redistributed.

Design: one byte is one token (256 of them), so a loss divided by ln 2 is *bits per byte*, and a language model, a
table of byte pairs and a compressor compare without conversion.  Files, not windows, are split into training and
validation: neighbouring windows of a file share names and idioms, so a split by window would measure memorization.  A
hash of its path decides the split of a file, so it does not change when other files are added or removed.

Curves compare only for equal text, and the library differs between Python versions; hence the `fingerprint`, which
every checkpoint and report contains.

Rejected: a trained BPE (shorter sequences, but one more dependency, and a loss that depends on the tokenizer); tests/
of the library (three times the bytes, mostly tables of expected output).
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
VALIDATION_SHARE = 20  # one file in 20 is held out
EXCLUDED = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"})


class CorpusError(ValueError):
    """Raised when this machine's standard library cannot serve as text."""


@attrs.frozen(kw_only=True, eq=False)
class Corpus:
    """Training and validation text, from disjoint files."""

    train: Tensor  # (n,) uint8, the training files in path order, separated by a zero byte
    validation: Tensor  # (m,) uint8, the held-out files
    train_files: tuple[str, ...]  # paths below `root`, sorted
    validation_files: tuple[str, ...]
    root: str  # the folder that was read
    fingerprint: str  # 16 hex digits over every path, every byte and the split

    def check_same_as(self, fingerprint: str) -> None:
        """Raise CorpusError unless this text has the fingerprint of the run to resume."""
        if self.fingerprint != fingerprint:
            raise CorpusError(
                f"the run was trained on text with fingerprint {fingerprint}, but {self.root} has "
                f"{self.fingerprint}: the loss curve would not continue. Resume with the Python that started the "
                "run, or start a new run"
            )


def is_validation(relative_path: str) -> bool:
    """True if a file is held out; depends on its path only, so it is the same on every machine."""
    return hashlib.sha256(relative_path.encode()).digest()[0] % VALIDATION_SHARE == 0


def python_sources(root: Path) -> list[str]:
    """Return relative, sorted paths of the .py files below root, without tests and installed packages."""
    found = []
    for folder, below, files in os.walk(root):
        below[:] = set(below) - EXCLUDED  # pruned, not filtered: site-packages may hold 100,000 files
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def read_corpus(root: Path | None = None, *, minimum_bytes: int = MINIMUM_BYTES) -> Corpus:
    """Read and split the text below `root` (default: this Python's standard library).

    Raises CorpusError if it has less than `minimum_bytes`, or if a split would be empty.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    names = python_sources(root)
    contents = {name: (root / name).read_bytes() for name in names}
    total_bytes = sum(map(len, contents.values()))
    if total_bytes < minimum_bytes:
        raise CorpusError(
            f"the Python sources below {root} are {total_bytes:,} bytes in {len(names)} files; at least "
            f"{minimum_bytes:,} are needed. This Python seems to lack its library's sources (a minimal or zipped "
            f"build): install a full one (Debian: python3 with libpython3-stdlib, or python.org, pyenv, uv)"
        )
    digest = hashlib.sha256(f"1/{VALIDATION_SHARE}".encode())
    for name in names:
        digest.update(f"\0{name}\0{len(contents[name])}\0".encode() + contents[name])
    splits: dict[bool, list[str]] = {False: [], True: []}
    for name in names:
        splits[is_validation(name)].append(name)
    for is_held_out, members in splits.items():
        if not members:
            raise CorpusError(f"no file of {root} falls into the {'validation' if is_held_out else 'training'} split")

    def joined(members: list[str]) -> Tensor:
        return torch.frombuffer(bytearray(SEPARATOR.join(contents[name] for name in members)), dtype=torch.uint8)

    return Corpus(
        train=joined(splits[False]),
        validation=joined(splits[True]),
        train_files=tuple(splits[False]),
        validation_files=tuple(splits[True]),
        root=str(root),
        fingerprint=digest.hexdigest()[:16],
    )


class Windows(Dataset[Tensor]):
    """Fixed windows over a text: item i is (context + 1,) uint8; its last byte is the first of item i + 1.

    Bytes [:-1] are the inputs, bytes [1:] the targets.  Every byte of the text except the first is a target once per
    epoch; a tail shorter than a window is dropped.
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
        """Return up to `at_most` windows, evenly spaced over the text: (n, context + 1) uint8."""
        count = min(at_most, len(self))
        return torch.stack([self[i * len(self) // count] for i in range(count)])


def printable(text: bytes) -> str:
    """Decode for printing: undecodable bytes and control characters become replacement characters."""
    characters = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters)


def unigram(data: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """Return log2 p(next): (256, 256) float64, equal rows, from counts of `data` (n,) uint8 plus `smoothing`."""
    counts = torch.bincount(data.long(), minlength=VOCABULARY).double() + smoothing
    return (counts / counts.sum()).log2().expand(VOCABULARY, VOCABULARY)


def bigram(data: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """Return log2 p(next | previous): (256, 256) float64, row = previous byte.  Rows of unseen bytes are uniform."""
    pairs = data[:-1].long() * VOCABULARY + data[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double() + smoothing
    return (counts / counts.sum(dim=1, keepdim=True)).log2()


def bits_per_byte(log2_table: Tensor, windows: Tensor) -> float:
    """Return the bits per byte of a byte table on windows (n, context + 1) uint8, the model's own task."""
    return -log2_table[windows[:, :-1].long(), windows[:, 1:].long()].mean().item()
