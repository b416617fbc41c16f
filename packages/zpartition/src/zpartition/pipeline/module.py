"""A model partitioned into stages along its depth.

    PipelineModule([LayerSpec(Block, 64) for _ in range(8)] + [head], num_stages=2, loss_fn=cross_entropy)

Each rank holds the layers of its stages under the names of the whole model.  With one stage it is an ordinary module,
and the same code is its own reference.  Ranks of a stage are consecutive: with W ranks and S stages, stage s lies on
ranks s W/S to (s+1) W/S - 1 (DeepSpeed's order), which are replicas of each other.

Names are `layers.7.weight` and `tied.KEY.weight`, or those that `names` gives, so that a plain module's checkpoint
fits.

Tied layers belong to the first stage that uses them.  Other stages hold copies that are not their parameters: the
owner broadcasts the weights before a batch and reduces the copies' gradients after it, as one more backward.  So
every ZeRO stage treats tied weights as it treats all others, and a checkpoint holds them once.
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
from zpartition.layout.model_parallel import ALONE, ModelParallelGroup
from zpartition.pipeline.layers import Layer, TiedLayerSpec, build, class_name, key_of, weights_of
from zpartition.pipeline.partition_layers import partition_balanced

Loss = Callable[[Any, Any], torch.Tensor]
Around = Callable[[], AbstractContextManager[Any]]


class PipelineError(RuntimeError):
    """A pipeline does not support the call."""


@final
@attrs.frozen
class PipelinePosition:
    """Position of this process in the pipeline."""

    rank: int  # along the pipeline
    num_ranks: int

    @classmethod
    def here(cls, num_stages: int) -> PipelinePosition:
        """Derive the position from the world's ranks, also before it is initialized.

        Raises ValueError if the stages do not divide them.
        """
        detected = None if dist.is_initialized() else zcomm.detect()
        world = dist.get_world_size() if detected is None else detected.world_size
        if num_stages < 1 or world % num_stages:
            divisors = [str(number) for number in range(1, world + 1) if world % number == 0]
            raise ValueError(
                f"num_stages={num_stages} does not divide the {world} ranks of this run: choose one of "
                f"{', '.join(divisors)}, or start a multiple of {num_stages} ranks"
            )
        rank = dist.get_rank() if detected is None else detected.rank
        return cls(rank // (world // num_stages), num_stages)


class PipelineModule(nn.Module):
    """The stages of this rank.

    `layers` are modules, functions and specs; the output of one is the input of the next.
    """

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

        num_stages: ranks along the pipeline; alternatively `topology`, an object with `get_dim("pipe")`.
        loss_fn: (output of the last layer, labels) -> scalar.
        seed_layers: each layer has its own seed, base_seed + its index, and ranks build only their own layers.
        partition_method: parameters | uniform | type:REGEX | best.
        activation_checkpoint_interval: layers that are recomputed together in backward; 0: none.
        checkpointable_layers: class names; only runs of layers that hold one of them are recomputed.
        dynamic_shape: micro-batches differ in shape; each costs one more small message.
        stages_per_rank: more than one for interleaved schedules.
        names: path of each layer's module ("blocks.3"); a tied layer has the path of its first use.

        Raises ValueError (LayerPartitionError) if the stages do not fit the layers, the world or each other.
        """
        super().__init__()
        specs = list(layers)
        count = num_stages if num_stages is not None else topology.get_dim("pipe") if topology is not None else 1
        self.pipeline_position = PipelinePosition.here(count)
        _check_topology(self.pipeline_position, topology)
        self.given_topology = topology
        self.num_stages = count * stages_per_rank
        self.partition_method, self.seed_layers = partition_method, seed_layers
        self.bounds = partition_balanced(weights_of(specs, partition_method), self.num_stages)
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        self.recompute_interval = activation_checkpoint_interval
        self.recompute = activation_checkpoint_func or _checkpoint
        self.recomputed_classes = None if checkpointable_layers is None else set(checkpointable_layers)
        self.ties = Ties.of(specs, self.bounds)
        wanted = {index for stage in self.my_stages for index in range(self.bounds[stage], self.bounds[stage + 1])}
        seed = base_seed if seed_layers else None
        made = build(specs, wanted, seed=seed, seed_fn=seed_fn or torch.manual_seed)
        self._install(specs, made, _module_paths(specs, names))

    def stage_group(self) -> ModelParallelGroup:
        """The ranks with the other stages; see `zpartition.layout.model_parallel`."""
        return ALONE if self.pipeline_position.num_ranks == 1 else ModelParallelGroup.of(self.groups().pipeline())

    def groups(self) -> zcomm.Groups:
        """Process groups along the pipeline, and of the replicas of this rank's stages."""
        return zcomm.Groups.of(zcomm.Degrees(pipeline=self.pipeline_position.num_ranks))

    @property
    def my_stages(self) -> range:
        """Stages of this rank in model order."""
        return range(self.pipeline_position.rank, self.num_stages, self.pipeline_position.num_ranks)

    def stage_of(self, layer: int) -> int:
        """Return the stage of a layer."""
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if layer < stop)

    def _install(self, specs: Sequence[Layer], made: dict[int, Any], names: Sequence[str]) -> None:
        self.owned: dict[str, nn.Module] = {}  # tied modules of this one
        self.tied_copies: dict[str, nn.Module] = {}  # tied modules of other ranks: no parameters of this one
        self.calls: dict[int, Callable[[Any], Any]] = {}
        self.is_compiled = False
        self.class_names = [class_name(spec) for spec in specs]
        for index, module in sorted(made.items()):
            spec, key = specs[index], key_of(specs[index])
            if key and self.ties.owner[key] % self.pipeline_position.num_ranks != self.pipeline_position.rank:
                self.tied_copies[key] = module
            elif isinstance(module, nn.Module) and key not in self.owned:
                _add_module(self, names[index], module)
            if key in self.ties.owner and key not in self.tied_copies:
                self.owned[key] = module
            forward_fn = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
            self.calls[index] = module if forward_fn is None else _Bound(forward_fn, module)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layers of this rank in place, each by `torch.compile(layer, *args, **kwargs)`.

        Names, state dicts and hooks stay.  Under an engine `engine.compile()` is the same, and undone by its `close`.
        """
        compiled: set[int] = set()
        for index, call in self.calls.items():
            if not isinstance(call, nn.Module):
                function = call.__call__ if isinstance(call, _Bound) else call
                self.calls[index] = torch.compile(function, *args, **kwargs)
            elif id(call) not in compiled:
                call.forward = torch.compile(call.forward, *args, **kwargs)
                compiled.add(id(call))
        self.is_compiled = True

    def own_layers(self) -> list[nn.Module]:
        """Modules among this rank's layers in order, each once, without tied copies of other ranks' modules."""
        found = [call for _, call in sorted(self.calls.items()) if isinstance(call, nn.Module)]
        copies = list(self.tied_copies.values())
        return [each for each in dict.fromkeys(found) if not any(each is other for other in copies)]

    def train(self, mode: bool = True) -> PipelineModule:
        """Set the mode, also of tied copies."""
        super().train(mode)
        for module in self.tied_copies.values():
            module.train(mode)
        return self

    def run(self, stage: int, value: Any, around: Around = contextlib.nullcontext) -> Any:
        """Run one of this rank's stages; `around` is entered whenever layers run, also in recomputation."""
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
        """Run one stage, as `run`; without a number the whole model, if one rank holds all stages.

        Raises PipelineError without a number if other ranks hold stages.
        """
        if stage >= 0:
            return self.run(stage, value, around)
        if self.pipeline_position.num_ranks > 1:
            raise PipelineError(
                f"this rank holds stages {list(self.my_stages)} of {self.num_stages}, so forward() cannot run the "
                "model. Train with train_batch(), evaluate with eval_batch()"
            )
        for each in self.my_stages:
            value = self.run(each, value)
        return value


