"""What the commands of kvcs have in common, beyond those of moqt: options, exit codes, progress."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

from tqdm import tqdm

import moqt.console
from kvcs.assembly import Missing
from kvcs.errors import InvalidDescriptor, InvalidValue, KvcsError
from moqt.console import add_connection
from moqt.credentials import TokenFile
from moqt.errors import MoqtError

__all__ = [
    "EXIT_CODES",
    "Console",
    "ExitCode",
    "add_common",
    "counted",
    "describe_missing",
    "missing_blocks",
    "not_negative",
    "positive",
    "run",
    "token_of",
]

EXIT_CODES = """exit codes:
  0  all went well
  1  the network, the peer or a file failed; the message says what
  2  bad usage
  3  incomplete: the message lists the layers and blocks that are missing
  4  nothing found
  5  denied by the peer: the message says which right is missing, or what is wrong with the token
"""


class ExitCode(IntEnum):
    """How a command ends."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INCOMPLETE = 3
    NOTHING_FOUND = 4
    DENIED = 5


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of both commands."""
    parser.add_argument(
        "--scope-key",
        metavar="FILE",
        type=Path,
        required=True,
        help="file with the 64 hex digits of the scope key (make one: openssl rand -hex 32 > scope.key)",
    )
    add_connection(parser)


def not_negative(text: str) -> float:
    """The value of an option: a number of 0 or more."""
    return _number(text, "of 0 or more", lambda value: value >= 0)


def positive(text: str) -> float:
    """The value of an option: a number above 0."""
    return _number(text, "above 0", lambda value: value > 0)


def _number(text: str, expected: str, fits: Callable[[float], bool]) -> float:
    with suppress(ValueError):
        value = float(text)
        if math.isfinite(value) and fits(value):
            return value
    raise argparse.ArgumentTypeError(f"expected a number {expected}, not {text}")


def counted(number: int, noun: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def token_of(arguments: argparse.Namespace) -> TokenFile:
    """The file with the token: that of `--token`, or else that which KVCS_TOKEN names."""
    named = os.environ.get("KVCS_TOKEN")
    return TokenFile(arguments.token or (Path(named) if named else None))


class Console(moqt.console.Console):
    """Shows progress besides, but only on a terminal."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self._bar: tqdm[Any] | None = None

    def line(self, text: str) -> None:
        """Print a line for people, above the progress."""
        with self._output():
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def progress(self, layers: int, what: str) -> None:
        """Begin to show progress over `layers` layers."""
        if not self.as_json:
            self._bar = tqdm(total=layers, desc=what, unit="layer", disable=None, leave=False)

    def step(self, note: str) -> None:
        """One more layer."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()

    def close(self) -> None:
        """Show no more progress."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def run(
    main: Callable[[], Coroutine[Any, Any, int]],
    console: Console,
    verbose: int,
    token: TokenFile | None = None,
) -> int:
    """Run a command, which shows its peer `token`, to its exit code; what is raised becomes a sentence."""

    async def told() -> int:
        try:
            return await main()
        except MoqtError as error:
            advice = None if token is None else token.advice(error)
            if advice is None:
                raise
            console.error(f"{advice} (python -m kvcs.token shows what a token allows, and issues them)")
            return ExitCode.DENIED

    return moqt.console.run(
        told, console, verbose, failures=(KvcsError,), usage=(InvalidValue, InvalidDescriptor)
    )


def missing_blocks(missing: Iterable[Missing]) -> dict[int, list[tuple[int, int]]]:
    """By layer, the first and the last of each run of its missing blocks."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for pair in sorted(missing, key=lambda pair: (pair.layer, pair.block)):
        of_layer = spans.setdefault(pair.layer, [])
        first = of_layer.pop()[0] if of_layer and of_layer[-1][1] == pair.block - 1 else pair.block
        of_layer.append((first, pair.block))
    return spans


def describe_missing(missing: Iterable[Missing]) -> list[str]:
    """One line a layer, with the ranges of its missing blocks: "layer 3: blocks 0-5, 7"."""
    lines = []
    for layer, spans in missing_blocks(missing).items():
        text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
        lines.append(f"layer {layer}: block{'' if text.isdecimal() else 's'} {text}")
    return lines
