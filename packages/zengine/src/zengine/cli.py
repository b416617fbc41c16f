"""Command line: `zengine COMMAND ...` or `python -m zengine COMMAND ...`.

All arguments are declared here, so that `--help`, `--version` and shell completion import neither torch nor the
commands.  A new command is a function of `zengine.commands`, a function below that declares its arguments, and a row
of `COMMANDS`.  Exit status: 0 success, 1 failure with the reason on standard error, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import zengine
from zengine.commands import CommandError

__all__ = ["COMMANDS", "main", "make_parser"]

SHELLS = ("bash", "zsh", "tcsh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = make_parser().parse_args(argv)

    from zengine.config import ConfigError  # imports the keys, which parsing does not need
    from zengine.pages import with_notes

    try:
        command = COMMANDS[arguments.command]
        status: int = getattr(importlib.import_module(command.module), command.function)(arguments)
        sys.stdout.flush()  # a closed pipe (`zengine explain ... | head`) raises here
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # silences the flush at interpreter exit
        return 1
    except (ConfigError, CommandError) as error:
        print(with_notes(error), file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="zengine", description="Check, plan, start and report training runs; generate from models."
    )
    parser.add_argument("--version", action="version", version=f"zengine {zengine.__version__}")
    parser.add_argument(
        "--print-completion", action=PrintCompletion, choices=SHELLS, help="print a completion script (needs shtab)"
    )
    subparsers = parser.add_subparsers(required=True, dest="command", metavar="command")
    for name, command in COMMANDS.items():
        command.add_arguments(subparsers.add_parser(name, help=command.help, description=command.help))
    return parser


class PrintCompletion(argparse.Action):
    """Print the completion script of a shell and exit."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(1, "zengine --print-completion needs the package shtab: pip install shtab\n")
        print(shtab.complete(parser, values))
        parser.exit(0)


