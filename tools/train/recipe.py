"""What a run is made of: everything that must be equal for two runs to be equal.

The recipe is settled once, from the options and a config file, and written to the run's folder; `--resume` reads
it there instead of the options.  So a run cannot be continued under another schedule, seed or model by accident,
and bf16, which is measured and not assumed, is measured once in the life of a run.

A run's folder:

    run.json            the recipe
    losses.jsonl        a line for every step and every validation (journal.py)
    tensorboard/ csv/   written by the engine
    record/             the same for `zengine report`: config, environment, and every number of every step
    checkpoints/        written by the engine; `latest` names the newest
    report.html         the picture; result.json the figures in it

What may change is how the model is split over ranks (--tensor, ...): the windows of a step stay the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import attrs

import zengine.config

from .launch import SPLITS, degree_of, split_over
from .model import Shape

DEFAULT_CONFIG = Path(__file__).with_name("config.json")


class RecipeError(ValueError):
    """The options and the config do not make a run."""


@attrs.frozen(kw_only=True)
class Folder:
    """Where the parts of a run lie."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        return self.path / "run.json"

    @property
    def journal(self) -> Path:
        return self.path / "losses.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def csv(self) -> Path:
        return self.path / "csv"

    @property
    def record(self) -> Path:
        return self.path / "record"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"


