"""Stage 3 as a module sees it: hooks that use and leave units, and weights that autograd saves.

Three things reach for weights, and each is met where it happens.
- A module runs: hooks around the call of every unit's module, and of what it consists of when that runs alone.
- Autograd needs a weight again: what it saves of a gathered buffer is packed as an address (unit, shape, strides,
  offset), and unpacking it uses the unit.  So no saved tensor keeps a buffer alive, buffers can be shared, and
  backward gathers exactly what it reads.
- A running module reads a parameter of another unit (`F.linear(x, self.embed.weight)`): the modules' `_parameters`
  are dicts that look.  Outside of a running module they do nothing, so that one rank may print a shape.

A module that returns a view of its own weights (a slice of a position table, say) would return memory that is about
to be reused: such outputs are copied.
"""

from __future__ import annotations

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
from zpartition.calls import Calls, Hook
from zpartition.gathered import Block, hook_state
from zpartition.residence import UNKNOWN_READER, Residence, Unit
from zpartition.sharded import ShardedStorage

__all__ = ["Watch"]


@attrs.frozen(eq=False, slots=True)
class _Saved:
    """A weight that autograd saved, as the place where it will be found."""

    unit: Unit
    storage: ShardedStorage
    dtype: torch.dtype
    geometry: tuple[torch.Size, tuple[int, ...], int]  # shape, strides, offset from the buffer's first element
    version: int  # of the weights


@attrs.frozen(eq=False, slots=True)
class _Foreign:
    """Something that the hooks around ours packed."""

    unpack: Callable[[Any], Any]
    packed: Any


class _Watched(dict[str, "Parameter | None"]):
    """The `_parameters` of a module, which tells when a running module reads one."""

    watch: Watch
    units: Mapping[str, Unit]

    def __reduce__(self) -> Any:
        """A copy of the module, or a pickle, has an ordinary dict.  Raises ValueError while weights rest."""
        for name, unit in self.units.items():
            if not unit.is_used:
                raise ValueError(
                    f"a copy or a pickle of a module would hold NaN for parameter {name!r}, whose weights rest as "
                    f"shards (unit {unit.name!r}). Make it inside zpartition.gathered(module), or use state_dict()."
                )
        return dict, (dict(self),)

    def values(self) -> Any:
        self._borrow_all()
        return super().values()

    def items(self) -> Any:
        self._borrow_all()
        return super().items()

    def _borrow_all(self) -> None:
        """Somebody walks over them; while a module runs, that may be to read them."""
        for unit in self.units.values() if self.watch.running.open else ():
            if not unit.is_used:
                self.watch.borrow(unit)

    def __getitem__(self, name: str) -> Parameter | None:
        unit = self.units.get(name)
        if unit is not None and not (unit.is_used and unit.depth):
            self.watch.borrow(unit)
        return super().__getitem__(name)


