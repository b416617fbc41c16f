"""The files of a DeepSpeed checkpoint, opened and checked.

Each model-parallel rank has model states, and the optimizer shards of its data-parallel ranks; a pipeline has a file
for each layer, a model with experts one for each expert, and a universal checkpoint a folder for each parameter
(names in deepspeed_listing.py).  No value is used before the content of a file matches its name.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import attrs
from torch import Tensor

from zckpt.containers.torch_file import TorchFile, open_torch_file
from zckpt.containers.unpickler import Record
from zckpt.errors import CheckpointCorrupt
from zckpt.interchange.deepspeed_flat import Shapes
from zckpt.interchange.deepspeed_listing import UNIVERSAL, Listing, list_files

_STATE = "optimizer_state_dict"
EXPERTS = "deepspeed_experts."  # in the name of each parameter of an expert, before its number


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
class UniversalState:
    """A universal checkpoint's folder `zero`."""

    params: Mapping[str, Mapping[str, Any]]  # parameter -> key (fp32, exp_avg, step, ...) -> content of its file
    optimizer: dict[str, Any]  # loss scale, parameter groups


@final
@attrs.frozen(eq=False)
class DeepSpeedFiles:
    """All files of one checkpoint, open."""

    folder: Path
    tag: str
    tp_ranks: tuple[TensorParallelRank, ...]  # all model-parallel ranks
    opened: tuple[TorchFile, ...]
    layers: Mapping[int, Sequence[dict[str, Any]]] = MappingProxyType({})  # of a pipeline, by tensor-parallel rank
    experts: Mapping[tuple[int, int], dict[str, Any]] = MappingProxyType({})  # by (MoE layer, expert)
    expert_optimizers: tuple[dict[str, Any], ...] = ()  # by expert-parallel rank
    universal: UniversalState | None = None

    @property
    def is_pipeline(self) -> bool:
        """True if layers have files of their own (or had, before the checkpoint became universal)."""
        return bool(self.layers) or (self.universal is not None and self.tp_ranks[0].model["module"] is None)

    @property
    def degrees(self) -> tuple[int, int]:
        """(pipeline stages, tensor-parallel ranks)."""
        saved = self.tp_ranks[0].model.get("checkpoint_parallel_dimensions")
        found: list[Any] = [saved.get(key) for key in ("pp_degree", "tp_degree")] if isinstance(saved, dict) else []
        count = len(self.tp_ranks)
        is_known = len(found) == 2 and all(isinstance(each, int) and each > 0 for each in found)
        if is_known and found[0] * found[1] == count:
            return found[0], found[1]
        if not self.layers:
            return 1, count
        tensor = max(len(files) for files in self.layers.values())
        if count % tensor:
            raise CheckpointCorrupt(f"{self.folder}: {count} model states do not divide by {tensor} files of a layer")
        return count // tensor, tensor

    def verify(self) -> None:
        for each in self.opened:
            each.verify()

    def close(self) -> None:
        for each in self.opened:
            each.close()


@final
@attrs.define
class VerifyShare:
    """Share of one process in verifying the files that several processes open in the same order.

    Each file is verified by the process that has verified the fewest bytes so far.
    """

    index: int = 0  # of this process
    count: int = 1
    nbytes: list[int] = attrs.field(init=False)  # verified so far, by process

    @nbytes.default
    def _none(self) -> list[int]:
        return [0] * self.count

    def verify(self, file: TorchFile) -> None:
        """Compare the checksums of `file`, if it is this process's turn."""
        turn = self.nbytes.index(min(self.nbytes))
        self.nbytes[turn] += file.nbytes
        if turn == self.index:
            file.verify()


def open_files(folder: Path, share: VerifyShare | None = None) -> DeepSpeedFiles:
    """Open the files by rank.  Raises CheckpointCorrupt if one is missing, damaged, or contradicts its name.

    share: chooses the files whose tensors are verified here; None: all of them.
    """
    names, share = list_files(folder), share or VerifyShare()
    opened: list[TorchFile] = []
    with contextlib.ExitStack() as stack:

        def read(name: str) -> Any:
            opened.append(open_torch_file(folder / name))
            stack.callback(opened[-1].close)
            share.verify(opened[-1])
            return opened[-1].value

        found = _opened(folder, names, read)
        unpaired = {*names.models} ^ {*names.shards} if names.shards else set()
        if problem := _ranks_problem(found.tp_ranks, unpaired):
            raise CheckpointCorrupt(f"{folder}: {problem}", path=str(folder))
        stack.pop_all()
    return attrs.evolve(found, opened=tuple(opened))


def _opened(folder: Path, names: Listing, read: Callable[[str], Any]) -> DeepSpeedFiles:
    def entry(name: str, key: str) -> dict[str, Any]:
        return _check_key(read(name), key, folder / name)

    def tensors(name: str) -> dict[str, Any]:
        value = read(name)
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise CheckpointCorrupt(f"{folder / name} contradicts its name: it is no dict of tensors by name")
        return value

    return DeepSpeedFiles(
        folder,
        folder.resolve().name,
        tuple(
            TensorParallelRank(
                models=tuple(entry(name, "module") for name in names.models[rank]),
                shards=tuple(
                    _optimizer_state(entry(name, _STATE), folder / name) for name in names.shards.get(rank, [])
                ),
            )
            for rank in sorted(names.models)
        ),
        (),
        {layer: [tensors(name) for name in files] for layer, files in names.layers.items()},
        {at: tensors(name) for at, name in names.experts.items()},
        tuple(entry(name, "optimizer") for name in names.expert_optimizers),
        _universal(folder, read) if names.is_universal else None,
    )


def _universal(folder: Path, read: Callable[[str], Any]) -> UniversalState:
    params: dict[str, dict[str, Any]] = {}
    for each in sorted((folder / UNIVERSAL).iterdir()):
        if each.is_dir() and not each.is_symlink():
            files = sorted(file for file in each.iterdir() if file.suffix == ".pt")
            params[each.name] = {file.stem: read(f"{UNIVERSAL}/{each.name}/{file.name}") for file in files}
    state = read(f"{UNIVERSAL}/optimizer_state.pt")
    if not isinstance(state, dict):
        raise CheckpointCorrupt(f"{folder / UNIVERSAL / 'optimizer_state.pt'} is not a dict")
    return UniversalState(params, state)


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
        if tp_rank.model.get("ds_autoep_layers"):
            return "AutoEP's experts (ds_autoep_layers) are not supported: convert the checkpoint with DeepSpeed"
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
    """Numbers of ranks over which groups are split; groups of experts, split over fewer, do not count."""
    groups = tp_rank.model.get("param_shapes")
    groups = groups if isinstance(groups, list) else []
    found = set()
    for saved in (shard.get("partition_count") for shard in tp_rank.shards):
        for index, count in enumerate(saved if isinstance(saved, list) else [saved]):
            is_expert = index < len(groups) and any(EXPERTS in str(name) for name in groups[index])
            if isinstance(count, int) and not is_expert:
                found.add(count)
    return found


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
