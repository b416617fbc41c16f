"""Models of 16 bits with buffers that are wider: what torch refuses there, and what it leaves to be explained.

A buffer keeps its dtype when weights are cast ([Note: state is not rounded] in buffers.py), and an operation on it
and a narrow activation gives a wide one: `x + self.positions` is float32.  Layers of torch with narrow weights refuse
that.  So in a model that has such buffers their inputs are cast, where torch would raise an error and nowhere else:
numbers that torch computes are left as they are.  What functions refuse (a product of scores in float32 and values in
bf16) stays an error, to which the names of the wide buffers and the cure are added.

Rejected: casting what the owner of a buffer returns (losses and rotary angles are wide on purpose); handing out
narrow copies of buffers (what a forward pass adds to them would be lost).
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

from zprecision.buffers import beside_weights, is_castable
from zprecision.casting import cast
from zprecision.keeping import Keep

__all__ = ["WideBuffers"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_STRICT = (
    *(nn.Linear, nn.Bilinear, *_CONVOLUTIONS, nn.LayerNorm, nn.GroupNorm, nn.PReLU),
    *(nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell),
)


@final
@attrs.define(eq=False)
class WideBuffers:
    """The hooks of one model with wide buffers.  A context manager; `close` may be called twice."""

    names: tuple[str, ...]  # of the buffers; no hooks without any
    param: torch.dtype  # of the weights
    handles: list[RemovableHandle] = attrs.field(factory=list)

    @classmethod
    def install(cls, module: nn.Module, *, keep: Keep, param: torch.dtype) -> WideBuffers:
        """Hook torch's layers in `module`, whose weights are `param`, if it has wider buffers.

        What `keep` names is not counted: `Islands` are around it, or the model's own code casts.  Nor are running
        statistics, which torch takes beside narrow inputs.
        """
        known = keep.names(module, param)
        paired = beside_weights(module, param, None)
        found = tuple(
            name
            for name, buffer in module.named_buffers()
            if is_castable(buffer) and torch.promote_types(buffer.dtype, param) != param
            if name not in known and id(buffer) not in paired
        )
        wide = cls(found, param)
        for child in module.modules() if found else ():
            if type(child) in _STRICT and any(own.dtype == param for own in child.parameters(recurse=False)):
                wide.handles.append(child.register_forward_pre_hook(wide._narrow, with_kwargs=True))
        return wide

    def _narrow(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if any(isinstance(each, Tensor) and torch.is_autocast_enabled(each.device.type) for each in args):
            return args, kwargs  # torch casts
        return cast(args, self.param), cast(kwargs, self.param)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add the wide buffers to an error about dtypes."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if self.names and re.search("type", str(error), re.IGNORECASE):
                some = ", ".join(self.names[:5]) + ", ..." * (len(self.names) > 5)
                narrow = str(self.param).removeprefix("torch.")
                error.add_note(
                    f"The model computes in {narrow}, and these buffers keep a wider dtype: {some}. Cast what is "
                    f'computed from them in the model, such as .to(x.dtype), or cast all buffers: "data_types": '
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
