#!/usr/bin/env python3
"""Convergence of state formats and optimizers: the repository's main job, once for each.

    python packages/zoptim/bench/convergence.py                  every run: about 40 minutes on two cores
    python packages/zoptim/bench/convergence.py --only adamw,8bit --steps 100
    python packages/zoptim/bench/convergence.py --list           the runs

Each run trains the small GPT of tools/train on its text (the Python standard library, byte by byte) with the options
of its config.json, the same initial weights, and the same windows in the same order.  Only the optimizer and the
formats of weights and states differ.  The network computes in float32: bf16 weights are widened for the forward, and
their gradients rounded, so that rounding in the network does not hide the optimizer's.

Prints held-out bits per byte, the difference to float32, and the difference between seeds; writes
NAME.json, NAME.md and NAME.svg into results/.  Runs on a checkout only: the model and the text are the main job's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import convergence_report
import machine
import torch
from convergence_report import Outcome
from convergence_runs import RUNS, Run
from torch import Tensor

import zoptim

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

from train.model import GPT, Shape, parameter_groups
from train.recipe import DEFAULT_CONFIG
from train.text import Corpus, Windows, bigram, bits_per_byte, read_corpus, unigram

RESULTS = Path(__file__).resolve().parent / "results"
LN2 = math.log(2)


@attrs.frozen(kw_only=True)
class Setting:
    """Settings of all runs."""

    steps: int
    batch: int  # windows of a step
    shape: Shape
    config: dict[str, Any]  # of the main job
    looks: int  # steps between evaluations
    held_out: Tensor  # (n, context + 1) uint8
    text: Windows  # training text


def main(arguments: Sequence[str] | None = None) -> int:
    """Phases: read the text, train side by side, print and save after each run."""
    options = _parser().parse_args(arguments)
    runs = [run for run in RUNS if run.key in options.only]
    if options.list:
        print("\n".join(f"{run.key:18}{run.title}" for run in RUNS))
        return 0
    threads = options.threads or max(1, torch.get_num_threads() // options.jobs)
    torch.set_num_threads(threads)
    corpus = read_corpus()
    setting = _setting(options, corpus)
    facts = {**machine.facts(torch.device("cpu")), **_facts(setting, corpus)}
    facts.pop("floor")
    outcomes: list[Outcome] = []
    pool = ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (threads,))
    with pool:  # runs are independent: one process each, because small products do not scale over threads
        for outcome in pool.map(train, runs, [setting] * len(runs)):
            outcomes.append(outcome)
            print(convergence_report.line(outcome, outcomes), flush=True)
            files = convergence_report.save(options.results, options.name, outcomes, facts)
    print("\n" + convergence_report.text(outcomes, facts))
    print("\n".join(map(str, files)))
    return 0


def train(run: Run, setting: Setting) -> Outcome:
    """Train, and evaluate held-out text at intervals."""
    torch.manual_seed(run.seed)
    model = GPT(setting.shape, seed=run.seed).to(run.weights)
    optimizer = _optimizer(run, model, setting.config)
    scaled = zoptim.accept_grad_scale(optimizer)
    schedule = _schedule(optimizer, setting)
    params = list(model.parameters())
    began, looks, losses = time.perf_counter(), [(0, evaluate(model, setting.held_out))], []
    for step, batch in enumerate(_batches(setting, run.seed), start=1):
        loss = _loss(model, batch)
        loss.backward()
        losses.append(loss.item() / LN2)
        scaled.grad_scale = zoptim.grad_stats(p.grad for p in params).divisor(max_norm=_clip(setting.config))
        scaled.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, setting.steps // setting.looks) == 0 or step == setting.steps:
            looks.append((step, evaluate(model, setting.held_out)))
    return Outcome(
        run=run,
        bits=looks[-1][1],
        looks=tuple(looks),
        last_losses=sum(losses[-20:]) / len(losses[-20:]),
        bytes_per_param=_bytes(params, optimizer) / sum(p.numel() for p in params),
        seconds=time.perf_counter() - began,
    )


@torch.no_grad()
def evaluate(model: GPT, windows: Tensor) -> float:
    """Bits per byte over windows (n, context + 1) uint8."""
    total = sum(float(_loss(model, batch)) * len(batch) for batch in torch.split(windows, 32))
    return total / len(windows) / LN2


def _loss(model: GPT, windows: Tensor) -> Tensor:
    """Nats per byte, computed in float32 for any format of the weights."""
    wide = {name: param.float() for name, param in model.named_parameters()}
    loss: Tensor = torch.func.functional_call(model, wide, (windows,))
    return loss


def _optimizer(run: Run, model: GPT, config: dict[str, Any]) -> torch.optim.Optimizer:
    options = {**(config["optimizer"]["params"] if run.as_main_job else {}), **run.options}
    names = {id(param): name for name, param in model.named_parameters()}
    groups = parameter_groups(model, options.get("weight_decay", 0.0))
    named = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
    if run.optimizer.startswith("torch."):
        return getattr(torch.optim, run.optimizer.removeprefix("torch."))(named, **options)
    return zoptim.make_optimizer(run.optimizer, named, options)


def _schedule(optimizer: torch.optim.Optimizer, setting: Setting) -> Any:
    """The main job's schedule, scaled to the length of the run as in its recipe."""
    params = dict(setting.config["scheduler"]["params"])
    share = params["warmup_num_steps"] / params["total_num_steps"]
    params.update(total_num_steps=setting.steps, warmup_num_steps=max(2, round(share * setting.steps)))
    return zoptim.make_schedule(setting.config["scheduler"]["type"], optimizer, params)


