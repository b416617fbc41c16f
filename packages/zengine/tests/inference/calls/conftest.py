"""Counted steps of the fused path."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from zengine.inference.decoder import DecoderPass


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens of the fused steps."""
    found: list[int] = []
    own = DecoderPass.forward_each

    def counted(self: DecoderPass, ids: Tensor, slots: Any) -> Tensor:
        found.append(len(ids))
        return own(self, ids, slots)

    monkeypatch.setattr(DecoderPass, "forward_each", counted)
    return found
