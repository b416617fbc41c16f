"""`deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset`: Megatron's indexed datasets, read and written.

A dataset is a pair `<path>.idx`, `<path>.bin`; entry i is a one-dimensional array of numbers.  There are two formats.

"mmap": the .idx holds MMIDIDX and two zero bytes, the version (u64), the dtype (u8), the number of entries and of
document bounds (u64 each), the length of each entry (i32), its byte offset in the .bin (i64), and the bounds (i64).

"lazy" and "cached", which is older: the .idx holds TNTIDX and two zero bytes, the version, dtype, item size, number
of entries, of sizes and of document bounds (u64 each), where each entry's sizes begin (i64), where its numbers begin
in the .bin (i64), the sizes (i64), and the bounds (i64).

The codes of dtypes are DeepSpeed's (0.19); older releases and Megatron-LM use 6 to 10 in another way, which is
recognized by the size of the .bin.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

__all__ = [
    "IndexedCachedDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "code",
    "create_doc_idx",
    "data_file_path",
    "dataset_exists",
    "dtypes",
    "get_available_dataset_impl",
    "index_file_path",
    "infer_dataset_impl",
    "make_builder",
    "make_dataset",
    "valid_dtypes",
]

# Code in files -> types of numpy and torch.
dtypes: dict[int, tuple[Any, Any]] = {
    1: (np.uint8, torch.uint8),
    2: (np.int8, torch.int8),
    3: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    5: (np.int64, torch.int64),
    6: (np.uint16, None),
    7: (np.uint32, None),
    8: (np.uint64, None),
}
valid_dtypes = {kind for pair in dtypes.values() for kind in pair if kind is not None}
_OLDER = {6: np.float64, 7: np.float64, 8: np.uint16, 9: np.uint32, 10: np.uint64}

_MMAP_MAGIC, _OLD_MAGIC = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"


def code(dtype: Any) -> int:
    """Return the code of a numpy or torch dtype.  Raises ValueError for one that files cannot hold."""
    for number, kinds in dtypes.items():
        if dtype in kinds or (isinstance(dtype, np.dtype) and dtype.type is kinds[0]):
            return number
    raise ValueError(f"{dtype} cannot be stored in an indexed dataset. Supported types: {valid_dtypes}")


def index_file_path(prefix_path: str) -> str:
    """Return the path of the .idx."""
    return f"{prefix_path}.idx"


def data_file_path(prefix_path: str) -> str:
    """Return the path of the .bin."""
    return f"{prefix_path}.bin"


def create_doc_idx(sizes: Sequence[int]) -> list[int]:
    """Return the bounds of documents that are separated by empty entries."""
    return [0, *(place + 1 for place, size in enumerate(sizes) if size == 0)]


def get_available_dataset_impl() -> list[str]:
    """Return the names of the formats."""
    return ["lazy", "cached", "mmap"]


def infer_dataset_impl(path: str) -> str | None:
    """Return "mmap" or "cached" by the file's first bytes; None if there is no dataset of either format."""
    if not _exists(path):
        return None
    with Path(index_file_path(path)).open("rb") as file:
        magic = file.read(8)
    return {_OLD_MAGIC: "cached", _MMAP_MAGIC[:8]: "mmap"}.get(magic)


def dataset_exists(path: str, impl: str) -> bool:
    """Return True if both files of `path` exist; `impl` does not matter."""
    return _exists(path)


def make_dataset(path: str, impl: str, skip_warmup: bool = False) -> Dataset[Any] | None:
    """Open `path` with `impl`: "lazy", "cached", "mmap" or "infer".  Returns None if it does not exist.

    Raises ValueError for another `impl`.
    """
    if not _exists(path):
        return None
    kinds: dict[str | None, Callable[[str], Dataset[Any]]] = {
        "lazy": IndexedDataset,
        "cached": IndexedCachedDataset,
        "mmap": MMapIndexedDataset,
    }
    chosen = infer_dataset_impl(path) if impl == "infer" else impl
    if chosen not in kinds:
        raise ValueError(f"impl must be one of {', '.join(get_available_dataset_impl())} or infer, got {impl!r}")
    return kinds[chosen](path)


def make_builder(
    out_file: str, impl: str, vocab_size: int | None = None
) -> MMapIndexedDatasetBuilder | IndexedDatasetBuilder:
    """Open a .bin for writing; an mmap dataset of a vocabulary below 65500 holds uint16, any other int32."""
    if impl != "mmap":
        return IndexedDatasetBuilder(out_file)
    is_small = vocab_size is not None and vocab_size < 65500
    return MMapIndexedDatasetBuilder(out_file, dtype=np.uint16 if is_small else np.int32)


