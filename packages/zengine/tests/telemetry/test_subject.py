"""What is known of a model and a run."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zengine.telemetry.subject import environment, has_gradient_checkpointing, now, shape_of, without_secrets


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (SimpleNamespace(num_hidden_layers=12, hidden_size=768), (12, 768)),
        (SimpleNamespace(n_layer=2, n_embd=64), (2, 64)),
        ({"depth": 3, "width": 32}, (3, 32)),
        (SimpleNamespace(num_hidden_layers=12), (0, 0)),
        (SimpleNamespace(num_hidden_layers="many", hidden_size=True), (0, 0)),
        (None, (0, 0)),
    ],
)
def test_layers_and_width_are_read_from_a_models_own_config(config, shape):
    module = nn.Linear(1, 1)
    module.config = config
    assert shape_of(module) == shape


def test_a_model_that_says_nothing_has_no_shape():
    assert shape_of(nn.Linear(1, 1)) == (0, 0)


def test_a_flag_on_any_module_tells_of_recomputation():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert not has_gradient_checkpointing(model)
    model[1].gradient_checkpointing = True
    assert has_gradient_checkpointing(model)


def test_secrets_and_infinities_do_not_reach_a_record():
    config = {"comet": {"api_key": "x", "mode": "get"}, "steps_per_print": float("inf"), "list": [1, {"api_key": ""}]}
    assert without_secrets(config) == {
        "comet": {"api_key": "(hidden)", "mode": "get"},
        "steps_per_print": "inf",
        "list": [1, {"api_key": ""}],
    }


def test_the_environment_names_versions_and_the_machine():
    facts = environment(torch.device("cpu"), 2)
    assert facts["torch"] == torch.__version__
    assert facts["world_size"] == 2
    assert facts["device"].startswith("cpu: ")
    assert facts["host cpus"] >= 1
    assert now()[10] == "T"
