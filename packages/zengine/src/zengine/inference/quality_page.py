"""Tables and drawings of a quantized model: the page of `zengine quality`, and parts for other pages."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence

import attrs

from zengine.inference.quality import Quality
from zengine.inference.quantized import LayerError, QuantizationReport
from zengine.inference.sizes import gigabytes
from zengine.reporting.chart import label, tick, ticks
from zengine.reporting.document import allow_breaks, bar, details, document, facts, section, table, tiles

__all__ = ["QualityData", "error_chart", "layer_table", "quality_page"]

_WIDTH, _HEIGHT = 900, 250  # of the drawing, in user units; it scales with the page
_LEAST_PX = 640  # of its width; a narrower page scrolls it
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 84, 12, 24  # margins around the plot; lines are named on the right
_WIDEST = 56  # bar
_NUM_COLOURS = 7  # of kinds of layers; the style sheet's last colour is for all others
_LIMIT = 3.0  # times the median, above which a layer keeps 8 bits


@attrs.frozen(kw_only=True)
class QualityData:
    """A quantized model compared with the full one."""

    model: str  # name or path
    format: str
    dtype: str  # of the full weights
    text: str  # name or path
    num_bytes: int  # of the predicted text
    quality: Quality
    report: QuantizationReport
    full_nbytes: int  # of the weights that were quantized, before
    environment: Mapping[str, object] = attrs.field(factory=dict)

    @property
    def bits_per_byte(self) -> tuple[float, float]:
        """Bits per byte of the quantized and of the full weights."""
        return self.quality.bits_per_byte(self.num_bytes)

    @property
    def kept_share(self) -> float:
        """Share of the layers that keep 8 bits."""
        return len(self.report.kept) / len(self.report.layers)

    @property
    def median_error(self) -> float:
        """Median of the layers' errors."""
        return statistics.median(layer.error for layer in self.report.layers)


def quality_page(data: QualityData) -> str:
    """Return the whole page, which fetches nothing."""
    quality, (bits, full_bits) = data.quality, data.bits_per_byte
    figures = {
        "change of bits per byte": f"{quality.bits_change:+.2%}",
        f"bits per byte, {data.format}": f"{bits:.4f}",
        f"bits per byte, {data.dtype}": f"{full_bits:.4f}",
        "same likeliest token": f"{quality.top_1:.2%}",
        "size of the quantized weights": gigabytes(data.report.nbytes),
    }
    lead = (
        f"Weights in {data.format}, compared with {data.dtype} over {data.num_bytes:,} bytes "
        f"({quality.num_tokens:,} tokens) of {data.text}."
    )
    values = {
        "KL(full || quantized), mean, nats": f"{quality.kl_mean:.3g}",
        "its 99.9th percentile": f"{quality.kl_high:.3g}",
        "layers that keep 8 bits": f"{len(data.report.kept)} of {len(data.report.layers)} ({data.kept_share:.1%})",
        "median error of a layer": f"{data.median_error:.4f}",
        "quantized weights": f"{gigabytes(data.report.nbytes)}, {data.full_nbytes / data.report.nbytes:.2f} times "
        "smaller than before",
        **data.environment,
    }
    errors = {layer.name: layer.error for layer in data.report.layers}
    note = "Root mean square of the rounding, over that of the weights. Layers in the order of the model."
    return document(
        f"{data.model}: quality of {data.format}",
        [
            f"<h1>{html.escape(data.model)}</h1><p class='lead'>{html.escape(lead)}</p>{tiles(figures)}",
            section("Error by layer", error_chart(data.report), note=note),
            section("Worst layers", layer_table(data.report.worst, max(errors.values()))),
            section("Figures", facts(values)),
            details("All layers", layer_table(data.report.layers, max(errors.values()))),
        ],
    )


def layer_table(layers: Sequence[LayerError], longest: float) -> str:
    """Return a row for each layer: name, format, error with a bar, bytes.  longest: error of a full bar."""
    rows = [
        (
            "",
            [
                f"<code>{allow_breaks(layer.name)}</code>",
                html.escape(layer.format),
                f"{layer.error:.4f}",
                bar(layer.error / (longest or 1.0)),
                f"{layer.nbytes:,}",
            ],
        )
        for layer in layers
    ]
    return table(("layer", "format", "error", "", "bytes"), rows, num_texts=2)


def error_chart(report: QuantizationReport) -> str:
    """Draw a bar for each layer, coloured by kind, with the median and the limit above which a layer keeps 8 bits."""
    layers, kinds = report.layers, _kinds(report.layers)
    median = statistics.median(layer.error for layer in layers)
    highest = max(layer.error for layer in layers)
    top = 1.1 * max(highest, _LIMIT * median if highest > 2 * median else median) or 1.0
    step = (_WIDTH - _LEFT - _RIGHT) / len(layers)
    base = _HEIGHT - _BOTTOM

    def up(value: float) -> float:
        return base - value / top * (base - _TOP)

    parts = []
    for value in ticks(0, top):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
        )
        parts.append(tick(_LEFT - 7, up(value) + 4, "end", label(value)))
    for index, layer in enumerate(layers):
        told = html.escape(f"{layer.name}: {layer.error:.4f} ({layer.format})")
        width, y = min(0.8 * step, _WIDEST), up(layer.error)
        x = _LEFT + (index + 0.5) * step - width / 2
        parts.append(
            f'<rect class="f{kinds[_kind(layer)]}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" '
            f'height="{base - y:.1f}"><title>{told}</title></rect>'
        )
    for name, value in {"median": median, f"{_LIMIT:g} x median": _LIMIT * median}.items():
        if value < top:
            parts.append(
                f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
            )
            parts.append(tick(_WIDTH - _RIGHT + 6, up(value) + 4, "start", name))
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    parts.append(tick((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "middle", f"{len(layers)} layers"))
    legend = "".join(f'<span class="key k{colour}">{html.escape(kind)}</span>' for kind, colour in kinds.items())
    return (
        f'<div class="legend">{legend}</div>'
        f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" style="min-width:{_LEAST_PX}px" role="img" '
        f'aria-label="error by layer">{"".join(parts)}</svg></div>'
    )


def _kind(layer: LayerError) -> str:
    """Return what a layer is in its block: the last part of its name."""
    return layer.name.rpartition(".")[2]


def _kinds(layers: Sequence[LayerError]) -> dict[str, int]:
    """Return the colours of the kinds, in the order of the model."""
    names = dict.fromkeys(map(_kind, layers))
    return {name: min(index, _NUM_COLOURS) + 1 for index, name in enumerate(names)}
