"""What the commands return to the shell."""

from __future__ import annotations

OK = 0  # all is well; for `diff`: no difference
CORRUPT = DIFFERS = 1  # something is damaged, or differs
ABSENT = USAGE = 2  # nothing there, never committed, or asked for in a way that cannot be (argparse's status too)
REFUSED = 3  # the disk, the store or a lock refused
