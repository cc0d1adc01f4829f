"""A relay: sessions of publishers and subscribers over one set of cached Tracks (moqt 15)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from moqt.errors import MoqtError, RequestCode, RequestRejected
from moqt.names import FullTrackName, TrackNamespace, format_namespace, is_prefix
from moqt.offers import Offer
from moqt.relay.cache import Cache
from moqt.relay.cached import CachedTrack
from moqt.relay.feed import Feed
from moqt.session import Session
from moqt.track import Track, Wanted
from moqt.tracks import Tracks

if TYPE_CHECKING:
    from moqt.relay.store import Store

__all__ = ["Relay"]

logger = logging.getLogger(__name__)

CACHE_BYTES = 2 << 30
READ_AHEAD = 16 << 20
"""Bytes that a fetch may bring before somebody has sent what it brought."""

HESITATION = 0.5
"""Seconds without a reply after which a publisher counts as silent, until it replies: what is in the cache is
served without it.
"""

MAX_ABSENT = 4096
"""Tracks of which it is remembered that their publisher does not have them."""

DENIALS = {
    RequestCode.UNAUTHORIZED,
    RequestCode.EXPIRED_AUTH_TOKEN,
    RequestCode.MALFORMED_AUTH_TOKEN,
}
"""Refusals that are about our token."""

OVERLAP_PAUSE = 0.05
"""Seconds until a prefix that overlapped with one just given up is asked for again."""


class _Face(Tracks):
    """The relay as one kind of session sees it: `upward` are the sessions with upstreams, to which only what
    was announced from below is offered.
    """

    def __init__(self, relay: Relay, *, upward: bool) -> None:
        super().__init__()
        self._relay = relay
        self._upward = upward

    async def find(
        self,
        name: FullTrackName,
        asker: object,
        *,
        rendezvous: float = 0.0,
        wanted: Wanted | None = None,
    ) -> Track:
        return await self._relay.find(name, asker, rendezvous, wanted, upward=self._upward)

    def offered(self, peer: object, namespace: TrackNamespace, present: bool) -> None:
        assert isinstance(peer, Session)
        self._relay.offered(peer, namespace, present, upward=self._upward)

    async def published(self, peer: object, offer: Offer) -> None:
        assert isinstance(peer, Session)
        await self._relay.published(peer, offer)

    def may_offer(self, peer: object, track: Track) -> bool:
        return self._relay.may_offer(peer, track.name, upward=self._upward)

    def wanted(self, asker: object, prefix: TrackNamespace, present: bool) -> None:
        if not self._upward:
            self._relay.wanted(prefix, present)

    def wanted_tracks(self, asker: object, prefix: TrackNamespace, present: bool) -> None:
        if not self._upward:
            self._relay.wanted_tracks(prefix, present)


class _Wishes:
    """Prefixes that sessions below want to know of, and who is to be told when they change."""

    def __init__(self) -> None:
        self._counts: Counter[TrackNamespace] = Counter()
        self.watchers: set[asyncio.Event] = set()

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, prefix: TrackNamespace, present: bool) -> None:
        """One more session wants to know of `prefix`, or one less."""
        self._counts[prefix] += 1 if present else -1
        if not self._counts[prefix]:
            del self._counts[prefix]
        for event in self.watchers:
            event.set()

    def needed(self) -> set[TrackNamespace]:
        """Those to be asked for upstream: the ones that no other one covers (moqt 11, overlap)."""
        return {
            prefix
            for prefix in self._counts
            if not any(prefix[:length] in self._counts for length in range(len(prefix)))
        }


class Relay:
    """Routes, aggregates and caches. `tracks` is for the sessions that come to us, `upward` for those that we
    have dialled.

    `cache_bytes` bounds what is kept. `linger` is for how many seconds an upstream subscription is kept when
    the last subscriber has left, `grace` how long subscribers are kept when the last publisher was lost,
    `upstream_wait` how long a request waits for an upstream that is being dialled, `answer` how long a
    publisher has for its reply, `stall` how long a fetch may bring nothing.

    `store` keeps Objects on disk, also those of an earlier life of the relay; it is closed with the relay.

    A namespace is offered as long as a publisher or an upstream offers it, and beyond that as long as what is
    known of it is in the cache, one of its Tracks to the end (kvcs 14 #10).
    """

    def __init__(
        self,
        *,
        cache_bytes: int = CACHE_BYTES,
        store: Store | None = None,
        linger: float = 10.0,
        grace: float = 5.0,
        upstream_wait: float = 3.0,
        answer: float = 5.0,
        stall: float = 10.0,
    ) -> None:
        self.cache = Cache(cache_bytes)
        self.store = store
        if store is not None:
            store.queue = min(store.queue, cache_bytes // 8)
            store.on_written = lambda: self.cache.grow(0)
        self.linger = linger
        self.grace = grace
        self.upstream_wait = upstream_wait
        self.answer = answer
        self.stall = stall
        self.read_ahead = min(READ_AHEAD, cache_bytes // 16)
        self.tracks: Tracks = _Face(self, upward=False)
        self.upward: Tracks = _Face(self, upward=True)
        self.feeds: dict[FullTrackName, Feed] = {}
        self.subscribed = 0
        """Subscriptions that publishers have accepted so far."""
        self.fetched = 0
        """Fetches that they have answered so far."""
        self.closed = False
        self.reconnecting = False
        """Whether an upstream is configured and is not there now."""
        self._away_since = -math.inf
        self.silent: WeakSet[Session] = WeakSet()
        """Publishers that have not replied for a while."""
        self._denials: WeakKeyDictionary[Session, set[tuple[str, int]]] = WeakKeyDictionary()
        """What upstreams have denied us, of which the log tells already."""
        self._shelves: dict[TrackNamespace, dict[FullTrackName, Feed | None]] = {}
        """What is known of each namespace; None stands for a Track of which nothing is left."""
        self._absent: dict[FullTrackName, None] = {}
        self._routes: dict[TrackNamespace, dict[Session, None]] = {}
        self._known: dict[TrackNamespace, Counter[object]] = {}
        """Who has told of each namespace that is offered to those who ask."""
        self._upstreams: dict[Session, list[asyncio.Task[None]]] = {}
        self._prefixes = _Wishes()
        self._track_prefixes = _Wishes()
        self._fetching: WeakKeyDictionary[Session, asyncio.Semaphore] = WeakKeyDictionary()
        self._arrivals: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        for name in list(store.tracks) if store is not None else ():
            self._feed(name)
        for namespace in list(self._shelves):
            self.reconsider(namespace)

    async def close(self) -> None:
        """End all that runs here; the sessions are not the relay's."""
        self.closed = True
        tasks: list[asyncio.Task[None]] = [*self._tasks, *itertools.chain(*self._upstreams.values())]
        for feed in self.feeds.values():
            tasks += feed.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.store is not None:
            await self.store.close()

    def drop(self, feed: Feed) -> None:
        """A Track is no longer known."""
        if self.feeds.get(feed.name) is not feed:
            return
        del self.feeds[feed.name]
        shelf = self._shelves[feed.name.namespace]
        if feed.track.largest is None:
            del shelf[feed.name]
        else:
            shelf[feed.name] = None
        if not any(shelf.values()):
            del self._shelves[feed.name.namespace]
        self.reconsider(feed.name.namespace)

    # Upstreams.

    @asynccontextmanager
    async def upstream(self, session: Session) -> AsyncIterator[None]:
        """Use `session`, which offers `upward`, as an upstream while the block runs."""
        self._upstreams[session] = [
            asyncio.create_task(
                self._follow(wishes, session, watch), name=f"{session.connection.id} discovery"
            )
            for wishes, watch in (
                (self._prefixes, self._watch_prefix),
                (self._track_prefixes, self._watch_tracks),
            )
        ]
        self.reconnecting = False
        self._arrived(session, None)
        try:
            yield
        finally:
            tasks = self._upstreams.pop(session)
            self.reconnecting = not self._upstreams
            self._away_since = asyncio.get_running_loop().time()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def is_upstream(self, session: Session) -> bool:
        """Whether it is one of ours."""
        return session in self._upstreams

    # Routing.

    async def find(
        self,
        name: FullTrackName,
        asker: object,
        rendezvous: float,
        wanted: Wanted | None = None,
        *,
        upward: bool,
    ) -> CachedTrack:
        """The Track that the session `asker` wants. Raises RequestRefused."""
        return await self._feed(name).establish(asker, rendezvous, wanted, upward=upward)

    def _feed(self, name: FullTrackName) -> Feed:
        feed = self.feeds.get(name)
        if feed is None:
            feed = self.feeds[name] = Feed(self, name)
            self._shelves.setdefault(name.namespace, {})[name] = feed
        return feed

    # Tracks that publishers offer by themselves.

    async def published(self, peer: Session, offer: Offer) -> None:
        """A publisher has sent PUBLISH (moqt 15 #10). Raises RequestRefused."""
        await self._feed(offer.track).take(peer, offer)

    def offer(self, feed: Feed) -> None:
        """Publish a Track to those who SUBSCRIBE_TRACKS."""
        for face in (self.tracks, self.upward):
            if face.get(feed.name) is None:
                face.add(feed.track)

    def withdraw_offer(self, feed: Feed) -> None:
        """No publisher offers the Track any more; what was published of it goes on."""
        for face in (self.tracks, self.upward):
            face.discard(feed.name)

    def may_offer(self, peer: object, name: FullTrackName, *, upward: bool) -> bool:
        """Whether a Track may be published to a session: not where it comes from, and to no upstream what
        comes from another one.
        """
        feed = self.feeds.get(name)
        origins = set(feed.offering) if feed is not None else set()
        return bool(origins - {peer} - (self._upstreams.keys() if upward else set()))

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

    @contextmanager
    def asking(self, session: Session) -> Iterator[None]:
        """Around a request to a publisher, until its reply."""
        timer = asyncio.get_running_loop().call_later(HESITATION, self._hush, session)
        try:
            yield
        except RequestRejected as error:
            self.silent.discard(session)
            self._denied(session, error)
            raise
        else:
            self.silent.discard(session)
        finally:
            timer.cancel()

    def _denied(self, session: Session, error: RequestRejected) -> None:
        """Tell once of each kind of request that an upstream denies us: to our clients it looks as if there
        were nothing, so nobody else would.
        """
        if error.code not in DENIALS or session not in self._upstreams:
            return
        told = self._denials.setdefault(session, set())
        if (error.what, error.code) not in told:
            told.add((error.what, error.code))
            logger.warning(
                "%s: the upstream %s denies this relay what its clients ask for: %s. It goes by the relay's "
                "own token: name a file with one that gives this right by --token",
                session.connection.id,
                session.connection.peer,
                error,
            )

    def _hush(self, session: Session) -> None:
        self.silent.add(session)
        for feed in self.feeds.values():
            feed.news()

    def lacks(self, name: FullTrackName) -> bool:
        """Whether the last publisher that was asked for a Track did not have it."""
        return name in self._absent

    def note_presence(self, name: FullTrackName, present: bool) -> None:
        """A publisher has a Track, or has not."""
        if present:
            self._absent.pop(name, None)
        else:
            self._absent[name] = None
            if len(self._absent) > MAX_ABSENT:
                del self._absent[next(iter(self._absent))]

    def others(self, name: FullTrackName, tried: set[Session]) -> list[Session]:
        """Who may have a Track and was not tried, the best first."""
        tiers = self.candidates(name, None, upward=False)
        return [session for tier in tiers for session in tier if session not in tried]

    async def publisher(self, name: FullTrackName, tried: set[Session], until: float) -> Session | None:
        """Somebody who may have a Track and was not tried; None if nobody comes `until` then."""
        end = max(until, self._away_since + self.grace) if self.reconnecting else until
        arrival = asyncio.Event()
        self._arrivals.add(arrival)
        try:
            async with asyncio.timeout_at(end):
                while True:
                    arrival.clear()
                    if left := self.others(name, tried):
                        return min(left, key=self.silent.__contains__)
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
        self._learn(namespace, peer, False)
        if not self.keeps(namespace) and all(session in self._upstreams for session in publishers):
            self.upward.withdraw(namespace)

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
        if not tellers and self._whole(namespace):
            tellers[self] = 1
        elif len(tellers) > 1:
            tellers.pop(self, None)
        if tellers:
            self.tracks.announce(namespace)
            return
        del self._known[namespace]
        self.tracks.withdraw(namespace)
        if namespace not in self._routes:
            self.upward.withdraw(namespace)

    def keeps(self, namespace: TrackNamespace) -> bool:
        """Whether a namespace is offered because it is in the cache, and by nobody else."""
        return self in self._known.get(namespace, ())

    def reconsider(self, namespace: TrackNamespace) -> None:
        """Look again whether a namespace that nobody else offers is whole in the cache."""
        if self.keeps(namespace):
            if not self._whole(namespace):
                self._learn(namespace, self, False)
        elif namespace not in self._known and self._whole(namespace):
            self._learn(namespace, self, True)

    def _whole(self, namespace: TrackNamespace) -> bool:
        """Whether a namespace can be served without a publisher: one of its Tracks is here from its beginning
        to its end, and so are all others whose end is known; of those that may have gone on, the current
        Group.
        """
        shelf = self._shelves.get(namespace, {}).values()
        tracks = [feed.track for feed in shelf if feed is not None and feed.track.largest is not None]
        return (
            None not in shelf
            and any(track.complete for track in tracks)
            and all(track.complete or (track.ended is None and track.current) for track in tracks)
        )

    def fetches(self, session: Session, limit: int) -> asyncio.Semaphore:
        """The slots for `limit` fetches at a session."""
        return self._fetching.setdefault(session, asyncio.Semaphore(limit))

    # Namespaces from upstream.

    def wanted(self, prefix: TrackNamespace, present: bool) -> None:
        """Somebody below wants to know of namespaces under `prefix`, or no longer."""
        for namespace in list(self._shelves) if present else ():
            if is_prefix(prefix, namespace):
                self.reconsider(namespace)
        self._prefixes.note(prefix, present)

    def wanted_tracks(self, prefix: TrackNamespace, present: bool) -> None:
        """Somebody below wants all Tracks under `prefix`, or no longer."""
        self._track_prefixes.note(prefix, present)

    async def _follow(
        self,
        wishes: _Wishes,
        session: Session,
        watch: Callable[[Session, TrackNamespace], Coroutine[Any, Any, None]],
    ) -> None:
        """Ask an upstream for the prefixes that somebody below wants to know of."""
        changed = asyncio.Event()
        wishes.watchers.add(changed)
        watches: dict[TrackNamespace, asyncio.Task[None]] = {}
        try:
            while True:
                needed = wishes.needed()
                gone = [watches.pop(prefix) for prefix in list(watches) if prefix not in needed]
                for task in gone:
                    task.cancel()
                await asyncio.gather(*gone, return_exceptions=True)
                for prefix in needed - watches.keys():
                    watches[prefix] = asyncio.create_task(
                        watch(session, prefix), name=f"{session.connection.id} namespaces"
                    )
                await changed.wait()
                changed.clear()
        finally:
            wishes.watchers.discard(changed)
            for task in watches.values():
                task.cancel()
            await asyncio.gather(*watches.values(), return_exceptions=True)

    async def _watch_tracks(self, session: Session, prefix: TrackNamespace) -> None:
        """Have an upstream publish its Tracks to us; they come to `published`."""
        while not session.closed:
            renewed = session.renewed
            try:
                watch = await session.subscribe_tracks(prefix)
                try:
                    error = await watch.wait_ended()
                finally:
                    await watch.close()
                logger.info("%s: no more Tracks: %s", session.connection.id, error)
            except RequestRejected as error:
                if error.code != RequestCode.PREFIX_OVERLAP:
                    logger.info("%s: no Tracks: %s", session.connection.id, error)
                    self._denied(session, error)
                    await renewed.wait()  # Another token may give us the right.
            except MoqtError as error:
                logger.info("%s: no Tracks: %s", session.connection.id, error)
                return
            await asyncio.sleep(OVERLAP_PAUSE)

    async def _watch_prefix(self, session: Session, prefix: TrackNamespace) -> None:
        teller = object()
        told: set[TrackNamespace] = set()
        while not session.closed:
            renewed = session.renewed
            try:
                async with await session.subscribe_namespace(prefix) as watch:
                    async for event in watch:
                        (told.add if event.present else told.discard)(event.namespace)
                        self._learn(event.namespace, teller, event.present)
            except MoqtError as error:
                if isinstance(error, RequestRejected) and error.code != RequestCode.PREFIX_OVERLAP:
                    logger.info("%s: no namespaces: %s", session.connection.id, error)
                    self._denied(session, error)
                    await renewed.wait()  # Another token may give us the right.
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
