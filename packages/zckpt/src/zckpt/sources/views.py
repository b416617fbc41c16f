"""A model and an optimizer as named tensors, for plain scripts.

    zckpt.save(path, tensors=zckpt.views(model, optimizer), step=100)
    zckpt.load(path, tensors=zckpt.views(model, optimizer))

Weights and persistent buffers are `model.<name>`, optimizer tensors `optimizer.<key>.<parameter name>`.  Other values
(hyperparameters of the groups, counters) are JSON in the checkpoint's objects, under "zckpt.views".  So the order of
the parameters is not part of a checkpoint, and no pickle is needed.

Views are evaluated on each use, so one object serves every save of a run.  On load, tensors that the optimizer
already has are filled in place, like the weights; an optimizer that has not stepped yet receives its state after
everything has been read.  A checkpoint without optimizer state raises, unless the caller skips it: silently
restarting Adam's moments is a bug that only the loss curve shows.

Tied weights are one tensor, under the first name.  A non-contiguous parameter is saved and loaded through a
contiguous copy.

DTensors (FSDP2) get an address from their placements: a plain `Shard` splits a dim like torch.chunk, with
ceil(size / ranks) rows per rank until none are left; placements on several mesh axes split one after the other, from
the first axis on.  Only attributes are read, so torch.distributed.tensor is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, final

import attrs
import torch
from torch import Tensor

from zckpt.errors import CheckpointInputError, CheckpointMismatch
from zckpt.format import canonical
from zckpt.format.canonical import JSON
from zckpt.format.regions import Box, box_numel, whole_box
from zckpt.format.shard import Shard, ShardLike, whole

VIEWS_KEY = "zckpt.views"  # key in the checkpoint's objects
MODEL, OPTIMIZER = "model.", "optimizer."

_DtypeShape: TypeAlias = "tuple[torch.dtype, tuple[int, ...]]"  # dtype and shape of a stored tensor


def views(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Views:
    """The state of a model and its optimizer, for `save` and `load`.  Pass the inner module of a wrapped model.

    >>> import tempfile, torch, zckpt
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> path = zckpt.save(tempfile.mkdtemp(), tensors=zckpt.views(model, optimizer))
    """
    return Views(model, optimizer)


@final
@attrs.frozen(eq=False)
class Views:
    """Named tensors of a model and an optimizer.  Holds references to the two and no tensors."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None

    def shards(self) -> list[Shard]:
        """The current tensors, as named shards."""
        made = [_whole(MODEL + name, tensor) for name, tensor in self._weights().items()]
        for name, state in self._states():
            made += [
                _whole(_state_name(key, name), value) for key, value in state.items() if isinstance(value, Tensor)
            ]
        return made

    def objects(self) -> JSON:
        """The values that are not tensors, as JSON."""
        if self.optimizer is None:
            return {}
        names = self._names()
        numbers = {
            name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            for name, state in self._states()
        }
        groups = [
            {
                "params": [names[id(each)] for each in group["params"]],
                "options": {
                    key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")
                },
            }
            for group in self.optimizer.param_groups
        ]
        made: JSON = canonical.plain(
            {"optimizer": {"kind": type(self.optimizer).__name__, "groups": groups, "numbers": numbers}}, VIEWS_KEY
        )
        return made

    def prepare(self, saved: JSON, kinds: Mapping[str, _DtypeShape], *, optimizer: bool) -> RestorePlan:
        """Plan a restore from the saved `objects` and the dtypes and shapes of the saved tensors; modify nothing.

        Raises CheckpointMismatch if the optimizer's state is required and absent, or belongs to another optimizer.
        """
        restore = RestorePlan()
        self._prepare_weights(kinds, restore)
        if self.optimizer is not None and optimizer:
            self._prepare_optimizer(self.optimizer, saved, kinds, restore)
        return restore

    def _prepare_weights(self, kinds: Mapping[str, _DtypeShape], restore: RestorePlan) -> None:
        """Restore parameters and buffers in place, and extra state of modules through load_state_dict."""
        own = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        made: dict[str, Tensor] = {}
        for name, tensor in self._weights().items():
            stored = MODEL + name
            if id(tensor) not in own and stored in kinds:
                tensor = made[name] = torch.empty(kinds[stored][1], dtype=tensor.dtype, device=tensor.device)
            restore.add(stored, tensor)
        if made:
            restore.add_finisher(lambda: self.model.load_state_dict(made, strict=False))

    def _prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, saved: JSON, kinds: Mapping[str, _DtypeShape], restore: RestorePlan
    ) -> None:
        saved = saved.get("optimizer") if isinstance(saved, dict) else None
        if not isinstance(saved, dict):
            raise CheckpointMismatch(
                'the checkpoint holds no optimizer state. Load with optimizer="skip" to start with a fresh state, '
                "and log that."
            )
        if saved["kind"] != type(optimizer).__name__:
            raise CheckpointMismatch(
                f"the checkpoint holds the state of {saved['kind']}, the optimizer is {type(optimizer).__name__}. "
                'Load with optimizer="skip" to start with a fresh state.'
            )
        names = self._names()
        mine = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        theirs = [group["params"] for group in saved["groups"]]
        if mine != theirs:
            raise CheckpointMismatch(
                f"the optimizer's groups hold other parameters than the saved ones: {_first_difference(mine, theirs)}"
            )
        keys = sorted({name[len(OPTIMIZER) :].split(".", 1)[0] for name in kinds if name.startswith(OPTIMIZER)})
        states: dict[Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                name = names[id(parameter)]
                state: dict[str, Any] = dict(saved["numbers"].get(name, {}))
                for key in keys:
                    stored = _state_name(key, name)
                    if stored in kinds:
                        old = optimizer.state.get(parameter, {}).get(key)
                        state[key] = _state_tensor(old, kinds[stored], parameter, on_device)
                        restore.add(stored, state[key])
                if state:
                    states[parameter] = state
        restore.add_finisher(lambda: _restore_optimizer(optimizer, states, saved["groups"]))

    def _weights(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers, each once."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise CheckpointInputError(f"{MODEL}{name} of the model's state_dict is a {type(value).__name__}")
            if id(value) not in seen:
                seen.add(id(value))
                found[name] = value
        return found

    def _names(self) -> dict[int, str]:
        """id of a parameter -> its name.  Raises CheckpointInputError for a parameter that is not in the model."""
        names = {id(tensor): name for name, tensor in self._weights().items()}
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise CheckpointInputError(
                        f"the optimizer's parameter {index} in a group, of shape {tuple(parameter.shape)}, is not a "
                        "parameter of the model"
                    )
        return names

    def _states(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (name, state) of each parameter that has a state."""
        if self.optimizer is None:
            return
        names = self._names()
        unknown = [key for key, state in self.optimizer.state.items() if state and id(key) not in names]
        if unknown:
            raise CheckpointInputError(
                f"{type(self.optimizer).__name__} keeps state under {len(unknown)} keys that are not parameters of "
                f"the model (first: a {type(unknown[0]).__name__}), which `views` cannot save. Save it in objects="
            )
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self.optimizer.state:
                    yield names[id(parameter)], self.optimizer.state[parameter]


Tensors: TypeAlias = "Mapping[str, Tensor] | Views | Iterable[ShardLike]"


def shards_of(tensors: Tensors) -> list[ShardLike]:
    """Convert the `tensors` argument of `save` to shards."""
    if isinstance(tensors, Views):
        return list(tensors.shards())
    if isinstance(tensors, Mapping):
        return [_whole(name, tensor) for name, tensor in tensors.items()]
    return list(tensors)


def plan_restore(tensors: Tensors, saved: JSON, kinds: Mapping[str, _DtypeShape], *, optimizer: bool) -> RestorePlan:
    """Convert the `tensors` argument of `load` to a plan; the other arguments as in Views.prepare."""
    if isinstance(tensors, Views):
        return tensors.prepare(saved, kinds, optimizer=optimizer)
    restore = RestorePlan()
    if isinstance(tensors, Mapping):
        for name, tensor in tensors.items():
            restore.add(name, tensor)
    else:
        restore.shards += tensors
    return restore


def add_view_objects(objects: Mapping[str, JSON], tensors: Tensors) -> Mapping[str, JSON]:
    """Add the JSON values of views to `objects`."""
    if not isinstance(tensors, Views):
        return objects
    if VIEWS_KEY in objects:
        raise CheckpointInputError(f"objects[{VIEWS_KEY!r}] is reserved for `views`: use another key")
    return {**objects, VIEWS_KEY: tensors.objects()}


@final
@attrs.define(eq=False)
class RestorePlan:
    """Tensors to fill, and actions to run when all are filled."""

    shards: list[ShardLike] = attrs.field(factory=list)
    finishers: list[Callable[[], object]] = attrs.field(factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of any strides; a non-contiguous one is filled through a copy at the end."""
        local = local_part(tensor)
        target = local
        if not local.is_contiguous():
            target = local.contiguous()  # with its values, in case the checkpoint does not fill it
            self.add_finisher(lambda: local.copy_(target))
        self.shards.append(local_shard(name, tensor, target))

    def add_finisher(self, action: Callable[[], object]) -> None:
        self.finishers.append(action)

    def commit(self) -> None:
        for action in self.finishers:
            action()


def _whole(name: str, tensor: Tensor) -> Shard:
    return local_shard(name, tensor, local_part(tensor).contiguous())


def _state_name(key: str, name: str) -> str:
    if not isinstance(key, str) or "." in key:
        raise CheckpointInputError(
            f"the optimizer's state of {name} has key {key!r}: a key must be a str without dots"
        )
    return f"{OPTIMIZER}{key}.{name}"


def _plain(value: object) -> JSON:
    """A hyperparameter as a plain value; a learning rate may be a tensor of one element."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _state_tensor(old: object, kind: _DtypeShape, parameter: Tensor, on_device: bool) -> Tensor:
    """The state tensor to fill: the existing one if dtype and shape match, else a new one on torch's device."""
    dtype, shape = kind
    if isinstance(old, Tensor) and (old.dtype, tuple(old.shape)) == kind:
        return old
    if is_dtensor(parameter) and shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype)  # sharded like the parameter
    device = parameter.device if shape or on_device else torch.device("cpu")
    return torch.empty(shape, dtype=dtype, device=device)


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, states: Mapping[Tensor, dict[str, Any]], groups: JSON
) -> None:
    """Set states and hyperparameters; tensors in groups are filled in place, as schedulers may hold them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    optimizer.state.update(states)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved["options"].items():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value


def _first_difference(mine: list[list[str]], theirs: list[list[str]]) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} groups here, {len(theirs)} saved"
    index = next(i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b)
    here, saved = (
        [name for name in a if name not in b][:5]
        for a, b in ((mine[index], theirs[index]), (theirs[index], mine[index]))
    )
    return (
        f"group {index} has {here} only here, {saved} only in the checkpoint"
        if here or saved
        else f"group {index} has another order of parameters"
    )


def is_dtensor(tensor: object) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """The memory of this rank: the local part of a DTensor, or the tensor itself."""
    part: Any = tensor.detach()
    local: Tensor = part.to_local() if is_dtensor(part) else part
    return local


def local_shard(name: str, tensor: Tensor, local: Tensor) -> Shard:
    """Shard of `tensor` whose values are `local`, the contiguous part that this rank holds."""
    if not is_dtensor(tensor):
        return whole(name, local)
    box = box_of(name, tensor)
    if tuple(local.shape) != tuple(hi - lo for lo, hi in box) and box_numel(box) + local.numel() > 0:
        raise CheckpointInputError(f"{name}: its local part has shape {tuple(local.shape)}, expected box {box}")
    return Shard(name, tuple(tensor.shape), box, (0, box_numel(box)), local.view(-1))


def box_of(name: str, tensor: Any) -> Box:
    """Box of a DTensor on this rank.  Raises CheckpointInputError for placements other than Shard and Replicate."""
    box = list(whole_box(tuple(tensor.shape)))
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise CheckpointInputError(
                f"{name} is a DTensor with the placement {placement}: only Shard and Replicate are supported. Pass "
                "its local part as a zckpt.Shard in shards="
            )
        dim = placement.dim % len(box)
        lo, hi = box[dim]
        step = -(-(hi - lo) // tensor.device_mesh.size(axis))
        first = min(lo + step * tensor.device_mesh.get_local_rank(axis), hi)
        box[dim] = (first, min(first + step, hi))
    return tuple(box)
