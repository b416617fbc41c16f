"""The explanation: sections for people, the same as plain data for programs."""

from __future__ import annotations

import json
from typing import Any

import torch

from zengine.config import Facts, load, resolve
from zengine.planning.explanation import Explanation, explain
from zengine.planning.models import Shape, Transformer

SOURCE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}


def explanation(world_size: int = 8, **more: Any) -> Explanation:
    config = load({**SOURCE, **more})
    facts = Facts(world_size=world_size, replicas=world_size)
    with torch.device("meta"):
        module = Transformer(Shape(layers=2, width=64, vocabulary=1000))
    return explain(config, resolve(config, facts), facts, module, "a small model")


def test_the_batch_triangle_is_an_equation_with_origins() -> None:
    assert explanation().equation() == (
        "train_batch_size 64 (dict) = micro 4 (dict) x accumulation 2 (derived) x replicas 8 (derived)"
    )


def test_the_text_has_its_sections_and_no_line_ends_in_blanks() -> None:
    text = explanation().text()
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "dict on 8 ranks (CPU)",
        "batch",
        "plan",
        "one rank holds, for a small model, without activations",
        "one rank sends, in an optimizer step",
        "the same model at each stage",
        "worth knowing",
    ]
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "auto: default of --max_grad_norm" in text


def test_defaults_are_counted_and_shown_when_asked_for() -> None:
    assert "keys at their defaults (--all shows them)" in explanation().text()
    assert "log_level" not in explanation().text()
    assert "log_level" in explanation().text(everything=True)


def test_the_plans_own_stage_is_marked_and_stages_hold_less_and_less() -> None:
    own = explanation()
    assert "  2 * " in own.text()
    states = [each.memory.model_states_bytes for each in own.by_stage]
    assert states[0] > states[1] >= states[2] >= states[3]


def test_a_rank_alone_sends_nothing() -> None:
    assert "nothing: there is only one rank" in explanation(1, train_batch_size=4).text()


def test_the_same_for_programs_is_json() -> None:
    data = json.loads(json.dumps(explanation().as_json()))
    assert data["batch"]["accumulation"] == 2
    assert data["memory_bytes"]["total"] == data["stages"][2]["memory_bytes"]
    assert ["gradient_clipping", 1.0, "auto"] in data["plan"]
    assert [flow["what"] for flow in data["traffic"]] == ["gradients, reduce-scatter", "updated weights, all-gather"]
