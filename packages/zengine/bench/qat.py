#!/usr/bin/env python3
"""Training with rounded weights: the share of what 4-bit rounding loses that it regains.

    python packages/zengine/bench/qat.py [--seeds 0 1 2] [--steps 5000] [--more 500] [--format int4-row-amax]

The main job's GPT, small, is trained by torch alone for `--steps` steps; learning rates stay for the first half, then
fall to 0.  Two copies go on in engines for `--more` steps, with the same windows, new optimizers and a schedule of
their own, whose largest rate is `--lr`: one as before, one with `compression_training`, which rounds its linear
layers in forward, and takes a share `--distil` of the loss from the logits of the model before.  Bits per byte of
held-out text:

    plain      the first copy
    rounded    the first copy with the weights that `init_inference` loads in the format: one scale a row, no search
    trained    the second copy with those: they are, bit for bit, what its forward used
    served     the second copy by the products of `init_inference`, which round activations to 8 bits as well

    lost = rounded - plain; regained = (rounded - trained) / lost

With `--bases FOLDER` the weights after the first part are kept there, for other runs that differ in the second.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
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

SHAPE = Shape(depth=2, width=32, heads=2, context=64)
BATCH, HELD_OUT, PART = 8, 1024, 128  # windows of a step; held-out ones, and as many at once
LR, WARM_UP, BETAS, DECAY, CLIP = 1e-2, 50, (0.9, 0.95), 0.1, 1.0
LAYERS = ["qkv", "attention_out", "mlp_in", "mlp_out", "head"]


def windows(text: Tensor, count: int, seed: int) -> Tensor:
    """Return (count, context + 1) bytes."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - SHAPE.context, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(SHAPE.context + 1)]


@torch.no_grad()
def bits_per_byte(run: Callable[[Tensor], Tensor], text: Tensor) -> float:
    losses = [float(run(part)) for part in windows(text, HELD_OUT, 10**6).split(PART)]
    return statistics.fmean(losses) / math.log(2)


def first_rate(step: int, total: int) -> float:
    """Return a rate that rises, stays for half of the steps, then falls to 0."""
    return LR * min(1.0, (step + 1) / WARM_UP, 2 * (1 - step / total))


def later_rate(step: int, total: int, peak: float) -> float:
    """Return a rate that rises to `peak`, then falls to 0 by a cosine."""
    return peak * min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / total)) / 2


class Scoring(GPT):
    """The model, returning its scores as well, which distillation compares."""

    def forward(self, windows: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the mean loss in nats per byte, () float32, and scores (batch, time, 256)."""
        tokens = windows.long()
        scores = self.logits(tokens[:, :-1])
        return {"loss": self.part.loss(scores, tokens[:, 1:]), "logits": scores}


def scoring(weights: dict[str, Tensor]) -> Scoring:
    """Return the model with these weights."""
    model = Scoring(SHAPE)
    model.load_state_dict(weights)
    return model


def pretrained(seed: int, corpus: Corpus, total: int, folder: Path | None) -> nn.Module:
    """Return the model after the first part, trained by torch or read from the folder."""
    model, kept = GPT(SHAPE, seed=seed), folder and folder / f"base-{seed}-{total}.pt"
    if kept and kept.exists():
        model.load_state_dict(torch.load(kept))
        return model
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=DECAY, fused=True)
    for step in range(total):
        for group in optimizer.param_groups:
            group["lr"] = first_rate(step, total)
        model(windows(corpus.train, BATCH, 10_000 * seed + step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), kept)
    return model


def train(
    weights: dict[str, Tensor], batches: Iterable[Tensor], rates: Sequence[float], section: dict[str, Any]
) -> nn.Module:
    """Train a model with these weights in an engine with these learning rates, and return it."""
    model: nn.Module = scoring(weights)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS, "weight_decay": DECAY}},
        **({"compression_training": section} if section else {}),
    }
    if section:
        teacher = scoring(weights) if "distillation" in section else None
        model = zengine.init_compression(model, config, teacher_model=teacher)
    engine = zengine.initialize(model=model, config=config)[0]
    for lr, batch in zip(rates, batches):
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        engine.backward(engine(batch)["loss"])
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


def with_linears(weights: dict[str, Tensor], linears: dict[str, Tensor]) -> nn.Module:
    """Return the model with these weights, and others in its linear layers; its head is no longer the embedding."""
    model = GPT(SHAPE)
    model.load_state_dict(weights)
    model.head = nn.Linear(SHAPE.width, len(model.token_embedding.weight), bias=False)
    for name, values in linears.items():
        model.get_submodule(name).weight = nn.Parameter(values)
    return model.eval()


def measure(seed: int, corpus: Corpus, options: argparse.Namespace) -> list[float]:
    """Return bits per byte: plain, rounded, trained, served."""
    shared = {"enabled": True, "schedule_offset": 0, "quantize_weight_in_forward": True}
    groups = {"all": {"params": {"format": options.format}, "modules": [rf"(^|\.){name}$" for name in LAYERS]}}
    section: dict[str, Any] = {"weight_quantization": {"shared_parameters": shared, "different_groups": groups}}
    if options.distil:
        section["distillation"] = {"enabled": True, "weight": options.distil}
    rates = [later_rate(step, options.more, options.lr) for step in range(options.more)]

    def batches() -> Iterator[Tensor]:
        for step in range(options.steps, options.steps + options.more):
            yield windows(corpus.train, BATCH, 10_000 * seed + step)

    base = pretrained(seed, corpus, options.steps, options.bases).state_dict()
    trained = train(base, batches(), rates, section)
    plain = train(base, batches(), rates, {}).state_dict()
    _, coarse = loaded(plain, options.format)
    served, fine = loaded(trained.state_dict(), options.format)
    for name, layer in compressed_layers(trained).items():
        if not torch.equal(fine[name], layer.effective()[0]):
            raise RuntimeError(f"{name}: inference loads other weights than the forward of training used")
    models = (
        with_linears(plain, {name: plain[f"{name}.weight"] for name in coarse}),
        with_linears(plain, coarse),
        with_linears(trained.state_dict(), fine),
        served,
    )
    return [bits_per_byte(model, corpus.validation) for model in models]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--more", type=int, default=500)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--distil", type=float, default=0.5)
    parser.add_argument("--straight", action="store_true", help="without the gradient of the scales, to compare")
    parser.add_argument("--bases", type=Path)
    parser.add_argument("--format", default="int4-row-amax")
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = read_corpus()
    if options.straight:
        module: Any = sys.modules["zprecision.quant.simulate"]  # its package has a function of this name
        module.through_scales = lambda x, rounded, _: module.straight_through(x, rounded)
    print(f"{options.format}, {GPT(SHAPE).numel:,} parameters, {options.steps} + {options.more} steps")
    print(f"lr {options.lr}, share of distillation {options.distil}")
    print(f"{'seed':>6} {'plain':>8} {'rounded':>8} {'trained':>8} {'served':>8} {'lost':>7} {'regained':>9}")
    gaps, shares = [], []
    for seed in options.seeds:
        plain, coarse, trained, served = measure(seed, corpus, options)
        gaps.append(coarse / plain - 1)
        shares.append((coarse - trained) / (coarse - plain))
        row = f"{seed:>6} {plain:>8.4f} {coarse:>8.4f} {trained:>8.4f} {served:>8.4f}"
        print(f"{row} {gaps[-1]:>7.2%} {shares[-1]:>9.1%}", flush=True)
    print(f"{'mean':>6} {'':>35} {statistics.fmean(gaps):>7.2%} {statistics.fmean(shares):>9.1%}")


if __name__ == "__main__":
    main()
