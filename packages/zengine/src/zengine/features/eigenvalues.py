"""Eigenvalues of blocks: how curved the loss is in each layer of a list (zprecision's power iteration).

At the boundaries of every `gas_boundary_resolution`-th step, before the backward of its last micro-step, each block's
Hessian of that micro-step's loss, averaged over the ranks, gets its eigenvalue of the largest magnitude.  What users
see is relative: |value| / max |values|, so 1.0 for the most curved block, and 1.0 for one whose value is unknown (0,
or not finite in fp16), as with DeepSpeed.  If all are unknown, the earlier values stay.

- The products with the Hessian are second backwards through the graph of the loss.  So the caller's loop stays as it
  is, at every ZeRO stage: stage 3 gathers units as in a backward, and the graph holds a copy of each weight until the
  values are known, which is the memory of the whole model in 16 bits.
- Attention of such a step runs in torch's math kernel, since the fused ones have no second derivative.  The loss of
  these steps can therefore differ in its last bits.
- Ranks that split layers, tokens or stages have no graph that can be differentiated twice (their messages are the
  operations of one backward), and ranks that split experts do not share a block: these are rejected.

Rejected: DeepSpeed's way, `create_graph` in the engine's own backward.  It keeps gradients of every step in a graph,
reduces them without it, and so has each rank decide by its own samples; and it works without ZeRO only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zcomm
import zprecision
from zengine.engine.feature import Feature
from zengine.features.named_layers import find_named_layers
from zengine.imports import is_pipeline

if TYPE_CHECKING:
    from zengine.config.keys.features import BlockEigenvalues
    from zengine.engine.clock import Clock, MicroStep
    from zengine.engine.parts import Parts, Run
    from zengine.step_report import StepReport

TAG = "Train/Eigenvalues/ModelBlockParam_{}"

log = logging.getLogger("zengine")


@final
class Eigenvalues(Feature):
    """Computes the relative eigenvalue of each named block at some boundaries."""

    name = "eigenvalue"

    clock: Clock
    parts: Parts
    blocks: Sequence[nn.Module]
    values: tuple[float, ...]  # relative, of each block; () before the first computation

    def __init__(self, plan: BlockEigenvalues) -> None:
        self.plan = plan
        self.values = ()
        self.wants: Callable[[], bool] = lambda: True  # whether somebody needs new values at this boundary
        self._rule = zprecision.PowerIteration(max_iter=plan.max_iter, tol=plan.tol, stability=plan.stability)
        self._step = -1  # that had its values computed
        self._math = ExitStack()  # open while a step needs second derivatives

    def attach(self, run: Run) -> None:
        """Find the blocks.

        Raises:
            ValueError: `layer_name` is not a list of `layer_num` layers; a block has nothing to train; or the module
                is a pipeline.
        """
        self.clock, self.parts = run.clock, run.parts
        self.blocks = _blocks_of(run.module, self.plan.layer_name, self.plan.layer_num)
        frozen = [i for i, block in enumerate(self.blocks) if not any(p.requires_grad for p in block.parameters())]
        if frozen:
            raise ValueError(
                f"eigenvalue.layer_name = {self.plan.layer_name!r}: blocks {frozen} have no parameter that requires "
                "a gradient, so the loss has no curvature there. Unfreeze them, or remove the section"
            )

    def by_parameter(self) -> dict[int, tuple[float, int]]:
        """Return DeepSpeed's form of the newest values: id of a parameter -> (value, number of its block)."""
        return dict(_entries(self.blocks, self.values))

    def _is_due(self) -> bool:
        steps = self.clock.steps
        return (steps + 1) % self.plan.gas_boundary_resolution == 0 and self._step != steps and self.wants()

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._math.close()  # of a micro-step that failed
        if torch.is_grad_enabled() and self.clock.at_boundary and self._is_due():
            self._math.enter_context(sdpa_kernel(SDPBackend.MATH))
        return args, kwargs

    def forward_end(self, output: Any) -> Any:
        self._math.close()
        return output

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        """Compute the values; the graph of `loss` stays for the backward."""
        if not micro.is_last or not self._is_due():
            return loss
        self._math.enter_context(sdpa_kernel(SDPBackend.MATH))  # for blocks that backward computes again
        self._step = self.clock.steps
        scaler = self.parts.scaler
        parameters = [list(block.parameters()) for block in self.blocks]
        with self.parts.partition.derivatives():
            try:
                found = zprecision.block_eigenvalues(
                    scaler.scale(loss), parameters, self._rule, mean=self._mean, scale=float(scaler.factor)
                )
            except RuntimeError as error:
                error.add_note(_NEEDS)
                raise
        if not any(each.value for each in found):
            return loss  # the gradients overflow with this loss scale, and so will the step's
        self.values = zprecision.relative_eigenvalues([each.value for each in found])
        if self.plan.verbose and self.parts.world.rank == 0:
            for i, (each, value) in enumerate(zip(found, self.values)):
                log.info(
                    "eigenvalue: step %d, block %d: %.6g after %d products%s, relative %.4f",
                    *(self._step, i, each.value, each.iterations, "" if each.converged else " (max_iter)", value),
                )
        return loss

    def backward_end(self, micro: MicroStep) -> None:
        self._math.close()

    def _mean(self, message: Tensor) -> None:
        group = self.parts.groups.gradient()
        zcomm.all_reduce(message, group, label="eigenvalue")
        message /= zcomm.group_size(group)

    def step_end(self, report: StepReport) -> None:
        """Chart the values that this step computed."""
        if self._step == report.step - 1:
            events = [(TAG.format(i), value, report.samples) for i, value in enumerate(self.values)]
            self.parts.telemetry.write_events(events)

    def state_dict(self) -> Mapping[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state; return a function that restores it.  Raises ValueError."""
        values = state.get("values") if isinstance(state, Mapping) else None
        if not isinstance(values, (list, tuple)) or not all(
            isinstance(each, (int, float)) and 0 <= each <= 1 for each in values
        ):
            raise ValueError(f"values = {values!r} must be numbers from 0 to 1")
        fits = len(values) == len(self.blocks)

        def commit() -> None:
            self.values, self._step = (tuple(map(float, values)) if fits else ()), -1

        return commit

    def close(self) -> None:
        """Leave torch's choice of attention kernels as it was."""
        self._math.close()


_NEEDS = (
    'eigenvalue: the section "eigenvalue" differentiates the loss twice, so every operation of the model needs a '
    "second derivative. torch.compile, re-entrant activation checkpointing (use_reentrant=True) and most custom "
    "kernels have none: use the plain operation in the blocks and behind them, or remove the section."
)


def _blocks_of(module: nn.Module, layer_name: str, layer_num: int) -> list[nn.Module]:
    """Return the first `layer_num` (0: all) layers of the list of that name.  Raises ValueError."""
    if is_pipeline(module):
        raise ValueError(
            "eigenvalue does not work with a PipelineModule: a stage has no graph of the loss that could be "
            "differentiated twice. Remove the section"
        )
    named = find_named_layers(module, layer_name, "eigenvalue.layer_name")
    if layer_num > named.count:
        raise ValueError(
            f"eigenvalue.layer_num = {layer_num}, but {layer_name} has {named.count} layers: set it to at most "
            f"{named.count}, or to 0 for all"
        )
    return [named.own[number] for number in range(layer_num or named.count)]


@final
class Eigenvalue:
    """DeepSpeed's class of that name, for a loop of your own: `loss.backward(create_graph=True)`, then a call.

    The arguments are the keys of the section; `layer_num` 0 means all layers (DeepSpeed rejects it), and
    gas_boundary_resolution is kept for the caller.
    """

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 1e-2,
        stability: float = 0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
    ) -> None:
        if not layer_name:
            raise ValueError('layer_name = "" must be the path of a list of layers, "bert.encoder.layer" for example')
        self.verbose, self.max_iter, self.tol, self.stability = verbose, max_iter, tol, stability
        self.gas_boundary_resolution, self.layer_name, self.layer_num = gas_boundary_resolution, layer_name, layer_num
        self._rule = zprecision.PowerIteration(max_iter=max_iter, tol=tol, stability=stability)

    def compute_eigenvalue(
        self, module: nn.Module, device: torch.device | str | None = None, scale: float = 1.0
    ) -> dict[int, tuple[float, int]]:
        """Return id of a parameter -> (relative eigenvalue of its block, number of the block).

        Reads `.grad` of the parameters, which must have a graph; {} with a warning if a block has none.  device: not
        needed, vectors are where the parameters are.  scale: the loss scale of the gradients.
        """
        blocks = _blocks_of(module, self.layer_name, self.layer_num)
        found: list[float] = []
        for number, block in enumerate(blocks):
            params = [param for param in block.parameters() if _has_graph(param.grad)]
            if not params:
                log.warning(
                    "the model does not support the computation of eigenvalues: gradients of block %d have no graph. "
                    "Call loss.backward(create_graph=True)",
                    number,
                )
                return {}
            product = zprecision.hessian_product([param.grad for param in params], params, scale=scale)
            result = zprecision.largest_eigenvalue(product, params, self._rule)
            found.append(result.value)
            if self.verbose:
                log.info("block: %d, power iteration: %d, eigenvalue: %g", number, result.iterations, result.value)
        return dict(_entries(blocks, zprecision.relative_eigenvalues(found)))


def _has_graph(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.grad_fn is not None


def _entries(blocks: Sequence[nn.Module], values: Sequence[float]) -> Iterator[tuple[int, tuple[float, int]]]:
    for number, (block, value) in enumerate(zip(blocks, values)):
        for param in block.parameters():
            yield id(param), (value, number)
