"""The files of a DeepSpeed checkpoint: found by name, opened and checked.

Each tensor-parallel rank has model states, and the optimizer shards of its data-parallel ranks.  No value is used
before the content of a file matches its name.  Unsupported features (experts, pipelines) raise instead of being
skipped.
"""

from __future__ import annotations

import contextlib
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import attrs
from torch import Tensor

from zckpt.errors import CheckpointCorrupt, CheckpointInputError, CheckpointNotFound
from zckpt.interchange.deepspeed_flat import Shapes
from zckpt.interchange.torch_file import TorchFile, open_torch_file
from zckpt.interchange.unpickler import Record

_MODEL = re.compile(r"mp_rank_(?P<tp>\d{2,6})_model_states\.pt")
_MODEL_PART = re.compile(r"zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<tp>\d{2,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<tp>\d{2,6})_optim_states\.pt")
_UNKNOWN = re.compile(r"(layer_|expp_rank_|zero$).*")
_MAX_LATEST_NBYTES = 4096
_STATE = "optimizer_state_dict"


@final
@attrs.frozen(eq=False)
class TensorParallelRank:
    """Saved state of one tensor-parallel rank; the values are as `open_torch_file` returns them."""

    models: tuple[dict[str, Any], ...]  # one; at stage 3 one per data-parallel rank
    shards: tuple[dict[str, Any], ...]  # `optimizer_state_dict` of each data-parallel rank; () without ZeRO

    @property
    def model(self) -> dict[str, Any]:
        return self.models[0]

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 if the optimizer's state is in the model states, or absent."""
        if not self.shards:
            return 0
        saved = self.shards[0].get("zero_stage", 1)  # BF16_Optimizer, a stage 1, does not save it
        value = saved.args[0] if isinstance(saved, Record) and saved.args else saved
        if value not in (1, 2, 3):
            raise CheckpointCorrupt(f"zero_stage must be 1, 2 or 3, is {reprlib.repr(value)}")
        return int(value)

    def groups(self) -> list[Shapes]:
        """Optimized parameters of each group, in the order of the flat buffers."""
        groups = self.model.get("param_shapes")
        if isinstance(groups, dict):  # releases before 0.4
            groups = [groups]
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointCorrupt("its model states have no param_shapes, which the flat buffers need")
        return [{str(name): shape_of(shape, name) for name, shape in group.items()} for group in groups]


@final
@attrs.frozen(eq=False)
class DeepSpeedFiles:
    """All files of one checkpoint, open."""

    folder: Path
    tag: str
    tp_ranks: tuple[TensorParallelRank, ...]
    opened: tuple[TorchFile, ...]

    def verify(self) -> None:
        for each in self.opened:
            each.verify()

    def close(self) -> None:
        for each in self.opened:
            each.close()


def choose_folder(path: Path, tag: str | None) -> Path:
    """The folder of one checkpoint: `path` itself if it has model states, else the one of `tag` or `latest`."""
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is not a folder", path=str(path))
    if tag is None and any(
        _MODEL.fullmatch(each.name) or _MODEL_PART.fullmatch(each.name) for each in path.iterdir()
    ):
        return path
    if tag is None:
        tag = _latest(path)
    if "/" in tag or "\\" in tag or tag in ("", ".", "..") or "\0" in tag:
        raise CheckpointInputError(f"tag {tag[:80]!r} is not the name of a folder in {path}")
    if not (path / tag).is_dir():
        known = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir())[:10]) or "none"
        raise CheckpointNotFound(f"{path} has no checkpoint {tag!r}; folders there: {known}", path=str(path))
    return path / tag


def _latest(path: Path) -> str:
    try:
        with open(path / "latest", "rb") as file:
            return file.read(_MAX_LATEST_NBYTES).decode().strip()
    except FileNotFoundError:
        raise CheckpointNotFound(
            f"{path} has neither model states (mp_rank_XX_model_states.pt) nor a file `latest`: pass the folder of a "
            "tag, or a tag",
            path=str(path),
        ) from None
    except UnicodeDecodeError:
        raise CheckpointCorrupt(f"{path / 'latest'} is not text", path=str(path / "latest")) from None


