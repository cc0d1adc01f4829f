"""What a relay keeps on disk: the second tier of its cache, and what it begins with after a restart.

Objects go to disk when all of their bytes are here, by one thread that writes them in batches; what somebody
wants and is no longer in memory is read back by the same thread, between two batches. The event loop hands
over and goes on. If more comes than the disk takes, some Objects are kept in memory only.

What the disk says of a Track holds for the Objects that are there: Locations where none exists are written
down as such, and everything else is unknown. So losing the newest Objects in a crash makes nothing false.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from moqt.errors import MoqtError
from moqt.fetching import predecessor, successor
from moqt.filters import GroupOrder, Location
from moqt.locations import LocationSet
from moqt.names import FullTrackName
from moqt.relay.cache import CACHE_DIR_BYTES
from moqt.relay.database import Batch, Database, KeptObject, KeptTrack, Outcome, StoreFailed
from moqt.track import StoredObject
from moqt.wire import Properties

if TYPE_CHECKING:
    from moqt.relay.cache import CachedObject

__all__ = ["DiskTrack", "Store"]

logger = logging.getLogger(__name__)

FILE: Final = "objects.sqlite3"

QUEUE: Final = 32 << 20
"""Bytes of Objects that wait for the disk; what would be more is not kept there."""

BATCH: Final = 8 << 20
"""Bytes of Objects for one transaction, for which somebody who reads may have to wait."""

GATHER: Final = 0.1
"""Seconds that Objects wait for more, if they don't make a batch."""

READ: Final = 2 << 20
"""Bytes of Objects that are read at a time."""

RETRY: Final = 30.0
"""Seconds without writing, after the disk has failed."""

MAX_TRACKS: Final = 1 << 15
"""Tracks that are kept: each takes some KiB of memory."""

MAX_ABSENT: Final = 1 << 16
"""Ranges without Objects that are remembered for each Track."""

USE: Final = 60.0
"""Seconds for which it is gathered which Objects are used."""

MAX_USED: Final = 1 << 13
"""Objects of which that is remembered."""


class DiskTrack:
    """What the disk has of one Track: `stored` Objects, and `absent` Locations, where none exists.

    `properties`, `largest`, `ended` and `finished` are those of the CachedTrack. `on_lack` is called when an
    Object is no longer stored, `on_contradiction` when another one has come in the place of one that is.
    """

    def __init__(self, store: Store, track: KeptTrack, stored: LocationSet, absent: LocationSet) -> None:
        self.name = track.name
        self.id = track.id
        self.stored = stored
        self.absent = absent
        self.properties = track.properties
        self.largest = track.largest
        self.ended = track.ended
        self.finished = track.finished
        self.on_lack: Callable[[], None] = lambda: None
        self.on_contradiction: Callable[[str], None] = lambda reason: None
        self.dropped = False
        self.unwritten: list[tuple[Location, Location]] = []
        """What of `absent` is not on disk."""
        self.waiting = 0
        """Objects that are to be written."""
        self._store = store

    def keep(self, item: CachedObject) -> None:
        """Put an Object, of which all has come, on disk, unless it has come from there."""
        if not item.recalled:
            self._store.keep(self, item)

    def use(self, location: Location) -> None:
        """It was wanted just now."""
        if location in self.stored:
            self._store.use(self, location)

    def learn(self, start: Location, end: Location, here: Iterable[StoredObject]) -> None:
        """Nothing exists from `start` to `end` but the Objects `here`."""
        empty = LocationSet()
        empty.add(start, end)
        for item in here:
            empty.remove(item.location, item.location)
        for low, high in empty:
            while low <= high and (news := self.absent.gap(low, high)) is not None:
                if len(self.absent) >= MAX_ABSENT:
                    return
                self.absent.add(*news)
                self.unwritten.append(news)
                low = successor(news[1])
        if self.unwritten:
            self._store.describe(self)

    def describe(
        self, properties: Properties, largest: Location | None, ended: Location | None, finished: bool
    ) -> None:
        """What is known of the Track as a whole."""
        self.properties = properties
        self.largest = largest
        self.ended = ended
        self.finished = finished
        self._store.describe(self)

    def drop(self) -> None:
        """The Track is malformed: nothing of it is kept (moqt 15 #5)."""
        self._store.drop(self)

    def part(self, start: Location, end: Location, order: GroupOrder) -> tuple[Location, Location, bool]:
        """The first part, in the order of delivery, of a range of unknown Locations: where it begins and
        ends, and whether all of it is on disk, or nothing. In descending order what is on disk is within one
        Group.
        """
        low = start if order is GroupOrder.ASCENDING else max(start, Location(end.group, 0))
        gap = self.stored.gap(low, end)
        if gap is None:
            return low, end, True
        if gap[0] > low:
            return low, predecessor(gap[0]), True
        if gap[1] == end and low > start:  # Descending, and the Groups before may be unknown as well.
            gap = self.stored.last_gap(start, end)
            assert gap is not None
        return *gap, False

    async def read(self, start: Location, end: Location) -> list[KeptObject]:
        """The first Objects from `start` to `end` that are on disk, in ascending order; [] if there are
        none.
        """
        return await self._store.read(self, start, end)

    def expiry(self, item: KeptObject) -> float:
        """When it expires, in the time of the event loop."""
        return item.expires - self._store.ahead


