import gc
import weakref

import attrs
import pytest
import torch
from small_decoders import TIME, VOCABULARY, model

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.quality import compare
from zengine.inference.quantized import projections, quantized
from zengine.inference.quantized_modules import quantize_linears
from zengine.inference.recognize import recognize
from zengine.inference.verify import verify
from zprecision.quant import Int4, Int8, dequantize, quantize


def windows(count: int = 6) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (40,), generator=draw) for _ in range(count)]


@pytest.mark.parametrize("format", [Int8(), Int4()], ids=str)
def test_a_quantized_decoder_computes_with_the_rounded_weights(format: Int8 | Int4) -> None:
    subject = model()
    decoder, report = quantized(recognize(subject), format)
    rounded = model()
    with torch.no_grad():
        for layer in report.layers:
            weight = rounded.get_submodule(layer.name).weight
            kind = Int8() if layer.name in report.kept else format
            weight.copy_(dequantize(quantize(weight.detach().clone(), kind), torch.float32))
    ids = windows()[0]
    found = DecoderPass(decoder, KVCache.create(decoder, 1, TIME)).forward_all(ids, 0)
    with torch.no_grad():
        wanted = rounded(ids[None])[0]
    # activations are rounded to 8 bits: 1 / 254 of a block's largest, through a few layers
    assert (found - wanted).abs().max() < 0.08 * wanted.abs().max()
    assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_every_projection_is_in_the_report_and_smaller() -> None:
    decoder = recognize(model())
    changed, report = quantized(decoder, Int8())
    assert [layer.name for layer in report.layers] == [each.name for each in projections(decoder)]
    assert all(0.0005 < layer.error < 0.02 for layer in report.layers)
    assert len(report.worst) == 5
    assert report.worst[0].error == max(layer.error for layer in report.layers)
    only, _ = quantized(decoder, Int8(), head=False)
    assert only.head.projection is decoder.head.projection
    with pytest.raises(ValueError, match=r"blocks\.0\.qkv is quantized already"):
        quantized(changed, Int8())


def test_a_layer_that_four_bits_do_not_suit_gets_eight() -> None:
    subject = model()
    with torch.no_grad():
        subject.blocks[1].grow.weight.sign_()
        subject.blocks[1].grow.weight[:, 0] = 13.9  # next to it, all others round to zero
    _, report = quantized(recognize(subject), Int4(scale="amax"))
    assert report.kept == ("blocks.1.grow",)
    assert {layer.name: layer.format for layer in report.layers}["blocks.1.grow"] == "int8"


def test_a_module_with_quantized_layers_is_recognized_over_its_quantized_weights() -> None:
    subject = model()
    quantize_linears(subject, lambda _: Int8())
    decoder = recognize(subject)
    assert decoder.head.projection.weight is subject.head.weight
    verify(decoder, subject)
    ids = windows()[0]
    found = DecoderPass(decoder, KVCache.create(decoder, 1, TIME)).forward_all(ids, 0)
    with torch.no_grad():
        wanted = subject(ids[None])[0]
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


def test_the_replaced_weights_are_not_held() -> None:
    subject = model()
    decoder, _ = quantized(recognize(subject), Int4())
    gone = weakref.ref(subject.blocks[0].qkv.weight)
    del subject
    gc.collect()
    assert gone() is None
    assert decoder.blocks


def test_quality_of_equal_decoders_is_perfect_and_of_four_bits_is_not() -> None:
    decoder = recognize(model())
    same = compare(decoder, decoder, windows())
    assert (same.top_1, same.kl_mean, same.kl_high, same.bits_change) == (1.0, 0.0, 0.0, 0.0)
    assert same.num_tokens == 6 * 39
    eight = compare(quantized(decoder, Int8())[0], decoder, windows())
    four = compare(quantized(decoder, Int4())[0], decoder, windows())
    assert 0 < eight.kl_mean < four.kl_mean
    assert eight.kl_mean < eight.kl_high
    assert four.top_1 < eight.top_1 <= 1
    with pytest.raises(ValueError, match="no windows"):
        compare(decoder, decoder, [])


def test_bits_are_those_of_the_cross_entropy() -> None:
    subject = model()
    decoder = recognize(subject)
    found = compare(decoder, decoder, windows(2))
    with torch.no_grad():
        logits = torch.stack([subject(window[None, :-1])[0] for window in windows(2)]).double()
    targets = torch.stack([window[1:] for window in windows(2)])
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / torch.tensor(2.0).log()
    assert found.bits == pytest.approx(wanted.item(), rel=1e-5)
    assert attrs.asdict(found)["reference_bits"] == found.bits