@final
@attrs.define(eq=False)
class Watch:
    """The hooks of one partition."""

    residence: Residence
    module: nn.Module
    unit_of: dict[int, Unit]  # id of a parameter -> its unit
    running: Calls  # of modules with units
    dicts: Calls  # of state dicts that are made or loaded
    blocks: list[Block] = attrs.field(factory=list)  # of `gathered`, those that are open, the innermost last
    handles: list[RemovableHandle] = attrs.field(factory=list)
    replaced: list[nn.Module] = attrs.field(factory=list)  # modules with watched `_parameters`

    @classmethod
    def install(cls, module: nn.Module, residence: Residence) -> Watch:
        """Hook `module`; `close` takes everything away again."""
        unit_of = {id(p): unit for unit in residence.units.values() for s in unit.storages for p in s.params}
        watch = cls(residence, module, unit_of, Calls(residence), Calls(residence, exact=True))
        if not residence.units:
            return watch  # everything is whole
        called = {module.get_submodule(path): residence.units.get(path) for path in ("", *residence.units)}
        for child, unit in called.items():
            watch._hook(child, unit)
        for child in module.modules():
            units = {n: unit_of[id(p)] for n, p in child._parameters.items() if p is not None and id(p) in unit_of}
            if units:
                watched = _Watched(child._parameters)
                watched.watch, watched.units = watch, units
                child._parameters = watched
                watch.replaced.append(child)
                watch.handles += hook_state(child, units, watch.dicts)
                if child not in called:
                    watch._hook_part(child, watch.units_of(child._parameters.values()))
        return watch

    def close(self) -> None:
        """Take hooks and watched dicts away."""
        for handle in self.handles:
            handle.remove()
        for child in self.replaced:
            child._parameters = dict(child._parameters)
        self.handles.clear()
        self.replaced.clear()

    remove = close  # as a hook's handle has it

    def reset(self) -> None:
        """After an exception: no module is running."""
        self.running.reset()
        self.dicts.reset()

    def sweep(self) -> None:
        """Forget calls that are over although no hook was told (Ctrl-C, an exception in a state dict)."""
        self.running.sweep()
        self.dicts.sweep()

    def units_of(self, params: Iterable[Parameter | None]) -> list[Unit]:
        """The units that hold any of `params`, each once."""
        found = {id(unit): unit for param in params if (unit := self.unit_of.get(id(param))) is not None}
        return list(found.values())

    # -- modules that run ------------------------------------------------------------------------

    def _hook(self, module: nn.Module, unit: Unit | None) -> None:
        """Use `unit` while its module runs."""
        units = [] if unit is None else [unit]

        def enter(owner: nn.Module, _args: Any) -> None:
            self.enter(owner, units)

        def leave(owner: nn.Module, _args: Any, output: Any) -> Any:
            return self.leave(owner, output)

        self._register(module, *map(torch.compiler.disable, (enter, leave)))  # hooks stay between the graphs

    def _hook_part(self, module: nn.Module, units: list[Unit]) -> None:
        """Use `units` while a part of their modules is run by itself, from outside."""

        def enter(owner: nn.Module, _args: Any) -> None:
            if not (torch.compiler.is_compiling() or self.running.open or _compat.is_in_backward()):
                self.enter(owner, units)

        def leave(owner: nn.Module, _args: Any, output: Any) -> Any:
            if not torch.compiler.is_compiling() and self.running.open and self.running.open[0].owner is owner:
                return self.leave(owner, output)
            return output

        self._register(module, enter, leave)

    def _register(self, module: nn.Module, enter: Callable[..., None], leave: Callable[..., Any]) -> None:
        self.handles.append(module.register_forward_pre_hook(Hook(enter), prepend=True))
        self.handles.append(module.register_forward_hook(Hook(leave), always_call=True))

    def enter(self, owner: nn.Module, units: list[Unit]) -> None:
        """A module begins."""
        if owner is self.module:
            self.sweep()
        self.running.begin(owner, "_call_impl", self._start_saving(), units)

    def leave(self, owner: nn.Module, output: Any) -> Any:
        """A module returns, or has raised (then `output` is None)."""
        call = self.running.innermost(owner)
        if call is None:
            return output  # its beginning failed before it was noted
        if call.units:
            output = self._apart(output)
        self.running.end()
        return output

    def borrow(self, unit: Unit) -> None:
        """The innermost running module reads a parameter of `unit`: it stays whole until that module returns.

        In backward it may be a checkpoint inside a unit that runs again, with hooks for saved tensors of its own:
        then nobody knows who keeps what was read, and the unit stays until its gradients have arrived.
        """
        if self.running.open:
            self.running.hold(unit)
        elif _compat.is_in_backward():
            self.residence.use(unit)
            unit.reader = UNKNOWN_READER

    def _apart(self, output: Any) -> Any:
        """The output with copies in the place of views of gathered weights."""
        if isinstance(output, Tensor):
            return self._copied(output)
        return output if output is None else tree_map_only(Tensor, self._copied, output)

    def _copied(self, tensor: Tensor) -> Tensor:
        is_weight = tensor.layout is torch.strided and self._storage_of(tensor) is not None
        return tensor.clone() if is_weight else tensor

    # -- what autograd saves ---------------------------------------------------------------------

    def _start_saving(self) -> Any:
        """Pack weights from now on, unless that is done already."""
        outer = _compat.outer_saved_tensor_hooks()
        if outer is not None and getattr(outer[0], "__self__", None) is self:
            return None  # a unit around this one has begun it
        hooks = torch.autograd.graph.saved_tensors_hooks(*self._hooks_over(outer))
        hooks.__enter__()
        return hooks

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves inside of gathered weights is packed, as in a module that runs."""
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
            return _Foreign(outer[1], outer[0](tensor)) if address is None else address

        return pack, self.unpack

    def pack(self, tensor: Tensor) -> Any:
        """An address for a gathered weight; the memory of anything else.

        A node that holds its own output would keep its graph alive if no backward came; autograd gives what is
        unpacked its place in the graph again.
        """
        address = self._address_of(tensor)
        if address is None:
            return tensor if tensor.grad_fn is None else tensor.detach()
        return address

    def _address_of(self, tensor: Tensor) -> _Saved | None:
        storage = self._storage_of(tensor)
        if storage is None:
            return None
        assert storage.full is not None
        start = storage.full.storage_offset() * storage.full.element_size() // tensor.element_size()
        geometry = (tensor.shape, tensor.stride(), int(tensor.storage_offset()) - int(start))
        unit = self.unit_of[id(storage.params[0])]
        return _Saved(unit, storage, tensor.dtype, geometry, self.residence.version)

    def unpack(self, packed: Any) -> Any:
        """The weight at an address.  Raises RuntimeError if it was updated since."""
        if type(packed) is _Foreign:
            return packed.unpack(packed.packed)
        if type(packed) is not _Saved:
            return packed
        if packed.version != self.residence.version:
            raise RuntimeError(
                f"a backward needs weights of unit {packed.unit.name!r} as they were before the optimizer's update "
                "(or an edit, or a load). Run every backward of a forward before the step, or the forward again."
            )
        self.residence.use(packed.unit)
        if packed.unit.reader != UNKNOWN_READER:
            packed.unit.reader = _compat.running_node()
        assert packed.storage.full is not None
        full, (shape, strides, offset) = packed.storage.full.view(packed.dtype), packed.geometry
        found = full.as_strided(shape, strides, full.storage_offset() + offset)
        # Under create_graph=True autograd saves what it was given here, and nobody packs that.
        return found.clone() if torch.is_grad_enabled() else found

    def _storage_of(self, tensor: Tensor) -> ShardedStorage | None:
        if not self.residence.unit_at:
            return None
        return self.residence.unit_at.get(tensor.untyped_storage().data_ptr())