def positive(text: str) -> int:
    """Parse an integer of at least 1, as `type=` of an argument."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--world", "--world-size", dest="world", type=positive, default=0, metavar="N", help="ranks")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--world", "--world-size", dest="world", type=positive, required=True, metavar="N", help="ranks"
    )
    _add_device(parser)
    parser.add_argument("--all", action="store_true", help="also show values at their defaults")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_auto(parser)
    _add_model(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--world", dest="world", type=positive, default=1, metavar="N", help="ranks; default: 1")
    _add_device(parser)
    parser.add_argument("--memory", default="", metavar="80GB", help="memory of one rank; default: of this machine")
    parser.add_argument(
        "--batch", default="", metavar="MODULE:FACTORY", help="function from micro-batch size to the model's argument"
    )
    parser.add_argument("--tokens", type=positive, default=0, metavar="T", help="or sequence length of token ids")
    parser.add_argument("--inputs", default="", metavar="3x224x224", help="or samples of this shape")
    parser.add_argument("--measure", action="store_true", help="train a few steps in this process and compare")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_auto(parser)
    _add_model(parser)


def _add_check_order(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--world", dest="world", type=positive, required=True, metavar="N", help="ranks")
    parser.add_argument(
        "--batch", default="", metavar="MODULE:FACTORY", help="function from micro-batch size to the model's argument"
    )
    parser.add_argument("--tokens", type=positive, default=0, metavar="T", help="or sequence length of token ids")
    parser.add_argument("--inputs", default="", metavar="3x224x224", help="or samples of this shape")
    parser.add_argument(
        "--step",
        default="",
        metavar="MODULE:FUNCTION",
        help="or a whole step: function of (engine, step, random.Random)",
    )
    parser.add_argument(
        "--oracle",
        default="",
        metavar="MODULE:FUNCTION",
        help="answers to reads of data in your own code: returns a dict",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and of their decisions; default: 0")
    _add_auto(parser)
    _add_model(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc", type=positive, default=0, metavar="N", help="processes on this host; default: one per GPU"
    )
    parser.add_argument("--bind-cores", action="store_true", help="bind each process to its own cores")
    parser.add_argument("--keep-memory", action="store_true", help="CPU: keep freed memory for the next step")
    parser.add_argument("--hostfile", default="", help='file of lines "name slots=8"')
    parser.add_argument("--include", default="", metavar="HOSTS", help='"a@b:0,2": host a, devices 0 and 2 of host b')
    parser.add_argument("--exclude", default="", metavar="HOSTS", help="hosts and devices to leave out")
    parser.add_argument("--master-addr", default="", help="rendezvous host; default: the first host")
    parser.add_argument("--master-port", type=positive, default=29500, help="rendezvous port; default: 29500")
    parser.add_argument(
        "--max-restarts", type=int, default=None, help="restarts after a process fails; default: 0, elastic: 100"
    )
    parser.add_argument(
        "--elastic",
        default="",
        metavar="MIN:MAX",
        help="hosts may come and go; run this command on each of them, with the same --master-addr",
    )
    parser.add_argument("--job-id", default="zengine", metavar="NAME", help="elastic: name that the hosts share")
    parser.add_argument("--module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and start nothing")
    parser.add_argument("script", help="script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run, which contains events.jsonl; several are compared",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="page to write; default: report.html beside the first run's events.jsonl, which replaces only a page "
        "that zengine wrote",
    )


def _add_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="folder to write to; default: this one")


def _add_env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--try", dest="tries", action="store_true", help="start two ranks that exchange a tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_convert_config(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--out", default="", metavar="FILE", help="file to write; default: standard output")
    parser.add_argument("--from", dest="release", default="", metavar="RELEASE", help='add "config_version": RELEASE')
    parser.add_argument("--drop-rejected", "--drop-refused", action="store_true", help="remove rejected keys")
    parser.add_argument(
        "--fill-auto", action="store_true", help='replace "auto" by values, for runs without the Trainer'
    )
    _add_auto(parser)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_weights(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="prompt; - for standard input; repeatable")
    add("--prompts", type=Path, metavar="FILE", help="file of prompts, one a line; .jsonl: strings or objects")
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add("--system", default="", metavar="TEXT", help="with --chat: what precedes the prompt as the system's message")
    add(
        "--max-new-tokens", type=positive, default=0, metavar="N", help="of a sample; default: 128, or as many as fit"
    )
    add("--max-out-tokens", type=positive, default=0, metavar="N", help="of prompt and sample; default: the model's")
    add("--temperature", type=float, default=0.7, metavar="T", help="0: the likeliest token; default: 0.7")
    add("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest tokens; default: all")
    add("--top-p", type=float, default=1.0, metavar="P", help="or among those that have this probability together")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: fewer repetitions; default: 1")
    add("--stop", action="append", default=[], metavar="TEXT", help="end a sample before this text; repeatable")
    add("--ignore-eos", action="store_true", help="do not end a sample at the model's end-of-text token")
    add("--samples", type=positive, default=1, metavar="N", help="of each prompt, which is computed once; default: 1")
    add("--seed", type=int, default=0, help="of the first sample; the others have the next ones; default: 0")
    add("--stream", action=argparse.BooleanOptionalAction, default=True, help="print text as it comes; default: yes")
    add("--log-probs", action="store_true", help="also print each token with its log-probability")
    add("--json", action="store_true", help="print a JSON object for each sample")


def _add_quality(parser: argparse.ArgumentParser) -> None:
    _add_weights(parser)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="a UTF-8 text that the model is judged on"
    )
    parser.add_argument("--max-bytes", type=positive, default=0, metavar="N", help="of the text; default: all of it")
    parser.add_argument("--context", type=positive, default=0, metavar="N", help="tokens of a window; default: 512")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="page to write, with a drawing of the errors")


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, GGUF or other file, or run of tools/dev.py train"
    )
    parser.add_argument(
        "--quant", default="", metavar="FORMAT", help="quantize the weights: int8, int4, int4-g64-minmax, q4_0, ..."
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="of other weights: fp32, bf16, fp16; default: that of the files",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="of the tokenizer; default: the model's")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a JSON file")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="", help="device of the run; default: that of this machine"
    )


def _add_auto(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--auto", action="append", default=[], metavar="KEY=VALUE", help='value for a key that is "auto" in the file'
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="MODULE:FACTORY", help="your model, built on the meta device")
    parser.add_argument(
        "--params", type=float, default=0.0, metavar="NUMBER", help="or the size of an example transformer: 1.3e9"
    )
    parser.add_argument("--hidden", type=positive, default=0, metavar="H", help="width of the transformer")
    parser.add_argument("--layers", type=positive, default=0, metavar="L", help="layers of the transformer")


@attrs.frozen
class Command:
    """One command: the function that executes it, its line in `--help`, and its arguments."""

    module: str  # imported when the command runs
    function: str  # receives the parsed arguments and returns the exit status
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    """Declare no argument."""


COMMANDS: Mapping[str, Command] = {
    "new": Command("zengine.commands.new", "run", "Write a training script and its config to start from.", _add_new),
    "check": Command(
        "zengine.commands.config", "run_check", "Report every problem of a config, and its notices.", _add_check
    ),
    "explain": Command(
        "zengine.commands.plan",
        "run_explain",
        "Explain a config at a world size: values with origins, memory, traffic, advice.",
        _add_explain,
    ),
    "plan": Command(
        "zengine.commands.plan",
        "run_plan",
        "Estimate the peak of a rank, the largest micro-batch that fits and the best stage, without a GPU.",
        _add_plan,
    ),
    "check-order": Command(
        "zengine.commands.check_order",
        "run",
        "Check that all ranks of a run launch the same collectives in one order, without the ranks.",
        _add_check_order,
    ),
    "run": Command("zengine.commands.run", "run", "Start a script on all devices of one or several hosts.", _add_run),
    "report": Command(
        "zengine.commands.report", "run", "Write the page of a run: curves, time, memory, config.", _add_report
    ),
    "generate": Command(
        "zengine.commands.generate",
        "run",
        "Sample text from a local model, whose weights may be quantized while loading.",
        _add_generate,
    ),
    "quality": Command(
        "zengine.commands.quality",
        "run",
        "Compare quantized weights with the full ones on a text: bits per byte, divergence, error by layer.",
        _add_quality,
    ),
    "env": Command(
        "zengine.commands.env",
        "run",
        "Print versions, kernels, memory, GPUs and known problems of this machine.",
        _add_env,
    ),
    "convert-config": Command(
        "zengine.commands.config",
        "run_convert",
        "Rewrite an old DeepSpeed config with current keys.",
        _add_convert_config,
    ),
    "schema": Command(
        "zengine.commands.config", "run_schema", "Print the JSON Schema of a config, for editors.", _add_nothing
    ),
}
