"""Planted faults: `--plant NAME` must turn its piece red, which shows that the piece can see such a fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import attrs

__all__ = ["PLANTS", "Plant", "planted"]


@attrs.frozen
class Plant:
    """One fault."""

    piece: str  # that must fail
    apply: Callable[[], AbstractContextManager[None]]


def _nothing(*_: Any) -> None: ...


@contextlib.contextmanager
def _wrapped(
    owner: Any, name: str, before: Callable[..., None] = _nothing, after: Callable[[Any, Any], None] = _nothing
) -> Iterator[None]:
    """Call `before(*arguments)` and `after(self, result)` around each call of a method."""
    plain = getattr(owner, name)

    def method(self: Any, *args: Any) -> Any:
        before(self, *args)
        result = plain(self, *args)
        after(self, result)
        return result

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _flip(tensor: Any, byte: int = 0) -> None:
    """Flip the lowest bit of a byte of the first element."""
    import torch

    tensor.detach().reshape(-1)[:1].view(torch.uint8)[byte : byte + 1].bitwise_xor_(1)


def _kernel_bit() -> AbstractContextManager[None]:
    from zoptim.backends.gpu import GpuJob

    return _wrapped(GpuJob, "step", after=lambda job, _: _flip(job._streams.weights[0]))


def _product_bit() -> AbstractContextManager[None]:
    from zprecision.quant import gpu

    return _wrapped(gpu, "products", after=lambda _, made: _flip(made[0]))


def _batch_bit() -> AbstractContextManager[None]:
    from zengine.data.loaders import fetch
    from zengine.data.tree import iter_tensors

    def flip(_: Any, batch: Any) -> None:
        for tensor in iter_tensors(batch):
            _flip(tensor)

    return _wrapped(fetch._StreamCopy, "finish", after=flip)


def _saved_bit() -> AbstractContextManager[None]:
    from zckpt.saving.background import HostMemory

    return _wrapped(HostMemory, "copy_shards", after=lambda _, made: _flip(made[0].tensor))


def _offload_bit() -> AbstractContextManager[None]:
    from zpartition.memory.mover import CudaMover

    # The lowest bit that a bf16 weight keeps of its float32 master.
    return _wrapped(CudaMover, "send", before=lambda mover, device, host: _flip(host, byte=2))


def _without(module: str, text: str) -> Callable[[], AbstractContextManager[None]]:
    """Remove the call `text` of a module: a wait, a record or a record_stream."""

    def apply() -> AbstractContextManager[None]:
        from simulated_cuda.mutants import applied, find_mutants

        (mutant,) = [each for each in find_mutants() if each.module == module and str(each).endswith(text)]
        return applied(mutant)

    return apply


_MOVER, _FETCH, _SAVES = "zpartition.memory.mover", "zengine.data.loaders.fetch", "zckpt.saving.background"
PLANTS = {
    "kernel-bit": Plant("kernel-bits", _kernel_bit),
    "product-bit": Plant("quantized", _product_bit),
    "offload-bit": Plant("offload", _offload_bit),
    "saved-bit": Plant("checkpoints", _saved_bit),
    "batch-bit": Plant("loaders", _batch_bit),
    "offload-wait": Plant("offload", _without(_MOVER, "wait_host: self.down.synchronize()")),
    "loader-wait": Plant("loaders", _without(_FETCH, "current.wait_event(copied)")),
    "save-wait": Plant("checkpoints", _without(_SAVES, "_synchronize(tensors)")),
    "trace-wait": Plant("trace", _without(_MOVER, "self.down.wait_stream(torch.cuda.current_stream(self.device))")),
}


def planted(name: str) -> AbstractContextManager[None]:
    """Return a context in which a fault exists; "" for none.  Raises ValueError for an unknown name."""
    if not name:
        return contextlib.nullcontext()
    if name not in PLANTS:
        raise ValueError(f"--plant {name}: no such fault; choose from {', '.join(PLANTS)}")
    return PLANTS[name].apply()
