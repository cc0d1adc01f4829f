"""`python -m moqt.relay`: a caching relay."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import logging
import signal
import sys
from contextlib import AbstractAsyncContextManager
from enum import IntEnum
from pathlib import Path

from moqt.client import connect
from moqt.errors import DoneCode, MoqtError, UsageError
from moqt.quic.api import QuicOptions
from moqt.relay.relay import CACHE_BYTES, Relay
from moqt.relay.upstream import Upstream, keep_upstream
from moqt.server import serve
from moqt.session import Session
from moqt.uri import MoqtUri

__all__ = ["ExitCode", "main", "parser"]

DESCRIPTION = """\
Relay MOQT tracks: publishers and subscribers connect here, Objects are cached and passed on as they come.

Everybody who can connect is served, so only a loopback address can be listened on. An upstream is another
relay, which is asked for what no publisher has announced here.

  python certs/make.py                          # a development CA and a server certificate
  python -m moqt.relay --listen localhost:4433 --cert certs/cert.pem --key certs/key.pem
  python -m moqt.relay --listen localhost:4434 --cert certs/cert.pem --key certs/key.pem \\
      --upstream moqt://localhost:4433 --ca certs/ca.pem
"""

EPILOG = """\
exit codes:
  0  all went well: told to go, and went
  1  the network or a file failed; the message says what
  2  bad usage
"""


class ExitCode(IntEnum):
    """How the command ends."""

    OK = 0
    FAILED = 1
    USAGE = 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m moqt.relay",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--listen", metavar="HOST:PORT", required=True, help="wait for sessions here")
    result.add_argument("--cert", metavar="FILE", type=Path, required=True, help="the certificate chain, PEM")
    result.add_argument("--key", metavar="FILE", type=Path, required=True, help="its private key, PEM")
    result.add_argument(
        "--upstream",
        metavar="URI",
        action="append",
        default=[],
        help="a relay to ask for what is not here; may be repeated: they are tried in order",
    )
    result.add_argument(
        "--ca",
        metavar="FILE",
        type=Path,
        help="CA certificates to trust upstreams by, PEM (default: the system's)",
    )
    result.add_argument(
        "--cache-bytes",
        metavar="N",
        type=int,
        default=CACHE_BYTES,
        help="most bytes of Objects to keep (default: %(default)s)",
    )
    result.add_argument(
        "--linger",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help="keep an upstream subscription so long when its last subscriber has left (default: %(default)g)",
    )
    result.add_argument(
        "--drain",
        metavar="SECONDS",
        type=float,
        default=5.0,
        help="give sessions so long to take what is in flight when told to go (default: %(default)g)",
    )
    result.add_argument("--json", action="store_true", help="print one JSON object a line, for machines")
    result.add_argument("--qlog", metavar="DIR", type=Path, help="write qlog files of the connections to DIR")
    result.add_argument(
        "--datagram-size",
        metavar="OCTETS",
        type=int,
        default=QuicOptions().max_datagram_size,
        help="UDP payload; up to 8900 with jumbo frames, 16000 on loopback (default: %(default)s)",
    )
    result.add_argument("-v", "--verbose", action="count", default=0, help="log more (twice: everything)")
    return result


class _Console:
    """One line, or one JSON object, for each event."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def tell(self, event: str, text: str, **details: object) -> None:
        print(json.dumps({"event": event, **details}) if self._as_json else text, flush=True)

    def error(self, text: str) -> None:
        print(text if self._as_json else f"relay: {text}", file=sys.stderr, flush=True)
        if self._as_json:
            print(json.dumps({"event": "error", "text": text}), flush=True)


async def relay(arguments: argparse.Namespace, console: _Console) -> int:
    """Run until told to go; the exit code."""
    host, port = _host_and_port(arguments.listen)
    if arguments.cache_bytes < 0 or arguments.linger < 0 or arguments.drain < 0:
        raise UsageError("--cache-bytes, --linger and --drain can't be negative")
    for uri in arguments.upstream:
        MoqtUri.parse(uri)
    if arguments.qlog is not None:
        arguments.qlog.mkdir(parents=True, exist_ok=True)
    options = QuicOptions(qlog_dir=arguments.qlog, max_datagram_size=arguments.datagram_size)
    made = Relay(cache_bytes=arguments.cache_bytes, linger=arguments.linger)

    def dial(uri: str) -> AbstractAsyncContextManager[Session]:
        return connect(uri, ca=arguments.ca, tracks=made.upward, announce=True, options=options)

    def tell(what: Upstream) -> None:
        event, text = (
            ("lost", f"upstream {what.uri}: {what.error}")
            if what.error
            else (
                "connected",
                f"connected to {what.uri}",
            )
        )
        console.tell(event, text, uri=what.uri, error=what.error)

    try:
        async with serve(
            host, port, certificate=arguments.cert, key=arguments.key, tracks=made.tracks, options=options
        ) as server:
            console.tell(
                "listening",
                f"listening on {', '.join(server.addresses)}",
                addresses=server.addresses,
                port=server.port,
            )
            if arguments.upstream:
                made.spawn(keep_upstream(made, arguments.upstream, dial, tell), "upstream")
            reason = await _told()
            # moqt 16: nobody asks for more; what is in flight arrives, and then each one is told to go.
            for session in list(server.sessions):
                try:
                    await session.goaway(timeout=arguments.drain)
                except MoqtError as error:
                    logging.getLogger(__name__).info("%s: %s", session.connection.id, error)
            await server.finish(DoneCode.GOING_AWAY, deadline=arguments.drain)
            console.tell("end", f"{reason}: left", reason=reason)
    finally:
        await made.close()
    return ExitCode.OK


async def _told() -> str:
    """Wait for SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[str] = loop.create_future()

    def tell(name: str) -> None:
        if not told.done():
            told.set_result(name)

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, tell, number.name)
    try:
        return await told
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _host_and_port(text: str) -> tuple[str, int]:
    """Raises UsageError, also for what is no loopback address: without a policy the relay serves anyone
    (security 5).
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f'--listen takes HOST:PORT, such as localhost:4433 or [::1]:4433, not "{text}"')
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UsageError(
            f"this relay serves everybody who can connect, so it does not listen on {host}: "
            "take localhost, 127.0.0.1 or [::1]"
        )
    return host, int(port)


def main() -> int:
    """The command."""
    arguments = parser().parse_args()
    console = _Console(as_json=arguments.json)
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(arguments.verbose, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # aioquic warns of TLS failures, which come as exceptions with a better text.
    logging.getLogger("quic").setLevel(level if arguments.verbose else logging.ERROR)
    try:
        return asyncio.run(relay(arguments, console))
    except KeyboardInterrupt:
        console.error("interrupted")
        return ExitCode.FAILED
    except (MoqtError, OSError) as error:
        console.error(str(error))
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
