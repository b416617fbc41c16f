"""The one place that touches the compiled extension of the shared-memory transport.

It is loaded when a group of several CPU ranks is first used, never at import.  Without it (no compiler at
installation, not Linux) `reason_without` says why, and the groups use Gloo.  A checkout knows when the extension is
older than its sources and does not use it: C structs and Python must agree.  An installed wheel is never questioned.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Library", "library", "reason_without"]

PACKAGE = Path(__file__).resolve().parent.parent


@attrs.frozen(eq=False)
class Library:
    """The loaded extension: what csrc/zs_api.h declares."""

    ffi: Any
    lib: Any

    def level(self) -> str:
        """The instruction set in use."""
        return str(self.ffi.string(self.lib.zs_level_name()).decode())


def library() -> Library:
    """The extension.  Raises ImportError saying why there is none to use."""
    found = _load()
    if isinstance(found, str):
        raise ImportError(found)
    return found


def reason_without() -> str:
    """Why there is no extension to use; "" where there is one."""
    found = _load()
    return found if isinstance(found, str) else ""


@functools.cache
def _load() -> Library | str:
    if not sys.platform.startswith("linux"):
        return f"it works on Linux, and this is {sys.platform}"
    try:
        module = importlib.import_module("zcomm._shared")
    except ImportError as error:
        if error.name != "zcomm._shared":
            return f"the extension zcomm._shared does not load ({error})"
        remedy = "run python3 tools/dev.py build" if _checkout() else "reinstall zcomm with a C compiler at hand"
        return f"the extension zcomm._shared is not built ({remedy})"
    built_from, folder = module.ffi.string(module.lib.zs_source_hash()).decode(), _checkout()
    if folder is not None and built_from != _source_hash(folder):
        return f"the extension zcomm._shared is older than its sources in {folder} (run python3 tools/dev.py build)"
    return Library(module.ffi, module.lib)


def _checkout() -> Path | None:
    """The folder with the sources that the extension is built from, when this is no installed wheel."""
    folder = PACKAGE.parent.parent
    is_checkout = (folder / "hatch_build.py").is_file() and (folder / "pyproject.toml").is_file()
    return folder if is_checkout else None


def _source_hash(folder: Path) -> str:
    """As hatch_build.py computes it."""
    total = hashlib.sha256()
    for path in [folder / "hatch_build.py", *sorted((PACKAGE / "csrc").glob("*.[ch]"))]:
        text = path.read_bytes()
        total.update(f"{path.name} {len(text)}\n".encode() + text)
    return total.hexdigest()[:16]
