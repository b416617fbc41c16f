"""Decoding on a CPU beside a read loop over the same bytes, Transformers' generate and llama.cpp, in turns.

    python packages/zengine/bench/decode.py [--threads 2] [--layers 22] [--formats float32,bfloat16,int8,int4]
        [--context 128] [--prompt 512] [--seconds 20] [--cache int8] [--clock cpu] [--llama PYTHON] [--out table.md]

The model has TinyLlama's shape (22 layers, hidden 2048, 5632, 32 heads of which 4 have keys, vocabulary 32000) and
random weights; the layers have equal values in memory of their own, so that making them takes seconds.  A step is
`DecoderPass.forward_each` of 1, 4 or 16 sequences that have `context` tokens each; the choice of a token is not part
of it.  All weights of a format lie in one buffer of large pages, which the read loop reads whole (the faster of a
sum by torch and the kernel of `zprecision.inspect`).  A round measures each case once; figures are the best round,
and the median.
The share is (bytes of weights and of the sequences' cache) a second of a step over bytes a second of the read loop.

Transformers: `LlamaForCausalLM.generate` of one sequence over the same memory, greedy, from a prompt of 16 tokens;
the difference between 9 and 1 new tokens, over 8.  It is left out for quantized weights, or if it is not installed.

llama.cpp: a process of --llama, an interpreter with `xllamacpp` (by default this one, if it has it), with a file of
this shape and random weights: Q4_0 beside int4, Q8_0 beside int8.  The difference between 17 and 1 new tokens after
a prompt of `context`, over 16.  Its wheel is built for AVX2.

Prompt: `DecoderPass.forward` of `prompt` tokens; Transformers and llama.cpp do the same.

--clock cpu counts the processor time of the thread, for one thread: on a machine with other work the clock on the
wall would measure that.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gguf_file import FORMATS as LLAMA_FORMATS
from gguf_file import write_llama
from llama_peer import LlamaPeer
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
PEER_PROMPT, PEER_TOKENS, LLAMA_TOKENS = 16, 8, 16
PEER_ROUNDS = (1, 2, 3)  # in which peers and prompts are measured
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
clock = CLOCKS["wall"]
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


def prompt_of(steps: DecoderPass, count: int) -> Callable[[], object]:
    """Return a pass over a prompt of `count` tokens, into an empty cache."""
    ids = torch.arange(count) + 5

    def read() -> None:
        steps.cache.lengths[0] = 0
        steps.forward(ids, 0)

    return read


def peer_of(decoder: Decoder, dtype: torch.dtype, prompt: int) -> dict[str, Callable[[], float]]:
    """Return what measures Transformers over the same memory: seconds a token of generate, and of a prompt."""
    if importlib.util.find_spec("transformers") is None:
        return {}
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
        return seconds(
            lambda: model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        )

    whole = torch.arange(prompt)[None] + 5
    return {
        "transformers": lambda: (run(PEER_TOKENS + 1) - run(1)) / PEER_TOKENS,
        "transformers prompt": lambda: seconds(lambda: model(whole, logits_to_keep=1)),
    }


def llama_of(peer: LlamaPeer, context: int, prompt: int) -> dict[str, Callable[[], float]]:
    """Return what measures llama.cpp: seconds a token, and of a prompt."""

    def run(prompt: int, new: int) -> float:
        return peer.seconds(prompt, new)[clock is not CLOCKS["wall"]]

    return {
        "llama": lambda: (run(context, LLAMA_TOKENS + 1) - run(context, 1)) / LLAMA_TOKENS,
        "llama prompt": lambda: run(prompt, 1),
    }


def llama_python(given: str) -> str | None:
    """Return the interpreter that has xllamacpp; None if there is none."""
    if given:
        return given
    return sys.executable if importlib.util.find_spec("xllamacpp") else None


def seconds(work: Callable[[], object]) -> float:
    begin = clock()
    work()
    return clock() - begin


@contextlib.contextmanager
def started_llama(python: str, kind: str, options: argparse.Namespace) -> Iterator[LlamaPeer]:
    """Write the file of a format and start llama.cpp with it."""
    with tempfile.TemporaryDirectory(prefix="decode-bench-") as folder:
        path = Path(folder) / "model.gguf"
        write_llama(path, LLAMA_FORMATS[kind], options.layers, SHAPES, (HEADS, KV_HEADS), VOCABULARY)
        with LlamaPeer(python, path, options.threads) as peer:
            print(f"{LLAMA_FORMATS[kind]}: {peer.system}", flush=True)
            yield peer


class Result:
    """Times of one format: by case, seconds of each round."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        cache_dtype = getattr(torch, options.cache) if options.cache else torch.bfloat16
        arena = Arena(kind, options.layers)
        decoder = decoder_of(arena, options.layers, dtype)
        cache = KVCache.create(decoder, max(BATCHES), max(options.context, options.prompt) + 8, cache_dtype)
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
        rare: dict[str, Callable[[], float]] = {
            "prompt": functools.partial(seconds, prompt_of(steps, options.prompt))
        }
        if kind in ("float32", "bfloat16") and options.peer:
            rare |= peer_of(decoder, dtype, options.prompt)
        self.times: dict[str, list[float]] = {name: [] for name in timed}
        with torch.no_grad(), contextlib.ExitStack() as stack:
            python = llama_python(options.llama)
            if python and options.peer and kind in LLAMA_FORMATS:
                peer = stack.enter_context(started_llama(python, kind, options))
                rare |= llama_of(peer, options.context, options.prompt)
            self.rounds = self._measure(timed, rare, options.seconds)

    def _measure(
        self, timed: dict[str, Callable[[], float]], rare: dict[str, Callable[[], float]], duration: float
    ) -> int:
        """Run rounds for `duration` seconds and at least until the rare cases are done; return their number."""
        begin, rounds = time.perf_counter(), 0
        while rounds <= max(PEER_ROUNDS) or time.perf_counter() - begin < duration:
            for name, work in (timed | (rare if rounds in PEER_ROUNDS else {})).items():
                self.times.setdefault(name, []).append(work())
            rounds += 1
        return rounds

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
            ratios += [f"{self.best('llama') * n / best:.2f}" if "llama" in self.times else ""]
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
    head += ["x Transformers fp32", "x bf16", "x llama.cpp"]
    rounds = ", ".join(f"{each.kind} {each.rounds}" for each in results)
    lines = [
        f"{options.threads} threads, {options.layers} layers, {options.context} tokens of context, {options.clock} "
        f"clock, rounds: {rounds}; "
        f"{zprecision.kernels()}, torch {torch.__version__}",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(row for each in results for row in each.rows(peers)),
        "",
        *(f"Transformers' generate, {name}: {1 / each:.2f} tokens/s" for name, each in peers.items()),
        *(
            f"llama.cpp, {LLAMA_FORMATS[each.kind]}: {1 / each.best('llama'):.2f} tokens/s"
            for each in results
            if "llama" in each.times
        ),
        "",
        *prompt_table(results, options.prompt),
    ]
    return "\n".join(lines)


