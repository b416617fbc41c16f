"""Top-1 agreement of a trained GPT with 8 bits: what rounding the weights costs, and what rounding the activations.

    python packages/zengine/bench/agreement.py runs/NAME --text FILE... [--windows 1024]

The model is that of `tools/dev.py train`.  All linears and the head are rounded as int8 products round them: weights
and activations in groups of 32.  torch multiplies, so only rounding differs.  The text must not be the library's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zckpt
import zprecision
from zprecision.quant.activations import round_activations

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
BATCH = 64
Rounding = Callable[[Tensor], Tensor]


def whole(values: Tensor) -> Tensor:
    return values


def int8(values: Tensor) -> Tensor:
    return zprecision.quantize(values, zprecision.Int8()).dequantize(torch.float32)


def searched(values: Tensor) -> Tensor:
    return zprecision.quantize(values, zprecision.Int8(scale="search")).dequantize(torch.float32)


def halves(x: Tensor) -> Tensor:
    """Round in groups of 16."""
    groups = x.reshape(-1, 16)
    peak = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((groups * (127 / peak)).round() * (peak / 127)).reshape(x.shape)


def twice(x: Tensor) -> Tensor:
    """Round to 16 bits, as int8-a16."""
    return round_activations(x, 16)


CASES: dict[str, tuple[Rounding, Rounding]] = {
    "weights and activations": (int8, round_activations),
    "weights": (int8, whole),
    "weights by scale search": (searched, whole),
    "activations": (whole, round_activations),
    "weights, activations in groups of 16": (int8, halves),
    "weights, activations of 16 bits": (int8, twice),
}


def read_model(folder: Path) -> Any:
    """Return the GPT of a run's newest checkpoint."""
    from train.model import GPT
    from train.recipe import Folder, Recipe

    run = Folder(path=folder)
    model, checkpoint = GPT(Recipe.read(run.recipe).shape), zckpt.find(run.checkpoints)
    for name, param in model.named_parameters():
        param.copy_(checkpoint.tensor(f"model.{name}"))
    return model.eval()


PRODUCTS = ("qkv", "attention_out", "mlp_in", "mlp_out", "head")  # parts of the names of linears


def predicted(
    model: Any, windows: Tensor, weights: Rounding, activations: Rounding, product: str = ""
) -> tuple[Tensor, float]:
    """Return the likeliest byte at each position, and bits per byte, with rounded linears that `product` names."""
    hooks, before = [], {}
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    for module in (each for name, each in linears.items() if product in name):
        before[module] = module.weight
        module.weight = nn.Parameter(weights(module.weight.detach()), requires_grad=False)
        hooks.append(module.register_forward_pre_hook(lambda _, args: (activations(args[0]),)))
    found, total = [], 0.0
    for batch in windows.split(BATCH):
        logits = model.logits(batch[:, :-1])
        found.append(logits.argmax(-1))
        total += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    for hook in hooks:
        hook.remove()
    for module, weight in before.items():
        module.weight = weight
    return torch.cat(found), total / windows[:, 1:].numel() / torch.log(torch.tensor(2.0)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="files to predict")
    parser.add_argument("--windows", type=int, default=1024, help="of the context's length, at most")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    model = read_model(options.run)
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in options.text)), dtype=torch.uint8)
    size = model.shape.context + 1
    windows = text[: text.numel() // size * size].view(-1, size)[: options.windows].long()
    best, bits = predicted(model, windows, whole, whole)
    print(f"{windows[:, 1:].numel():,} bytes, {bits:.4f} bits/byte in float32\n")
    print("| rounded to 8 bits | top-1 | bits/byte |\n|---|---|---|")
    for name, (weights, activations) in CASES.items():
        found, changed = predicted(model, windows, weights, activations)
        print(f"| {name} | {(found == best).double().mean():.2%} | {changed - bits:+.5f} |", flush=True)
    for product in PRODUCTS:
        found, changed = predicted(model, windows, whole, round_activations, product)
        row = f"| activations of {product} | {(found == best).double().mean():.2%} | {changed - bits:+.5f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
