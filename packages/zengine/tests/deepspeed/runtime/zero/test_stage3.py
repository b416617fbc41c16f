"""DeepSpeed's estimates of memory, by its formulas."""

from __future__ import annotations

import pytest
from torch import nn

from zengine.deepspeed.runtime.zero import stage3, stage_1_and_2

P, L = 1_000_000, 100_000  # parameters, of the largest layer


@pytest.mark.parametrize(
    ("offload", "params", "zero_init", "host", "device"),
    [
        (True, True, True, P * 9 * 1.5, 4 * L),
        (True, False, True, P * 8 * 1.5, 4 * L + P // 4),
        (True, True, False, P * 16 * 1.5, 4 * L),
        (False, False, True, 4 * L * 4 * 1.5, 4 * L + 18 * P // 8),
        (False, False, False, 4 * P * 4 * 1.5, 4 * L + 18 * P // 8),
    ],
)
def test_stage_3_counts_masters_states_and_the_largest_layer(offload, params, zero_init, host, device):
    found = stage3.estimate_zero3_model_states_mem_needs(P, L, 4, 2, offload, params, zero_init)
    assert found == (host, device, 4 * L)


@pytest.mark.parametrize(
    ("offload", "host", "device"), [(True, P * 32 * 1.5, 2 * P), (False, P * 16 * 1.5, 2 * P + 18 * P // 8)]
)
def test_stage_2_counts_whole_weights(offload, host, device):
    assert stage_1_and_2.estimate_zero2_model_states_mem_needs(P, 4, 2, offload) == (host, device)


def test_a_model_is_counted_and_every_choice_is_printed(capsys):
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 2))
    assert stage3.model_to_params(model) == (132, 110)
    stage3.estimate_zero3_model_states_mem_needs_all_live(model, 2)
    assert capsys.readouterr().out.count("offload_param=") == 6
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model, 2)
    assert capsys.readouterr().out.count("offload_optimizer=") == 2
