"""The usual expert: two linear layers with an activation between them, gated or not.

`ExpertMLP` is an ordinary module that is one expert.  A layer of experts keeps the weights of all in stacks and
computes them by grouped products (`forward_rows`), without a loop over modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

from torch import Tensor, nn
from torch.nn import functional as F

from zpartition.experts.grouped import grouped_linear

__all__ = ["ExpertMLP"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}
_GATED = ("swiglu", "geglu")


@final
class ExpertMLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) where `activation` is swiglu or geglu (Shazeer 2020)."""

    def __init__(self, hidden_size: int, inner_size: int, activation: str = "swiglu", *, bias: bool = False) -> None:
        """Raises ValueError for an unknown activation."""
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}.")
        self.activation = activation
        self.gate = nn.Linear(hidden_size, inner_size, bias=bias) if activation in _GATED else None
        self.up = nn.Linear(hidden_size, inner_size, bias=bias)
        self.down = nn.Linear(inner_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        weights = {name: param[None] for name, param in self.named_parameters()}
        rows = x.reshape(-1, x.shape[-1])
        return self.forward_rows(weights, rows, [rows.shape[0]]).view(x.shape)

    def forward_rows(self, weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute the rows of several experts.

        weights: by the names here, each with the experts in front.
        rows: (rows, hidden), sorted by expert.
        """
        act = _ACTIVATIONS[self.activation]
        inner = _linear("up", weights, rows, counts)
        inner = act(inner) if self.gate is None else act(_linear("gate", weights, rows, counts)) * inner
        return _linear("down", weights, inner, counts)

    def split_dims(self) -> dict[str, int]:
        """Dimension of each weight that tensor ranks split; a bias behind the sum is whole, and not listed."""
        first = [name for name, _ in self.named_parameters() if not name.startswith("down.")]
        return {**dict.fromkeys(first, 0), "down.weight": 1}


def _linear(name: str, weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int]) -> Tensor:
    return grouped_linear(rows, weights[f"{name}.weight"], counts, weights.get(f"{name}.bias"))
