"""Decoding on a CPU beside a read loop over the same bytes and Transformers' generate, in turns, in one process.

    python packages/zengine/bench/decode.py [--threads 2] [--layers 22] [--formats float32,bfloat16,int8,int4]
        [--context 128] [--seconds 20] [--cache int8] [--out table.md]

The model has TinyLlama's shape (22 layers, hidden 2048, 5632, 32 heads of which 4 have keys, vocabulary 32000) and
random weights; the layers have equal values in memory of their own, so that making them takes seconds.  A step is
`DecoderPass.forward_each` of 1, 4 or 16 sequences that have `context` tokens each; the choice of a token is not part
of it.  All weights of a format lie in one buffer of large pages, which the read loop reads whole (the faster of a
sum by torch and the kernel of `zprecision.inspect`).  A round measures each case once; figures are the best round,
and the median.
The share is (bytes of weights and of the sequences' cache) a second of a step over bytes a second of the read loop.

Transformers: `LlamaForCausalLM.generate` of one sequence over the same memory, greedy, from a prompt of 16 tokens;
the difference between 9 and 1 new tokens, over 8.  It is left out for quantized weights, or if it is not installed.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import zprecision
from zengine.inference.cache import KVCache, cache_bytes
from zengine.inference.decoder import DecoderPass
from zengine.inference.structure import (
    MLP,
    Attention,
    Block,
    Decoder,
    Embedding,
    Head,
    MLPInput,
    Norm,
    Projection,
    Rotary,
    RotaryStyle,
)
from zprecision.backends.squares import sum_of_squares
from zprecision.quant import PackedTensor, format_named, pack, quantize

WIDTH, GROWN, HEADS, KV_HEADS, SIZE, VOCABULARY = 2048, 5632, 32, 4, 64, 32000
BATCHES = (1, 4, 16)
SHAPES = {
    "q": (WIDTH, WIDTH),
    "k": (KV_HEADS * SIZE, WIDTH),
    "v": (KV_HEADS * SIZE, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate": (GROWN, WIDTH),
    "up": (GROWN, WIDTH),
    "down": (WIDTH, GROWN),
}
PEER_PROMPT, PEER_TOKENS = 16, 8
Weight = Tensor | PackedTensor


class Arena:
    """One buffer for all weights of a model."""

    def __init__(self, kind: str, layers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._kind = kind
        self.models = {name: self._convert(torch.randn(*s, generator=generator) * 0.02) for name, s in SHAPES.items()}
        self.head = self._convert(torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.02)
        each = sum(_padded(_data(weight)) for weight in self.models.values())
        self.buffer = torch.empty(layers * each + _padded(_data(self.head)), dtype=torch.uint8)
        _use_large_pages(self.buffer)
        self._used = 0

    def _convert(self, values: Tensor) -> Weight:
        if self._kind in ("float32", "bfloat16"):
            return values.to(getattr(torch, self._kind))
        found = pack(quantize(values, format_named(self._kind)))
        assert isinstance(found, PackedTensor)
        return found

    def place(self, weight: Weight) -> Weight:
        """Return a copy of a weight in the buffer."""
        data = _data(weight)
        to = self.buffer[self._used : self._used + data.nbytes]
        self._used += _padded(data)
        to.copy_(data.view(-1).view(torch.uint8))
        if isinstance(weight, Tensor):
            return to.view(weight.dtype).view(weight.shape)
        return PackedTensor(format=weight.format, shape=weight.shape, dtype=weight.dtype, data=to)


def _use_large_pages(buffer: Tensor) -> None:
    """Ask Linux for pages of 2 MiB; without them the read loop and the steps are slower alike."""
    page = 1 << 21
    begin, end = -(-buffer.data_ptr() // page) * page, (buffer.data_ptr() + buffer.numel()) // page * page
    if sys.platform.startswith("linux") and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 14)


def _data(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.data


def _padded(data: Tensor) -> int:
    return -(-data.nbytes // 64) * 64


def tables(count: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(count), 10_000.0 ** -torch.arange(0, 1, 2 / SIZE))
    return angles.cos(), angles.sin()


def decoder_of(arena: Arena, layers: int, dtype: torch.dtype) -> Decoder:
    rotary = Rotary(style=RotaryStyle.HALVES, size=SIZE, make_tables=tables)
    norm = Norm(weight=torch.ones(WIDTH, dtype=dtype), eps=1e-5, is_centered=False)
    blocks = []
    for index in range(layers):
        own = {name: Projection(f"{index}.{name}", arena.place(weight)) for name, weight in arena.models.items()}
        attention = Attention(
            projections=(own["q"], own["k"], own["v"]),
            out=own["o"],
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=SIZE,
            rotary=rotary,
            scale=SIZE**-0.5,
        )
        mlp = MLP(up=own["up"], down=own["down"], gate=own["gate"], act=F.silu)
        blocks.append(
            Block(
                name=str(index),
                attention_norm=norm,
                attention=attention,
                mlp_input=MLPInput.RESIDUAL,
                mlp_norm=norm,
                mlp=mlp,
            )
        )
    head = Head(projection=Projection("head", arena.place(arena.head)))
    tokens = torch.randn(VOCABULARY, WIDTH, dtype=dtype)
    return Decoder(embedding=Embedding(tokens=tokens), blocks=tuple(blocks), norm=norm, head=head)


# -- cases -----------------------------------------------------------------------------------


def step_of(steps: DecoderPass, count: int, context: int) -> Callable[[], object]:
    """Return a step of `count` sequences; it forgets the tokens again."""
    ids, slots = torch.arange(count) + 5, list(range(count))

    def step() -> None:
        steps.cache.lengths[:] = [context] * steps.cache.num_slots
        steps.forward_each(ids, slots)

    return step


def read_loops(buffer: Tensor) -> list[Callable[[], object]]:
    whole = buffer[: buffer.numel() // 8 * 8]
    floats = torch.empty(0)
    if buffer.numel() < 2**31:  # floats of any bits could be slow; these are not
        floats = torch.ones(whole.numel() // 4)
    by_kernel = floats if floats.numel() else whole.view(torch.float32)
    return [lambda: whole.view(torch.int64).sum(), lambda: sum_of_squares([by_kernel])]


def peer_of(decoder: Decoder, dtype: torch.dtype) -> Callable[[], float] | None:
    """Return what measures seconds a token of Transformers' generate over the decoder's own memory."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    config: Any = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=GROWN,
        num_hidden_layers=len(decoder.blocks),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    state: dict[str, Any] = {
        "model.embed_tokens.weight": decoder.embedding.tokens,
        "model.norm.weight": decoder.norm.weight if decoder.norm else None,
        "lm_head.weight": decoder.head.projection.weight,
    }
    for index, block in enumerate(decoder.blocks):
        assert isinstance(block.mlp, MLP)
        at = f"model.layers.{index}."
        named = zip(("q_proj", "k_proj", "v_proj"), block.attention.projections, strict=True)
        state |= {f"{at}self_attn.{name}.weight": each.weight for name, each in named}
        state[f"{at}self_attn.o_proj.weight"] = block.attention.out.weight
        for name, each in (("gate", block.mlp.gate), ("up", block.mlp.up), ("down", block.mlp.down)):
            state[f"{at}mlp.{name}_proj.weight"] = each.weight if each else None
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{at}{name}.weight"] = block.attention_norm.weight if block.attention_norm else None
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    ids = torch.arange(PEER_PROMPT)[None] + 3

    def run(new: int) -> float:
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        return time.perf_counter() - begin

    return lambda: (run(PEER_TOKENS + 1) - run(1)) / PEER_TOKENS


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Result:
    """Times of one format: by case, seconds of each round."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        cache_dtype = getattr(torch, options.cache) if options.cache else torch.bfloat16
        arena = Arena(kind, options.layers)
        decoder = decoder_of(arena, options.layers, dtype)
        cache = KVCache.create(decoder, max(BATCHES), options.context + 8, cache_dtype)
        for each in (*cache.keys, *cache.values):
            each.copy_(torch.randint(-2, 3, each.shape))
        for each in (*cache.key_scales, *cache.value_scales):
            each.fill_(0.01)
        steps = DecoderPass(decoder, cache)
        assert not steps.fused.reasons, str(steps.fused)
        self.kind, self.weight_bytes = kind, arena.buffer.numel()
        self.cache_bytes = cache_bytes(decoder, 1, options.context, cache_dtype)
        loops = read_loops(arena.buffer)
        timed: dict[str, Callable[[], float]] = {
            f"read {at}": functools.partial(seconds, loop) for at, loop in enumerate(loops)
        }
        timed |= {f"step {n}": functools.partial(seconds, step_of(steps, n, options.context)) for n in BATCHES}
        peer = peer_of(decoder, dtype) if kind in ("float32", "bfloat16") and options.peer else None
        self.times: dict[str, list[float]] = {name: [] for name in timed}
        begin, rounds = time.perf_counter(), 0
        with torch.no_grad():
            while rounds < 2 or time.perf_counter() - begin < options.seconds:
                for name, work in timed.items():
                    self.times[name].append(work())
                if peer is not None and rounds in (1, 2):
                    self.times.setdefault("transformers", []).append(peer())
                rounds += 1
        self.rounds = rounds

    def best(self, case: str) -> float:
        return min(self.times[case])

    def read_rate(self) -> float:
        return self.weight_bytes / min(self.best(name) for name in self.times if name.startswith("read"))

    def rows(self, peers: dict[str, float]) -> list[str]:
        found = []
        for n in BATCHES:
            best, median = self.best(f"step {n}"), statistics.median(self.times[f"step {n}"])
            rate = (self.weight_bytes + n * self.cache_bytes) / best
            ratios = [f"{peers[name] * n / best:.2f}" if name in peers else "" for name in ("float32", "bfloat16")]
            row = [
                *(self.kind, str(n), f"{1e3 * best:.2f}", f"{1e3 * median:.2f}", f"{n / best:.1f}"),
                *(f"{rate / 1e9:.2f}", f"{self.read_rate() / 1e9:.2f}", f"{rate / self.read_rate():.2f}"),
                *(f"{best / self.best('step 1'):.2f}", *ratios),
            ]
            found.append(f"| {' | '.join(row)} |")
        return found


def report(results: list[Result], options: argparse.Namespace) -> str:
    peers = {each.kind: each.best("transformers") for each in results if "transformers" in each.times}
    head = ["weights", "sequences", "ms a step", "median", "tokens/s", "GB/s", "read loop GB/s", "share", "of one"]
    head += ["x Transformers fp32", "x bf16"]
    rounds = ", ".join(f"{each.kind} {each.rounds}" for each in results)
    lines = [
        f"{options.threads} threads, {options.layers} layers, {options.context} tokens of context, rounds: {rounds}; "
        f"{zprecision.kernels()}, torch {torch.__version__}",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(row for each in results for row in each.rows(peers)),
        "",
        *(f"Transformers' generate, {name}: {1 / each:.2f} tokens/s" for name, each in peers.items()),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--formats", default="float32,bfloat16,int8,int4")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the rounds of a format")
    parser.add_argument("--cache", default="", help="dtype of the cache: float32, bfloat16 (default), int8")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave out Transformers")
    parser.add_argument("--out", type=Path, help="write the table here, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    for kind in options.formats.split(","):
        results.append(Result(kind, options))
        gc.collect()
        print(f"{kind}: {results[-1].rounds} rounds", flush=True)
    text = report(results, options)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
