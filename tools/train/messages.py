"""Messages of rank 0: the introduction of a run, its results, and the paths of its files."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from pathlib import Path

import attrs
import torch

import zengine
from zengine.reporting import NoRunError, read_run
from zengine.reporting import RecordedRun as Record

from .evaluate import Result
from .inference import Inference
from .journal import Row
from .launch import RUNS
from .model import Scorer, generate
from .progress import amount
from .recipe import Folder, Recipe
from .report import ReportData, write_report
from .text import Corpus, printable

PROMPT = b"def "  # beginning of the sample that the model itself generates
SAMPLE_BYTES = 500


@attrs.frozen(kw_only=True, eq=False)
class Run:
    """Objects of a run that stay the same during training."""

    folder: Folder
    recipe: Recipe
    corpus: Corpus
    model: Scorer  # its weights change
    engine: zengine.Engine

    @property
    def resuming(self) -> str:
        """Command that resumes the run."""
        runs = self.folder.path.parent
        where = f" --runs {shlex.quote(str(runs))}" if runs != RUNS.resolve() else ""
        return f"python3 tools/dev.py train --resume --name {self.folder.name}{where}"

    @property
    def precision(self) -> str:
        return str(self.engine.plan.precision.param).removeprefix("torch.")


def introduction(run: Run) -> str:
    """Describe the run in three lines: model, text, ranks."""
    engine, corpus = run.engine, run.corpus
    parameters, shared = amount(run.model.numel), ranks_per_model(run)
    how = f", a model over {pluralize(shared, 'rank')}" if shared > 1 else ""
    if run.recipe.shape.experts:
        over = pluralize(engine.plan.parallel.degrees.expert, "rank")
        how += f", {run.recipe.shape.experts} experts a block over {over}"
    copies = pluralize(engine.dp_world_size, "replica" if shared > 1 else "rank")
    begins = f"resumes after step {engine.global_steps}" if engine.global_steps else "starts"
    stage, ranks = engine.zero_optimization_stage(), engine.parts.world.world_size
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    return (
        f"run {run.folder.name} {begins}: GPT of {parameters} parameters, {run.precision}, ZeRO stage {stage}\n"
        f"text: {amount(corpus.train.numel())} bytes in {len(corpus.train_files)} files of {corpus.root}, "
        f"and {len(corpus.validation_files)} files held out\n"
        f"{pluralize(ranks, 'rank')} x {pluralize(torch.get_num_threads(), 'thread')} on {engine.device.type}{how}; "
        f"a step is {copies} x {pluralize(accumulation, 'micro-step')} x {pluralize(micro, 'window')} of "
        f"{run.recipe.shape.context} bytes"
    )


def ranks_per_model(run: Run) -> int:
    """Return the number of ranks that share one model replica, and so its windows."""
    shared: int = run.engine.parts.world.world_size // run.engine.dp_world_size
    return shared


def pluralize(number: int, noun: str) -> str:
    """Format a count: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def interruption_message(run: Run) -> str:
    return f"stopped and saved after step {run.engine.global_steps}. To continue: {run.resuming}"


def generate_sample(run: Run) -> str:
    """Generate a sample of text by the model itself.  Every rank must call: each may hold a part of it."""
    return printable(generate(run.model, PROMPT, num_bytes=SAMPLE_BYTES, seed=run.recipe.seed))


def write_results(run: Run, result: Result, inference: Inference, rows: list[Row]) -> str:
    """Write the report and result.json to the run's folder; return the final message."""
    folder = run.folder
    data = ReportData(
        name=folder.name,
        recipe=run.recipe,
        rows=rows,
        record=read_record(folder),
        result=result,
        inference=inference,
        environment=environment_facts(run),
        corpus=corpus_facts(run.corpus),
    )
    write_report(data, folder.report)
    figures = {**attrs.asdict(result), "inference": [attrs.asdict(each) for each in inference.variants]}
    folder.result.write_text(json.dumps(figures, indent=2) + "\n")
    lines = [f"\n{inference.sample.rstrip()}\n", f"{result.table()}\n"]
    if inference.variants:
        lines.append(f"{inference.table()}\n")
    if not result.beats_baseline:
        is_below_baseline = run.recipe.is_below_baseline(step=result.step, beats_baseline=result.beats_baseline)
        lines.append(
            "The model did not beat the byte tables" + (": it should have." if is_below_baseline else " yet.")
        )
    if result.step < run.recipe.steps:
        lines.append(f"{run.recipe.steps - result.step} steps are left. To continue: {run.resuming}")
    lines.append(f"checkpoints  {folder.checkpoints}")
    lines.append(f"TensorBoard  {sys.executable} -m tensorboard.main --logdir {folder.path.parent}")
    lines.append(f"report       {folder.report}")
    return "\n".join(lines)


def read_record(folder: Folder) -> Record:
    """Return the engine's record; an empty one if the engine could not write it, so that the run still ends well."""
    try:
        return read_run(folder.record)
    except NoRunError:
        return Record(name=folder.name, folder=folder.record)


def environment_facts(run: Run) -> dict[str, object]:
    """Return facts about machine, ranks and versions, for the report."""
    engine = run.engine
    on_gpu = engine.device.type == "cuda"
    threads = pluralize(torch.get_num_threads(), "thread")
    return {
        "device": torch.cuda.get_device_name(engine.device) if on_gpu else f"{cpu_name()}, {os.cpu_count()} cores",
        "ranks": f"{engine.parts.world.world_size}, {threads} each, {engine.parts.world.backend}",
        "precision": run.precision,
        "ZeRO stage": engine.zero_optimization_stage(),
        "ranks that share a model": ranks_per_model(run),
        "windows per step": engine.train_batch_size(),
        "zengine, torch": f"{zengine.__version__}, {torch.__version__}",
        "Python, system": f"{platform.python_version()}, {platform.system()} {platform.release()}",
    }


def cpu_name() -> str:
    """Return the CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def corpus_facts(corpus: Corpus) -> dict[str, object]:
    """Return facts about the text, for the report."""
    return {
        "source": corpus.root,
        "training": f"{amount(corpus.train.numel())} bytes in {len(corpus.train_files)} files",
        "held out": f"{amount(corpus.validation.numel())} bytes in {len(corpus.validation_files)} files",
        "fingerprint": corpus.fingerprint,
    }