def _exists(path: str) -> bool:
    return Path(index_file_path(path)).exists() and Path(data_file_path(path)).exists()


def _check_magic(found: bytes, wanted: bytes, path: str) -> None:
    if found != wanted:
        other = {"MMID": "mmap", "TNTI": "cached"}.get(found[:4].decode("latin-1"))
        hint = f"this is a dataset of impl {other!r}" if other else "this is no indexed dataset"
        raise ValueError(f"{index_file_path(path)} begins with {found!r}, expected {wanted!r}: {hint}.")


def _bounds(place: slice, length: int) -> tuple[int, int]:
    start, stop, step = place.indices(length)
    if step != 1:
        raise ValueError("Slices into indexed_dataset must be contiguous")
    return start, max(start, stop)


class MMapIndexedDataset(Dataset[Any]):
    """Memory-mapped entries, as read-only numpy arrays without a copy; can be sent to the workers of a DataLoader."""

    @final
    class Index:
        """Lengths, byte offsets and document bounds of a .idx."""

        def __init__(self, path: str, skip_warmup: bool = False) -> None:
            """Map the .idx `path`.  Raises ValueError for a file of another format.  skip_warmup: ignored."""
            with Path(path).open("rb") as file:
                _check_magic(file.read(9), _MMAP_MAGIC, path.removesuffix(".idx"))
                version, self.code, self._len, count = struct.unpack("<QBQQ", file.read(25))
                at = file.tell()
            if version != 1:
                raise ValueError(f"{path} has version {version}; only version 1 is known.")
            mapped = np.memmap(path, mode="r")
            self.sizes = np.frombuffer(mapped, np.int32, self._len, at)
            self._pointers = np.frombuffer(mapped, np.int64, self._len, at + 4 * self._len)
            self._doc_idx = np.frombuffer(mapped, np.int64, count, at + 12 * self._len)
            numel = int(self.sizes.sum(dtype=np.int64))
            binary = Path(path.removesuffix(".idx") + ".bin")
            self.dtype = _dtype_of(self.code, binary.stat().st_size if binary.exists() else None, numel, path)

        @property
        def doc_idx(self) -> NDArray[np.int64]:
            """Entries at which documents begin, and the end."""
            return self._doc_idx

        def __getitem__(self, i: int) -> tuple[int, int]:
            """Return (byte offset, length) of an entry."""
            return int(self._pointers[i]), int(self.sizes[i])

        def __len__(self) -> int:
            return int(self._len)

    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        """Map the files of `path` (without suffix).  skip_warmup: ignored, files are not read ahead."""
        super().__init__()
        self._path = str(path)
        self._index = self.Index(index_file_path(self._path))
        is_empty = not int(self._index.sizes.sum(dtype=np.int64))
        self._numbers: Any = b"" if is_empty else np.memmap(data_file_path(self._path), mode="r")

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, state: str) -> None:
        self.__init__(state)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, idx: Any) -> Any:
        """Return an entry, or a list of the entries of a contiguous slice."""
        if isinstance(idx, slice):
            start, stop = _bounds(idx, len(self))
            return [self.get(place) for place in range(start, stop)]
        if not -len(self) <= idx < len(self):
            raise IndexError(f"entry {idx} of a dataset of {len(self)}")
        return self.get(int(idx))

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return `length` numbers of an entry, from `offset` on; without a length, the rest of it."""
        pointer, size = self._index[idx]
        count = size - offset if length is None else length
        at = pointer + offset * np.dtype(self.dtype).itemsize
        return np.frombuffer(self._numbers, self.dtype, count, at if count else 0)

    @property
    def sizes(self) -> NDArray[np.int32]:
        """Lengths of the entries."""
        return self._index.sizes

    def size(self, index: int) -> int:
        """Return the length of an entry."""
        return int(self._index.sizes[index])

    @property
    def doc_idx(self) -> NDArray[np.int64]:
        """Entries at which documents begin, and the end."""
        return self._index.doc_idx

    def get_doc_idx(self) -> NDArray[np.int64]:
        """Return `doc_idx`."""
        return self._index._doc_idx

    def set_doc_idx(self, doc_idx_: NDArray[np.int64]) -> None:
        """Replace the document bounds in memory."""
        self._index._doc_idx = doc_idx_

    @property
    def dtype(self) -> Any:
        """Numpy type of the numbers."""
        return self._index.dtype

    @property
    def supports_prefetch(self) -> bool:
        """False."""
        return False

    @staticmethod
    def exists(path: str) -> bool:
        """Return True if both files exist."""
        return _exists(path)


def _dtype_of(number: int, num_bytes: int | None, numel: int, path: str) -> Any:
    """Return the numpy type of a code; `num_bytes` of the .bin tell DeepSpeed's codes from older ones."""
    known = [kind for kind in (dtypes.get(number, (None,))[0], _OLDER.get(number)) if kind is not None]
    fitting = [kind for kind in known if num_bytes is None or np.dtype(kind).itemsize * numel == num_bytes]
    if not fitting:
        raise ValueError(
            f"{path}: dtype code {number} and {numel} numbers do not match the {num_bytes} bytes of the .bin; the "
            f"codes are { {key: kind[0].__name__ for key, kind in dtypes.items()} }."
        )
    return fitting[0]


