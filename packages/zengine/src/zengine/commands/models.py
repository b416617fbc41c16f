"""Models for commands: what a path holds, whether it fits into memory, and its decoder and tokenizer.

A model is what `load_model` reads (a Hugging Face folder, a GGUF file, ...) or a run of `tools/dev.py train`.  Its
size is computed from the headers of its files, so one that does not fit is rejected before its weights are read.
Nothing is fetched from a network, and no code of a folder is run.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

from zengine.commands import CommandError
from zengine.commands.byte_gpt import find_run, read_run_decoder, read_shape, run_headers
from zengine.flops.profile import format_amount
from zengine.inference.loading.load import load_model
from zengine.inference.loading.packed import find_packed
from zengine.inference.loading.sources import open_source, read_config
from zengine.inference.loading.stored import QuantizedSlice, StoredTensor
from zengine.inference.quantized import QuantizationReport, quantized
from zengine.inference.sizes import Header, ModelSizes, available_bytes, check_memory
from zengine.inference.structure import Decoder
from zengine.inference.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    TokenizerError,
    gguf_tokenizer,
    open_tokenizer,
)
from zprecision.quant import Format, Int4, Int8, format_name, format_named

__all__ = [
    *("ModelKind", "ModelSource", "ReadyModel", "find_model", "load", "open_tokenizer_of", "parse_dtype"),
    "parse_format",
]

_GGUF = ".gguf"
_ALLOWED = "a Hugging Face folder, a .gguf or .safetensors file, a checkpoint, or a run of tools/dev.py train"
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_POSITIONS = ("max_position_embeddings", "n_positions")  # names in config.json
_ADVISED = (Int8(), Int4())  # formats that a model too large is told of


class ModelKind(enum.Enum):
    """How a model is read."""

    FILES = "by zengine.inference.load_model"
    RUN = "from a run of tools/dev.py train"


@attrs.frozen(kw_only=True)
class ModelSource:
    """A model that was found, and not yet read."""

    path: Path
    kind: ModelKind
    sizes: ModelSizes
    folder: Path | None  # that may have the tokenizer
    dtype: torch.dtype  # of weights that are not quantized
    max_positions: int | None = None  # tokens that the model was made for; None: only the loaded model says

    def nbytes(self, format: Format | None) -> int:
        """Return the bytes of the loaded weights."""
        return self.sizes.nbytes(self.dtype, format)


@attrs.frozen(kw_only=True, eq=False)
class ReadyModel:
    """A model that is ready to run."""

    decoder: Decoder
    full: Decoder  # before quantization; the same without one
    report: QuantizationReport | None  # of quantized matrices
    max_positions: int | None  # tokens that the model was made for


def parse_format(text: str) -> Format | None:
    """Return the format of --quant; None for "".  Raises CommandError."""
    try:
        return format_named(text) if text else None
    except ValueError as error:
        raise CommandError(f"--quant {text}: {error}") from None


def parse_dtype(text: str) -> torch.dtype | None:
    """Return the dtype of --dtype; None for "auto".  Raises CommandError."""
    if text == "auto":
        return None
    if text not in _DTYPES:
        raise CommandError(f"--dtype {text}: pass auto, {', '.join(_DTYPES)}")
    return _DTYPES[text]


def find_model(path: Path, dtype: torch.dtype | None) -> ModelSource:
    """Say what a path holds, and how large it is.

    dtype: of weights that are not quantized; None for that of the files (float32 for those that CPUs do not compute
        in: float16, 8 bits).

    Raises CommandError for a path that holds no model, or a damaged one.
    """
    if not path.exists():
        raise CommandError(f"{path} does not exist: pass {_ALLOWED}; models are not downloaded")
    run = find_run(path)
    with _told(path):
        if run is not None:
            kind, sizes, folder = ModelKind.RUN, ModelSizes.of(run_headers(path, run)), None
        else:
            kind, (sizes, folder) = ModelKind.FILES, _measure(path)
    stored = sizes.dtype if sizes.dtype in (torch.float32, torch.bfloat16) else torch.float32
    return ModelSource(
        path=path, kind=kind, sizes=sizes, folder=folder, dtype=dtype or stored, max_positions=_positions(path, run)
    )


def _positions(path: Path, run: Path | None) -> int | None:
    """Return the tokens that the model was made for, if a config beside its weights says so."""
    if run is not None:
        return read_shape(run).context
    with _told(path):
        config = read_config(path) if path.is_dir() else {}
    found = (config.get(name) for name in _POSITIONS)
    return next((each for each in found if type(each) is int), None)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn errors of files into CommandError, with the path."""
    from zckpt import CheckpointError

    try:
        yield
    except CommandError:
        raise
    except (CheckpointError, ValueError, OSError) as error:
        text = str(error)
        raise CommandError(text if str(path) in text else f"{path}: {text}") from error


