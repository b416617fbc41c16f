"""Models for commands: what a path holds, whether it fits into memory, and its decoder and tokenizer.

A model is a Hugging Face folder, a GGUF file, or a run of `tools/dev.py train`.  Its size is computed from the
headers of its files, so one that does not fit is rejected before its weights are read.  Nothing is fetched from a
network, and no code of a folder is run.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from zengine.commands import CommandError
from zengine.commands.byte_gpt import find_run, read_run_decoder, run_headers
from zengine.flops.profile import format_amount
from zengine.inference.quantized import QuantizationReport, quantized
from zengine.inference.recognize import NotRecognized, recognize
from zengine.inference.sizes import Header, ModelSizes, available_bytes, check_memory
from zengine.inference.structure import Decoder
from zengine.inference.tokenizers import ByteTokenizer, Tokenizer, TokenizerError, open_tokenizer
from zengine.inference.verify import verify
from zprecision.quant import Format, Int4, Int8, format_name, format_named

__all__ = ["Kind", "LoadedModel", "ModelSource", "find_model", "load", "parse_dtype", "parse_format"]

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_ADVISED = (Int8(), Int4())  # formats that a model too large is told of


class Kind(enum.Enum):
    """What a path holds."""

    FOLDER = "a Hugging Face folder"
    RUN = "a run of tools/dev.py train"


@attrs.frozen(kw_only=True)
class ModelSource:
    """A model that was found, and not yet read."""

    path: Path
    kind: Kind
    sizes: ModelSizes
    dtype: torch.dtype  # that it is to be loaded in

    def nbytes(self, format: Format | None) -> int:
        """Return the bytes of the loaded weights."""
        return self.sizes.nbytes(self.dtype, format)


@attrs.frozen(kw_only=True, eq=False)
class LoadedModel:
    """A model that is ready to run."""

    decoder: Decoder
    full: Decoder  # before quantization; the same without one
    report: QuantizationReport | None  # of the quantization
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

    dtype: of weights that are not quantized; None for that of the files (float32 for float16, which CPUs lack).

    Raises CommandError for a path that holds no model, or a damaged one.
    """
    if not path.exists():
        raise CommandError(f"{path} does not exist: pass {_allowed()}; models are not downloaded")
    run = find_run(path)
    with _told(path):
        if run is not None:
            kind, headers = Kind.RUN, run_headers(path, run)
        elif (path / "config.json").is_file():
            kind, headers = Kind.FOLDER, list(_folder_headers(path))
        else:
            raise CommandError(f"{path} holds no known model: pass {_allowed()}")
        sizes = ModelSizes.of(headers)
    stored = torch.float32 if sizes.dtype == torch.float16 else sizes.dtype
    return ModelSource(path=path, kind=kind, sizes=sizes, dtype=dtype or stored)


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


def _allowed() -> str:
    return "a Hugging Face folder (config.json and weights), or a run of tools/dev.py train (run.json)"


def _folder_headers(folder: Path) -> Iterator[Header]:
    from zckpt.interchange import read_weights

    with read_weights(folder) as weights:
        for name, each in weights.items():
            yield Header(name, tuple(each.get_shape()), getattr(torch, each.get_dtype()))


def open_tokenizer_of(source: ModelSource, folder: Path | None) -> Tokenizer:
    """Return the tokenizer in `folder`, else in the model's; raises CommandError."""
    if folder is None and source.kind is Kind.RUN:
        return ByteTokenizer()
    try:
        return open_tokenizer(folder or source.path)
    except TokenizerError as error:
        raise CommandError(str(error)) from error


def load(source: ModelSource, format: Format | None, *, keeps_full: bool = False) -> LoadedModel:
    """Load, recognize and perhaps quantize a model.

    format: of the matrices; None keeps them as they are.  keeps_full: keep the full weights, too, to compare.

    Raises CommandError if it does not fit into memory, or is no decoder that is recognized.
    """
    needed = source.nbytes(format) + (source.nbytes(None) if format is not None else 0)
    _check(needed, source, format)
    with _told(source.path):
        full, positions = _full(source)
    if format is None:
        return LoadedModel(decoder=full, full=full, report=None, max_positions=positions)
    decoder, report = quantized(full, format)
    return LoadedModel(decoder=decoder, full=full if keeps_full else decoder, report=report, max_positions=positions)


def _check(needed_bytes: int, source: ModelSource, format: Format | None) -> None:
    how = str(source.dtype).removeprefix("torch.") + (f", quantized to {format_name(format)}" if format else "")
    try:
        check_memory(
            needed_bytes,
            available_bytes(),
            f"{source.path} ({format_amount(source.sizes.numel)} parameters in {how})",
            source.sizes,
            source.dtype,
            () if format else _ADVISED,
        )
    except ValueError as error:
        raise CommandError(str(error)) from None


def _full(source: ModelSource) -> tuple[Decoder, int | None]:
    """Return the decoder with its own weights, and the tokens that the model was made for."""
    if source.kind is Kind.RUN:
        run = find_run(source.path)
        assert run is not None
        decoder, shape = read_run_decoder(source.path, run, source.dtype)
        return decoder, shape.context
    return _read_folder(source)


def _read_folder(source: ModelSource) -> tuple[Decoder, int | None]:
    try:
        import transformers as library
    except ImportError:
        raise CommandError(f"reading {source.path} needs Transformers: pip install transformers") from None
    try:
        transformers: Any = library
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.path, local_files_only=True, trust_remote_code=False, dtype=source.dtype
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CommandError(f"{source.path} cannot be loaded: {error}") from error
    try:
        decoder = recognize(model.eval())
        verify(decoder, model)
    except NotRecognized as error:
        raise CommandError(f"{source.path} is no decoder that this command can run: {error}") from error
    return decoder, getattr(model.config, "max_position_embeddings", None)
