"""Stage 3 as a module sees it: hooks that use and leave units, and weights that autograd saves.

Three things reach for weights, and each is met where it happens.
- A module runs: hooks around the call of every unit's module.
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
from zpartition.gathered import hook_state
from zpartition.residence import Residence, Unit
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


@attrs.define(eq=False)
class _Frame:
    """A module with a unit that is running."""

    unit: Unit | None
    saving: Any  # the context manager that is to be left, or None
    borrowed: list[Unit] = attrs.field(factory=list)  # used by reading their parameters


class _Watched(dict[str, "Parameter | None"]):
    """The `_parameters` of a module, which tells when a running module reads one."""

    watch: Watch
    units: Mapping[str, Unit]

    def __reduce__(self) -> Any:
        """A copy of the module, or a pickle, has an ordinary dict."""
        return dict, (dict(self),)

    def values(self) -> Any:
        self._borrow_all()
        return super().values()

    def items(self) -> Any:
        self._borrow_all()
        return super().items()

    def _borrow_all(self) -> None:
        """Somebody walks over them; while a module runs, that may be to read them."""
        for unit in self.units.values() if self.watch.frames else ():
            if not unit.is_used:
                self.watch.borrow(unit)

    def __getitem__(self, name: str) -> Parameter | None:
        unit = self.units.get(name)
        if unit is not None and not unit.is_used:
            self.watch.borrow(unit)
        return super().__getitem__(name)


@final
@attrs.define(eq=False)
class Watch:
    """The hooks of one partition."""

    residence: Residence
    module: nn.Module
    unit_of: dict[int, Unit]  # id of a parameter -> its unit
    handles: list[RemovableHandle] = attrs.field(factory=list)
    frames: list[_Frame] = attrs.field(factory=list)
    replaced: list[nn.Module] = attrs.field(factory=list)  # modules with watched `_parameters`

    @classmethod
    def install(cls, module: nn.Module, residence: Residence) -> Watch:
        """Hook `module`; `close` takes everything away again."""
        unit_of = {id(p): unit for unit in residence.units.values() for s in unit.storages for p in s.params}
        watch = cls(residence, module, unit_of)
        if not residence.units:
            return watch  # everything is whole
        for path in dict.fromkeys(("", *residence.units)):
            watch._hook(module.get_submodule(path), residence.units.get(path))
        for child in module.modules():
            units = {n: unit_of[id(p)] for n, p in child._parameters.items() if p is not None and id(p) in unit_of}
            if units:
                watched = _Watched(child._parameters)
                watched.watch, watched.units = watch, units
                child._parameters = watched
                watch.replaced.append(child)
        watch.handles += hook_state(module, unit_of, residence)
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
        while self.frames:
            self._stop_saving(self.frames.pop())

    def units_of(self, params: Iterable[Parameter]) -> list[Unit]:
        """The units that hold any of `params`, each once."""
        found = {id(unit): unit for param in params if (unit := self.unit_of.get(id(param))) is not None}
        return list(found.values())

    # -- modules that run ------------------------------------------------------------------------

    def _hook(self, module: nn.Module, unit: Unit | None) -> None:
        def enter(_module: nn.Module, _args: Any) -> None:
            self.enter(unit)

        def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
            return self.leave(unit, output)

        begin, end = map(torch.compiler.disable, (enter, leave))  # hooks stay between the graphs
        self.handles.append(module.register_forward_pre_hook(begin, prepend=True))
        self.handles.append(module.register_forward_hook(end, always_call=True))

    def enter(self, unit: Unit | None) -> None:
        """A module begins."""
        self.frames.append(_Frame(unit, self._start_saving()))
        if unit is not None:
            unit.depth += 1
            self.residence.use(unit)

    def leave(self, unit: Unit | None, output: Any) -> Any:
        """A module returns, or has raised (then `output` is None)."""
        if not self.frames or self.frames[-1].unit is not unit:
            return output  # its beginning failed before it was noted
        frame = self.frames.pop()
        self._stop_saving(frame)
        if unit is not None or frame.borrowed:
            output = self._apart(output)
        if unit is not None:
            unit.depth -= 1
            self.residence.leave(unit)
        for other in frame.borrowed:
            other.depth -= 1
            self.residence.leave(other)
        return output

    def borrow(self, unit: Unit) -> None:
        """The innermost running module reads a parameter of `unit`: it stays whole until that module returns."""
        if self.frames:
            unit.depth += 1
            self.frames[-1].borrowed.append(unit)
            self.residence.use(unit)

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

    def _stop_saving(self, frame: _Frame) -> None:
        if frame.saving is not None:
            frame.saving.__exit__(None, None, None)

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
