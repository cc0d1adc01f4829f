"""Where a cached Track comes from: one subscription at each of its publishers, and fetches for its holes
(moqt 15 #7, #8, #14).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moqt.errors import (
    DoneCode,
    MalformedTrack,
    MoqtError,
    RequestCode,
    RequestRefused,
    RequestRejected,
    meaning,
)
from moqt.fetching import ranges, successor
from moqt.filters import MAX_VARINT, GroupOrder, Location, LocationFilter
from moqt.locations import LocationSet
from moqt.names import FullTrackName, printable
from moqt.reception import Header, Inlet
from moqt.relay.cache import CachedTrack, Writer
from moqt.session import Session
from moqt.subscribing import FetchStream
from moqt.track import Hole
from moqt.wire import EndOfRange, ObjectHeader, ObjectStatus, RangeStatus, SubgroupHeader

if TYPE_CHECKING:
    from moqt.relay.relay import Relay

__all__ = ["Feed"]

logger = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds until a publisher that did not have a Track is asked again, while somebody waits for it."""

ATTEMPTS = 3
"""Publishers that are asked for a hole, one after the other."""

FETCHES = 16
"""Fetches at one publisher at a time."""


class _SubgroupInlet(Inlet):
    """Brings the Objects of one subgroup stream into the Track."""

    def __init__(self, track: CachedTrack, header: SubgroupHeader) -> None:
        self._track = track
        self._header = header
        self._subgroup = header.subgroup
        self._last: ObjectHeader | None = None
        self._writer: Writer | None = None
        self._over = False

    def object(self, header: ObjectHeader) -> Callable[[memoryview], None] | None:
        if self._last is None:
            self._subgroup = header.subgroup
            self._track.open_stream(self._header.group, header.subgroup)
        after = None if self._last is None else self._last.location.object
        first = self._header.first_object and self._last is None
        self._last = header
        self._writer = self._track.begin(
            header, live=True, first=first, ends=self._header.end_of_group, after=after
        )
        return None if self._writer is None else self._writer.write

    def marker(self, event: EndOfRange) -> None:
        raise AssertionError("no End of Range on a subgroup stream")

    async def room(self) -> None:
        return  # What is live does not wait: the cache throws out what is old.

    def end(self, code: int | None) -> None:
        last = self._last
        if code is None and last is not None and last.status is ObjectStatus.NORMAL:
            self._track.end_subgroup(self._header.group, last.subgroup, last.location.object)
            if self._header.end_of_group:
                self._track.end_group(self._header.group, last.location.object + 1)
        self._close(code, resume=False)

    def cut(self) -> None:
        self._close(0, resume=True)

    def _close(self, code: int | None, *, resume: bool) -> None:
        if self._over:
            return
        self._over = True
        if self._writer is not None:
            self._writer.abandon(code or 0, resume=resume)
        if self._last is not None:
            assert self._subgroup is not None
            self._track.close_stream(self._header.group, self._subgroup, code, resume=resume)