@attrs.frozen(kw_only=True)
class Recipe:
    """A run before it starts.  All of it is JSON."""

    config: dict[str, Any]  # as handed to zengine.initialize
    shape: Shape
    seed: int  # of the weights and of the order of the windows
    steps: int  # optimizer steps in all
    validate_every: int  # steps between two looks at held-out text
    save_every: int  # steps between two checkpoints
    glance_windows: int  # windows of such a look
    final_windows: int  # windows of the last one, at most
    must_win: bool  # a full-length run has to beat the byte tables; a shortened one only reports

    def __attrs_post_init__(self) -> None:
        """Raise RecipeError, with the numbers, if sequence ranks cannot share out the bytes of a window."""
        size = degree_of(self.config, "sequence")
        if self.shape.context % size:
            raise RecipeError(
                f"--sequence {size}: ranks share out the {self.shape.context} bytes of a window, which {size} has to "
                "divide"
            )

    @property
    def weight_decay(self) -> float:
        return float(self.config.get("optimizer", {}).get("params", {}).get("weight_decay", 0.0))

    def is_defeat(self, *, step: int, wins: bool) -> bool:
        """Whether a full-length run has ended without beating the byte tables."""
        return self.must_win and step >= self.steps and not wins

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(attrs.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Recipe:
        fields = json.loads(path.read_text())
        return cls(**{**fields, "shape": Shape(**fields["shape"])})


FULL = {"validate_every": 50, "save_every": 200, "glance_windows": 64, "final_windows": 4096}
QUICK_SHAPE, NUM_EXPERTS = Shape(depth=2, width=32, heads=2, context=64), 4
QUICK = {"validate_every": 10, "save_every": 10, "glance_windows": 16, "final_windows": 64}


def settle(options: argparse.Namespace, folder: Folder) -> Recipe:
    """The recipe of a new run.

    The length comes from --steps, else from the schedule in the config; the schedule is stretched to it, and its
    warm-up in proportion.  Raises RecipeError if there is no length anywhere, ConfigError for an unknown key.
    """
    source: Path = options.config or DEFAULT_CONFIG
    if not source.is_file():
        raise RecipeError(f"--config {source}: there is no such file (the working directory is {Path.cwd()})")
    zengine.config.load(source)  # complains by file and line, before the options are merged into it
    config = json.loads(source.read_text())
    schedule = config.get("scheduler", {}).get("params", {})
    planned = int(schedule.get("total_num_steps", 0))
    steps = options.steps or (30 if options.quick else planned)
    if steps < 1:
        raise RecipeError(f"{source} has no scheduler.params.total_num_steps: say how long to train with --steps N")
    if planned:
        schedule["total_num_steps"] = max(steps, 2)
        warmup = int(schedule.get("warmup_num_steps", 0))
        schedule["warmup_num_steps"] = max(2, min(warmup, warmup * steps // planned))
    if options.stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = options.stage
    if options.micro_batch:
        config["train_micro_batch_size_per_gpu"] = options.micro_batch
    _split(config, options, has_experts=options.expert is not None)
    seed = options.seed or 0
    config.setdefault("data_efficiency", {})["seed"] = seed
    places = {"tensorboard": folder.tensorboard, "csv_monitor": folder.csv, "jsonl_monitor": folder.record}
    for monitor, place in places.items():
        config.setdefault(monitor, {}).update(output_path=str(place.parent), job_name=place.name)
    config["jsonl_monitor"]["enabled"] = True  # the report is made of it
    return Recipe(
        config=config,
        shape=attrs.evolve(QUICK_SHAPE if options.quick else Shape(), experts=NUM_EXPERTS if options.expert else 0),
        seed=seed,
        steps=steps,
        must_win=bool(planned) and steps >= planned and not options.quick,
        **(QUICK if options.quick else FULL),
    )


def over_ranks(*, has_experts: bool) -> dict[str, Any]:
    """How tensor ranks of a stage split its layers, which cannot be tried out: no rank has the whole model.

    Experts stay whole.
    """
    enter, leave = ([], ["attention_out"]) if has_experts else (["mlp_in"], ["attention_out", "mlp_out"])
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.qkv\.weight"], "shape": [3, -1]},
            *({"patterns": [rf".*\.{name}\.weight"]} for name in enter),
            *({"patterns": [rf".*\.{name}\.weight"], "partition_type": "row"} for name in leave),
        ],
    }


def _split(config: dict[str, Any], options: argparse.Namespace, *, has_experts: bool) -> None:
    """Put the degrees that the options name into the config.

    A step has as many windows as without them: the ranks that share a model take the micro-steps of all of them.
    """
    for name, (path, _what) in SPLITS.items():
        degree = getattr(options, name)
        if degree is not None:
            section = config
            for key in path[:-1]:
                section = section.setdefault(key, {})
            section[path[-1]] = degree
    if options.expert is not None:
        config["expert_parallel"]["enabled"] = True
    if degree_of(config, "pipeline") > 1 and degree_of(config, "tensor") > 1:
        config["tensor_parallel"]["partition_config"] = over_ranks(has_experts=has_experts)
    if "train_batch_size" not in config:
        micro_steps = config.get("gradient_accumulation_steps", 1)
        config["gradient_accumulation_steps"] = micro_steps * split_over(options)


def pinned(recipe: Recipe, *, bf16: bool, windows: int) -> Recipe:
    """The recipe with what the engine decided, so that a resumed run does not measure again and decide otherwise.

    windows: of a step.  With them, and without micro-steps, the run may go on with its model split in another way.
    """
    config = {**recipe.config, "train_batch_size": windows}
    config.pop("gradient_accumulation_steps", None)
    section = config.get("bf16", {})
    if section.get("enabled") == "auto":
        config["bf16"] = {**section, "enabled": bf16}
    return attrs.evolve(recipe, config=config)


def settled(options: argparse.Namespace, folder: Folder) -> Recipe:
    """The recipe of the run to resume; RecipeError if an option asks for something else."""
    recipe = Recipe.read(folder.recipe)
    config = recipe.config
    mine = {
        "--steps": (options.steps, recipe.steps),
        "--seed": (options.seed, recipe.seed),
        "--stage": (options.stage, config.get("zero_optimization", {}).get("stage", 0)),
        "--micro-batch": (options.micro_batch, config.get("train_micro_batch_size_per_gpu")),
    }
    for option, (given, fixed) in mine.items():
        if given is not None and given != fixed:
            raise RecipeError(
                f"{option} {given}: the run {folder.name!r} was started with {fixed} and a resumed run goes on as it "
                f"began. Leave the option out, or start a new run"
            )
    if options.config is not None:
        raise RecipeError(f"--config: the run {folder.name!r} goes on with its own, in {folder.recipe}")
    if options.expert is not None and not recipe.shape.experts:
        raise RecipeError(f"--expert: the run {folder.name!r} was started without experts. Start a new one with it")
    _split(config, options, has_experts=recipe.shape.experts > 0)
    return attrs.evolve(recipe, config=config)
