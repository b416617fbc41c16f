"""Random layer-token drop: middle layers see a random part of the tokens (Yao, Wu, Li, Holmes, He 2022).

Each of the named layers draws, for each sample, which tokens it works on; the others go around it unchanged.  The
number grows by a schedule until the layers see all, at which point a layer is called exactly as it would be without
this.

How a layer is called and what it returns is changed by two hooks on it, one before and one behind; the model keeps
its structure and the names of its parameters, and `close` takes the hooks away.  Rejected: a wrapper module in the
place of the layer, which renames every parameter of it in checkpoints.

- Tokens are drawn from torch's generator of the device, per layer, sample and rank, and sorted, so causal masks stay
  causal.  Checkpoints save the generator, and activation checkpointing replays it.
- What goes into the layer beside the hidden state is cut by the same tokens: the mask that the config names, along
  every axis that has the length of the sequence; other tensors of (batch or 1, sequence, ...), such as rotary
  positions, along that axis.  A layer that works the positions out by itself, from the length, would see others;
  give it the positions.
- In a pipeline the layers are those of one class, numbered over all stages, and each rank has its own among them.
- The number of tokens is a function of the engine's step counter.  The tokens that layers worked on are counted,
  and saved.
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

import zcomm
import zpartition
from zengine._compat import backward_number
from zengine.data.tree import map_tensors
from zengine.engine.feature import Feature
from zengine.engine.stages import is_staged

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
    """Makes the named layers skip tokens while the schedule says so."""

    name = "random_ltd"

    clock: Clock
    telemetry: TelemetrySlot
    layers: list[_TokenDrop]

    def __init__(self, plan: LtdPlan) -> None:
        self.plan = plan
        self.layers = []

    def attach(self, run: Run) -> None:
        """Find the layers.

        Raises:
            ValueError: the model has no list of as many layers, or several; a layer does not take the mask; or a
                layer of a pipeline is a function, or used in several places.
        """
        self.clock, self.telemetry = run.clock, run.parts.telemetry
        path, blocks = find_layers(run.module, self.plan.num_layers)
        _refuse_absent(path, self.plan.layer_ids, blocks, zpartition.pipeline_stages_of(run.module))
        mine = [blocks[place] for place in self.plan.layer_ids if place in blocks]
        for layer in mine[:1]:
            check_mask(layer, self.plan.mask_name)
        cutting = _Cutting(
            mask_name=self.plan.mask_name, is_causal=self.plan.is_causal, sequence_axis=self.plan.sequence_axis
        )
        self.layers = [_TokenDrop(layer, cutting, lambda: self.num_tokens) for layer in mine]
        if run.parts.world.rank == 0:
            schedule = self.plan.schedule
            log.info(
                "random-LTD: %d of the %d layers of %s see %d tokens at first, %d at the end",
                len(self.plan.layer_ids),
                self.plan.num_layers,
                path,
                schedule.at(0),
                schedule.high,
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample that the layers see in the step that is under way."""
        return self.plan.schedule.at(self.clock.steps)

    def step_end(self, report: StepReport) -> None:
        """Chart the tokens of the step that is over."""
        self.telemetry.write_events([("data/random_ltd_tokens", self.plan.schedule.at(report.step - 1), report.step)])

    def state_dict(self) -> Mapping[str, Any]:
        """Tokens that all named layers of this rank worked on so far; checkpoints hold rank 0's."""
        return {"layer_tokens": sum(layer.layer_tokens for layer in self.layers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """ValueError unless there is a count."""
        count = state.get("layer_tokens") if isinstance(state, Mapping) else None
        if type(count) is not int or count < 0:
            raise ValueError(f"layer_tokens = {count!r} must be a whole number of at least 0")

        def commit() -> None:
            for number, layer in enumerate(self.layers):  # a stage of a pipeline may have none
                layer.layer_tokens = 0 if number else count

        return commit

    def close(self) -> None:
        """The layers are as they were."""
        for layer in self.layers:
            layer.remove()


def find_layers(module: nn.Module, count: int) -> tuple[str, dict[int, nn.Module]]:
    """(path, layers by number) of the one list of `count` layers in `module`; of a pipeline those of this rank.

    Raises:
        ValueError: there is none, or more than one.
    """
    if is_staged(module):
        return _layers_of_a_pipeline(module, count)
    lists = [
        (name, part) for name, part in module.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))
    ]
    of_length = [(name, part) for name, part in lists if len(part) == count]
    fitting = [(name, part) for name, part in of_length if isinstance(part, nn.ModuleList)] or of_length
    if len(fitting) == 1:
        path, found = fitting[0]
        return path, dict(enumerate(found))
    there = ", ".join(f"{name or '(the model)'} ({len(part)})" for name, part in lists) or "none"
    raise ValueError(
        f"random_ltd.total_layer_num = {count}: the model has {len(fitting)} lists of {count} layers, and one is "
        f"needed. Its lists (nn.ModuleList, nn.Sequential) and their lengths: {there}"
    )


