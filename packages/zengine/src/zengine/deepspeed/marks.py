"""ZeRO marks: `param.ds_id` and related attributes, by which third-party code detects and gathers sharded weights.

Saving code of many projects begins with `hasattr(param, "ds_id")`: without the mark it takes a sharded weight for a
whole one.  So `deepspeed.initialize` marks every parameter at stage 3, `zero.Init` marks what is built inside, and
`close()` of the engine removes the marks.  At stages 0 to 2, and with plain zengine, nothing is marked.

Design.  A marked parameter has a class derived from its own, whose properties read the partition: gathering a unit
writes nothing, and copies, pickles and detached tensors stay plain.  A table beside the parameters holds what does
not follow from the partition.

`ds_status` shows who has gathered a weight, not where bytes are: AVAILABLE while a block, `all_gather()` or a running
module holds it, NOT_AVAILABLE otherwise, even if it happens to be whole (a small one, a world of one rank).  Code
that asserts NOT_AVAILABLE before it gathers, and code that gathers what is not AVAILABLE, both work.  INFLIGHT never
occurs, because gathers are awaited before user code runs.

A saved weight that autograd unpacks is a plain tensor here, not the parameter.  While a marked engine exists,
torch.Tensor has a `ds_status`: AVAILABLE for tensors in the memory of whole weights, an AttributeError for others.
The backward of custom functions asks for it (TRL's losses do).

Between `zero.Init` and `initialize`, a fill of a weight at rest (`nn.init.normal_(weight)` outside of
GatheredParameters) has no effect, as with DeepSpeed's empty weights: Transformers initializes again on the ranks that
have not edited.
Until then the class of a marked parameter has a `__torch_function__`; `initialize` gives it one without.

Rejected: attributes in the parameters' dicts, updated at every gather (a cost in every step, and closures that
cannot be pickled); properties on torch.nn.Parameter (shared by all code).
"""

from __future__ import annotations

import enum
import functools
import itertools
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import zcomm
import zpartition
from zengine.deepspeed.utils import groups
from zengine.deepspeed.utils.leaves import get_z3_leaf_modules
from zengine.features import Feature

if TYPE_CHECKING:
    from zengine.engine.parts import Run

__all__ = [
    "ParameterOffload",
    "PartitionedParamStatus",
    "ZeroMarks",
    "ZeroParamStatus",
    "ZeroParamType",
    "external_parameters",
    "is_marked",
    "mark",
    "mark_available",
    "unmark",
]


class ZeroParamType(enum.Enum):
    """DeepSpeed's kinds of parameters."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Gathered or not."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # never occurs


class PartitionedParamStatus(enum.Enum):
    """Status of a rank's shard in memory; here always AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@final
@attrs.define(eq=False)
class _Mark:
    """State of one marked parameter that its partition does not hold."""

    number: int  # ds_id
    num_holders: int = 0  # blocks and all_gather calls that hold it
    persists: bool = False  # small enough to stay whole
    leaf: Any = None  # weak reference to its leaf module
    partition: Any = None  # weak reference to the partition that shards it
    opened: _GatherCall | None = None  # the all_gather call that holds it
    sub_modules: set[int] = attrs.field(factory=set)  # third-party code clears it; nothing reads it

    def owner(self) -> zpartition.Partition | None:
        """Return the partition of the engine that marked the parameter; None before `initialize`."""
        found: zpartition.Partition | None = None if self.partition is None else self.partition()
        return found


_marks: dict[int, tuple[weakref.ref[Parameter], _Mark]] = {}  # by identity of the parameter
_numbers = itertools.count()
_external: weakref.WeakKeyDictionary[nn.Module, dict[int, Parameter]] = weakref.WeakKeyDictionary()


