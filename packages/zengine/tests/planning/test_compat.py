"""The private parts of torch that dry runs need are where they were."""

from __future__ import annotations

import torch

from zengine.planning._compat import fake_tensors, have_dry_runs, watching


def test_this_torch_has_them() -> None:
    assert have_dry_runs()


def test_fake_tensors_have_no_storage_and_every_operation_is_seen() -> None:
    seen: list[object] = []
    with fake_tensors():
        huge = torch.empty(1 << 40, dtype=torch.float32)
        with watching(seen.extend):
            total = huge + 1
    assert total.shape == huge.shape
    assert seen == [total]
