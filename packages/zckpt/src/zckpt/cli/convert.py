"""`zckpt export` and `zckpt import`: conversion to and from other formats (zckpt.interchange)."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from zckpt import interchange
from zckpt.cli.output import OK
from zckpt.cli.parser import DEFAULT_TAG
from zckpt.cli.resolve import resolve
from zckpt.errors import CheckpointInputError

_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def run_export(arguments: argparse.Namespace) -> int:
    found = resolve(arguments.path, arguments.tag)
    if arguments.to == "dcp":
        made = interchange.export_dcp(found, arguments.target)
    elif arguments.to == "deepspeed":
        made = interchange.export_universal(found, arguments.target, pipeline=arguments.pipeline or None)
    else:
        made = interchange.export_huggingface(
            found,
            arguments.target,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            max_shard_nbytes=size_of(arguments.shard_size),
            prefix=arguments.prefix,
        )
    print(f"{found.path} exported to {made}")
    return OK


def run_import(arguments: argparse.Namespace) -> int:
    kind = interchange.detect_format(arguments.source) if arguments.kind == "auto" else arguments.kind
    if kind == "deepspeed":
        made = interchange.import_deepspeed(
            arguments.source,
            arguments.root,
            tag=arguments.tag,
            tensor_parallel=dict(pattern_of(text, "--tensor-parallel") for text in arguments.tensor_parallel),
            tied_layers=dict(pattern_of(text, "--tied-layer") for text in arguments.tied_layer),
            optimizer=arguments.optimizer,
            scheduler=arguments.scheduler,
        )
    else:
        load = interchange.import_dcp if kind == "dcp" else interchange.import_weights
        made = load(
            arguments.source,
            arguments.root,
            tag=arguments.tag or DEFAULT_TAG,
            step=arguments.step,
            prefix=arguments.prefix,
        )
    print(f"{Path(arguments.source)} ({kind}) imported as {made}")
    return OK


def size_of(text: str) -> int:
    """Bytes: "5GB" is 5 * 1000**3, "5GiB" is 5 * 1024**3."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise CheckpointInputError(f"{text!r} is not a size: write a number and KB, MB, GB, TB or KiB, MiB, GiB, TiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


def pattern_of(text: str, option: str = "--tensor-parallel") -> tuple[str, int]:
    pattern, equals, number = text.rpartition("=")
    if not equals or not number.isdecimal():
        form = (
            "KEY=LAYER, such as embed=0" if option == "--tied-layer" else "PATTERN=DIM, such as '*.q_proj.weight=0'"
        )
        raise CheckpointInputError(f"{option} {text!r}: write {form}")
    return pattern, int(number)