_Flying: TypeAlias = tuple[DiskTrack, int, "CachedObject"]
"""An Object that is being written, and the number of its Track as it was then."""


class Store:
    """Objects of all Tracks in a file of at most `limit` bytes in `directory`, which is made if need be.

    `clock` tells seconds since 1970. At most `queue` bytes of Objects wait for the disk. `bytes` of the file
    hold something; `skipped` Objects the disk did not take. To be made in a running event loop, and closed
    when done. Raises StoreFailed.
    """

    def __init__(
        self, directory: Path, limit: int = CACHE_DIR_BYTES, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.queue = QUEUE
        self.on_written: Callable[[], None] = lambda: None
        """Called when Objects need stay in memory no longer."""
        self.skipped = 0
        self.tracks: dict[FullTrackName, DiskTrack] = {}
        """Of which something is stored, or about to be."""
        self.limit = limit
        self._clock = clock
        self._most = min(QUEUE, limit // 8)
        """Bytes of the largest Object that is kept."""
        self._queue: deque[tuple[DiskTrack, CachedObject]] = deque()
        self._queued = 0
        self._waiting: set[CachedObject] = set()
        """Those in the queue, and those that are being written."""
        self._changed: set[DiskTrack] = set()
        self._used: set[tuple[int, Location]] = set()
        self._used_since = -math.inf
        self._dropped: set[int] = set()
        self._expires = math.inf
        self._writing: asyncio.Future[Outcome] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._resume = -math.inf
        """When the disk is tried again."""
        self._failing = False
        self._closed = False
        self._database = Database(directory / FILE, limit)
        try:
            loaded = [
                DiskTrack(self, found.track, found.stored, found.absent) for found in self._database.load()
            ]
        except (sqlite3.Error, MoqtError) as error:
            self._database.close()
            raise StoreFailed(f"{directory / FILE} is damaged ({error}): remove it to begin anew") from None
        self._numbers = {track.id: track for track in loaded}
        self.tracks.update((track.name, track) for track in loaded)
        self._last_number = max(self._numbers, default=0)
        self.bytes = self._database.bytes
        self._executor = ThreadPoolExecutor(1, "cache-dir")
        self._schedule()  # What has expired meanwhile goes.

    async def close(self) -> None:
        """Write what waits, and close the file."""
        while self._writing or (not self._pausing and (self._queue or self._changed or self._dropped)):
            self._write()
            if self._writing is not None:
                await asyncio.wait((self._writing,))
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._database.close)
        self._executor.shutdown()

    def track(self, name: FullTrackName) -> DiskTrack:
        """The disk's part of a Track."""
        known = self.tracks.get(name)
        if known is not None:
            return known
        return DiskTrack(self, KeptTrack(0, name), LocationSet(), LocationSet())

    @property
    def unwritten(self) -> int:
        """Objects, and Tracks of which something is new, that wait for the disk."""
        new = len(self._changed) + len(self._dropped) + (self._writing is not None)
        return len(self._waiting) + new

    @property
    def ahead(self) -> float:
        """Seconds by which `clock` is ahead of the event loop's."""
        return self._clock() - asyncio.get_running_loop().time()

    # What a DiskTrack asks.

    def keep(self, track: DiskTrack, item: CachedObject) -> None:
        """Write an Object; it stays in memory until that is done."""
        if item in self._waiting or track.dropped:
            return
        size = _size(item)
        if self._closed or self._pausing or size > self._most or self._queued + size > self.queue:
            self.skipped += 1
            return
        self._queue.append((track, item))
        self._queued += size
        self._waiting.add(item)
        item.pins += 1
        track.waiting += 1
        if track.id not in self._numbers:
            self._register(track)
        self.describe(track)

    def use(self, track: DiskTrack, location: Location) -> None:
        """An Object on disk was wanted just now."""
        if len(self._used) < MAX_USED:
            self._used.add((track.id, location))

    def describe(self, track: DiskTrack) -> None:
        """Write what is known of a Track, if any Object of it is kept."""
        if track.id in self._numbers:
            self._changed.add(track)
            self._schedule()

    def drop(self, track: DiskTrack) -> None:
        """Remove all of a Track, for good."""
        track.dropped = True
        if track.id in self._numbers:
            self._remove(track)

    async def read(self, track: DiskTrack, start: Location, end: Location) -> list[KeptObject]:
        """The first Objects from `start` to `end`; [] if there are none."""
        call = partial(self._database.read, track.id, start, end, limit=READ, now=self._clock())
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except sqlite3.Error as error:
            self._fail(error)
            return []

    # Writing.

    @property
    def _pausing(self) -> bool:
        return asyncio.get_running_loop().time() < self._resume

    def _schedule(self) -> None:
        """Write soon, or at once if there is much."""
        if self._queued >= min(BATCH, self._most):
            self._write()
        else:
            self._write_at(asyncio.get_running_loop().time() + GATHER)

    def _write_at(self, when: float) -> None:
        when = max(when, self._resume)
        if self._timer is None or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(when, self._write)

    def _write(self) -> None:
        """Begin to write a batch, unless one is being written."""
        if self._writing is not None or self._closed or self._pausing:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, flight = self._gather()
        call = partial(self._database.write, batch, self._clock())
        self._writing = asyncio.get_running_loop().run_in_executor(self._executor, call)
        self._writing.add_done_callback(lambda done: self._written(done, batch, flight))

    def _gather(self) -> tuple[Batch, list[_Flying]]:
        """What is written next, and the Objects of it as they are in memory."""
        batch = Batch(dropped=list(self._dropped))
        now = asyncio.get_running_loop().time()
        if now >= self._used_since + USE:
            batch.used = list(self._used)
            self._used.clear()
            self._used_since = now
        flight = []
        ahead = self.ahead
        size = 0
        while self._queue and (not size or size + _size(self._queue[0][1]) <= min(BATCH, self._most)):
            track, item = self._queue.popleft()
            size += _size(item)
            flight.append((track, track.id, item))
            if track.id in self._numbers:
                self._changed.add(track)
                # Memory does not know what it has lost; what comes again may be something else (moqt 15 #3).
                to = batch.again if item.location in track.stored else batch.objects
                to.append((track.id, _kept(item, item.expires + ahead)))
        self._queued -= size
        for track in self._changed:
            batch.tracks.append(
                KeptTrack(track.id, track.name, track.properties, track.largest, track.ended, track.finished)
            )
            batch.absent += [(track.id, *found) for found in track.unwritten]
            track.unwritten.clear()
        self._changed.clear()
        return batch, flight

    def _written(self, done: asyncio.Future[Outcome], batch: Batch, flight: list[_Flying]) -> None:
        self._writing = None
        error = done.exception()
        outcome = done.result() if error is None else Outcome(error=error)
        self.bytes = outcome.bytes
        self._expires = outcome.expires
        touched = {track for track, _, _ in flight}
        lacking = set()
        for number, location in outcome.removed:
            if (owner := self._numbers.get(number)) is not None:
                owner.stored.remove(location, location)
                lacking.add(owner)
        for track, number, item in flight:
            self._let_go(track, item)
            if outcome.error is None and number in self._numbers:
                track.stored.add(item.location, item.location)
        if outcome.error is None:
            self._dropped.difference_update(batch.dropped)
            if self._failing:
                logger.warning("%s is written again", self._database.path)
            self._failing = False
        else:
            self._fail(outcome.error)
        for track in touched | lacking:
            if not track.stored and not track.waiting:
                self._forget(track)
        self.on_written()
        for track in lacking:
            track.on_lack()
        for number, location in outcome.contradictions:
            if (owner := self._numbers.get(number)) is not None:
                owner.on_contradiction(f"a second, different Object at {location}")
        if self._queue or self._changed or self._dropped:
            self._schedule()
        elif self._expires < math.inf:
            self._write_at(self._expires - self.ahead)

    def _fail(self, error: BaseException) -> None:
        """The disk is full, or worse: go on without it for a while."""
        if not self._failing:
            logger.error("%s fails; Objects are kept in memory only: %s", self._database.path, error)
        self._failing = True
        self._resume = asyncio.get_running_loop().time() + RETRY
        self.skipped += len(self._queue)
        for track, item in self._queue:
            self._let_go(track, item)
        self._queue.clear()
        self._queued = 0

    def _let_go(self, track: DiskTrack, item: CachedObject) -> None:
        self._waiting.discard(item)
        track.waiting -= 1
        item.pins -= 1

    def _register(self, track: DiskTrack) -> None:
        if len(self.tracks) >= MAX_TRACKS:
            oldest = next(iter(self.tracks.values()))
            self._remove(oldest)
            oldest.on_lack()
        self._last_number += 1
        track.id = self._last_number
        self.tracks[track.name] = self._numbers[track.id] = track

    def _remove(self, track: DiskTrack) -> None:
        self._dropped.add(track.id)
        self._forget(track)
        self._schedule()

    def _forget(self, track: DiskTrack) -> None:
        """Nothing of it is on disk any more, nor what is known of it."""
        track.stored = LocationSet()
        track.unwritten = list(track.absent)
        self._changed.discard(track)
        self._numbers.pop(track.id, None)
        if self.tracks.get(track.name) is track:
            del self.tracks[track.name]


def _size(item: CachedObject) -> int:
    return item.size + len(item.properties)


def _kept(item: CachedObject, expires: float) -> KeptObject:
    return KeptObject(
        item.location,
        item.subgroup,
        item.priority,
        item.properties,
        item.payload,
        item.datagram,
        item.first,
        item.ends,
        item.after,
        expires,
    )
