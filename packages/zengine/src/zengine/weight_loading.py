"""Weights of others into an engine: checked and proven on all ranks, then read by each rank for its own part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import nn

import zpartition
from zengine.consensus import GroupPeers, on_every_rank
from zengine.converting import Named, as_module_has_them

if TYPE_CHECKING:
    from zengine.engine import Engine

__all__ = ["load_weights"]

_NOTHING = "nothing was loaded"


def load_weights(engine: Engine, path: str | os.PathLike[str], *, strict: bool, like: nn.Module | None) -> None:
    """See `Engine.load_weights`.  An error after the first tensor was touched leaves the engine HALF_LOADED."""
    from zckpt.interchange import read_weights

    engine.clock.require_loadable("load_weights")
    peers = GroupPeers.of(engine)
    with ExitStack() as stack:

        def opened() -> Named:
            given = stack.enter_context(read_weights(path))
            return as_module_has_them(given, *_told(engine.parts.partition, like))

        @contextmanager
        def touching() -> Iterator[None]:
            stack.enter_context(engine.clock.loading(f"the load of weights from {path}", is_whole=strict))
            failures: list[Exception] = []
            try:
                yield
            except Exception as error:  # whatever it is: the others wait for word of it
                failures.append(error)
            on_every_rank(lambda: _raise(failures), peers, "the load was not completed")

        weights = on_every_rank(opened, peers, _NOTHING)
        zpartition.load_slices(engine.parts.partition, weights, strict=strict, touching=touching)


def _raise(failures: list[Exception]) -> None:
    for failure in failures:
        raise failure


def _told(partition: zpartition.Partition, like: nn.Module | None) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """The model that folders are of, and its shapes by every name; parameters that are shared have several."""
    if like is not None:
        return like, {name: tuple(tensor.shape) for name, tensor in like.state_dict().items()}
    known = partition.shapes()
    first: dict[int, str] = {}
    for name, param in partition.module.named_parameters(remove_duplicate=False):
        known[name] = known[first.setdefault(id(param), name)]
    return partition.module, known
