"""Products with quantized weights beside torch, ONNX Runtime and a read loop, in turns, in one process.

    python packages/zprecision/bench/products.py [--out NAME] [--threads 1,2] [--seconds 160] [--clock cpu]

A table for each number of threads and of tokens; a round measures each of its cases once, so all see the same
machine.  Weights of 4096 x 4096 in such a number that they do not fit the caches; milliseconds are those of one
matrix, of which one call multiplies by all, ours as ONNX Runtime's.  The read loop (read_loop.c) is compiled for this
processor when the benchmark runs.  "share" is bytes of weights a second over those of the read loop; "x NAME" is the
speed over that of a peer, from medians.  The multiply loop (multiply_loop.c) does the operations of a product on
registers, on each thread; "of loop" is the speed over its.

--clock cpu counts the processor time of the thread, for one thread: on a machine with other work the clock on the
wall would measure that.  One thread of ONNX Runtime is the caller's, so its products are counted, too.

ONNX Runtime takes part if `onnxruntime` and `onnx` can be imported.  For torch without AVX-512, set
ATEN_CPU_CAPABILITY=avx2 for the whole run, and compare with the cases of avx2.  --out writes
bench/results/NAME.md as well.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.nn.functional import linear

import zprecision
from zprecision.backends import native

ROWS, COLUMNS, GROUP = 4096, 4096, 32
TOKENS = (1, 4, 16, 512)
BITS = {"int4": 4.5, "int8": 8.5}  # of a weight, with its scale
STREAM_BYTES = 70e6  # of the weights of one case: over twice a third-level cache
MANY = 64  # tokens from which one matrix is enough: multiplying takes longer than reading
READ, MULTIPLY = "read loop", "multiply loop"
SUMS = {"int4 avx2": 32, "int8 avx2": 16, "int4 avx512": 128, "int8 avx512": 64, "int4 avx512vnni": 128,
        "int8 avx512vnni": 128}  # of a call of the multiply loop for one block: rows times tokens  # fmt: skip
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
clock = CLOCKS["wall"]
PEERS = ("torch float32", "torch bfloat16", "aten int4", "ONNX Runtime int4")
Work = Callable[[], object]


@attrs.frozen
class Case:
    """One contender: its weights, and a call that multiplies by all of them."""

    name: str
    nbytes: float  # of one matrix
    matrices: int
    work: Work


@attrs.define
class Samples:
    """Seconds of the rounds, of one matrix."""

    seconds: list[float] = attrs.field(factory=list)

    def least(self) -> float:
        return min(self.seconds)

    def median(self) -> float:
        return statistics.median(self.seconds)


def count_of(nbytes: float, tokens: int) -> int:
    """Return the number of matrices of a case."""
    return 1 if tokens >= MANY else max(1, -(-int(STREAM_BYTES) // int(nbytes)))


def compiled(name: str, *flags: str) -> ctypes.CDLL:
    """Compile a C file of this folder, and load it."""
    folder = Path(tempfile.mkdtemp(prefix="zprecision-bench-"))
    compiler = next(each for each in (os.environ.get("CC", "cc"), "gcc", "clang") if shutil.which(each))
    source, built = Path(__file__).with_name(f"{name}.c"), folder / f"{name}.so"
    subprocess.run([compiler, "-O3", *flags, "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    library = ctypes.CDLL(str(built))
    shutil.rmtree(folder)
    return library


def read_loop() -> Callable[[Tensor, int], None]:
    """Return a function that reads a tensor with a number of threads."""
    is_x86 = platform.machine() == "x86_64"
    library = compiled("read_loop", *(("-march=native", "-mprefer-vector-width=512") if is_x86 else ()))
    process = ctypes.CDLL(None)
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    omp = [ctypes.cast(getattr(process, name), ctypes.c_void_p) for name in names]

    def read(tensor: Tensor, threads: int) -> None:
        at, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes)
        library.read_in_order(at, size, ctypes.c_int(threads), *omp)

    return read


def multiply_loops(tokens: int, threads: int) -> list[Case]:
    """Return a case for each of ours: its products without memory, shared out to the threads."""
    if tokens == 1 or platform.machine() != "x86_64":
        return []
    library, cases = compiled("multiply_loop", "-ffp-contract=off"), []
    for name, sums in SUMS.items():
        if name.split()[1] in zprecision.kernels().levels:
            loop = getattr(library, name.replace(" ", "_"))
            blocks = ctypes.c_int64(ROWS * tokens * (COLUMNS // GROUP) // sums // threads)
            cases.append(Case(f"{MULTIPLY} {name}", 0, 1, lambda loop=loop, blocks=blocks: loop(blocks)))
    return cases


def ours(tokens: int, plain: Tensor, x: Tensor) -> list[Case]:
    """Return the cases of zprecision: formats and levels."""
    cases = []
    for name in ("int4", "int8"):
        quantized = zprecision.quantize(plain, name)
        weights = [zprecision.pack(quantized) for _ in range(count_of(quantized.nbytes, tokens))]
        for level in (level for level in zprecision.kernels().levels if level != "sse2"):
            work = at_level(level, lambda held=weights: zprecision.linear_many(x, held))
            cases.append(Case(f"{name} {level}", quantized.nbytes, len(weights), work))
    return cases


def at_level(level: str, work: Work) -> Work:
    def call() -> None:
        with native.use_level(level):
            work()

    return call


def of_torch(tokens: int, plain: Tensor, x: Tensor) -> list[Case]:
    """Return torch's products: float32, bfloat16, and aten's with 4 and 8 bits, whose activations are bfloat16."""
    narrow, x_narrow = plain.bfloat16(), x.bfloat16()
    few = [narrow.clone() for _ in range(count_of(narrow.nbytes, tokens))]
    codes8 = [(plain * 20).round().clamp(-127, 127).to(torch.int8) for _ in range(count_of(plain.numel(), tokens))]
    scales8 = torch.full((ROWS,), 0.05, dtype=torch.bfloat16)
    codes4 = (plain * 2 + 8).round().clamp(0, 15).to(torch.int32)
    affine = torch.full((COLUMNS // GROUP, ROWS, 2), 0.5, dtype=torch.bfloat16)
    nbytes4 = plain.numel() / 2 + affine.nbytes
    packed4 = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes4, 1) for _ in range(count_of(nbytes4, tokens))
    ]
    by4 = torch.ops.aten._weight_int4pack_mm_for_cpu
    return [
        Case("torch float32", plain.nbytes, 1, lambda: linear(x, plain)),
        Case("torch bfloat16", narrow.nbytes, len(few), lambda: [linear(x_narrow, w) for w in few]),
        Case("aten int4", nbytes4, len(packed4), lambda: [by4(x_narrow, w, GROUP, affine) for w in packed4]),
        Case(
            "aten int8", plain.numel(), len(codes8),
            lambda: [torch._weight_int8pack_mm(x_narrow, w, scales8) for w in codes8],
        ),
    ]  # fmt: skip


def of_onnx_runtime(tokens: int, x: Tensor, threads: int) -> list[Case]:
    """Return ONNX Runtime's MatMulNBits at accuracy level 4 (integer products); none if it is not installed."""
    try:
        import numpy as np
        import onnx
        import onnxruntime as ort
    except ImportError:
        return []
    nbytes = ROWS * COLUMNS / 2 + 4 * ROWS * COLUMNS / GROUP
    count = count_of(nbytes, tokens)
    codes = np.random.default_rng(0).integers(0, 255, (ROWS, COLUMNS // GROUP, GROUP // 2), dtype=np.uint8)
    scales = np.full(ROWS * COLUMNS // GROUP, 0.05, dtype=np.float32)
    attributes = {"K": COLUMNS, "N": ROWS, "bits": 4, "block_size": GROUP, "accuracy_level": 4}
    helper, real = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node(
            "MatMulNBits", ["x", f"w{k}", f"s{k}"], [f"y{k}"], domain="com.microsoft", **attributes
        )
        for k in range(count)
    ]  # fmt: skip
    parts = [onnx.numpy_helper.from_array(codes, f"w{k}") for k in range(count)]
    parts += [onnx.numpy_helper.from_array(scales, f"s{k}") for k in range(count)]
    takes = [helper.make_tensor_value_info("x", real, [tokens, COLUMNS])]
    gives = [helper.make_tensor_value_info(f"y{k}", real, [tokens, ROWS]) for k in range(count)]
    graph = helper.make_graph(nodes, "products", takes, gives, parts)
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {"x": x.numpy()}
    return [Case("ONNX Runtime int4", nbytes, count, lambda: session.run(None, given))]


def measured(cases: Sequence[Case], seconds: float) -> dict[str, Samples]:
    """Return the times of all cases, taken in turns for about `seconds`, at least three of each."""
    found = {case.name: Samples() for case in cases}
    begin, rounds = 0.0, 0
    while rounds < 4 or time.perf_counter() - begin < seconds:
        for case in cases:
            start = clock()
            case.work()
            if rounds:  # the first is a warm-up
                found[case.name].seconds.append((clock() - start) / case.matrices)
        begin = begin or time.perf_counter()
        rounds += 1
    return found


def table(cases: Sequence[Case], found: dict[str, Samples], tokens: int) -> list[str]:
    """Return the rows of one Markdown table."""
    peers = [peer for peer in PEERS if peer in found]
    read = next((case.nbytes / found[READ].median() for case in cases if case.name == READ), 0.0)
    head = ["case", "ms least", "ms median", "GB/s", "share", "of loop", *(f"x {peer}" for peer in peers)]
    if tokens >= MANY:
        head[3:5] = ["Gop/s"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for case in cases:
        if case.name.startswith(MULTIPLY):
            continue
        median, loop = found[case.name].median(), found.get(f"{MULTIPLY} {case.name}")
        cells = [case.name, f"{1e3 * found[case.name].least():.3f}", f"{1e3 * median:.3f}"]
        if tokens >= MANY:
            cells += [f"{2 * tokens * ROWS * COLUMNS / median / 1e9:.0f}"]
        else:
            cells += [f"{case.nbytes / median / 1e9:.1f}", f"{case.nbytes / median / read:.2f}"]
        cells += [f"{loop.median() / median:.2f}" if loop else ""]
        cells += ["" if case.name == READ else f"{found[peer].median() / median:.2f}" for peer in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def scaling(by_tokens: dict[int, dict[str, Samples]]) -> list[str]:
    """Return the time of 4 tokens over that of one, and the tokens a second of 16 over those of one.

    The last is followed by what it would be if 16 took the time of the multiply loop, and one that of the read loop.
    """
    lines = [
        "| case | time of 4 / of 1 | tokens a second of 16 / of 1 | with both loops' speeds |",
        "|---|---|---|---|",
    ]
    for name in by_tokens[1]:
        if name != READ and name in by_tokens[16]:
            one, four, more = (by_tokens[count][name].median() for count in (1, 4, 16))
            loop = by_tokens[16].get(f"{MULTIPLY} {name}")
            bits = BITS.get(name.split()[0], 0.0)
            read = by_tokens[1][READ].median() * bits / 8 * ROWS * COLUMNS / int(STREAM_BYTES)
            most = f"{16 * read / max(read, loop.median()):.1f}" if loop else ""
            lines.append(f"| {name} | {four / one:.2f} | {16 * one / more:.1f} | {most} |")
    return lines


def inspection(threads: int, read: Callable[[Tensor, int], None], seconds: float) -> list[str]:
    """Return a table of `zprecision.inspect` of 100M bfloat16 over one read of them."""
    grad = torch.randn(100_000_000, dtype=torch.float32).bfloat16()
    cases = [
        Case(READ, grad.nbytes, 1, lambda: read(grad, threads)),
        Case("inspect", grad.nbytes, 1, lambda: zprecision.inspect([grad])),
    ]
    found = measured(cases, seconds)
    once = found[READ].median()
    lines = ["| 100M bfloat16 | ms least | ms median | reads |", "|---|---|---|---|"]
    for name, samples in found.items():
        median = samples.median()
        lines.append(f"| {name} | {1e3 * samples.least():.2f} | {1e3 * median:.2f} | {median / once:.2f} |")
    return lines


def report(threads: int, tokens_list: Sequence[int], seconds: float) -> list[str]:
    """Measure with a number of threads; return the lines of its section."""
    torch.set_num_threads(threads)
    read, plain = read_loop(), torch.randn(ROWS, COLUMNS)
    stream, share = torch.randn(int(STREAM_BYTES) // 4), seconds / (len(tokens_list) + 1)
    lines, by_tokens = [f"## {threads} thread{'s' if threads > 1 else ''}", ""], {}
    for tokens in tokens_list:
        x = torch.randn(tokens, COLUMNS)
        cases = [
            *([Case(READ, stream.nbytes, 1, lambda: read(stream, threads))] if tokens < MANY else []),
            *ours(tokens, plain, x), *multiply_loops(tokens, threads), *of_torch(tokens, plain, x),
            *of_onnx_runtime(tokens, x, threads),
        ]  # fmt: skip
        by_tokens[tokens] = measured(cases, share)
        lines += [f"### {tokens} token{'s' if tokens > 1 else ''}", "", *table(cases, by_tokens[tokens], tokens), ""]
    if {1, 4, 16} <= by_tokens.keys():
        lines += ["### More tokens", "", *scaling(by_tokens), ""]
    return [*lines, "### zprecision.inspect", "", *inspection(threads, read, share / 3), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens")
    parser.add_argument("--seconds", type=float, default=100.0, help="of measuring; preparing takes about 60 more")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of the thread; needs --threads 1")
    parser.add_argument("--out", help="name of a file of bench/results, without .md")
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != "1":
        parser.error(f"--clock cpu counts one thread, and --threads is {options.threads}: pass --threads 1")
    global clock
    clock = CLOCKS[options.clock]
    torch.manual_seed(0)
    threads = [int(word) for word in options.threads.split(",")]
    tokens = [int(word) for word in options.tokens.split(",")]
    capability = torch.backends.cpu.get_cpu_capability()
    lines = [
        "# Products with quantized weights", "",
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores of {platform.machine()}, load of other work "
        f"{os.getloadavg()[0]:.1f}, {options.clock} clock, torch {torch.__version__} ({capability}), "
        f"{zprecision.kernels()}", "",
        *(__doc__ or "").split("\n\n")[2].splitlines(), "",
    ]  # fmt: skip
    for count in threads:
        lines += report(count, tokens, options.seconds / len(threads))
    print("\n".join(lines))
    if options.out:
        place = Path(__file__).with_name("results") / f"{options.out}.md"
        place.parent.mkdir(exist_ok=True)
        place.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
