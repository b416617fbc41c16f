"""`zengine check`, `convert-config` and `schema`: commands that read or print configs, on any machine.

`check` reports every problem of a config and its notices.  `convert-config` rewrites an old config with current keys;
the result resolves to the same plan.  Changes and their reasons go to standard error, since JSON has no comments.
`schema` prints the JSON Schema of a config, which editors use for completion.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zengine.commands import CommandError
from zengine.config import Config, ConfigError, Facts, Problem, load, violations
from zengine.config.grammar.source import read
from zengine.config.reading.auto import fill_autos
from zengine.config.reading.convert import convert
from zengine.config.reading.json_schema import json_schema
from zengine.config.reading.versions import KEY

__all__ = ["facts_of", "parse_auto", "run_check", "run_convert", "run_schema"]


def run_check(arguments: argparse.Namespace) -> int:
    """Print the notices of a config.  Raises ConfigError with every problem."""
    config = load(arguments.config)
    if arguments.world:
        from zengine.config import resolve  # imports torch, for dtypes and to look for a GPU

        plan = resolve(config, facts_of(config, arguments.world))
        print("\n".join([f"{arguments.config}: no problems at world size {arguments.world}", *plan.notices]))
        return 0
    problems = violations(config)
    if problems:
        raise ConfigError(config.source, problems)
    print("\n".join([f"{arguments.config}: no problems (pass --world to check batch sizes too)", *config.notices]))
    return 0


def run_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of a config."""
    print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
    return 0


def run_convert(arguments: argparse.Namespace) -> int:
    """Print or write the new config, and print the changes.  Raises ConfigError for rejected keys."""
    auto = parse_auto(arguments.auto)
    document = read(arguments.config)
    if document.problems or not isinstance(document.data, Mapping):
        raise ConfigError(document.source, document.problems)
    if not arguments.drop_rejected:
        load(arguments.config, auto=auto)  # reports rejected keys with their lines before anything is written
    drop = frozenset(_rejected_keys(arguments.config, auto)) if arguments.drop_rejected else frozenset()
    data: Mapping[str, Any] = document.data
    if arguments.fill_auto or auto:
        filled = fill_autos(document, auto).document.data
        data = filled if isinstance(filled, Mapping) else data
    converted = convert(data, drop=drop)
    result = {**({KEY: arguments.release} if arguments.release else {}), **converted.data}
    load(result, auto=auto)
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    if arguments.out:
        _write(Path(arguments.out), text)
    else:
        print(text, end="")
    for change in converted.changes or ("no changes",):
        print(change, file=sys.stderr)
    return 0


def _rejected_keys(path: str, auto: Mapping[str, Any]) -> list[str]:
    """Return the keys that `load` rejects."""
    try:
        load(path, auto=auto)
    except ConfigError as error:
        return [problem.key for problem in error.problems if problem.key]
    return []


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--out {path}: {error.strerror}") from None


def facts_of(config: Config, world_size: int, device: str = "") -> Facts:
    """Return the facts of `world_size` data-parallel ranks on `device`: "cpu", "cuda", or "" for this machine's."""
    import torch

    from zengine.initialize import bf16_is_faster

    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = device or here
    is_faster = bf16_is_faster(config, torch.device(here), None) if device == here else device == "cuda"
    return Facts(world_size=world_size, replicas=world_size, device_type=device, bf16_is_faster=is_faster)


def parse_auto(pairs: list[str]) -> dict[str, Any]:
    """Parse the `KEY=VALUE` pairs of `--auto`; values are JSON or plain text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(
                "--auto", [Problem(reason=f'"{pair}" is not KEY=VALUE', suggestion="Write train_batch_size=64.")]
            )
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found
