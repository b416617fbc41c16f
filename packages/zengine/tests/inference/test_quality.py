"""Quality over a text; for the figures of tokens see test_quantized.py."""

import math
from html.parser import HTMLParser

import attrs
import pytest
import torch
from small_decoders import TIME, VOCABULARY, model

from zengine.inference import quality as quality_module
from zengine.inference.quality import Quality, compare, text_windows
from zengine.inference.quality_page import QualityData, quality_page
from zengine.inference.quantized import LayerError, QuantizationReport, quantized
from zengine.inference.recognize import recognize
from zengine.inference.tokenizers import ByteTokenizer
from zprecision.quant import Int4


@attrs.frozen
class Small(ByteTokenizer):
    """Tokens of the small decoder: the byte, modulo its vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [byte % VOCABULARY for byte in text.encode()]


TEXT = "".join(chr(97 + i * i % 26) for i in range(150)) + "é"


@pytest.mark.parametrize("begin", [None, 3])
@pytest.mark.parametrize("context", [2, 7, 40, 1000])
def test_every_token_is_predicted_once(context: int, begin: int | None) -> None:
    tokenizer = Small(begin=begin)
    windows = text_windows(TEXT, tokenizer, context)
    found = list(windows)
    assert torch.cat([window[1:] for window in found]).tolist() == tokenizer.encode(TEXT)[begin is None :]
    assert all(2 <= len(window) <= context + 1 for window in found)
    assert len(found) == len(windows)
    assert windows.num_bytes == len(TEXT.encode()) - (begin is None)


def test_bits_per_byte_are_the_cross_entropy_over_the_bytes() -> None:
    subject = model()
    decoder = recognize(subject)
    windows = text_windows(TEXT, Small(begin=3), TIME)
    found = compare(decoder, decoder, windows)
    nats = 0.0
    with torch.no_grad():
        for window in windows:
            log_probs = torch.log_softmax(subject(window[None, :-1])[0].double(), -1)
            nats -= log_probs[torch.arange(len(window) - 1), window[1:]].sum().item()
    assert found.bits_per_byte(windows.num_bytes)[1] == pytest.approx(
        nats / math.log(2) / len(TEXT.encode()), rel=1e-5
    )


def test_the_figures_do_not_depend_on_how_many_positions_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = recognize(model())
    changed, _ = quantized(decoder, Int4())
    windows = text_windows(TEXT, Small(), 40)
    whole = compare(changed, decoder, windows)
    monkeypatch.setattr(quality_module, "_CHUNK_NUMEL", 3 * VOCABULARY)
    parts = compare(changed, decoder, windows)
    assert attrs.astuple(parts) == pytest.approx(attrs.astuple(whole), rel=1e-12)


def test_a_text_may_begin_with_a_part_of_a_character() -> None:
    assert text_windows("é!", ByteTokenizer(), 8).num_bytes == 2
    assert text_windows("日本", ByteTokenizer(), 8).num_bytes == 5


def test_texts_that_cannot_be_judged_are_rejected() -> None:
    decoder = recognize(model())
    with pytest.raises(
        ValueError, match=f"token {VOCABULARY}; the vocabulary has {VOCABULARY}: is it another model's"
    ):
        compare(decoder, decoder, [torch.tensor([1, VOCABULARY, 2])])
    with pytest.raises(ValueError, match="the text has 1 tokens; at least 2 are needed"):
        text_windows("a", Small(), 10)
    with pytest.raises(ValueError, match="a context of 1 tokens predicts nothing"):
        text_windows("abc", Small(), 1)


class Checker(HTMLParser):
    """Checks that tags close in order; collects tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_escaped_and_draws_every_layer() -> None:
    layers = tuple(
        LayerError(name=f"blocks.{i}.<{kind}>", format="int4", error=0.08 + i / 1000, nbytes=1000)
        for i in range(4)
        for kind in ("qkv", "out", "up", "down")
    )
    outlier = LayerError(name="head", format="int8", error=0.4, nbytes=2000)
    data = QualityData(
        model="<model>",
        format="int4",
        dtype="float32",
        text="a & b",
        num_bytes=2000,
        quality=Quality(num_tokens=1000, bits=2.02, reference_bits=2.0, top_1=0.975, kl_mean=0.01, kl_high=0.2),
        report=QuantizationReport(layers=(*layers, outlier), kept=("head",)),
        full_nbytes=126_000,
    )
    page = quality_page(data)
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert page.count("<rect class=") == 17
    assert "<qkv>" not in page
    assert "<model>" not in page
    for figure in (
        "+1.00%",
        "1.0100",
        "1.0000",
        "97.50%",
        "1 of 17 (5.9%)",
        "0.4000",
        "7.00 times",
        "a & b",
        "3 x median",
    ):
        assert figure in checker.text, figure
    assert data.median_error == pytest.approx(0.082)
