"""Make tools/train importable as `train`, as launch.py does for the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

TOOLS = str(Path(__file__).parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.insert(0, TOOLS)
