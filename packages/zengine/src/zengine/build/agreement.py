"""Ranks compare what they were given before anything assumes that they agree.

Two ranks with another learning rate train something that no one asked for; two with another parameter order mix
their sums; both without a word.  One exchange of a description at start costs nothing and names the difference.
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
    """Compare plan, versions and the facts of the training data over all ranks, and parameters and optimizer over
    those that hold the same parts of the model.

    Raises:
        RanksDisagree: on every rank; names the first difference, both values and their ranks.
    """
    general = {"plan": plan_lines(plan), "training data": list(data), "versions": version_lines()}
    own = {"parameters": parameter_lines(model), "optimizer": optimizer_lines(model, optimizer)}
    everybody, kin = groups.world(), groups.gradient()
    if everybody is not kin:
        compare(general, everybody)
    compare({**general, **own}, kin)


def compare(mine: Mapping[str, Sequence[str]], group: ProcessGroup | None) -> None:
    """Raise RanksDisagree, with the first difference, unless the lines of all topics are the same on all ranks."""
    digests = zcomm.all_gather_object({topic: _digest(lines) for topic, lines in mine.items()}, group)
    if all(digest == digests[0] for digest in digests):
        return
    everyone = zcomm.all_gather_object(mine, group)
    raise RanksDisagree(first_difference(everyone))


def plan_lines(plan: Plan) -> list[str]:
    """The plan as text, one value a line; without what may differ: how values were written, a drive's name."""
    if plan.zero.offload.directory:
        here = attrs.evolve(plan.zero.offload, directory="a drive of this node")
        plan = attrs.evolve(plan, zero=attrs.evolve(plan.zero, offload=here))
    fields = [field.name for field in attrs.fields(Plan) if field.name not in ("origins", "notices", "given")]
    return [f"{name} = {getattr(plan, name)!r}" for name in fields]


def parameter_lines(model: nn.Module) -> list[str]:
    """Name, shape, dtype and trainability of each parameter, in order; then the buffers."""
    params = [
        f"{name} {tuple(param.shape)} {str(param.dtype).removeprefix('torch.')} "
        f"{'trainable' if param.requires_grad else 'frozen'}"
        for name, param in model.named_parameters()
    ]
    buffers = [f"{name} {tuple(b.shape)} {str(b.dtype).removeprefix('torch.')}" for name, b in model.named_buffers()]
    return params + buffers


def optimizer_lines(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Class, and for each group its hyperparameters and members."""
    if optimizer is None:
        return ["none"]
    names = {id(param): name for name, param in model.named_parameters()}
    lines = [type(optimizer).__name__]
    for index, param_group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in param_group.items() if key not in ("params", "param_names")}
        lines.append(f"group {index}: {options}")
        lines += [f"group {index} holds {names.get(id(param), 'a stranger')}" for param in param_group["params"]]
    return lines


def version_lines() -> list[str]:
    """Versions that change arithmetic or formats."""
    return [f"python {platform.python_version()}", f"torch {torch.__version__}", f"zengine {own_version()}"]


def first_difference(everyone: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """The first line in which a rank differs from rank 0, in words."""
    for rank, theirs in enumerate(everyone):
        for topic, lines in theirs.items():
            base = everyone[0][topic]
            for index in range(max(len(base), len(lines))):
                ours = base[index] if index < len(base) else "(nothing)"
                other = lines[index] if index < len(lines) else "(nothing)"
                if ours != other:
                    return (
                        f"ranks were given different {topic}: rank 0 has [{' '.join(ours.split())}], "
                        f"rank {rank} has [{' '.join(other.split())}]. Start all ranks with the same script, config "
                        "and environment."
                    )
    return "ranks sent different digests of equal descriptions"


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
