"""Block quantization: formats, quantized tensors, products with them."""

from zprecision.quant.activations import quantize_activations
from zprecision.quant.foreign import GroupedCodes, read_awq, read_compressed, read_compressed_bytes, read_gptq
from zprecision.quant.formats import (
    NF4,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    Format,
    Fp8,
    Int4,
    Int8,
    format_name,
    format_named,
    unit_of,
)
from zprecision.quant.ggml import from_blocks, to_blocks
from zprecision.quant.linear import Weight, linear, linear_many
from zprecision.quant.panels import PackedTensor, pack
from zprecision.quant.quantize import dequantize, quantize
from zprecision.quant.simulate import (
    round_to_bits,
    simulate,
    simulate_format,
    straight_through,
)
from zprecision.quant.tensor import Quantized, QuantizedTensor, read_header

__all__ = [
    "NF4",
    "Q4_0",
    "Q4_K",
    "Q6_K",
    "Q8_0",
    "Format",
    "Fp8",
    "GroupedCodes",
    "Int4",
    "Int8",
    "PackedTensor",
    "Quantized",
    "QuantizedTensor",
    "Weight",
    "dequantize",
    "format_name",
    "format_named",
    "from_blocks",
    "linear",
    "linear_many",
    "pack",
    "quantize",
    "quantize_activations",
    "read_awq",
    "read_compressed",
    "read_compressed_bytes",
    "read_gptq",
    "read_header",
    "round_to_bits",
    "simulate",
    "simulate_format",
    "straight_through",
    "to_blocks",
    "unit_of",
]
