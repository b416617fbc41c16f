"""Misspelt keys: the right name is suggested, for every key and every one-letter slip."""

from __future__ import annotations

import random
from collections.abc import Iterator
from string import ascii_lowercase

import pytest

from zengine.config.grammar.scan import Document
from zengine.config.grammar.suggest import edit_distance, nearest
from zengine.config.grammar.table import walk
from zengine.config.keys.root import ROOT
from zengine.config.reading.structure import structure

PATHS = [path for path, _ in walk(ROOT) if path[-1] != "*"]
KNOWN = set(PATHS)
# Below four letters one slip may leave nothing to go by.  Listed, although all of them pass today.
SHORT = {"aim", "amp", "aio", "fp8", "lr", "moe", "mpu", "tol", "tp"}


def mutations(name: str) -> Iterator[str]:
    """Every name with one letter dropped, doubled, swapped with the next, or replaced by another."""
    letters = random.Random(name)  # the same slips in every run
    for at in range(len(name)):
        yield name[:at] + letters.choice(ascii_lowercase) + name[at + 1 :]
        yield name[:at] + name[at + 1 :]
        yield name[:at] + name[at] + name[at:]
        yield name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :]


def suggestions(path: tuple[str, ...], names: set[str]) -> dict[str, str]:
    """Suggestion for each of `names`, written in the place of the key at `path`."""
    nested: dict[str, object] = dict.fromkeys(names)
    for part in reversed(path[:-1]):
        nested = {"any_name" if part == "*" else part: nested}
    reading = structure(Document(source="dict", data=nested, places={}))
    return {
        problem.key.rpartition(".")[2]: problem.suggestion
        for problem in reading.problems
        if problem.reason == "unknown key"
    }


@pytest.mark.parametrize("first", sorted({path[0] for path in PATHS}))
def test_every_one_letter_slip_in_every_key_is_an_error_that_names_the_right_key(first: str) -> None:
    for path in (path for path in PATHS if path[0] == first):
        name = path[-1]
        misspelt = {slip for slip in mutations(name) if slip and (*path[:-1], slip) not in KNOWN}
        found = suggestions(path, misspelt)
        assert set(found) == misspelt, path
        for slip, suggestion in found.items():
            question = suggestion.partition("?")[0]
            assert question.startswith("Did you mean "), (path, slip, suggestion)
            assert f'"{name}"' in question, (path, slip, suggestion)


def test_the_short_names_are_known_by_name() -> None:
    assert {path[-1] for path in PATHS if len(path[-1]) < 4} <= SHORT


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("gradient_acumulation_steps", 'Did you mean "gradient_accumulation_steps"?'),
        ("gradient_cliping", 'Did you mean "gradient_clipping"?'),
        ("zero_optimisation", 'Did you mean "zero_optimization"?'),
        ("zero_optimization.stgae", 'Did you mean "stage"?'),
        ("zero_optimization.reduce_bucketsize", 'Did you mean "reduce_bucket_size"?'),
        ("Gradient-Clipping", 'Did you mean "gradient_clipping"?'),
        ("micro_batch_size", 'Did you mean "train_micro_batch_size_per_gpu"?'),
        ("stage", '"stage" belongs under "zero_optimization".'),
        ("loss_scale", '"loss_scale" belongs under "fp16", "amp" or "torch_autocast".'),
        (
            "tp_size",
            'Did you mean "mp_size" or "ep_size"? "tp_size" belongs under "tensor_parallel.tp" or '
            '"tensor_parallel.partition_config".',
        ),
        ("weight_decay", '"weight_decay" belongs under "optimizer.params".'),
        ("warmup_num_steps", '"warmup_num_steps" belongs under "scheduler.params".'),
        ("state_dtype", '"state_dtype" belongs under "optimizer.params".'),
        ("optimizer.ns_steps", '"ns_steps" belongs under "optimizer.params".'),
        ("fp16.train_batch_size", '"train_batch_size" belongs at the top level.'),
        ("fp16.stage", '"stage" belongs under "zero_optimization".'),
        ("check_grad_overflw", 'Did you mean "check_grad_overflow"? "check_grad_overflow" belongs under "bf16".'),
        ("expert_parallel.expert_w", 'Did you mean "expert_w1", "expert_w2" or "expert_w3"?'),
        ("timers.xyz", "Known keys here: throughput."),
        ("nonsense", "No known key is near: remove it."),
    ],
)
def test_a_slip_of_another_kind_gets_a_useful_sentence(path: str, suggestion: str) -> None:
    parts = tuple(path.split("."))
    assert suggestions(parts, {parts[-1]}) == {parts[-1]: suggestion}


def test_a_section_with_free_names_still_guards_its_switch() -> None:
    assert suggestions(("amp", "x"), {"opt_level", "enabeld"}) == {"enabeld": 'Did you mean "enabled"?'}


@pytest.mark.parametrize(
    ("left", "right", "distance"),
    [("abc", "abc", 0), ("abc", "acb", 1), ("abc", "abbc", 1), ("abc", "ac", 1), ("abc", "axc", 1), ("", "ab", 2)],
)
def test_slips_are_counted_up_to_the_limit(left: str, right: str, distance: int) -> None:
    assert edit_distance(left, right, limit=3) == edit_distance(right, left, limit=3) == distance
    assert edit_distance(left, right, limit=0) == min(distance, 1)


def test_names_that_tie_are_all_returned() -> None:
    assert nearest("f16", ["fp16", "bf16", "other"]) == ["fp16", "bf16"]
