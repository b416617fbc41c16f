"""Products with quantized weights beside torch, ONNX Runtime and a read loop, in turns, in one process.

    python packages/zprecision/bench/products.py [--out NAME] [--threads 1,2] [--seconds 160]

A table for each number of threads and of tokens; a round measures each of its cases once, so all see the same
machine.  Weights of 4096 x 4096 in such a number that they do not fit the caches; milliseconds are those of one
matrix.  The read loop (read_loop.c) is compiled for this processor when the benchmark runs.  "share" is bytes of
weights a second over those of the read loop; "x NAME" is the speed over that of a peer, from medians.

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
STREAM_BYTES = 70e6  # of the weights of one case: over twice a third-level cache
MANY = 64  # tokens from which one matrix is enough: multiplying takes longer than reading
READ = "read loop"
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


def read_loop() -> Callable[[Tensor, int], None]:
    """Compile read_loop.c; return a function that reads a tensor with a number of threads."""
    folder = Path(tempfile.mkdtemp(prefix="zprecision-read-loop-"))
    compiler = next(name for name in (os.environ.get("CC", "cc"), "gcc", "clang") if shutil.which(name))
    source, built = Path(__file__).with_name("read_loop.c"), folder / "read_loop.so"
    flags = ["-O3", "-march=native", "-mprefer-vector-width=512"] if platform.machine() == "x86_64" else ["-O3"]
    subprocess.run([compiler, *flags, "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    library, process = ctypes.CDLL(str(built)), ctypes.CDLL(None)
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    omp = [ctypes.cast(getattr(process, name), ctypes.c_void_p) for name in names]
    shutil.rmtree(folder)

    def read(tensor: Tensor, threads: int) -> None:
        at, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes)
        library.read_in_order(at, size, ctypes.c_int(threads), *omp)

    return read


def ours(tokens: int, plain: Tensor, x: Tensor) -> list[Case]:
    """Return the cases of zprecision: formats and levels."""
    cases = []
    for name in ("int4", "int8"):
        quantized = zprecision.quantize(plain, name)
        weights = [zprecision.pack(quantized) for _ in range(count_of(quantized.nbytes, tokens))]
        for level in (level for level in zprecision.kernels().levels if level != "sse2"):
            work = at_level(level, lambda held=weights: [zprecision.linear(x, each) for each in held])
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
            start = time.perf_counter()
            case.work()
            if rounds:  # the first is a warm-up
                found[case.name].seconds.append((time.perf_counter() - start) / case.matrices)
        begin = begin or time.perf_counter()
        rounds += 1
    return found


def table(cases: Sequence[Case], found: dict[str, Samples], tokens: int) -> list[str]:
    """Return the rows of one Markdown table."""
    peers = [peer for peer in PEERS if peer in found]
    read = next((case.nbytes / found[READ].median() for case in cases if case.name == READ), 0.0)
    head = ["case", "ms least", "ms median", "GB/s", "share", *(f"x {peer}" for peer in peers)]
    if tokens >= MANY:
        head[3:5] = ["Gop/s"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for case in cases:
        median = found[case.name].median()
        cells = [case.name, f"{1e3 * found[case.name].least():.3f}", f"{1e3 * median:.3f}"]
        if tokens >= MANY:
            cells += [f"{2 * tokens * ROWS * COLUMNS / median / 1e9:.0f}"]
        else:
            cells += [f"{case.nbytes / median / 1e9:.1f}", f"{case.nbytes / median / read:.2f}"]
        cells += ["" if case.name == READ else f"{found[peer].median() / median:.2f}" for peer in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def scaling(by_tokens: dict[int, dict[str, Samples]]) -> list[str]:
    """Return a table of the time of 4 tokens over that of one, and of the tokens a second of 16 over those of one."""
    lines = ["| case | time of 4 / of 1 | tokens a second of 16 / of 1 |", "|---|---|---|"]
    for name in by_tokens[1]:
        if name != READ and name in by_tokens[16]:
            one, four, more = (by_tokens[count][name].median() for count in (1, 4, 16))
            lines.append(f"| {name} | {four / one:.2f} | {16 * one / more:.1f} |")
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
            *ours(tokens, plain, x), *of_torch(tokens, plain, x), *of_onnx_runtime(tokens, x, threads),
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
    parser.add_argument("--out", help="name of a file of bench/results, without .md")
    options = parser.parse_args()
    torch.manual_seed(0)
    threads = [int(word) for word in options.threads.split(",")]
    tokens = [int(word) for word in options.tokens.split(",")]
    capability = torch.backends.cpu.get_cpu_capability()
    lines = [
        "# Products with quantized weights", "",
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores of {platform.machine()}, load of other work "
        f"{os.getloadavg()[0]:.1f}, torch {torch.__version__} ({capability}), {zprecision.kernels()}", "",
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
