"""Muon (Jordan et al. 2024): matrices step along their orthogonalised momentum, everything else takes AdamW.

A momentum matrix is replaced by the nearest (semi-)orthogonal one, found by a few Newton-Schulz iterations: matrix
products only.  Matrices of one shape go through them together, one batched product for all the equal layers of a
model.

Which parameters are matrices is a rule that the user can replace.  The default: two or more dims, unless the name
says embedding or output head, whose rows are looked up one by one.  Each parameter group is split by the rule when it
is added, so every option can still be set per half (`group["use_muon"]` tells them apart).

Muon looks at whole matrices.  On flat shards `lay_out` says where they lie; a matrix that is cut over ranks has to be
gathered first.  [Note: the host] a Muon step reads found_inf on the host; its AdamW half does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import formats
from ._compat import Signals
from .adam import Adam
from .checks import check_muon
from .contract import Params
from .memory import STEP, Memory
from .plan import Batch, Entry, Path
from .segments import Segment
from .signals import is_skipped

__all__ = ["Muon", "is_matrix", "muon_rule", "orthogonalize"]

_COEFFICIENTS = (3.4445, -4.775, 2.0315)  # Jordan et al. 2024: the steepest slope at 0 of a quintic
_BUFFER = "momentum_buffer"


def is_matrix(name: str, param: Tensor) -> bool:
    """The default rule: two or more dims, and no embedding or output head by name."""
    return param.dim() >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))


def orthogonalize(matrices: Tensor, steps: int = 5, method: str = "standard") -> Tensor:
    """Matrices (..., rows, cols) with all singular values near 1 (0.7 to 1.2), and the same singular vectors.

    Newton-Schulz with the quintic of Jordan et al. 2024.  "gram" iterates on the smaller Gram matrix and multiplies
    by the matrix once at the end: fewer operations where one side is much longer.
    """
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    gram = x @ x.mT
    if method == "gram":
        eye = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
        total = eye.expand_as(gram)
        for _ in range(steps):
            factor = a * eye + b * gram + c * (gram @ gram)
            total = factor @ total
            gram = factor @ gram @ factor
        x = total @ x
    else:
        for step in range(steps):
            gram = x @ x.mT if step else gram
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if tall else x
    return result


def muon_rule(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor,
    *,
    lr: float = 1e-3,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_method: str = "standard",
    adjust_lr: str = "original",
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Muon on one matrix (or several of one shape, stacked in front): the new weight and the new momentum.

    adjust_lr "original" scales by sqrt(max(1, rows / cols)) (Jordan et al. 2024), "match_rms_adamw" by
    0.2 * sqrt(max(rows, cols)) (Liu et al. 2025).
    """
    grad = -grad if maximize else grad
    buffer = momentum * buffer + (1 - momentum) * grad
    direction = (1 - momentum) * grad + momentum * buffer if nesterov else buffer
    rows, cols = param.shape[-2:]
    ratio = math.sqrt(max(1, rows / cols)) if adjust_lr == "original" else 0.2 * math.sqrt(max(rows, cols))
    moved = orthogonalize(_compute(direction), ns_steps, ns_method).to(param.dtype)
    return param * (1 - lr * weight_decay) - lr * ratio * moved, buffer