def _check_topology(position: PipelinePosition, topology: Any) -> None:
    """Check that ranks of a stage are consecutive.  Raises ValueError for a topology with another order."""
    if position.num_ranks == 1 or not hasattr(topology, "get_coord"):
        return
    rank = dist.get_rank() if dist.is_initialized() else zcomm.detect().rank
    if topology.get_coord(rank).pipe != position.rank:
        raise ValueError(
            f"the topology {topology} puts rank {rank} at stage {topology.get_coord(rank).pipe}, but it holds stage "
            f"{position.rank}: ranks of a stage must be consecutive; make pipe the first axis"
        )


def _module_paths(specs: Sequence[Layer], given: Sequence[str]) -> list[str]:
    """Return the path of each layer's module."""
    if given and len(given) != len(specs):
        raise ValueError(f"names= has {len(given)} names for {len(specs)} layers: give one for each layer")
    first: dict[str, int] = {}
    for index, spec in enumerate(specs):
        first.setdefault(key_of(spec) or f"{index}", index)
    places = [first[key_of(spec)] if key_of(spec) else index for index, spec in enumerate(specs)]
    defaults = [f"tied.{key_of(spec)}" if key_of(spec) else f"layers.{index}" for index, spec in enumerate(specs)]
    return [given[position] if given else defaults[index] for index, position in enumerate(places)]


def _add_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Add `module` to `root` at `path`."""
    *folders, last = path.split(".")
    if hasattr(root, path.split(".")[0]) and path.split(".")[0] not in root._modules:
        raise ValueError(f"names= has {path!r}, which is an attribute of PipelineModule: choose another name")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.ModuleDict())
        root = root.get_submodule(folder)
    if last in root._modules:
        raise ValueError(f"names= gives {path!r} to two layers: each layer needs its own path")
    root.add_module(last, module)


@final
@attrs.frozen
class Ties:
    """Stages that use a tied layer, and the one that owns it."""

    owner: dict[str, int]  # key -> the first stage that uses it
    users: dict[str, tuple[int, ...]]  # key -> all stages that use it, sorted

    @classmethod
    def of(cls, layers: Sequence[Layer], bounds: Sequence[int]) -> Ties:
        """Build from the layers and the stage bounds."""
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
    """A tied layer with the forward function of one of its uses."""

    forward_fn: Callable[[nn.Module, Any], Any]
    module: nn.Module

    def __call__(self, value: Any) -> Any:
        return self.forward_fn(self.module, value)


@final
@attrs.frozen
class _Chain:
    """A sequence of layers."""

    calls: Sequence[Callable[[Any], Any]]
    around: Around

    def __call__(self, value: Any) -> Any:
        with self.around():
            for call in self.calls:
                value = call(value)
        return value


def _checkpoint(chain: Callable[[Any], Any], value: Any) -> Any:
    return checkpoint(chain, value, use_reentrant=False)
