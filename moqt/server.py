"""Serve MOQT sessions: `async with moqt.serve("::", 4433, certificate=..., key=...) as server`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from moqt.authorization import Policy
from moqt.errors import DoneCode, MoqtError, SessionCode
from moqt.limits import Limits
from moqt.quic.api import Connection, QuicOptions
from moqt.quic.udp import Listener, ListenLimits, listen
from moqt.session import Session
from moqt.stats import Stats
from moqt.tracks import Tracks
from moqt.uri import Served
from moqt.wire import DRAFT_22

__all__ = ["Server", "serve"]

logger = logging.getLogger(__name__)

ENDING = 1.0
"""Seconds at the end of the time to leave, in which peers that have not left are told that it is over."""

SessionHandler = Callable[[Session], Awaitable[None]]


class Server:
    """The sessions of a listening endpoint."""

    def __init__(
        self,
        tracks: Tracks | None,
        handler: SessionHandler | None,
        limits: Limits | None,
        announce: bool,
        policy: Policy | None,
        stats: Stats | None = None,
        served: Served | None = None,
    ) -> None:
        self.sessions: set[Session] = set()
        self._tracks = tracks
        self._handler = handler
        self._limits = limits
        self._announce = announce
        self._policy = policy
        self._stats = stats
        self._served = served
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The UDP port."""
        assert self._listener is not None
        return self._listener.port

    @property
    def addresses(self) -> list[str]:
        """Where it listens, as text."""
        assert self._listener is not None
        return list(self._listener.addresses)

    @property
    def connections_refused(self) -> int:
        """First packets of clients that a limit left without an answer."""
        assert self._listener is not None
        return self._listener.refused

    async def finish(self, code: DoneCode, *, deadline: float) -> bool:
        """End all subscriptions of all sessions with PUBLISH_DONE `code`; `deadline` seconds at most. Whether
        all have taken all by then.
        """
        return all(
            await asyncio.gather(
                *(session.finish(code, deadline=deadline) for session in list(self.sessions))
            )
        )

    async def leave(self, *, deadline: float) -> None:
        """Take no more sessions and requests, ask the peers to leave, and go on serving what they have open,
        until they have left it (moqt 16). What is left shortly before `deadline` seconds are over ends with
        PUBLISH_DONE GOING_AWAY; sessions that have not taken all by then are closed with GOAWAY_TIMEOUT.
        """
        if self._listener is not None:
            self._listener.refuse()
        await asyncio.gather(*(_leave(session, deadline) for session in list(self.sessions)))

    def accept(self, connection: Connection) -> None:
        """Take over a new connection."""
        task = asyncio.create_task(self._run(connection), name=f"{connection.id} session")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, connection: Connection) -> None:
        session = Session(
            connection,
            tracks=self._tracks,
            announce=self._announce,
            limits=self._limits,
            policy=self._policy,
            stats=self._stats,
            served=self._served,
        )
        try:
            async with session:
                self.sessions.add(session)
                logger.info("%s: session with %s", connection.id, connection.peer)
                await self._handle(session)
                error = await session.wait_closed()
                logger.info("%s: the session with %s is over: %s", connection.id, connection.peer, error)
        except MoqtError as error:
            logger.info("%s: the session with %s failed: %s", connection.id, connection.peer, error)
        finally:
            self.sessions.discard(session)

    async def _handle(self, session: Session) -> None:
        if self._handler is None:
            return
        try:
            await self._handler(session)
        except MoqtError:
            raise
        except Exception:
            logger.exception("%s: the handler of the session failed", session.connection.id)
            await session.close(SessionCode.INTERNAL_ERROR, "internal error")

    async def close(self) -> None:
        """End all sessions and stop listening."""
        await asyncio.gather(*(session.close() for session in list(self.sessions)))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()


async def _leave(session: Session, deadline: float) -> None:
    try:
        async with asyncio.timeout(deadline):
            await session.goaway(timeout=deadline)
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline - min(ENDING, deadline / 2)):
                    await session.publishing.idle()
            whole = await session.finish(DoneCode.GOING_AWAY, deadline=deadline)
    except TimeoutError:
        whole = False
    except MoqtError as error:
        logger.info("%s: the session did not end in order: %s", session.connection.id, error)
        return
    if not whole:
        session.abort(SessionCode.GOAWAY_TIMEOUT, "requests were left after GOAWAY")


@asynccontextmanager
async def serve(
    host: str,
    port: int,
    *,
    certificate: str | Path,
    key: str | Path,
    tracks: Tracks | None = None,
    on_session: SessionHandler | None = None,
    announce: bool = False,
    policy: Policy | None = None,
    options: QuicOptions | None = None,
    limits: Limits | None = None,
    listening: ListenLimits | None = None,
    stats: Stats | None = None,
    served: Served | None = None,
) -> AsyncIterator[Server]:
    """Listen on `host` ("::" takes IPv4 too) and `port` (0: any) until the end of the block; all sessions
    offer `tracks`, to whom `policy` allows it (default: to everybody). `limits` are for each session,
    `listening` for all connections; what is counted goes into `stats`. A client that asks
    for another authority or path than is `served` (default: any) is turned away.

    `certificate` and `key` are PEM files. `on_session` runs for each session once SETUP is done; the session
    goes on after it returns, until it is closed. Raises UsageError for files that can't be used, OSError for
    an address that can't be bound.
    """
    server = Server(tracks, on_session, limits, announce, policy, stats, served)
    server._listener = await listen(
        host,
        port,
        certificate=certificate,
        key=key,
        alpn=[DRAFT_22.alpn],
        options=options or QuicOptions(),
        on_connection=server.accept,
        limits=listening,
    )
    try:
        yield server
    finally:
        await server.close()
