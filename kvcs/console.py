"""What the commands have in common: options, exit codes, progress, and one line or one JSON object for each
event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from enum import IntEnum
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvcs.assembly import Missing
from kvcs.errors import FileFault, InvalidDescriptor, InvalidValue, KvcsError
from moqt.errors import MoqtError, UsageError
from moqt.quic.api import QuicOptions
from moqt.wire import AliasType, Token

__all__ = [
    "EXIT_CODES",
    "Console",
    "ExitCode",
    "add_common",
    "describe_missing",
    "options_of",
    "run",
    "tokens_of",
    "until_told",
]

EXIT_CODES = """exit codes:
  0  all went well
  1  the network, the peer or a file failed; the message says what
  2  bad usage
  3  incomplete: the message lists the layers and blocks that are missing
  4  nothing found
"""


class ExitCode(IntEnum):
    """How a command ends."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INCOMPLETE = 3
    NOTHING_FOUND = 4


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of both commands."""
    parser.add_argument(
        "--scope-key",
        metavar="FILE",
        type=Path,
        required=True,
        help="file with the 64 hex digits of the scope key (make one: openssl rand -hex 32 > scope.key)",
    )
    parser.add_argument(
        "--ca",
        metavar="FILE",
        type=Path,
        help="CA certificates to trust, PEM (default: the system's)",
    )
    parser.add_argument(
        "--token",
        metavar="FILE",
        type=Path,
        help="file with the token (CAT) that a relay asks for",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, for machines")
    parser.add_argument("--qlog", metavar="DIR", type=Path, help="write qlog files of the connections to DIR")
    parser.add_argument(
        "--datagram-size",
        metavar="OCTETS",
        type=int,
        default=QuicOptions().max_datagram_size,
        help="UDP payload; up to 8900 with jumbo frames, 16000 on loopback (default: %(default)s)",
    )
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more (twice: everything)")


def options_of(arguments: argparse.Namespace) -> QuicOptions:
    """The QUIC options that the command line asks for. Raises UsageError."""
    if arguments.qlog is not None:
        try:
            arguments.qlog.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--qlog {arguments.qlog}: {error.strerror}") from error
    return QuicOptions(qlog_dir=arguments.qlog, max_datagram_size=arguments.datagram_size)


def tokens_of(arguments: argparse.Namespace) -> tuple[Token, ...]:
    """The token of `--token`, to be sent with every request. Raises UsageError."""
    if arguments.token is None:
        return ()
    try:
        value = arguments.token.read_bytes()
    except OSError as error:
        raise UsageError(f"--token {arguments.token}: {error.strerror}") from error
    return (Token(AliasType.USE_VALUE, type=_CAT, value=value),)


_CAT = 1  # security 2.1: Token Type of C4M


class Console:
    """Tells what happens: lines for people, or JSON objects; progress only on a terminal."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._bar: tqdm[Any] | None = None

    def tell(self, event: str, text: str, **details: object) -> None:
        """One event: `text` for people, `event` and `details` for machines."""
        if self.as_json:
            print(json.dumps({"event": event, **details}), flush=True)
        else:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def error(self, text: str, **details: object) -> None:
        """What went wrong, in a sentence, on standard error."""
        self.close()
        print(f"{Path(sys.argv[0]).stem}: {text}" if not self.as_json else text, file=sys.stderr, flush=True)
        if self.as_json:
            print(json.dumps({"event": "error", "text": text, **details}), flush=True)

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


def run(main: Callable[[], Coroutine[Any, Any, int]], console: Console, verbose: int) -> int:
    """Run a command to its exit code; what is raised becomes a sentence."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # aioquic warns of TLS failures, which come as exceptions with a better text.
    logging.getLogger("quic").setLevel(level if verbose else logging.ERROR)
    try:
        return asyncio.run(main())
    except KeyboardInterrupt:
        console.error("interrupted")
        return ExitCode.FAILED
    except (FileFault, MoqtError, KvcsError, OSError) as error:
        console.error(str(error))
        usage = isinstance(error, (UsageError, InvalidValue, InvalidDescriptor))
        return ExitCode.USAGE if usage else ExitCode.FAILED
    finally:
        console.close()


async def until_told(seconds: float | None) -> str:
    """Wait for SIGINT or SIGTERM, or for `seconds` to pass; returns which."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[str] = loop.create_future()

    def tell(name: str) -> None:
        if not told.done():
            told.set_result(name)

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, tell, number.name)
    try:
        async with asyncio.timeout(seconds):
            return await told
    except TimeoutError:
        return f"{seconds:g} s are over"
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def describe_missing(missing: list[Missing]) -> list[str]:
    """One line a layer, with the ranges of its missing blocks: "layer 3: blocks 0-5, 7"."""
    by_layer: dict[int, list[int]] = {}
    for pair in missing:
        by_layer.setdefault(pair.layer, []).append(pair.block)
    lines = []
    for layer, blocks in sorted(by_layer.items()):
        spans: list[list[int]] = []
        for block in sorted(blocks):
            if spans and block == spans[-1][1] + 1:
                spans[-1][1] = block
            else:
                spans.append([block, block])
        text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
        lines.append(f"layer {layer}: block{'s' if len(blocks) > 1 else ''} {text}")
    return lines
