"""The main job: a small GPT learns the Python standard library, byte by byte.

This is the canonical program around zengine; launch.py starts it on every rank.  `train` holds the loop: the five
lines that train, and around them what a real job needs: validation, checkpoints that a run continues from bit for
bit, and an answer to Ctrl-C.  What is said before and after the loop is in telling.py.

    python3 tools/dev.py train              two ranks, about six minutes
    python3 tools/dev.py train --resume     after Ctrl-C, a crash or a power cut
    python3 tools/dev.py train --tensor 2   its layers split over two ranks; --resume --tensor 1 goes on without
    python3 tools/dev.py train --sequence 2 half of the bytes of each window on each of two ranks
    python3 tools/dev.py train --expert 2   a model with experts, shared out over two ranks
    python3 tools/dev.py train --help       everything else
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

import zengine
from zengine.data import forever

from .evaluate import final_result, validation_loss
from .journal import Journal
from .launch import DEFEAT, MISTAKE, parser
from .model import GPT, parameter_groups
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

    engine, _optimizer, loader, _scheduler = zengine.initialize(
        model=model,
        model_parameters=parameter_groups(model, recipe.weight_decay),
        training_data=Windows(corpus.train, recipe.shape.context),
        config=recipe.config,
    )

    is_first = engine.world.rank == 0
    progress = Progress(steps=recipe.steps, speaks=is_first)
    journal = Journal(folder.journal, writes=is_first, bytes_per_sample=recipe.shape.context)
    stopping = Stopping(minutes=options.minutes, die_at=options.die_at)
    run = Run(folder=folder, recipe=recipe, corpus=corpus, model=share_windows(model, engine), engine=engine)

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
    for batch in forever(loader):
        if engine.global_steps >= recipe.steps or wish is not Wish.GO_ON:
            break
        loss = engine(batch.to(engine.device))
        engine.backward(loss)
        report = engine.step()
        if report is None:  # gradients are still being accumulated
            continue
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
