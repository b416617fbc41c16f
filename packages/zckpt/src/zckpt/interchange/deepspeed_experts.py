"""DeepSpeed's mixture-of-experts layers: experts by number in the files, stacked in zpartition.

DeepSpeed: `mlp.deepspeed_moe.gate.wg.weight`, and `mlp.deepspeed_moe.experts.deepspeed_experts.3.up.weight` for each
expert, numbered locally on each expert-parallel rank (the files of experts have global numbers).  zpartition:
`mlp.gate.weight`, and `mlp.experts.stacked.up.weight` with the experts in front, so an expert's tensor is a box of
the stack.

With ZeRO the buffers of a group of experts are split over the ranks that hold the same experts, those of other groups
over all ranks.  Without it, each expert-parallel rank has an optimizer file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zckpt.errors import CheckpointCorrupt, CheckpointMismatch
from zckpt.format.shard import Shard
from zckpt.interchange.deepspeed_files import EXPERTS, DeepSpeedFiles, TensorParallelRank
from zckpt.interchange.deepspeed_tensors import (
    MASTER,
    STEP,
    StatePart,
    check_masters,
    module_parts,
    optimizer_parts,
    states_by_number,
    tensors_of,
    whole_part,
)

_EXPERT = re.compile(
    r"(?P<layer>.*?)(?:deepspeed_moe\.)?experts\.deepspeed_experts\.(?P<number>\d{1,6})\.(?P<rest>.+)"
)
_GATE = re.compile(r"(?P<layer>(?:.*\.)?)deepspeed_moe\.gate\.wg\.(?P<rest>.+)")
_STACKED = re.compile(r"(?P<layer>.*?)experts\.stacked\.(?P<rest>.+)")


def is_expert(name: str) -> bool:
    """True for a parameter of an expert, by DeepSpeed's name."""
    return EXPERTS in name


def is_stack(name: str) -> bool:
    """True for a parameter of stacked experts, by zpartition's name."""
    return _STACKED.fullmatch(name) is not None


def engine_name(name: str) -> str:
    """DeepSpeed's name of a gate or of an expert's parameter -> zpartition's; other names are unchanged."""
    if match := _GATE.fullmatch(name):
        return f"{match['layer']}gate.{match['rest']}"
    if match := _EXPERT.fullmatch(name):
        return f"{match['layer']}experts.stacked.{match['rest']}"
    return name


def deepspeed_names(name: str, shape: Sequence[int], gates: Iterable[str]) -> list[str]:
    """zpartition's name -> DeepSpeed's: of each expert for a stack, else one.

    gates: prefixes of the layers with stacks ("mlp."), whose gates are renamed.
    """
    if match := _STACKED.fullmatch(name):
        before = f"{match['layer']}deepspeed_moe.experts.{EXPERTS}"
        return [f"{before}{number}.{match['rest']}" for number in range(shape[0])]
    for layer in gates:
        if name.startswith(f"{layer}gate."):
            return [f"{layer}deepspeed_moe.gate.wg.{name.removeprefix(f'{layer}gate.')}"]
    return [name]


def layers_with_stacks(names: Iterable[str]) -> set[str]:
    """Prefixes of the layers with stacked experts, by zpartition's names."""
    return {match["layer"] for name in names if (match := _STACKED.fullmatch(name))}


def stack(shards: Iterable[tuple[str, Shard]]) -> Iterator[tuple[str, Shard]]:
    """(state key, shard) under DeepSpeed's names -> under zpartition's, with experts as boxes of their stack."""
    found = list(shards)
    counts: dict[str, int] = {}
    steps: dict[tuple[str, str], Tensor] = {}
    for _, shard in found:
        if match := _EXPERT.fullmatch(shard.name):
            name = engine_name(shard.name)
            counts[name] = max(counts.get(name, 0), int(match["number"]) + 1)
    for key, shard in found:
        match, name = _EXPERT.fullmatch(shard.name), engine_name(shard.name)
        if match is None:
            yield key, attrs.evolve(shard, name=name)
        elif key == STEP:
            if (key, name) not in steps:
                yield key, attrs.evolve(shard, name=name)
            elif not torch.equal(steps[key, name], shard.tensor):
                raise CheckpointMismatch(
                    f"the experts of {name!r} have made {steps[key, name].item():g} and {shard.tensor.item():g} "
                    "optimizer steps: a stack has one count. Import without the optimizer's state"
                )
            steps[key, name] = shard.tensor
        else:
            number = int(match["number"])
            yield (
                key,
                Shard(
                    name,
                    (counts[name], *shard.global_shape),
                    ((number, number + 1), *shard.box),
                    shard.span,
                    shard.tensor,
                ),
            )


