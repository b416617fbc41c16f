"""Reports: one self-contained HTML page from the folder of a run.

write_report([Path("runs/a")], Path("runs/a/report.html"))        # zengine report runs/a
write_report([Path("runs/a"), Path("runs/b")], Path("ab.html"))   # overlaid
"""

from zengine.reporting.page import write_report
from zengine.reporting.runs import NoRunError, RecordedRun, read_run

__all__ = ["NoRunError", "RecordedRun", "read_run", "write_report"]


def __getattr__(name: str) -> object:
    """Names of 0.2 raise with their successors."""
    if name == "Run":
        raise AttributeError("zengine.reporting.Run was renamed in 0.3.0; use zengine.reporting.RecordedRun.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
