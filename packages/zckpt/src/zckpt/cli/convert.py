"""`zckpt export` and `zckpt import`: to and from the formats of others (zckpt.interchange)."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..errors import CheckpointInputError
from .resolve import resolve
from .status import OK

_DTYPES = ("float32", "bfloat16", "float16")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_TAG = "imported"
_SOURCES = ("auto", "deepspeed", "dcp", "weights")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="checkpoint, root folder, or URL")
    parser.add_argument("target", help="folder to make; it must be empty or absent")
    parser.add_argument("--tag", help="which checkpoint of a root")
    parser.add_argument(
        "--to",
        choices=("hf", "dcp"),
        default="hf",
        help="hf: safetensors with an index, as Hugging Face has them (default); dcp: torch.distributed.checkpoint",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="hf: convert floating tensors (default: as stored)")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="hf: largest file (default 5GB)")
    parser.add_argument(
        "--prefix", default="model.", help='hf: export names that begin so, without it (default "model."; "": all)'
    )


def run_export(arguments: argparse.Namespace) -> int:
    found = resolve(arguments.path, arguments.tag)
    from .. import interchange  # not at the top: it is large, and the other commands do without

    if arguments.to == "dcp":
        made = interchange.export_dcp(found, arguments.target)
    else:
        import torch

        made = interchange.export_huggingface(
            found,
            arguments.target,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            max_shard_nbytes=size_of(arguments.shard_size),
            prefix=arguments.prefix,
        )
    print(f"{found.path} exported to {made}")
    return OK


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder or file of another format")
    parser.add_argument("root", help="root folder to save into, or URL")
    parser.add_argument(
        "--from", dest="kind", choices=_SOURCES, default="auto", help="its format (default: recognised by its files)"
    )
    parser.add_argument("--tag", help=f'tag to write (default "{_TAG}"); deepspeed: its tag to read and write')
    parser.add_argument("--step", type=int, default=0, help="step to write; deepspeed brings its own")
    parser.add_argument("--prefix", default="model.", help='dcp, weights: put before each name (default "model.")')
    parser.add_argument(
        "--tensor-parallel",
        action="append",
        default=[],
        metavar="PATTERN=DIM",
        help="deepspeed: along which dim tensor-parallel parts of matching names are joined; may be repeated",
    )
    parser.add_argument("--optimizer", default="", help="deepspeed: class of the optimizer, if its config names none")
    parser.add_argument("--scheduler", default="", help="deepspeed: class of the schedule, if its config names none")


def run_import(arguments: argparse.Namespace) -> int:
    from .. import interchange

    kind = interchange.recognise(arguments.source) if arguments.kind == "auto" else arguments.kind
    if kind == "deepspeed":
        made = interchange.import_deepspeed(
            arguments.source,
            arguments.root,
            tag=arguments.tag,
            tensor_parallel=dict(map(pattern_of, arguments.tensor_parallel)),
            optimizer=arguments.optimizer,
            scheduler=arguments.scheduler,
        )
    else:
        load = interchange.import_dcp if kind == "dcp" else interchange.import_weights
        made = load(
            arguments.source,
            arguments.root,
            tag=arguments.tag or _TAG,
            step=arguments.step,
            prefix=arguments.prefix,
        )
    print(f"{Path(arguments.source)} ({kind}) imported as {made}")
    return OK


def size_of(text: str) -> int:
    """Bytes: "5GB" is 5 * 1000**3, "5GiB" is 5 * 1024**3."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise CheckpointInputError(f"{text!r} is no size: write a number and KB, MB, GB, TB or KiB, MiB, GiB, TiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


def pattern_of(text: str) -> tuple[str, int]:
    pattern, equals, dim = text.rpartition("=")
    if not equals or not dim.isdecimal():
        raise CheckpointInputError(f"--tensor-parallel {text!r}: write PATTERN=DIM, such as '*.q_proj.weight=0'")
    return pattern, int(dim)
