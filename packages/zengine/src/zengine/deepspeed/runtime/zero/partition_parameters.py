"""`zero.Init`, `zero.GatheredParameters` and the names around them, on zpartition's `Init` and `gathered`.

What differs.  A model built inside `Init` has the weights of a plain build with the same seed, and they are made when
`initialize` takes them, each rank its own part; nothing is patched, and nothing outlives the block.  Edits without
`modifier_rank` are refused where DeepSpeed loses them.  Parameters that are used outside their module are found by
themselves, so that registering them changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, final

import torch
from torch import nn
from torch.nn import Parameter

import zpartition
from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.comm.world import init_distributed

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
]


class ZeroParamType(enum.Enum):
    """How DeepSpeed tells parameters apart."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a weight is whole."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@final
class Init(AbstractContextManager["Init"]):
    """Modules built inside get their memory in `deepspeed.initialize`, each rank its part.

    enabled: False makes the block do nothing.  dtype: of floating tensors made inside, torch's default otherwise;
    bf16 or fp16 in `config_dict_or_path` come in with `initialize`, which casts before there is memory.
    module: one that exists already is left as it is: `initialize` splits it.
    The other arguments tune DeepSpeed's buffers, or say what the config says again, and are accepted.
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
    ) -> None:
        self._enabled = enabled and module is None
        self._dtype = dtype
        self._undo = ExitStack()

    def __enter__(self) -> Init:
        if self._enabled:
            init_distributed()  # as DeepSpeed does: edits before `initialize` have to reach all ranks
            device = get_accelerator().current_device_name()  # new layers go beside: a larger embedding, an adapter
            self._undo.enter_context(zpartition.Init(make_buffers=True, shown_on=device))
            if self._dtype is not None:
                self._undo.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()


@final
class GatheredParameters(AbstractContextManager[None]):
    """The parameters whole inside the block; every rank must enter it.

    modifier_rank: the rank whose edits count; None refuses edits.  Parameters that nobody has split are left alone.
    fwd_module: accepted; a parameter that is used elsewhere is found by itself.
    """

    def __init__(
        self,
        params: nn.Module | Parameter | Iterable[Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params = _listed(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(zpartition.gathered(self._params, modifier_rank=self._modifier_rank))

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def register_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Accepted: a parameter that a running module reads is gathered, whoever owns it.

    Raises RuntimeError for what is no parameter.
    """
    if not isinstance(parameter, Parameter):
        raise RuntimeError(
            f"register_external_parameter() takes a torch.nn.Parameter, not {type(parameter).__name__}"
        )


def unregister_external_parameter(module: nn.Module, parameter: Parameter) -> None:
    """Accepted, like `register_external_parameter`."""
    register_external_parameter(module, parameter)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype | None = None, target_device: Any = None
) -> Callable[..., Any]:
    """The constructor as it is: `Init` patches none.  Transformers replaces this name while it builds a model."""
    return fn


_orig_torch_arange = torch.arange


def _listed(params: Any) -> list[Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    given = [params] if isinstance(params, torch.Tensor) else params
    return [each for each in given if isinstance(each, Parameter)]
