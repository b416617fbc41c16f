"""Commands of `zengine`; `zengine.cli` declares their arguments and imports their modules when they run.

A command is a function of the parsed arguments that returns the exit status.  It raises `CommandError` (or the
ConfigError of a config) for what the user can fix: the command line prints it without a traceback and returns 1.
"""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(ValueError):
    """Invalid call: the message says what was given, what is allowed and what to do."""
