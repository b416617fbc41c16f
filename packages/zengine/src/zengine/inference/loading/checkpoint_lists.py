"""DeepSpeed's JSON lists of checkpoint files.

    {"type": "ds_model", "checkpoints": ["a.pt", "b.pt"], "version": 1.0, "base_dir": "weights"}

All files together hold the tensors of the model.  With `tp_size` (or `mp_size`) above 1 a tensor may be in as many
files, a part of it or a copy in each, in the order of the ranks (parts.py joins them):

    {"type": "Megatron", "checkpoints": ["mp_rank_00.pt", "mp_rank_01.pt"], "version": 2.0, "tp_size": 2}
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
    num_ranks: int = 1  # files of one tensor, at most
    has_thirds: bool = False  # parts of Megatron's first version, in which queries, keys and values follow each other


def is_checkpoint_list(given: object) -> TypeGuard[Mapping[str, Any] | str | os.PathLike[str]]:
    """Return whether this is a list of files: a mapping, or the path of a .json file."""
    if isinstance(given, Mapping):
        return True
    name = os.fspath(given) if isinstance(given, (str, os.PathLike)) else ""
    return str(name).endswith(".json") and not str(name).endswith(_INDEX)


def read_checkpoint_list(given: Mapping[str, Any] | str | os.PathLike[str], base_dir: str = "") -> CheckpointList:
    """Read a list, a mapping or the path of a JSON file.

    base_dir: of the files, if the list names none; else that of the JSON file or the working directory.

    Raises ValueError for another type, unknown keys, and a tp_size that is none; FileNotFoundError.
    """
    listed, origin, beside = (given, "checkpoint", Path()) if isinstance(given, Mapping) else _read_json(Path(given))
    if unknown := sorted(set(listed) - _KEYS):
        raise ValueError(f"{origin} has unknown keys: {', '.join(map(str, unknown[:5]))}; allowed: {_known()}")
    kind = listed.get("type")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise ValueError(f"{origin} has the type {kind!r}: use 'ds_model', 'BLOOM' or 'Megatron'")
    names = _names(listed.get("checkpoints"), origin)
    ranks, is_megatron = _num_ranks(listed, kind.lower(), names, origin), kind.lower() == "megatron"
    folder = listed.get("base_dir") or listed.get("checkpoint_dir") or base_dir
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"{origin} has the base_dir {folder!r}: pass a path")
    files = tuple(_locate(name, Path(folder) if folder else None, beside) for name in names)
    return CheckpointList(origin, files, ranks, has_thirds=is_megatron and not _version(listed, origin))


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


def _num_ranks(listed: Mapping[str, Any], kind: str, names: list[str], origin: str) -> int:
    """Return the tensor-parallel ranks that the files are of."""
    checkpoints = listed.get("checkpoints")
    split = _names(checkpoints["tp"], origin) if isinstance(checkpoints, Mapping) and checkpoints.get("tp") else names
    is_split = listed.get("parallelization", "pp") == "tp" or split is not names or kind == "megatron"
    given = [listed[key] for key in ("tp_size", "mp_size") if listed.get(key)]
    ranks = given[0] if given else len(split) if is_split else 1
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"{origin} has the tp_size {ranks!r}: it must be a whole number")
    if len(split) % ranks and ranks > 1:
        raise ValueError(
            f"{origin} has the tp_size {ranks} and {len(split)} files: all ranks must have equally many files"
        )
    return ranks


def _version(listed: Mapping[str, Any], origin: str) -> float:
    """Return the version of the layout of Megatron's files: 0, 1 or 2."""
    version = listed.get("version", 0)
    if isinstance(version, bool) or version not in (0, 1, 2):
        raise ValueError(f"{origin} has the version {version!r}: Megatron's files are of version 0, 1 or 2")
    return float(version)


def _locate(name: str, folder: Path | None, beside: Path) -> Path:
    tried = [beside / name, Path(name)] if folder is None else [folder / name]
    for path in tried:
        if path.exists():
            return path
    raise FileNotFoundError(f"{' and '.join(dict.fromkeys(map(str, tried)))}: no such file; pass base_dir")
