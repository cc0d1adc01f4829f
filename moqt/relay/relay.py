"""A relay: sessions of publishers and subscribers over one set of cached Tracks (moqt 15)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from moqt.errors import MoqtError, RequestCode, RequestRejected
from moqt.names import FullTrackName, TrackNamespace, format_namespace, is_prefix
from moqt.relay.cache import Cache, CachedTrack
from moqt.relay.feed import Feed
from moqt.session import Session
from moqt.track import Track, Tracks

__all__ = ["Relay"]

logger = logging.getLogger(__name__)

CACHE_BYTES = 2 << 30
READ_AHEAD = 16 << 20
"""Bytes that a fetch may bring before somebody has sent what it brought."""

OVERLAP_PAUSE = 0.5
"""Seconds until a prefix that overlapped with one just given up is asked for again."""


class _Face(Tracks):
    """The relay as one kind of session sees it: `upward` are the sessions with upstreams, to which only what
    was announced from below is offered.
    """

    def __init__(self, relay: Relay, *, upward: bool) -> None:
        super().__init__()
        self._relay = relay
        self._upward = upward

    async def find(self, name: FullTrackName, asker: object, *, rendezvous: float = 0.0) -> Track:
        return await self._relay.find(name, asker, rendezvous, upward=self._upward)

    def offered(self, peer: object, namespace: TrackNamespace, present: bool) -> None:
        assert isinstance(peer, Session)
        self._relay.offered(peer, namespace, present, upward=self._upward)

    def wanted(self, asker: object, prefix: TrackNamespace, present: bool) -> None:
        if not self._upward:
            self._relay.wanted(prefix, present)


class Relay:
    """Routes, aggregates and caches. `tracks` is for the sessions that come to us, `upward` for those that we
    have dialled.

    `cache_bytes` bounds what is kept. `linger` is for how many seconds an upstream subscription is kept when
    the last subscriber has left, `grace` how long subscribers are kept when the last publisher was lost,
    `upstream_wait` how long a request waits for an upstream that is being dialled, `stall` how long a fetch
    may bring nothing.
    """

    def __init__(
        self,
        *,
        cache_bytes: int = CACHE_BYTES,
        linger: float = 10.0,
        grace: float = 5.0,
        upstream_wait: float = 3.0,
        stall: float = 10.0,
    ) -> None:
        self.cache = Cache(cache_bytes)
        self.linger = linger
        self.grace = grace
        self.upstream_wait = upstream_wait
        self.stall = stall
        self.read_ahead = min(READ_AHEAD, cache_bytes // 16)
        self.tracks: Tracks = _Face(self, upward=False)
        self.upward: Tracks = _Face(self, upward=True)
        self.feeds: dict[FullTrackName, Feed] = {}
        self.closed = False
        self.reconnecting = False
        """Whether an upstream is configured and is not there now."""
        self._routes: dict[TrackNamespace, dict[Session, None]] = {}
        self._known: dict[TrackNamespace, Counter[object]] = {}
        """Who has told of each namespace that is offered to those who ask."""
        self._upstreams: dict[Session, asyncio.Task[None]] = {}
        self._prefixes: Counter[TrackNamespace] = Counter()
        self._prefixes_changed: set[asyncio.Event] = set()
        self._fetching: dict[Session, asyncio.Semaphore] = {}
        self._arrivals: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End all that runs here; the sessions are not the relay's."""
        self.closed = True
        tasks: list[asyncio.Task[None]] = [*self._tasks, *self._upstreams.values()]
        for feed in self.feeds.values():
            tasks += feed.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def drop(self, feed: Feed) -> None:
        """A Track is no longer known."""
        if self.feeds.get(feed.name) is feed:
            del self.feeds[feed.name]

    # Upstreams.

    @asynccontextmanager
    async def upstream(self, session: Session) -> AsyncIterator[None]:
        """Use `session`, which offers `upward`, as an upstream while the block runs."""
        self._upstreams[session] = asyncio.create_task(
            self._follow_prefixes(session), name=f"{session.connection.id} discovery"
        )
        self.reconnecting = False
        self._arrived(session, None)
        try:
            yield
        finally:
            task = self._upstreams.pop(session)
            self.reconnecting = not self._upstreams
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def is_upstream(self, session: Session) -> bool:
        """Whether it is one of ours."""
        return session in self._upstreams

    # Routing.

    async def find(
        self, name: FullTrackName, asker: object, rendezvous: float, *, upward: bool
    ) -> CachedTrack:
        """The Track that the session `asker` wants. Raises RequestRefused."""
        feed = self.feeds.get(name)
        if feed is None:
            feed = self.feeds[name] = Feed(self, name)
        return await feed.establish(asker, rendezvous, upward=upward)

    def candidates(self, name: FullTrackName, asker: object, *, upward: bool) -> list[list[Session]]:
        """Who may have a Track: those who announced its namespace, the longest prefix first, and then the
        upstreams. Never who asks, and never an upstream for what an upstream asks.
        """
        below: dict[Session, None] = {}
        for length in range(len(name.namespace), -1, -1):
            below.update(self._routes.get(name.namespace[:length], {}))
        tiers = [list(below), [] if upward else list(self._upstreams)]
        return [
            [
                session
                for session in tier
                if session is not asker and not session.closed and not session.goaway_received.is_set()
            ]
            for tier in tiers
        ]

    async def publisher(self, name: FullTrackName, tried: set[Session]) -> Session | None:
        """Somebody who may have a Track and was not tried; None if nobody comes in time."""
        end = asyncio.get_running_loop().time() + self.grace
        arrival = asyncio.Event()
        self._arrivals.add(arrival)
        try:
            async with asyncio.timeout_at(end):
                while True:
                    arrival.clear()
                    for tier in self.candidates(name, None, upward=False):
                        for session in tier:
                            if session not in tried:
                                return session
                    if tried and not self.reconnecting:
                        return None
                    await arrival.wait()
        except TimeoutError:
            return None
        finally:
            self._arrivals.discard(arrival)

    def offered(self, peer: Session, namespace: TrackNamespace, present: bool, *, upward: bool) -> None:
        """A peer has announced a namespace to us (PUBLISH_NAMESPACE), or withdrawn it."""
        if present:
            self._routes.setdefault(namespace, {})[peer] = None
            self._learn(namespace, peer, True)
            if not upward:
                self.upward.announce(namespace)
            logger.info("%s: announced %s", peer.connection.id, format_namespace(namespace))
            self._arrived(peer, namespace)
            return
        publishers = self._routes.get(namespace, {})
        publishers.pop(peer, None)
        if not publishers:
            self._routes.pop(namespace, None)
        if all(session in self._upstreams for session in publishers):
            self.upward.withdraw(namespace)
        self._learn(namespace, peer, False)

    def _arrived(self, session: Session, namespace: TrackNamespace | None) -> None:
        for event in self._arrivals:
            event.set()
        for feed in list(self.feeds.values()):
            if namespace is None:
                if not any(self.candidates(feed.name, None, upward=True)):
                    feed.route(session)
            elif is_prefix(namespace, feed.name.namespace):
                feed.route(session)

    def _learn(self, namespace: TrackNamespace, teller: object, present: bool) -> None:
        tellers = self._known.setdefault(namespace, Counter())
        tellers[teller] += 1 if present else -1
        if not tellers[teller]:
            del tellers[teller]
        if not tellers:
            del self._known[namespace]
            self.tracks.withdraw(namespace)
        else:
            self.tracks.announce(namespace)

    def fetches(self, session: Session, limit: int) -> AbstractAsyncContextManager[None]:
        """A slot for one of `limit` fetches at a session."""
        for known in [known for known in self._fetching if known.closed]:
            del self._fetching[known]
        return self._fetching.setdefault(session, asyncio.Semaphore(limit))

    # Namespaces from upstream.

    def wanted(self, prefix: TrackNamespace, present: bool) -> None:
        """Somebody below wants to know of namespaces under `prefix`, or no longer."""
        self._prefixes[prefix] += 1 if present else -1
        if not self._prefixes[prefix]:
            del self._prefixes[prefix]
        for event in self._prefixes_changed:
            event.set()

    def _needed(self) -> set[TrackNamespace]:
        """The prefixes to be asked for upstream: those that no other one covers (moqt 11, overlap)."""
        return {
            prefix
            for prefix in self._prefixes
            if not any(other != prefix and is_prefix(other, prefix) for other in self._prefixes)
        }

    async def _follow_prefixes(self, session: Session) -> None:
        """Ask an upstream for the namespaces that somebody below wants to know of."""
        changed = asyncio.Event()
        self._prefixes_changed.add(changed)
        watches: dict[TrackNamespace, asyncio.Task[None]] = {}
        try:
            while True:
                needed = self._needed()
                gone = [watches.pop(prefix) for prefix in list(watches) if prefix not in needed]
                for task in gone:
                    task.cancel()
                await asyncio.gather(*gone, return_exceptions=True)
                for prefix in needed - watches.keys():
                    watches[prefix] = asyncio.create_task(
                        self._watch_prefix(session, prefix), name=f"{session.connection.id} namespaces"
                    )
                await changed.wait()
                changed.clear()
        finally:
            self._prefixes_changed.discard(changed)
            for task in watches.values():
                task.cancel()
            await asyncio.gather(*watches.values(), return_exceptions=True)

    async def _watch_prefix(self, session: Session, prefix: TrackNamespace) -> None:
        teller = object()
        told: set[TrackNamespace] = set()
        while not session.closed:
            try:
                async with await session.subscribe_namespace(prefix) as watch:
                    async for event in watch:
                        (told.add if event.present else told.discard)(event.namespace)
                        self._learn(event.namespace, teller, event.present)
            except MoqtError as error:
                if session.closed or (
                    isinstance(error, RequestRejected) and error.code != RequestCode.PREFIX_OVERLAP
                ):
                    logger.info("%s: no namespaces: %s", session.connection.id, error)
                    return
            finally:
                for namespace in told:
                    self._learn(namespace, teller, False)
                told.clear()
            await asyncio.sleep(OVERLAP_PAUSE)

    def spawn(self, coroutine: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run something until the relay is closed."""
        task = asyncio.create_task(coroutine, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
