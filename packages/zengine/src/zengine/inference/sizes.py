"""Memory that a model needs, from the headers of its files, before a byte of its weights is read.

Matrices are what is quantized; embeddings, norms and biases keep their dtype.  A header does not say which matrix is
an embedding, so names decide, and a model without a head of its own is counted with one: it is tied to the embedding
and quantized separately.  Matrices that a file holds as codes keep their size.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import attrs
import torch

from zprecision.quant import Format, format_name, quantize

__all__ = ["Header", "ModelSizes", "available_bytes", "bits_per_weight", "check_memory"]

_EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b|tok_embeddings|token_embd|position_embd", re.IGNORECASE)
_HEAD = re.compile(r"lm_head|embed_out|\bhead\b|^output\.weight$")
_CGROUP = Path("/sys/fs/cgroup")
_SLACK = 1.1  # for what else a process allocates: activations, buffers of products


@attrs.frozen
class Header:
    """One stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes in the file."""
        return self.numel * self.dtype.itemsize


@attrs.frozen(kw_only=True)
class ModelSizes:
    """Elements of a model by what quantization does to them."""

    matrix_numel: int  # of projections; a tied head included
    other_numel: int
    tied_numel: int  # of the tied head: only a quantized one takes memory of its own
    dtype: torch.dtype  # of most elements in the files
    coded_numel: int = 0  # of matrices that the files hold as codes
    coded_nbytes: int = 0

    @classmethod
    def of(cls, headers: Iterable[Header], coded_numel: int = 0, file_nbytes: int = 0) -> ModelSizes:
        """Sort stored tensors of floating point.

        coded_numel: of other matrices, whose codes are the rest of the files' bytes.
        Raises ValueError if there are no weights.
        """
        headers = list(headers)
        floating = [each for each in headers if each.dtype.is_floating_point]
        if not floating and not coded_numel:
            raise ValueError("the files hold no weights of floating point")
        numel = Counter[torch.dtype]()
        for each in floating:
            numel[each.dtype] += each.numel
        matrices = [each for each in floating if len(each.shape) > 1 and not _EMBEDDING.search(each.name)]
        embeddings = [each for each in floating if len(each.shape) > 1 and _EMBEDDING.search(each.name)]
        is_tied = not any(_HEAD.search(each.name) for each in floating)
        tied = max((each.numel for each in embeddings), default=0) if is_tied else 0
        own = sum(each.numel for each in matrices)
        return cls(
            matrix_numel=own + tied,
            other_numel=sum(numel.values()) - own,
            tied_numel=tied,
            dtype=numel.most_common(1)[0][0] if floating else torch.float32,
            coded_numel=coded_numel,
            coded_nbytes=max(file_nbytes - sum(each.nbytes for each in headers), 0) if coded_numel else 0,
        )

    @property
    def numel(self) -> int:
        """Return the parameters of the model."""
        return self.matrix_numel - self.tied_numel + self.other_numel + self.coded_numel

    def nbytes(self, dtype: torch.dtype, format: Format | None = None) -> int:
        """Return the bytes of the loaded weights; format: of the matrices, None keeps them in `dtype`."""
        if format is None:
            return (self.numel - self.coded_numel) * dtype.itemsize + self.coded_nbytes
        codes = int(self.matrix_numel * bits_per_weight(format) / 8) + self.coded_nbytes
        return codes + self.other_numel * dtype.itemsize


def bits_per_weight(format: Format) -> float:
    """Return the bits of a weight in long rows, scales included."""
    probe = quantize(torch.zeros(1, 4096), format)
    return 8 * probe.nbytes / 4096


def available_bytes() -> int:
    """Return the memory that this process may still allocate: of the machine, and of its control group.

    Pages of files that were read count as available: the kernel gives them up first.
    """
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(limit - used + _cached_bytes(), 0))


def _cached_bytes() -> int:
    """Return the bytes of the control group's pages that are copies of files."""
    try:
        rows = (line.split() for line in (_CGROUP / "memory.stat").read_text("ascii").splitlines())
    except OSError:
        return 0
    return sum(int(row[1]) for row in rows if row and row[0] in ("inactive_file", "active_file"))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def check_memory(
    needed_bytes: int, room_bytes: int, what: str, sizes: ModelSizes, dtype: torch.dtype, formats: Iterable[Format]
) -> None:
    """Raise ValueError if weights do not fit, naming the formats of `formats` that would.

    what: the model and how it was to be loaded.
    """
    if needed_bytes * _SLACK <= room_bytes:
        return
    others = {format_name(each): sizes.nbytes(dtype, each) for each in formats}
    fitting = [f"--quant {name} needs {gigabytes(n)}" for name, n in others.items() if n * _SLACK <= room_bytes]
    smallest = f"even {min(others, key=others.__getitem__)} needs {gigabytes(min(others.values()))}" if others else ""
    advice = "; ".join(fitting) or f"{smallest}: use a smaller model or a machine with more memory".removeprefix(": ")
    raise ValueError(
        f"{what} needs {gigabytes(needed_bytes)}, and {gigabytes(room_bytes)} of memory are available; {advice}"
    )


def gigabytes(nbytes: float) -> str:
    """Format bytes: "0.62 GB", "12 GB"."""
    number = nbytes / 1e9
    return f"{number:.3g} GB" if number >= 0.01 else f"{nbytes / 1e6:.2g} MB"
