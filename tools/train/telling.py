"""What rank 0 tells about a run: what is about to happen, what came of it, and where everything lies."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

import attrs
import torch

import zengine
from zengine.reporting import NoRunError, read_run
from zengine.reporting import RecordedRun as Record

from .evaluate import Result
from .journal import Row
from .model import Scorer, generate
from .progress import amount
from .recipe import Folder, Recipe
from .report import Story, write_report
from .text import Corpus

PROMPT = b"def "  # what the sample of generated text begins with
SAMPLE_BYTES = 500


@attrs.frozen(kw_only=True, eq=False)
class Run:
    """The things of a run that stay the same while it trains."""

    folder: Folder
    recipe: Recipe
    corpus: Corpus
    model: Scorer  # in training: its weights change
    engine: zengine.Engine

    @property
    def resuming(self) -> str:
        """The command that continues it."""
        return f"python3 tools/dev.py train --resume --name {self.folder.name}"

    @property
    def precision(self) -> str:
        return str(self.engine.plan.precision.param).removeprefix("torch.")


def introduction(run: Run) -> str:
    """What is about to happen, in three lines."""
    engine, corpus = run.engine, run.corpus
    parameters, shared = amount(run.model.numel), ranks_of_a_model(run)
    how = f", a model over {counted(shared, 'rank')}" if shared > 1 else ""
    if run.recipe.shape.experts:
        over = counted(engine.plan.parallel.degrees.expert, "rank")
        how += f", {run.recipe.shape.experts} experts a block over {over}"
    copies = counted(engine.dp_world_size, "replica" if shared > 1 else "rank")
    begins = f"resumes after step {engine.global_steps}" if engine.global_steps else "starts"
    stage, ranks = engine.zero_optimization_stage(), engine.parts.world.world_size
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    return (
        f"run {run.folder.name} {begins}: GPT of {parameters} parameters, {run.precision}, ZeRO stage {stage}\n"
        f"text: {amount(corpus.train.numel())} bytes in {len(corpus.train_files)} files of {corpus.root}, "
        f"and {len(corpus.validation_files)} files held out\n"
        f"{counted(ranks, 'rank')} x {counted(torch.get_num_threads(), 'thread')} on {engine.device.type}{how}; a "
        f"step is {copies} x {counted(accumulation, 'micro-step')} x {counted(micro, 'window')} of "
        f"{run.recipe.shape.context} bytes"
    )


def ranks_of_a_model(run: Run) -> int:
    """Ranks that work on the same windows."""
    shared: int = run.engine.parts.world.world_size // run.engine.dp_world_size
    return shared


def counted(number: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def interrupted(run: Run) -> str:
    return f"stopped and saved after step {run.engine.global_steps}. To go on: {run.resuming}"


def written(run: Run) -> str:
    """A sample of what the model writes.  Every rank calls it: each may have a part of the model."""
    return readable(generate(run.model, PROMPT, num_bytes=SAMPLE_BYTES, seed=run.recipe.seed))


def take_stock(run: Run, result: Result, sample: str, rows: list[Row]) -> str:
    """Write the report and the figures to the run's folder; the last words of a run.

    sample: what the model writes.
    """
    folder = run.folder
    story = Story(
        name=folder.name,
        recipe=run.recipe,
        rows=rows,
        record=record_of(folder),
        result=result,
        sample=sample,
        environment=environment_facts(run),
        corpus=corpus_facts(run.corpus),
    )
    write_report(story, folder.report)
    folder.result.write_text(json.dumps(attrs.asdict(result), indent=2) + "\n")
    lines = [f"\n{sample.rstrip()}\n", f"{result.table()}\n"]
    if not result.wins:
        is_defeat = run.recipe.is_defeat(step=result.step, wins=result.wins)
        lines.append("The model did not beat the byte tables" + (": it should have." if is_defeat else " yet."))
    if result.step < run.recipe.steps:
        lines.append(f"{run.recipe.steps - result.step} steps are left. To go on: {run.resuming}")
    lines.append(f"checkpoints  {folder.checkpoints}")
    lines.append(f"TensorBoard  {sys.executable} -m tensorboard.main --logdir {folder.path.parent}")
    lines.append(f"report       {folder.report}")
    return "\n".join(lines)


def record_of(folder: Folder) -> Record:
    """What the engine kept; nothing where it could not write, which must not end a run at its end."""
    try:
        return read_run(folder.record)
    except NoRunError:
        return Record(name=folder.name, folder=folder.record)


def readable(text: bytes) -> str:
    """Text that is safe to print: bytes that are not text, or would command a terminal, become question marks."""
    characters = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters)


def environment_facts(run: Run) -> dict[str, object]:
    """The machine and the way it was used, for the report."""
    engine = run.engine
    on_gpu = engine.device.type == "cuda"
    threads = counted(torch.get_num_threads(), "thread")
    return {
        "device": torch.cuda.get_device_name(engine.device) if on_gpu else f"{processor()}, {os.cpu_count()} cores",
        "ranks": f"{engine.parts.world.world_size}, {threads} each, {engine.parts.world.backend}",
        "precision": run.precision,
        "ZeRO stage": engine.zero_optimization_stage(),
        "ranks that share a model": ranks_of_a_model(run),
        "windows per step": engine.train_batch_size(),
        "zengine, torch": f"{zengine.__version__}, {torch.__version__}",
        "Python, system": f"{platform.python_version()}, {platform.system()} {platform.release()}",
    }


def processor() -> str:
    """The CPU's own name for itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def corpus_facts(corpus: Corpus) -> dict[str, object]:
    """The text, for the report."""
    return {
        "source": corpus.root,
        "training": f"{amount(corpus.train.numel())} bytes in {len(corpus.train_files)} files",
        "held out": f"{amount(corpus.validation.numel())} bytes in {len(corpus.validation_files)} files",
        "fingerprint": corpus.fingerprint,
    }
