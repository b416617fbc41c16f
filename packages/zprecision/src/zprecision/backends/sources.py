"""The sources of the kernels, and their digest.

`hatch_build.py` loads this file by path, where neither torch nor zprecision is installed, so it imports the standard
library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["source_hash"]


def source_hash(project: Path) -> str:
    """Return a digest, 16 hexadecimal digits, of the sources of a checkout's extension."""
    csrc = project / "src" / "zprecision" / "csrc"
    files = [project / "hatch_build.py", *sorted(csrc.glob("*.[ch]"))]
    settings = (project / "pyproject.toml").read_bytes().partition(b"\n[tool.zbuild]\n")[2]  # not version, links, ...
    total = hashlib.sha256(settings)
    for path in files:
        text = path.read_bytes()
        total.update(f"{path.name} {len(text)}\n".encode() + text)
    return total.hexdigest()[:16]
