"""DeepSpeed's JSON lists of checkpoint files.

    {"type": "ds_model", "checkpoints": ["a.pt", "b.pt"], "version": 1.0, "base_dir": "weights"}

Each file holds whole tensors, and all of them together those of the model.  Lists whose files hold parts of tensors,
for the ranks of tensor parallelism, are rejected: neither list nor files say along which dim a tensor was cut.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard, final

import attrs

__all__ = ["CheckpointList", "is_checkpoint_list", "read_checkpoint_list"]

_TYPES = ("ds_model", "bloom", "megatron")
_KEYS = frozenset(
    (
        *("type", "checkpoints", "version", "base_dir", "checkpoint_dir", "parallelization"),
        *("tp_size", "mp_size", "pp_size", "dtype"),
    )
)
_MOST_BYTES = 1 << 24
_INDEX = ".index.json"  # of Hugging Face: a list of another kind


@final
@attrs.frozen
class CheckpointList:
    """Files that together hold a model."""

    origin: str  # for errors
    files: tuple[Path, ...]


def is_checkpoint_list(given: object) -> TypeGuard[Mapping[str, Any] | str | os.PathLike[str]]:
    """Return whether this is a list of files: a mapping, or the path of a .json file."""
    if isinstance(given, Mapping):
        return True
    name = os.fspath(given) if isinstance(given, (str, os.PathLike)) else ""
    return str(name).endswith(".json") and not str(name).endswith(_INDEX)


def read_checkpoint_list(given: Mapping[str, Any] | str | os.PathLike[str], base_dir: str = "") -> CheckpointList:
    """Read a list, a mapping or the path of a JSON file.

    base_dir: of the files, if the list names none; else that of the JSON file or the working directory.

    Raises ValueError for another type, unknown keys, and files that hold parts of tensors; FileNotFoundError.
    """
    listed, origin, beside = (given, "checkpoint", Path()) if isinstance(given, Mapping) else _read_json(Path(given))
    if unknown := sorted(set(listed) - _KEYS):
        raise ValueError(f"{origin} has unknown keys: {', '.join(map(str, unknown[:5]))}; allowed: {_known()}")
    kind = listed.get("type")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise ValueError(f"{origin} has the type {kind!r}: use 'ds_model', 'BLOOM' or 'Megatron'")
    names = _names(listed.get("checkpoints"), origin)
    _check_whole(listed, kind.lower(), names, origin)
    folder = listed.get("base_dir") or listed.get("checkpoint_dir") or base_dir
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"{origin} has the base_dir {folder!r}: pass a path")
    return CheckpointList(origin, tuple(_locate(name, Path(folder) if folder else None, beside) for name in names))


def _known() -> str:
    return ", ".join(sorted(_KEYS))


def _read_json(path: Path) -> tuple[Mapping[str, Any], str, Path]:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; a list of files has at most {_MOST_BYTES:,}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f'{path} must hold {{"type": ..., "checkpoints": [...]}}, and holds a {type(found).__name__}'
        )
    return found, str(path), path.parent


def _names(value: Any, origin: str) -> list[str]:
    """Return the names of the files."""
    if isinstance(value, Mapping):
        parts = [_names(value[key], origin) if value.get(key) else [] for key in ("non_tp", "tp")]
        return [name for part in parts for name in part]
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{origin} has the checkpoints {str(value)[:80]!r}: it must list names of files")
    return list(names)


def _check_whole(listed: Mapping[str, Any], kind: str, names: list[str], origin: str) -> None:
    """Raise ValueError if the files hold parts of tensors."""
    split = listed.get("parallelization", "pp") == "tp" or isinstance(listed.get("checkpoints"), Mapping)
    ranks = listed.get("tp_size", listed.get("mp_size", len(names) if split or kind == "megatron" else 1))
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 0:
        raise ValueError(f"{origin} has the tp_size {ranks!r}: it must be a whole number")
    if ranks > 1 and (split or kind == "megatron"):
        raise ValueError(
            f"{origin} lists the parts of {ranks} tensor-parallel ranks, without saying how tensors were cut: pass "
            "whole weights, such as the model's Hugging Face folder; every rank reads its own part of them"
        )


def _locate(name: str, folder: Path | None, beside: Path) -> Path:
    tried = [beside / name, Path(name)] if folder is None else [folder / name]
    for path in tried:
        if path.exists():
            return path
    raise FileNotFoundError(f"{' and '.join(dict.fromkeys(map(str, tried)))}: no such file; pass base_dir")
