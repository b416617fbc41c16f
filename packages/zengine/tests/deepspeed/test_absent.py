"""Names without a body: importable, testable against, and clear when they are used."""

from __future__ import annotations

import pytest

import zengine.deepspeed as deepspeed
from zengine.deepspeed.absent import ABSENT, NotAvailable, absent, raise_not_available
from zengine.deepspeed.module_inject.replace_module import GroupQuantizer


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (GroupQuantizer, r"module_inject\.GroupQuantizer: .* Use deepspeed\.linear\.QuantizedLinear"),
        (deepspeed.DeepSpeedTransformerLayer, "fused BERT layer of 2020"),
    ],
)
def test_making_or_subclassing_an_absent_class_says_what_to_do(cls, told):
    with pytest.raises(NotAvailable, match=told):
        cls(1, 2, key="word")
    with pytest.raises(NotAvailable, match=told):
        type("Mine", (cls,), {})
    with pytest.raises(NotAvailable, match=told):
        cls.register_with_transformers("gpt2", size=2)
    assert not isinstance(object(), cls)
    assert not hasattr(cls, "__private__")


def test_every_entry_says_a_reason_and_a_way_out():
    for text in ABSENT.values():
        assert text.count(".") >= 2, text


def test_a_name_that_is_in_no_list_cannot_be_absent():
    with pytest.raises(KeyError):
        absent("initialize")
    with pytest.raises(NotAvailable, match="MiCS"):
        raise_not_available("zero.MiCS_Init")
