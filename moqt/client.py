"""Dial a MOQT session: `async with moqt.connect("moqt://relay.example:4433/path") as session`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from moqt.authorization import Policy
from moqt.errors import DeadlineExceeded
from moqt.limits import Limits
from moqt.quic.api import QuicOptions
from moqt.quic.udp import dial
from moqt.session import Session
from moqt.stats import Stats
from moqt.tracks import Tracks
from moqt.uri import MoqtUri
from moqt.wire import DRAFT_22, Token

__all__ = ["connect"]


@asynccontextmanager
async def connect(
    uri: str,
    *,
    ca: str | Path | None = None,
    tracks: Tracks | None = None,
    announce: bool | None = None,
    tokens: Sequence[Token] = (),
    policy: Policy | None = None,
    options: QuicOptions | None = None,
    limits: Limits | None = None,
    stats: Stats | None = None,
    deadline: float = 10.0,
) -> AsyncIterator[Session]:
    """A session with the server at `uri`, closed at the end of the block.

    `ca` is a PEM file of the certificate authorities to trust (None: the system's). Every address of the name
    is tried, within `deadline` seconds in all. The rest is as for `Session`. Raises UsageError for a bad URI,
    ConnectionLost when no address answers or TLS fails, SessionClosed, DeadlineExceeded.
    """
    parsed = MoqtUri.parse(uri)
    started = asyncio.get_running_loop().time()
    connection = await dial(
        parsed.host,
        parsed.port,
        alpn=[DRAFT_22.alpn],
        options=options or QuicOptions(),
        ca=ca,
        server_name=parsed.host,
        deadline=deadline,
    )
    session = Session(
        connection,
        tracks=tracks,
        announce=announce,
        tokens=tokens,
        policy=policy,
        limits=limits,
        stats=stats,
        uri=parsed,
    )
    try:
        async with asyncio.timeout(deadline - (asyncio.get_running_loop().time() - started)) as scope:
            await session.start()
    except TimeoutError:
        await session.close()
        if scope.expired():
            raise DeadlineExceeded(f"the session with {uri}", deadline) from None
        raise
    try:
        yield session
    finally:
        await session.close()
