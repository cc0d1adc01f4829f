"""The demo's terminal: lines that stay, and a block below them that is drawn again and again."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TextIO

WIDEST, NARROWEST = 118, 60
SPECIAL = "░█◆●│✔✘·"

GREEN, RED, FAINT, BOLD = "1;32", "1;31", "90", "1"  # SGR numbers


class Screen:
    """Writes to `stream`: colours and motion where that is a terminal, plain text elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        size = shutil.get_terminal_size((100, 50))
        self.colour = terminal and "NO_COLOR" not in os.environ
        self.ascii_only = not _can_encode(stream, SPECIAL)
        self.width = min(max(size.columns - 1, NARROWEST), WIDEST)
        self._stream = stream
        self._rows = size.lines if terminal and size.columns > self.width else 0
        self._drawn = 0
        self._unfinished = False

    def say(self, text: str = "") -> None:
        """Text that stays, on lines of its own."""
        if self._unfinished:
            self._stream.write("\n")
        self._unfinished = False
        self._drawn = 0
        self._stream.write(text + "\n")
        self._stream.flush()

    def add(self, text: str) -> None:
        """Text that stays, on the line of the text added before."""
        self._drawn = 0
        self._unfinished = True
        self._stream.write(text)
        self._stream.flush()

    def moves(self, rows: int) -> bool:
        """Whether a block of so many lines can be drawn again: on a terminal that is high enough."""
        return rows < self._rows

    def draw(self, lines: Sequence[str]) -> None:
        """Draw a block in the place of the one drawn before, if nothing was written since."""
        if self._rows == 0:
            self.say("\n".join(lines))
            return
        home = f"\x1b[{self._drawn}F" if self._drawn else ""
        self._stream.write(home + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        self._stream.flush()
        self._drawn = len(lines)

    def wrap(self, text: str, indent: int) -> list[str]:
        """`text` in lines, all but the first indented, with room left for as much before the first."""
        lines = textwrap.wrap(text, self.width - indent, break_long_words=False, break_on_hyphens=False)
        return [lines[0], *(f"{'':<{indent}}{line}" for line in lines[1:])] if lines else [""]

    def paint(self, text: str, sgr: str) -> str:
        """`text` in a colour, where there are colours."""
        return f"\x1b[{sgr}m{text}\x1b[0m" if self.colour else text


def side_by_side(left: str, right: str, *, width: int, divider: str) -> list[str]:
    """Two texts in two columns, `width` wide in all."""
    column = (width - 3) // 2
    rows = zip_longest(_wrapped(left, column), _wrapped(right, column), fillvalue="")
    return [f"{one:<{column}} {divider} {other}".rstrip() for one, other in rows]


def _wrapped(text: str, width: int) -> list[str]:
    return [part for line in text.splitlines() for part in textwrap.wrap(line, width) or [""]]


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
