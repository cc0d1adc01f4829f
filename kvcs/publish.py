"""`python -m kvcs.publish`: publish the KV cache in a file."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import moqt
from kvcs import files
from kvcs.console import (
    EXIT_CODES,
    Console,
    ExitCode,
    add_common,
    counted,
    not_negative,
    positive,
    run,
    token_of,
)
from kvcs.identity import ScopeKey
from kvcs.publisher import Publication, Publisher
from moqt.console import Signals, host_and_port, is_loopback, options_of
from moqt.credentials import TokenFile
from moqt.errors import DoneCode, MoqtError, UsageError
from moqt.names import TrackNamespace

logger = logging.getLogger("kvcs.publish")

DESCRIPTION = """\
Publish the KV cache in a file as tracks over MOQT, layer by layer, and serve it until told to go.

The file is .safetensors with the tensors layers.{i}.k and layers.{i}.v of shape [tokens, kv_heads, head_dim],
an integer tensor "tokens", and the Compatibility Descriptor as JSON under "descriptor" in the metadata; .npz
is read too where it keeps the dtype. Subscribers find the cache from the tokens and the scope key alone.
When it is told to go, it gives them 5 s to take what they have asked for, and says whether they have.

  python certs/make.py                          # a development CA and a server certificate
  openssl rand -hex 32 > scope.key
  python -m kvcs.publish cache.safetensors --listen localhost:4433 \\
      --cert certs/cert.pem --key certs/key.pem --scope-key scope.key
"""

LEAVING = 5.0
"""Seconds for subscribers to take what was sent before the end."""

BACK_OFF = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to reach a relay again; the last is repeated."""

