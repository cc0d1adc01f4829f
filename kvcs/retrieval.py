"""One segment on its way from one publication, each of its tracks by itself (kvcs 7.2 to 7.4)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Container, Iterator, Sequence
from typing import Final

from kvcs.assembly import SegmentAssembly
from kvcs.errors import ObjectRejected, PeerFault
from kvcs.manifest import SegmentEntry
from kvcs.names import DataTrack
from kvcs.progress import ATTEMPTS, LEAST_PAUSE, Progress, insist
from kvcs.source import Source
from moqt.errors import DoneCode, MoqtError, RequestCode, RequestRejected
from moqt.filters import Location, LocationFilter, RangeFilter, RangeKind
from moqt.subscribing import FetchStream, Fill, ReceivedObject, StreamEnd
from moqt.wire import ObjectStatus

__all__ = ["Retrieval"]

logger = logging.getLogger(__name__)

SETTLE: Final = 1.0
"""Seconds without an Object, once the end of a track is known, after which what is missing is fetched."""

SILENCE: Final = 2.0
"""Seconds in which a fill must bring something; else what it should bring is fetched."""

PARALLEL_FETCHES: Final = 2
"""Fetches of one track at a time: one for what is long, one for what an earlier layer waits for."""


class Retrieval:
    """A segment that `assembly` puts together from what `source` publishes. It begins at once.

    `live`: the segment was in production then. `lost` are the layers that this publication is known not to
    bring; `stopped`, that it brings no more.
    """

    def __init__(self, source: Source, assembly: SegmentAssembly, progress: Progress) -> None:
        self.source = source
        self.assembly = assembly
        self.live = not assembly.entry.complete
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
        self._fetched = 0
        """Of them, those that fetches brought."""
        self._failures: Counter[Location] = Counter()
        """How often an Object has not come, although it should, or was discarded."""
        self._ended: set[int] = set()
        """Groups to which the live track adds nothing more."""
        self._spans: asyncio.Queue[tuple[Location, Location]] = asyncio.Queue()
        self._live = retrieval.live
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
        """Fetch what is missing from `first` to `last`, both inclusive: it should be here."""
        self._spans.put_nowait((first, last))

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
            self._progress.left = False
            largest = subscription.largest
            live = start if largest is None else max(start, _after(largest))
            filling = subscription.expects_fill
            last_of_fill = self._now()
            ended = False
            behind: deque[tuple[float, Location]] = deque()
            while assembly.needs(self._track):
                # A stream that is reset before its header has come leaves no trace, and a peer may never
                # begin one. So a fill that says nothing counts as broken, and so does the stream of a Group
                # when a later one has ended.
                if filling and self._now() >= last_of_fill + SILENCE and largest is not None:
                    filling = False
                    self.fetch(start, largest)
                while behind and self._now() >= behind[0][0]:
                    self.fetch(live, behind.popleft()[1])
                try:
                    async with asyncio.timeout(SETTLE):
                        item = await anext(subscription)
                except TimeoutError:
                    # A track is complete when the fill has ended, and End of Track or the manifest says so.
                    # Objects may still be on their way on other streams then, but not for long.
                    if not filling and (ended or assembly.entry.complete):
                        return True
                    continue
                except StopAsyncIteration:
                    done = subscription.done
                    if done is not None and done.status == DoneCode.GOING_AWAY:
                        self._progress.note_leaving()
                    return ended or (done is not None and done.status == DoneCode.TRACK_ENDED)
                if isinstance(item, ReceivedObject):
                    ended = ended or item.status is ObjectStatus.END_OF_TRACK
                    if item.fill:
                        last_of_fill = self._now()
                    self._take(item)
                elif isinstance(item, StreamEnd) and item.group is not None:
                    if item.code is None:
                        self._ended.add(item.group)
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
            for first, last in self._runs(*await self._spans.get()):
                await self._fetch(first, last)

    async def _fetch(self, first: Location, last: Location) -> None:
        """Fetch Objects without a gap, and once more those that did not come, if that is of any use."""
        fetched = self._fetched
        growing = self._live and last.group not in self._ended
        lacking = PeerFault(
            f"{self._track} lacks something from layer {first.group}, block {first.object} "
            f"to layer {last.group}, block {last.object}"
        )
        try:
            location_filter, range_filters = self._filters(first, last)
            async with await self._session.fetch(
                self._name, filter=location_filter, range_filters=range_filters
            ) as fetch:
                discarded = await self._take_all(fetch)
            self._failed(first, last, lacking, but=discarded)
        except RequestRejected as rejection:
            if rejection.code == RequestCode.INVALID_RANGE:
                if growing:
                    return  # Nothing of it is published yet: it comes live.
                self._failed(first, last, lacking, times=ATTEMPTS)
            elif rejection.retry_after is None:
                self._failed(first, last, rejection, times=ATTEMPTS)
            else:
                self._progress.note(rejection)
                await asyncio.sleep(max(rejection.retry_after, LEAST_PAUSE))
        except MoqtError as error:
            self._progress.note(error)
            if self._session.closed:
                self._failed(first, last, error, times=ATTEMPTS)
            elif self._fetched == fetched:
                self._failed(first, last, error)
        self.fetch(first, last)

    async def _take_all(self, fetch: FetchStream) -> set[Location]:
        """Take what a fetch brings, to its end; which Objects were discarded."""
        discarded: set[Location] = set()
        async for item in fetch:
            if isinstance(item, ReceivedObject):
                placed = self._placed
                if not self._take(item):
                    discarded.add(item.location)
                self._fetched += self._placed - placed
        return discarded

    def _failed(
        self,
        first: Location,
        last: Location,
        why: Exception,
        *,
        but: Container[Location] = (),
        times: int = 1,
    ) -> None:
        """Count for what is missing that it did not come; when that happens too often its layer is lost."""
        failed = [
            where
            for layer, blocks in self._missing(first, last)
            for block in blocks
            if (where := Location(layer, block)) not in but
        ]
        if failed:
            self._progress.note(why)
        for where in failed:
            self._failures[where] += times
            if self._failures[where] >= ATTEMPTS:
                self._lost.add(where.group)
                self._progress.news.set()

    def _filters(self, first: Location, last: Location) -> tuple[LocationFilter, tuple[RangeFilter, ...]]:
        blocks = self._assembly.blocks
        if (first.object, last.object) == (0, blocks - 1):
            location_filter = LocationFilter.groups(first.group, last.group)
        else:
            location_filter = LocationFilter.absolute_range(first, last)
        if blocks == self._assembly.entry.blocks or not self._session.peer_setup.max_filter_ranges:
            return location_filter, ()
        return location_filter, (RangeFilter(RangeKind.OBJECTID, ((0, blocks - 1),)),)

    def _missing(self, first: Location, last: Location) -> Iterator[tuple[int, Sequence[int]]]:
        """What of `first` to `last` is not here and may still come: layers, and the blocks of each."""
        for layer in range(first.group, last.group + 1):
            low = first.object if layer == first.group else 0
            high = last.object if layer == last.group else self._assembly.blocks - 1
            blocks = self._assembly.missing_of(self._track, layer)
            if low or high < self._assembly.blocks - 1 or self._failures:
                blocks = [
                    block
                    for block in blocks
                    if low <= block <= high and self._failures[Location(layer, block)] < ATTEMPTS
                ]
            if blocks:
                yield layer, blocks

    def _runs(self, first: Location, last: Location) -> list[tuple[Location, Location]]:
        """The same in runs without a gap: (first, last) of each."""
        runs: list[tuple[Location, Location]] = []
        for layer, blocks in self._missing(first, last):
            for low, high in _spans(blocks):
                start = Location(layer, low)
                if runs and self._next(runs[-1][1]) == start:
                    start = runs.pop()[0]
                runs.append((start, Location(layer, high)))
        return runs

    def _next(self, location: Location) -> Location:
        last = location.object == self._assembly.blocks - 1
        return Location(location.group + 1, 0) if last else _after(location)

    def _take(self, item: ReceivedObject) -> bool:
        """Place an Object, if it is wanted. False if it is discarded because a check failed (kvcs 4): then it
        is fetched again.
        """
        layer, block = item.location.group, item.location.object
        if item.status is not ObjectStatus.NORMAL or not self._assembly.wants(self._track, layer, block):
            return True
        try:
            usable = self._assembly.place(self._track, layer, block, item.payload)
        except ObjectRejected as error:
            self._progress.rejected += 1
            why = PeerFault(f"{self._track}, layer {layer}, block {block} was discarded: {error}")
            logger.warning("%s", why)
            self._failed(item.location, item.location, why)
            self.fetch(item.location, item.location)
            return False
        self._placed += 1
        self._progress.placed(self._assembly.entry.segment, layer, usable)
        return True


def _spans(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of each run of ascending numbers without a gap."""
    if isinstance(numbers, range):
        yield numbers[0], numbers[-1]
        return
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[start], numbers[index - 1]
            start = index


def _after(location: Location) -> Location:
    return Location(location.group, location.object + 1)
