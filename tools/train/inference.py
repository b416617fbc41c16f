"""The trained model as it will be used: its samples, speed and quality in fp32, int8, int8-a16 and int4.

Rank 0 reads the newest checkpoint, so the split of the model over ranks does not matter, and runs it by
`zengine.inference`, a few seconds in all.  A mixture of experts, whose routing depends on the whole window, is not
recognized there; its sample comes from the model itself.
"""

from __future__ import annotations

import time

import attrs
import torch

import zckpt
from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.generation import Request, generate
from zengine.inference.quality import Quality, compare
from zengine.inference.quantized import QuantizationReport, projections, quantized
from zengine.inference.recognize import recognize
from zengine.inference.sampling import Sampling
from zengine.inference.structure import Decoder
from zengine.progress import progress
from zprecision.quant import Format, Int4, Int8, format_name

from .model import GPT
from .recipe import Folder, Recipe
from .text import Windows, printable

FULL = "fp32"
PROMPTS = (b"def ", b"class ", b"import ")  # beginnings of the generated samples
SAMPLED_BY = "int8"
SEPARATOR_TOKEN = 0  # ends a file, and a sample
JUDGED_WINDOWS, TIMED_TOKENS = 64, 128  # at most


@attrs.frozen(kw_only=True)
class Variant:
    """The model with weights in one format."""

    name: str
    nbytes: int  # of its matrices
    bits_per_byte: float
    change: float  # of the bits, relative to fp32
    top_1: float  # share of positions where it finds the same byte likeliest as fp32
    kl_mean: float  # nats, from fp32
    kept_share: float  # of its layers: those that keep 8 bits
    tokens_per_s: float  # of one sequence


@attrs.frozen(kw_only=True)
class Inference:
    """The samples, and what each format costs and saves."""

    sample: str  # generated text
    variants: tuple[Variant, ...] = ()
    num_bytes: int = 0  # of held-out text that the variants were judged on
    report: QuantizationReport | None = None  # of int4

    def table(self) -> str:
        """Return the variants as lines of text."""
        head = f"inference, {self.num_bytes:,} bytes".ljust(26) + "bits/byte   change    top-1       KL  tokens/s"
        lines = [
            f"{each.name:26}{each.bits_per_byte:9.4f}  {each.change:+7.2%}  {each.top_1:7.2%}  {each.kl_mean:7.1e}"
            f"  {each.tokens_per_s:8,.0f}"
            for each in self.variants
        ]
        return "\n".join([head, "-" * len(head), *lines]) if lines else ""


def judge_inference(folder: Folder, recipe: Recipe, held_out: Windows) -> Inference:
    """Run the newest checkpoint in every format, on some of the held-out windows."""
    with progress("judging the model in fp32, int8 and int4"):
        return _judged(folder, recipe, held_out)


def _judged(folder: Folder, recipe: Recipe, held_out: Windows) -> Inference:
    model = read_model(folder, recipe)
    full = recognize(model, lambda _, ids: model.logits(ids))
    chosen = held_out.stacked(min(JUDGED_WINDOWS, recipe.final_windows)).long()
    decoders: dict[str, Decoder] = {FULL: full}
    reports: dict[str, QuantizationReport] = {}
    formats: tuple[Format, ...] = (Int8(), Int8(activation_bits=16), Int4())
    for name, format in {format_name(each): each for each in formats}.items():
        decoders[name], reports[name] = quantized(full, format)
    variants = tuple(
        make_variant(name, decoder, compare(decoder, full, chosen), reports.get(name), recipe)
        for name, decoder in decoders.items()
    )
    return Inference(
        sample=make_samples(decoders[SAMPLED_BY], recipe),
        variants=variants,
        num_bytes=chosen[:, 1:].numel(),
        report=reports["int4"],
    )


def read_model(folder: Folder, recipe: Recipe) -> GPT:
    """Return the whole model of the newest checkpoint, in float32."""
    checkpoint, model = zckpt.find(folder.checkpoints), GPT(recipe.shape)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(checkpoint.tensor(f"model.{name}"))
    return model.eval()


def make_variant(
    name: str, decoder: Decoder, quality: Quality, report: QuantizationReport | None, recipe: Recipe
) -> Variant:
    """Return the figures of a decoder; `report` of its quantization."""
    return Variant(
        name=name,
        nbytes=sum(each.weight.nbytes for each in projections(decoder)),
        bits_per_byte=quality.bits,  # a token is a byte
        change=quality.bits_change,
        top_1=quality.top_1,
        kl_mean=quality.kl_mean,
        kept_share=len(report.kept) / len(report.layers) if report else 0.0,
        tokens_per_s=decoding_speed(decoder, recipe),
    )


def decoding_speed(decoder: Decoder, recipe: Recipe) -> float:
    """Return the tokens per second of one greedy sequence."""
    prompt, count = tuple(PROMPTS[0]), min(TIMED_TOKENS, recipe.shape.context - len(PROMPTS[0]))
    requests = [Request(prompt=prompt, sampling=Sampling(max_new_tokens=count, temperature=0))]
    steps = DecoderPass(decoder, KVCache.create(decoder, 1, recipe.shape.context))
    started = time.perf_counter()
    generate(steps, requests)
    return count / (time.perf_counter() - started)


def make_samples(decoder: Decoder, recipe: Recipe) -> str:
    """Continue each prompt to the end of the context, or of a file."""
    context = recipe.shape.context
    steps = DecoderPass(decoder, KVCache.create(decoder, len(PROMPTS), context))
    rule = Sampling(temperature=0.7, stop_tokens=(SEPARATOR_TOKEN,))
    requests = [
        Request(
            prompt=tuple(prompt),
            sampling=attrs.evolve(rule, max_new_tokens=context - len(prompt)),
            seeds=(recipe.seed,),
        )
        for prompt in PROMPTS
    ]
    found = (samples[0].tokens for samples in generate(steps, requests))
    texts = (prompt + bytes(tokens).rstrip(b"\0") for prompt, tokens in zip(PROMPTS, found, strict=True))
    return "\n\n".join(map(printable, texts))
