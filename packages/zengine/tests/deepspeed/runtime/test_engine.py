"""deepspeed.runtime.engine: names of timers, and gradients by dtype."""

from __future__ import annotations

import pytest
import torch

from zengine.deepspeed.runtime.engine import EngineTimers, split_half_float_double_sparse


@pytest.mark.parametrize(("micro", "whole"), [(True, True), (True, False), (False, False)])
def test_names_of_the_enabled_timers(micro, whole):
    timers = EngineTimers(enable_micro_timers=micro, enable_global_timers=whole)
    assert timers.forward_timers == ["fwd_microstep"] * micro + ["fwd"] * whole
    assert timers.backward_reduce_timers == ["bwd_allreduce_microstep"] * micro + ["bwd_allreduce"] * whole
    assert timers.step_timers == ["step_microstep"] * micro + ["step"] * whole
    assert timers.active_timers() == timers.micro_timers + timers.global_timers
    assert len(timers.active_timers()) == 5 * (micro + whole)


def test_gradients_are_split_by_dtype_and_layout():
    wide, narrow = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    rows = torch.eye(2).to_sparse(1)
    sparse, dense = split_half_float_double_sparse([wide, rows, narrow, wide])
    assert [(dtype, len(found)) for dtype, found in dense] == [(torch.float32, 2), (torch.bfloat16, 1)]
    assert [(dtype, found[0] is rows) for dtype, found in sparse] == [(torch.float32, True)]
    with pytest.raises(AssertionError, match=r"unsupported grad type: torch\.int64"):
        split_half_float_double_sparse([torch.zeros(1, dtype=torch.int64)])