def _measure(path: Path) -> tuple[ModelSizes, Path | None]:
    """Return the sizes of a model in files, and the folder that may have its tokenizer."""
    packed = find_packed(path)
    if packed is not None:  # its files hold what is loaded
        return ModelSizes.of((), coded_numel=1, file_nbytes=_file_nbytes(path)), path
    if path.is_dir() and not any(path.iterdir()):
        raise CommandError(f"{path} is empty: pass {_ALLOWED}")
    with open_source(path) as source:
        coded = [each for each in source.tensors.values() if isinstance(each, QuantizedSlice)]
        headers = [
            Header(name, tuple(each.get_shape()), _dtype_of(each))
            for name, each in source.tensors.items()
            if not isinstance(each, QuantizedSlice)
        ]
        coded_numel = sum(math.prod(each.get_shape()) for each in coded)
        return ModelSizes.of(headers, coded_numel, _file_nbytes(path)), source.folder


def _dtype_of(stored: StoredTensor) -> torch.dtype:
    """Return the dtype of a tensor in a file, of which at most one element is read."""
    shape = stored.get_shape()
    return stored[tuple(slice(0, 1) for _ in shape)].dtype if shape else stored[...].dtype


def _file_nbytes(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files if each.suffix != ".json")


def open_tokenizer_of(source: ModelSource, folder: Path | None) -> Tokenizer:
    """Return the tokenizer in `folder`, else the model's; raises CommandError."""
    if folder is None and source.kind is ModelKind.RUN:
        return ByteTokenizer()
    try:
        if folder is None and source.path.suffix == _GGUF:
            from zckpt import read_gguf

            with read_gguf(source.path) as file:
                return gguf_tokenizer(file.metadata, str(source.path))
        return open_tokenizer(folder or source.folder or source.path)
    except TokenizerError as error:
        raise CommandError(str(error)) from error


def load(source: ModelSource, format: Format | None, *, keeps_full: bool = False) -> ReadyModel:
    """Load and recognize a model, quantized while its files are read.

    format: of the matrices; None keeps them as they are.  keeps_full: keep the full weights, too, to compare.

    Raises CommandError if it does not fit into memory, is damaged, or is no decoder that is recognized.
    """
    both = format is not None and (keeps_full or source.kind is ModelKind.RUN)
    _check(source.nbytes(format) + (source.nbytes(None) if both else 0), source, format)
    with _told(source.path):
        full, report, positions = _read(source, None if both else format)
        decoder = full
        if both and format is not None:
            decoder, report = quantized(full, format)
    return ReadyModel(decoder=decoder, full=full, report=report, max_positions=positions)


def _check(needed_bytes: int, source: ModelSource, format: Format | None) -> None:
    how = str(source.dtype).removeprefix("torch.") + (f", quantized to {format_name(format)}" if format else "")
    what = f"{source.path} ({format_amount(source.sizes.numel)} parameters in {how})"
    advised = () if format or source.sizes.coded_numel else _ADVISED
    try:
        check_memory(needed_bytes, available_bytes(), what, source.sizes, source.dtype, advised)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _read(source: ModelSource, format: Format | None) -> tuple[Decoder, QuantizationReport | None, int | None]:
    """Return the decoder, what was quantized in it, and the tokens that the model was made for."""
    if source.kind is ModelKind.RUN:
        run = find_run(source.path)
        assert run is not None
        decoder, shape = read_run_decoder(source.path, run, source.dtype)
        return decoder, None, shape.context
    loaded = load_model(source.path, format=format, dtype=source.dtype)
    if loaded.decoder is None:
        raise CommandError(f"{source.path} is no decoder that this command can run: {loaded.reason}")
    positions = getattr(getattr(loaded.module, "config", None), "max_position_embeddings", None)
    return loaded.decoder, loaded.report if loaded.report.layers else None, positions
