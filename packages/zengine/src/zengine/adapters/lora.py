"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) on the linear layers of a module.

`add_lora` replaces a layer by one that holds the same frozen parameters under the same names, so checkpoints of the
plain model still fit, and two trained matrices: y = base(x) + scale * B (A x).

The matrices are parameters of the layer itself, so at ZeRO stage 3 weight and adapter are gathered together.
Rejected: two child layers, as in PEFT (a call and perhaps a gather more for each), and a wrapper around the layer
(which renames the base's parameters).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from zengine.adapters.config import DEFAULT_TARGETS, LoRAConfig
from zengine.adapters.update import Update
from zpartition import is_deferred

__all__ = ["LoRALinear", "add_lora", "is_target", "linear_layers", "put_lora", "replace_layer", "select_layers"]

_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # use the weights of their children as tensors


class LoRALinear(nn.Module):
    """A linear layer with a frozen weight and a trained update of low rank."""

    adapter_enabled = True  # False inside `adapters_disabled`

    def __init__(self, layer: nn.Module, rank: int, alpha: float, *, dropout: float = 0.0) -> None:
        """Adopt the parameters of `layer`, an nn.Linear or Transformers' Conv1D, and draw an update of zero."""
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor | None
        self.register_parameter("weight", layer.get_parameter("weight"))
        self.register_parameter("bias", getattr(layer, "bias", None))
        self.is_transposed = not isinstance(layer, nn.Linear)  # Conv1D has (in, out)
        rows, columns = self.weight.shape
        self.out_features, self.in_features = (columns, rows) if self.is_transposed else (rows, columns)
        own = vars(nn.Module()).keys()
        self._plain = type(layer), {name: value for name, value in vars(layer).items() if name not in own}
        self._add_update(rank, alpha, dropout, self.weight)
        self.train(layer.training)

    def _add_update(self, rank: int, alpha: float, dropout: float, like: Tensor) -> None:
        """Draw A (rank, in) as Hu et al. do; B (out, rank) is zero.  Beside weights of `zero.Init`: on the host."""
        device = torch.device("cpu") if is_deferred(self) else like.device
        self.lora_A = Parameter(like.new_empty(rank, self.in_features, device=device))
        self.lora_B = Parameter(like.new_zeros(self.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.rank, self.alpha, self.dropout = rank, alpha, dropout

    @property
    def scale(self) -> float:
        """Factor of the update."""
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features).  Returns (..., out_features) in the dtype of the base's product."""
        y = self.base(x)
        if not self.adapter_enabled:
            return y
        x = F.dropout(x, self.dropout, self.training).to(self.lora_A.dtype)
        return (y + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale).to(y.dtype)

    def base(self, x: Tensor) -> Tensor:
        """Compute the layer without its adapter."""
        if not self.is_transposed:
            return F.linear(x, self.weight, self.bias)
        bias = self.weight.new_zeros(self.out_features) if self.bias is None else self.bias
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.out_features)

    def base_weight(self) -> Tensor:
        """Return the frozen weight, (out, in)."""
        return self.weight.t() if self.is_transposed else self.weight

    def updates(self) -> list[Update]:
        """Return the update that the forward adds; none while the adapter is disabled."""
        return [Update(self.lora_A, self.lora_B, self.scale)] if self.adapter_enabled else []

    def plain_layer(self, weight: Tensor) -> nn.Module:
        """Return a layer of the kind that was adapted, with another weight, (out, in), and the same bias."""
        kind, attributes = self._plain
        made: nn.Module = kind.__new__(kind)
        nn.Module.__init__(made)
        vars(made).update(attributes)
        made.register_parameter("weight", Parameter(weight.t().contiguous() if self.is_transposed else weight))
        made.register_parameter("bias", self.bias)  # type: ignore[arg-type]
        return made.train(self.training)

    def extra_repr(self) -> str:
        """Return sizes and scale, for print(module)."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, scale={self.scale}"
        )


def add_lora(module: nn.Module, config: LoRAConfig, *, dropout: float = 0.0) -> list[str]:
    """Freeze `module` and add a trained adapter to the layers that `config.target_mods` names; return their names.

    Adds them before `initialize`.  A target is the end of a layer's path: "q_proj", "mlp.fc1", or a whole path.

    config: `lora_r`, `lora_alpha` and `target_mods` are used; adapters have the dtype of their layer.
    dropout: of the input of adapters, in training.

    Raises ValueError, before anything changes, for targets that name no linear layer, a rank larger than a matrix,
    and settings of the base, which ZeRO shards and offloads.
    """
    _check_settings(config)
    layers = select_layers(module, config.target_mods)
    for name, layer in layers:
        _check_rank(name, layer, config.lora_r)
    module.requires_grad_(False)
    for name, _ in layers:
        put_lora(module, name, config.lora_r, config.lora_alpha, dropout=dropout)
    return [name for name, _ in layers]


def put_lora(module: nn.Module, name: str, rank: int, alpha: float, *, dropout: float = 0.0) -> None:
    """Put a layer with an adapter in the place of the linear layer `name`."""
    layer = module.get_submodule(name)
    make: Callable[..., nn.Module] = getattr(layer, "with_lora", functools.partial(LoRALinear, layer))
    replace_layer(module, name, make(rank, alpha, dropout=dropout))


def replace_layer(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Put `layer` in the place `name` of `module`."""
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers that can have an adapter: nn.Linear, Transformers' Conv1D, quantized layers.

    Leaves out the layers of torch's own transformer blocks, which read their weights themselves.
    """
    fused = {id(child) for each in module.modules() if isinstance(each, _READERS) for child in each.children()}
    for name, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        is_conv1d = isinstance(weight, Tensor) and weight.dim() == 2 and getattr(layer, "nf", None) == weight.shape[1]
        if id(layer) not in fused and (type(layer) is nn.Linear or is_conv1d or hasattr(layer, "with_lora")):
            yield name, layer


def is_target(name: str, target: str) -> bool:
    """Return whether a layer's path ends with the target, at a dot."""
    return name == target or name.endswith(f".{target}")


def select_layers(module: nn.Module, targets: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the linear layers that `targets` name, in order of the module.  Raises ValueError for unknown targets.

    Of the default targets one is enough, since not every model has them all.
    """
    layers = [(name, layer) for name, layer in linear_layers(module) if name]
    names = [name for name, _ in layers]
    unknown = [target for target in targets if not any(is_target(name, target) for name in names)]
    if not targets or (unknown and (tuple(targets) != DEFAULT_TARGETS or len(unknown) == len(targets))):
        ends = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
        has_adapters = any(hasattr(each, "adapter_enabled") for each in module.modules())
        kinds = "linear layers without adapters" if has_adapters else "linear layers"
        raise ValueError(
            f"target_mods names {', '.join(map(repr, unknown)) or 'nothing'}, and {type(module).__name__} has no "
            f"such linear layer. Its {kinds}: {', '.join(ends or names[:8]) or 'none'}. A target is the end of a "
            f"path, such as {(names or ['fc'])[0]!r}."
        )
    return [(name, layer) for name, layer in layers if any(is_target(name, target) for target in targets)]


def _check_settings(config: LoRAConfig) -> None:
    if config.lora_r < 1:
        raise ValueError(f"lora_r is {config.lora_r}; a rank is at least 1")
    if config.base_weight_sharding != 1:
        raise ValueError(
            f"base_weight_sharding is {config.base_weight_sharding}: add_lora() leaves the base to ZeRO. Use 1 and "
            "zero_optimization.stage 3, which shards frozen weights, or deepspeed.linear.OptimizedLinear."
        )
    if config.offload or config.offload_ratio:
        raise ValueError(
            "offload of the base: set zero_optimization.offload_param at stage 3, not LoRAConfig.offload"
        )


def _check_rank(name: str, layer: nn.Module, rank: int) -> None:
    shape = _shape_of(layer)
    if rank > min(shape):
        raise ValueError(
            f"lora_r is {rank}, and {name} is {shape[0]} x {shape[1]} (out x in): a rank above {min(shape)} has more "
            "parameters than the matrix. Use a smaller lora_r, or leave the layer out of target_mods."
        )


def _shape_of(layer: nn.Module) -> tuple[int, int]:
    """Return (out, in)."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return int(layer.out_features), int(layer.in_features)  # type: ignore[arg-type]
    rows, columns = weight.shape
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)
