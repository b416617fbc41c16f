"""Hollow tensors: a shape, a stride, a dtype and a device, and no memory, for dry runs of usual models.

Problem.  torch's fake tensors answer for every model, and take 0.1 ms or more for an operation, because each one asks
for its rules anew; the first one imports torch's compiler.  A dry run of a large model is ten thousand operations,
and a plan makes several.

Design.  A model repeats itself.  The first time an operation meets arguments of given layouts, torch's meta kernel
runs, and its results are kept as a `Rule`: the layout of each result, and the argument that it is, or shares storage
with.  From then on equal arguments are answered by the rule.  A storage is an `Allocation`, an object that lives as
long as a tensor that uses it.

Only usual operations have rules: of strided tensors of one device, without values.  For the others `Unusual` is
raised, and the caller takes torch's fake tensors, which are also the reference that tests compare with.

Rejected: rules of our own for shapes (a second torch); a run at two batch sizes and a straight line between them
(kernels and views differ where a size is 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zengine._compat import NO_TORCH_FUNCTION, dispatch_mode, has_fake_rule, without_compiler, wrapper_tensor

__all__ = ["HollowTensor", "HollowTensors", "Unusual"]

Layout = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]  # shape, stride, offset, dtype

# Operations with a rule of their own among torch's fake tensors that their meta kernel agrees with, on one device.
_AGREE = frozenset(
    {
        *("view", "_unsafe_view", "select", "slice", "embedding", "index", "copy_", "clone", "_to_copy"),
        *("empty", "zeros", "ones", "full", "arange", "scalar_tensor", "empty_strided", "new_empty_strided"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full"),
    }
)


class Unusual(RuntimeError):
    """Operation without a rule."""


@final
class Allocation:
    """A storage: it is live as long as a tensor refers to it."""

    __slots__ = ("__weakref__", "_nbytes")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def nbytes(self) -> int:
        """Return its bytes, as a torch storage does."""
        return self._nbytes


class HollowTensor(Tensor):
    """Tensor with a layout, a device and an `Allocation` in place of memory; operations need `HollowTensors`."""

    layout_key: Layout
    allocation: Allocation

    __torch_function__ = NO_TORCH_FUNCTION

    def untyped_storage(self) -> Any:
        """Return the allocation."""
        return self.allocation

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs take the disabled one for the type
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Unusual(f"{func} outside of a dry run")


@attrs.frozen(kw_only=True)
class _Made:
    """Result of an operation: a tensor."""

    layout: Layout
    source: int  # argument whose storage it shares; -1 - n: new storage n of the operation
    is_source: bool  # it is that argument itself


@attrs.frozen(kw_only=True)
class Rule:
    """Results of an operation on arguments of given layouts."""

    results: tuple[Any, ...]  # _Made, or the value of another result
    new_nbytes: tuple[int, ...]  # of each new storage
    sequence: type | None  # of the results; None: there is one
    is_general: bool  # holds for other arguments of these layouts


@final
class HollowTensors:
    """Answers operations on hollow tensors of one device, and shows the results to `see`."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._rules: dict[Any, Rule] = {}
        self._see: Callable[[list[Any]], None] = _ignore

    @contextmanager
    def running(self) -> Iterator[None]:
        """Operations inside make hollow tensors, or raise Unusual."""
        with dispatch_mode(self._answer):
            yield

    @contextmanager
    def watching(self, see: Callable[[list[Any]], None]) -> Iterator[None]:
        """Call `see` with the results of every operation inside, those of autograd included."""
        self._see = see
        try:
            yield
        finally:
            self._see = _ignore

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs: list[HollowTensor] = []
        key = (func, _key(args, inputs), _key(kwargs, inputs) if kwargs else None)
        rule = self._rules.get(key)
        if rule is None:
            rule = self._derive(func, args, kwargs, inputs)
            if rule.is_general:
                self._rules[key] = rule
        fresh = [Allocation(nbytes) for nbytes in rule.new_nbytes]
        made = [self._make(result, inputs, fresh) for result in rule.results]
        self._see(made)
        return made[0] if rule.sequence is None else rule.sequence(made)

    def _make(self, result: Any, inputs: list[HollowTensor], fresh: list[Allocation]) -> Any:
        if type(result) is not _Made:
            return result
        source = result.source
        if result.is_source:
            return inputs[source]
        return self._hollow(result.layout, inputs[source].allocation if source >= 0 else fresh[-1 - source])

    def _hollow(self, layout: Layout, allocation: Allocation) -> HollowTensor:
        made: HollowTensor = wrapper_tensor(HollowTensor, layout, self._device)
        made.layout_key, made.allocation = layout, allocation
        return made

    def _derive(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[HollowTensor]) -> Rule:
        """Run the meta kernel and describe its results."""
        name = func._schema.name.partition("::")[2]
        if name == "lift_fresh":  # of torch.tensor: a tensor with values, which later operations may not read
            made = _Made(layout=_layout_of(args[0]), source=-1, is_source=False)
            nbytes = args[0].untyped_storage().nbytes()
            return Rule(results=(made,), new_nbytes=(nbytes,), sequence=None, is_general=False)
        if name == "native_layer_norm":
            return _layer_norm(args)
        if has_fake_rule(func) and name not in _AGREE:
            raise Unusual(f"{func} has a rule of its own")
        metas = _Metas(inputs)
        on_meta = metas.of(kwargs)
        if "device" in kwargs or not inputs:
            on_meta["device"] = self._meta_device(func, kwargs.get("device"))
        with without_compiler():
            found = func(*metas.of(args), **on_meta)
        metas.check_unchanged(func)
        sequence = type(found) if isinstance(found, (list, tuple)) else None
        if sequence not in (None, list, tuple):
            raise Unusual(f"{func} returns a {type(found).__name__}")
        fresh: list[Any] = []  # storages of the results alone
        results = tuple(metas.describe(each, fresh) for each in (found if sequence else [found]))
        sizes = tuple(storage.nbytes() for storage in fresh)
        is_apart = all(type(each) is not _Made or each.source < 0 for each in results)
        is_general = is_apart or metas.are_distinct  # else it is open which of two arguments a result shares with
        return Rule(results=results, new_nbytes=sizes, sequence=sequence, is_general=is_general)

    def _meta_device(self, func: Any, given: Any) -> torch.device:
        """Return the meta device in place of `given`, which must be the device of the run."""
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        asked = torch.device("cpu" if given is None else given)
        if not takes_device or asked != self._device:
            raise Unusual(f"{func} on {asked}")
        return torch.device("meta")