class Marked:
    """Attributes of a marked parameter."""

    __slots__ = ()
    stands_for: type[Parameter]  # the parameter's own class; zpartition reads it too

    @property
    def ds_id(self) -> int:
        """Number of the parameter, in the order of marking."""
        return _mark_of(self).number

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Status: AVAILABLE while it is gathered."""
        known = _mark_of(self)
        is_held = known.num_holders > 0 or zpartition.is_gathered(_param(self))
        partition = None if is_held else known.owner()
        if partition is not None and id(self) not in partition.unshard_hooks.unit_of:  # it stays whole
            is_held = _is_in_running_module(_param(self))
        return ZeroParamStatus.AVAILABLE if is_held else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the whole parameter; equals `shape`."""
        _mark_of(self)
        return _param(self).shape

    @property
    def ds_numel(self) -> int:
        """Elements of the whole parameter."""
        _mark_of(self)
        return _param(self).numel()

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's shard, flat; before `initialize`, an equal share on the meta device.

        Shards may differ in size between ranks.
        """
        part: Any = _local_shard(_param(self), _mark_of(self))
        part.ds_numel, part.status, part.final_location = part.numel(), PartitionedParamStatus.AVAILABLE, None
        return part  # type: ignore[no-any-return]

    def partition_numel(self) -> int:
        """Return the elements of this rank's shard; before `initialize`, those of an equal share."""
        return self.ds_tensor.numel()

    @property
    def ds_persist(self) -> bool:
        """True if it stays whole because it is small."""
        return _mark_of(self).persists

    @property
    def ds_param_type(self) -> ZeroParamType:
        _mark_of(self)
        return ZeroParamType.PARTITIONED

    @property
    def ds_process_group(self) -> Any:
        """Group of the ranks that shard it; before `initialize`, that of the replicas."""
        owner = _mark_of(self).owner()
        found = groups.get_data_parallel_group() if owner is None else owner.shard_group_of(_param(self))
        return dist.group.WORLD if found is None and dist.is_initialized() else found

    @property
    def ds_active_sub_modules(self) -> set[int]:
        """Unused set, for code that clears it."""
        return _mark_of(self).sub_modules

    @property
    def ds_z3_leaf_module(self) -> nn.Module:
        """Leaf module of the parameter.  Raises AttributeError if there is none."""
        found = _mark_of(self).leaf
        module: nn.Module | None = None if found is None else found()
        if module is None:
            raise AttributeError("ds_z3_leaf_module: this parameter belongs to no leaf module")
        return module

    def all_gather(
        self, param_list: Iterable[Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> _DoneHandle | None:
        """Gather this parameter, or those of `param_list`, until `partition`; all ranks must call."""
        wanted = [_param(self)] if param_list is None else list(param_list)
        missing = [param for param in wanted if getattr(param, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            _GatherCall(missing)
        return _DoneHandle() if async_op else None

    def partition(
        self,
        param_list: Iterable[Parameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Release what `all_gather` gathered; all ranks must call.  Edits that all ranks made equally are kept.

        Raises ValueError for other edits and undoes them.
        """
        for param in [_param(self)] if param_list is None else list(param_list):
            opened = _mark_of(param).opened
            if opened is not None:
                opened.release(param)

    def ds_summary(self, use_debug_name: bool = False) -> dict[str, Any]:
        """Return a summary for messages."""
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
            "ds_tensor.shape": part.shape,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an unmarked, unsharded parameter."""
        copied = self.stands_for.__deepcopy__(_param(self), memo)  # type: ignore[no-untyped-call]
        copied.__class__ = self.stands_for
        return copied


@final
class _DoneHandle:
    """Handle of an asynchronous gather, which is already done."""

    def wait(self, **_: Any) -> None: ...


@final
class _GatherCall:
    """Parameters that one `all_gather` call holds, until the last one is released."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        with ExitStack() as opening:
            opening.enter_context(mark_available(params))
            opening.enter_context(zpartition.gathered(params))
            self.open = opening.pop_all()
        self.params = {id(param) for param in params}
        for param in params:
            _mark_of(param).opened = self

    def release(self, param: Parameter) -> None:
        _mark_of(param).opened = None
        self.params.discard(id(param))
        if not self.params:
            self.open.close()


def is_marked(param: object) -> bool:
    """Return True if `param` has a mark."""
    return isinstance(param, Marked) and id(param) in _marks


def mark(param: Parameter, *, is_deferred: bool = False) -> _Mark:
    """Return the mark of `param`; create it if there is none.

    is_deferred: `zero.Init` built it, and `initialize` is still to come: fills at rest have no effect.
    """
    marked = _class_for(getattr(type(param), "stands_for", type(param)), is_deferred)
    if not is_marked(param) or (type(param) is not marked and not is_deferred):
        _set_class(param, marked)
        known = _marks.get(id(param))
        if known is None or known[0]() is not param:  # else other code changed its class since (experts)
            _marks[id(param)] = weakref.ref(param, functools.partial(_forget, id(param))), _Mark(next(_numbers))
    return _mark_of(param)


def unmark(params: Iterable[Parameter], modules: Iterable[nn.Module] = ()) -> None:
    """Remove the marks of `params` and `modules`, if they have any."""
    for param in params:
        if isinstance(param, Marked):
            _marks.pop(id(param), None)
            _set_class(param, param.stands_for)
    for module in modules:
        for name in _OF_MODULES:
            vars(module).pop(name, None)


class mark_available(ExitStack):  # noqa: N801 - used like a function
    """Set the marked ones of `params` to AVAILABLE inside the block."""

    def __init__(self, params: Iterable[Parameter]) -> None:
        super().__init__()
        self._found = [_mark_of(param) for param in params if is_marked(param)]

    def __enter__(self) -> mark_available:
        for each in self._found:
            each.num_holders += 1
            self.callback(_release, each)
        return self


def external_parameters(module: nn.Module) -> dict[int, Parameter]:
    """Return the registered parameters that `module` uses and others own, by identity."""
    return _external.setdefault(module, {})


@final
class ParameterOffload:
    """`optimizer.parameter_offload`, for code that removes its hooks before a generation and registers them after.

    The lists have a handle for each module.  Removing one leaves stage 3's hooks in place: parameters that are
    gathered around the generation stay gathered, and modules use them.
    """

    def __init__(self, module: nn.Module, partition: zpartition.Partition) -> None:
        self.module = module
        self._partition = weakref.ref(partition)
        self.forward_hooks: list[_ModuleHandle] = []
        self.backward_hooks: list[_ModuleHandle] = []
        self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """List a handle for each module below `module`."""
        self.forward_hooks.extend(map(_ModuleHandle, module.modules()))
        self.backward_hooks.extend(map(_ModuleHandle, module.modules()))

    _register_hooks_recursively = _register_deepspeed_module

    @property
    def persistent_parameters(self) -> list[Parameter]:
        """Parameters that stay whole because they are small."""
        return [param for param in self.module.parameters() if is_marked(param) and _mark_of(param).persists]

    def partition_all_parameters(self) -> None:
        """Free the weights that stage 3 keeps gathered; their next use gathers them again."""
        partition = self._partition()
        if partition is not None:
            partition.unsharder.release_all()

    empty_partition_cache = partition_all_parameters


@final
class _ModuleHandle:
    """Handle of one module in a list of hooks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def remove(self) -> None: ...


_marked: dict[int, weakref.ref[zpartition.Partition]] = {}  # of marked engines, by the identity of their clocks


@property  # type: ignore[misc]  # set on torch.Tensor, whose attributes torch expects to be properties
def _saved_status(tensor: Any) -> ZeroParamStatus:
    """`torch.Tensor.ds_status`, while any engine is marked: the status of a weight that autograd has unpacked."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        partitions = [partition for found in _marked.values() if (partition := found()) is not None]
        if any(each.has_values(tensor) for each in partitions):
            return ZeroParamStatus.AVAILABLE
    raise AttributeError(f"{type(tensor).__name__!r} object has no attribute 'ds_status'")


@final
class ZeroMarks(Feature):
    """Marks of an engine's module at stage 3, until the engine closes."""

    def attach(self, run: Run) -> None:
        params, modules = list(run.module.parameters()), list(run.module.modules())
        if run.plan.zero.stage < 3:
            unmark(params)  # from zero.Init
            self._undo: Any = _do_nothing
            return
        for param in params:
            mark(param).partition = weakref.ref(run.parts.partition)
        for param in run.parts.partition.persistent():
            mark(param).persists = True
        for module in get_z3_leaf_modules(run.module):
            for param in module.parameters():
                mark(param).leaf = weakref.ref(module)
        for module in modules:
            vars(module).update(zip(_OF_MODULES, (external_parameters(module).items, set(), 0)))
        optimizer: Any = run.optimizer
        if optimizer is not None:
            optimizer.parameter_offload = ParameterOffload(run.module, run.parts.partition)
        engine = id(run.clock)
        _marked[engine] = weakref.ref(run.parts.partition)
        setattr(Tensor, "ds_status", _saved_status)  # noqa: B010 - torch does not declare it
        self._undo = weakref.finalize(run.clock, _remove_marks, params, modules, optimizer, engine)

    def close(self) -> None:
        self._undo()


# Attributes of the modules of a marked engine; no module waits for gradients of its inputs, so none remain.
_OF_MODULES = ("ds_external_parameters", "ds_active_sub_modules", "ds_grads_remaining")


def _remove_marks(params: list[Parameter], modules: list[nn.Module], optimizer: Any, engine: int) -> None:
    unmark(params, modules)
    _marked.pop(engine, None)
    if not _marked and "ds_status" in vars(Tensor):
        delattr(Tensor, "ds_status")
    if optimizer is not None:
        vars(optimizer).pop("parameter_offload", None)


def _do_nothing() -> None: ...


def _release(found: _Mark) -> None:
    found.num_holders -= 1


def _set_class(param: Any, kind: type[Any]) -> None:
    param.__class__ = kind


_FILLS = frozenset(
    (
        *(
            "bernoulli_",
            "cauchy_",
            "clamp_",
            "constant_",
            "dirac_",
            "exponential_",
            "eye_",
            "fill_",
            "kaiming_normal_",
        ),
        *("kaiming_uniform_", "normal_", "ones_", "orthogonal_", "random_", "trunc_normal_", "uniform_", "zero_"),
        *("xavier_normal_", "xavier_uniform_", "zeros_", "mul_", "div_", "add_", "sub_"),
    )
)


class _IgnoresFills:
    """Base of deferred parameters: fills of one without memory, or of a view of it, have no effect."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        plainly: Any = Parameter.__torch_function__  # runs a function as for plain tensors
        is_at_rest = isinstance(target, _IgnoresFills) and plainly(_has_no_memory, types, (target,), {})
        if is_at_rest and getattr(func, "__name__", "") in _FILLS:
            return target
        found = plainly(func, types, args, kwargs)
        if is_at_rest and type(found) is Tensor and _has_no_memory(found):
            return found.as_subclass(_ViewAtRest)
        return found


class _ViewAtRest(_IgnoresFills, Tensor):
    """View of a deferred parameter without memory."""


def _has_no_memory(tensor: Any) -> bool:
    """Return whether one NaN stands for all elements (zpartition's fake device)."""
    return not tensor.is_meta and tensor.dim() > 0 and not any(tensor.stride()) and tensor.numel() > 0


@functools.cache
def _class_for(kind: Any, is_deferred: bool = False) -> type[Any]:
    """Return the marked subclass of `kind`, with the same name."""
    members = {"stands_for": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
    bases = (_IgnoresFills, Marked, kind) if is_deferred else (Marked, kind)
    made: type[Any] = type(kind)(kind.__name__, bases, members)
    return made


def _mark_of(param: Any) -> _Mark:
    """Return the mark.  Raises AttributeError, so that hasattr is False, for a copy of a marked parameter."""
    found = _marks.get(id(param))
    if found is None or found[0]() is not param:
        raise AttributeError("this parameter has no ZeRO marks")
    return found[1]


def _is_in_running_module(param: Parameter) -> bool:
    """Return whether a module with `param` is running in this thread; small weights have no hooks that note it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _RUN_MODULE and any(
            param is own for own in frame.f_locals["self"].parameters(recurse=False)
        ):
            return True
        frame = frame.f_back
    return False


_RUN_MODULE = nn.Module._call_impl.__code__


def _param(self: Any) -> Parameter:
    return self  # type: ignore[no-any-return]


def _forget(key: int, _: object) -> None:
    _marks.pop(key, None)


def _local_shard(param: Parameter, known: _Mark) -> Tensor:
    partition = known.owner()
    if partition is None:
        numel = -(-param.numel() // zcomm.group_size(groups.get_data_parallel_group()))
        return torch.empty(numel, dtype=param.dtype, device="meta")
    if partition.owns(param):
        return zpartition.local_weight(param)
    length = -(-param.numel() // zcomm.group_size(partition.group))  # every rank has the whole parameter
    return param.detach().reshape(-1)[partition.rank * length : (partition.rank + 1) * length]
