"""File names of a DeepSpeed checkpoint, sorted by what they hold.  Nothing is opened.

    mp_rank_00_model_states.pt                        model states of a model-parallel rank
    zero_pp_rank_1_mp_rank_00_model_states.pt         ... of a data-parallel rank, at stage 3
    zero_pp_rank_1_mp_rank_00_optim_states.pt         optimizer shard (with bf16_ or fp16_ in front in some releases)
    layer_03-model_00-model_states.pt                 layer of a pipeline, and its tensor-parallel rank if it has any
    layer_1_expert_2_mp_rank_00_model_states.pt       expert of a MoE layer (old releases: expert_2_... of all layers)
    expp_rank_0_mp_rank_00_optim_states.pt            optimizer of an expert-parallel rank, without ZeRO
    zero/<parameter>/{fp32,exp_avg,...}.pt            a universal checkpoint

A model-parallel rank is a tensor-parallel rank; in a pipeline, stage * tensor degree + tensor rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from zckpt.errors import CheckpointCorrupt, CheckpointInputError, CheckpointNotFound

MODEL = re.compile(r"mp_rank_(?P<mp>\d{2,6})_model_states\.pt")
MODEL_PART = re.compile(r"zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d{2,6})(?:-model_(?P<rank>\d{2,6}))?-model_states\.pt")
_EXPERT = re.compile(
    r"(?:layer_(?P<layer>\d{1,6})_)?expert_(?P<expert>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_model_states\.pt"
)
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_optim_states\.pt")
_UNKNOWN = re.compile(r"(layer_|expert_|expp_rank_|mp_rank_|zero_pp_rank_).*")
UNIVERSAL = "zero"  # folder of a universal checkpoint
_MAX_LATEST_NBYTES = 4096


@attrs.frozen
class Listing:
    """File names by what they hold."""

    models: dict[int, list[str]]  # model-parallel rank -> one; at stage 3 one per data-parallel rank
    shards: dict[int, list[str]]  # model-parallel rank -> optimizer shards by data-parallel rank
    layers: dict[int, list[str]]  # layer of a pipeline -> one per tensor-parallel rank
    experts: dict[tuple[int, int], str]  # (MoE layer, expert); layer -1: all layers
    expert_optimizers: list[str]  # by expert-parallel rank
    is_universal: bool


def list_files(folder: Path) -> Listing:
    """Sort the names in a folder.

    Raises CheckpointNotFound (no model states), CheckpointCorrupt (a rank is missing), CheckpointInputError (a name
    of an unknown kind, or experts that are tensor-parallel or in a pipeline).
    """
    names = sorted(each.name for each in folder.iterdir())
    known = (MODEL, MODEL_PART, _OPTIMIZER, _LAYER, _EXPERT, _EXPERT_OPTIMIZER)
    unknown = [n for n in names if _UNKNOWN.fullmatch(n) and not any(kind.fullmatch(n) for kind in known)]
    if unknown:
        raise CheckpointInputError(
            f"{folder} holds {unknown[0]!r}, which is no file of a DeepSpeed checkpoint that is known here "
            "(mp_rank_XX_model_states.pt, zero_pp_rank_D_mp_rank_XX_optim_states.pt, layer_XX-model_states.pt, "
            "layer_L_expert_E_mp_rank_XX_model_states.pt, ...)",
            path=str(folder),
        )
    found = Listing(
        models=_by_rank(names, MODEL_PART) or _by_rank(names, MODEL),
        shards=_by_rank(names, _OPTIMIZER),
        layers=_layers(names),
        experts=_experts(names),
        expert_optimizers=_by_rank(names, _EXPERT_OPTIMIZER).get(0, []),
        is_universal=(folder / UNIVERSAL).is_dir(),
    )
    if not found.models:
        raise CheckpointNotFound(f"{folder} has no model states (mp_rank_XX_model_states.pt)", path=str(folder))
    if found.experts and (found.layers or len(found.models) > 1):
        raise CheckpointInputError(
            f"{folder} holds experts of a pipeline, or of tensor-parallel ranks, which cannot be read. Load it with "
            "DeepSpeed and save it without pipeline stages and tensor parallelism",
            path=str(folder),
        )
    return found


def _by_rank(names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, list[str]]:
    """Model-parallel rank -> its file names by the other rank.  Raises CheckpointCorrupt if one is missing."""
    found: dict[int, dict[int, str]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            fields = match.groupdict()
            ranks = found.setdefault(int(fields["mp"]), {})
            if ranks.setdefault(int(fields.get("rank") or 0), name) != name:
                raise CheckpointCorrupt(
                    f"{name!r} and {ranks[int(fields['rank'])]!r} hold the same part: files of two runs are mixed"
                )
    for mp_rank, ranks in found.items():
        if missing := sorted(set(range(len(ranks))) - set(ranks)):
            raise CheckpointCorrupt(
                f"there is {ranks[max(ranks)]!r}, but data-parallel rank {missing[0]} of mp_rank_{mp_rank:02d} is "
                "missing"
            )
    if missing := sorted(set(range(len(found))) - set(found)):
        raise CheckpointCorrupt(
            f"the files of tensor-parallel rank {missing[0]} are missing (mp_rank_{missing[0]:02d})"
        )
    return {mp_rank: [ranks[rank] for rank in sorted(ranks)] for mp_rank, ranks in found.items()}


def _layers(names: Sequence[str]) -> dict[int, list[str]]:
    """Layer -> its files by tensor-parallel rank."""
    found: dict[int, dict[int, str]] = {}
    for name in names:
        if match := _LAYER.fullmatch(name):
            found.setdefault(int(match["layer"]), {})[int(match["rank"] or 0)] = name
    most = max((len(ranks) for ranks in found.values()), default=0)
    for layer, ranks in found.items():
        if missing := sorted(set(range(most)) - set(ranks)):
            raise CheckpointCorrupt(f"layer {layer} of the pipeline has no file of tensor-parallel rank {missing[0]}")
    return {layer: [ranks[rank] for rank in sorted(ranks)] for layer, ranks in sorted(found.items())}


def _experts(names: Sequence[str]) -> dict[tuple[int, int], str]:
    """(MoE layer, expert) -> its file.  Raises CheckpointCorrupt if an expert is missing."""
    found: dict[tuple[int, int], str] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            if int(match["mp"]):
                raise CheckpointInputError(f"{name!r} is a part of an expert of tensor parallelism: it is not read")
            found[int(match["layer"]) if match["layer"] else -1, int(match["expert"])] = name
    for layer in {layer for layer, _ in found}:
        numbers = sorted(expert for other, expert in found if other == layer)
        if missing := sorted(set(range(len(numbers))) - set(numbers)):
            raise CheckpointCorrupt(
                f"MoE layer {layer} has {found[layer, numbers[-1]]!r}, but no expert {missing[0]}"
            )
    return dict(sorted(found.items()))


def choose_folder(path: Path, tag: str | None) -> Path:
    """The folder of one checkpoint: `path` itself if it has model states, else that of `tag` or `latest`.

    A folder with `latest_universal` alone is that of the universal checkpoint.
    """
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is not a folder", path=str(path))
    if tag is None and is_checkpoint(path):
        return path
    if tag is None:
        tag = _latest(path)
    if "/" in tag or "\\" in tag or tag in ("", ".", "..") or "\0" in tag:
        raise CheckpointInputError(f"tag {tag[:80]!r} is not the name of a folder in {path}")
    if not (path / tag).is_dir():
        known = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir())[:10]) or "none"
        raise CheckpointNotFound(f"{path} has no checkpoint {tag!r}; folders there: {known}", path=str(path))
    return path / tag


def is_checkpoint(path: Path) -> bool:
    """True for a folder with model states."""
    return any(MODEL.fullmatch(each.name) or MODEL_PART.fullmatch(each.name) for each in path.iterdir())


def _latest(path: Path) -> str:
    for name in ("latest", "latest_universal"):
        try:
            with open(path / name, "rb") as file:
                return file.read(_MAX_LATEST_NBYTES).decode().strip()
        except FileNotFoundError:
            continue
        except UnicodeDecodeError:
            raise CheckpointCorrupt(f"{path / name} is not text", path=str(path / name)) from None
    raise CheckpointNotFound(
        f"{path} has neither model states (mp_rank_XX_model_states.pt) nor a file `latest`: pass the folder of a "
        "tag, or a tag",
        path=str(path),
    )
