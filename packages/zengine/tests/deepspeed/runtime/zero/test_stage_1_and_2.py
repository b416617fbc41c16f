"""The estimate of stage 2 from the numbers alone."""

from __future__ import annotations

from zengine.deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold


def test_the_table_has_a_line_with_offload_and_one_without(capsys):
    estimate_zero2_model_states_mem_needs_all_cold(2**30, 1, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["24.00GB", "|", "2.00GB", "|", "offload_optimizer=cpu"]
    assert lines[-1].split() == ["6.00GB", "|", "20.00GB", "|", "offload_optimizer=none"]
