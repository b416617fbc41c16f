from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoptim._compat import FUSED_ADAM_ON, Signals
from zoptim.batch import NO_SCALE, Entry, Path, path_of, plan_batches, read_signals

AUTO = {"fused": None, "foreach": None}


def entry(param: Tensor, grad: Tensor | None = None, **state: Any) -> Entry:
    return Entry(param, torch.ones_like(param) if grad is None else grad, state)


def test_tensors_of_one_dtype_and_layout_form_one_batch_in_order() -> None:
    entries = [entry(torch.ones(n)) for n in (3, 0, 5)]
    (batch,) = plan_batches(AUTO, entries, Signals(), FUSED_ADAM_ON)
    assert batch.path is Path.FUSED
    assert [param.numel() for param in batch.params] == [3, 0, 5]
    assert len(batch.grads) == 3


def test_dtypes_and_paths_are_kept_apart() -> None:
    entries = [
        entry(torch.ones(3)),
        entry(torch.ones(3, dtype=torch.float64)),
        entry(torch.ones(3, 2).t(), torch.ones(2, 3)),
        entry(torch.ones(4)),
    ]
    batches = plan_batches(AUTO, entries, Signals(), FUSED_ADAM_ON)
    found = [(batch.path, batch.params[0].dtype, len(batch.entries)) for batch in batches]
    assert found == [
        (Path.FUSED, torch.float32, 2),
        (Path.FUSED, torch.float64, 1),
        (Path.FOREACH, torch.float32, 1),
    ]


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"fused": None, "foreach": None}, Path.FUSED),
        ({"fused": True, "foreach": None}, Path.FUSED),
        ({"fused": False, "foreach": None}, Path.FOREACH),
        ({"fused": None, "foreach": True}, Path.FOREACH),
        ({"fused": None, "foreach": False}, Path.FUSED),
    ],
)
def test_options_choose_the_path(options: dict[str, bool | None], path: Path) -> None:
    assert path_of(options, entry(torch.ones(3)), FUSED_ADAM_ON) is path


@pytest.mark.parametrize(
    ("case", "path"),
    [
        (entry(torch.ones(3), exp_avg=torch.ones(3), step=torch.tensor(1.0)), Path.FUSED),
        (entry(torch.ones(())), Path.FUSED),
        (entry(torch.ones(8)[::2]), Path.FOREACH),
        (entry(torch.ones(8)[::2], torch.ones(8)[::2]), Path.FOREACH),
        (entry(torch.ones(3, 2), torch.ones(2, 3).t()), Path.FOREACH),
        (entry(torch.ones(3, 2), exp_avg=torch.ones(2, 3).t()), Path.FOREACH),
        (entry(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)), Path.FUSED),
        (entry(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(2, 3, 4, 4)), Path.FOREACH),
        (entry(torch.ones(3, device="meta")), Path.FOREACH),
        (entry(torch.ones(3, dtype=torch.int32)), Path.FOREACH),
    ],
)
def test_memory_that_a_kernel_would_misread_takes_the_foreach_path(case: Entry, path: Path) -> None:
    assert path_of(AUTO, case, FUSED_ADAM_ON) is path


def test_signals_become_float32_scalars_and_found_inf_zero_or_one() -> None:
    signals = read_signals(torch.tensor([2.0], dtype=torch.float64), torch.tensor([3]))
    assert signals.grad_scale is not None
    assert signals.found_inf is not None
    assert (signals.grad_scale.shape, signals.grad_scale.dtype) == ((), torch.float32)
    assert (signals.found_inf.item(), signals.found_inf.dtype) == (1.0, torch.float32)
    assert read_signals(None, torch.tensor(float("nan"))).found_inf == 1.0
    assert read_signals(None, torch.tensor(0.0)).found_inf == 0.0


def test_no_scale_and_none_divide_nothing() -> None:
    assert read_signals(NO_SCALE, None).grad_scale is None
    assert read_signals(None, None).grad_scale is None
    assert NO_SCALE.item() == 1.0


@pytest.mark.parametrize("bad", [1.0, torch.ones(2), "1"])
def test_anything_else_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="must be a tensor of one element, or None"):
        read_signals(None, bad)


def test_a_batch_knows_whether_the_host_should_skip_it() -> None:
    def skipped(found_inf: Tensor | None) -> bool:
        (batch,) = plan_batches(AUTO, [entry(torch.ones(1))], Signals(found_inf=found_inf), FUSED_ADAM_ON)
        return batch.is_skipped()

    assert [skipped(None), skipped(torch.tensor(0.0)), skipped(torch.tensor(1.0))] == [False, False, True]
