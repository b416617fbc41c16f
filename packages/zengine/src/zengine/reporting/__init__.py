"""Reports: one self-contained HTML page from the folder of a run.

write_report([Path("runs/a")], Path("runs/a/report.html"))        # zengine report runs/a
write_report([Path("runs/a"), Path("runs/b")], Path("ab.html"))   # overlaid
"""

from zengine.imports import lazy_attributes
from zengine.reporting.page import write_report
from zengine.reporting.runs import NoRunError, RecordedRun, read_run

__all__ = ["NoRunError", "RecordedRun", "read_run", "write_report"]

RENAMED = {"Run": "zengine.reporting.RecordedRun"}

__getattr__, __dir__ = lazy_attributes(__name__, {}, RENAMED)
