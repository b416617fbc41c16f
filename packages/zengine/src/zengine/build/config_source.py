"""Where `initialize` finds its config, when there are several ways to give it."""

from __future__ import annotations

import argparse
from typing import Any

from zengine.config import ConfigError, Problem


def pick_config(args: Any, config: Any, config_params: Any) -> Any:
    """The one config that was given.

    Raises:
        ConfigError: none was given, or more than one.
    """
    named = {
        "config=": config,
        "config_params=": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        values = ", ".join(f"{name} is {_short(value)}" for name, value in given.items())
        raise _refusal(f"the config was given {len(given)} times ({values})", "Keep one of them.")
    if not given:
        raise _refusal(
            "no config was given",
            "Pass config= (a path, a dict or JSON text), or args= with --deepspeed_config FILE "
            "(zengine.add_config_arguments adds it to a parser).",
        )
    return next(iter(given.values()))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refusal(reason: str, suggestion: str) -> ConfigError:
    return ConfigError("initialize()", [Problem(reason=reason, suggestion=suggestion)])


# Command-line arguments that DeepSpeed scripts add to their parser.


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE`; pass the parsed result to `initialize(args=...)`.

    `--deepspeed` exists so that old command lines parse: whether the engine is used is up to the script.
    """
    group = parser.add_argument_group("zengine", "training engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted for old command lines; no effect")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="JSON config of the engine")
    return parser
