"""`zero_to_fp32.py` beside checkpoints, as DeepSpeed's users find it: `python zero_to_fp32.py . OUTPUT_FOLDER`."""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path

__all__ = ["is_url", "make_executable", "write_recovery_script"]

NAME = "zero_to_fp32.py"
_TEXT = '''#!/usr/bin/env python
"""Write the whole float32 weights of the newest checkpoint in a folder: python zero_to_fp32.py . OUTPUT_FOLDER"""

from zengine.deepspeed.utils.zero_to_fp32 import main

raise SystemExit(main())
'''

log = logging.getLogger("zengine")


def is_url(save_dir: str | os.PathLike[str]) -> bool:
    """Return whether checkpoints go to "s3://bucket/run" and the like, where no script can be run."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(save_dir)) is not None


def write_recovery_script(save_dir: str | os.PathLike[str]) -> None:
    """Write the script into the folder of checkpoints, and make it executable."""
    path = Path(save_dir) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)  # a background save may not have made it
    path.write_text(_TEXT)
    make_executable(path)


def make_executable(path: str | os.PathLike[str]) -> None:
    """Let the owner execute a file; where a file system has no permissions, log that and go on."""
    try:
        os.chmod(path, os.stat(path).st_mode | stat.S_IEXEC)
    except (FileNotFoundError, PermissionError) as error:
        log.info("%s is not executable (%s); run it as `python %s`", path, error, NAME)
