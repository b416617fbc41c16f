"""`zero.Init`, `zero.GatheredParameters` and the names around them, on zpartition's `Init` and `gathered`.

Differences from DeepSpeed.  A model built inside `Init` has the weights of a plain build with the same seed;
`initialize` creates them, each rank its own part.  Nothing is patched, and only the marks (`ds_id` etc., marks.py)
outlive the block.  Edits without `modifier_rank` are kept if all ranks make the same, and raise otherwise; DeepSpeed
loses them.  Parameters that are used outside their module are detected, so registering them has no effect.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, final

import torch
from torch import nn
from torch.nn import Parameter

import zpartition
from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.comm.world import init_distributed
from zengine.deepspeed.marks import (
    PartitionedParamStatus,
    ZeroParamStatus,
    ZeroParamType,
    external_parameters,
    is_marked,
    mark,
    mark_available,
)

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "PartitionedParamStatus",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "is_zero_param",
    "partitioned_param_data_shape",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
]


class DeepSpeedTensorOverride(enum.Enum):
    """Attributes of new tensors that `Init` may set."""

    dtype = 1
    device = 2


DEFAULT_TENSOR_OVERRIDES = (DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device)

is_zero_param = is_marked

partitioned_param_data_shape = [0]  # of a weight at rest in DeepSpeed; here it keeps its shape, and `ds_status` tells


@final
class Init(AbstractContextManager["Init"]):
    """Defers memory: modules built inside are materialized by `deepspeed.initialize`, each rank its own part.

    enabled: False makes the block do nothing.  dtype: of floating tensors made inside, by default torch's; bf16 or
    fp16 of the config applies in `initialize`, which casts before it allocates.
    module: an existing module is only marked; `initialize` shards it.
    tensor_overrides: without `DeepSpeedTensorOverride.dtype`, `dtype` is ignored; devices are `initialize`'s choice.
    Other arguments tune DeepSpeed's buffers or repeat the config, and are ignored.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Sequence[DeepSpeedTensorOverride] = DEFAULT_TENSOR_OVERRIDES,
    ) -> None:
        self._enabled = enabled and module is None
        self._dtype = dtype if DeepSpeedTensorOverride.dtype in tensor_overrides else None
        self._undo = ExitStack()
        if enabled and module is not None:
            _mark_all(module.parameters())

    def __enter__(self) -> Init:
        if self._enabled:
            with zpartition.suspend_init():
                init_distributed()  # as DeepSpeed does: edits before `initialize` must reach all ranks
            device = get_accelerator().current_device_name()  # for layers added later: a larger embedding, an adapter
            self._undo.enter_context(
                zpartition.Init(make_buffers=True, fake_device=device, dtype=self._dtype, registered=_mark_all)
            )
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()


@final
class GatheredParameters(AbstractContextManager[None]):
    """Gathers parameters inside the block; every rank must enter it.

    modifier_rank: rank whose edits are broadcast; None: edits must be equal on all ranks.  Unsharded parameters are
        unchanged.
    fwd_module: registers them as external parameters, which is optional: external uses are detected.
    """

    def __init__(
        self,
        params: nn.Module | Parameter | Iterable[Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params = _to_list(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._open = ExitStack()
        if fwd_module is not None:
            for param in filter(is_marked, self._params):
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        with ExitStack() as opening:
            opening.enter_context(mark_available(self._params))
            opening.enter_context(zpartition.gathered(self._params, modifier_rank=self._modifier_rank))
            self._open = opening.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


_suspended: list[ExitStack] = []


def shutdown_init_context() -> None:
    """Suspend all open `Init` blocks until `restore_init_context`; does nothing if they already are."""
    if not _suspended:
        _suspended.append(ExitStack())
        _suspended[0].enter_context(zpartition.suspend_init())


def restore_init_context() -> None:
    """Resume what `shutdown_init_context` suspended."""
    while _suspended:
        _suspended.pop().close()


def _mark_all(params: Iterable[Parameter]) -> None:
    for param in params:
        mark(param, is_deferred=True)


def register_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Add `parameter` to `module.ds_external_parameters()`; external uses are detected without it.

    Raises RuntimeError if it is not a Parameter.
    """
    _check_parameter("register_external_parameter", parameter)
    external_parameters(module)[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Remove `parameter` from that list.  Raises RuntimeError if it is not a Parameter, or was not registered."""
    _check_parameter("unregister_external_parameter", parameter)
    if external_parameters(module).pop(id(parameter), None) is None:
        raise RuntimeError(
            f"unregister_external_parameter(): this parameter was not registered with {type(module).__name__}"
        )


def _check_parameter(function: str, parameter: object) -> None:
    if not isinstance(parameter, Parameter):
        raise RuntimeError(f"{function}() takes a torch.nn.Parameter, not {type(parameter).__name__}")


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype | None = None, target_device: Any = None
) -> Callable[..., Any]:
    """Return `fn`: `Init` patches no constructors.  Transformers replaces this name while it builds a model."""
    return fn


_orig_torch_arange = torch.arange


def _to_list(params: Any) -> list[Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    given = [params] if isinstance(params, torch.Tensor) else params
    return [each for each in given if isinstance(each, Parameter)]
