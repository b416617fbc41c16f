"""`param.ds_id` and its family: how other people's code tells that a weight is sharded, and asks for it.

Saving code of many projects begins with `hasattr(param, "ds_id")`: without the mark it takes a weight at rest for a
whole one.  So `deepspeed.initialize` marks every parameter at stage 3, `zero.Init` marks what is built inside, and
the marks go with the engine.  At stages 0 to 2, and with plain zengine, nothing is marked.

Design.  A marked parameter has another class, made from its own, whose properties answer from the partition at the
moment: nothing is written when units are gathered, and a copy, a pickle and a detached tensor are as plain as they
were.  What does not follow from the partition is in a table beside the parameters.

`ds_status` says who has gathered a weight, not where bytes are: AVAILABLE while a block, `all_gather()` or a running
module holds it, NOT_AVAILABLE otherwise, also where it happens to be whole (a small one, a world of one rank).  Code
that asserts NOT_AVAILABLE before it gathers, and code that gathers what is not AVAILABLE, both work; INFLIGHT is
never seen, because whoever may look has waited.

Rejected: attributes in the parameters' dicts, renewed at every gather (a cost in every step, and closures that no
pickle takes); properties on torch.nn.Parameter (everybody's class).
"""

from __future__ import annotations

import enum
import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import zcomm
import zpartition
from zengine.deepspeed.utils import groups
from zengine.deepspeed.utils.leaves import get_z3_leaf_modules
from zengine.features import Feature

if TYPE_CHECKING:
    from zengine.engine.parts import Parts, Run

__all__ = [
    "ParameterOffload",
    "PartitionedParamStatus",
    "ZeroMarks",
    "ZeroParamStatus",
    "ZeroParamType",
    "external_parameters",
    "holding",
    "mark",
    "marked",
    "unmark",
]


class ZeroParamType(enum.Enum):
    """How DeepSpeed tells parameters apart."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether somebody has gathered a weight."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # never seen here


class PartitionedParamStatus(enum.Enum):
    """Whether a rank's own part is in memory; those that are handed out here always are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@final
@attrs.define(eq=False)
class _Mark:
    """What is known of one parameter beside its partition."""

    number: int  # ds_id
    num_holders: int = 0  # blocks and calls of all_gather that have it
    persists: bool = False  # whether it is small enough to stay whole
    leaf: Any = None  # a weak reference to the leaf module that it is part of
    parts: Any = None  # a weak reference to the parts of the engine that cuts it
    opened: _Opened | None = None  # the call of all_gather that holds it
    sub_modules: set[int] = attrs.field(factory=set)  # for those who clear it; nothing reads it


_marks: dict[int, tuple[weakref.ref[Parameter], _Mark]] = {}  # by identity of the parameter
_numbers = itertools.count()
_external: weakref.WeakKeyDictionary[nn.Module, dict[int, Parameter]] = weakref.WeakKeyDictionary()


