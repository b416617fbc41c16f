"""`zengine quality MODEL --quant int4 --data text.txt`: what quantized weights lose on a text of yours.

Prints bits per byte of both, how often they find the same token likeliest, the divergence of their predictions, the
error of each layer, and which layers keep 8 bits.  Both models are in memory together.  `--html FILE` writes a page
with a drawing of the errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from zengine.commands import CommandError
from zengine.commands.models import ReadyModel, find_model, load, open_tokenizer_of, parse_dtype, parse_format
from zengine.inference.quality import TextWindows, compare, text_windows
from zengine.inference.quality_page import QualityData, quality_page
from zengine.inference.quantized import projections
from zengine.inference.sizes import gigabytes
from zengine.progress import progress

__all__ = ["run"]

_CONTEXT = 512  # tokens of a window, unless the model has fewer positions


def run(arguments: argparse.Namespace) -> int:
    """Compare and print.  Raises CommandError for what cannot be loaded or read."""
    format = parse_format(arguments.quant)
    if format is None:
        raise CommandError('--quant "": name the format to judge, for example int4 or int8')
    text = _read_text(arguments.data, arguments.max_bytes)
    source = find_model(Path(arguments.model), parse_dtype(arguments.dtype))
    tokenizer = open_tokenizer_of(source, arguments.tokenizer)
    _context(arguments.context, source.max_positions)  # told before weights are read
    model = load(source, format, keeps_full=True)
    context = _context(arguments.context, model.max_positions)
    try:
        windows = text_windows(text, tokenizer, context)
        quality = compare(model.decoder, model.full, _with_progress(windows))
    except ValueError as error:
        raise CommandError(f"{arguments.data}: {error}") from error
    assert model.report is not None
    data = QualityData(
        model=arguments.model,
        format=arguments.quant,
        dtype=str(source.dtype).removeprefix("torch."),
        text=arguments.data.name,
        num_bytes=windows.num_bytes,
        quality=quality,
        report=model.report,
        full_nbytes=_full_nbytes(model),
        environment={"context": f"{context} tokens", "torch": torch.__version__},
    )
    print(json.dumps(as_json(data), indent=1) if arguments.json else as_text(data))
    if arguments.html is not None:
        _write(arguments.html, quality_page(data))
    return 0


def _context(asked: int, max_positions: int | None) -> int:
    """Return the tokens of a window; asked: 0 for the default."""
    if max_positions is not None and asked > max_positions:
        raise CommandError(f"--context {asked}: the model was made for {max_positions} tokens")
    return asked or min(_CONTEXT, max_positions or _CONTEXT)


def _read_text(path: Path, max_bytes: int) -> str:
    """Return the text of a file, at most `max_bytes` of it; 0: all."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes or -1)
    except OSError as error:
        raise CommandError(f"--data {path}: {error.strerror}") from None
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        if max_bytes and error.reason == "unexpected end of data":
            return raw[: error.start].decode()
        raise CommandError(f"--data {path}: byte {error.start:,} is not UTF-8; pass a text file") from None


def _with_progress(windows: TextWindows) -> Iterator[Tensor]:
    """Yield the windows; show how far they are, if it takes long."""
    with progress("comparing on windows of text", len(windows)) as advance:
        for window in windows:
            yield window
            advance()


def _full_nbytes(model: ReadyModel) -> int:
    """Return the bytes of the quantized matrices before."""
    assert model.report is not None
    names = {layer.name for layer in model.report.layers}
    return sum(each.weight.nbytes for each in projections(model.full) if each.name in names)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--html {path}: {error.strerror}") from None
    print(path, file=sys.stderr)


def as_text(data: QualityData) -> str:
    """Return the figures as lines of text."""
    quality, (bits, full_bits) = data.quality, data.bits_per_byte
    width = max(len(data.format), len(data.dtype))
    lines = [
        f"{data.model}, on {data.num_bytes:,} bytes of {data.text} ({quality.num_tokens:,} tokens)",
        "",
        f"{data.dtype:{width}}  {full_bits:.4f} bits/byte",
        f"{data.format:{width}}  {bits:.4f} bits/byte, {quality.bits_change:+.2%}",
        "",
        f"same likeliest token (top-1)   {quality.top_1:.2%}",
        f"KL(full || quantized), nats    mean {quality.kl_mean:.3g}, 99.9th percentile {quality.kl_high:.3g}",
        f"quantized weights              {gigabytes(data.report.nbytes)}, "
        f"{data.full_nbytes / data.report.nbytes:.2f} times smaller",
        f"error of a layer, relative     median {data.median_error:.4f}; the worst:",
        *(f"  {layer.error:.4f}  {layer.format}  {layer.name}" for layer in data.report.worst),
        f"layers that keep 8 bits        {len(data.report.kept)} of {len(data.report.layers)} "
        f"({data.kept_share:.1%})",
        *(f"  {name}" for name in data.report.kept),
    ]
    return "\n".join(lines)


def as_json(data: QualityData) -> dict[str, Any]:
    """Return all figures."""
    bits, full_bits = data.bits_per_byte
    return {
        "model": data.model,
        "format": data.format,
        "dtype": data.dtype,
        "num_bytes": data.num_bytes,
        "bits_per_byte": bits,
        "full_bits_per_byte": full_bits,
        "bits_change": data.quality.bits_change,
        **{name: getattr(data.quality, name) for name in ("num_tokens", "top_1", "kl_mean", "kl_high")},
        "quantized_nbytes": data.report.nbytes,
        "full_nbytes": data.full_nbytes,
        "kept": list(data.report.kept),
        "kept_share": data.kept_share,
        "worst": [layer.name for layer in data.report.worst],
        "layers": [attrs.asdict(layer) for layer in data.report.layers],
    }
