"""Weights of a sharded or split module: loading from weight files, and state dicts.

Files are checked on all ranks first; then each rank reads its own part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

import zpartition
from zengine.checkpoint.consensus import GroupPeers, on_every_rank
from zengine.checkpoint.huggingface import Named, to_module_names

if TYPE_CHECKING:
    from zengine.engine.parts import Run

__all__ = ["load_state_dict", "load_weights", "state_dict"]

_NOTHING = "nothing was loaded"


def load_weights(run: Run, path: str | os.PathLike[str], *, strict: bool, like: nn.Module | None) -> None:
    """See `Engine.load_weights`.  An error after the first tensor has changed leaves the engine HALF_LOADED."""
    from zckpt.interchange import read_weights

    run.clock.require_loadable("load_weights")
    peers = GroupPeers.of(run)
    with ExitStack() as stack:

        def open_weights() -> Named:
            given = stack.enter_context(read_weights(path))
            return to_module_names(given, *_shapes_of(run.parts.partition, like))

        @contextmanager
        def fill_context() -> Iterator[None]:
            stack.enter_context(run.clock.loading(f"the load of weights from {path}", is_whole=strict))
            failures: list[Exception] = []
            try:
                yield
            except Exception as error:  # of any class: the other ranks wait for the outcome
                failures.append(error)
            on_every_rank(lambda: _raise(failures), peers, "the load was not completed")

        weights = on_every_rank(open_weights, peers, _NOTHING)
        zpartition.load_slices(run.parts.partition, weights, strict=strict, fill_context=fill_context)
    run.parts.partition.weights_replaced()


def state_dict(run: Run, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """See `Engine.state_dict`."""
    if zpartition.FullTensors.of(run.module).is_idle:
        return run.module.state_dict(*args, **kwargs)
    if args or kwargs:
        raise TypeError(
            "engine.state_dict() of a model that is split over ranks returns the whole state dict and takes no "
            "arguments; rename or filter its result, or call engine.module.state_dict() for this rank's part"
        )
    return zpartition.whole_state_dict(run.module)


def load_state_dict(run: Run, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
    """See `Engine.load_state_dict`."""
    partition = run.parts.partition
    state_dict = zpartition.own_parts(run.module, state_dict)
    with run.clock.loading("engine.load_state_dict()", is_whole=strict):  # torch copies what fits, then raises
        result = on_every_rank(
            lambda: run.module.load_state_dict(state_dict, strict=strict, assign=False), GroupPeers.of(run)
        )
        partition.synchronise()
        partition.refine(state_dict)
    partition.weights_replaced()
    return result


def _raise(failures: list[Exception]) -> None:
    for failure in failures:
        raise failure


def _shapes_of(
    partition: zpartition.Partition, like: nn.Module | None
) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Return the model that the folder contains, and its full shapes by every name of each tensor."""
    if like is not None:
        return like, {name: tuple(tensor.shape) for name, tensor in like.state_dict().items()}
    known = partition.shapes()
    first: dict[int, str] = {}
    for name, param in partition.module.named_parameters(remove_duplicate=False):
        known[name] = known[first.setdefault(id(param), name)]
    return partition.module, known
