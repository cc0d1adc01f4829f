"""What commands have in common: options of connections, events as lines or JSON objects, and how they end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moqt.errors import MoqtError, UsageError
from moqt.names import printable
from moqt.options import add_flags, option
from moqt.quic.api import QuicOptions

__all__ = [
    "FAILED",
    "OK",
    "USAGE",
    "Connecting",
    "Console",
    "Signals",
    "add_connection",
    "host_and_port",
    "is_loopback",
    "options_of",
    "run",
]

logger = logging.getLogger(__name__)

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Connecting:
    """The options of every command that talks to a peer."""

    ca: Path | None = option(
        None,
        "FILE",
        "CA certificates to trust, PEM (default: the public ones)",
        section="connections and output",
    )
    token: Path | None = option(
        None, "FILE", "the token (C4M) to show the peers that are dialled; looked at again while they last"
    )
    json: bool = option(False, "", "print one JSON object a line, for machines")
    qlog: Path | None = option(None, "DIR", "write qlog files of the connections to DIR")
    datagram_size: int = option(
        QuicOptions().max_datagram_size,
        "OCTETS",
        "UDP payload; up to 8900 with jumbo frames, 16000 on loopback",
        least=1200,
        most=16000,
    )
    verbose: int = option(0, "N", "log more (twice: everything)", least=0, flag="v")


def add_connection(parser: argparse.ArgumentParser) -> None:
    """The options of every command that talks to a peer."""
    add_flags(parser, Connecting)


def options_of(arguments: argparse.Namespace | Connecting) -> QuicOptions:
    """The QUIC options that the command line asks for. Raises UsageError."""
    if arguments.qlog is not None:
        try:
            arguments.qlog.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--qlog {arguments.qlog}: {error.strerror}") from error
    return QuicOptions(qlog_dir=arguments.qlog, max_datagram_size=arguments.datagram_size)


def host_and_port(text: str, source: str = "--listen") -> tuple[str, int]:
    """What `source` says to listen on; an IPv6 address comes without its brackets. Raises UsageError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f'{source}: expected HOST:PORT, such as localhost:4433 or [::1]:4433, not "{printable(text)}"'
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether `host`, of `--listen`, can be reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Console:
    """Tells what happens: lines for people, or JSON objects for machines."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def tell(self, event: str, text: str, **details: object) -> None:
        """One event: `text` for people, `event` and `details` for machines."""
        if self.as_json:
            self._print(json.dumps({"event": event, **details}))
        else:
            self.line(text)

    def line(self, text: str) -> None:
        """Print a line for people."""
        self._print(text)

    def error(self, text: str, *, lines: Sequence[str] = (), **details: object) -> None:
        """What went wrong, in a sentence, on standard error, and `lines` that tell people more."""
        self.close()
        print(
            "\n".join((text if self.as_json else f"{_command()}: {text}", *lines)),
            file=sys.stderr,
            flush=True,
        )
        if self.as_json:
            self._print(json.dumps({"event": "error", "text": text, **details}))

    def close(self) -> None:
        """Leave nothing on the terminal that changes."""

    def _print(self, text: str) -> None:
        with self._output():
            print(text, flush=True)

    @contextmanager
    def _output(self) -> Iterator[None]:
        """Around what goes to standard output. When nobody reads that any more, or it has no room, the work
        goes on: what was received is not lost for it.
        """
        try:
            yield
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
            logger.warning("standard output: %s: nothing more is told there", error.strerror)


def _command() -> str:
    path = Path(sys.argv[0])
    return path.parent.name if path.stem == "__main__" else path.stem


def run(
    main: Callable[[], Coroutine[Any, Any, int]],
    console: Console,
    verbose: int,
    *,
    failures: tuple[type[Exception], ...] = (),
    usage: tuple[type[Exception], ...] = (),
) -> int:
    """Run a command to its exit code. What moqt and the system raise, and `failures`, becomes a sentence and
    FAILED; UsageError and `usage` become USAGE.
    """
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    # aioquic warns of TLS failures, which come as exceptions with a better text, and at INFO has a line for
    # each stream that is reset, which every subscriber does when it has enough.
    quiet = (logging.ERROR, logging.WARNING, logging.DEBUG)[min(verbose, 2)]
    logging.getLogger("quic").setLevel(quiet)
    expected: tuple[type[Exception], ...] = (MoqtError, OSError, *failures)
    # What is imported stays: a full collection that looks at it takes 5 ms, just when layer 0 is on its way.
    gc.freeze()
    try:
        return asyncio.run(main())
    except KeyboardInterrupt:
        console.error("interrupted")
        return FAILED
    except expected as error:
        console.error(_sentence(error))
        return USAGE if isinstance(error, (UsageError, *usage)) else FAILED
    finally:
        console.close()


class _Formatter(logging.Formatter):
    """Escapes what can't be printed: aioquic logs what peers say as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


class Signals:
    """SIGINT and SIGTERM, which don't end the process while the block runs: `next` tells of each."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._came: asyncio.Queue[str] = asyncio.Queue()

    def __enter__(self) -> Signals:
        for number in self._NUMBERS:
            asyncio.get_running_loop().add_signal_handler(number, self._came.put_nowait, number.name)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._NUMBERS:
            asyncio.get_running_loop().remove_signal_handler(number)

    async def next(self, seconds: float | None = None) -> str:
        """The name of the next one; what it says when `seconds` are over first."""
        try:
            async with asyncio.timeout(seconds):
                return await self._came.get()
        except TimeoutError:
            return f"{seconds:g} s are over"
