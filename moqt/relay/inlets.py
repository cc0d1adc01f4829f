"""How data streams from upstream come into a cached Track (moqt 15)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from moqt.errors import MalformedTrack, ResetCode
from moqt.fetching import ranges, successor
from moqt.filters import GroupOrder, Location
from moqt.locations import LocationSet
from moqt.reception import Inlet
from moqt.relay.cache import Writer
from moqt.relay.cached import CachedTrack
from moqt.relay.followed import MAX_RANGES
from moqt.track import Hole
from moqt.wire import EndOfRange, ObjectDatagram, ObjectHeader, ObjectStatus, RangeStatus, SubgroupHeader

__all__ = ["FetchInlet", "SubgroupInlet", "gaps", "live_inlet"]

LOOK = 1.0
"""Seconds after which it is looked again how a fetch goes on."""


class SubgroupInlet(Inlet):
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

    async def room(self) -> bool:
        return True  # What is live does not wait: the cache throws out what is old.

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


class DatagramInlet(Inlet):
    """Brings an Object that came in a datagram into the Track."""

    def __init__(self, track: CachedTrack, datagram: ObjectDatagram) -> None:
        self._track = track
        self._datagram = datagram

    def object(self, header: ObjectHeader) -> Callable[[memoryview], None] | None:
        writer = self._track.begin(header, live=True, ends=self._datagram.end_of_group)
        return None if writer is None else writer.write

    def marker(self, event: EndOfRange) -> None:
        raise AssertionError("no End of Range in a datagram")

    async def room(self) -> bool:
        return True

    def end(self, code: int | None) -> None:
        if self._datagram.end_of_group:
            location = self._datagram.location
            self._track.end_group(location.group, location.object + 1)

    def cut(self) -> None:
        """All that there is came at once."""


def live_inlet(track: CachedTrack, header: SubgroupHeader | ObjectDatagram) -> Inlet:
    """For what a subscription brings."""
    if isinstance(header, ObjectDatagram):
        return DatagramInlet(track, header)
    return SubgroupInlet(track, header)


class FetchInlet(Inlet):
    """Brings a fetch or fill stream into the Track: Objects, and what lies between them.

    `asked` is what the stream was asked for, `limit` how many bytes may come before somebody uses them.
    `ended` gets the code with which the stream has ended (None: FIN).
    """

    def __init__(
        self,
        track: CachedTrack,
        hole: Hole,
        order: GroupOrder,
        asked: tuple[Location, Location],
        limit: int,
    ) -> None:
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._heard = 0
        self._waiting = False
        self._unwanted = False
        self._last: Location | None = None
        self._track = track
        self._hole = hole
        self._order = order
        self._asked = asked
        self._limit = limit
        self._writer: Writer | None = None
        self._first_group: int | None = None
        self._undecided: list[tuple[Location, Location]] = []
        """Gaps at the beginning of a descending fetch: they reach to End Location, which the reply tells."""

    def object(self, header: ObjectHeader) -> Callable[[memoryview], None] | None:
        self._writer = self._track.begin(header, live=False, hole=self._hole)
        if self._first_group is None:
            self._first_group = header.location.group
        for start, end in self._passed(header.location):
            if (
                self._order is GroupOrder.DESCENDING
                and end.group >= self._first_group
                and end > header.location
            ):
                self._undecided.append((start, end))
            else:
                self._track.learn(start, end)
        if self._writer is None:
            return None
        write = self._writer.write

        def counted(data: memoryview) -> None:
            self._heard += 1
            self._hole.hungry = False
            write(data)

        return counted

    def marker(self, event: EndOfRange) -> None:
        for start, end in self._passed(event.location):
            if event.kind is RangeStatus.NON_EXISTENT:
                self._track.learn(start, end)
            else:
                self._hole.unknown.add(start, end)
        if len(self._hole.unknown) > MAX_RANGES:
            raise MalformedTrack("a fetch is in more pieces than can be kept")

    async def room(self) -> bool:
        self._waiting = True
        while self._hole.ahead > self._limit and not (self._unwanted or self._hole.hungry):
            await self._track.changes()
        self._waiting = False
        return not self._unwanted

    def end(self, code: int | None) -> None:
        self._close(code)

    def cut(self) -> None:
        self._close(ResetCode.INTERNAL_ERROR)

    def finish(self, reached: Location) -> None:
        """The stream has ended with FIN: what it did not bring up to `reached` does not exist (moqt 10); the
        rest could not be found out.
        """
        for low, high in (*self._undecided, *ranges(self._order, *self._asked, self._last, None)):
            for first, last in gaps(self._hole.unknown, low, min(high, reached)):
                self._track.learn(first, last)
            if not self._hole.guess:
                self._hole.unknown.add(max(low, successor(reached)), high)

    async def watch(self, over: asyncio.Future[Any], stall: float, crowded: Callable[[], bool]) -> bool:
        """Wait until the stream is `over`; False if it is stopped because nobody wants the rest now, or who
        wants it is slow while the publisher is `crowded`: then it is fetched later. Raises TimeoutError when
        nothing has come for `stall` seconds.
        """
        loop = asyncio.get_running_loop()
        heard, since = self._heard, loop.time()
        while not over.done():
            stalled = loop.time() - since >= stall
            if self._waiting and (stalled or crowded()):
                self._unwanted = True
                self._track.wake()
                return False
            if stalled:
                raise TimeoutError(f"nothing came for {stall:g} s")
            await asyncio.wait((over,), timeout=min(stall, LOOK))
            if self._heard != heard:
                heard, since = self._heard, loop.time()
        return True

    def _close(self, code: int | None) -> None:
        if self._writer is not None:
            self._writer.abandon(0, resume=True)
        if not self.ended.done():
            self.ended.set_result(code)

    def _passed(self, location: Location) -> Iterator[tuple[Location, Location]]:
        self._heard += 1
        self._hole.hungry = False
        last, self._last = self._last, location
        return ranges(self._order, *self._asked, last, location)


def gaps(
    known: LocationSet | CachedTrack, start: Location, end: Location
) -> Iterator[tuple[Location, Location]]:
    """The parts of `start` to `end` that are not in `known`."""
    while start <= end and (gap := known.gap(start, end)) is not None:
        yield gap
        start = successor(gap[1])
