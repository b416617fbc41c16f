"""The main job: a small GPT learns the Python standard library, byte by byte.

This is the canonical program around zengine; launch.py starts it on every rank.  `train` holds the loop: the five
lines that train, and around them what a real job needs: validation, checkpoints that a run continues from bit for
bit, and an answer to Ctrl-C.  What is said before and after the loop is in telling.py.

    python3 tools/dev.py train              two ranks, about six minutes
    python3 tools/dev.py train --resume     after Ctrl-C, a crash or a power cut
    python3 tools/dev.py train --tensor 2   its layers split over two ranks; --resume --tensor 1 goes on without
    python3 tools/dev.py train --sequence 2 half of the bytes of each window on each of two ranks
    python3 tools/dev.py train --expert 2   a model with experts, shared out over two ranks
    python3 tools/dev.py train --pipeline 2 half of the layers on each of two ranks
    python3 tools/dev.py train --pipeline 2 --expert 2     two of these together: four ranks
    python3 tools/dev.py train --help       everything else
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

import zengine
from zengine.data import forever

from .evaluate import final_result, validation_loss
from .journal import Journal
from .launch import DEFEAT, MISTAKE, parser
from .model import GPT, parameter_groups
from .pipelined import in_stages, whole_batch, writer_of
from .progress import Progress, memory_bytes
from .recipe import Folder, Recipe, RecipeError, pinned, settle, settled
from .shared import share_windows
from .stopping import Stopping, Wish
from .telling import Run, interrupted, introduction, take_stock, written
from .text import CorpusError, Windows, read_corpus


def train(options: argparse.Namespace, folder: Folder, recipe: Recipe) -> int:
    """Train from the start or from the newest checkpoint; the exit code."""
    corpus = read_corpus()
    held_out = Windows(corpus.validation, recipe.shape.context)
    torch.manual_seed(recipe.seed)
    model = GPT(recipe.shape, seed=recipe.seed)
    trained = in_stages(model, recipe.config)

    engine, _optimizer, loader, _scheduler = zengine.initialize(
        model=trained,
        model_parameters=parameter_groups(trained, recipe.weight_decay),
        training_data=Windows(corpus.train, recipe.shape.context),
        config=recipe.config,
    )

    is_first = engine.parts.world.rank == 0
    progress = Progress(steps=recipe.steps, speaks=is_first)
    journal = Journal(folder.journal, writes=is_first, bytes_per_sample=recipe.shape.context)
    stopping = Stopping(minutes=options.minutes, die_at=options.die_at)
    scorer = writer_of(engine, share_windows(model, engine))
    run = Run(folder=folder, recipe=recipe, corpus=corpus, model=scorer, engine=engine)

    def save() -> None:
        engine.save_checkpoint(str(folder.checkpoints), client_state={"fingerprint": corpus.fingerprint})

    if options.resume:
        _path, state = engine.load_checkpoint(str(folder.checkpoints))
        corpus.check_same_as(state["fingerprint"])
    elif is_first:
        pinned(recipe, bf16=engine.bfloat16_enabled(), windows=engine.train_batch_size()).write(folder.recipe)
    progress.say(introduction(run))
    journal.begin(step=engine.global_steps, samples=engine.global_samples)

    glance, wish = held_out.stacked(recipe.glance_windows), Wish.GO_ON
    batches = forever(loader)
    while engine.global_steps < recipe.steps and wish is Wish.GO_ON:
        report = one_step(engine, batches)
        progress.show(journal.add(report, memory_bytes=memory_bytes(engine.device)))
        wish = stopping.agreed(report.step, engine.device)
        with journal.pause():
            if report.step % recipe.validate_every == 0:
                journal.add_validation(report.step, validation_loss(engine, glance))
            if report.step % recipe.save_every == 0 or report.step == recipe.steps or wish is not Wish.GO_ON:
                save()

    journal.close()
    if wish is Wish.INTERRUPTED:
        progress.say(interrupted(run))
        engine.close()
        return 0
    progress.say("measuring on the held-out files ...")
    result = final_result(engine, corpus, held_out.stacked(recipe.final_windows))
    sample = written(run)
    engine.close()
    if is_first:
        progress.say(take_stock(run, result, sample, journal.rows()))
    return DEFEAT if recipe.is_defeat(step=result.step, wins=result.wins) else 0


def one_step(engine: zengine.Engine, batches: Iterator[Tensor]) -> zengine.StepReport:
    """Micro-steps until the optimizer has had its turn; a pipeline takes them all at once."""
    if isinstance(engine, zengine.PipelineEngine):
        return whole_batch(engine, batches)
    report = None
    while report is None:  # gradients are still being accumulated
        loss = engine(next(batches).to(engine.device))
        engine.backward(loss)
        report = engine.step()
    return report


def main(arguments: list[str] | None = None) -> int:
    """One rank: settle what to do, do it; a mistake of the user becomes one line, from rank 0."""
    options = parser().parse_args(arguments)
    folder = Folder(path=options.runs.resolve() / (options.name or "unnamed"))
    try:
        recipe = settled(options, folder) if options.resume else settle(options, folder)
        return train(options, folder, recipe)
    except (RecipeError, CorpusError, zengine.ConfigError) as mistake:
        if os.environ.get("RANK", "0") == "0":
            print(f"train: {mistake}", file=sys.stderr)
        return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
