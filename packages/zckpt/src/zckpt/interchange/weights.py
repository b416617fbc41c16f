"""Weights in other formats: a `.safetensors` file, a `.pt` file, or a Hugging Face folder (single file or indexed).

    with zckpt.interchange.read_weights("bert-base") as weights:
        zpartition.load_slices(partition, weights)         # each rank reads only the rows of its part

Files are mapped, so a slice reads only its own bytes.  `.pt` files have checksums (safetensors have none); they are
compared when a file is opened, so no value comes from a damaged file.  `.pt` files are read by unpickler.py and run
no code; an index may name only files of its own folder.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

import attrs
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zckpt.containers.torch_file import open_torch_file
from zckpt.errors import CheckpointCorrupt, CheckpointInputError, CheckpointNotFound, CheckpointReadError
from zckpt.format import canonical
from zckpt.format.canonical import JSON
from zckpt.format.shard import Shard, whole
from zckpt.interchange.engine_state import MODEL, NO_RANK_STATE, TIED, engine_objects
from zckpt.saving.save import save
from zckpt.storage.storage import LOCAL, read_all

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEXED = tuple(f"{name}.index.json" for name in _SINGLE)
_MAX_INDEX_NBYTES = 1 << 27
_NESTED = ("state_dict", "model_state_dict", "model", "module")  # keys under which trainers save the weights


@final
@attrs.frozen(eq=False)
class Slice:
    """One tensor in a file: `get_shape()`, `get_dtype()`, and rows by `[start:stop]`."""

    view: Tensor  # mapped; its pages are read on access

    def get_shape(self) -> list[int]:
        return list(self.view.shape)

    def get_dtype(self) -> str:
        return str(self.view.dtype).removeprefix("torch.")

    def __getitem__(self, rows: Any) -> Tensor:
        return self.view[rows]


@final
@attrs.frozen(eq=False)
class Weights(Mapping[str, Slice]):
    """Tensors by name, in the order of the files; valid until `close`."""

    path: Path
    tensors: dict[str, Callable[[], Tensor]]
    closing: contextlib.ExitStack
    checks: tuple[Callable[[], None], ...] = ()
    declared_ties: dict[str, str] = attrs.field(factory=dict)  # of safetensors headers: alias -> stored name

    def __getitem__(self, name: str) -> Slice:
        return Slice(self.tensors[name]())

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def shards(self, prefix: str = "") -> Iterator[Shard]:
        """Yield every tensor as a whole shard, a view of the file; aliases of tied weights are left out."""
        tied = self.tied()
        for name in self:
            if name not in tied:
                yield whole(prefix + name, self[name].view.contiguous())

    def tied(self) -> dict[str, str]:
        """Alias of a tied weight -> its first name."""
        found = dict(self.declared_ties)
        seen: dict[tuple[Any, ...], str] = {}
        for name in self:
            view = self[name].view
            where = (view.data_ptr(), view.shape, view.stride(), view.dtype)
            if name not in found and view.numel() and (first := seen.setdefault(where, name)) != name:
                found[name] = first
        return found

    def verify(self) -> None:
        """Compare the checksums again, as when opening; raises CheckpointCorrupt."""
        for check in self.checks:
            check()

    def close(self) -> None:
        self.closing.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Open a file of weights or a Hugging Face folder, and compare the checksums that its files have.

    Raises CheckpointNotFound, CheckpointCorrupt (damaged, or names code that is not allowed), CheckpointInputError
    (holds no weights).
    """
    path = Path(path)
    files, index = _files(path)
    tensors: dict[str, Callable[[], Tensor]] = {}
    metadata: dict[str, str] = {}
    checks: list[Callable[[], None]] = []
    with contextlib.ExitStack() as stack:
        for file in files:
            mine = _open_torch(file, stack, checks) if _is_torch(file) else _open_safetensors(file, stack, metadata)
            if twice := sorted(set(mine) & set(tensors)):
                raise CheckpointCorrupt(f"{path}: two of its files hold {twice[0]!r}", path=str(path))
            if strays := [name for name in sorted(mine) if index.get(name, file.name) != file.name]:
                raise CheckpointCorrupt(
                    f"{path}: {strays[0]!r} is in {file.name}, its index says {index[strays[0]]}: files of different "
                    "exports",
                    path=str(path),
                )
            tensors.update(mine)
        _compare_index(path, index, tensors)
        ties = {alias: name for alias, name in metadata.items() if name in tensors and name not in metadata}
        return Weights(path, tensors, stack.pop_all(), tuple(checks), ties)