class MMapIndexedDatasetBuilder:
    """Writer of the mmap format."""

    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        """Open the .bin `out_file`.  Raises ValueError for a dtype without a code."""
        self._dtype = dtypes[code(dtype)][0]
        self._data_file: BinaryIO = Path(out_file).open("wb")  # noqa: SIM115  closed by finalize
        self._sizes: list[int] = []
        self._doc_idx = [0]

    def add_item(self, tensor: torch.Tensor) -> None:
        """Write one entry."""
        self.add_item_numpy(tensor.numpy())

    def add_items(self, arr_list: Iterable[NDArray[Any]]) -> None:
        """Write several entries."""
        for array in arr_list:
            self.add_item_numpy(array)

    def add_item_numpy(self, np_array: NDArray[Any]) -> None:
        """Write one entry."""
        self._data_file.write(np.asarray(np_array, dtype=self._dtype).tobytes(order="C"))
        self._sizes.append(np_array.size)

    def end_document(self) -> None:
        """Mark the end of a document."""
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file: str) -> None:
        """Append the entries of the dataset `another_file`.  Raises ValueError for another dtype."""
        index = MMapIndexedDataset.Index(index_file_path(another_file))
        if index.dtype != self._dtype:
            raise ValueError(f"{another_file} holds {index.dtype.__name__}, this dataset {self._dtype.__name__}.")
        self._doc_idx.extend((len(self._sizes) + index.doc_idx[1:]).tolist())
        self._sizes.extend(index.sizes.tolist())
        with Path(data_file_path(another_file)).open("rb") as source:
            shutil.copyfileobj(source, self._data_file)

    def finalize(self, index_file: str) -> None:
        """Close the .bin and write the .idx `index_file`."""
        self._data_file.close()
        bytes_each = np.array(self._sizes, dtype=np.int64) * np.dtype(self._dtype).itemsize
        pointers = np.cumsum(bytes_each) - bytes_each
        with Path(index_file).open("wb") as file:
            file.write(_MMAP_MAGIC)
            file.write(struct.pack("<QBQQ", 1, code(self._dtype), len(self._sizes), len(self._doc_idx)))
            file.write(np.array(self._sizes, dtype=np.int32).tobytes())
            file.write(pointers.tobytes())
            file.write(np.array(self._doc_idx, dtype=np.int64).tobytes())


