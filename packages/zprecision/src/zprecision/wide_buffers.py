"""16-bit models with wider buffers: casts the inputs of torch's layers, and explains dtype errors elsewhere.

A buffer keeps its dtype when weights are cast ([Note: buffers are not rounded] in casting.py), and an operation on it
and a narrow activation returns a wide tensor: `x + self.positions` is float32.  torch's layers with narrow weights
reject such inputs.  In a model with wide buffers, hooks cast these inputs exactly where torch would raise; results
that torch can compute stay unchanged.  Errors of functions (a product of float32 scores and bf16 values) remain, with
a note that lists the wide buffers and the fix.

Rejected: casting the outputs of a buffer's owner (losses and rotary angles are wide on purpose); narrow copies of
buffers (in-place updates of a forward pass would be lost).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zprecision.casting import cast, is_castable, paired_dtypes
from zprecision.keep_in_fp32 import KeepInFp32

__all__ = ["WideBuffers"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_STRICT = (
    *(nn.Linear, nn.Bilinear, *_CONVOLUTIONS, nn.LayerNorm, nn.GroupNorm, nn.PReLU),
    *(nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell),
)


@final
@attrs.define(eq=False)
class WideBuffers:
    """Hooks of one model with wide buffers.  A context manager; `close` may be called twice."""

    names: tuple[str, ...]  # of the buffers; no hooks without any
    param: torch.dtype  # of the weights
    handles: list[RemovableHandle] = attrs.field(factory=list)

    @classmethod
    def install(cls, module: nn.Module, *, keep: KeepInFp32, param: torch.dtype) -> WideBuffers:
        """Install hooks on torch's layers in `module`, whose weights are `param`, if it has wider buffers.

        Does not count tensors that `keep` names (`Fp32Modules` hooks, or the model's own code, cast around them) and
        running statistics, which torch accepts beside narrow inputs.
        """
        known = keep.names(module, param)
        paired = paired_dtypes(module, param, None)
        found = tuple(
            name
            for name, buffer in module.named_buffers()
            if is_castable(buffer) and torch.promote_types(buffer.dtype, param) != param
            if name not in known and id(buffer) not in paired
        )
        wide = cls(found, param)
        for child in module.modules() if found else ():
            if type(child) in _STRICT and any(own.dtype == param for own in child.parameters(recurse=False)):
                wide.handles.append(child.register_forward_pre_hook(wide._narrow_inputs, with_kwargs=True))
        return wide

    def _narrow_inputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if any(isinstance(each, Tensor) and torch.is_autocast_enabled(each.device.type) for each in args):
            return args, kwargs  # torch casts
        return cast(args, self.param), cast(kwargs, self.param)

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Add a note that lists the wide buffers to an error about dtypes."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if self.names and re.search("type", str(error), re.IGNORECASE):
                some = ", ".join(self.names[:5]) + ", ..." * (len(self.names) > 5)
                narrow = str(self.param).removeprefix("torch.")
                error.add_note(
                    f"The model computes in {narrow}, but these buffers keep a wider dtype: {some}. Cast the results "
                    f'computed from them in the model, e.g. .to(x.dtype), or cast all buffers: "data_types": '
                    f'{{"buffer_dtype": "{narrow}"}}'
                )
            raise

    def close(self) -> None:
        """Remove the hooks."""
        while self.handles:
            self.handles.pop().remove()

    def __enter__(self) -> WideBuffers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