def _layers_of_a_pipeline(module: PipelineModule, count: int) -> tuple[str, dict[int, nn.Module]]:
    """Those of the one class of which the whole pipeline has `count` layers."""
    tally = Counter(module.class_names)
    fitting = [name for name, number in tally.items() if number == count]
    if len(fitting) != 1:
        there = ", ".join(f"{name} ({number})" for name, number in tally.items())
        raise ValueError(
            f"random_ltd.total_layer_num = {count}: the pipeline has {len(fitting)} classes of {count} layers, and "
            f"one is needed. Its classes, and how many layers they have: {there}"
        )
    places = [index for index, name in enumerate(module.class_names) if name == fitting[0]]
    own = [layer for layer in module.own_layers() if not any(layer is tied for tied in module.owned.values())]
    calls = {number: module.calls.get(index) for number, index in enumerate(places)}
    found = {number: call for number, call in calls.items() if isinstance(call, nn.Module) and call in own}
    return fitting[0], found


def _refuse_absent(
    path: str, wanted: Sequence[int], own: Mapping[int, nn.Module], stages: ModelParallelGroup
) -> None:
    """ValueError, on every rank of a pipeline, if none of them has a module of its own for a layer."""
    mine = sorted(set(wanted) & set(own))
    everywhere = [mine] if stages.size == 1 else zcomm.all_gather_object(mine, stages.group)
    absent = sorted(set(wanted) - {number for some in everywhere for number in some})
    if absent:
        raise ValueError(
            f"random_ltd.random_ltd_layer_id names layers {absent} of {path}, which are functions or TiedLayerSpecs: "
            "tokens can be left out of a module that is called in one place. Give a LayerSpec for each of them"
        )


def check_mask(layer: nn.Module, name: str) -> None:
    """ValueError unless `layer` takes a mask of that name; "" is none."""
    taken = inspect.signature(layer.forward).parameters
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    if name and name not in taken and not is_open:
        raise ValueError(
            f'random_ltd.model_mask_name = "{name}": {type(layer).__name__}.forward takes {", ".join(taken)}; '
            "name the one that is the attention mask, or leave the key out if there is none"
        )