def expert_parts(files: DeepSpeedFiles) -> list[StatePart]:
    """Everything of a checkpoint with experts, under DeepSpeed's names with global numbers of experts."""
    (rank,) = files.tp_ranks
    experts = {
        str(name): value
        for content in files.experts.values()
        for name, value in content.items()
        if isinstance(value, Tensor)
    }
    weights = {**tensors_of(rank.model), **experts}
    everything = TensorParallelRank(({**rank.model, "module": weights},), rank.shards)
    optimized = list(_zero_parts(rank, experts) if rank.shards else _numbered_parts(files, experts))
    masters = {part.name for part in optimized if part.key == MASTER}
    check_masters(optimized, weights)
    shared = rank.model.get("shared_params") or {}
    rest = list(module_parts(attrs.evolve(everything, models=(everything.model,)), shared, masters | set(experts)))
    return optimized + rest + [whole_part(name, value) for name, value in experts.items() if name not in masters]


def _zero_parts(rank: TensorParallelRank, experts: Mapping[str, Tensor]) -> Iterator[StatePart]:
    """Masters and states of stages 1 and 2."""
    groups = rank.groups()
    of_experts = [any(map(is_expert, group)) for group in groups]
    yield from optimizer_parts(_with_groups(rank, groups, [not each for each in of_experts], rank.shards))
    config = rank.model.get("ds_config")
    data_first = isinstance(config, dict) and config.get("use_data_before_expert_parallelism") is True
    counts = _count(experts)
    degree = _degree([name for group in groups for name in group], counts)
    for number in range(degree):
        ranks = len(rank.shards)
        if ranks % degree:
            raise CheckpointCorrupt(f"{ranks} optimizer shards do not divide by {degree} expert-parallel ranks")
        step = ranks // degree
        mine = rank.shards[number * step : (number + 1) * step] if data_first else rank.shards[number::degree]
        for part in optimizer_parts(_with_groups(rank, groups, of_experts, mine)):
            yield attrs.evolve(part, name=_global_name(part.name, number, degree, counts))


def _with_groups(
    rank: TensorParallelRank, groups: Sequence[Mapping[str, Any]], wanted: Sequence[bool], shards: Sequence[Any]
) -> TensorParallelRank:
    """The rank with these shards, and without the parameters of other groups."""
    kept = [dict(group) if keep else {} for group, keep in zip(groups, wanted)]
    return TensorParallelRank(({**rank.model, "param_shapes": kept},), tuple(shards))


def _degree(names: Iterable[str], every: Mapping[str, int]) -> int:
    """Expert-parallel ranks: numbers of experts in the files of a layer over those of one rank."""
    own = _count(names)
    degrees = {every[layer] // count if layer in every else 0 for layer, count in own.items()}
    if len(degrees) != 1 or 0 in degrees:
        raise CheckpointCorrupt(
            f"a rank has {own} experts by layer, and the files of experts hold {every}: files are missing, or layers "
            "have different expert-parallel degrees, which is not supported"
        )
    return degrees.pop()


def _count(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, set[int]] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            found.setdefault(match["layer"], set()).add(int(match["number"]))
    return {layer: len(numbers) for layer, numbers in found.items()}


def _global_name(name: str, rank: int, degree: int, counts: Mapping[str, int]) -> str:
    """The name with the expert's global number."""
    match = _EXPERT.fullmatch(name)
    assert match is not None
    number = rank * (counts[match["layer"]] // degree) + int(match["number"])
    return f"{name[: match.start('number')]}{number}{name[match.end('number') :]}"


def _numbered_parts(files: DeepSpeedFiles, experts: Mapping[str, Tensor]) -> Iterator[StatePart]:
    """States without ZeRO: each expert-parallel rank numbers its own experts behind the other parameters."""
    (rank,) = files.tp_ranks
    buffers = {str(name) for name in rank.model.get("buffer_names") or ()}
    dense = {name: tuple(t.shape) for name, t in tensors_of(rank.model).items() if name not in buffers}
    counts, degree = _count(experts), len(files.expert_optimizers)
    for number, saved in enumerate(each["optimizer"] for each in files.expert_optimizers):
        if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
            raise CheckpointCorrupt(f"the optimizer of expert-parallel rank {number} has no states by number")
        groups = saved.get("param_groups") or ()
        numbers = [index for group in groups if group.get("moe") for index in group["params"]]
        own = {}
        for name, value in experts.items():
            match = _EXPERT.fullmatch(name)
            if match and int(match["number"]) // (counts[match["layer"]] // degree) == number:
                own[name] = tuple(value.shape)
        yield from states_by_number(saved, numbers, own)
        for group in groups if number == 0 else ():
            if not group.get("moe"):
                yield from states_by_number(saved, group["params"], dense)
