"""Unshard hooks: module hooks that unshard and reshard units, and packing of weights that autograd saves.

Weights are used in four ways, each handled where it happens.
- A module runs: hooks around the call of every unit's module, and of its parts when they run alone.
- Autograd needs a weight again: a saved tensor in a gathered buffer is packed as an address (unit, shape, strides,
  offset), and unpacking it unshards the unit.  So no saved tensor keeps a buffer alive, buffers can be shared, and
  backward gathers exactly what it reads.
- A running module reads a parameter of another unit (`F.linear(x, self.embed.weight)`): the modules' `_parameters`
  are dicts with hooks.  Outside a running module they do nothing, so that one rank may print a shape.
- A method of the root module reads parameters (`engine.compute_loss(x)`): `of_method` makes it a running module that
  holds nothing yet.

A module that returns a view of its own weights (a slice of a position table, say) would return memory that is about
to be reused: such outputs are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zpartition import _compat
from zpartition._compat import tree_map_only
from zpartition.weights.calls import ActiveCalls, ModuleHook, asks_for_names
from zpartition.weights.sharded import ShardedStorage
from zpartition.weights.unshard import UNKNOWN_READER, Unit, Unsharder

__all__ = ["GatheredBlock", "UnshardHooks", "hook_state_dicts"]


@attrs.frozen(eq=False, slots=True)
class _SavedWeight:
    """A weight that autograd saved, as its address."""

    unit: Unit
    storage: ShardedStorage
    dtype: torch.dtype
    geometry: tuple[torch.Size, tuple[int, ...], int]  # shape, strides, offset from the buffer's first element
    version: int  # of the weights


@attrs.frozen(eq=False, slots=True)
class _OuterPacked:
    """A value packed by outer saved-tensor hooks."""

    unpack: Callable[[Any], Any]
    packed: Any


class _HookedParameters(dict[str, "Parameter | None"]):
    """The `_parameters` of a module, which unshards a parameter that a running module reads."""

    unshard_hooks: UnshardHooks
    units: Mapping[str, Unit]

    def __reduce__(self) -> Any:
        """Copy and pickle as an ordinary dict.  Raises ValueError while weights are sharded."""
        for name, unit in self.units.items():
            if not unit.is_used:
                raise ValueError(
                    f"a copy or a pickle of the module would hold NaN for parameter {name!r}, whose weights are "
                    f"sharded (unit {unit.name!r}). Make it inside zpartition.gathered(module), or use state_dict()."
                )
        return dict, (dict(self),)

    def values(self) -> Any:
        self._unshard_all()
        return super().values()

    def items(self) -> Any:
        self._unshard_all()
        return super().items()

    def _unshard_all(self) -> None:
        """Unshard all parameters of the module if a module runs: code that iterates over them may read them.

        Not in a method alone: one rank may count its parameters.
        """
        for unit in self.units.values() if self.unshard_hooks.is_module_running else ():
            if not unit.is_used:
                self.unshard_hooks.unshard_for_read(unit)

    def __getitem__(self, name: str) -> Parameter | None:
        unit = self.units.get(name)
        if unit is not None and not (unit.is_used and unit.depth):
            self.unshard_hooks.unshard_for_read(unit)
        return super().__getitem__(name)


@final
@attrs.frozen(eq=False)
class GatheredBlock:
    """One open `gathered(...)` block."""

    units: list[Unit]  # that it holds
    params: list[Parameter]
    modifier_rank: int | None  # rank whose edits are adopted; None: edits must be equal on all ranks
    before: list[tuple[Parameter, Tensor]]  # unsharded parameters and their values, if `modifier_rank` is None


@final
@attrs.define(eq=False)
class UnshardHooks:
    """Hooks of one partition."""

    unsharder: Unsharder
    module: nn.Module
    unit_of: dict[int, Unit]  # id of a parameter -> its unit
    running: ActiveCalls  # of modules with units
    dicts: ActiveCalls  # of state dicts that are made or loaded
    blocks: list[GatheredBlock] = attrs.field(factory=list)  # open `gathered` blocks, the innermost last
    handles: list[RemovableHandle] = attrs.field(factory=list)
    replaced: list[nn.Module] = attrs.field(factory=list)  # modules with hooked `_parameters`
    num_methods: int = 0  # running methods of the root module

    @classmethod
    def install(cls, module: nn.Module, unsharder: Unsharder) -> UnshardHooks:
        """Hook `module`; `close` removes all hooks."""
        unit_of = {id(p): unit for unit in unsharder.units.values() for s in unit.storages for p in s.params}
        unshard_hooks = cls(unsharder, module, unit_of, ActiveCalls(unsharder), ActiveCalls(unsharder, exact=True))
        if not unsharder.units:
            return unshard_hooks  # nothing is sharded
        called = {module.get_submodule(path): unsharder.units.get(path) for path in ("", *unsharder.units)}
        for child, unit in called.items():
            unshard_hooks._hook(child, unit)
        for child in module.modules():
            units = {n: unit_of[id(p)] for n, p in child._parameters.items() if p is not None and id(p) in unit_of}
            if units:
                hooked = _HookedParameters(child._parameters)
                hooked.unshard_hooks, hooked.units = unshard_hooks, units
                child._parameters = hooked
                unshard_hooks.replaced.append(child)
                unshard_hooks.handles += hook_state_dicts(child, units, unshard_hooks.dicts)
                if child not in called:
                    unshard_hooks._hook_part(child, unshard_hooks.units_of(child._parameters.values()))
        return unshard_hooks

    def close(self) -> None:
        """Remove hooks and hooked dicts."""
        for handle in self.handles:
            handle.remove()
        for child in self.replaced:
            child._parameters = dict(child._parameters)
        self.handles.clear()
        self.replaced.clear()

    remove = close  # the name in `Removable`

    def reset(self) -> None:
        """Drop all calls after an exception."""
        self.running.reset()
        self.dicts.reset()

    def drop_finished(self) -> None:
        """Drop calls that ended without a hook (Ctrl-C, an exception in a state dict)."""
        self.running.drop_finished()
        self.dicts.drop_finished()

    def units_of(self, params: Iterable[Parameter | None]) -> list[Unit]:
        """Return the units that hold any of `params`, each once."""
        found = {id(unit): unit for param in params if (unit := self.unit_of.get(id(param))) is not None}
        return list(found.values())

    # -- running modules -------------------------------------------------------------------------

    def _hook(self, module: nn.Module, unit: Unit | None) -> None:
        """Unshard `unit` while its module runs."""
        units = [] if unit is None else [unit]

        def begin_call(owner: nn.Module, _args: Any) -> None:
            self.begin_call(owner, units)

        def end_call(owner: nn.Module, _args: Any, output: Any) -> Any:
            return self.end_call(owner, output)

        begin, end = _compat.uncompiled(begin_call), _compat.uncompiled(end_call)  # hooks run between compiled graphs
        self._register(module, begin, end)

    def _hook_part(self, module: nn.Module, units: list[Unit]) -> None:
        """Unshard `units` while a part of their modules is called by itself, from outside."""

        def begin_call(owner: nn.Module, _args: Any) -> None:
            if not (torch.compiler.is_compiling() or self.running.open or _compat.is_in_backward()):
                self.begin_call(owner, units)

        def end_call(owner: nn.Module, _args: Any, output: Any) -> Any:
            if not torch.compiler.is_compiling() and self.running.open and self.running.open[0].owner is owner:
                return self.end_call(owner, output)
            return output

        self._register(module, begin_call, end_call)

    def _register(self, module: nn.Module, begin_call: Callable[..., None], end_call: Callable[..., Any]) -> None:
        self.handles.append(module.register_forward_pre_hook(ModuleHook(begin_call), prepend=True))
        self.handles.append(module.register_forward_hook(ModuleHook(end_call), always_call=True))

    def begin_call(self, owner: nn.Module, units: list[Unit]) -> None:
        """Begin the call of a module."""
        if owner is self.module:
            self.drop_finished()
        self.running.begin(owner, "_call_impl", self._start_saving(), units)

    def end_call(self, owner: nn.Module, output: Any) -> Any:
        """End the call of a module, which returned, or raised (then `output` is None)."""
        call = self.running.innermost(owner)
        if call is None:
            return output  # its pre-hook failed before the call was pushed
        if call.units:
            output = self._without_views(output)
        self.running.end()
        return output

    @property
    def is_module_running(self) -> bool:
        """True inside the call of a module."""
        return len(self.running.open) > self.num_methods

    def of_method(self, bound: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a method of the root module; weights that it reads are unsharded meanwhile."""

        @functools.wraps(bound)
        def call_method(*args: Any, **kwargs: Any) -> Any:
            call = self.running.begin(self.module, "", self._start_saving(), ())
            self.num_methods += 1
            output = None
            try:
                output = self._without_views(bound(*args, **kwargs))
            finally:
                self.num_methods -= 1
                self.running.end_until(call)
            return output

        return call_method

    def unshard_for_read(self, unit: Unit) -> None:
        """Unshard a unit of which the innermost running module reads a parameter, until that module returns.

        In backward the reader may be a recomputed checkpoint inside a unit, with its own saved-tensor hooks.  The
        lifetime of the value is then unknown, and the unit stays until its gradients have arrived.
        """
        if self.running.open:
            self.running.hold(unit)
        elif _compat.is_in_backward():
            self.unsharder.unshard(unit)
            unit.reader = UNKNOWN_READER

    def _without_views(self, output: Any) -> Any:
        """Replace views of gathered weights in `output` by copies."""
        if isinstance(output, Tensor):
            return self._copied_if_weight(output)
        return output if output is None else tree_map_only(Tensor, self._copied_if_weight, output)

    def _copied_if_weight(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self.is_gathered_memory(tensor) else tensor

    # -- tensors that autograd saves -------------------------------------------------------------

    def _start_saving(self) -> Any:
        """Enter hooks that pack weights; None if an enclosing call has done so."""
        outer = _compat.outer_saved_tensor_hooks()
        if outer is not None and getattr(outer[0], "__self__", None) is self:
            return None  # an enclosing call has entered them
        hooks = torch.autograd.graph.saved_tensors_hooks(*self._hooks_over(outer))
        hooks.__enter__()
        return hooks

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Pack gathered weights that autograd saves inside the block, as in a running module."""
        hooks = self._start_saving()
        try:
            yield
        finally:
            if hooks is not None:
                hooks.__exit__(None, None, None)

    def _hooks_over(self, outer: _compat.Hooks | None) -> _compat.Hooks:
        if outer is None:
            return self.pack, self.unpack

        def pack(tensor: Tensor) -> Any:
            address = self._address_of(tensor)
            return _OuterPacked(outer[1], outer[0](tensor)) if address is None else address

        return pack, self.unpack

    def pack(self, tensor: Tensor) -> Any:
        """Return an address for a gathered weight, other tensors detached.

        A node that holds its own output would keep its graph alive without a backward; autograd attaches unpacked
        tensors to the graph again.
        """
        address = self._address_of(tensor)
        if address is None:
            return tensor if tensor.grad_fn is None else tensor.detach()
        return address

    def _address_of(self, tensor: Tensor) -> _SavedWeight | None:
        storage = self._storage_of(tensor)
        if storage is None:
            return None
        assert storage.full is not None
        start = storage.full.storage_offset() * storage.full.element_size() // tensor.element_size()
        geometry = (tensor.shape, tensor.stride(), int(tensor.storage_offset()) - int(start))
        unit = self.unit_of[id(storage.params[0])]
        return _SavedWeight(unit, storage, tensor.dtype, geometry, self.unsharder.version)

    def unpack(self, packed: Any) -> Any:
        """Return the weight at an address.  Raises RuntimeError if it was updated since."""
        if type(packed) is _OuterPacked:
            return packed.unpack(packed.packed)
        if type(packed) is not _SavedWeight:
            return packed
        if packed.version != self.unsharder.version:
            raise RuntimeError(
                f"a backward needs weights of unit {packed.unit.name!r} from before the optimizer's update (or an "
                "edit, or a load). Run every backward of a forward before the step, or run the forward again."
            )
        self.unsharder.unshard(packed.unit)
        if packed.unit.reader != UNKNOWN_READER:
            packed.unit.reader = _compat.running_node()
            self.unsharder.read[packed.unit.name] = packed.unit
        assert packed.storage.full is not None
        full, (shape, strides, offset) = packed.storage.full.view(packed.dtype), packed.geometry
        found = full.as_strided(shape, strides, full.storage_offset() + offset)
        # Under create_graph=True autograd saves this tensor again, without packing it.
        return found.clone() if torch.is_grad_enabled() else found

    def is_gathered_memory(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is strided and in the buffer of a gathered unit."""
        return tensor.layout is torch.strided and self._storage_of(tensor) is not None

    def _storage_of(self, tensor: Tensor) -> ShardedStorage | None:
        if not self.unsharder.unit_at:
            return None
        return self.unsharder.unit_at.get(tensor.untyped_storage().data_ptr())


def hook_state_dicts(module: nn.Module, units: Mapping[str, Unit], dicts: ActiveCalls) -> list[Any]:
    """Unshard `units` (by names of own parameters) in state dicts of `module`; returns the hook handles."""
    distinct = list({id(unit): unit for unit in units.values()}.values())

    def begin(function: str) -> ModuleHook:
        def hold(owner: nn.Module, *_: Any) -> None:
            dicts.unsharder.check_resident() if function == "load" else dicts.unsharder.check_weights_resident()
            dicts.drop_finished()
            dicts.begin(owner, function, None, () if function == "state_dict" and asks_for_names() else distinct)

        return ModuleHook(hold)

    def saved(owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        found = {name: state[prefix + name] for name in units if prefix + name in state}
        live = [name for name, value in found.items() if isinstance(value, Parameter) and units[name].depth == 1]
        shown = {name: value for name, value in found.items() if units[name].is_used and _is_plain(value)}
        state.update({prefix + name: value.clone() for name, value in shown.items()})
        if dicts.innermost(owner) is not None:
            dicts.end()
        if live:
            raise ValueError(_KEPT.format(name=prefix + live[0]))

    def loaded(owner: nn.Module, _incompatible: Any) -> None:
        call = dicts.innermost(owner)
        for unit in call.units if call is not None else ():
            if unit.depth == 1:
                dicts.unsharder.broadcast_edits(unit, 0, ShardedStorage.adopt_weights)
                dicts.unsharder.version += 1  # an earlier graph must not see the loaded weights
        if call is not None:
            dicts.end()

    return [
        module.register_state_dict_pre_hook(begin("state_dict")),  # type: ignore[no-untyped-call]
        module.register_state_dict_post_hook(ModuleHook(saved)),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(begin("load")),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(ModuleHook(loaded)),  # type: ignore[no-untyped-call]
    ]


def _is_plain(value: object) -> bool:
    """Return whether `value` is a view of a weight, which must be copied before the weights are resharded."""
    return isinstance(value, Tensor) and not isinstance(value, Parameter)


_KEPT = (
    "state_dict(keep_vars=True) would return parameter {name!r} itself, whose weights are sharded and read as NaN. "
    "Leave keep_vars out, or call it inside zpartition.gathered(module) and use the result there."
)
