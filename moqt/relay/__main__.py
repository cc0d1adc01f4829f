"""`python -m moqt.relay`: a caching relay."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from moqt.client import connect
from moqt.console import OK, Console, add_connection, host_and_port, options_of, run, until_told
from moqt.errors import DoneCode, MoqtError, UsageError
from moqt.relay.relay import CACHE_BYTES, Relay
from moqt.relay.upstream import Upstream, keep_upstream
from moqt.server import serve
from moqt.session import Session
from moqt.uri import MoqtUri

__all__ = ["main", "parser"]

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
    add_connection(result)
    return result


async def relay(arguments: argparse.Namespace, console: Console) -> int:
    """Run until told to go; the exit code."""
    host, port = _loopback_and_port(arguments.listen)
    if arguments.cache_bytes < 0 or arguments.linger < 0 or arguments.drain < 0:
        raise UsageError("--cache-bytes, --linger and --drain can't be negative")
    for uri in arguments.upstream:
        MoqtUri.parse(uri)
    options = options_of(arguments)
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
            reason = await until_told()
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
    return OK


def _loopback_and_port(text: str) -> tuple[str, int]:
    """Raises UsageError, also for what is no loopback address: without a policy the relay serves anyone
    (security 5).
    """
    host, port = host_and_port(text)
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UsageError(
            f"this relay serves everybody who can connect, so it does not listen on {host}: "
            "take localhost, 127.0.0.1 or [::1]"
        )
    return host, port


def main() -> int:
    """The command."""
    arguments = parser().parse_args()
    console = Console(as_json=arguments.json)
    return run(lambda: relay(arguments, console), console, arguments.verbose)


if __name__ == "__main__":
    sys.exit(main())
