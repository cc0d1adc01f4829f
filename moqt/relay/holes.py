"""What a cached Track lacks, and the fetches that bring it from upstream (moqt 7.4, 10)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any

from moqt.errors import (
    DeadlineExceeded,
    MalformedTrack,
    MoqtError,
    RequestCode,
    RequestRefused,
    RequestRejected,
)
from moqt.fetching import LAST, predecessor, successor
from moqt.filters import FilterType, GroupOrder, Location, LocationFilter
from moqt.locations import LocationSet
from moqt.relay.cached import CachedTrack
from moqt.relay.inlets import FetchInlet, gaps
from moqt.relay.refusals import refusal
from moqt.session import Session
from moqt.subscribing import FetchStream
from moqt.track import Hole, Wanted
from moqt.wire import ObjectHeader, ObjectStatus, decode_properties

if TYPE_CHECKING:
    from moqt.relay.database import KeptObject
    from moqt.relay.relay import Relay
    from moqt.relay.store import DiskTrack

__all__ = ["Holes"]

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Publishers that are asked for a hole, one after the other."""

HASTE = 0.5
"""Seconds that a publisher has for its reply to a fetch if it has not replied before, or if others may do."""

FETCHES = 16
"""Fetches at one publisher at a time."""


class Holes:
    """The holes of one Track that are being filled. `publishers` are its subscriptions' sessions; `spoil` is
    called when what comes makes it malformed.

    `patient_until` is until when a publisher that went may come back.
    """

    def __init__(self, relay: Relay, publishers: Collection[Session], spoil: Callable[[str], None]) -> None:
        self.patient_until = 0.0
        self._publishers = publishers
        self._relay = relay
        self._spoil = spoil
        self._tasks: dict[Hole, asyncio.Task[None]] = {}

    @property
    def open(self) -> Collection[Hole]:
        """Those that are being filled now."""
        return self._tasks.keys()

    def cancel(self) -> list[asyncio.Task[None]]:
        """End all; the tasks that are to be awaited."""
        for task in self._tasks.values():
            task.cancel()
        return list(self._tasks.values())

    def fill(self, track: CachedTrack, start: Location, end: Location, order: GroupOrder) -> Hole:
        """Fetch a range that nobody fetches yet, or say which hole its beginning is in."""
        ascending = order is GroupOrder.ASCENDING
        for hole in self._tasks:
            if hole.start <= (start if ascending else end) <= hole.end:
                return hole
        for hole in self._tasks:
            if ascending and start < hole.start <= end:
                end = predecessor(hole.start)
            elif not ascending and start <= hole.end < end:
                start = successor(hole.end)
        disk = track.disk
        if disk is not None:
            start, end, stored = disk.part(start, end, order)
            disk = disk if stored else None
        hole = Hole(start, end, replied=disk is not None)
        if track.fault or self._relay.closed:
            hole.done = True
            hole.unknown.add(start, end)
        elif disk is not None:
            self._begin(track, hole, self._recall(track, disk, hole))
        else:
            self._begin(track, hole, self._fetch(track, hole, order))
        return hole

    def race(self, track: CachedTrack, wanted: Wanted) -> None:
        """Fetch what somebody wants of a Track of which nothing is known, while it is subscribed to: after
        the reply it may be too late.
        """
        if wanted.filter.type not in (FilterType.RELATIVE_START, FilterType.NEXT_OBJECT) and not self._tasks:
            hole = Hole(wanted.filter.start(None), wanted.filter.end or LAST, guess=True)
            if hole.start <= hole.end:
                self._begin(track, hole, self._fetch(track, hole, wanted.order))

    def expect(self, track: CachedTrack, start: Location, end: Location, order: GroupOrder) -> FetchInlet:
        """For a fill that brings this range with a subscription; what it does not bring is fetched."""
        hole = Hole(start, end, replied=True)
        inlet = FetchInlet(track, hole, order, (start, end), self._relay.read_ahead)
        self._begin(track, hole, self._await_fill(track, hole, order, inlet))
        return inlet

    def _begin(self, track: CachedTrack, hole: Hole, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"fetch of {track.name}")
        self._tasks[hole] = task

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[hole]
            hole.done = True
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("a fetch of %s failed", track.name, exc_info=error)
                hole.unknown.add(hole.start, hole.end)
            track.wake()
            if not self._relay.closed:
                asyncio.get_running_loop().call_later(self._relay.stall, track.release, hole)

        task.add_done_callback(ended)

    async def _await_fill(self, track: CachedTrack, hole: Hole, order: GroupOrder, inlet: FetchInlet) -> None:
        try:
            if not await inlet.watch(inlet.ended, self._relay.stall, lambda: False):
                return
            if inlet.ended.result() is None:
                inlet.finish(hole.end)
                return
        except TimeoutError as error:
            logger.info("a fill of %s: %s", track.name, error)
        await self._fetch(track, hole, order)

    def _patience(self, tried: Collection[Session]) -> float:
        """`patient_until`, also for those of which only we have noticed so far that they are lost."""
        if any(session.closed for session in (*self._publishers, *tried)):
            self.patient_until = asyncio.get_running_loop().time() + self._relay.grace
        return self.patient_until

    async def _recall(self, track: CachedTrack, disk: DiskTrack, hole: Hole) -> None:
        """Bring back what is on disk. What turns out not to be there is a hole that will be fetched."""
        found = LocationSet()
        start = hole.start
        while start <= hole.end and (items := await self._read(disk, start, hole.end)):
            for item in items:
                if not await self._room(track, hole):
                    return
                try:
                    _bring(track, item, hole, disk.expiry(item))
                except MalformedTrack as error:
                    self._malformed(hole, error)
                    return
                found.add(item.location, item.location)
            start = successor(items[-1].location)
        for low, high in gaps(found, hole.start, hole.end):
            disk.stored.remove(low, high)

    async def _read(self, disk: DiskTrack, start: Location, end: Location) -> list[KeptObject]:
        try:
            async with asyncio.timeout(self._relay.stall):
                return await disk.read(start, end)
        except TimeoutError:
            logger.warning("the cache on disk has not answered for %g s", self._relay.stall)
            return []

    def _malformed(self, hole: Hole, error: MalformedTrack) -> None:
        self._spoil(str(error))
        hole.refusal = RequestRefused(RequestCode.MALFORMED_TRACK, "the Track is malformed")

    async def _room(self, track: CachedTrack, hole: Hole) -> bool:
        """Wait until more may come; False if nobody wants the rest now."""
        try:
            while hole.ahead > self._relay.read_ahead:
                async with asyncio.timeout(self._relay.stall):
                    await track.changes()
        except TimeoutError:
            return False
        return True

    async def _fetch(self, track: CachedTrack, hole: Hole, order: GroupOrder) -> None:
        tried: set[Session] = set()
        hurried: set[Session] = set()
        errors: list[MoqtError] = []
        while next(gaps(track, hole.start, hole.end), None) is not None:
            session = None
            if len(tried) < ATTEMPTS:
                session = await self._relay.publisher(track.name, tried, self._patience(tried))
            if session is None:
                for low, high in () if hole.guess else gaps(track, hole.start, hole.end):
                    hole.unknown.add(low, high)
                hole.refusal = refusal(errors)
                return
            tried.add(session)
            try:
                slots = self._relay.fetches(session, FETCHES)
                async with slots:
                    others = bool(self._relay.others(track.name, tried))
                    hasty = session not in hurried and (others or session in self._relay.silent)
                    patience = self._relay.answer - (HASTE if session in hurried else 0.0)
                    deadline = HASTE if hasty else patience
                    await self._fetch_from(track, session, hole, order, deadline, slots.locked)
                return
            except DeadlineExceeded as error:
                logger.info("%s: a fetch of %s broke: %s", session.connection.id, track.name, error)
                if hasty and not others:  # Nobody else has it: it may just be slow.
                    hurried.add(session)
                    tried.discard(session)
                else:
                    errors.append(error)
            except MalformedTrack as error:
                self._malformed(hole, error)
                return
            except RequestRejected as error:
                logger.info("%s: %s", session.connection.id, error)
                errors.append(error)
                if error.retry_after is not None:
                    tried.discard(session)
                    await asyncio.sleep(max(error.retry_after, 0.1))
            except MoqtError as error:
                logger.info("%s: a fetch of %s broke: %s", session.connection.id, track.name, error)
                errors.append(error)

    async def _fetch_from(
        self,
        track: CachedTrack,
        session: Session,
        hole: Hole,
        order: GroupOrder,
        deadline: float,
        crowded: Callable[[], bool],
    ) -> None:
        gap = next(gaps(track, hole.start, hole.end), None)
        if gap is None:  # It came while we waited for our turn.
            return
        low, high = gap
        # What has come by another attempt is not asked for again.
        start, end = (low, hole.end) if order is GroupOrder.ASCENDING else (hole.start, hole.end)
        if high == hole.end:
            start = low
        inlet = FetchInlet(track, hole, order, (start, end), self._relay.read_ahead)
        # With an End Object, so that End Location tells how far the answer reaches (moqt 25 #7).
        location_filter = LocationFilter.absolute_range(start, end)
        with self._relay.asking(session):
            fetch = await session.fetch(
                track.name, filter=location_filter, order=order, sink=lambda _: inlet, deadline=deadline
            )
        async with fetch:
            assert fetch.end is not None
            self._relay.fetched += 1
            if fetch.end.end_of_track:
                track.saw(fetch.end.end)
                track.end_track(successor(fetch.end.end))
            if fetch.end.properties:  # moqt 13: the newest ones count.
                track.describe(fetch.end.properties)
            hole.replied = True
            track.wake()
            reading = asyncio.ensure_future(_to_the_end(fetch))
            try:
                if not await inlet.watch(reading, self._relay.stall, crowded):
                    return
                await reading
            except TimeoutError as error:
                raise DeadlineExceeded(str(error), self._relay.stall) from None
            finally:
                reading.cancel()
            inlet.finish(fetch.end.end)


def _bring(track: CachedTrack, item: KeptObject, hole: Hole, expires: float) -> None:
    """An Object from disk. Raises MalformedTrack."""
    header = ObjectHeader(
        item.location,
        item.subgroup,
        item.priority,
        decode_properties(item.properties),
        item.properties,
        ObjectStatus.NORMAL,
        item.size,
        item.datagram,
    )
    writer = track.begin(
        header, live=False, first=item.first, ends=item.ends, after=item.after, hole=hole, recalled=expires
    )
    if writer is not None:
        for piece in item.payload:
            writer.write(memoryview(piece))


async def _to_the_end(fetch: FetchStream) -> None:
    async for _ in fetch:
        pass
