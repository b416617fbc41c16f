"""Agreement at start: ranks compare config, model, optimizer and versions before anything relies on them.

Ranks with different learning rates train a wrong model, and ranks with different parameter orders add unrelated
gradients; neither raises an error.  One exchange of a description at the start is cheap and names the difference.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
import zpartition
from zengine.config import Plan
from zengine.engine.drift import RanksDisagree
from zengine.imports import own_version


def check_agreement(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
    groups: zcomm.Groups,
    data: Sequence[str] = (),
) -> None:
    """Compare plan, versions and training data over all ranks, and parameters and optimizer over the gradient ranks.

    Raises:
        RanksDisagree: on every rank; names the first difference, both values and their ranks.
    """
    general = {"plan": plan_lines(plan), "training data": list(data), "versions": version_lines()}
    own = {"parameters": parameter_lines(model), "optimizer": optimizer_lines(model, optimizer)}
    world, same_parameters = groups.world(), groups.gradient()
    if world is not same_parameters:
        compare(general, world)
    compare({**general, **own}, same_parameters)


def compare(mine: Mapping[str, Sequence[str]], group: ProcessGroup | None) -> None:
    """Raise RanksDisagree with the first difference, unless the lines of every topic are equal on all ranks."""
    digests = zcomm.all_gather_object({topic: _digest(lines) for topic, lines in mine.items()}, group)
    if all(digest == digests[0] for digest in digests):
        return
    everyone = zcomm.all_gather_object(mine, group)
    raise RanksDisagree(first_difference(everyone))


def plan_lines(plan: Plan) -> list[str]:
    """Return the plan as lines, one per value; without values that may differ, such as the name of a drive."""
    if plan.zero.offload.directory:
        here = attrs.evolve(plan.zero.offload, directory="a drive of this node")
        plan = attrs.evolve(plan, zero=attrs.evolve(plan.zero, offload=here))
    fields = [field.name for field in attrs.fields(Plan) if field.name not in ("origins", "notices", "given")]
    return [f"{name} = {getattr(plan, name)!r}" for name in fields]


def parameter_lines(model: nn.Module) -> list[str]:
    """Return name, shape, dtype and trainability of each parameter, in order; then the buffers.

    Experts of which other ranks hold other ones have their global shapes.
    """
    experts = zpartition.expert_shards_of(model)
    full_tensors = zpartition.FullTensors.of(model)
    params = [
        f"{name} {full_tensors.shape(param) if name in experts else tuple(param.shape)} "
        f"{str(param.dtype).removeprefix('torch.')} "
        f"{'trainable' if param.requires_grad else 'frozen'}"
        for name, param in model.named_parameters()
    ]
    buffers = [f"{name} {tuple(b.shape)} {str(b.dtype).removeprefix('torch.')}" for name, b in model.named_buffers()]
    return params + buffers


def optimizer_lines(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Return the class, and the hyperparameters and members of each group."""
    if optimizer is None:
        return ["none"]
    names = {id(param): name for name, param in model.named_parameters()}
    lines = [type(optimizer).__name__]
    for index, param_group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in param_group.items() if key not in ("params", "param_names")}
        lines.append(f"group {index}: {options}")
        lines += [
            f"group {index} holds {names.get(id(param), 'a parameter of another module')}"
            for param in param_group["params"]
        ]
    return lines


def version_lines() -> list[str]:
    """Return the versions that affect arithmetic or formats."""
    return [f"python {platform.python_version()}", f"torch {torch.__version__}", f"zengine {own_version()}"]


def first_difference(everyone: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """Describe the first line in which a rank differs from rank 0."""
    for rank, theirs in enumerate(everyone):
        for topic, lines in theirs.items():
            base = everyone[0][topic]
            for index in range(max(len(base), len(lines))):
                ours = base[index] if index < len(base) else "(nothing)"
                other = lines[index] if index < len(lines) else "(nothing)"
                if ours != other:
                    return (
                        f"ranks have different {topic}: rank 0 has [{' '.join(ours.split())}], "
                        f"rank {rank} has [{' '.join(other.split())}]. Start all ranks with the same script, config "
                        "and environment."
                    )
    return "ranks sent different digests of equal descriptions"


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
