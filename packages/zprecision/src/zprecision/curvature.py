"""Curvature: the largest eigenvalue of a loss's Hessian, for each block of parameters, by power iteration.

    values = zprecision.block_eigenvalues(loss, [list(block.parameters()) for block in model.blocks])
    relative = zprecision.relative_eigenvalues([each.value for each in values])

A block's Hessian H is the second derivative of the loss by the block's parameters.  It is never built: H v is the
derivative of (gradient . v), a second backward through the graph of the gradients.  From a random v, v <- H v / |H v|
turns towards the eigenvector of the eigenvalue of the largest magnitude, and v . H v / v . v (the Rayleigh quotient)
towards that eigenvalue, with the square of the error of v.

- Memory: the graph of the gradients (about a second set of activations), and two float32 vectors of a block.
- Across ranks the Hessian is that of the mean loss.  `mean` averages one vector for each product; it also carries the
  two numbers of the quotient, so all ranks decide by the same bits and stop after the same product.
- Every block starts from the same draws, of a generator of its own: the caller's random numbers are not used.

Rejected.  Finite differences of gradients: they need the loss as a function, two backwards for each product, and
steps that 16-bit weights round away.  Lanczos: fewer products for many eigenvalues; here it is one, to about 1%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

__all__ = [
    "Eigenvalue",
    "PowerIteration",
    "block_eigenvalues",
    "hessian_product",
    "largest_eigenvalue",
    "relative_eigenvalues",
]

Product = Callable[[Tensor], Tensor]


def _positive(_: object, field: attrs.Attribute[int], value: int) -> None:
    if not value > 0:
        raise ValueError(f"{field.name} = {value!r} must be > 0")


@attrs.frozen(kw_only=True)
class PowerIteration:
    """Rule of the iteration; the names and defaults are DeepSpeed's."""

    max_iter: int = attrs.field(default=100, validator=_positive)  # products at most
    tol: float = 1e-2  # stops when the eigenvalue changes by less than this share
    stability: float = 1e-6  # added to |H v|, by which it is divided
    seed: int = 0  # of the first vector

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the first vector, (numel,): normal draws on the host, equal on every device, of length 1."""
        draws = torch.randn(numel, generator=torch.Generator().manual_seed(self.seed), dtype=dtype)
        return self.normalized(draws.to(device))

    def normalized(self, vector: Tensor) -> Tensor:
        """Return `vector` of length about 1; elements that are not finite become 0."""
        scaled = vector / (torch.linalg.vector_norm(vector) + self.stability)
        return torch.nan_to_num(scaled, nan=0.0, posinf=0.0, neginf=0.0)


@attrs.frozen
class Eigenvalue:
    """Result for one block."""

    value: float  # signed; 0 if H v is 0
    iterations: int  # products with the Hessian
    converged: bool  # False after `max_iter` products


def _keep(_: Tensor) -> None:
    """Identity: the mean over a world of one."""


def block_eigenvalues(
    loss: Tensor,
    blocks: Sequence[Sequence[Tensor]],
    rule: PowerIteration | None = None,
    *,
    mean: Callable[[Tensor], object] = _keep,
    scale: float = 1.0,
) -> tuple[Eigenvalue, ...]:
    """Return the eigenvalue of the largest magnitude of each block's Hessian.

    loss: () with a graph of operations that can be differentiated twice; the graph stays.
    blocks: parameters of each block; those that require no gradient are left out.
    mean: replaces a flat float32 (or float64) tensor by its mean over the ranks; all ranks then call this function,
        with blocks of the same shapes.
    scale: a factor in `loss` (a loss scale), which the result does not have.

    Raises:
        ValueError: a block has no parameter that requires a gradient.
        RuntimeError: the graph of the loss reaches no block, or (of torch) an operation has no second derivative.
    """
    rule = rule or PowerIteration()
    chosen = [[param for param in block if param.requires_grad] for block in blocks]
    for number, block in enumerate(chosen):
        if not block:
            raise ValueError(f"block {number} has no parameter that requires a gradient, so it has no Hessian")
    flat = [param for block in chosen for param in block]
    gradients = torch.autograd.grad(loss, flat, create_graph=True, allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise RuntimeError("the graph of the loss reaches no parameter of the blocks")
    found, first = [], 0
    for block in chosen:
        product = hessian_product(gradients[first : first + len(block)], block, scale=scale)
        found.append(largest_eigenvalue(product, block, rule, mean=mean))
        first += len(block)
    return tuple(found)


def hessian_product(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], *, scale: float = 1.0
) -> Product:
    """Return the function v -> H v, of flat vectors, by a backward through the graph of `gradients`.

    gradients: of `parameters`, with a graph; one that is None, or has none, adds zeros.
    scale: a factor in `gradients`, by which the product is divided.  Elements that are not finite become 0.
    """
    known = [gradient for gradient in gradients if gradient is not None and gradient.grad_fn is not None]
    sizes = [param.numel() for param in parameters]
    weight = scale**-0.5  # of vectors: half of a loss scale keeps products of fp16 in range, too

    def product(vector: Tensor) -> Tensor:
        if not known:
            return torch.zeros_like(vector)
        parts = zip(gradients, parameters, torch.split(vector, sizes))
        outputs = [
            (part.view(param.shape) * weight).to(gradient.dtype)
            for gradient, param, part in parts
            if gradient is not None and gradient.grad_fn is not None
        ]
        found = torch.autograd.grad(known, parameters, outputs, retain_graph=True, allow_unused=True)
        each = [
            torch.zeros(param.numel(), dtype=vector.dtype, device=vector.device)
            if second is None
            else second.reshape(-1).to(vector.dtype)
            for second, param in zip(found, parameters)
        ]
        return torch.nan_to_num(torch.cat(each) * weight, nan=0.0, posinf=0.0, neginf=0.0)

    return product


def largest_eigenvalue(
    product: Product,
    block: Sequence[Tensor],
    rule: PowerIteration | None = None,
    *,
    mean: Callable[[Tensor], object] = _keep,
) -> Eigenvalue:
    """Return the eigenvalue of the largest magnitude of a symmetric `product`, v -> H v of flat vectors.

    block: tensors whose sizes, dtype (float64, else float32) and device the vectors have.  mean: as for
    `block_eigenvalues`.
    """
    rule = rule or PowerIteration()
    dtype = torch.float64 if any(param.dtype == torch.float64 for param in block) else torch.float32
    numel = sum(param.numel() for param in block)
    vector = rule.start(numel, dtype, block[0].device)
    message = torch.empty(numel + 2, dtype=dtype, device=block[0].device)  # H v, v . H v, v . v
    value, previous = 1.0, 0.0
    for iteration in range(1, rule.max_iter + 1):
        message[:numel] = product(vector)
        message[numel] = torch.dot(vector, message[:numel])
        message[numel + 1] = torch.dot(vector, vector)
        mean(message)
        rise, length = message[numel:].tolist()
        previous, value = value, rise / length if length else 0.0
        if not math.isfinite(value) or value == 0.0:
            return Eigenvalue(0.0, iteration, converged=True)
        if iteration > 1 and abs((value - previous) / value) < rule.tol:
            return Eigenvalue(value, iteration, converged=True)
        vector = rule.normalized(message[:numel])
    return Eigenvalue(value, rule.max_iter, converged=False)


def relative_eigenvalues(values: Sequence[float]) -> tuple[float, ...]:
    """Return |value| / max |values| of each, in (0, 1]; 1.0 for a value of 0, which is unknown."""
    largest = max((abs(value) for value in values), default=0.0)
    return tuple(abs(value) / largest if value else 1.0 for value in values)
