"""Command-line arguments that DeepSpeed scripts add to their parser."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE`; pass the parsed result to `initialize(args=...)`.

    `--deepspeed` exists so that old command lines parse: whether the engine is used is up to the script.
    """
    group = parser.add_argument_group("zengine", "training engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted for old command lines; no effect")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="JSON config of the engine")
    return parser