class Muon(Adam):
    """Muon for matrices, AdamW for the rest.

    lr >= 0, for both unless `muon_lr` or `adam_lr` says otherwise; momentum in [0, 1); weight_decay >= 0, decoupled;
    `ns_steps` Newton-Schulz iterations by `ns_method` "standard" or "gram"; `adjust_lr` "original" or
    "match_rms_adamw"; betas and eps of the AdamW half.  `use_muon(name, parameter)` decides; pass named parameters
    (`model.named_parameters()`) for names, else they are "".  For `state_dtype`, `split_master`, `fused` and
    `foreach` see FlatOptimizer.

    State: `momentum_buffer` of a matrix; of the others, Adam's.

    Raises ValueError or TypeError naming the argument that is out of range.
    """

    elementwise: ClassVar[bool] = False
    _absent_options: ClassVar[Mapping[str, Any]] = {**Adam._absent_options, "use_muon": False}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        nesterov: bool = True,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ns_steps: int = 5,
        ns_method: str = "standard",
        adjust_lr: str = "original",
        use_muon: Callable[[str, Tensor], bool] = is_matrix,
        state_dtype: torch.dtype | str | None = None,
        split_master: bool = False,
    ) -> None:
        self._is_matrix = use_muon
        self._rates = {True: muon_lr, False: adam_lr}
        self._muon_options = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_method": ns_method,
            "adjust_lr": adjust_lr,
            "use_muon": False,
        }
        self._segments: dict[Tensor, tuple[Segment, ...]] = {}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            decoupled_weight_decay=True,
            state_dtype=state_dtype,
            split_master=split_master,
        )

    def lay_out(self, segments: Mapping[Tensor, Sequence[Segment]]) -> None:
        """Say which tensors lie whole in flat shards, which are parameters of a group with `use_muon=True`.

        Segments of two or more dims are matrices.  ValueError for segments that overlap or lie outside.
        """
        for shard, parts in segments.items():
            Segment.check(parts, shard)
            for part in parts:
                if len(part.shape) < 2:
                    raise ValueError(f"{part} is no matrix; give it to a group with use_muon=False.")
        self._segments = {shard: tuple(parts) for shard, parts in segments.items()}
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, split by the rule into matrices and the rest unless it says `use_muon` itself.

        Raises what Adam raises.
        """
        for name, value in self._muon_options.items():
            self.defaults.setdefault(name, value)
        if not isinstance(param_group, dict) or "use_muon" in param_group:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        items = [given] if isinstance(given, Tensor) else list(given)
        pairs = [item if isinstance(item, tuple) else ("", item) for item in items]
        for wanted in (True, False):
            chosen = [item for item, (name, param) in zip(items, pairs) if self._is_matrix(name, param) is wanted]
            if chosen:
                rate = {} if (lr := self._rates[wanted]) is None else {"lr": lr}
                super().add_param_group({**rate, **param_group, "params": chosen, "use_muon": wanted})

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        check_muon({**self._muon_options, **options})

    def _memory(self, group: Mapping[str, Any]) -> Memory:
        return self._memory_of(group, (_BUFFER,), counts=False) if group["use_muon"] else super()._memory(group)

    def _path_of(self, index: int, entry: Entry) -> Path:
        return Path.TORCH if self.param_groups[index]["use_muon"] else super()._path_of(index, entry)

    def _rows(self, index: int, entry: Entry) -> Iterator[Entry]:
        for part in self._segments.get(entry.param, ()):
            yield entry.at(part.row, part.index, part.shape)
        if entry.param not in self._segments:
            yield entry

    def _update(self, group: Mapping[str, Any], batch: Batch, signals: Signals) -> None:
        if not group["use_muon"]:
            super()._update(group, batch, signals)
        elif not is_skipped(signals):
            alike: dict[Any, list[Entry]] = {}
            for entry in batch.entries:
                alike.setdefault(_matrix_shape(entry.param), []).append(entry)
            for shape, entries in alike.items():
                self._update_alike(group, shape, entries, signals)

    def _update_alike(
        self, group: Mapping[str, Any], shape: tuple[int, int], entries: list[Entry], signals: Signals
    ) -> None:
        """Matrices of one shape, stacked."""
        memory = self._memory(group)

        def stack(tensors: Iterator[Tensor]) -> Tensor:
            return torch.stack([tensor.reshape(shape) for tensor in tensors])

        weight = stack(memory.read_weight(entry.param, entry.state) for entry in entries)
        grad = stack(entry.grad.to(weight.dtype) for entry in entries)
        if signals.grad_scale is not None:
            grad = grad / signals.grad_scale.to(grad.dtype)
        options = {name: group[name] for name in ("momentum", "weight_decay", "nesterov", "maximize")}
        options |= {name: group[name] for name in ("ns_steps", "ns_method", "adjust_lr")}
        buffer = stack(memory.read(entry.state, _BUFFER) for entry in entries)
        new, buffer = muon_rule(weight, grad, buffer, lr=float(group["lr"]), **options)
        for entry, weight, moment in zip(entries, new, buffer):
            count = entry.state.get(STEP)
            step = 1 if count is None else int(count) + 1
            memory.write(entry.state, _BUFFER, moment.view(entry.param.shape), formats.seed_of(step, 1))
            memory.write_weight(entry.param, entry.state, weight.view(entry.param.shape), formats.seed_of(step, 0))
            if entry.copy is not None:
                entry.copy.detach().copy_(weight.view(entry.param.shape))
        for count in {id(e.state[STEP]): e.state[STEP] for e in entries if STEP in e.state}.values():
            count += 1


def _compute(matrices: Tensor) -> Tensor:
    """bf16 on accelerators, where the products run; float32 (or wider) elsewhere."""
    return matrices.bfloat16() if matrices.is_cuda else matrices


def _matrix_shape(param: Tensor) -> tuple[int, int]:
    return param.size(0), param.numel() // max(1, param.size(0))
