"""`python -m moqt.relay`: a caching relay."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from moqt.client import connect
from moqt.console import OK, USAGE, Console, Signals, host_and_port, is_loopback, run
from moqt.credentials import TokenFile
from moqt.errors import UsageError
from moqt.options import add_flags, load
from moqt.quic.udp import certificates_in
from moqt.relay.config import PREFIX, Settings
from moqt.relay.pages import serve_pages
from moqt.relay.policies import load_policy
from moqt.relay.pressure import keep_within
from moqt.relay.relay import Relay
from moqt.relay.status import Status
from moqt.relay.upstream import Upstream, keep_upstream
from moqt.server import Server, serve
from moqt.session import Session
from moqt.stats import Stats
from moqt.uri import MoqtUri

__all__ = ["main", "parser"]

DESCRIPTION = """\
Relay MOQT tracks: publishers and subscribers connect here, Objects are cached and passed on as they come.

Without --policy everybody who can connect is served, so only a loopback address can be listened on. An
upstream is another relay, which is asked for what no publisher has announced here, with the token of --token
and never with one of a client. Upstreams must form a tree: a loop is not detected.

  python certs/make.py                          # a development CA and a server certificate
  python -m moqt.relay --listen localhost:4433 --cert certs/cert.pem --key certs/key.pem
  python -m moqt.relay --listen localhost:4434 --cert certs/cert.pem --key certs/key.pem \\
      --upstream moqt://localhost:4433 --ca certs/ca.pem

A policy is a TOML file. For C4M tokens about any namespaces, or "kvcs.policy:from_config" for those of KVCS:
  load = "moqt.cat:from_config"                 # MODULE:FUNCTION, which gets the rest of the file
  audience = "relay-1"                          # what tokens call this relay
  [issuers]
  "https://auth.example.com" = ["issuer.pem.pub"]

Each option can be said in three places; the first that says it counts:
  a flag                        --cache-bytes 1000000
  the environment               MOQT_RELAY_CACHE_BYTES=1000000
  the TOML file of --config     cache-bytes = 1000000
                                (MOQT_RELAY_CONFIG may name it, too)
In the latter two a switch is true or false; what may be repeated has blanks between in the environment and is
an array in the file. A name that is no option is an error.
"""

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}

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
        usage="%(prog)s --listen HOST:PORT --cert FILE --key FILE [option ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(result, Settings, layered=True)
    return result


async def relay(settings: Settings, console: Console) -> int:
    """Run until told to go; the exit code."""
    host, port = host_and_port(settings.listen)
    policy = None if settings.policy is None else load_policy(settings.policy)
    if policy is None:
        _check_loopback(host)
    token = TokenFile(settings.token)
    token.read()  # What is wrong with the file is told now.
    for uri in settings.upstream:
        _check_upstream(MoqtUri.parse(uri), host, port)
    if settings.ca is not None:
        certificates_in(settings.ca)  # Else it would be told when an upstream is dialled, again and again.
    options, limits, stats = settings.options, settings.limits, Stats()
    store = None
    if settings.cache_dir is not None:
        from moqt.relay.store import Store  # A relay without a directory does without SQLite: 1.4 MB.

        store = Store(settings.cache_dir, settings.cache_dir_bytes)
    made = Relay(cache_bytes=settings.cache_bytes, store=store, linger=settings.linger)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.close)
        signals = stack.enter_context(Signals())
        server = await stack.enter_async_context(
            serve(
                host,
                port,
                certificate=settings.cert,
                key=settings.key,
                tracks=made.tracks,
                policy=policy,
                options=options,
                limits=limits,
                listening=settings.listening,
                stats=stats,
                served=settings.served,
            )
        )
        status = Status(made, server, stats)
        if settings.metrics_port is not None:
            pages = _pages(settings.metrics_host, settings.metrics_port, status)
            address = await stack.enter_async_context(pages)
            console.tell("watching", f"metrics at http://{address}/metrics", address=address)
        console.tell(
            "listening",
            f"listening on {', '.join(server.addresses)}",
            addresses=server.addresses,
            port=server.port,
        )

        @asynccontextmanager
        async def dial(uri: str) -> AsyncIterator[Session]:
            dialled = connect(
                uri,
                ca=settings.ca,
                tracks=made.upward,
                announce=True,
                tokens=token.read(),
                options=options,
                limits=limits,
                stats=stats,
            )
            async with dialled as session, token.renewing(session):
                yield session

        def tell(what: Upstream) -> None:
            if what.error is None:
                status.connects += 1
                console.tell("connected", f"connected to {what.uri}", uri=what.uri)
            else:
                status.losses += 1
                text = token.advice(what.error) or str(what.error)
                console.tell("lost", f"upstream {what.uri}: {text}", uri=what.uri, error=str(what.error))

        if settings.upstream:
            made.spawn(keep_upstream(made, settings.upstream, dial, tell), "upstream")
        made.spawn(
            keep_within(stats, each=settings.max_buffered, total=settings.max_buffered_total), "pressure"
        )
        reason = await signals.next()
        status.draining = True
        console.tell("draining", f"{reason}: leaving within {settings.drain:g} s", reason=reason)
        await _leave(server, settings.drain, signals)
    console.tell("end", f"{reason}: left", reason=reason)
    return OK


async def _leave(server: Server, seconds: float, signals: Signals) -> None:
    """Let what is in flight arrive, for so many seconds, or until a second signal comes."""
    leaving = asyncio.create_task(server.leave(deadline=seconds))
    again = asyncio.create_task(signals.next())
    await asyncio.wait((leaving, again), return_when=asyncio.FIRST_COMPLETED)
    for task in (leaving, again):
        task.cancel()
    if leaving.done():
        leaving.result()


def _pages(host: str, port: int, status: Status) -> AbstractAsyncContextManager[str]:
    """The pages for those who watch, at the address that it gives. Raises UsageError, OSError."""
    try:
        from moqt.relay.metrics import Metrics
    except ModuleNotFoundError as error:
        raise UsageError("--metrics-port needs prometheus_client: pip install prometheus-client") from error
    pages = {"/metrics": Metrics(status).page, "/status": status.page, "/healthz": status.health}
    return serve_pages(host, port, pages)


def _check_loopback(host: str) -> None:
    """Raises UsageError for what is no loopback address: without a policy the relay serves anyone (security
    5).
    """
    if not is_loopback(host):
        raise UsageError(
            f"without a policy this relay serves everybody who can connect, so it does not listen on {host}: "
            "give it a --policy, or take localhost, 127.0.0.1 or [::1]"
        )


def _check_upstream(uri: MoqtUri, host: str, port: int) -> None:
    """Raises UsageError for an upstream that is this relay itself, as far as its name tells: a loop is not
    noticed later.
    """
    here = _LOOPBACK if host in {"::", "0.0.0.0", *_LOOPBACK} else {host}
    if uri.port == port and uri.host in {host, *here}:
        raise UsageError(f"--upstream {uri.authority} is where this relay listens itself: name another one")


def main() -> int:
    """The command."""
    flags = vars(parser().parse_args())
    try:
        settings = load(Settings, flags, os.environ, PREFIX)
    except UsageError as error:
        Console(as_json=flags.get("json", False)).error(str(error))
        return USAGE
    console = Console(as_json=settings.json)
    return run(lambda: relay(settings, console), console, settings.verbose)


if __name__ == "__main__":
    sys.exit(main())