def open_files(folder: Path) -> DeepSpeedFiles:
    """Open the files by rank.  Raises CheckpointCorrupt if one is missing, damaged, or contradicts its name."""
    names = sorted(each.name for each in folder.iterdir())
    if unsupported := [name for name in names if _UNKNOWN.fullmatch(name)]:
        raise CheckpointInputError(
            f"{folder} holds {unsupported[0]!r}: checkpoints of pipelines, of experts and universal checkpoints are "
            "not supported. Save from an engine without pipeline stages and experts, or export the weights with "
            "DeepSpeed",
            path=str(folder),
        )
    models, shards = (
        _files_by_rank(names, _MODEL_PART) or _files_by_rank(names, _MODEL),
        _files_by_rank(names, _OPTIMIZER),
    )
    if not models:
        raise CheckpointNotFound(f"{folder} has no model states (mp_rank_XX_model_states.pt)", path=str(folder))
    opened: list[TorchFile] = []
    with contextlib.ExitStack() as stack:

        def read(name: str, key: str) -> dict[str, Any]:
            opened.append(open_torch_file(folder / name))
            stack.callback(opened[-1].close)
            opened[-1].verify()
            return _check_key(opened[-1].value, key, folder / name)

        tp_ranks = tuple(
            TensorParallelRank(
                models=tuple(read(name, "module") for name in models[tp_rank]),
                shards=tuple(_optimizer_state(read(name, _STATE), folder / name) for name in shards.get(tp_rank, [])),
            )
            for tp_rank in sorted(models)
        )
        if problem := _ranks_problem(tp_ranks, {*models} ^ {*shards} if shards else set()):
            raise CheckpointCorrupt(f"{folder}: {problem}", path=str(folder))
        stack.pop_all()
    return DeepSpeedFiles(folder, folder.resolve().name, tp_ranks, tuple(opened))


def _files_by_rank(names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, list[str]]:
    """Tensor-parallel rank -> its file names by data-parallel rank.  Raises CheckpointCorrupt if one is missing."""
    found: dict[int, dict[int, str]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            fields = match.groupdict()
            ranks = found.setdefault(int(fields["tp"]), {})
            if ranks.setdefault(int(fields.get("rank") or 0), name) != name:
                raise CheckpointCorrupt(
                    f"{name!r} and {ranks[int(fields['rank'])]!r} hold the same part: files of two runs are mixed"
                )
    for tp_rank, ranks in found.items():
        if missing := sorted(set(range(len(ranks))) - set(ranks)):
            raise CheckpointCorrupt(
                f"there is {ranks[max(ranks)]!r}, but data-parallel rank {missing[0]} of mp_rank_{tp_rank:02d} is "
                "missing"
            )
    if missing := sorted(set(range(len(found))) - set(found)):
        raise CheckpointCorrupt(
            f"the files of tensor-parallel rank {missing[0]} are missing (mp_rank_{missing[0]:02d})"
        )
    return {tp_rank: [ranks[rank] for rank in sorted(ranks)] for tp_rank, ranks in found.items()}


def _check_key(value: Any, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict) or key not in value:
        raise CheckpointCorrupt(f"{path} contradicts its name: it has no {key!r}", path=str(path))
    return value


def _optimizer_state(value: dict[str, Any], path: Path) -> dict[str, Any]:
    inner = value[_STATE]
    if not isinstance(inner, dict):
        raise CheckpointCorrupt(f"{path}: its {_STATE!r} is not a dict", path=str(path))
    return inner


def _ranks_problem(tp_ranks: Sequence[TensorParallelRank], unpaired: set[int]) -> str:
    if unpaired:
        return f"tensor-parallel rank {min(unpaired)} has model states or optimizer states, but not both"
    for number, tp_rank in enumerate(tp_ranks):
        if any(shard.get("ds_zero_partition_groups") is not None for shard in tp_rank.shards):
            return f"tensor-parallel rank {number}: experts with partition groups of their own are not supported"
        counts = {len(tp_rank.shards), *_partition_counts(tp_rank)} if tp_rank.shards else set()
        if len(counts) > 1:
            return (
                f"tensor-parallel rank {number}: {len(tp_rank.shards)} optimizer shards, but partition counts of "
                f"{sorted(counts)}: a file is missing, or files of two runs are mixed"
            )
        if tp_rank.stage == 3 and len(tp_rank.models) != len(tp_rank.shards):
            return (
                f"{len(tp_rank.models)} model states and {len(tp_rank.shards)} optimizer shards at stage 3: "
                "files are missing"
            )
    steps = {reprlib.repr(model.get("global_steps")) for tp_rank in tp_ranks for model in tp_rank.models}
    return f"its model states are of steps {sorted(steps)}: files of several saves" if len(steps) > 1 else ""


def _partition_counts(tp_rank: TensorParallelRank) -> set[int]:
    saved = [shard.get("partition_count") for shard in tp_rank.shards]
    return {
        count for each in saved for count in (each if isinstance(each, list) else [each]) if isinstance(count, int)
    }


def shape_of(value: Any, name: str) -> tuple[int, ...]:
    """Check a shape, a torch.Size or a list.  Raises CheckpointCorrupt."""
    if not isinstance(value, (tuple, list)) or not all(type(size) is int and 0 <= size < 2**62 for size in value):
        raise CheckpointCorrupt(f"parameter {str(name)[:80]!r} has the invalid shape {reprlib.repr(value)}")
    return tuple(value)


def flat_tensors(value: Any, what: str) -> list[Tensor]:
    """Check a list of flat float32 buffers.  Raises CheckpointCorrupt."""
    if not isinstance(value, list) or not all(isinstance(each, Tensor) for each in value):
        raise CheckpointCorrupt(f"{what} is not a list of tensors")
    return [each.reshape(-1) for each in value]