def import_weights(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    tag: str = "imported",
    step: int = 0,
    prefix: str = MODEL,
) -> Path:
    """Save weights of another format into `root`, without optimizer state; return the checkpoint's folder.

    path: as for `read_weights`.  prefix: prepended to every name; an engine loads the default
    (`load_checkpoint(..., load_module_only=True)`).  Raises the errors of `read_weights` and `zckpt.save`.
    """
    with read_weights(path) as weights:
        index: dict[str, JSON] = {TIED: dict(weights.tied())} if prefix == MODEL else {}
        objects = engine_objects(index, {"from": "weights", "path": weights.path.name})
        shards = list(weights.shards(prefix))
        return save(root, tag, shards=shards, objects=objects, rank_objects=NO_RANK_STATE, step=step)


_SUPPORTED = "weights are a .safetensors, .pt, .pth, .ckpt or .bin file, or a folder"


def _is_torch(file: Path) -> bool:
    return file.suffix in (".pt", ".bin", ".pth", ".ckpt")


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to read, and the index (tensor name -> file name)."""
    if path.is_file():
        if path.suffix != ".safetensors" and not _is_torch(path):
            raise CheckpointInputError(f"{path}: {_SUPPORTED}")
        return [path], {}
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} does not exist; {_SUPPORTED}", path=str(path))
    for name in _INDEXED:
        if (path / name).exists():
            index = _index(path / name)
            files = [path / file for file in dict.fromkeys(index.values())]
            if missing := [file.name for file in files if not file.is_file()]:
                raise CheckpointCorrupt(
                    f"{path / name} names {len(missing)} files that do not exist: {', '.join(missing[:5])}",
                    path=str(path / name),
                )
            return files, index
    for name in _SINGLE:
        if (path / name).exists():
            return [path / name], {}
    raise CheckpointNotFound(f"{path} has none of {', '.join((*_INDEXED, *_SINGLE))}", path=str(path))


def _index(path: Path) -> dict[str, str]:
    """Tensor name -> name of a file in the same folder."""
    try:
        index = canonical.load(read_all(LOCAL, path, _MAX_INDEX_NBYTES))
        table = index["weight_map"]
        entries = {str(name): file for name, file in table.items()}
    except OSError as error:
        raise CheckpointReadError(f"{path}: {error.strerror or error}", path=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path} is not an index of weights: {error}", path=str(path)) from None
    for name, file in entries.items():
        if (
            not isinstance(file, str)
            or not file
            or file != os.path.basename(file)
            or file.startswith(".")
            or "\\" in file
            or not file.isprintable()
        ):
            raise CheckpointCorrupt(
                f"{path} says that {name[:80]!r} is in {str(file)[:80]!r}, which is not the plain name of a file "
                "beside it",
                path=str(path),
            )
    return entries


def _compare_index(path: Path, index: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
    missing, extra = sorted(set(index) - set(tensors)), sorted(set(tensors) - set(index)) if index else []
    if missing or extra:
        raise CheckpointCorrupt(
            f"{path}: its index and its files differ: {len(missing)} names only in the index "
            f"({', '.join(missing[:5])}), {len(extra)} only in the files ({', '.join(extra[:5])})",
            path=str(path),
        )


def _open_safetensors(
    file: Path, stack: contextlib.ExitStack, metadata: dict[str, str]
) -> dict[str, Callable[[], Tensor]]:
    """metadata: receives the header's metadata, where safetensors.torch.save_model lists aliases of tied weights."""
    try:
        opened: Any = stack.enter_context(safe_open(file, framework="pt"))
        metadata.update(opened.metadata() or {})
        return {name: functools.partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, ValueError) as error:
        raise CheckpointCorrupt(f"{file} is not a valid safetensors file: {error}", path=str(file)) from None
    except OSError as error:
        raise CheckpointReadError(f"{file}: {error}", path=str(file)) from error


def _open_torch(
    file: Path, stack: contextlib.ExitStack, checks: list[Callable[[], None]]
) -> dict[str, Callable[[], Tensor]]:
    opened = stack.enter_context(open_torch_file(file))
    opened.verify()
    checks.append(opened.verify)
    value = opened.value
    for key in _NESTED:
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    found = (
        {str(name): each for name, each in value.items() if isinstance(each, Tensor)}
        if isinstance(value, dict)
        else {}
    )
    if not found:
        raise CheckpointInputError(f"{file} holds no state_dict (a dict of tensors by name)", path=str(file))
    return {name: functools.partial(_identity, each) for name, each in found.items()}


def _identity(tensor: Tensor) -> Tensor:
    return tensor
