"""Attentions are put into Transformers' registry, and taken out again.

Ranks do it: a process that has imported transformers cannot become one whose `deepspeed` is ours (test_as_deepspeed).
"""

from __future__ import annotations

import importlib.util

import pytest

from zcomm.testing import run_ranks
from zengine.deepspeed.runtime.sequence_parallel.registry import (
    attention_registry,
    register_attention,
    restore_attentions,
)
from zpartition.sequence import ModelAttention

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


def _put() -> None:
    registry = attention_registry()
    before = registry["sdpa"]
    register_attention("sdpa", None, disable_in_eval=True)
    register_attention("sdpa", None, disable_in_eval=False)  # not around itself
    found = registry["sdpa"]
    assert isinstance(found, ModelAttention)
    assert found.core is before
    assert not found.disable_in_eval
    restore_attentions()
    assert registry["sdpa"] is before


def test_what_is_put_is_found_and_restored() -> None:
    run_ranks(_put, 1)


def _refused() -> None:
    for name in ("eager", "nothing"):
        with pytest.raises(ValueError, match=rf"core_attn_implementation='{name}'.*allowed are .*sdpa"):
            register_attention(name, None, disable_in_eval=False)


def test_attentions_that_cannot_are_refused() -> None:
    run_ranks(_refused, 1)


def _without() -> str:
    import sys

    sys.modules["transformers.modeling_utils"] = None  # type: ignore[assignment]
    try:
        attention_registry()
    except ModuleNotFoundError as error:
        return str(error)
    finally:
        del sys.modules["transformers.modeling_utils"]
    return ""


def test_without_transformers_the_command_is_named() -> None:
    assert 'pip install "transformers>=5"' in run_ranks(_without, 1)[0]