@final
class _Metas:
    """Meta tensors of the layouts of hollow ones; hollow tensors of one allocation share a storage."""

    def __init__(self, inputs: list[HollowTensor]) -> None:
        self._inputs = inputs
        self._storages: dict[int, Any] = {}  # id of an allocation -> meta storage
        self._tensors: dict[int, Tensor] = {}  # id of a hollow tensor -> meta tensor
        for each in inputs:
            if id(each) not in self._tensors:
                self._tensors[id(each)] = self._on_meta(each)
        self.are_distinct = len(self._storages) == len(inputs)

    def _on_meta(self, hollow: HollowTensor) -> Tensor:
        allocation = hollow.allocation
        if id(allocation) not in self._storages:
            empty = torch.empty(allocation.nbytes(), dtype=torch.uint8, device="meta")
            self._storages[id(allocation)] = empty.untyped_storage()
        shape, stride, offset, dtype = hollow.layout_key
        made = torch.empty(0, dtype=dtype, device="meta")
        return made.set_(self._storages[id(allocation)], offset, shape, stride)

    def of(self, value: Any) -> Any:
        """Return `value` with meta tensors for its hollow ones."""
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                raise Unusual("a tensor that was made outside of the dry run")
            return self._tensors[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.of, value))
        return {name: self.of(each) for name, each in value.items()} if isinstance(value, dict) else value

    def check_unchanged(self, func: Any) -> None:
        """Raise Unusual if an operation has given an argument another layout."""
        for each in self._inputs:
            meta = self._tensors[id(each)]
            same_size = meta.untyped_storage().nbytes() == each.allocation.nbytes()
            if not same_size or _layout_of(meta) != each.layout_key:
                raise Unusual(f"{func} changes the layout of an argument")

    def describe(self, result: Any, fresh: list[Any]) -> Any:
        """Return the rule of one result; a new storage is appended to `fresh`."""
        if not isinstance(result, Tensor):
            if isinstance(result, (list, tuple, dict)):
                raise Unusual("nested results")
            return result
        if result.device.type != "meta":
            raise Unusual(f"a result on {result.device}")
        layout = _layout_of(result)
        for index, each in enumerate(self._inputs):
            if result is self._tensors[id(each)]:
                return _Made(layout=layout, source=index, is_source=True)
        storage = result.untyped_storage()
        for index, each in enumerate(self._inputs):
            if storage._cdata == self._tensors[id(each)].untyped_storage()._cdata:
                return _Made(layout=layout, source=index, is_source=False)
        known = [other._cdata for other in fresh]
        if storage._cdata not in known:
            fresh.append(storage)
            known.append(storage._cdata)
        return _Made(layout=layout, source=-1 - known.index(storage._cdata), is_source=False)


def _layer_norm(args: Any) -> Rule:
    """Return the rule of native_layer_norm; a kernel tells the dtypes of mean and deviation, which meta kernels miss.

    args: (input, normalized shape, weight, bias, eps).
    """
    given, normalized, *affine = args[:4]
    shape = tuple(given.shape)
    probes = [None if each is None else torch.zeros(1, dtype=each.dtype, device="cpu") for each in affine]
    probe = torch.zeros(1, dtype=given.dtype, device="cpu")
    weight, bias = probes
    dtypes = [each.dtype for each in torch.native_layer_norm(probe, (1,), weight, bias, 1e-5)]
    means = (*shape[: len(shape) - len(normalized)], *[1] * len(normalized))
    results = [
        _Made(layout=(sizes, _contiguous(sizes), 0, dtype), source=-1 - index, is_source=False)
        for index, (sizes, dtype) in enumerate(zip((shape, means, means), dtypes))
    ]
    sizes = tuple(math.prod(each.layout[0]) * each.layout[3].itemsize for each in results)
    return Rule(results=tuple(results), new_nbytes=sizes, sequence=tuple, is_general=True)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(max(size, 1) for size in shape[index + 1 :]) for index in range(len(shape)))


def _layout_of(tensor: Tensor) -> Layout:
    if tensor.layout is not torch.strided or tensor.is_complex():
        raise Unusual(f"a tensor of {tensor.layout}, {tensor.dtype}")
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype


def _key(value: Any, inputs: list[HollowTensor]) -> Any:
    """Return what a rule depends on, and append hollow tensors to `inputs`."""
    kind = type(value)
    if kind is HollowTensor:
        inputs.append(value)
        return value.layout_key, value.allocation.nbytes()
    if kind in (tuple, list):
        return kind, *[_key(each, inputs) for each in value]
    if kind in (int, float, bool):
        return kind, value
    if kind is dict:
        return tuple((name, _key(each, inputs)) for name, each in value.items())
    if isinstance(value, Tensor):
        return Tensor, id(value)  # a tensor with values: no rule is general
    return value


def _ignore(results: list[Any]) -> None:
    """Take no notice of results."""
