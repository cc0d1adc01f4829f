"""The bytes of fetch and fill streams, pulled from a Track as the scheduler has room for them (moqt 7, 10,
12.4).

A publisher's Track has all that exists. A cache has holes: the stream stops there until it is known what they
hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moqt.errors import ResetCode
from moqt.filters import MAX_VARINT, GroupOrder, Location, RangeFilter, matches
from moqt.quic.api import Buffer
from moqt.scheduler import BrokenSource, Outgoing, Scheduler, Source, Urgency
from moqt.track import Hole, StoredObject, Track
from moqt.wire import FetchEncoder, RangeStatus, decode_properties

__all__ = ["LAST", "Puller", "passes", "predecessor", "ranges", "seconds_of", "successor"]

LAST = Location(MAX_VARINT, MAX_VARINT)

_TURN = 512
"""Objects that range filters keep back before others get their turn; large properties count as more."""


def seconds_of(milliseconds: int | None) -> float | None:
    """A FILL_TIMEOUT in seconds."""
    return None if milliseconds is None else milliseconds / 1000


def successor(location: Location) -> Location:
    """The next Location."""
    if location.object < MAX_VARINT:
        return Location(location.group, location.object + 1)
    return Location(location.group + 1, 0)


def predecessor(location: Location) -> Location:
    """The Location before."""
    if location.object:
        return Location(location.group, location.object - 1)
    return Location(location.group - 1, MAX_VARINT)


def passes(item: StoredObject, filters: tuple[RangeFilter, ...]) -> bool:
    """Whether range filters let an Object pass (moqt 8)."""
    return not filters or matches(
        filters,
        subgroup=item.subgroup,
        object_id=item.location.object,
        priority=item.priority,
        properties=decode_properties(item.properties),
    )


def ranges(
    order: GroupOrder, start: Location, end: Location, after: Location | None, upto: Location | None
) -> Iterator[tuple[Location, Location]]:
    """The Locations from `start` to `end` that come behind `after` (None: all) and no later than `upto`
    (None: all) in the order of delivery, as ranges in that order.

    A range over several Groups comes in that order only if `order` is ascending.
    """
    if order is GroupOrder.ASCENDING:
        low = start if after is None else max(start, successor(after))
        high = end if upto is None else min(end, upto)
        if low <= high:
            yield low, high
        return
    top = end.group if after is None else after.group
    bottom = start.group if upto is None else upto.group
    spans = [(top, top)] if top == bottom else [(top, top), (bottom + 1, top - 1), (bottom, bottom)]
    for first, last in spans:
        if first <= last:
            low, high = max(start, Location(first, 0)), min(end, Location(last, MAX_VARINT))
            if first == top and after is not None:
                low = max(low, successor(after))
            if last == bottom and upto is not None:
                high = min(high, upto)
            if low <= high:
                yield low, high


@dataclass(frozen=True, slots=True)
class _Gap:
    """What is unknown next, in the order of delivery, from `first` to `last`, and the whole range that
    `ask_start` and `ask_end` bound.
    """

    first: Location
    last: Location
    ask_start: Location
    ask_end: Location


class Puller:
    """What a fetch or fill stream holds: the Objects of `track` from `start` to `end`.

    `patience` is the FILL_TIMEOUT in seconds (None: none): how long to wait for what is not here, in all.
    """

    def __init__(
        self,
        track: Track,
        start: Location,
        end: Location,
        order: GroupOrder,
        filters: tuple[RangeFilter, ...],
        urgency: Callable[[StoredObject], Urgency],
        *,
        patience: float | None,
    ) -> None:
        self._track = track
        self._start = start
        self._end = end
        self._order = order
        self._filters = filters
        self._urgency = urgency
        self._patience = patience
        self._out_of_time = patience == 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._hole: Hole | None = None
        self._wake: Callable[[], None] = lambda: None
        self._waiting = False

    def outgoing(
        self, scheduler: Scheduler, request_id: int, urgency: Urgency, on_end: Callable[[int | None], None]
    ) -> Outgoing:
        """The stream, to be started."""

        def ended(code: int | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            on_end(code)

        result = Outgoing(urgency, source=self._source(request_id), on_end=ended)

        def wake() -> None:
            self._waiting = False
            scheduler.start(result)

        self._wake = wake
        return result

    def _source(self, request_id: int) -> Source:
        encoder = FetchEncoder(request_id, self._order)
        yield None, (encoder.header(),)
        track = self._track
        after: Location | None = None
        passed_over = 0
        while True:
            if passed_over > _TURN:  # Others get their turn.
                passed_over = 0
                asyncio.get_running_loop().call_soon(self._wake)
                yield None
            if track.fault:
                raise BrokenSource(ResetCode.MALFORMED_TRACK)  # moqt 15 #5
            track.expire()
            item = track.following(after, self._start, self._end, self._order)
            gap = self._gap(after, item.location if item else None)
            if gap is not None:
                seen = self._look_into(gap)
                if seen is None:
                    self._wait()
                    yield None
                    continue
                gap, kind = seen
                yield None, self._mark(encoder, after, gap, kind)
                after = gap.last
            elif item is None:
                return
            else:
                if passes(item, self._filters):
                    yield from self._object(encoder, item)
                else:
                    passed_over += 1 + len(item.properties) // 100
                after = item.location

    def _object(self, encoder: FetchEncoder, item: StoredObject) -> Source:
        """One Object, as its bytes come."""
        self._track.use(item)
        header = encoder.object(
            item.location,
            item.size,
            subgroup=item.subgroup,
            priority=item.priority,
            properties=item.properties,
            datagram=item.datagram,
        )
        item.pins += 1
        try:
            pieces = item.since(0)
            yield self._urgency(item), (header, *pieces)
            sent = sum(map(len, pieces))
            hole: Hole | None = None
            while sent < item.size:
                if self._track.fault:
                    raise BrokenSource(ResetCode.MALFORMED_TRACK)
                if item.lost or (hole is not None and hole.done and item.location in hole.unknown):
                    raise BrokenSource(ResetCode.INTERNAL_ERROR)
                pieces = item.since(sent)
                if pieces:
                    yield None, pieces
                    sent += sum(map(len, pieces))
                else:
                    if hole is None or hole.done:
                        hole = self._track.bring_rest(item)
                    self._hurry(hole)
                    self._wait()
                    yield None
        finally:
            item.pins -= 1

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._track.wait(self._wake)

    def _gap(self, after: Location | None, upto: Location | None) -> _Gap | None:
        """What is unknown before the next Object that is here."""
        if self._track.authoritative:
            return None
        descending = self._order is GroupOrder.DESCENDING
        for low, high in ranges(self._order, self._start, self._end, after, upto):
            found = self._track.gap(low, high, last=descending)
            if found is None:
                continue
            first, last = found
            if not descending:
                return self._span(first, first, last)
            if first.group == last.group:  # Its last gap is not the first one to be delivered.
                found = self._track.gap(max(low, Location(first.group, 0)), last)
                assert found is not None
                return self._span(found[0], *found)
            return self._span(max(low, Location(last.group, 0)), first, last)
        return None

    def _span(self, begin: Location, first: Location, last: Location) -> _Gap:
        """A gap from `first` to `last`, of which `begin` is delivered first."""
        if self._order is GroupOrder.ASCENDING or first.group == last.group:
            return _Gap(begin, last, first, last)
        whole = Location(last.group, min(self._end, Location(last.group, MAX_VARINT)).object)
        bottom = first.group
        if first != max(self._start, Location(first.group, 0)):
            bottom += 1
        marked = last if last != whole or bottom > last.group else Location(bottom, MAX_VARINT)
        if marked.group == self._end.group:
            marked = last
        return _Gap(begin, marked, first, last)

    def _look_into(self, gap: _Gap) -> tuple[_Gap, RangeStatus] | None:
        """What is to be said of a gap, or of the part of it that was looked for; None: it is being fetched,
        wait.
        """
        hole = self._hole
        if hole is not None and hole.done:
            self._hole = None
            if hole.start <= gap.first <= hole.end and gap.first in hole.unknown:
                return self._part(gap, hole), RangeStatus.UNKNOWN
            hole = None
        if self._out_of_time:
            return gap, RangeStatus.TIMED_OUT
        if hole is None or not hole.start <= gap.first <= hole.end:
            hole = self._track.fill_hole(gap.ask_start, gap.ask_end, self._order)
            if hole.done:
                return self._part(gap, hole), RangeStatus.UNKNOWN
            self._hole = hole
        self._hurry(hole)
        if self._patience is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._time_is_up)
        return None

    def _hurry(self, hole: Hole | None) -> None:
        """What comes next is wanted now, however much has come that others have not taken."""
        if hole is not None and not hole.hungry:
            hole.hungry = True
            self._track.hurry()

    def _part(self, gap: _Gap, hole: Hole) -> _Gap:
        return self._span(gap.first, max(gap.ask_start, hole.start), min(gap.ask_end, hole.end))

    def _time_is_up(self) -> None:
        self._out_of_time = True
        self._wake()

    def _mark(
        self, encoder: FetchEncoder, after: Location | None, gap: _Gap, kind: RangeStatus
    ) -> tuple[Buffer, ...]:
        """End of Range for a gap, and before it one for what is known not to exist, if there is any (moqt
        10).
        """
        sign = 1 if self._order is GroupOrder.ASCENDING else -1

        def place(location: Location) -> tuple[int, int]:
            return sign * location.group, location.object

        first = gap.first
        before = Location(first.group, first.object - 1)
        if not first.object:
            before = Location(first.group - sign, MAX_VARINT)
        begin = self._start if sign > 0 else max(self._start, Location(self._end.group, 0))
        known = place(before) > place(after) if after is not None else place(before) >= place(begin)
        said = (encoder.end_of_range(RangeStatus.NON_EXISTENT, before),) if known else ()
        return (*said, encoder.end_of_range(kind, gap.last))
