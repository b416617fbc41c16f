"""Main job: train a small GPT on the Python standard library, byte by byte.

The reference program for zengine; launch.py starts it on every rank.  `train` contains the loop: five lines that
train, and around them validation, checkpoints from which a run continues bit for bit, and a clean stop on Ctrl-C.
messages.py prints the text before and after the loop.

    python3 tools/dev.py train              two ranks, about six minutes
    python3 tools/dev.py train --resume     after Ctrl-C, a crash or a power cut
    python3 tools/dev.py train --tensor 2   layers split over two ranks; --resume --tensor 1 continues without
    python3 tools/dev.py train --sequence 2 each window split over two ranks
    python3 tools/dev.py train --expert 2   a mixture of experts, sharded over two ranks
    python3 tools/dev.py train --pipeline 2 two pipeline stages
    python3 tools/dev.py train --pipeline 2 --expert 2     two splits together: four ranks
    python3 tools/dev.py train --help       all options
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import zengine
from zengine.data import forever
from zengine.pages import with_notes

from .evaluate import final_result, validation_loss
from .inference import Inference, judge_inference
from .journal import Journal
from .launch import BELOW_BASELINE, USAGE_ERROR, parser
from .messages import Run, generate_sample, interruption_message, introduction, write_results
from .model import GPT, parameter_groups
from .pipelined import make_pipeline, make_scorer, pipeline_step
from .progress import Progress, memory_bytes
from .recipe import Folder, Recipe, RecipeError, load_recipe, make_recipe, pin_measured
from .sequence import split_sequences
from .stopping import StopReason, StopVote
from .text import Corpus, CorpusError, Windows, read_corpus


def train(options: argparse.Namespace, folder: Folder, recipe: Recipe) -> int:
    """Train from the start or from the newest checkpoint; return the exit code."""
    corpus = read_corpus()
    held_out = Windows(corpus.validation, recipe.shape.context)
    torch.manual_seed(recipe.seed)
    model = GPT(recipe.shape, seed=recipe.seed)
    engine, loader = make_engine(model, recipe, corpus)
    is_first = engine.parts.world.rank == 0
    progress = Progress(steps=recipe.steps, prints=is_first)
    journal = Journal(folder.journal, writes=is_first, bytes_per_sample=recipe.shape.context)
    stop_vote = StopVote(minutes=options.minutes, die_at=options.die_at)
    scorer = make_scorer(engine, split_sequences(model, engine))
    run = Run(folder=folder, recipe=recipe, corpus=corpus, model=scorer, engine=engine)

    def save() -> None:
        engine.save_checkpoint(str(folder.checkpoints), client_state={"fingerprint": corpus.fingerprint})

    if options.resume:
        _path, state = engine.load_checkpoint(str(folder.checkpoints))
        corpus.check_same_as(state["fingerprint"])
        if is_first:
            recipe.write(folder.recipe)  # --steps may extend the run
    elif is_first:
        pin_measured(recipe, bf16=engine.bfloat16_enabled(), windows=engine.train_batch_size()).write(folder.recipe)
    progress.print_line(introduction(run))
    journal.begin(step=engine.global_steps, samples=engine.global_samples)

    validation_sample, reason = held_out.stacked(recipe.glance_windows), StopReason.NONE
    batches = forever(loader)
    while engine.global_steps < recipe.steps and reason is StopReason.NONE:
        report = one_step(engine, batches)
        progress.show(journal.add(report, memory_bytes=memory_bytes(engine.device)))
        reason = stop_vote.decide(report.step, engine.device)
        with journal.pause():
            if report.step % recipe.validate_every == 0:
                journal.add_validation(report.step, validation_loss(engine, validation_sample))
            if report.step % recipe.save_every == 0 or report.step == recipe.steps or reason is not StopReason.NONE:
                save()

    journal.close()
    if reason is StopReason.INTERRUPTED:
        progress.print_line(interruption_message(run))
        engine.close()
        return 0
    progress.print_line("measuring on the held-out files ...")
    result = final_result(engine, corpus, held_out.stacked(recipe.final_windows))
    sample = generate_sample(run) if recipe.shape.experts else ""
    engine.close()
    if is_first:
        inference = Inference(sample=sample) if recipe.shape.experts else judge_inference(folder, recipe, held_out)
        progress.print_line(write_results(run, result, inference, journal.rows()))
    return BELOW_BASELINE if recipe.is_below_baseline(step=result.step, beats_baseline=result.beats_baseline) else 0


def make_engine(model: GPT, recipe: Recipe, corpus: Corpus) -> tuple[zengine.Engine, Any]:
    """Return the engine and the loader of the training windows.

    Raises RecipeError if the config does not fit the model: a split, for example.
    """
    trained = make_pipeline(model, recipe.config)
    try:
        engine, _optimizer, loader, _scheduler = zengine.initialize(
            model=trained,
            model_parameters=parameter_groups(trained, recipe.weight_decay),
            training_data=Windows(corpus.train, recipe.shape.context),
            config=recipe.config,
        )
    except zengine.ConfigError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return engine, loader


def one_step(engine: zengine.Engine, batches: Iterator[Tensor]) -> zengine.StepReport:
    """Run micro-steps until the optimizer steps; a pipeline runs all of them in one call."""
    if isinstance(engine, zengine.PipelineEngine):
        return pipeline_step(engine, batches)
    report = None
    while report is None:  # gradients are still being accumulated
        loss = engine(next(batches).to(engine.device))
        engine.backward(loss)
        report = engine.step()
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run one rank; return its exit code.  Rank 0 prints a user's mistake as one line."""
    options = parser().parse_args(arguments)
    folder = Folder(path=options.runs.resolve() / (options.name or "unnamed"))
    try:
        recipe = load_recipe(options, folder) if options.resume else make_recipe(options, folder)
        return train(options, folder, recipe)
    except (RecipeError, CorpusError, zengine.ConfigError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train: {with_notes(error)}", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
