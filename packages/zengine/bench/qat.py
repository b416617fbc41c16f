#!/usr/bin/env python3
"""Training with rounded weights: the share of what 4-bit rounding loses that it regains.

    python packages/zengine/bench/qat.py [--seeds 0 1 2] [--steps 2500] [--more 900] [--format int4-row-amax]

The main job's GPT, narrower, is trained for `--steps` steps.  Two copies go on for `--more` steps with the same
windows and learning rates: one as before, one with `compression_training`, which rounds its linear layers in forward.
Bits per byte of held-out text:

    plain      the first copy
    rounded    the first copy as `init_inference` loads it in the format: one scale a row, no search for it
    trained    the second copy, loaded so: its weights are, bit for bit, those that its forward used

    lost = rounded - plain; regained = (rounded - trained) / lost
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zengine
import zprecision
from zengine.compression import compressed_layers
from zengine.deepspeed import init_inference
from zengine.inference.loading.packed import save_packed
from zengine.inference.quantized_modules import quantize_linears

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train.model import GPT, Shape
from train.text import Corpus, read_corpus

SHAPE = Shape(depth=6, width=32, heads=2, context=64)
BATCH, HELD_OUT, PART = 8, 1024, 128  # windows of a step; held-out ones, and as many at once
LR, LAST_LR, WARM_UP = 1e-2, 5e-4, 50
LAYERS = ["qkv", "attention_out", "mlp_in", "mlp_out", "head"]


def windows(text: Tensor, count: int, seed: int) -> Tensor:
    """Return (count, context + 1) bytes."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - SHAPE.context, (count,), generator=generator)
    return torch.stack([text[start : start + SHAPE.context + 1] for start in starts.tolist()])


@torch.no_grad()
def bits_per_byte(run: Callable[[Tensor], Tensor], text: Tensor) -> float:
    losses = [float(run(part)) for part in windows(text, HELD_OUT, 10**6).split(PART)]
    return statistics.fmean(losses) / math.log(2)


def rate(step: int, total: int) -> float:
    """Return a rate that rises, then falls by a cosine."""
    falling = LAST_LR + (LR - LAST_LR) * (1 + math.cos(math.pi * step / total)) / 2
    return falling * min(1.0, (step + 1) / WARM_UP)


def train(
    model: nn.Module, corpus: Corpus, steps: range, total: int, seed: int, section: dict[str, Any]
) -> nn.Module:
    """Train for these steps of `total`, and return the module."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        **({"compression_training": section} if section else {}),
    }
    if section:
        model = zengine.init_compression(model, config)
    engine = zengine.initialize(model=model, config=config)[0]
    for step in steps:
        for group in engine.optimizer.param_groups:
            group["lr"] = rate(step, total)
        engine.backward(engine(windows(corpus.train, BATCH, 10_000 * seed + step)))
        engine.step()
    engine.close()
    return model


def linear_layers(model: nn.Module) -> Iterator[str]:
    """Yield the names of the layers that are rounded."""
    return (name for name, _ in model.named_modules() if name.rpartition(".")[2] in LAYERS)


@torch.no_grad()
def loaded(weights: dict[str, Tensor], format_name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Write weights in the format, load them by `init_inference`; return the engine, and its linear weights."""
    written, chosen = GPT(SHAPE), zprecision.format_named(format_name)
    written.load_state_dict(weights)
    with tempfile.TemporaryDirectory() as folder:
        quantize_linears(written, lambda _: chosen)
        save_packed(written, folder)
        engine = init_inference(GPT(SHAPE), dtype=torch.float32, checkpoint=folder)
    found = {name: zprecision.dequantize(engine.module.get_submodule(name).weight) for name in linear_layers(written)}
    return engine, found


def measure(seed: int, corpus: Corpus, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return bits per byte: plain, rounded, trained."""
    total = options.steps + options.more
    first, rest = range(options.steps), range(options.steps, total)
    shared = {"enabled": True, "schedule_offset": 0, "quantize_weight_in_forward": True}
    groups = {"all": {"params": {"format": options.format}, "modules": [rf"(^|\.){name}$" for name in LAYERS]}}
    section = {"weight_quantization": {"shared_parameters": shared, "different_groups": groups}}
    base = train(GPT(SHAPE, seed=seed), corpus, first, total, seed, {})
    trained = train(copy.deepcopy(base), corpus, rest, total, seed, section)
    plain = train(base, corpus, rest, total, seed, {})
    rounded, _ = loaded(plain.state_dict(), options.format)
    served, found = loaded(trained.state_dict(), options.format)
    for name, layer in compressed_layers(trained).items():
        if not torch.equal(found[name], layer.effective()[0]):
            raise RuntimeError(f"{name}: inference loads other weights than the forward of training used")
    return tuple(bits_per_byte(each, corpus.validation) for each in (plain.eval(), rounded, served))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--more", type=int, default=900)
    parser.add_argument("--format", default="int4-row-amax")
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = read_corpus()
    print(f"{options.format}, {options.steps} + {options.more} steps")
    print(f"{'seed':>6} {'plain':>8} {'rounded':>8} {'trained':>8} {'lost':>7} {'regained':>9}")
    gaps, shares = [], []
    for seed in options.seeds:
        plain, coarse, trained = measure(seed, corpus, options)
        gaps.append(coarse / plain - 1)
        shares.append((coarse - trained) / (coarse - plain))
        row = f"{seed:>6} {plain:>8.4f} {coarse:>8.4f} {trained:>8.4f} {gaps[-1]:>7.2%} {shares[-1]:>9.1%}"
        print(row, flush=True)
    print(f"{'mean':>6} {'':>26} {statistics.fmean(gaps):>7.2%} {statistics.fmean(shares):>9.1%}")


if __name__ == "__main__":
    main()