def _batches(setting: Setting, seed: int) -> Iterator[Tensor]:
    """Yield (batch, context + 1) uint8 for each step; no window repeats before all were used."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(setting.text), generator=generator) for _ in range(_epochs(setting))])
    for chosen in order[: setting.steps * setting.batch].split(setting.batch):
        yield torch.stack([setting.text[int(index)] for index in chosen])


def _epochs(setting: Setting) -> int:
    return -(-setting.steps * setting.batch // len(setting.text))


def _clip(config: dict[str, Any]) -> float:
    return float(config["gradient_clipping"])


def _bytes(params: list[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights and optimizer state, without gradients."""
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in [*params, *kept])


def _setting(options: argparse.Namespace, corpus: Corpus) -> Setting:
    shape = Shape(depth=2, width=32, heads=2, context=64) if options.quick else Shape()
    return Setting(
        steps=options.steps,
        batch=options.batch,
        shape=shape,
        config=json.loads(DEFAULT_CONFIG.read_text()),
        looks=10,
        held_out=Windows(corpus.validation, shape.context).stacked(64 if options.quick else 512),
        text=Windows(corpus.train, shape.context),
    )


def _facts(setting: Setting, corpus: Corpus) -> dict[str, Any]:
    tables = {"unigram": unigram(corpus.train), "bigram": bigram(corpus.train)}
    return {
        "job": f"{setting.steps} steps of {setting.batch} windows of {setting.shape.context} bytes, "
        f"{sum(p.numel() for p in GPT(setting.shape, seed=0).parameters()):,} parameters",
        "text": f"{corpus.train.numel():,} bytes, fingerprint {corpus.fingerprint}",
        "held out": f"{setting.held_out[:, 1:].numel():,} guesses",
        "bits per byte of tables": {name: round(bits_per_byte(t, setting.held_out), 4) for name, t in tables.items()},
    }


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    keys = [run.key for run in RUNS]
    result.add_argument("--only", type=lambda words: _known(words, keys), default=keys, metavar="KEY,KEY")
    result.add_argument("--list", action="store_true", help="list the runs")
    result.add_argument("--steps", type=int, default=400, help="updates of a run (400)")
    result.add_argument("--batch", type=int, default=8, help="windows of a step (8)")
    result.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    result.add_argument("--jobs", type=int, default=2, help="runs side by side (2)")
    result.add_argument("--threads", type=int, help="torch's number of threads in each (default: cores / jobs)")
    result.add_argument("--results", type=Path, default=RESULTS, help="folder for the report")
    result.add_argument("--name", default="convergence", help="of the report's files")
    return result


def _known(words: str, keys: Sequence[str]) -> list[str]:
    given = words.split(",")
    if wrong := [word for word in given if word not in keys]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: it takes {', '.join(keys)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