class _FetchInlet(Inlet):
    """Brings a fetch stream into the Track: Objects, and what lies between them."""

    def __init__(
        self,
        track: CachedTrack,
        hole: Hole,
        order: GroupOrder,
        asked: tuple[Location, Location],
        limit: int,
    ) -> None:
        self.last: Location | None = None
        self.heard = 0
        self.waiting = False
        self._asked = asked
        self._limit = limit
        self._track = track
        self._hole = hole
        self._order = order
        self._writer: Writer | None = None

    def object(self, header: ObjectHeader) -> Callable[[memoryview], None] | None:
        self._writer = self._track.begin(header, live=False, hole=self._hole)
        for start, end in self._passed(header.location):
            self._track.learn(start, end)
        if self._writer is None:
            return None
        write = self._writer.write

        def counted(data: memoryview) -> None:
            self.heard += 1
            write(data)

        return counted

    def marker(self, event: EndOfRange) -> None:
        for start, end in self._passed(event.location):
            if event.kind is RangeStatus.NON_EXISTENT:
                self._track.learn(start, end)
            else:
                self._hole.unknown.add(start, end)

    async def room(self) -> None:
        self.waiting = True
        while self._hole.ahead > self._limit:
            await self._track.changes()
        self.waiting = False

    def end(self, code: int | None) -> None:
        self._abandon()

    def cut(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon(0, resume=True)

    def _passed(self, location: Location) -> Iterator[tuple[Location, Location]]:
        self.heard += 1
        last, self.last = self.last, location
        return ranges(self._order, *self._asked, last, location)


class Feed:
    """One Track of the relay and its publishers."""

    def __init__(self, relay: Relay, name: FullTrackName) -> None:
        self.name = name
        self.track = CachedTrack(name, relay.cache, self._fill)
        self.track.on_idle = self.settle
        self._relay = relay
        self._sources: dict[Session, asyncio.Task[None]] = {}
        self._established: set[Session] = set()
        self._holes: dict[Hole, asyncio.Task[None]] = {}
        self._askers = 0
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._broken = False
        """Somebody may miss what was published while a publisher was lost."""
        self._recovery: asyncio.Task[None] | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None

    async def establish(self, asker: object, rendezvous: float, *, upward: bool) -> CachedTrack:
        """The Track, once a publisher has accepted our subscription to it (moqt 15 #7). Raises
        RequestRefused.
        """
        self._askers += 1
        try:
            await self._establish(asker, rendezvous, upward=upward)
            return self.track
        finally:
            self._askers -= 1
            self.settle()

    async def _establish(self, asker: object, rendezvous: float, *, upward: bool) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + rendezvous
        patient = loop.time() + max(rendezvous, self._relay.upstream_wait)
        tried: dict[Session, float] = {}
        while True:
            if self.track.fault:
                raise RequestRefused(RequestCode.INTERNAL_ERROR, "the Track is malformed")
            if self._established - {asker} or (self.track.finished and not self._sources):
                return
            now = loop.time()
            pending = False
            for tier in self._relay.candidates(self.name, asker, upward=upward):
                for session in tier:
                    if session not in self._sources and now >= tried.get(session, -AGAIN) + AGAIN:
                        if session in tried and now >= deadline:
                            continue
                        tried[session] = now
                        self._start(session)
                    pending = pending or session in self._sources
                if pending:
                    break
            waits = upward is False and self._relay.reconnecting
            end = patient if waits else deadline
            if not pending and now >= end:
                raise self._refusal(bool(rendezvous), waits)
            self._changed.clear()
            if pending:
                await self._changed.wait()
            else:
                try:
                    async with asyncio.timeout_at(min(end, now + AGAIN)):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def _refusal(self, waited: bool, unreachable: bool) -> RequestRefused:
        error, self._error = self._error, None
        if isinstance(error, RequestRejected) and not (
            waited and error.code == RequestCode.DOES_NOT_EXIST
        ):  # Passed on.
            return RequestRefused(meaning(RequestCode, error.code), error.reason)
        if isinstance(error, MoqtError) and not isinstance(error, RequestRejected):
            return RequestRefused(RequestCode.INTERNAL_ERROR, "the publisher did not answer")
        if waited or unreachable:
            return RequestRefused(RequestCode.TIMEOUT, "no publisher of the Track came in time")
        return RequestRefused(RequestCode.DOES_NOT_EXIST, "no publisher of the Track is known here")

    def route(self, session: Session) -> None:
        """A session may have the Track from now on (moqt 15 #9)."""
        self.news()
        if (self.track.watched or self._askers) and session not in self._sources and not self.track.fault:
            self._start(session)

    def news(self) -> None:
        """Something has changed for those who wait for a publisher."""
        self._changed.set()

    def settle(self) -> None:
        """Keep the subscriptions for a while when the last subscriber has left."""
        if self.track.watched or self._askers:
            if self._linger is not None:
                self._linger.cancel()
                self._linger = None
        elif self._linger is None and not self._relay.closed:
            loop = asyncio.get_running_loop()
            self._linger = loop.call_later(self._relay.linger if self._sources else 0.0, self._rest)

    def _rest(self) -> None:
        self._linger = None
        if self.track.watched or self._askers or self._holes:
            self.settle()
            return
        for task in self._sources.values():
            task.cancel()
        self.track.give_up()
        if self.track.empty or self.track.fault:
            self._relay.drop(self)

    def cancel(self) -> list[asyncio.Task[None]]:
        """End everything; the tasks that are to be awaited."""
        tasks = [*self._sources.values(), *self._holes.values()]
        if self._recovery is not None:
            tasks.append(self._recovery)
        for task in tasks:
            task.cancel()
        for timer in (self._linger, self._grace):
            if timer is not None:
                timer.cancel()
        self.track.stop()
        return tasks

    # Subscriptions.

    def _start(self, session: Session) -> None:
        task = asyncio.create_task(self._subscribe(session), name=f"{session.connection.id} {self.name}")
        self._sources[session] = task

        def ended(_: asyncio.Task[None]) -> None:
            del self._sources[session]
            self._established.discard(session)
            self._changed.set()

        task.add_done_callback(ended)

    async def _subscribe(self, session: Session) -> None:
        """Follow one publisher until it has no more, or is lost."""
        track = self.track

        def sink(header: Header) -> Inlet:
            assert isinstance(header, SubgroupHeader)
            return _SubgroupInlet(track, header)

        lost = False
        status: int | None = None
        try:
            # moqt 15 #12: everything that is new, for all; each subscriber's filter is applied here.
            async with await session.subscribe(
                self.name, filter=LocationFilter.next_object(), sink=sink
            ) as subscription:
                track.describe(subscription.properties)
                track.saw(subscription.largest)
                self._established.add(session)
                self._on_established()
                lost = True
                async for _ in subscription:
                    pass
                status = None if subscription.done is None else subscription.done.status
        except MalformedTrack as error:
            self._spoil(str(error))
            return
        except MoqtError as error:
            self._error = error
            logger.info("%s: %s: %s", session.connection.id, self.name, printable(str(error)))
        self._established.discard(session)
        if lost:
            self._on_end(session, status)

    def _on_established(self) -> None:
        self._changed.set()
        self.track.finished = False
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._broken:
            self._broken = False
            self._recover()

    def _on_end(self, session: Session, status: int | None) -> None:
        """A publisher has ended its subscription with `status`, or was lost (None)."""
        track = self.track
        if status is None or (status == DoneCode.GOING_AWAY and self._relay.is_upstream(session)):
            self._broken = track.watched
            if self._established and track.watched:
                self._broken = False
                self._recover()
            elif track.watched and self._grace is None:
                # It may come back, or another one may have it (moqt 15 #9).
                self._grace = asyncio.get_running_loop().call_later(self._relay.grace, self._give_up)
        elif not self._established:
            if status == DoneCode.TRACK_ENDED:
                self.track.finished = True
            track.give_up()
            track.close(meaning(DoneCode, status))

    def _give_up(self) -> None:
        self._grace = None
        self.track.give_up()
        self.track.close(DoneCode.INTERNAL_ERROR)

    def _spoil(self, reason: str) -> None:
        logger.warning("%s is malformed: %s", self.name, printable(reason))
        self.track.spoil(reason)
        self._relay.drop(self)
        current = asyncio.current_task()
        for task in self._sources.values():
            if task is not current:
                task.cancel()

    # What is missing.

    def _recover(self) -> None:
        """Bring subscribers what was published while a publisher was lost, before what comes now."""
        self.track.defer()
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._catch_up(), name=f"recovery of {self.name}")

    async def _catch_up(self) -> None:
        track = self.track
        try:
            while (gap := track.live_gap()) is not None and track.watched:
                hole = self._fill(track, *gap, GroupOrder.ASCENDING)
                while not hole.done:
                    hole.ahead = 0  # They are used when all is here.
                    await track.changes()
                if gap[0] in hole.unknown:
                    break
        finally:
            self._recovery = None
            track.catch_up()

    def _fill(self, track: CachedTrack, start: Location, end: Location, order: GroupOrder) -> Hole:
        """Fetch a range that nobody fetches yet, or say which hole its beginning is in."""
        ascending = order is GroupOrder.ASCENDING
        for hole in self._holes:
            if hole.start <= (start if ascending else end) <= hole.end:
                return hole
        for hole in self._holes:
            if ascending and start < hole.start <= end:
                end = _predecessor(hole.start)
            elif not ascending and start <= hole.end < end:
                start = successor(hole.end)
        hole = Hole(start, end)
        if track.fault or self._relay.closed:
            hole.done = True
            hole.unknown.add(start, end)
            return hole
        task = asyncio.create_task(self._fetch(hole, order), name=f"fetch of {self.name}")
        self._holes[hole] = task

        def ended(_: asyncio.Task[None]) -> None:
            del self._holes[hole]
            hole.done = True
            track.wake()
            if not self._relay.closed:
                asyncio.get_running_loop().call_later(self._relay.stall, track.release, hole)

        task.add_done_callback(ended)
        return hole

    async def _fetch(self, hole: Hole, order: GroupOrder) -> None:
        tried: set[Session] = set()
        while next(_gaps(self.track, hole.start, hole.end), None) is not None:
            session = await self._relay.publisher(self.name, tried) if len(tried) < ATTEMPTS else None
            if session is None:
                for low, high in _gaps(self.track, hole.start, hole.end):
                    hole.unknown.add(low, high)
                return
            tried.add(session)
            try:
                async with self._relay.fetches(session, FETCHES):
                    await self._fetch_from(session, hole, order)
                return
            except MalformedTrack as error:
                self._spoil(str(error))
                return
            except RequestRejected as error:
                logger.info("%s: %s", session.connection.id, error)
                if error.retry_after is not None:
                    tried.discard(session)
                    await asyncio.sleep(max(error.retry_after, 0.1))
            except (MoqtError, TimeoutError) as error:
                logger.info("%s: a fetch of %s broke: %s", session.connection.id, self.name, error)

    async def _fetch_from(self, session: Session, hole: Hole, order: GroupOrder) -> None:
        track = self.track
        low, high = next(_gaps(track, hole.start, hole.end))
        # What has come by another attempt is not asked for again.
        start, end = (low, hole.end) if order is GroupOrder.ASCENDING else (hole.start, hole.end)
        if high == hole.end:
            start = low
        inlet = _FetchInlet(track, hole, order, (start, end), self._relay.read_ahead)
        # With an End Object, so that End Location tells how far the answer reaches (moqt 25 #7).
        location_filter = LocationFilter.absolute_range(start, end)
        async with await session.fetch(
            self.name, filter=location_filter, order=order, sink=lambda _: inlet
        ) as fetch:
            reading = asyncio.ensure_future(_to_the_end(fetch))
            try:
                heard = -1
                while not reading.done():
                    if inlet.heard == heard and inlet.waiting:
                        return  # Nobody wants the rest now.
                    if inlet.heard == heard:
                        raise TimeoutError(f"nothing came for {self._relay.stall:g} s")
                    heard = inlet.heard
                    await asyncio.wait((reading,), timeout=self._relay.stall)
                await reading
            finally:
                reading.cancel()
            assert fetch.end is not None
            # moqt 10: with FIN, what was not sent up to End Location does not exist.
            reached = fetch.end.end
            for low, high in ranges(order, start, end, inlet.last, None):
                for first, last in _without(hole.unknown, low, min(high, reached)):
                    track.learn(first, last)
                hole.unknown.add(max(low, successor(reached)), high)


async def _to_the_end(fetch: FetchStream) -> None:
    async for _ in fetch:
        pass


def _predecessor(location: Location) -> Location:
    if location.object:
        return Location(location.group, location.object - 1)
    return Location(location.group - 1, MAX_VARINT)


def _gaps(track: CachedTrack, start: Location, end: Location) -> Iterator[tuple[Location, Location]]:
    """What is unknown from `start` to `end`."""
    while start <= end and (gap := track.gap(start, end)) is not None:
        yield gap
        start = successor(gap[1])


def _without(unknown: LocationSet, start: Location, end: Location) -> Iterator[tuple[Location, Location]]:
    """The parts of `start` to `end` that are not in `unknown`."""
    while start <= end and (gap := unknown.gap(start, end)) is not None:
        yield gap
        start = successor(gap[1])
