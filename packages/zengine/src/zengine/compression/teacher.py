"""What a student takes from a teacher: some of its layers at the beginning, its logits in training.

Divergence (Hinton et al. 2015): T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over all positions, so
that its gradient does not depend on the temperature T in the limit of large ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from zengine.config.keys.compression import LayerReduction

__all__ = ["copy_layers", "distillation_loss", "find_logits"]


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the divergence of logits (..., classes) from a teacher's, () float32.

    Raises ValueError for logits of another shape.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"distillation: the student's logits are {tuple(student.shape)}, and the teacher's "
            f"{tuple(teacher.shape)}; both models need the same inputs and the same classes"
        )
    wanted = F.log_softmax(teacher.detach().float() / temperature, dim=-1).flatten(0, -2)
    found = F.log_softmax(student.float() / temperature, dim=-1).flatten(0, -2)
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True) * temperature**2


def find_logits(output: Any, name: str) -> Tensor:
    """Return the logits in a model's output: the output itself, its attribute or member `name`.

    Raises TypeError if there are none.
    """
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, output)
    if isinstance(found, Tensor) and found.dim() >= 2:
        return found
    form = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
    raise TypeError(
        f"distillation: the model returns {form}, and logits (..., classes) are needed: return them, or an object "
        f"with the attribute {name!r} (compression_training.distillation.output)"
    )


@torch.no_grad()
def copy_layers(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    """Copy parameters and buffers of the teacher's layers and of other modules to the student.

    Raises ValueError, before anything changes, for paths that do not exist and for tensors of another shape.
    """
    prefix = section.module_name_prefix
    paths = [(f"{prefix}.{at}", f"{prefix}.{layer}") for at, layer in enumerate(section.teacher_layer)]
    paths += [(name, name) for name in section.other_module_name]
    pairs = [
        pair
        for to, source in paths
        for pair in _pairs(to, _part(student, to, "student"), source, _part(teacher, source, "teacher"))
    ]
    for to, tensor in pairs:
        to.copy_(tensor)


def _part(model: nn.Module, path: str, whose: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        parent = path.rpartition(".")[0]
        near = [name for name, _ in model.named_modules() if name and name.rpartition(".")[0] == parent]
        raise ValueError(
            f"layer_reduction: the {whose}, a {type(model).__name__}, has no module {path!r}; it has "
            f"{', '.join(near[:12]) or ', '.join(name for name, _ in model.named_children())}"
        ) from None


def _pairs(to: str, part: nn.Module, source: str, from_part: nn.Module) -> Iterable[tuple[Tensor, Tensor]]:
    own, given = _tensors(part), _tensors(from_part)
    if own.keys() != given.keys():
        apart = sorted(own.keys() ^ given.keys())
        raise ValueError(
            f"layer_reduction: {to!r} of the student and {source!r} of the teacher differ in {', '.join(apart[:6])}; "
            "both need the same kind of layer"
        )
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise ValueError(
                f"layer_reduction: {name!r} is {tuple(tensor.shape)} in {to!r} of the student and "
                f"{tuple(given[name].shape)} in {source!r} of the teacher; both need the same width"
            )
    return [(tensor, given[name]) for name, tensor in own.items()]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
