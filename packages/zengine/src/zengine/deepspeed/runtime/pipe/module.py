"""`deepspeed.runtime.pipe.module`: zpartition's PipelineModule, with DeepSpeed's names for its layers and files.

`engine.save_checkpoint` does not write the files of `save_state_dict`; they are for scripts that move single layers.
"""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

import zpartition
from zengine.deepspeed.comm.world import get_rank, get_world_size
from zengine.deepspeed.runtime.activation_checkpointing import checkpointing
from zengine.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)
from zpartition import pipeline
from zpartition.pipeline import LayerSpec, PipelineError, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]


class PipelineModule(pipeline.PipelineModule):
    """The stages of this rank; see `zpartition.pipeline.PipelineModule`."""

    _grid: PipelineParallelGrid | None = None  # of `mpu()`, or of the engine; copies of the module have none

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_grid"}

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """Layers of this rank in order: modules, functions, and tied modules with their forward function."""
        return [call for _, call in sorted(self.calls.items())]

    @property
    def parts(self) -> list[int]:
        """First layer of each stage, and the number of layers."""
        return list(self.bounds)

    def partitions(self) -> list[int]:
        """Return `parts`."""
        return self.parts

    @property
    def stage_id(self) -> int:
        """Stage of this rank, from 0."""
        return self.pipeline_position.rank

    @property
    def _num_layers(self) -> int:
        return self.bounds[-1]

    @property
    def _local_start(self) -> int:
        return self.bounds[self.my_stages[0]]

    @property
    def _local_stop(self) -> int:
        return self.bounds[self.my_stages[-1] + 1]

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of a layer.  Raises AssertionError (DeepSpeed's) if there is no such layer."""
        assert 0 <= layer_idx < self._num_layers, f"layer {layer_idx} of {self._num_layers}"
        return self.stage_of(layer_idx)

    # -- ranks -----------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """Return the grid of ranks: the one given, or stages x replicas."""
        return self._topo

    def num_pipeline_stages(self) -> int:
        """Return the number of ranks along the pipeline."""
        return self.pipeline_position.num_ranks

    def mpu(self) -> PipelineParallelGrid:
        """Return the process groups of the grid, the engine's if there is one.

        The first call before an engine is a collective of all ranks.
        """
        if self._grid is None:
            self._grid = PipelineParallelGrid(topology=self._topo)
        return self._grid

    @functools.cached_property
    def _topo(self) -> ProcessTopology:
        if isinstance(self.given_topology, ProcessTopology):
            return self.given_topology
        stages = self.num_pipeline_stages()
        return PipeDataParallelTopology(num_pp=stages, num_dp=get_world_size() // stages)

    # -- recomputation ---------------------------------------------------------------------------

    @property
    def activation_checkpoint_interval(self) -> int:
        """Number of layers that are recomputed together in backward; 0: none."""
        return self.recompute_interval

    @activation_checkpoint_interval.setter
    def activation_checkpoint_interval(self, interval: int) -> None:
        self.set_checkpoint_interval(interval)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute runs of `interval` layers.  Raises AssertionError (DeepSpeed's) below 0."""
        assert interval >= 0, f"interval {interval} is below 0"
        self.recompute_interval = interval

    @property
    def activation_checkpoint_func(self) -> Callable[..., Any]:
        """Function (layers, input) -> output that recomputes."""
        return self.recompute

    @property
    def checkpointable_layers(self) -> list[str] | None:
        """Class names of layers that are recomputed; None: all."""
        return None if self.recomputed_classes is None else sorted(self.recomputed_classes)

    @property
    def is_checkpointable_results(self) -> list[bool]:
        """For each run of layers, `_is_checkpointable`."""
        funcs, step = self.forward_funcs, self.recompute_interval
        return (
            [self._is_checkpointable(funcs[start : start + step]) for start in range(0, len(funcs), step or 1)]
            if step
            else []
        )

    def _is_checkpointable(self, funcs: Sequence[Callable[[Any], Any]]) -> bool:
        """Return DeepSpeed's answer whether a run of layers is worth recomputing.

        True if all have a class in `checkpointable_layers`, or, without these, if any has parameters; of its GPT
        models' layers, transformer layers alone unless non_reentrant_checkpoint recomputes them.
        """
        names, listed = [type(each).__name__ for each in funcs], self.checkpointable_layers
        is_gpt = type(self).__name__ in ("GPTModelPipe", "GPT2ModelPipe")
        if is_gpt and self.activation_checkpoint_func is not checkpointing.non_reentrant_checkpoint:
            return all("ParallelTransformerLayerPipe" in name or name in (listed or ()) for name in names)
        if listed is not None:
            return all(name in listed for name in names)
        return any(isinstance(each, nn.Module) and next(each.parameters(), None) is not None for each in funcs)

    def get_additional_losses(self) -> dict[str, Any] | None:
        """Return None: a subclass may return losses to report beside the loss."""
        return None

    # -- files of layers -------------------------------------------------------------------------

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """Return the path that files of this rank begin with; equal on all replicas."""
        point, axes = self._topo.get_coord(get_rank()), self._topo.get_axis_names()
        name = "".join(f"-{axis}_{getattr(point, axis):02d}" for axis in axes if axis != "data")
        return os.path.join(checkpoints_path, str(tag), f"module{name}")

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Return the file of a layer of this rank, counted from its first one."""
        shown = self._topo.get_rank_repr(get_rank())
        name = f"layer_{local_layer_idx + self._local_start:02d}{'-' if shown else ''}{shown}-model_states.pt"
        return os.path.join(ckpt_dir, name)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Return the existing files of a layer, one for each tensor rank."""
        start = os.path.join(ckpt_dir, f"layer_{local_layer_idx + self._local_start:02d}-")
        return sorted(glob.glob(f"{glob.escape(start)}*model_states.pt"))

    def save_state_dict(self, save_dir: str, checkpoint_engine: Any, exclude_frozen_params: bool = False) -> None:
        """Write the layers of this rank, a file each, on the first replica; all ranks call.

        checkpoint_engine: a writer of single files, `engine.checkpoint_engine`.
        """
        checkpoint_engine.makedirs(save_dir, exist_ok=True)
        for index, layer in self._layers_with_state():
            frozen = {name for name, param in layer.named_parameters() if not param.requires_grad}
            with zpartition.gathered(layer):
                if self._topo.get_coord(get_rank()).data == 0:
                    state = {
                        name: value.detach().clone()
                        for name, value in layer.state_dict().items()
                        if not (exclude_frozen_params and name in frozen)
                    }
                    checkpoint_engine.save(state, self.ckpt_layer_path(save_dir, index))

    def load_state_dir(self, load_dir: str, checkpoint_engine: Any, strict: bool = True) -> None:
        """Load the layers of this rank from files of the same split over tensor ranks; all ranks call.

        Raises FileNotFoundError if a layer has no file for this rank.  `engine.load_checkpoint` reads any split.
        """
        for index, layer in self._layers_with_state():
            path = self.ckpt_layer_path(load_dir, index)
            if not os.path.exists(path):
                there = ", ".join(map(os.path.basename, self.ckpt_layer_path_list(load_dir, index)))
                raise FileNotFoundError(
                    f"{path} is missing (there: {there or 'no file of this layer'}); "
                    "engine.load_checkpoint() reads checkpoints of any split"
                )
            with zpartition.gathered(layer):
                layer.load_state_dict(checkpoint_engine.load(path, map_location="cpu"), strict=strict)

    def _layers_with_state(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield this rank's modules with their index; tied ones by their first use, on the rank that owns them."""
        seen: set[int] = set()
        own = {id(each) for each in self.own_layers()}
        for index, call in enumerate(self.forward_funcs):
            layer = call if isinstance(call, nn.Module) else getattr(call, "module", None)
            if isinstance(layer, nn.Module) and id(layer) in own and id(layer) not in seen:
                seen.add(id(layer))
                yield index, layer
