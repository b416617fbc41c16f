"""Arguments of all commands, without an import of the code that runs them.

`zckpt --help`, `--version` and `--print-completion` read this module alone, so they start without torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zckpt

DEFAULT_TAG = "imported"  # tag of a checkpoint that `zckpt import` writes
_DTYPES = ("float32", "bfloat16", "float16")
_SOURCES = ("auto", "deepspeed", "dcp", "weights")
_SHELLS = ("bash", "zsh", "tcsh")

EXIT_STATUS = """\
exit status:
  0  success; diff: no difference
  1  a checkpoint is damaged; diff: the checkpoints differ
  2  wrong usage, no such checkpoint, or never committed
  3  the disk, the store or a lock failed
"""
_EPILOG = f"""\
A path is a root folder, a checkpoint in it, or the URL of either (s3://bucket/run; needs fsspec).

{EXIT_STATUS}"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `zckpt`.  A parsed command has `run`: "module:function" below zckpt.cli."""
    parser = argparse.ArgumentParser(
        prog="zckpt",
        description="List, verify, compare, convert and prune checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zckpt {zckpt.__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=_SHELLS,
        help="print a completion script for this shell (needs shtab: pip install 'zckpt[completion]')",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, aliases, text, add, run in _COMMANDS:
        command = commands.add_parser(
            name,
            aliases=list(aliases),
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=EXIT_STATUS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add(command)
        command.set_defaults(run=run)
    return parser


class PrintCompletion(argparse.Action):
    """Prints the completion script of a shell and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs the package shtab: pip install 'zckpt[completion]'")
        for action in _positionals(parser):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell=str(values)))
        parser.exit()


def _positionals(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Positional arguments of the commands; all of them are paths."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _positionals(command)
        elif not action.option_strings:
            yield action


def _add_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="root folder or URL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="checkpoint, root folder (its `latest` is read) or URL")
    parser.add_argument("--tag", help="checkpoint of a root")
    parser.add_argument("--depth", type=int, default=2, help="name components of a group (default 2)")
    parser.add_argument("--tensors", action="store_true", help="also print a line per tensor")
    parser.add_argument("--match", default="*", metavar="PATTERN", help="only tensors whose names match (glob)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every tensor")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="checkpoint, root folder (its `latest` is read) or URL")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tag", help="checkpoint of a root")
    which.add_argument("--all", action="store_true", help="every checkpoint of a root")
    parser.add_argument(
        "--threads", type=int, default=min(8, os.cpu_count() or 1), help="reader threads (default %(default)s)"
    )
    parser.add_argument("--limit", type=int, default=20, help="problems to print (default 20; 0: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="checkpoint, root folder or URL")
    parser.add_argument("b", help="checkpoint, root folder or URL")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance of values (default 0)")
    parser.add_argument("--tensors-only", action="store_true", help="do not compare objects")
    parser.add_argument("--read", action="store_true", help="read all bytes, even if checksums are equal")
    parser.add_argument("--limit", type=int, default=20, help="lines per section (default 20; 0: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="checkpoint, root folder or URL")
    parser.add_argument("target", help="folder to write; absent or empty")
    parser.add_argument("--tag", help="checkpoint of a root")
    parser.add_argument(
        "--to",
        choices=("hf", "dcp", "deepspeed"),
        default="hf",
        help="hf: Hugging Face safetensors with an index (default); dcp: torch.distributed.checkpoint; deepspeed: a "
        "universal checkpoint",
    )
    parser.add_argument(
        "--pipeline", action="store_true", help="deepspeed: names of a pipeline (default: if the run had stages)"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="hf: dtype of floating-point tensors (default: as stored)")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="hf: maximum file size (default 5GB)")
    parser.add_argument(
        "--prefix",
        default="model.",
        help='hf: export names that begin with it, and strip it (default "model."; "": all)',
    )


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder or file of another format")
    parser.add_argument("root", help="root folder or URL to save into")
    parser.add_argument(
        "--from", dest="kind", choices=_SOURCES, default="auto", help="source format (default: detected)"
    )
    parser.add_argument("--tag", help=f'tag to write (default "{DEFAULT_TAG}"); deepspeed: tag to read and write')
    parser.add_argument("--step", type=int, default=0, help="step to write; deepspeed: taken from the source")
    parser.add_argument("--prefix", default="model.", help='dcp, weights: prefix of every name (default "model.")')
    parser.add_argument(
        "--tensor-parallel",
        action="append",
        default=[],
        metavar="PATTERN=DIM",
        help="deepspeed: dim along which tensor-parallel shards of matching names are joined; repeatable",
    )
    parser.add_argument(
        "--tied-layer",
        action="append",
        default=[],
        metavar="KEY=LAYER",
        help="deepspeed: first layer of a pipeline's tied layer, which ZeRO stage 0 does not save; repeatable",
    )
    parser.add_argument("--optimizer", default="", help="deepspeed: optimizer class, if its config names none")
    parser.add_argument("--scheduler", default="", help="deepspeed: scheduler class, if its config names none")


def _add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="root folder or URL")
    parser.add_argument("--last", type=int, required=True, metavar="N", help="keep the newest N")
    parser.add_argument("--every", type=int, default=0, metavar="N", help="keep steps divisible by N")
    parser.add_argument(
        "--best",
        action="append",
        default=[],
        metavar="METRIC[:min|max[:N]]",
        help='keep the best N (default 1) by objects["metrics"][METRIC] (default: min); repeatable',
    )
    parser.add_argument(
        "--keep-tag", action="append", default=[], metavar="PATTERN", help="keep matching tags (glob); repeatable"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


_Add = Callable[[argparse.ArgumentParser], None]

# name, aliases, help, arguments, "module:function" below zckpt.cli
_COMMANDS: tuple[tuple[str, tuple[str, ...], str, _Add, str], ...] = (
    ("ls", (), "list the checkpoints of a root, newest first", _add_ls, "roots:run_ls"),
    ("inspect", ("show",), "print the contents of a checkpoint", _add_inspect, "inspect:run"),
    ("verify", (), "read every byte and compare every checksum", _add_verify, "verify:run"),
    ("diff", (), "compare two checkpoints", _add_diff, "diff:run"),
    ("export", (), "write a checkpoint in another format", _add_export, "convert:run_export"),
    ("import", (), "save a checkpoint of another format", _add_import, "convert:run_import"),
    ("prune", (), "delete checkpoints that no rule keeps", _add_prune, "roots:run_prune"),
)  # fmt: skip
