"""Parts of plans: entries, layouts, reasons for the torch path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoptim.backends.watch import kinds_of
from zoptim.updates.plan import Entry, UpdatePath, fallback_reason, sort_entries


def test_the_batches_of_a_plan_share_path_and_dtypes_and_keep_their_order() -> None:
    def entry(numel: int, dtype: torch.dtype = torch.float32, **state: Any) -> Entry:
        return Entry(torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype), state, 0)

    entries = [entry(3), entry(4, torch.bfloat16), entry(5), entry(6, moment=torch.ones(6)), entry(0)]
    found = [
        (path, [e.param.numel() for e in members])
        for path, members in sort_entries(entries, lambda e: UpdatePath.KERNEL)
    ]
    assert found == [(UpdatePath.KERNEL, [3, 5, 0]), (UpdatePath.KERNEL, [4]), (UpdatePath.KERNEL, [6])]
    by_path = sort_entries(entries[:3], lambda e: UpdatePath.TORCH if e.param.numel() == 5 else UpdatePath.KERNEL)
    assert [(path, len(members)) for path, members in by_path] == [
        (UpdatePath.KERNEL, 1),
        (UpdatePath.KERNEL, 1),
        (UpdatePath.TORCH, 1),
    ]


@pytest.mark.parametrize(
    ("param", "grad", "state", "reason"),
    [
        (torch.ones(3), torch.ones(3), {}, None),
        (torch.ones(3, 2).t(), torch.ones(3, 2).t(), {}, None),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), {}, "no kernel for a gradient of torch.float64"),
        (torch.ones(3, dtype=torch.float64), torch.ones(3), {}, "no kernel for a parameter of torch.float64"),
        (torch.ones(3, dtype=torch.uint8), torch.ones(3), {}, "no kernel for a parameter of torch.uint8"),
        (torch.ones(6)[::2], torch.ones(3), {}, "are not dense"),
        (torch.ones(3), torch.ones(3), {"m": torch.ones(3, device="meta")}, "its state m is on meta"),
    ],
)
def test_the_torch_path_has_a_reason(param: Tensor, grad: Tensor, state: Any, reason: str | None) -> None:
    found = fallback_reason(Entry(param, grad, state, 0), lambda device: None)
    assert found is None if reason is None else reason in str(found)


def test_a_wrapper_of_tensors_has_no_address_for_a_kernel() -> None:
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *arguments: Any) -> Any:
            raise AssertionError("the reason needs no operation")

    wrapper = Tensor._make_wrapper_subclass(Wrapper, (3,), dtype=torch.float32)
    found = fallback_reason(Entry(wrapper, torch.ones(3), {}, 0), lambda device: None)
    assert found == "a parameter of type Wrapper has no address for a kernel"


def test_a_device_without_kernels_is_the_first_reason() -> None:
    entry = Entry(torch.ones(3, device="meta"), torch.ones(3, device="meta"), {}, 0)
    assert fallback_reason(entry, lambda device: f"nothing for {device}") == "nothing for meta"


def test_a_part_of_an_entry_shows_the_memory_of_the_whole() -> None:
    state = {"step": torch.zeros(()), "m": torch.arange(1000.0), "m_scale": torch.arange(4.0)}
    whole = Entry(torch.arange(1000.0), torch.ones(1000), state, 7, torch.ones(1000, dtype=torch.bfloat16))
    part = whole.at(slice(256, 700), 3)
    assert (part.index, part.part.tensor, part.part.row) == (7, 3, slice(256, 700))  # type: ignore[union-attr]
    assert (part.param[0], part.param.numel(), part.copy.numel()) == (256.0, 444, 444)  # type: ignore[union-attr]
    assert part.state["step"] is state["step"]
    assert part.state["m_scale"].tolist() == [1.0, 2.0]
    part.state["m"].zero_()
    assert state["m"][255:257].tolist() == [255.0, 0.0]


def test_kinds_differ_for_everything_but_the_address() -> None:
    grad = torch.ones(2, 3)
    assert kinds_of([grad, None]) == kinds_of([grad.clone(), None])
    for other in ([None, grad], [grad.double(), None], [torch.ones(3, 2), None], [torch.ones(3, 2).t(), None],
                  [grad.to("meta"), None], [grad.to_sparse(), None], [None, None]):  # fmt: skip
        assert kinds_of([grad, None]) != kinds_of(other)
