"""Products that need hardware: 8-bit floats, quantized weights, and grouped products of experts."""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zprecision
from acceptance.bench import Bench, NotRunHere, differing
from acceptance.verdict import Figure
from zpartition._compat import has_grouped_mm
from zpartition.experts.mlp import grouped_linear, runs
from zprecision import Float8, has_float8
from zprecision.backends.gpu.launch import has_gpu_kernels
from zprecision.float8 import quantized

__all__ = ["float8", "grouped", "quantized_weights"]

TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 2**-12}  # of a result's norm


def relative(found: Tensor, exact: Tensor) -> float:
    """Return the error, relative to the norm."""
    return float((found.detach().double().cpu() - exact).norm() / exact.norm())


def decoded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what an 8-bit float keeps of a tensor, in float64 on the host; computed there."""
    codes, scale = quantized(tensor.detach().cpu(), dtype)
    return codes.double() * scale.double()


def float8(bench: Bench) -> None:
    """Compare output and gradients of a layer with products of the decoded values in float64."""
    if not has_float8(bench.device):
        raise NotRunHere("the device has no matrix units for 8-bit floats (capability 8.9 and later)")
    generator = torch.Generator().manual_seed(0)
    for rows, inside, outside in bench.choose([(48, 64, 32), (4096, 4096, 4096)], [(48, 64, 32)]):
        model = nn.Sequential(nn.Linear(inside, outside, bias=False)).to(bench.device, torch.bfloat16)
        layer: Any = model[0]
        x = torch.randn(rows, inside, generator=generator).bfloat16().to(bench.device).requires_grad_()
        grad = torch.randn(rows, outside, generator=generator).bfloat16().to(bench.device)
        with Float8.convert(model, device=bench.device):
            y = model(x)
            y.backward(grad)
        kept = {name: decoded(each, torch.float8_e4m3fn) for name, each in (("x", x), ("w", layer.weight))}
        kept["g"] = decoded(grad, torch.float8_e5m2)
        exact = {
            "output": kept["x"] @ kept["w"].t(),
            "input": kept["g"] @ kept["w"],
            "weight": kept["g"].t() @ kept["x"],
        }
        assert x.grad is not None
        assert layer.weight.grad is not None
        found = {"output": y, "input": x.grad, "weight": layer.weight.grad}
        off = {name: relative(found[name], exact[name]) for name in exact}
        faults = [f"{name}: off by {error:.2g} of its norm" for name, error in off.items() if not error < 2**-7]
        bench.check(f"a layer of {rows} x {inside} x {outside} multiplies what 8 bits keep", faults)
    with Float8.convert(model, device=bench.device):
        narrow = bench.seconds(lambda: model(x).backward(grad)) * 1e3
    wide = bench.seconds(lambda: model(x).backward(grad)) * 1e3
    bench.figure(Figure(name="a layer in 8-bit floats beside bf16", unit="ms", measured=narrow, peer=wide))


FORMATS = ("int4", "int4-g64-minmax", "int4-g128-amax", "int4-row", "int8", "int8-row-minmax", "q4_0", "q8_0")


def quantized_weights(bench: Bench) -> None:
    """Compare codes, values and products with those of the CPU, bit for bit; time one token against a copy."""
    if not has_gpu_kernels(bench.device):
        raise NotRunHere(zprecision.kernels().gpu)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 1120, generator=generator) for rows in (200, 32))
    bias = torch.randn(200, generator=generator).bfloat16()
    faults: dict[str, list[str]] = {"codes and scales": [], "values": [], "products": []}
    for name in bench.choose(FORMATS, ("int4", "int8-row-minmax")):
        here, there = (zprecision.quantize(each, name) for each in (weight, weight.to(bench.device)))
        pairs = {"codes and scales": [[*each.parts().values()] for each in (there, here)]}
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        pairs["values"] = [[each.dequantize(dtype) for dtype in dtypes] for each in (there, here)]
        if zprecision.kernels().levels:
            tokens = bench.choose([(n, dtype) for n in (1, 2, 4, 7, 32) for dtype in dtypes], [(2, torch.bfloat16)])
            given = [x[:n].to(dtype) for n, dtype in tokens]
            pairs["products"] = [
                [zprecision.linear(each.to(form.device), form, bias.to(form.device)) for each in given]
                for form in (there, here)
            ]
        for what, both in pairs.items():
            faults[what] += [f"{name}: {fault}" for fault in differing(*both)]
    for what, found in faults.items():
        if what == "products" and not zprecision.kernels().levels:
            bench.skip("products against the C kernels", zprecision.kernels().cpu)
        else:
            bench.check(f"{what} of quantized weights have the bits of the CPU", found)
    for name in ("int4", "int8"):
        product_speed(bench, name)


def product_speed(bench: Bench, name: str) -> None:
    """Time one token by eight weights, more bytes than caches hold, against a copy that moves as many."""
    size = bench.choose(8192, 64)
    weights = [zprecision.quantize(torch.randn(size, size, device=bench.device), name) for _ in range(8)]
    x = torch.randn(1, size, device=bench.device).bfloat16()
    num_bytes = sum(weight.nbytes for weight in weights)
    source, target = (torch.empty(num_bytes // 2, dtype=torch.uint8, device=bench.device) for _ in range(2))
    work = {"ours": lambda: zprecision.linear_many(x, weights), "copy": lambda: target.copy_(source)}
    taken = {each: statistics.median(times) for each, times in bench.times(work, 15).items()}
    share = taken["copy"] / taken["ours"]
    bench.figure(Figure(name=f"one token by {name} weights: bandwidth", unit="of a copy", measured=share))


def grouped(bench: Bench) -> None:
    """Compare grouped products and their gradients with one product for each expert in float64."""
    experts, inside, outside = bench.choose((64, 2048, 1408), (4, 32, 16))
    generator = torch.Generator().manual_seed(0)
    counts = [int(count) for count in torch.randint(0, bench.choose(1024, 9), (experts,), generator=generator)]
    counts[1] = 0
    for dtype, tolerance in TOLERANCE.items():
        shapes = ((sum(counts), inside), (experts, outside, inside), (sum(counts), outside))
        x, weight, grad = (torch.randn(s, generator=generator).to(dtype).to(bench.device) for s in shapes)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        y = grouped_linear(x, weight, counts)
        found = [y, *torch.autograd.grad(y, leaves, grad)]
        exact = by_expert([tensor.detach().cpu().double() for tensor in (x, weight, grad)], counts)
        off = {name: relative(*pair) for name, *pair in zip(("output", "input", "weight"), found, exact)}
        faults = [f"{name}: off by {error:.2g} of its norm" for name, error in off.items() if not error < tolerance]
        kernel = "torch's kernel" if has_grouped_mm(x, weight) else "a loop"
        bench.check(f"{experts} experts in {str(dtype)[6:]}, by {kernel}, equal one product each", faults)
        if dtype == torch.bfloat16:
            pairs = [(x[rows], weight[e].t()) for e, rows in runs(counts)]
            ms = bench.seconds(partial(grouped_linear, x, weight, counts)) * 1e3
            peer = bench.seconds(partial(multiply, pairs)) * 1e3
            name = f"{experts} experts beside a loop of products"
            bench.figure(Figure(name=name, unit="ms", measured=ms, peer=peer))


def multiply(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Multiply pairs one by one."""
    for left, right in pairs:
        left @ right


def by_expert(tensors: list[Tensor], counts: list[int]) -> list[Tensor]:
    """Return output and gradients, expert by expert; tensors: input, weight, gradient of the output."""
    x, weight, grad = tensors
    ends = list(itertools.accumulate(counts, initial=0))
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    y = torch.cat([x[rows] @ weight[e].t() for e, rows in enumerate(parts)])
    to_x = torch.cat([grad[rows] @ weight[e] for e, rows in enumerate(parts)])
    return [y, to_x, torch.stack([grad[rows].t() @ x[rows] for rows in parts])]
