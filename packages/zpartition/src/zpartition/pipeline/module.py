"""A model cut into stages along its depth.

    PipelineModule([LayerSpec(Block, 64) for _ in range(8)] + [head], num_stages=2, loss_fn=cross_entropy)

Each rank holds the layers of its stages under the names of the whole model.  With one stage it is an ordinary
module, and the same code is its own oracle.  Ranks of a stage are neighbours: with W ranks and S stages, stage s lies
on ranks s W/S to (s+1) W/S - 1 (DeepSpeed's order), which are replicas of each other.

Names are `layers.7.weight` and `tied.KEY.weight`, or what `names` says, so that a plain module's checkpoint fits.

Tied layers belong to the first stage that uses them.  Another stage has a copy that is no parameter of its own: the
owner sends the weights before a batch and takes the copy's gradients after it, as if they were one more backward, so
that every ZeRO stage treats them as it treats all others, and a checkpoint holds them once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from zpartition.cells import ALONE, Cell

from .cutting import cut
from .layers import Layer, TiedLayerSpec, build, class_name, key_of, weights_of

Loss = Callable[[Any, Any], torch.Tensor]
Around = Callable[[], AbstractContextManager[Any]]


class PipelineError(RuntimeError):
    """A pipeline is asked for what its parts cannot do by themselves."""


@final
@attrs.frozen
class Place:
    """Where this process stands in the pipeline."""

    rank: int  # along the pipeline
    num_ranks: int

    @classmethod
    def here(cls, num_stages: int) -> Place:
        """By the world's ranks, or those that will be.  ValueError if the stages do not divide them."""
        told = None if dist.is_initialized() else zcomm.detect()
        world = dist.get_world_size() if told is None else told.world_size
        if num_stages < 1 or world % num_stages:
            divisors = [str(number) for number in range(1, world + 1) if world % number == 0]
            raise ValueError(
                f"num_stages={num_stages} does not divide the {world} ranks of this run: choose one of "
                f"{', '.join(divisors)}, or start a multiple of {num_stages} ranks"
            )
        rank = dist.get_rank() if told is None else told.rank
        return cls(rank // (world // num_stages), num_stages)


class PipelineModule(nn.Module):
    """The stages of this rank.  `layers` are modules, functions and specs; what one returns the next gets."""

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Loss | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        stages_per_rank: int = 1,
        names: Sequence[str] = (),
    ) -> None:
        """Build this rank's part.

        num_stages: ranks along the pipeline; or `topology`, an object with `get_dim("pipe")`.
        loss_fn: (output of the last layer, labels) -> scalar.
        seed_layers: each layer has a seed of its own, base_seed + its index, and ranks build only their own layers.
        partition_method: parameters | uniform | type:REGEX | best.
        activation_checkpoint_interval: layers that are recomputed together in backward; 0: none.
        checkpointable_layers: names of classes; only runs of layers that hold one are recomputed.
        dynamic_shape: micro-batches differ in shape; costs a small message more for each.
        stages_per_rank: more than one for interleaved schedules.
        names: for each layer the path of its module ("blocks.3"); a tied one has that of its first place.

        Raises ValueError (CutError) for stages that do not fit the layers, the world or each other.
        """
        super().__init__()
        specs = list(layers)
        count = num_stages if num_stages is not None else topology.get_dim("pipe") if topology is not None else 1
        self.place = Place.here(count)
        _refuse_elsewhere(self.place, topology)
        self.num_stages = count * stages_per_rank
        self.partition_method, self.seed_layers = partition_method, seed_layers
        self.bounds = cut(weights_of(specs, partition_method), self.num_stages)
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        self.recompute_interval = activation_checkpoint_interval
        self.recompute = activation_checkpoint_func or _recompute
        self.recomputed_classes = None if checkpointable_layers is None else set(checkpointable_layers)
        self.ties = Ties.of(specs, self.bounds)
        wanted = {index for stage in self.my_stages for index in range(self.bounds[stage], self.bounds[stage + 1])}
        seed = base_seed if seed_layers else None
        made = build(specs, wanted, seed=seed, seed_fn=seed_fn or torch.manual_seed)
        self._install(specs, made, _names(specs, names))

    def stage_cell(self) -> Cell:
        """The ranks with the other stages; see `zpartition.cells`."""
        return ALONE if self.place.num_ranks == 1 else Cell.of(self.groups().pipeline())

    def groups(self) -> zcomm.Groups:
        """Who is beside this rank along the pipeline, and who holds the same stages."""
        return zcomm.Groups.of(zcomm.Degrees(pipeline=self.place.num_ranks))

    @property
    def my_stages(self) -> range:
        """Stages of this rank in the order of the model."""
        return range(self.place.rank, self.num_stages, self.place.num_ranks)

    def stage_of(self, layer: int) -> int:
        """The stage that a layer belongs to."""
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if layer < stop)

    def _install(self, specs: Sequence[Layer], made: dict[int, Any], names: Sequence[str]) -> None:
        self.owned: dict[str, nn.Module] = {}  # tied modules of this one
        self.borrowed: dict[str, nn.Module] = {}  # tied modules of other ranks: no parameters of this one
        self.calls: dict[int, Callable[[Any], Any]] = {}
        self.class_names = [class_name(spec) for spec in specs]
        for index, module in sorted(made.items()):
            spec, key = specs[index], key_of(specs[index])
            if key and self.ties.owner[key] % self.place.num_ranks != self.place.rank:
                self.borrowed[key] = module
            elif isinstance(module, nn.Module) and key not in self.owned:
                _place(self, names[index], module)
            if key in self.ties.owner and key not in self.borrowed:
                self.owned[key] = module
            forward_fn = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
            self.calls[index] = module if forward_fn is None else _Bound(forward_fn, module)

    def own_layers(self) -> list[nn.Module]:
        """The modules among this rank's layers in their order, each once, without those of other ranks."""
        found = [call for _, call in sorted(self.calls.items()) if isinstance(call, nn.Module)]
        borrowed = list(self.borrowed.values())
        return [each for each in dict.fromkeys(found) if not any(each is other for other in borrowed)]

    def train(self, mode: bool = True) -> PipelineModule:
        """As any module, with what is borrowed."""
        super().train(mode)
        for module in self.borrowed.values():
            module.train(mode)
        return self

    def run(self, stage: int, value: Any, around: Around = contextlib.nullcontext) -> Any:
        """The output of one of this rank's stages; `around` is entered whenever layers run, recomputed ones too."""
        start, stop = self.bounds[stage : stage + 2]
        step = self.recompute_interval or stop - start
        for first in range(start, stop, step):
            calls = [self.calls[index] for index in range(first, min(first + step, stop))]
            names = {self.class_names[index] for index in range(first, min(first + step, stop))}
            is_wanted = self.recomputed_classes is None or bool(names & self.recomputed_classes)
            if self.recompute_interval and is_wanted and torch.is_grad_enabled():
                value = self.recompute(_Chain(calls, around), value)
            else:
                value = _Chain(calls, around)(value)
        return value

    def forward(self, value: Any, stage: int = -1, around: Around = contextlib.nullcontext) -> Any:
        """One stage, as `run`; without a number the whole model, where one rank has all of it."""
        if stage >= 0:
            return self.run(stage, value, around)
        if self.place.num_ranks > 1:
            raise PipelineError(
                f"this rank holds stages {list(self.my_stages)} of {self.num_stages}: forward() of a part is no "
                "model. Train with train_batch(), evaluate with eval_batch()"
            )
        for each in self.my_stages:
            value = self.run(each, value)
        return value


