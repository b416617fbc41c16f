"""The table of certain options: its names are those of the signatures, and what it accepts can be built."""

from __future__ import annotations

import inspect
import math
import random
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import zoptim
from zoptim.optimizers import build
from zoptim.optimizers.table import ROWS
from zoptim.options import OPTIMIZER_OPTIONS, SCHEDULE_OPTIONS, certainly_accepts

VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 5, -1, 2**60, 0.0, 0.5, 0.999, 1.0, 10.0, -0.8, 1e-8, 1e308, math.inf, math.nan, True, False, None),
    *("auto", "0.1", "fp32", "bf16", "8bit", "4bit", "log", "linear", "gram", "original", "nccl", torch.float32),
    *([0.9, 0.99], (0.9, 1.0), [None, 1e-3], [0.1], [0.9, 0.99, 0.999], (True, 0.5), {}),
)


def names_in_configs(name: str) -> set[str]:
    """Return the options of an optimizer in a config, by its signature and DeepSpeed's additions."""
    row = next(row for row in ROWS if row.name.lower() == name)
    added = {"adam_w_mode", "torch_adam"} if row.module == "adam" else set()
    # `make_optimizer` checks the names of both Adams by AdamW
    cls = zoptim.AdamW if row.module == "adam" else row.load()
    return {*build._options_of(cls), *added, *({"fp32_optimizer_states"} if row.fp32_states else ())}


def test_names_are_those_of_the_signatures() -> None:
    assert set(OPTIMIZER_OPTIONS) == {row.name.lower() for row in ROWS}
    for name, options in OPTIMIZER_OPTIONS.items():
        assert set(options) == names_in_configs(name), name
    for name, options in SCHEDULE_OPTIONS.items():
        signature = inspect.signature(getattr(zoptim, name)).parameters.values()
        assert set(options) == {each.name for each in signature} - {"optimizer"}, name
        required = {each.name: 1 for each in signature if each.default is each.empty and each.name != "optimizer"}
        assert certainly_accepts(SCHEDULE_OPTIONS, name, required)
        for missing in required:
            assert not certainly_accepts(SCHEDULE_OPTIONS, name, {key: 1 for key in required if key != missing})


def accepted(rng: random.Random, table: Any, name: str, needed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return random options that the table accepts: each option with each value, then pairs and more."""
    tried = [{**needed, option: value} for option in table[name] for value in VALUES]
    tried += [
        {**needed, **{option: rng.choice(VALUES) for option in rng.sample(sorted(table[name]), rng.randint(2, 3))}}
        for _ in range(600)
    ]
    return [options for options in tried if certainly_accepts(table, name, options)]


@pytest.mark.parametrize("name", OPTIMIZER_OPTIONS)
def test_what_is_certain_can_be_built(name: str) -> None:
    found = accepted(random.Random(name), OPTIMIZER_OPTIONS, name, {})
    assert {option for options in found for option in options} == set(OPTIMIZER_OPTIONS[name])  # each has a value
    for options in found:
        zoptim.make_optimizer(name.upper(), [torch.nn.Parameter(torch.zeros(1, 1))], options)
    assert certainly_accepts(OPTIMIZER_OPTIONS, name.upper(), {"lr": 0.1})


@pytest.mark.parametrize("name", SCHEDULE_OPTIONS)
def test_schedules_that_are_certain_can_be_built(name: str) -> None:
    needed = {"total_num_steps": 7} if "total_num_steps" in SCHEDULE_OPTIONS[name] else {}
    needed |= {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0} if name == "OneCycle" else {}
    for options in accepted(random.Random(name), SCHEDULE_OPTIONS, name, needed):
        optimizer = zoptim.AdamW([torch.nn.Parameter(torch.zeros(1, 1))])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a warm-up that is longer than the run
            zoptim.make_schedule(name, optimizer, options).step()
    assert not certainly_accepts(SCHEDULE_OPTIONS, name.lower(), needed)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"lrr": 0.1}),
        ("AdamW", {"lr": -1.0}),
        ("AdamW", {"lr": "auto"}),
        ("AdamW", {"state_dtype": "bf16", "fp32_optimizer_states": False}),
        ("RMSprop", {}),
        (None, {}),
    ],
)
def test_the_rest_is_asked(name: Any, options: dict[str, Any]) -> None:
    assert not certainly_accepts(OPTIMIZER_OPTIONS, name, options)


def test_neither_the_table_nor_import_zoptim_needs_torch() -> None:
    script = "import sys, zoptim.options, zoptim; zoptim.UnknownNameError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
