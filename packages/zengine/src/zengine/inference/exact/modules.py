"""The user's modules as parts of exact blocks, and what is put on them meanwhile.

A linear module or a norm keeps its `__call__`, so hooks, sharded weights and adapters work as before; its `forward`
is replaced by an exact operator over the weights that it has at that time.  A layer with adapters computes its base
and its update apart, in training and in generation.  `Replaced.close` restores all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from zengine.adapters.foreign import adapted, base_of
from zengine.adapters.quantized_base import QuantizedBase
from zengine.adapters.update import Adapted
from zengine.inference.exact.blocks import run_mixture
from zengine.inference.exact.operators import by_rows, linear, normalize_with
from zengine.inference.exact.products import Products
from zengine.inference.structure import Mixture, Norm, Projection

__all__ = ["ModuleParts", "Replaced", "check_dtype", "evaluating", "owner_of", "perturbed"]

Forward = Callable[..., Any]


@final
class _Replacement:
    """A forward that stands on a module.  A copied or pickled module has the forward that was there before."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self.module, self.forward, self.own = module, forward, vars(module).get("forward")
        self.__wrapped__ = module.forward  # whose signature this has

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.own is not None:
            return _same, (self.own,)
        return functools.partial, (type(self.module).forward, self.module)


def _same(forward: Forward) -> Forward:
    return forward


