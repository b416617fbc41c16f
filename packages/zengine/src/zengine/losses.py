"""What may be passed to `backward`."""

from __future__ import annotations

from typing import Protocol

import torch


def check_loss(loss: object) -> None:
    """Refuse what cannot be differentiated.

    Raises:
        TypeError: not a tensor.
        ValueError: not a scalar, or no graph behind it.
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"backward() needs the loss tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"backward() needs a scalar loss, got shape {tuple(loss.shape)}: reduce it first, loss.mean() for example"
        )
    if not loss.requires_grad:
        raise ValueError(
            "backward() got a loss without a graph: it was detached, or computed under torch.no_grad(), or every "
            "parameter behind it is frozen"
        )


class Reached(Protocol):
    """What a partition tells about the backward in progress."""

    @property
    def is_alone(self) -> bool: ...
    def num_arrived(self) -> int: ...


def check_reached(partition: Reached) -> None:
    """Refuse a loss that is not computed from the engine's parameters.

    With several ranks one of them may have nothing to learn from (a batch that is all padding); that no rank has is
    found at the boundary, where they agree on it.

    Raises:
        ValueError: backward produced no gradient, and there is no other rank.
    """
    if partition.is_alone and partition.num_arrived() == 0:
        raise ValueError(
            "backward() got a loss that reaches no parameter of this engine: it was computed by another module, or "
            "every parameter behind it is frozen or missing from the optimizer"
        )
