"""Adafactor (Shazeer and Stern 2018): factored second moments, for small state.

A matrix of rows x cols keeps rows + cols numbers instead of Adam's 2 * rows * cols.  The update is
torch.optim.Adafactor's: its users want small state, which a kernel would not improve.  This class adds grad_scale /
found_inf, checks of the options, and shards.

Adafactor needs whole matrices.  `place_segments` gives their positions in flat shards; the moments of all tensors of
a shard are then three flat tensors in the shard's state.  After `place_on_ranks` ranks sum the rows and columns of
matrices that are cut (shards/adafactor.py).  [Note: the host] a step reads found_inf on the host.

Rejected: the pure rule tensor by tensor (`adafactor_rule`), which is several times slower than torch's foreach code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoptim import _compat
from zoptim._compat import AdafactorLists
from zoptim.backends.signals import NO_SCALE, Signals, is_skipped, read_signals, signals_on
from zoptim.checks import number
from zoptim.errors import UnsupportedTensorError
from zoptim.optimizers.base import Params, check_lr
from zoptim.shards.adafactor import AdafactorShards, ShardPart
from zoptim.shards.ranks import Layout, Ranks, own_segments
from zoptim.shards.segments import Segment
from zoptim.states import portable

__all__ = ["Adafactor"]

_MOMENTS = ("row_var", "col_var", "variance")


class Adafactor(torch.optim.Adafactor):
    """torch.optim.Adafactor (Shazeer and Stern 2018) with grad_scale and found_inf: same arguments, same state.

    lr >= 0 bounds the relative step; beta2_decay <= 0; eps (None or number, number); d >= 1; weight_decay >= 0.
    A tensor lr is read on the host.  `grad_scale` and `found_inf` as in FlatOptimizer; `p.grad` is never written.

    State of a parameter: `step` () float32; `row_var` (..., rows, 1) and `col_var` (..., 1, cols) of a matrix;
    `variance` of a vector.  State of a flat shard: all three, concatenated over its tensors (all rows and columns of
    a cut matrix, the shard's part of a cut vector), and a `step` for each tensor.  Copies and pickles have no
    segments.

    Raises ValueError or TypeError naming the argument that is out of range, UnsupportedTensorError for complex
    parameters.
    """

    grad_scale: Tensor | None = NO_SCALE
    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True
    elementwise: ClassVar[bool] = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        self._segments: dict[Tensor, tuple[Segment, ...]] = {}
        self._shards: AdafactorShards | None = None
        check_adafactor({"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay})
        super().__init__(params, lr, beta2_decay, eps, d, weight_decay, foreach=foreach, maximize=maximize)

    def place_segments(self, segments: Mapping[Tensor, Sequence[Segment]]) -> None:
        """Set the positions of whole tensors in flat shards.  Call it before the first step and before loading.

        Segments of two or more dims are matrices (or stacks of them); elements outside of segments are padding and
        stay unchanged.

        Raises ValueError for segments that overlap or lie outside, for shards that are not parameters of this
        optimizer, and for state that does not fit the segments.
        """
        Segment.check_whole(segments)
        self._place_segments({shard: tuple(parts) for shard, parts in segments.items()})

    def place_on_ranks(self, segments: Layout, ranks: Ranks) -> None:
        """Set the cuts of tensors over `ranks`, see [Note: cut tensors] in ranks.py; each step makes two all-reduces.

        Raises ValueError as `place_segments` does.
        """
        self._place_segments(own_segments(segments, ranks))
        self._shards = AdafactorShards.make(segments, ranks)

    def new_state(self, shard: Tensor) -> dict[str, Tensor] | None:
        """Return the state of a shard with segments before its first update, zeros; None for other parameters."""
        return _first_state(shard, self._segments[shard]) if shard in self._segments else None

    def segment_states(self, shard: Tensor, state: Mapping[str, Tensor]) -> list[dict[str, Tensor]] | None:
        """Return views of a shard's `state`, one dict for each segment in order; None for a shard without segments.

        `row_var` and `col_var` of a matrix are whole and have their own shapes; `variance` of a vector is flat and
        covers the segment.
        """
        if shard not in self._segments:
            return None
        found = list(_parts(state, self._segments[shard]))
        return [{**part, "variance": part["variance"].view(-1)} if "variance" in part else part for part in found]

    def state_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """Return torch's state dict; with `compact`, the same tensors in a form that only zoptim loads."""
        found = super().state_dict()
        return portable.as_compact_dict(found) if compact else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of zoptim or torch.optim.

        Raises ValueError for state that does not fit; the optimizer is unchanged then.
        """
        super().load_state_dict(portable.as_torch_dict(state_dict, type(self).__name__))

    def portable_state(self, param: Tensor) -> dict[str, Any]:
        """Return the state of `param`; {} before the first update."""
        return dict(self.state.get(param, {}))

    def check_loaded_options(self, index: int, options: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError if group `index` cannot continue with `options` in place of its own."""
        _check_group({**self.param_groups[index], **options}, index, self.defaults)

    def check_portable_state(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Raise the ValueError that `load_portable_state` would raise; values are not read."""
        names = [self._name(*place) for place, other in self._parameters() if other is param]
        _check_state(state, param, self._segments.get(param), *names)

    def load_portable_state(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of `param` by `state`, in the parameter's dtype.

        Raises ValueError for state that does not fit; the optimizer is unchanged then.
        """
        self.check_portable_state(param, state)
        kinds = {key: torch.float32 if key == "step" else param.dtype for key in state}
        self.state[param] = {key: torch.as_tensor(value).to(kinds[key]) for key, value in state.items()}
        _expand_step(self.state[param], self._segments.get(param))

    def _place_segments(self, segments: dict[Tensor, tuple[Segment, ...]]) -> None:
        known = {id(param): self._name(*place) for place, param in self._parameters()}
        for shard, parts in segments.items():
            Segment.check(parts, shard)
            if id(shard) not in known:
                raise ValueError(f"a tensor of shape {tuple(shard.shape)} is not a parameter of this Adafactor.")
            _check_state(self.state.get(shard, {}), shard, parts, known[id(shard)])
        for shard, parts in segments.items():
            _expand_step(self.state.get(shard, {}), parts)
        self._segments, self._shards = segments, None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its options are checked like the constructor's.

        Raises ValueError or TypeError for them, and UnsupportedTensorError for complex parameters; the groups are
        unchanged then.
        """
        if isinstance(param_group, dict):
            check_adafactor({**self.defaults, **param_group})
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        for position, param in enumerate(self.param_groups[index]["params"]):
            if param.is_complex():
                name = self._name(index, position)
                self.param_groups.pop()
                raise UnsupportedTensorError(
                    f"{name} is complex ({param.dtype}); Adafactor accepts real tensors. "
                    "Train torch.view_as_real(parameter)."
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adopt loaded groups and state.  Raises ValueError if they do not fit; the optimizer is unchanged then."""
        previous = dict(self.__dict__)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("_segments", {})  # kept when state is loaded; a copy has none
        self.__dict__.setdefault("_shards", None)
        try:
            for index, group in enumerate(self.param_groups):
                _check_group(group, index, self.defaults)
            for place, param in self._parameters():
                _check_state(self.state.get(param, {}), param, self._segments.get(param), self._name(*place))
            for _, param in self._parameters():
                _expand_step(self.state.get(param, {}), self._segments.get(param))
        except (TypeError, ValueError):
            self.__dict__.update(previous)
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, unless found_inf is set; return the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        signals = read_signals(self.grad_scale, self.found_inf)
        if not is_skipped(signals):
            with torch.no_grad():
                for index, group in enumerate(self.param_groups):
                    self._update(index, group, signals)
                if self._shards is not None:
                    self._update_over_ranks(self._shards, signals)
        return loss

    def _update(self, index: int, group: Mapping[str, Any], signals: Signals) -> None:
        """Phases: check gradients, collect whole tensors and those in shards, update."""
        lists = AdafactorLists()
        for position, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            self._check(param, self._name(index, position))
            segments, state = self._segments.get(param), self.state[param]
            if not state:
                state.update(_first_state(param, segments))
            if self._shards is not None and segments is not None:
                continue
            grad = param.grad
            if signals.grad_scale is not None:
                grad = grad / signals_on(signals, grad.device).grad_scale
            if segments is None:
                lists.add(param, grad, state)
                continue
            for segment, part in zip(segments, _parts(state, segments)):
                row, shape = segment.row, segment.shape
                lists.add(param.detach()[row].view(shape), grad[row].view(shape), part)
        _compat.adafactor(group, lists)

    def _update_over_ranks(self, shards: AdafactorShards, signals: Signals) -> None:
        """Update all segments of all shards at once: they share the messages."""
        parts = []
        for index, group in enumerate(self.param_groups):
            for position, shard in enumerate(group["params"]):
                if shard in self._segments:
                    if shard.grad is None:
                        raise ValueError(
                            f"{self._name(index, position)} is a shard of cut tensors and has no gradient; the other "
                            "ranks would wait for it. Give every shard a gradient, of zeros if necessary."
                        )
                    self.state[shard]["step"] += 1
                    states = _parts(self.state[shard], self._segments[shard])
                    here = signals_on(signals, shard.device).grad_scale
                    parts += [ShardPart(s, group, shard, here, of) for s, of in zip(self._segments[shard], states)]
        shards.update(parts)

    def _check(self, param: Tensor, name: str) -> None:
        assert param.grad is not None
        if param.grad.layout is not torch.strided:
            raise UnsupportedTensorError(
                f"the gradient of {name} is sparse ({param.grad.layout}); Adafactor accepts dense ones. "
                "Build the embedding with sparse=False, or give its weights to torch.optim.SparseAdam."
            )
        if param not in self._segments and _is_of_shard(self.state.get(param, {})):
            raise ValueError(
                f"the state of {name} is that of a flat shard; give the positions of its tensors with place_segments."
            )

    def _parameters(self) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Yield ((group, position), parameter)."""
        for index, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]):
                yield (index, position), param

    def _name(self, index: int, position: int) -> str:
        names = self.param_groups[index].get("param_names")
        return f"parameter {position} of group {index}" + (f" ({names[position]!r})" if names else "")


def _first_state(param: Tensor, segments: Sequence[Segment] | None) -> dict[str, Tensor]:
    """Return zeros as torch makes them: the count is on the host."""
    zeros = {key: param.new_zeros(shape) for key, shape in _expected_shapes(param, segments).items()}
    return {"step": torch.zeros(() if segments is None else len(segments)), **zeros}


def _parts(state: Mapping[str, Tensor], segments: Sequence[Segment]) -> Iterator[dict[str, Tensor]]:
    """Yield the state of each tensor of a shard, as views of the shard's state."""
    ends = dict.fromkeys(_MOMENTS, 0)
    for segment, step in zip(segments, state["step"]):
        part = {"step": step}
        for key, shape in _shapes_in(segment).items():
            start, ends[key] = ends[key], ends[key] + math.prod(shape)
            part[key] = state[key].view(-1)[start : ends[key]].view(shape)
        yield part


def _expand_step(state: dict[str, Any], segments: Sequence[Segment] | None) -> None:
    """Replace the one count that states of older versions have by a count for each tensor of a shard."""
    if state and segments is not None and not state["step"].dim():
        state["step"] = state["step"].repeat(len(segments))


def _check_group(group: Mapping[str, Any], index: int, defaults: Mapping[str, Any]) -> None:
    # torch adds "differentiable" to the defaults when it loads.
    missing = [option for option in defaults if option not in group and option != "differentiable"]
    if missing:
        raise ValueError(
            f"the loaded group {index} lacks the options {', '.join(missing)} of Adafactor. It was written by "
            "another optimizer."
        )
    check_adafactor(group)


def _check_state(state: Mapping[str, Any], param: Tensor, segments: Sequence[Segment] | None, name: str) -> None:
    """Raise ValueError unless `state` is empty or fits `param`."""
    if segments is None and _is_of_shard(state):
        return  # of a shard whose segments are not set yet
    for key, shape in _expected_shapes(param, segments).items() if state else ():
        if key not in state:
            raise ValueError(f"the loaded state of {name} lacks {key}; it has {', '.join(state)}.")
        if state[key].shape != shape:
            owner = f"the parameter's {tuple(param.shape)}" if segments is None else "its segments"
            raise ValueError(
                f"{key} of {name} has shape {tuple(state[key].shape)}, but {shape} belongs to {owner}. "
                "Load the state of this model."
            )


def _is_of_shard(state: Mapping[str, Any]) -> bool:
    return all(key in state for key in _MOMENTS)


def _expected_shapes(param: Tensor, segments: Sequence[Segment] | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the moments of `param`."""
    if segments is None:
        return _shapes(tuple(param.shape))
    found = list(map(_shapes_in, segments))
    return {key: (sum(math.prod(shapes[key]) for shapes in found if key in shapes),) for key in _MOMENTS}


def _shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the moments of one tensor."""
    if len(shape) < 2:
        return {"variance": shape}
    *stack, rows, cols = shape
    return {"row_var": (*stack, rows, 1), "col_var": (*stack, 1, cols)}


def _shapes_in(segment: Segment) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the moments of a segment; those of a part of a vector cover the part."""
    return _shapes(segment.shape if segment.is_whole or len(segment.shape) > 1 else (segment.numel,))


def check_adafactor(options: Mapping[str, Any]) -> None:
    """Check the options of Adafactor."""
    check_lr(options["lr"])
    number("weight_decay", options["weight_decay"], 0)
    if number("beta2_decay", options["beta2_decay"]) > 0:
        raise ValueError(f"beta2_decay is {options['beta2_decay']!r}; it must be at most 0.")
    number("d", options["d"], 1)
    eps = options["eps"]
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise TypeError(f"eps is {eps!r}; it must be two numbers, such as (None, 1e-3).")
    for position, value in enumerate(eps):
        if position or value is not None:
            number(f"eps[{position}]", value, 0)
