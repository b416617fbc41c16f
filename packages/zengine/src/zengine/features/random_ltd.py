"""Random layer-token drop: middle layers process a random part of the tokens (Yao, Wu, Li, Holmes, He 2022).

Each named layer draws, for each sample, the tokens that it processes; the others bypass it unchanged.  Their number
grows by a schedule until the layers process all tokens, and from then on a layer is called as without this feature.

Two hooks on each layer, before and after it, change its inputs and outputs; the model keeps its structure and
parameter names, and `close` removes the hooks.  Rejected: a wrapper module in place of the layer, which renames all
its parameters in checkpoints.

- Tokens are drawn from torch's generator of the device, per layer, sample and rank, and sorted, so causal masks stay
  causal.  Checkpoints save the generator, and activation checkpointing replays it.
- Other inputs of the layer are indexed by the same tokens: the mask that the config names, along every axis with the
  length of the sequence; other tensors of (batch or 1, sequence, ...), such as rotary positions, along that axis.  A
  layer that computes positions from the length would get wrong ones; pass it the positions.
- In a pipeline the layers are those of one class, numbered over all stages; each rank hooks its own.
- The number of tokens is a function of the engine's step counter.  Processed tokens are counted and saved.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import zpartition
from zengine._compat import backward_number
from zengine.data.tree import map_tensors
from zengine.engine.feature import Feature
from zengine.features.named_layers import NamedLayers, own_layers
from zengine.imports import is_pipeline

if TYPE_CHECKING:
    from zengine.config.plan.data import LtdPlan
    from zengine.engine.clock import Clock
    from zengine.engine.parts import Run, TelemetrySlot
    from zengine.step_report import StepReport
    from zpartition import ModelParallelGroup
    from zpartition.pipeline import PipelineModule

log = logging.getLogger("zengine")


@final
class RandomLtd(Feature):
    """Makes the named layers skip tokens by the schedule."""

    name = "random_ltd"

    clock: Clock
    telemetry: TelemetrySlot
    layers: list[_TokenDrop]

    def __init__(self, plan: LtdPlan) -> None:
        self.plan = plan
        self.layers = []

    def attach(self, run: Run) -> None:
        """Find the layers and hook them.

        Raises:
            ValueError: not exactly one list of the model has that many layers; a layer does not take the mask; or a
                layer of a pipeline is a function, or is used in several places.
        """
        self.clock, self.telemetry = run.clock, run.parts.telemetry
        path, blocks = find_layers(run.module, self.plan.num_layers)
        named = NamedLayers(path=path, count=self.plan.num_layers, own=blocks)
        _check_layers_exist(named, self.plan.layer_ids, zpartition.pipeline_stages_of(run.module))
        own = [blocks[index] for index in self.plan.layer_ids if index in blocks]
        for layer in own[:1]:
            check_mask(layer, self.plan.mask_name)
        selection = _TokenSelection(
            mask_name=self.plan.mask_name, is_causal=self.plan.is_causal, sequence_axis=self.plan.sequence_axis
        )
        self.layers = [_TokenDrop(layer, selection, lambda: self.num_tokens) for layer in own]
        if run.parts.world.rank == 0:
            schedule = self.plan.schedule
            log.info(
                "random-LTD: %d of the %d layers of %s process %d tokens at first, %d at the end",
                len(self.plan.layer_ids),
                self.plan.num_layers,
                path,
                schedule.at(0),
                schedule.high,
            )

    @property
    def num_tokens(self) -> int:
        """Tokens per sample that the layers process in the running step."""
        return self.plan.schedule.at(self.clock.steps)

    def step_end(self, report: StepReport) -> None:
        """Chart the tokens of the finished step."""
        self.telemetry.write_events([("data/random_ltd_tokens", self.plan.schedule.at(report.step - 1), report.step)])

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number of tokens that this rank's named layers have processed; checkpoints hold rank 0's."""
        return {"layer_tokens": sum(layer.layer_tokens for layer in self.layers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check the count; return a function that restores it.  Raises ValueError."""
        count = state.get("layer_tokens") if isinstance(state, Mapping) else None
        if type(count) is not int or count < 0:
            raise ValueError(f"layer_tokens = {count!r} must be a whole number of at least 0")

        def commit() -> None:
            for number, layer in enumerate(self.layers):  # a stage of a pipeline may have no layer
                layer.layer_tokens = 0 if number else count

        return commit

    def close(self) -> None:
        """Remove the hooks."""
        for layer in self.layers:
            layer.remove()


def find_layers(module: nn.Module, count: int) -> tuple[str, dict[int, nn.Module]]:
    """Return path and layers by number of the one list of `count` layers; for a pipeline the layers of this rank.

    Raises:
        ValueError: there is no such list, or more than one.
    """
    if is_pipeline(module):
        return _find_pipeline_layers(module, count)
    lists = [
        (name, part) for name, part in module.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))
    ]
    of_length = [(name, part) for name, part in lists if len(part) == count]
    fitting = [(name, part) for name, part in of_length if isinstance(part, nn.ModuleList)] or of_length
    if len(fitting) == 1:
        path, found = fitting[0]
        return path, dict(enumerate(found))
    lengths = ", ".join(f"{name or '(the model)'} ({len(part)})" for name, part in lists) or "none"
    raise ValueError(
        f"random_ltd.total_layer_num = {count}: the model has {len(fitting)} lists of {count} layers, and one is "
        f"needed. Its lists (nn.ModuleList, nn.Sequential) and their lengths: {lengths}"
    )


def _find_pipeline_layers(module: PipelineModule, count: int) -> tuple[str, dict[int, nn.Module]]:
    """Return the layers of the one class of which the whole pipeline has `count` layers."""
    tally = Counter(module.class_names)
    fitting = [name for name, number in tally.items() if number == count]
    if len(fitting) != 1:
        counts = ", ".join(f"{name} ({number})" for name, number in tally.items())
        raise ValueError(
            f"random_ltd.total_layer_num = {count}: the pipeline has {len(fitting)} classes of {count} layers, and "
            f"one is needed. Its classes, and how many layers they have: {counts}"
        )
    places = [index for index, name in enumerate(module.class_names) if name == fitting[0]]
    return fitting[0], own_layers(module, places)


def _check_layers_exist(named: NamedLayers, wanted: Sequence[int], stages: ModelParallelGroup) -> None:
    """Raise ValueError on every rank of a pipeline if no stage has a module of its own for a layer."""
    absent = named.absent(stages, wanted)
    if absent:
        raise ValueError(
            f"random_ltd.random_ltd_layer_id names layers {absent} of {named.path}, which are functions or "
            "TiedLayerSpecs: "
            "only a module that is called in one place can skip tokens. Use a LayerSpec for each of them"
        )


def check_mask(layer: nn.Module, name: str) -> None:
    """Raise ValueError unless forward of `layer` takes a mask of that name; "" stands for no mask."""
    parameters = inspect.signature(layer.forward).parameters
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if name and name not in parameters and not is_open:
        raise ValueError(
            f'random_ltd.model_mask_name = "{name}": {type(layer).__name__}.forward takes {", ".join(parameters)}; '
            "name its attention mask, or leave the key out if there is none"
        )


@attrs.frozen(kw_only=True)
class _TokenSelection:
    """Selection of tokens from a layer's inputs."""

    mask_name: str
    is_causal: bool  # a shared mask is triangular: any sorted tokens use its corner
    sequence_axis: int  # of the hidden state; the batch is the other of the first two axes

    def choose(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """Draw tokens; return their sorted positions for each sample, (batch, num_tokens) int64."""
        batch, length = hidden.shape[1 - self.sequence_axis], hidden.shape[self.sequence_axis]
        noise = torch.rand(batch, length, device=hidden.device)
        return noise.topk(num_tokens, dim=1).indices.sort(dim=1).values

    def part(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Return the chosen tokens of a hidden state, in its order of axes."""
        return hidden.gather(self.sequence_axis, self._index(hidden, chosen))

    def whole(self, hidden: Tensor, chosen: Tensor, part: Tensor) -> Tensor:
        """Return `hidden` with the chosen tokens replaced by `part`."""
        return hidden.scatter(self.sequence_axis, self._index(hidden, chosen), part.to(hidden.dtype))

    def _index(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        index = chosen if self.sequence_axis == 1 else chosen.t()
        index = index.reshape(*index.shape, *[1] * (hidden.ndim - 2))
        return index.expand(*index.shape[:2], *hidden.shape[2:])

    def beside(self, value: Any, chosen: Tensor, length: int) -> Any:
        """Select from tensors of (batch or 1, sequence, ...), such as positions, along the sequence."""
        batch = len(chosen)

        def cut(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[1] != length or tensor.shape[0] not in (1, batch):
                return tensor
            return _gather_tokens(tensor, 1, chosen)

        return map_tensors(value, cut)

    def mask(self, value: Any, chosen: Tensor, length: int) -> Any:
        """Select from a mask (sequence, sequence) or (batch or 1, ..., sequence), along every axis of that length.

        A causal mask without a batch axis stays so; another one gets axes (batch, 1) in front.
        """
        batch, num_tokens = chosen.shape

        def cut(tensor: Tensor) -> Tensor:
            square = tensor.shape[-2:] == (length, length)
            if self.is_causal and square and tensor.shape[:-2].numel() == 1:
                return tensor[..., :num_tokens, :num_tokens]
            if tensor.ndim == 2 and square and batch != length:
                tensor = tensor[None, None]
            for axis in range(1, tensor.ndim):
                if tensor.shape[axis] == length and tensor.shape[0] in (1, batch):
                    tensor = _gather_tokens(tensor, axis, chosen)
            return tensor

        return map_tensors(value, cut)


def _gather_tokens(tensor: Tensor, axis: int, chosen: Tensor) -> Tensor:
    """Return the chosen positions along `axis` of a tensor of (batch or 1, ...); the result has the batch axis."""
    tensor = tensor.expand(len(chosen), *tensor.shape[1:])
    shape = [len(chosen)] + [1] * (tensor.ndim - 1)
    shape[axis] = chosen.shape[1]
    sizes = list(tensor.shape)
    sizes[axis] = chosen.shape[1]
    return tensor.gather(axis, chosen.reshape(shape).expand(sizes))


@final
class _TokenDrop:
    """Hooks on one layer.  Invariant: `_open` is empty unless the layer is running."""

    def __init__(self, layer: nn.Module, selection: _TokenSelection, num_tokens: Callable[[], int]) -> None:
        self.num_tokens = num_tokens  # of the running step
        self.layer_tokens = 0  # processed so far, without recomputation
        self._selection = selection
        self._names = list(inspect.signature(layer.forward).parameters)  # of positional arguments
        self._open: list[tuple[Tensor, Tensor]] = []  # (whole hidden state, chosen tokens) of the running call
        self._handles: list[RemovableHandle] = [
            layer.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            layer.register_forward_hook(self._after_forward),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._open.clear()  # of a call that raised
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(hidden, Tensor) or hidden.ndim < 2:
            raise TypeError(
                f"random_ltd: the first argument of {type(layer).__name__} must be the hidden state, a tensor of "
                f"(batch, sequence, ...) or (sequence, batch, ...), and it is {type(hidden).__name__}"
            )
        length = hidden.shape[self._selection.sequence_axis]
        if not layer.training:
            return None
        tokens = min(self.num_tokens(), length)
        drops = tokens < length
        self.layer_tokens += (backward_number() == 0) * tokens * hidden.shape[1 - self._selection.sequence_axis]
        if not drops:
            return None
        chosen = self._selection.choose(hidden, tokens)
        self._open.append((hidden, chosen))
        return self._select(args, kwargs, hidden, chosen)

    def _select(
        self, args: Any, kwargs: Any, hidden: Tensor, chosen: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        selection, length = self._selection, hidden.shape[self._selection.sequence_axis]
        part = selection.part(hidden, chosen)

        def one(name: str, value: Any) -> Any:
            if value is hidden:
                return part
            cut = selection.mask if name == selection.mask_name else selection.beside
            return cut(value, chosen, length)

        return (
            tuple(one(name, value) for name, value in zip_longest(self._names[: len(args)], args)),
            {name: one(name, value) for name, value in kwargs.items()},
        )

    def _after_forward(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._open:
            return None
        hidden, chosen = self._open.pop()
        if isinstance(output, tuple):
            return (self._selection.whole(hidden, chosen, output[0]), *output[1:])
        if not isinstance(output, Tensor):
            raise TypeError(
                f"random_ltd: {type(layer).__name__} must return the hidden state, or a tuple that begins with it, "
                f"and it returned {type(output).__name__}"
            )
        return self._selection.whole(hidden, chosen, output)