STEADY = 10.0
"""Seconds that a session must last, or else the next attempt counts as one more."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m kvcs.publish",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("cache", metavar="CACHE", type=Path, help="the cache file, .safetensors or .npz")
    where = result.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--listen", metavar="HOST:PORT", help="wait for subscribers here ([::]:PORT: everywhere)"
    )
    where.add_argument("--connect", metavar="URI", help="publish to the relay at this moqt:// address")
    result.add_argument("--cert", metavar="FILE", type=Path, help="with --listen: the certificate chain, PEM")
    result.add_argument("--key", metavar="FILE", type=Path, help="with --listen: its private key, PEM")
    result.add_argument(
        "--codec",
        metavar="NAME",
        action="append",
        help='offer "k" and "v" tracks in this codec; may be repeated (default: raw)',
    )
    result.add_argument(
        "--kv",
        metavar="CODEC",
        action="append",
        help='offer a "kv" track in this codec too; may be repeated',
    )
    result.add_argument(
        "--layer-interval",
        metavar="SECONDS",
        type=not_negative,
        default=0.0,
        help="wait this long before each layer, as a prefill would (default: publish at once)",
    )
    result.add_argument("--retention", metavar="SECONDS", type=positive, help="how long relays may keep it")
    result.add_argument(
        "--serve-for",
        metavar="SECONDS",
        type=not_negative,
        help="leave then (default: at SIGINT or SIGTERM)",
    )
    result.add_argument(
        "--descriptor",
        metavar="FILE",
        type=Path,
        help="its Compatibility Descriptor, if it holds none",
    )
    add_common(result)
    return result


async def publish(arguments: argparse.Namespace, token: TokenFile, console: Console) -> int:
    """Publish the file; the exit code."""
    descriptor = files.read_descriptor(arguments.descriptor) if arguments.descriptor else None
    cache = files.read(arguments.cache, descriptor=descriptor)
    if sorted(cache.layers) != list(range(cache.descriptor.layers)):
        raise UsageError(
            f"{arguments.cache} holds {len(cache.layers)} of {cache.descriptor.layers} layers; "
            "only a whole cache can be published"
        )
    publisher = Publisher(
        cache.descriptor,
        ScopeKey.from_file(arguments.scope_key),
        codecs=arguments.codec or ["raw"],
        joint_codecs=arguments.kv or [],
        retention=arguments.retention,
    )
    denied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        endpoint = (
            _listening(arguments, publisher, console)
            if arguments.listen
            else _connected(arguments, publisher, console, token, denied)
        )
        leave = await stack.enter_async_context(endpoint)
        publication = publisher.publish(cache.tokens)
        segment = publication.segment
        layers = cache.descriptor.layers
        with Signals() as signals:  # Not while leaving: a second one ends it at once.
            console.tell(
                "publication",
                f"publication {publication.name.publication_id.hex()}: {counted(segment.blocks, 'block')} of "
                f"{counted(cache.descriptor.block_tokens, 'token')}, {counted(layers, 'layer')}"
                + (
                    f"; left out at the end: {counted(segment.tail, 'token')}, too few for a block"
                    if segment.tail
                    else ""
                ),
                publication_id=publication.name.publication_id.hex(),
                blocks=segment.blocks,
                layers=layers,
                tail_tokens=segment.tail,
            )
            work = asyncio.create_task(_put_layers(arguments, cache, publication, console))
            told = asyncio.create_task(signals.next(arguments.serve_for))
            try:
                await asyncio.wait((work, told, denied), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
                await asyncio.wait((told, denied), return_when=asyncio.FIRST_COMPLETED)
                if denied.done():
                    denied.result()
                reason = await told
            finally:
                denied.cancel()
                for task in (work, told):
                    task.cancel()
                await asyncio.gather(work, told, return_exceptions=True)
        publication.close()
        delivered = await leave()
        console.tell(
            "end",
            f"{reason}: left, "
            + (
                "all was published"
                if segment.complete
                else f"{segment.next_layer} of {layers} layers were published"
            )
            + ("" if delivered else f", and not everybody had taken it within {LEAVING:g} s"),
            reason=reason,
            delivered=delivered,
            complete=segment.complete,
            published=segment.next_layer,
        )
    return ExitCode.OK


async def _put_layers(
    arguments: argparse.Namespace, cache: files.CacheFile, publication: Publication, console: Console
) -> None:
    started = time.monotonic()
    console.progress(len(cache.layers), "published")
    for layer, (k, v) in cache.layers.items():
        if arguments.layer_interval:
            await asyncio.sleep(arguments.layer_interval)
        await publication.segment.put_layer(layer, k, v if v.shape[2] else None)
        console.step(f"layer {layer}")
    console.close()
    seconds = time.monotonic() - started
    console.tell(
        "complete",
        f"published whole ({counted(len(cache.layers), 'layer')}) after {seconds:.1f} s; "
        "serving until told to go",
        seconds=round(seconds, 3),
    )


@asynccontextmanager
async def _listening(
    arguments: argparse.Namespace, publisher: Publisher, console: Console
) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    if arguments.cert is None or arguments.key is None:
        raise UsageError("--listen needs --cert and --key: python certs/make.py makes a pair for development")
    host, port = host_and_port(arguments.listen)
    if not is_loopback(host):
        logger.warning(
            "listening on %s: whoever can connect and knows the names of the scope gets the cache; "
            "to restrict it, publish with --connect to a relay that has a --policy",
            host,
        )
    async with moqt.serve(
        host,
        port,
        certificate=arguments.cert,
        key=arguments.key,
        tracks=publisher.tracks,
        options=options_of(arguments),
    ) as server:
        console.tell(
            "listening",
            f"listening on {', '.join(server.addresses)}",
            addresses=server.addresses,
            port=server.port,
        )
        yield lambda: server.finish(DoneCode.GOING_AWAY, deadline=LEAVING)


@asynccontextmanager
async def _connected(
    arguments: argparse.Namespace,
    publisher: Publisher,
    console: Console,
    token: TokenFile,
    denied: asyncio.Future[None],
) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    """A session with a relay, dialled again whenever it is lost.

    `denied` fails when the relay does not let us publish. Once it has, that is no end: then it is told, and
    tried again with the token that the file holds by then.
    """
    current: list[moqt.Session] = []
    up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    accepted = False

    def check(error: Exception) -> None:
        if not accepted and not denied.done() and token.advice(error) is not None:
            denied.set_exception(error)

    def announced(_namespace: TrackNamespace, error: Exception | None) -> None:
        nonlocal accepted
        if error is None:
            accepted = True
            console.tell("announced", f"{arguments.connect} takes the publication")
        else:
            check(error)
            if denied.done():  # The command ends by it, and says it then.
                return
            advice = token.advice(error)
            console.tell("refused", advice or f"the publication is not announced: {error}", error=str(error))

    async def keep() -> None:
        attempt = 0
        while True:
            try:
                async with (
                    moqt.connect(
                        arguments.connect,
                        ca=arguments.ca,
                        tracks=publisher.tracks,
                        announce=True,
                        tokens=token.read(),
                        options=options_of(arguments),
                    ) as session,
                    token.renewing(session),
                ):
                    session.on_announced = announced
                    current[:] = [session]
                    began = asyncio.get_running_loop().time()
                    console.tell("connected", f"connected to {arguments.connect}", uri=arguments.connect)
                    if not up.done():
                        up.set_result(None)
                    error: MoqtError = await session.wait_closed()
                    if asyncio.get_running_loop().time() >= began + STEADY:
                        attempt = 0
            except MoqtError as failure:
                if not up.done():
                    up.set_exception(failure)
                    return
                error = failure
            current.clear()
            check(error)
            pause = BACK_OFF[min(attempt, len(BACK_OFF) - 1)]
            attempt += 1
            text = token.advice(error) or str(error)
            console.tell("lost", f"{text}; trying again in {pause:g} s", error=str(error), pause=pause)
            await asyncio.sleep(pause)

    async def leave() -> bool:
        for session in current:
            return await session.finish(DoneCode.GOING_AWAY, deadline=LEAVING)
        return False  # The relay is away.

    keeper = asyncio.create_task(keep())
    try:
        await up
        yield leave
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


def main() -> int:
    """The command."""
    arguments = parser().parse_args()
    console = Console(as_json=arguments.json)
    token = token_of(arguments)
    return run(lambda: publish(arguments, token, console), console, arguments.verbose, token)


if __name__ == "__main__":
    sys.exit(main())