@final
@attrs.frozen(eq=False)
class Replaced:
    """Forwards that stand on modules, and what was there before."""

    before: list[tuple[nn.Module, Forward | None]] = attrs.field(factory=list)  # None: that of the class

    def replace(self, module: nn.Module, forward: Forward) -> None:
        """Put `forward` on a module; once."""
        if not any(owner is module for owner, _ in self.before):
            self.before.append((module, vars(module).get("forward")))
            module.forward = _Replacement(module, forward)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Take the forwards off inside the block; what is put on the modules meanwhile is below them afterwards."""
        held = [(module, module.forward.forward) for module, _ in self.before]  # type: ignore[attr-defined]
        self.close()
        try:
            yield
        finally:
            for module, forward in held:
                self.replace(module, forward)

    def close(self) -> None:
        """Restore all modules."""
        while self.before:
            module, forward = self.before.pop()
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode, and each back into its own."""
    training = [module for module in model.modules() if module.training]
    try:
        if training:
            model.eval()
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Scale the elements of vectors, and fill matrices of zeros; their bits come back afterwards.

    Before training, norms of one block are all ones, and some projections all zeros: parts that differ would look
    alike.
    """
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for index, param in enumerate(model.parameters()):
            if param.is_floating_point() and param.numel() and (param.dim() == 1 or not param.detach().any()):
                before.append((param.data, param.detach().clone()))
                generator = torch.Generator(param.device).manual_seed(index)
                noise = torch.empty_like(param.data).normal_(generator=generator)
                param.data.mul_(1 + noise / 5) if param.dim() == 1 else param.data.add_(noise, alpha=_scale(param))
        yield
    finally:
        for data, value in before:
            data.copy_(value)


def _scale(matrix: Tensor) -> float:
    return 1.0 / math.sqrt(matrix.shape[-1])


@final
@attrs.frozen(eq=False)
class ModuleParts:
    """Parts that are calls of the user's modules."""

    model: nn.Module
    products: Products
    replaced: Replaced = attrs.field(factory=Replaced)
    called: dict[str, Callable[[Tensor], Tensor]] = attrs.field(factory=dict)  # modules, and stacked experts, by name
    unbound: dict[tuple[int, str], tuple[Tensor, ...]] = attrs.field(factory=dict)  # of the mixture that runs

    def project(self, projection: Projection, x: Tensor) -> Tensor:
        """Call the module, with its adapters."""
        return self.called[projection.name](x)

    def normalize(self, norm: Norm, x: Tensor) -> Tensor:
        """Call the module."""
        return self.called[norm.name](x)

    def mix(self, mixture: Mixture, x: Tensor) -> Tensor:
        """Call the module that has the router and the experts."""
        return self.called[owner_of(mixture)](x)

    def add_mixture(self, mixture: Mixture) -> None:
        """Replace the forward of a mixture of experts, and those of its layers."""
        for mlp in (*mixture.experts, mixture.shared):
            for each in () if mlp is None else (mlp.gate, mlp.up, mlp.down):
                if each is not None:
                    self.add_projection(each)
        for each in (mixture.router, mixture.shared_gate):
            if each is not None:
                self.add_projection(each)

        def forward(x: Tensor) -> Tensor:
            self.unbound.clear()
            try:
                return run_mixture(self, mixture, x)
            finally:
                self.unbound.clear()

        owner = self.model.get_submodule(owner_of(mixture))
        self.called[owner_of(mixture)] = owner
        self.replaced.replace(owner, forward)

    def _add_stacked(self, projection: Projection) -> bool:
        """Read one expert of a stacked parameter; return whether the projection is one."""
        path, _, number = projection.name.rpartition(".")
        parent, _, name = path.rpartition(".")
        owner = self.model.get_submodule(parent)
        if not number.isdecimal() or not isinstance(owner._parameters.get(name), Tensor):
            return False

        def project(x: Tensor) -> Tensor:
            key = id(owner), name
            if key not in self.unbound:
                self.unbound[key] = getattr(owner, name).unbind(0)  # whose gradients are stacked once
            return linear(self.products, x, self.unbound[key][int(number)])

        self.called[projection.name] = project
        return True

    def add_projection(self, projection: Projection) -> None:
        """Replace the forward of a linear module, with its adapters if it has some."""
        if self._add_stacked(projection):
            return
        module = self.model.get_submodule(projection.name)
        self.called[projection.name] = module
        if (layer := adapted(module)) is not None:
            self.replaced.replace(module, functools.partial(self._with_adapters, module, layer))
            return
        if isinstance(module, QuantizedBase):
            self.replaced.replace(module, functools.partial(self._quantized, module))
            return
        held: Tensor = module.weight  # type: ignore[assignment]
        assert isinstance(projection.weight, Tensor)
        is_transposed = projection.weight is not held and (
            projection.weight.shape != held.shape or projection.weight.stride() != held.stride()
        )

        def forward(x: Tensor) -> Tensor:
            weight: Tensor = module.weight  # type: ignore[assignment]
            return linear(self.products, x, weight.t() if is_transposed else weight, _bias_of(module))

        self.replaced.replace(module, forward)

    def _with_adapters(self, module: nn.Module, layer: Adapted, x: Tensor) -> Tensor:
        """Compute base + scale * (x A') B', as the layer does: the weight and the update are not added."""
        base = base_of(module)
        if isinstance(base, QuantizedBase):
            y = self._quantized(base, x)
        else:
            y = linear(self.products, x, layer.base_weight(), _bias_of(module))
        for update in layer.updates():
            low = linear(self.products, x.to(update.down.dtype), update.down)
            y = (y + linear(self.products, low, update.up) * update.scale).to(y.dtype)
        return y

    def _quantized(self, base: QuantizedBase, x: Tensor) -> Tensor:
        """Compute a quantized base; a gradient keeps its codes, as the layer's own forward does."""

        def multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
            return self.products.of_rows(rows.contiguous(), matrix, bias)

        return by_rows(x, lambda rows: base.base(rows, multiply))

    def add_norm(self, norm: Norm) -> None:
        """Replace the forward of a norm."""
        module = self.model.get_submodule(norm.name)
        self.called[norm.name] = module
        names = {
            field: name
            for field in ("weight", "bias")
            for name, value in module._parameters.items()
            if value is not None and value is getattr(norm, field)
        }

        def forward(x: Tensor) -> Tensor:
            held = {field: getattr(module, name) for field, name in names.items()}
            return normalize_with(norm, x, held.get("weight"), held.get("bias"))

        self.replaced.replace(module, forward)


def owner_of(mixture: Mixture) -> str:
    """Return the name of the module that has the router and the experts."""
    names = [mixture.router.name, *(each.down.name for each in mixture.experts)]
    parts = zip(*(name.split(".")[:-1] for name in names))
    return ".".join(same[0] for same in itertools.takewhile(lambda each: len(set(each)) == 1, parts))


def _bias_of(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias if isinstance(bias, Tensor) else None


def check_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the weights.  Raises ValueError if exact operators do not have it."""
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    found = [dtype for dtype in dtypes if dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    if found:
        raise ValueError(
            f"rollout.exact got weights of {found[0]}; exact operators are made for float32, bfloat16 and float16"
        )
    return next(iter(dtypes), torch.float32)