class Marked:
    """What a marked parameter has beside what a parameter has."""

    __slots__ = ()
    stands_for: type[Parameter]  # the class that it had

    @property
    def ds_id(self) -> int:
        """Its number, in the order of marking."""
        return _mark_of(self).number

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Return whether somebody has gathered it at the moment."""
        is_held = _mark_of(self).num_holders > 0 or zpartition.is_gathered(_param(self))
        return ZeroParamStatus.AVAILABLE if is_held else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_shape(self) -> torch.Size:
        """Of the whole, as its own shape is here."""
        _mark_of(self)
        return _param(self).shape

    @property
    def ds_numel(self) -> int:
        """Of the whole."""
        _mark_of(self)
        return _param(self).numel()

    @property
    def ds_tensor(self) -> Tensor | None:
        """This rank's part, flat; None before `initialize` has cut it.  Parts may differ in size between ranks."""
        part: Any = _own_part(_param(self), _mark_of(self))
        if part is not None:
            part.ds_numel, part.status, part.final_location = part.numel(), PartitionedParamStatus.AVAILABLE, None
        return part  # type: ignore[no-any-return]

    @property
    def ds_persist(self) -> bool:
        """Return whether it stays whole because it is small."""
        return _mark_of(self).persists

    @property
    def ds_param_type(self) -> ZeroParamType:
        _mark_of(self)
        return ZeroParamType.PARTITIONED

    @property
    def ds_process_group(self) -> Any:
        """The ranks that it is cut over."""
        _mark_of(self)
        return groups.get_data_parallel_group()

    @property
    def ds_active_sub_modules(self) -> set[int]:
        """A set to clear; modules that use a weight are known elsewhere."""
        return _mark_of(self).sub_modules

    @property
    def ds_z3_leaf_module(self) -> nn.Module:
        """The leaf module that it is part of.  AttributeError where there is none."""
        found = _mark_of(self).leaf
        module: nn.Module | None = None if found is None else found()
        if module is None:
            raise AttributeError("ds_z3_leaf_module: this parameter is part of no leaf module")
        return module

    def all_gather(
        self, param_list: Iterable[Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> _Arrived | None:
        """Make it, or the parameters of a list, whole until `partition`; all ranks call."""
        wanted = [_param(self)] if param_list is None else list(param_list)
        missing = [param for param in wanted if getattr(param, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            _Opened(missing)
        return _Arrived() if async_op else None

    def partition(
        self,
        param_list: Iterable[Parameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Let go of what `all_gather` has made whole; all ranks call.  Edits count that all ranks have made alike.

        Raises ValueError for other edits, which are undone.
        """
        for param in [_param(self)] if param_list is None else list(param_list):
            opened = _mark_of(param).opened
            if opened is not None:
                opened.leave(param)

    def ds_summary(self, use_debug_name: bool = False) -> dict[str, Any]:
        """For messages."""
        param, part = _param(self), self.ds_tensor
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": param.numel(),
            "ds_numel": self.ds_numel,
            "shape": tuple(param.shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": param.requires_grad,
            "grad_shape": None if param.grad is None else tuple(param.grad.shape),
            "persist": self.ds_persist,
            "active_sub_modules": self.ds_active_sub_modules,
            "ds_tensor.shape": None if part is None else part.shape,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain parameter: nobody shards it."""
        copied = self.stands_for.__deepcopy__(_param(self), memo)  # type: ignore[no-untyped-call]
        copied.__class__ = self.stands_for
        return copied


@final
class _Arrived:
    """What an asynchronous gather returns: there is nothing to wait for."""

    def wait(self, **_: Any) -> None: ...


@final
class _Opened:
    """Parameters that one call of `all_gather` holds; the last that is let go of closes it."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        with ExitStack() as opening:
            opening.enter_context(holding(params))
            opening.enter_context(zpartition.gathered(params))
            self.open = opening.pop_all()
        self.params = {id(param) for param in params}
        for param in params:
            _mark_of(param).opened = self

    def leave(self, param: Parameter) -> None:
        _mark_of(param).opened = None
        self.params.discard(id(param))
        if not self.params:
            self.open.close()


def marked(param: object) -> bool:
    """Return whether `param` has a mark."""
    return isinstance(param, Marked) and id(param) in _marks


def mark(param: Parameter) -> _Mark:
    """Give `param` a mark, if it has none; returns it."""
    if not marked(param):
        _turn(param, _class_for(getattr(type(param), "stands_for", type(param))))
        known = _marks.get(id(param))
        if known is None or known[0]() is not param:  # else its class was changed since: experts have one
            _marks[id(param)] = weakref.ref(param, functools.partial(_forget, id(param))), _Mark(next(_numbers))
    return _mark_of(param)


def unmark(params: Iterable[Parameter], modules: Iterable[nn.Module] = ()) -> None:
    """Take marks off; what has none is left alone."""
    for param in params:
        if isinstance(param, Marked):
            _marks.pop(id(param), None)
            _turn(param, param.stands_for)
    for module in modules:
        for name in _OF_MODULES:
            vars(module).pop(name, None)


class holding(ExitStack):  # noqa: N801 - used as a function is
    """Inside, marked ones of `params` are AVAILABLE."""

    def __init__(self, params: Iterable[Parameter]) -> None:
        super().__init__()
        self._found = [_mark_of(param) for param in params if marked(param)]

    def __enter__(self) -> holding:
        for each in self._found:
            each.num_holders += 1
            self.callback(_let_go, each)
        return self


def external_parameters(module: nn.Module) -> dict[int, Parameter]:
    """Return what was registered as used by `module` although others own it, by identity."""
    return _external.setdefault(module, {})


@final
class ParameterOffload:
    """`optimizer.parameter_offload`, for those who take its hooks off around a generation, and put them on again.

    There are none to take off: what is gathered around the generation stays so, and modules notice.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None: ...

    _register_hooks_recursively = _register_deepspeed_module


@final
class ZeroMarks(Feature):
    """The marks of an engine's module at stage 3; they go with it."""

    def attach(self, run: Run) -> None:
        params, modules = list(run.module.parameters()), list(run.module.modules())
        if run.plan.zero.stage < 3:
            unmark(params)  # a model that was built inside zero.Init
            self._undo: Any = _nothing
            return
        left_numel = run.plan.zero.persist_total_numel
        for param in params:
            found = mark(param)
            found.parts = weakref.ref(run.parts)
            found.persists = param.numel() < run.plan.zero.persist_numel and param.numel() <= left_numel
            left_numel -= param.numel() if found.persists else 0
        for module in get_z3_leaf_modules(run.module):
            for param in module.parameters():
                mark(param).leaf = weakref.ref(module)
        for module in modules:
            vars(module).update(zip(_OF_MODULES, (external_parameters(module).items, set())))
        optimizer: Any = run.optimizer
        if optimizer is not None:
            optimizer.parameter_offload = ParameterOffload(run.module)
        self._undo = weakref.finalize(run.parts, _take_off, params, modules, optimizer)

    def close(self) -> None:
        self._undo()


_OF_MODULES = ("ds_external_parameters", "ds_active_sub_modules")  # attributes of the modules of a marked engine


def _take_off(params: list[Parameter], modules: list[nn.Module], optimizer: Any) -> None:
    unmark(params, modules)
    if optimizer is not None:
        vars(optimizer).pop("parameter_offload", None)


def _nothing() -> None: ...


def _let_go(found: _Mark) -> None:
    found.num_holders -= 1


def _turn(param: Any, kind: type[Any]) -> None:
    param.__class__ = kind


@functools.cache
def _class_for(kind: Any) -> type[Any]:
    """The class of marked parameters that were of class `kind`, whose name it keeps."""
    members = {"stands_for": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
    made: type[Any] = type(kind)(kind.__name__, (Marked, kind), members)
    return made


def _mark_of(param: Any) -> _Mark:
    """AttributeError, so that hasattr says no, for one that has a marked class and no mark: a copy."""
    found = _marks.get(id(param))
    if found is None or found[0]() is not param:
        raise AttributeError("this parameter has no marks of ZeRO")
    return found[1]


def _param(self: Any) -> Parameter:
    return self  # type: ignore[no-any-return]


def _forget(key: int, _: object) -> None:
    _marks.pop(key, None)


def _own_part(param: Parameter, known: _Mark) -> Tensor | None:
    parts: Parts | None = None if known.parts is None else known.parts()
    if parts is None:
        return None
    partition = parts.partition
    if partition.owns(param):
        return zpartition.local_weight(param)
    length = -(-param.numel() // zcomm.group_size(partition.group))  # all ranks have all of it
    return param.detach().reshape(-1)[partition.rank * length : (partition.rank + 1) * length]