@attrs.frozen(kw_only=True)
class _Cutting:
    """Cut of a layer's inputs."""

    mask_name: str
    is_causal: bool  # a mask that all samples share is a triangle, of which any sorted tokens see the corner
    sequence_axis: int  # of the hidden state; the batch is the other of the first two axes

    def choose(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """(batch, num_tokens) int64: sorted places of the tokens that were drawn, for each sample."""
        batch, length = hidden.shape[1 - self.sequence_axis], hidden.shape[self.sequence_axis]
        noise = torch.rand(batch, length, device=hidden.device)
        return noise.topk(num_tokens, dim=1).indices.sort(dim=1).values

    def part(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """The chosen tokens of a hidden state, in its order of axes."""
        return hidden.gather(self.sequence_axis, self._index(hidden, chosen))

    def whole(self, hidden: Tensor, chosen: Tensor, part: Tensor) -> Tensor:
        """`hidden` with the chosen tokens replaced by `part`."""
        return hidden.scatter(self.sequence_axis, self._index(hidden, chosen), part.to(hidden.dtype))

    def _index(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        index = chosen if self.sequence_axis == 1 else chosen.t()
        index = index.reshape(*index.shape, *[1] * (hidden.ndim - 2))
        return index.expand(*index.shape[:2], *hidden.shape[2:])

    def beside(self, value: Any, chosen: Tensor, length: int) -> Any:
        """Positions and the like: tensors of (batch or 1, sequence, ...), cut along the sequence."""
        batch = len(chosen)

        def cut(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[1] != length or tensor.shape[0] not in (1, batch):
                return tensor
            return _taken(tensor, 1, chosen)

        return map_tensors(value, cut)

    def mask(self, value: Any, chosen: Tensor, length: int) -> Any:
        """A mask (sequence, sequence) or (batch or 1, ..., sequence), cut along every axis of that length.

        One without a batch stays so where it is causal, and gets (batch, 1) in front where it is not.
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
                    tensor = _taken(tensor, axis, chosen)
            return tensor

        return map_tensors(value, cut)


def _taken(tensor: Tensor, axis: int, chosen: Tensor) -> Tensor:
    """Of a tensor of (batch or 1, ...) the chosen places along `axis`; the result has the batch."""
    tensor = tensor.expand(len(chosen), *tensor.shape[1:])
    shape = [len(chosen)] + [1] * (tensor.ndim - 1)
    shape[axis] = chosen.shape[1]
    sizes = list(tensor.shape)
    sizes[axis] = chosen.shape[1]
    return tensor.gather(axis, chosen.reshape(shape).expand(sizes))


@final
class _TokenDrop:
    """The two hooks on one layer.  Invariant: `_open` is empty unless the layer is running."""

    def __init__(self, layer: nn.Module, cutting: _Cutting, num_tokens: Callable[[], int]) -> None:
        self.num_tokens = num_tokens  # that the layer sees in the step under way
        self.layer_tokens = 0  # that it has worked on, without what was computed again
        self._cutting = cutting
        self._names = list(inspect.signature(layer.forward).parameters)  # of positional arguments
        self._open: list[tuple[Tensor, Tensor]] = []  # (whole hidden state, chosen tokens) of the call that runs
        self._handles: list[RemovableHandle] = [
            layer.register_forward_pre_hook(self._before, with_kwargs=True),
            layer.register_forward_hook(self._behind),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._open.clear()  # of a call that raised
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(hidden, Tensor) or hidden.ndim < 2:
            raise TypeError(
                f"random_ltd: the first argument of {type(layer).__name__} must be the hidden state, a tensor of "
                f"(batch, sequence, ...) or the other way round, and it is {type(hidden).__name__}"
            )
        length = hidden.shape[self._cutting.sequence_axis]
        if not layer.training:
            return None
        tokens = min(self.num_tokens(), length)
        drops = tokens < length
        self.layer_tokens += (backward_number() == 0) * tokens * hidden.shape[1 - self._cutting.sequence_axis]
        if not drops:
            return None
        chosen = self._cutting.choose(hidden, tokens)
        self._open.append((hidden, chosen))
        return self._cut(args, kwargs, hidden, chosen)

    def _cut(self, args: Any, kwargs: Any, hidden: Tensor, chosen: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cutting, length = self._cutting, hidden.shape[self._cutting.sequence_axis]
        part = cutting.part(hidden, chosen)

        def one(name: str, value: Any) -> Any:
            if value is hidden:
                return part
            cut = cutting.mask if name == cutting.mask_name else cutting.beside
            return cut(value, chosen, length)

        return (
            tuple(one(name, value) for name, value in zip_longest(self._names[: len(args)], args)),
            {name: one(name, value) for name, value in kwargs.items()},
        )

    def _behind(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._open:
            return None
        hidden, chosen = self._open.pop()
        if isinstance(output, tuple):
            return (self._cutting.whole(hidden, chosen, output[0]), *output[1:])
        if not isinstance(output, Tensor):
            raise TypeError(
                f"random_ltd: {type(layer).__name__} must return the hidden state, or a tuple that begins with it, "
                f"and it returned {type(output).__name__}"
            )
        return self._cutting.whole(hidden, chosen, output)
