"""`deepspeed.module_inject.auto_tp`: slices of whole weights, and the layers of a model that AutoTP would split."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

import zcomm
from zpartition import tensor

__all__ = ["AutoTP", "ReplaceWithTensorSlicing"]


@final
class ReplaceWithTensorSlicing:
    """Copies this rank's slice of a whole weight into the parameter of a split layer.

    out_dim, in_dim: dims of outputs and inputs in the destination.
    """

    def __init__(self, mp_group: Any = None, mp_size: int = 1, out_dim: int = 1, in_dim: int = 0) -> None:
        self.gpu_index = 0 if mp_group is None else zcomm.group_rank(mp_group)
        self.mp_size, self.out_dim, self.in_dim = mp_size, out_dim, in_dim

    def copy(self, dst: Tensor, src: Tensor | None, int8: bool = False, allocate_tensor: bool = False) -> Any:
        """Return a frozen parameter with this rank's slice of `src`; of at most one dim, by the shape of `dst`.

        int8: `src` is stored as (out, in), otherwise as (in, out).
        allocate_tensor: do not write into `dst`.

        Raises ValueError if `dst` has no values, or is larger than `src`.
        """
        if src is None:
            return None
        outputs, inputs = (0, 1) if int8 else (1, 0)
        wanted = (
            {outputs: dst.shape[self.out_dim], inputs: dst.shape[self.in_dim]} if src.dim() == 2 else {0: len(dst)}
        )
        part = src.detach()
        for dim, size in wanted.items():
            if size != src.shape[dim]:
                _check_slice(src, dst, size, src.shape[dim])
                part = part.narrow(dim, self.gpu_index * size, size)
                break
        return _frozen(part, dst, src, allocate=allocate_tensor)

    def strided_copy(
        self, dst: Tensor, src: Tensor | None, num_splits: int, int8: bool = False, allocate_tensor: bool = False
    ) -> Any:
        """The same for `num_splits` weights fused along the outputs, such as queries, keys and values."""
        if src is None:
            return None
        is_matrix = src.dim() == 2 and dst.dim() == 2
        dim = 0 if int8 or not is_matrix else 1
        size = dst.shape[self.out_dim] if is_matrix else dst.shape[0]
        part = src.detach()
        if size != src.shape[dim]:
            _check_slice(src, dst, size, src.shape[dim])
            each = size // num_splits
            fused = part.view(*part.shape[:dim], num_splits, -1, *part.shape[dim + 1 :])
            part = fused.narrow(dim + 1, self.gpu_index * each, each).flatten(dim, dim + 1)
        return _frozen(part, dst, src, allocate=allocate_tensor)


def _check_slice(src: Tensor, dst: Tensor, size: int, whole: int) -> None:
    if dst.is_meta or size > whole:
        raise ValueError(
            f"a weight of shape {list(src.shape)} cannot be sliced into {list(dst.shape)} ({dst.device}): the "
            "destination must have values and be smaller. To join slices of several files, load whole weights."
        )


def _frozen(part: Tensor, dst: Tensor, src: Tensor, *, allocate: bool) -> nn.Parameter:
    target = torch.empty_like(dst) if allocate else dst
    found: Any = nn.Parameter(target.data.reshape(part.shape).copy_(part), requires_grad=False)
    if hasattr(src, "scale"):
        found.scale = src.scale
    return found  # type: ignore[no-any-return]


@final
class AutoTP:
    """The split that AutoTP would choose.  Models are split by `initialize`, `tp_model_init` and `init_inference`."""

    @staticmethod
    def tp_parser(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
        """Return (class of a block, its layers whose outputs are all-reduced), by names of layers.

        Raises ValueError for a model without a layer of a known name.
        """
        plan = tensor.plan_by_names(model, 1)
        rows = {path for rule in plan.rules if isinstance(rule.style, tensor.Row) for path in _matches(model, rule)}
        blocks: dict[type[nn.Module], set[str]] = {}
        for path in sorted(rows):
            parent, name = _block_of(model, path)
            blocks.setdefault(type(parent), set()).add(name)
        return [(kind, sorted(names)) for kind, names in blocks.items()]

    @staticmethod
    def kernel_supported(module_list: Any) -> bool:
        """Return False: there are no fused blocks."""
        return False


def _matches(model: nn.Module, rule: tensor.Rule) -> list[str]:
    return [path for path, _ in model.named_modules() if rule.matches(path) or rule.matches(f"{path}.weight")]


def _block_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the member of a list of blocks that a layer is in, and the layer's name there."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: end - 1])), nn.ModuleList):
            return model.get_submodule(".".join(parts[:end])), ".".join(parts[end:])
    return model.get_submodule(".".join(parts[:-1])), parts[-1]
