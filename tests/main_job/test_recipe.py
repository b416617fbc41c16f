"""Recipes of runs, from options and files."""

from __future__ import annotations

import json
import re

import pytest

import zengine
from train.launch import choose_name, num_ranks, parser, ranks_per_replica, saved_config
from train.model import GPT
from train.recipe import Folder, Recipe, RecipeError, load_recipe, make_recipe, pin_measured


def options_of(*arguments: str):
    return parser().parse_args(list(arguments))


@pytest.fixture
def folder(tmp_path):
    return Folder(path=tmp_path / "runs" / "mine")


def test_the_defaults_are_those_of_the_config_file(folder):
    recipe = make_recipe(options_of(), folder)
    assert recipe.must_win
    assert recipe.seed == 0
    assert recipe.steps == recipe.config["scheduler"]["params"]["total_num_steps"]
    assert recipe.config["zero_optimization"]["stage"] == 2
    assert recipe.config["tensorboard"] == {
        "enabled": True,
        "output_path": str(folder.path),
        "job_name": "tensorboard",
    }


def test_a_shorter_run_has_a_scaled_schedule_and_need_not_beat_the_baseline(folder):
    full = make_recipe(options_of(), folder)
    recipe = make_recipe(options_of("--steps", str(full.steps // 10)), folder)
    schedule, planned = (each.config["scheduler"]["params"] for each in (recipe, full))
    assert schedule["total_num_steps"] == recipe.steps == full.steps // 10
    assert schedule["warmup_num_steps"] == planned["warmup_num_steps"] // 10
    assert not recipe.must_win


def test_only_a_full_length_run_can_be_below_the_baseline(folder):
    full, short = make_recipe(options_of(), folder), make_recipe(options_of("--steps", "10"), folder)
    assert full.is_below_baseline(step=full.steps, beats_baseline=False)
    assert not full.is_below_baseline(step=full.steps, beats_baseline=True)
    assert not full.is_below_baseline(step=full.steps - 1, beats_baseline=False)
    assert not short.is_below_baseline(step=10, beats_baseline=False)


def test_options_reach_the_config(folder):
    recipe = make_recipe(options_of("--stage", "1", "--micro-batch", "3", "--seed", "7"), folder)
    assert recipe.config["zero_optimization"]["stage"] == 1
    assert recipe.config["train_micro_batch_size_per_gpu"] == 3
    assert recipe.config["data_efficiency"]["seed"] == recipe.seed == 7


def test_a_misspelt_key_is_named_with_its_file_and_the_nearest_name(folder, tmp_path):
    source = tmp_path / "mine.json"
    source.write_text('{\n  "train_micro_batch_size_per_gpu": 4,\n  "gradient_cliping": 1.0\n}\n')
    with pytest.raises(zengine.ConfigError, match=r"(?s)gradient_cliping.*gradient_clipping"):
        make_recipe(options_of("--config", str(source), "--steps", "3"), folder)


def test_a_config_without_a_length_raises(folder, tmp_path):
    source = tmp_path / "mine.json"
    source.write_text('{"train_micro_batch_size_per_gpu": 4}')
    with pytest.raises(RecipeError, match="total_num_steps: set the number of steps with --steps N"):
        make_recipe(options_of("--config", str(source)), folder)
    assert make_recipe(options_of("--config", str(source), "--steps", "3"), folder).steps == 3
    with pytest.raises(RecipeError, match=r"absent\.json: there is no such file"):
        make_recipe(options_of("--config", str(tmp_path / "absent.json")), folder)


def test_a_recipe_survives_its_file(folder):
    recipe = make_recipe(options_of("--quick"), folder)
    recipe.write(folder.recipe)
    assert Recipe.read(folder.recipe) == recipe


def test_measured_choices_are_pinned(folder):
    recipe = make_recipe(options_of(), folder)
    assert recipe.config["bf16"]["enabled"] == "auto"
    assert pin_measured(recipe, bf16=True, windows=16).config["bf16"]["enabled"] is True
    assert pin_measured(recipe, bf16=False, windows=16).config["bf16"]["enabled"] is False


@pytest.mark.parametrize("conflict", [["--steps", "9"], ["--seed", "1"], ["--stage", "0"], ["--micro-batch", "9"]])
def test_a_resumed_run_keeps_its_recipe(folder, conflict):
    make_recipe(options_of("--quick", "--steps", "12"), folder).write(folder.recipe)
    assert load_recipe(options_of("--resume"), folder).steps == 12
    assert load_recipe(options_of("--resume", "--steps", "12", "--stage", "2"), folder).steps == 12
    with pytest.raises(RecipeError, match=f"{conflict[0]} {conflict[1]}: the run 'mine' was started with"):
        load_recipe(options_of("--resume", *conflict), folder)
    extended = load_recipe(options_of("--resume", "--steps", "30"), folder)
    assert extended.steps == 30
    assert extended.config["scheduler"]["params"]["total_num_steps"] == 12


def saved_run(runs, name: str) -> None:
    checkpoints = runs / name / "checkpoints"
    checkpoints.mkdir(parents=True)
    (runs / name / "run.json").write_text(json.dumps({}))
    (checkpoints / "latest").write_text("global_step1")


def test_names_are_chosen_so_that_nothing_is_overwritten(tmp_path):
    runs = ["--runs", str(tmp_path)]
    with pytest.raises(ValueError, match="nothing to resume"):
        choose_name(options_of(*runs, "--resume"))
    saved_run(tmp_path, "first")
    with pytest.raises(ValueError, match="has a run 'first' already"):
        choose_name(options_of(*runs, "--name", "first"))
    with pytest.raises(ValueError, match=r"no run 'second'.* there are first"):
        choose_name(options_of(*runs, "--resume", "--name", "second"))
    assert choose_name(options_of(*runs, "--name", "second")) == "second"
    assert choose_name(options_of(*runs, "--resume")) == "first"
    assert choose_name(options_of(*runs)) not in ("first", "second")


@pytest.mark.parametrize(
    "wrong", [["--ranks", "0"], ["--steps", "many"], ["--name", "a/b"], ["--name", ".."], ["--stage", "4"]]
)
def test_impossible_options_are_rejected(wrong, capsys):
    with pytest.raises(SystemExit):
        options_of(*wrong)
    assert wrong[0] in capsys.readouterr().err


def test_a_split_keeps_the_windows_of_a_step_and_may_change_on_resuming(folder):
    recipe = make_recipe(options_of("--quick", "--tensor", "2"), folder)
    assert recipe.config["tensor_parallel"] == {"autotp_size": 2}
    assert recipe.config["gradient_accumulation_steps"] == 4  # twice as many, on half as many replicas
    pin_measured(recipe, bf16=False, windows=16).write(folder.recipe)
    again = load_recipe(options_of("--resume"), folder).config
    assert (again["tensor_parallel"]["autotp_size"], again["train_batch_size"]) == (2, 16)
    assert "gradient_accumulation_steps" not in again
    other = load_recipe(options_of("--resume", "--tensor", "1"), folder).config
    assert (other["tensor_parallel"]["autotp_size"], other["train_batch_size"]) == (1, 16)


def test_windows_that_cannot_be_split_are_rejected_with_the_numbers(folder):
    assert make_recipe(options_of("--quick", "--sequence", "2"), folder).config["sequence_parallel_size"] == 2
    with pytest.raises(RecipeError, match=r"--sequence 3 does not divide the 64 bytes of a window"):
        make_recipe(options_of("--quick", "--sequence", "3"), folder)
    make_recipe(
        options_of("--quick", "--sequence", "4", "--tensor", "2"), folder
    )  # more ranks than heads are permitted
    make_recipe(options_of("--quick"), folder).write(folder.recipe)
    with pytest.raises(RecipeError, match="--sequence 5"):
        load_recipe(options_of("--resume", "--sequence", "5"), folder)


def test_experts_come_with_their_option_and_stay(folder):
    recipe = make_recipe(options_of("--quick", "--expert", "2"), folder)
    assert recipe.config["expert_parallel"] == {"enabled": True, "autoep_size": 2}
    assert recipe.shape.experts == 4
    assert recipe.config["gradient_accumulation_steps"] == 2  # every rank has windows of its own
    recipe.write(folder.recipe)
    again = load_recipe(options_of("--resume", "--expert", "1"), folder)
    assert (again.config["expert_parallel"]["autoep_size"], again.shape.experts) == (1, 4)
    make_recipe(options_of("--quick"), folder).write(folder.recipe)
    with pytest.raises(RecipeError, match="was started without experts"):
        load_recipe(options_of("--resume", "--expert", "2"), folder)


def test_there_are_enough_ranks_for_a_split():
    assert ranks_per_replica(options_of("--tensor", "4")) == 4
    assert ranks_per_replica(options_of("--tensor", "2", "--sequence", "2")) == 4
    assert ranks_per_replica(options_of()) == 1
    assert num_ranks(options_of("--sequence", "2", "--expert", "3"), {}) == 6
    assert num_ranks(options_of("--ranks", "2", "--tensor", "4"), {}) == 2  # the engine raises


def test_a_resumed_run_has_enough_ranks_for_its_splits(folder):
    make_recipe(options_of("--quick", "--tensor", "2", "--pipeline", "2"), folder).write(folder.recipe)
    runs = ("--runs", str(folder.path.parent), "--resume")
    again, other = options_of(*runs), options_of(*runs, "--tensor", "4", "--pipeline", "1")
    assert num_ranks(again, saved_config(again, folder.name)) == 4
    assert num_ranks(other, saved_config(other, folder.name)) == 4
    fewer = options_of(*runs, "--tensor", "1")
    assert num_ranks(fewer, saved_config(fewer, folder.name)) == 2
    assert saved_config(options_of(*runs[:2]), folder.name) == {}


@pytest.mark.parametrize("experts", [(), ("--expert", "1")])
def test_split_stages_have_explicit_tensor_parallel_specs(folder, experts):
    split = ("--ranks", "4", "--tensor", "2", "--pipeline", "2", "--stage", "3")
    recipe = make_recipe(options_of("--quick", *split, *experts), folder)
    specs = recipe.config["tensor_parallel"]["partition_config"]["layer_specs"]
    names = [name for name, _ in GPT(recipe.shape).blocks[0].named_parameters(prefix="blocks.0") if "weight" in name]
    split = [name for name in names if any(re.fullmatch(spec["patterns"][0], name) for spec in specs)]
    dense = ["mlp_in", "mlp_out"] * (not experts)  # experts stay whole
    assert [name.split(".")[-2] for name in split] == ["qkv", "attention_out", *dense]
    assert len(specs) == 2 + len(dense)  # a pattern without a match is rejected
    assert recipe.config["zero_optimization"]["stage"] == 3