HEAD = """# Decoding on a CPU

A decoder of TinyLlama's shape (2048 wide, 32 heads around 4 key heads, MLP of 5632, vocabulary of 32,000) with random
weights. One step of 1, 4 and 16 sequences, logits included, the choice of a token not, beside Transformers'
`generate`, llama.cpp and a loop that reads the bytes of the weights. Tokens a second and GB/s are of the fastest
round. Fewer layers than 22 make the head a larger part than in the whole model.
"""


def prompt_table(results: list[Result], prompt: int) -> list[str]:
    """Return the tokens a second of prompts, and ratios to the peers."""
    peers = {
        f"Transformers {each.kind}": each.best("transformers prompt")
        for each in results
        if "transformers prompt" in each.times
    }
    peers |= {f"llama.cpp {LLAMA_FORMATS[each.kind]}": each.best("llama prompt") for each in results
              if "llama prompt" in each.times}  # fmt: skip
    head = [f"prompt of {prompt}", "ms", "tokens/s", *(f"x {name}" for name in peers)]
    rows = {each.kind: each.best("prompt") for each in results} | peers
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, best in rows.items():
        ratios = [f"{peer / best:.2f}" for peer in peers.values()]
        lines.append(f"| {' | '.join([name, f'{1e3 * best:.0f}', f'{prompt / best:.0f}', *ratios])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--formats", default="float32,bfloat16,int8,int4")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the rounds of a format")
    parser.add_argument("--cache", default="", help="dtype of the cache: float32, bfloat16 (default), int8")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, whose pass is measured, too")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of the thread; needs --threads 1")
    parser.add_argument("--llama", default="", metavar="PYTHON", help="an interpreter that has xllamacpp")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave out Transformers and llama.cpp")
    parser.add_argument("--out", type=Path, help="write the table here, too")
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error(f"--clock cpu counts one thread, and --threads is {options.threads}: pass --threads 1")
    global clock
    clock = CLOCKS[options.clock]
    torch.set_num_threads(options.threads)
    results = []
    for kind in options.formats.split(","):
        results.append(Result(kind, options))
        gc.collect()
        print(f"{kind}: {results[-1].rounds} rounds", flush=True)
    text = report(results, options)
    print(text)
    if options.out is not None:
        options.out.write_text(f"{HEAD}\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
