"""Recipe of a run: everything that must be equal for two runs to be equal.

The recipe is made once, from the options and a config file, and written to the run's folder, where `--resume` reads
it. So a run cannot be resumed under another schedule, seed or model by accident, and whether bf16 is faster is
measured once per run.

A run's folder:

    run.json            the recipe
    losses.jsonl        a line per step and per validation (journal.py)
    tensorboard/ csv/   written by the engine
    record/             the same for `zengine report`: config, environment, and every number of every step
    checkpoints/        written by the engine; `latest` names the newest
    report.html         the report; result.json its figures

The split of the model over ranks (--tensor, ...) may change; the windows of a step stay the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import attrs

import zengine.config

from .launch import SPLITS, degree_of, ranks_per_replica
from .model import Shape

DEFAULT_CONFIG = Path(__file__).with_name("config.json")


class RecipeError(ValueError):
    """Raised when options and config do not describe a run."""


@attrs.frozen(kw_only=True)
class Folder:
    """Paths of a run's files."""

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
    """Settings of a run.  All of it is JSON."""

    config: dict[str, Any]  # as handed to zengine.initialize
    shape: Shape
    seed: int  # of the weights and of the order of the windows
    steps: int  # optimizer steps in all
    validate_every: int  # steps between two validations
    save_every: int  # steps between two checkpoints
    glance_windows: int  # windows of a validation
    final_windows: int  # windows of the final evaluation, at most
    must_win: bool  # a full-length run must beat the byte tables; a shorter one only reports

    def __attrs_post_init__(self) -> None:
        """Raise RecipeError if the sequence degree does not divide the window."""
        size = degree_of(self.config, "sequence")
        if self.shape.context % size:
            raise RecipeError(
                f"--sequence {size} does not divide the {self.shape.context} bytes of a window; choose a divisor"
            )

    @property
    def weight_decay(self) -> float:
        return float(self.config.get("optimizer", {}).get("params", {}).get("weight_decay", 0.0))

    def is_below_baseline(self, *, step: int, beats_baseline: bool) -> bool:
        """True if a full-length run has ended without beating the byte tables."""
        return self.must_win and step >= self.steps and not beats_baseline

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


def make_recipe(options: argparse.Namespace, folder: Folder) -> Recipe:
    """Make the recipe of a new run.

    --steps, else the config's schedule, determines the length.  The schedule is scaled to it, with its warm-up in
    proportion.  Raises RecipeError if neither gives a length, ConfigError for an unknown key.
    """
    source: Path = options.config or DEFAULT_CONFIG
    if not source.is_file():
        raise RecipeError(f"--config {source}: there is no such file (the working directory is {Path.cwd()})")
    zengine.config.load(source)  # raises with file and line, before the options are merged
    config = json.loads(source.read_text())
    schedule = config.get("scheduler", {}).get("params", {})
    planned = int(schedule.get("total_num_steps", 0))
    steps = options.steps or (30 if options.quick else planned)
    if steps < 1:
        raise RecipeError(f"{source} has no scheduler.params.total_num_steps: set the number of steps with --steps N")
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
    config["jsonl_monitor"]["enabled"] = True  # the report reads it
    return Recipe(
        config=config,
        shape=attrs.evolve(QUICK_SHAPE if options.quick else Shape(), experts=NUM_EXPERTS if options.expert else 0),
        seed=seed,
        steps=steps,
        must_win=bool(planned) and steps >= planned and not options.quick,
        **(QUICK if options.quick else FULL),
    )


def pipeline_tensor_specs(*, has_experts: bool) -> dict[str, Any]:
    """Return tensor-parallel specs for the layers of a pipeline stage; experts stay whole.

    They are explicit because automatic detection needs the whole model on one rank.
    """
    columns, rows = ([], ["attention_out"]) if has_experts else (["mlp_in"], ["attention_out", "mlp_out"])
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.qkv\.weight"], "shape": [3, -1]},
            *({"patterns": [rf".*\.{name}\.weight"]} for name in columns),
            *({"patterns": [rf".*\.{name}\.weight"], "partition_type": "row"} for name in rows),
        ],
    }


def _split(config: dict[str, Any], options: argparse.Namespace, *, has_experts: bool) -> None:
    """Write the degrees of the options into the config.

    Keeps the windows of a step: a replica over several ranks runs the micro-steps of all of them.
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
        config["tensor_parallel"]["partition_config"] = pipeline_tensor_specs(has_experts=has_experts)
    if "train_batch_size" not in config:
        micro_steps = config.get("gradient_accumulation_steps", 1)
        config["gradient_accumulation_steps"] = micro_steps * ranks_per_replica(options)


def pin_measured(recipe: Recipe, *, bf16: bool, windows: int) -> Recipe:
    """Return the recipe with the engine's measured choices, so that a resumed run does not measure again.

    windows: per step; they replace the number of micro-steps, so that a resumed run may split the model differently.
    """
    config = {**recipe.config, "train_batch_size": windows}
    config.pop("gradient_accumulation_steps", None)
    section = config.get("bf16", {})
    if section.get("enabled") == "auto":
        config["bf16"] = {**section, "enabled": bf16}
    return attrs.evolve(recipe, config=config)


def load_recipe(options: argparse.Namespace, folder: Folder) -> Recipe:
    """Load the recipe of the run to resume.  Raises RecipeError if an option contradicts it.

    More `--steps` extend the run, also one that is finished; the learning rate stays at the end of its schedule.
    """
    recipe = Recipe.read(folder.recipe)
    config = recipe.config
    fixed_options = {
        "--seed": (options.seed, recipe.seed),
        "--stage": (options.stage, config.get("zero_optimization", {}).get("stage", 0)),
        "--micro-batch": (options.micro_batch, config.get("train_micro_batch_size_per_gpu")),
    }
    for option, (given, fixed) in fixed_options.items():
        if given is not None and given != fixed:
            raise RecipeError(
                f"{option} {given}: the run {folder.name!r} was started with {fixed}, which --resume cannot change. "
                f"Omit the option, or start a new run"
            )
    steps = options.steps or recipe.steps
    if steps < recipe.steps:
        raise RecipeError(
            f"--steps {steps}: the run {folder.name!r} was started with {recipe.steps}; --resume can extend it, not "
            f"shorten it. Omit the option, or give {recipe.steps} or more"
        )
    if options.config is not None:
        raise RecipeError(f"--config: a resumed run uses its own config, in {folder.recipe}. Omit the option")
    if options.expert is not None and not recipe.shape.experts:
        raise RecipeError(
            f"--expert: the run {folder.name!r} was started without experts. Start a new run with --expert"
        )
    _split(config, options, has_experts=recipe.shape.experts > 0)
    return attrs.evolve(recipe, config=config, steps=steps)
