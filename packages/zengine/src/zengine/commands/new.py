"""`zengine new [FOLDER]`: write a starter script and its config.

The files are `starter/train.py` and `starter/config.json`, as they are: linters and tests see what users get.
Rejected: a template with questions (model, precision, ranks), since the script serves any number of ranks, and what
fits a machine is the business of `zengine plan`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zengine.commands import CommandError

__all__ = ["FILES", "run"]

STARTER = Path(__file__).parent / "starter"
FILES = ("train.py", "config.json")


def run(arguments: argparse.Namespace) -> int:
    """Write the files into a folder and print what to do next.  Raises CommandError if one of them exists."""
    folder: Path = arguments.folder
    taken = [name for name in FILES if (folder / name).exists()]
    if taken:
        raise CommandError(
            f"zengine new: {folder} already has {' and '.join(taken)}, which stay as they are; give another folder: "
            "zengine new FOLDER"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            with open(folder / name, "x", encoding="utf-8") as file:
                file.write((STARTER / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"zengine new: cannot write to {folder}: {error.strerror}") from error
    enter = "" if folder == Path() else f"  cd {folder}\n"
    print(f"wrote {' and '.join(str(folder / name) for name in FILES)}; next:\n{enter}  python train.py")
    return 0
