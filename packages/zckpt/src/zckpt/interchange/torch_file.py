"""Files of torch.save, read without unpickling: zip archive, restricted unpickler, and table of globals."""

from __future__ import annotations

import reprlib
from pathlib import Path
from types import TracebackType
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zckpt.errors import CheckpointCorrupt
from zckpt.interchange.allowed_globals import find_global
from zckpt.interchange.unpickler import MAX_NBYTES, DataUnpickler
from zckpt.interchange.zipmap import ZipMap

_PICKLE, _BYTE_ORDER = "data.pkl", "byteorder"


@final
@attrs.frozen(eq=False)
class TorchFile:
    """An open `.pt`; `value` is what was saved, its tensors views of the file."""

    archive: ZipMap
    value: Any

    def verify(self) -> None:
        """Compare the checksum of every member; CheckpointCorrupt."""
        self.archive.verify()

    def close(self) -> None:
        self.archive.close()

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_torch_file(path: Path) -> TorchFile:
    """Read the structure; the tensors' bytes come when they are looked at.

    CheckpointCorrupt names what is wrong or not admitted, and the file; CheckpointReadError if it cannot be read.
    """
    archive = ZipMap.open(path)
    try:
        if _BYTE_ORDER in archive.members and archive.data(_BYTE_ORDER, 16).strip() != b"little":
            raise CheckpointCorrupt("it was written by a big-endian machine, which is not supported")
        unpickler = DataUnpickler(find_global, lambda reference: _storage(archive, reference))
        return TorchFile(archive, unpickler.run(archive.data(_PICKLE, MAX_NBYTES)))
    except CheckpointCorrupt as error:
        archive.close()
        text = str(error)
        raise CheckpointCorrupt(text if text.startswith(str(path)) else f"{path}: {text}", path=str(path)) from None


def _storage(archive: ZipMap, reference: Any) -> Tensor:
    """("storage", dtype, key, device, number of elements) -> a flat view of the member data/<key>."""
    if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
        raise CheckpointCorrupt(f"it refers to something that is no storage: {reprlib.repr(reference)}")
    _, dtype, key, _, numel = reference
    if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or type(numel) is not int:
        raise CheckpointCorrupt("it describes a storage that makes no sense")
    return archive.tensor(f"data/{key}", dtype, numel)
