"""Native extension: its loader, and the numbers that Python, C and the ranks share.

Operations, dtypes and reductions travel as numbers in the order of the enumerations in `csrc/zs_api.h`, and the ranks
compare them.  A dtype with a number can be moved; the first `NUM_REDUCIBLE` can be reduced.

The extension is loaded on the first use of a group of several CPU ranks, never at import; no other module touches it.
Without it (no compiler at installation, not Linux) `unavailable_reason` gives the reason, and groups use Gloo.  A
checkout rejects an extension older than its sources, because C structs and Python must match.  An installed wheel is
not checked.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import attrs
import torch

from zcomm.shared.sources import source_hash

__all__ = ["Library", "library", "unavailable_reason"]

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "all_to_all_v", "barrier")
REDUCTIONS = ("sum", "max", "min")
NUM_REDUCIBLE = 9
_DTYPE_NAMES = (
    *("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "int8", "bool"),
    *("int16", "uint16", "uint32", "uint64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
# An old torch lacks the last ones; the numbers of the others stay.
DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}


def dtype_name(code: int) -> str:
    """Name of a dtype by its number; "nothing" for -1, a barrier's."""
    return _DTYPE_NAMES[code] if code >= 0 else "nothing"


def is_supported(dtype: torch.dtype, *, reduced: bool) -> bool:
    """True if tensors of `dtype` can be moved, or reduced, through shared memory."""
    code = DTYPES.get(dtype)
    return code is not None and (code < NUM_REDUCIBLE or not reduced)


PACKAGE = Path(__file__).resolve().parent.parent


@attrs.frozen(eq=False)
class Library:
    """The loaded extension; csrc/zs_api.h declares its functions."""

    ffi: Any
    lib: Any

    def level(self) -> str:
        """Name of the instruction set in use."""
        return str(self.ffi.string(self.lib.zs_level_name()).decode())


def library() -> Library:
    """Return the extension.  Raises ImportError with the reason if it is unavailable."""
    found = _load()
    if isinstance(found, str):
        raise ImportError(found)
    return found


def unavailable_reason() -> str:
    """Reason for which the extension is unavailable; "" if it is available."""
    found = _load()
    return found if isinstance(found, str) else ""


@functools.cache
def _load() -> Library | str:
    if not sys.platform.startswith("linux"):
        return f"it requires Linux, and this is {sys.platform}"
    try:
        module = importlib.import_module("zcomm._shared")
    except ImportError as error:
        if error.name != "zcomm._shared":
            return f"the extension zcomm._shared does not load ({error})"
        reinstall = "reinstall zcomm-torch with a C compiler on PATH"
        remedy = "run python3 tools/dev.py build" if _checkout() else reinstall
        return f"the extension zcomm._shared is not built ({remedy})"
    built_from, folder = module.ffi.string(module.lib.zs_source_hash()).decode(), _checkout()
    if folder is not None and built_from != source_hash(folder):
        return f"the extension zcomm._shared is older than its sources in {folder} (run python3 tools/dev.py build)"
    return Library(module.ffi, module.lib)


def _checkout() -> Path | None:
    """Folder of the extension's sources in a checkout; None in an installed wheel."""
    folder = PACKAGE.parent.parent
    is_checkout = (folder / "hatch_build.py").is_file() and (folder / "pyproject.toml").is_file()
    return folder if is_checkout else None