def _refuse_elsewhere(place: Place, topology: Any) -> None:
    """Stages are runs of neighbours here; ValueError for a topology that lays them out otherwise."""
    if place.num_ranks == 1 or not hasattr(topology, "get_coord"):
        return
    rank = dist.get_rank() if dist.is_initialized() else zcomm.detect().rank
    if topology.get_coord(rank).pipe != place.rank:
        raise ValueError(
            f"the topology {topology} puts rank {rank} at stage {topology.get_coord(rank).pipe}, and it holds stage "
            f"{place.rank}: ranks of a stage are neighbours, so make pipe the first axis"
        )


def _names(specs: Sequence[Layer], given: Sequence[str]) -> list[str]:
    """The path of each layer's module."""
    if given and len(given) != len(specs):
        raise ValueError(f"names= has {len(given)} for {len(specs)} layers: give one for each")
    first: dict[str, int] = {}
    for index, spec in enumerate(specs):
        first.setdefault(key_of(spec) or f"{index}", index)
    places = [first[key_of(spec)] if key_of(spec) else index for index, spec in enumerate(specs)]
    defaults = [f"tied.{key_of(spec)}" if key_of(spec) else f"layers.{index}" for index, spec in enumerate(specs)]
    return [given[place] if given else defaults[index] for index, place in enumerate(places)]


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Make `module` the descendant of `root` at `path`."""
    *folders, last = path.split(".")
    if hasattr(root, path.split(".")[0]) and path.split(".")[0] not in root._modules:
        raise ValueError(f"names= has {path!r}: a PipelineModule has an attribute of that name already")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.ModuleDict())
        root = root.get_submodule(folder)
    if last in root._modules:
        raise ValueError(f"names= gives {path!r} to two layers: each module has a path of its own")
    root.add_module(last, module)


@final
@attrs.frozen
class Ties:
    """Which stages use a tied layer, and which of them owns it."""

    owner: dict[str, int]  # key -> the first stage that uses it
    users: dict[str, tuple[int, ...]]  # key -> all stages that use it, sorted

    @classmethod
    def of(cls, layers: Sequence[Layer], bounds: Sequence[int]) -> Ties:
        """From the layers and where stages begin."""
        users: dict[str, set[int]] = {}
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
            for layer in layers[start:stop]:
                if key_of(layer):
                    users.setdefault(key_of(layer), set()).add(stage)
        return cls(
            owner={key: min(stages) for key, stages in users.items()},
            users={key: tuple(sorted(stages)) for key, stages in users.items()},
        )


@final
@attrs.frozen
class _Bound:
    """A tied layer as one of its places uses it."""

    forward_fn: Callable[[nn.Module, Any], Any]
    module: nn.Module

    def __call__(self, value: Any) -> Any:
        return self.forward_fn(self.module, value)


@final
@attrs.frozen
class _Chain:
    """Layers one after the other."""

    calls: Sequence[Callable[[Any], Any]]
    around: Around

    def __call__(self, value: Any) -> Any:
        with self.around():
            for call in self.calls:
                value = call(value)
        return value


def _recompute(chain: Callable[[Any], Any], value: Any) -> Any:
    return checkpoint(chain, value, use_reentrant=False)
