"""After a run: one self-contained HTML page from what it left in its folder.

write_report([Path("runs/a")], Path("runs/a/report.html"))        # zengine report runs/a
write_report([Path("runs/a"), Path("runs/b")], Path("ab.html"))   # over each other
"""

from zengine.reporting.page import write_report
from zengine.reporting.runs import NoRunError, Run, read_run

__all__ = ["NoRunError", "Run", "read_run", "write_report"]
