"""DeepSpeed's paths of sparse attention, and its view of the section."""

from __future__ import annotations

import pytest

from zengine.deepspeed.ops import sparse_attention
from zengine.deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from zengine.deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig
from zengine.deepspeed.runtime.config import get_sparse_attention


def test_names_are_at_deepspeeds_paths() -> None:
    assert sparse_attention.SparseSelfAttention is SparseSelfAttention
    assert sparse_attention.FixedSparsityConfig is FixedSparsityConfig
    for name in sparse_attention.__all__:
        assert getattr(sparse_attention, name)


def test_the_section_has_the_keys_of_its_mode_with_their_defaults() -> None:
    assert get_sparse_attention({}) is None
    assert get_sparse_attention({"sparse_attention": {"mode": "dense", "num_local_blocks": 2}}) == {
        "mode": "dense",
        "block": 16,
    }
    assert get_sparse_attention({"sparse_attention": {"num_local_blocks": 8}}) == {
        "mode": "fixed",
        "block": 16,
        "different_layout_per_head": False,
        "num_local_blocks": 8,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    }
    assert get_sparse_attention({"sparse_attention": {"mode": "variable"}})["local_window_blocks"] == [4]
    with pytest.raises(NotImplementedError, match="'strided': use one of dense, fixed"):
        get_sparse_attention({"sparse_attention": {"mode": "strided"}})
