"""One segment on its way from one publication, each of its tracks by itself (kvcs 7.2 to 7.4)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvcs.assembly import SegmentAssembly
from kvcs.errors import ObjectRejected, PeerFault
from kvcs.manifest import SegmentEntry
from kvcs.names import DataTrack
from kvcs.progress import ATTEMPTS, LEAST_PAUSE, Progress, insist
from kvcs.source import Source
from moqt.errors import DeadlineExceeded, DoneCode, MoqtError, RequestCode, RequestRejected
from moqt.filters import Location, LocationFilter, RangeFilter, RangeKind
from moqt.subscribing import Fill, ReceivedObject, StreamEnd
from moqt.wire import ObjectStatus

__all__ = ["Retrieval"]

logger = logging.getLogger(__name__)

SETTLE: Final = 1.0
"""Seconds without an Object, once the end of a track is known, after which what is missing is fetched."""

SILENCE: Final = 2.0
"""Seconds in which a fill or a fetch must bring something, or it is taken for broken."""

PARALLEL_FETCHES: Final = 2
"""Fetches of one track at a time: one for what is long, one for what an earlier layer waits for."""


class Retrieval:
    """A segment that `assembly` puts together from what `source` publishes. It begins at once.

    `lost` are the layers that this publication is known not to bring; `stopped`, that it brings no more.
    """

    def __init__(self, source: Source, assembly: SegmentAssembly, progress: Progress) -> None:
        self.source = source
        self.assembly = assembly
        self.lost: set[int] = set()
        self.stopped = False
        self._tracks = {track: _TrackRetrieval(self, track, progress) for track in assembly.tracks}

    def update(self, entry: SegmentEntry) -> None:
        """Take over a newer description of the segment. Raises ManifestRejected when it contradicts what was
        handed out.
        """
        for track, layer, block in self.assembly.update(entry):
            logger.warning("%s, layer %d, block %d is not what the manifest lists", track, layer, block)
            self._tracks[track].fetch(Location(layer, block), Location(layer, block))

    def give_up(self) -> None:
        """Stop: what is not here now will not come from this publication."""
        self.stopped = True
        for track in self._tracks.values():
            track.stop()
        self.lost.update(range(self.assembly.due, self.assembly.last + 1))


@dataclass(frozen=True, slots=True)
class _Span:
    """Objects that should be here, from `first` to `last`, both inclusive, and how many fetches have not
    brought them.
    """

    first: Location
    last: Location
    failures: int = 0


class _TrackRetrieval:
    """One track of a segment. What its subscription does not bring, although it should, is fetched while the
    subscription goes on. A track of a complete segment is fetched from the start.
    """

    def __init__(self, retrieval: Retrieval, track: DataTrack, progress: Progress) -> None:
        self._assembly = retrieval.assembly
        self._lost = retrieval.lost
        self._session = retrieval.source.session
        self._track = track
        self._name = retrieval.source.track(track.name)
        self._progress = progress
        self._placed = 0
        self._discarded: Counter[Location] = Counter()
        self._spans: asyncio.Queue[_Span] = asyncio.Queue()
        self._live = not self._assembly.entry.complete
        self._tasks = [progress.spawn(self._fetch_spans()) for _ in range(PARALLEL_FETCHES)]
        if self._live:
            self._tasks.append(progress.spawn(self._receive()))
        else:
            self._fetch_all()

    def stop(self) -> None:
        """End all requests."""
        for task in self._tasks:
            task.cancel()

    def fetch(self, first: Location, last: Location) -> None:
        """Fetch what is missing from `first` to `last`: it should be here."""
        self._spans.put_nowait(_Span(first, last))

    def _fetch_all(self) -> None:
        assembly = self._assembly
        self.fetch(Location(assembly.due, 0), Location(assembly.last, assembly.blocks - 1))

    # Retrieval during production (kvcs 7.2).

    async def _receive(self) -> None:
        try:
            await insist(self._subscribe, lambda: self._placed, self._progress.note)
        except MoqtError as error:
            self._progress.note(error)
        # What has not come by now, the publication has, or it never will.
        self._live = False
        self._fetch_all()

    async def _subscribe(self) -> bool:
        """Receive from a subscription until it has brought all; False if more may come by another one."""
        assembly = self._assembly
        start = Location(assembly.due, 0)
        fill = Fill(filter=LocationFilter.absolute_start(start.group, start.object))
        async with await self._session.subscribe(
            self._name, filter=LocationFilter.next_object(), fill=fill
        ) as subscription:
            largest = subscription.largest
            live = start if largest is None else max(start, _after(largest))
            filling = subscription.expects_fill
            last_of_fill = self._now()
            ended = False
            behind: deque[tuple[float, Location]] = deque()
            while assembly.needs(self._track):
                # A stream that is reset before its header has come leaves no trace. So a fill that says
                # nothing counts as broken, and so does the stream of a Group when a later one has ended.
                if filling and self._now() >= last_of_fill + SILENCE and largest is not None:
                    filling = False
                    self.fetch(start, largest)
                while behind and self._now() >= behind[0][0]:
                    self.fetch(live, behind.popleft()[1])
                try:
                    async with asyncio.timeout(SETTLE):
                        item = await anext(subscription)
                except TimeoutError:
                    # A track is complete on End of Track, or when the fill has ended and the manifest says
                    # so. Objects may still be on their way on other streams then, but not for long.
                    if ended or (not filling and assembly.entry.complete):
                        return True
                    continue
                except StopAsyncIteration:
                    done = subscription.done
                    return ended or (done is not None and done.status == DoneCode.TRACK_ENDED)
                if isinstance(item, ReceivedObject):
                    ended = ended or item.status is ObjectStatus.END_OF_TRACK
                    if item.fill:
                        last_of_fill = self._now()
                    self._take(item)
                elif isinstance(item, StreamEnd) and item.group is not None:
                    # It was to bring what is `live` of the Group.
                    end = Location(item.group, assembly.blocks - 1)
                    self.fetch(max(live, Location(item.group, 0)), end)
                    behind.append((self._now() + SETTLE, end))
                elif isinstance(item, StreamEnd) and largest is not None:
                    filling = False
                    self.fetch(start, largest)
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Retrieval of what exists (kvcs 7.3, 7.4).

    async def _fetch_spans(self) -> None:
        while True:
            span = await self._spans.get()
            for first, last in self._runs(span.first, span.last):
                await self._fetch(_Span(first, last, span.failures))

    async def _fetch(self, span: _Span) -> None:
        """Fetch a span, and once more what of it did not come, unless that was tried often enough."""
        reached, last = span.first, span.last
        brought = 0
        discarded: set[Location] = set()
        failures = span.failures + 1
        why: Exception = PeerFault(f"{self._track}: not all from {span.first} to {span.last} is there")
        try:
            location_filter, range_filters = self._filters(span)
            async with await self._session.fetch(
                self._name, filter=location_filter, range_filters=range_filters
            ) as fetch:
                heard = False
                while True:
                    try:
                        async with asyncio.timeout(None if heard else SILENCE):
                            item = await anext(fetch)
                    except TimeoutError:
                        if self._now() >= self._progress.last + SILENCE:
                            raise DeadlineExceeded("what was fetched", SILENCE) from None
                        continue  # Something else goes first.
                    except StopAsyncIteration:
                        break
                    heard = True
                    if isinstance(item, ReceivedObject):
                        reached = item.location
                        placed = self._placed
                        if not self._take(item):
                            discarded.add(reached)
                        brought += self._placed - placed
            reached = last
            if self._live and fetch.end is not None and not fetch.end.end_of_track:
                last = min(last, fetch.end.end)  # What follows is not published yet: it comes live.
        except RequestRejected as rejection:
            if rejection.retry_after is not None:
                self._progress.note(rejection)
                await asyncio.sleep(max(rejection.retry_after, LEAST_PAUSE))
                self._spans.put_nowait(span)
                return
            if self._live and rejection.code == RequestCode.INVALID_RANGE:
                return  # Nothing of it is published yet.
            why, failures, reached = rejection, ATTEMPTS, last
        except DeadlineExceeded as silence:
            # The stream may have broken off before its header came; or nothing comes, and then patience ends.
            self._progress.note(silence)
            self._spans.put_nowait(span)
            return
        except MoqtError as error:
            why = error
            if self._session.closed:
                failures = ATTEMPTS
            if not brought or self._session.closed:
                reached = last
        for first, end in self._runs(span.first, min(reached, last), discarded):
            self._again(_Span(first, end, failures), why)
        for first, end in self._runs(_after(reached), last):
            self._again(_Span(first, end, span.failures), why)

    def _again(self, span: _Span, why: Exception) -> None:
        self._progress.note(why)
        if span.failures < ATTEMPTS:
            logger.info("fetching %s again, from %s to %s", self._track, span.first, span.last)
            self._spans.put_nowait(span)
        else:
            self._lost.update(range(span.first.group, span.last.group + 1))
            self._progress.news.set()

    def _filters(self, span: _Span) -> tuple[LocationFilter, tuple[RangeFilter, ...]]:
        blocks = self._assembly.blocks
        if (span.first.object, span.last.object) == (0, blocks - 1):
            location_filter = LocationFilter.groups(span.first.group, span.last.group)
        else:
            location_filter = LocationFilter.absolute_range(span.first, span.last)
        if blocks == self._assembly.entry.blocks or not self._session.peer_setup.max_filter_ranges:
            return location_filter, ()
        return location_filter, (RangeFilter(RangeKind.OBJECTID, ((0, blocks - 1),)),)

    def _runs(
        self, first: Location, last: Location, but: Container[Location] = ()
    ) -> Iterator[tuple[Location, Location]]:
        """What is missing from `first` to `last`, in runs without a gap, but for some Objects, and for layers
        that are lost.
        """
        run: tuple[Location, Location] | None = None
        final = self._assembly.blocks - 1
        for layer in range(first.group, last.group + 1):
            if layer in self._lost:
                continue
            low = first.object if layer == first.group else 0
            high = last.object if layer == last.group else final
            missing = self._assembly.missing_of(self._track, layer)
            if but:
                missing = [block for block in missing if Location(layer, block) not in but]
            for begin, end in _ranges(missing, low, high):
                here = Location(layer, begin), Location(layer, end)
                if run is not None and begin == 0 and run[1] == Location(layer - 1, final):
                    run = run[0], here[1]
                    continue
                if run is not None:
                    yield run
                run = here
        if run is not None:
            yield run

    def _take(self, item: ReceivedObject) -> bool:
        """Place an Object, if it is wanted. False if it is discarded because a check failed (kvcs 4): it is
        fetched again, or its layer is lost.
        """
        layer, block = item.location.group, item.location.object
        if item.status is not ObjectStatus.NORMAL or not self._assembly.wants(self._track, layer, block):
            return True
        try:
            usable = self._assembly.place(self._track, layer, block, item.payload)
        except ObjectRejected as error:
            self._progress.rejected += 1
            self._discarded[item.location] += 1
            why = PeerFault(f"{self._track}, layer {layer}, block {block} was discarded: {error}")
            logger.warning("%s", why)
            self._again(_Span(item.location, item.location, self._discarded[item.location]), why)
            return False
        self._placed += 1
        self._progress.placed(self._assembly.entry.segment, layer, usable)
        return True


def _after(location: Location) -> Location:
    return Location(location.group, location.object + 1)


def _ranges(numbers: Sequence[int], low: int, high: int) -> list[tuple[int, int]]:
    """The ascending `numbers` from `low` to `high` as ranges without a gap, inclusive."""
    if isinstance(numbers, range):
        numbers = range(max(numbers.start, low), min(numbers.stop, high + 1))
        return [(numbers[0], numbers[-1])] if numbers else []
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if low <= number <= high:
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1] = ranges[-1][0], number
            else:
                ranges.append((number, number))
    return ranges