class IndexedDataset(Dataset[Any]):
    """Entries of the older format, each read from the file when it is asked for."""

    def __init__(self, path: str) -> None:
        """Read the index of `path` (without suffix).  Raises ValueError for a file of another format."""
        super().__init__()
        self.path = str(path)
        self.data_file: BinaryIO | None = None
        with Path(index_file_path(self.path)).open("rb") as file:
            _check_magic(file.read(8), _OLD_MAGIC, self.path)
            head = struct.unpack("<QQQQQQ", file.read(48))
            version, number, self.element_size, self._len, self.s, self.doc_count = head
            lengths = (self._len + 1, self._len + 1, self.s, self.doc_count)
            tables = [np.frombuffer(file.read(8 * count), np.int64) for count in lengths]
        if version != 1:
            raise ValueError(f"{index_file_path(self.path)} has version {version}; only version 1 is known.")
        self.dim_offsets, self.data_offsets, self.sizes, self.doc_idx = tables
        kinds = [dtypes.get(number, (None,))[0], _OLDER.get(number)]
        self.dtype = next(kind for kind in kinds if kind and np.dtype(kind).itemsize == self.element_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data_file": None}

    def __del__(self) -> None:
        if getattr(self, "data_file", None) is not None:
            self._file().close()

    def __len__(self) -> int:
        return int(self._len)

    def __getitem__(self, idx: Any) -> Any:
        """Return an entry, or a list of the entries of a contiguous slice."""
        if isinstance(idx, slice):
            start, stop = _bounds(idx, len(self))
            return [self[place] for place in range(start, stop)]
        self.check_index(idx)
        shape = self.sizes[self.dim_offsets[idx] : self.dim_offsets[idx + 1]]
        return self._read(idx).reshape(tuple(shape.tolist()))

    def check_index(self, i: int) -> None:
        """Raise IndexError unless the dataset has an entry `i`."""
        if not 0 <= i < len(self):
            raise IndexError(f"entry {i} of a dataset of {len(self)}")

    def num_tokens(self, index: int) -> int:
        """Return the size of an entry."""
        return int(self.sizes[index])

    size = num_tokens

    @property
    def supports_prefetch(self) -> bool:
        """False: entries are not kept."""
        return False

    @staticmethod
    def exists(path: str) -> bool:
        """Return True if both files exist."""
        return _exists(path)

    def _file(self) -> BinaryIO:
        if self.data_file is None:
            self.data_file = Path(data_file_path(self.path)).open("rb", buffering=0)  # noqa: SIM115
        return self.data_file

    def _read(self, idx: int) -> NDArray[Any]:
        file = self._file()
        file.seek(int(self.data_offsets[idx]) * self.element_size)
        count = int(self.data_offsets[idx + 1] - self.data_offsets[idx])
        return np.frombuffer(bytearray(file.read(count * self.element_size)), self.dtype)


class IndexedCachedDataset(IndexedDataset):
    """The same; `prefetch` reads entries ahead and keeps them, until the next call."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.cache: dict[int, NDArray[Any]] = {}

    @property
    def supports_prefetch(self) -> bool:
        """True."""
        return True

    def prefetch(self, indices: Iterable[int]) -> None:
        """Read these entries and forget the others."""
        wanted = sorted(set(indices))
        if not set(wanted) <= set(self.cache):
            self.cache = {place: super(IndexedCachedDataset, self)._read(place) for place in wanted}
            self._file().close()
            self.data_file = None  # so that the dataset can be pickled

    def _read(self, idx: int) -> NDArray[Any]:
        return self.cache[idx].copy() if idx in self.cache else super()._read(idx)


class IndexedDatasetBuilder:
    """Writer of the older format."""

    def __init__(self, out_file: str, dtype: Any = np.int32) -> None:
        """Open the .bin `out_file`.  Raises ValueError for a dtype without a code."""
        self.dtype = dtypes[code(dtype)][0]
        self.out_file: BinaryIO = Path(out_file).open("wb")  # noqa: SIM115  closed by finalize
        self.element_size = np.dtype(self.dtype).itemsize
        self.data_offsets, self.dim_offsets, self.sizes, self.doc_idx = [0], [0], list[int](), [0]

    def add_item(self, tensor: torch.Tensor) -> None:
        """Write one entry, of any shape."""
        self.out_file.write(np.asarray(tensor.numpy(), dtype=self.dtype).tobytes(order="C"))
        self.data_offsets.append(self.data_offsets[-1] + tensor.numel())
        self.sizes.extend(tensor.size())
        self.dim_offsets.append(self.dim_offsets[-1] + tensor.dim())

    def end_document(self) -> None:
        """Mark the end of a document."""
        self.doc_idx.append(len(self.sizes))

    def merge_file_(self, another_file: str) -> None:
        """Append the entries of the dataset `another_file`.  Raises ValueError for another dtype."""
        index = IndexedDataset(another_file)
        if index.dtype != self.dtype:
            raise ValueError(f"{another_file} holds {index.dtype.__name__}, this dataset {self.dtype.__name__}.")
        self.doc_idx.extend((len(self.sizes) + index.doc_idx[1:]).tolist())
        for mine, theirs in ((self.data_offsets, index.data_offsets), (self.dim_offsets, index.dim_offsets)):
            steps = [end - begin for begin, end in pairwise(theirs.tolist())]
            mine.extend(list(accumulate(steps, initial=mine[-1]))[1:])
        self.sizes.extend(index.sizes.tolist())
        with Path(data_file_path(another_file)).open("rb") as source:
            shutil.copyfileobj(source, self.out_file)

    def finalize(self, index_file: str) -> None:
        """Close the .bin and write the .idx `index_file`."""
        self.out_file.close()
        counts = (len(self.data_offsets) - 1, len(self.sizes), len(self.doc_idx))
        with Path(index_file).open("wb") as file:
            file.write(_OLD_MAGIC + struct.pack("<QQQ", 1, code(self.dtype), self.element_size))
            file.write(struct.pack("<QQQ", *counts))
            for table in (self.dim_offsets, self.data_offsets, self.sizes, self.doc_idx):
                file.write(np.array(table, dtype=np.int64).tobytes())
