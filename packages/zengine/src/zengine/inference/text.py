"""Text of samples, as it comes.

A token may end within a character, and text may be the beginning of a stop string.  `TextStream` holds both back, so
what it has returned never changes: its pieces together are the text of all tokens, up to the first stop string.

Decoding token by token is wrong for both (a character of several tokens; a space that a decoder drops at the start
of its input), and decoding everything again for each token is quadratic.  So a window of the newest tokens is
decoded, which is cut down to its last tokens when it has grown and ends with a whole character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import attrs

__all__ = ["Decode", "TextStream"]

Decode = Callable[[Sequence[int]], str]  # token ids -> text

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_BROKEN = 3  # at the end of a text that may still become a character of four bytes
_KEPT, _GROWN = 8, 24  # tokens of a window after, and before, it is cut down


@final
@attrs.define(eq=False)
class TextStream:
    """Text of one sample.

    Invariant: `held` begins no later than the first stop string; the first `printed` characters of decode(window) are
    in what was returned, or in `held`.
    """

    decode: Decode
    stop_strings: tuple[str, ...] = ()
    window: list[int] = attrs.field(factory=list)  # newest tokens
    printed: int = 0
    held: str = ""  # may begin a stop string
    is_stopped: bool = False  # a stop string has come

    def push(self, token: int) -> str:
        """Return the text that is certain with one more token."""
        self.window.append(token)
        text = self.decode(self.window)
        certain = len(text) - min(len(text) - len(text.rstrip(_BROKEN)), _MOST_BROKEN)
        fresh, self.printed = text[self.printed : certain], max(self.printed, certain)
        if len(self.window) > _GROWN and certain == len(text):
            self.window = self.window[-_KEPT:]
            self.printed = len(self.decode(self.window))
        return self._release(fresh, may_grow=True)

    def finish(self) -> str:
        """Return the rest: what is held, and bytes that became no character."""
        fresh = self.decode(self.window)[self.printed :]
        self.window, self.printed = [], 0
        return self._release(fresh, may_grow=False)

    def _release(self, fresh: str, *, may_grow: bool) -> str:
        if self.is_stopped:
            return ""
        text, self.held = self.held + fresh, ""
        places = [at for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self.stop_strings), default=0) if may_grow else 0
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
