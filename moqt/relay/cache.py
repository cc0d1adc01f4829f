"""What a relay keeps: Tracks that subscribing fills, and the bound on what they hold (moqt 15)."""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from moqt.errors import DoneCode, MalformedTrack, ResetCode
from moqt.fetching import LAST, successor
from moqt.filters import MAX_VARINT, GroupOrder, Location
from moqt.ledger import Ledger
from moqt.locations import LocationSet
from moqt.names import FullTrackName
from moqt.quic.api import Buffer
from moqt.relay.store import DiskTrack
from moqt.track import Hole, StoredObject, Track, TrackWatcher
from moqt.wire import ObjectHeader, ObjectStatus, Properties, PropertyType, decode_properties, get

__all__ = ["Cache", "CachedObject", "CachedTrack", "Writer"]

SEGMENT = 1 << 16
"""Bytes for which memory is taken at once: no more than that before any of them has come."""

OVERHEAD = 480
"""Bytes that a cached Object takes besides its payload and properties, as measured."""

GROUP_OVERHEAD = 512
"""The same for a Group of which an Object is here."""

TRACK_OVERHEAD = 6500
"""The same for a Track."""

MAX_BUSY = 64
"""Objects that can't be thrown out and are passed over at a time, to make room."""

MAX_RANGES = 1 << 16
"""Ranges that are known of a Track, besides those of the Objects that are here (moqt 21)."""

MAX_KNOWN = 1 << 14
"""Groups and Subgroups remembered for each Track, to find contradictions (moqt 20.1); they take up to 750
bytes each.
"""


@dataclass(slots=True, eq=False)
class CachedObject(StoredObject):
    """An Object of which `missing` bytes have not come; `writers` streams bring it.

    `first`, `ends` and `after` say how it came on a subgroup stream: as the first of its Subgroup, on a
    stream that ends with the Group, behind that Object on the same stream (moqt 12.2, 12.6). `older` and
    `newer` are its neighbours in the order of use.
    """

    track: CachedTrack | None = None
    segments: list[bytearray] | None = None
    """What the payload is gathered in while it comes."""
    writers: int = 0
    expires: float = math.inf
    first: bool = False
    ends: bool = False
    after: int | None = None
    hole: Hole | None = None
    """What it was fetched for, until somebody uses it."""
    recalled: bool = False
    """Whether it came from disk."""
    older: CachedObject | None = None
    newer: CachedObject | None = None

    def since(self, offset: int) -> tuple[Buffer, ...]:
        if not offset and not self.missing:
            return self.payload
        arrived = self.size - self.missing
        pieces = []
        start = 0
        for segment in self.segments or self.payload:
            end = min(start + len(segment), arrived)
            if end > offset:
                pieces.append(memoryview(segment)[max(offset - start, 0) : end - start])
            start += len(segment)
        return tuple(pieces)

    def has(self, offset: int, data: memoryview) -> bool:
        """Whether `data` is what came at `offset`."""
        for piece in self.since(offset):
            size = min(len(piece), len(data))
            if data[:size] != piece[:size]:
                return False
            data = data[size:]
            if not data:
                break
        return True

    @property
    def busy(self) -> bool:
        """Whether it must stay: it is being sent, is about to be, or is on its way."""
        return self.pins > 0 or self.writers > 0 or self.hole is not None

    @property
    def cost(self) -> int:
        """Bytes of memory."""
        taken = sum(map(len, self.segments)) if self.segments is not None else self.size - self.missing
        return OVERHEAD + len(self.properties) + taken


class Cache:
    """The bound in bytes over all Tracks: what was used longest ago goes first, but no Object that is being
    sent, or on its way.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.evicted = 0
        self.hits = 0
        """Objects that fetches and fills took from what was here."""
        self.misses = 0
        """Objects that were fetched for them."""
        self._count = 0
        # A ring through all Objects in the order of use: an OrderedDict takes 150 bytes for each.
        self._ring = CachedObject(Location(0, 0), (), 0, 0, 0, b"")
        self._ring.older = self._ring.newer = self._ring

    def __len__(self) -> int:
        return self._count

    def add(self, item: CachedObject) -> None:
        """Take an Object in."""
        self._count += 1
        self._link(item)
        self.grow(item.cost)

    def grow(self, size: int) -> None:
        """An Object has taken `size` bytes more."""
        self.bytes += size
        if self.bytes > self.limit:
            self._trim()

    def shrink(self, size: int) -> None:
        """So much is no longer taken."""
        self.bytes -= size

    def use(self, item: CachedObject) -> None:
        """It was wanted just now."""
        if item.newer is not None:
            self._unlink(item)
            self._link(item)

    def discard(self, item: CachedObject) -> None:
        """It is no longer kept; no effect if it was not."""
        if item.newer is not None:
            self._unlink(item)
            self._count -= 1
            self.bytes -= item.cost

    def _link(self, item: CachedObject) -> None:
        newest = self._ring.older
        assert newest is not None
        item.older, item.newer = newest, self._ring
        newest.newer = self._ring.older = item

    def _unlink(self, item: CachedObject) -> None:
        assert item.older is not None
        assert item.newer is not None
        item.older.newer, item.newer.older = item.newer, item.older
        item.older = item.newer = None

    def _trim(self) -> None:
        busy = 0
        while self.bytes > self.limit and busy < MAX_BUSY:
            item = self._ring.newer
            assert item is not None
            if item.track is None:  # The ring's own: nothing is here.
                break
            if item.busy:
                busy += 1
                self.use(item)  # So that it is not looked at each time.
            else:
                self.evicted += 1
                item.track.evict(item)


class Writer:
    """One Object as one stream brings it. Several may bring the same one: what is here already is compared,
    the rest is taken from whoever is ahead.
    """

    def __init__(self, track: CachedTrack, item: CachedObject) -> None:
        self._track = track
        self._item = item
        self._offset = 0
        item.writers += 1
        if not item.size:
            self._leave()

    def write(self, data: memoryview) -> None:
        """The next bytes. Raises MalformedTrack when they are not what came before (moqt 15 #3)."""
        item = self._item
        if self._track.fault:
            return
        known = min(len(data), item.size - item.missing - self._offset)
        if known and not item.has(self._offset, data[:known]):
            raise MalformedTrack(f"a second, different payload at {item.location}")
        self._offset += len(data)
        if known < len(data):
            self._track.extend(item, data[known:])
        if self._offset == item.size:
            self._leave()

    def abandon(self, code: int, *, resume: bool) -> None:
        """The stream has ended; no effect if all has come. With `resume` the rest may come another way."""
        if self._offset < self._item.size:
            self._offset = self._item.size
            self._leave(code, resume)

    def _leave(self, code: int = ResetCode.INTERNAL_ERROR, resume: bool = False) -> None:
        self._item.writers -= 1
        if not self._item.writers:
            self._track.left(self._item, code, resume=resume)


class CachedTrack(Track):
    """A Track as a relay knows it. What is `known` and not here does not exist; the rest is unknown.

    `filler` fetches a range, `holes` are those that are being filled; `on_idle` is called when nobody follows
    the Track, or nothing is left of it, `on_lack` when something is no longer kept, `on_steer` when those who
    follow it may all be paused, or not any more, `on_group_request` when one of them wants a new Group.
    `disk` is what is kept of it on disk, also of an earlier life.
    """

    authoritative = False

    def __init__(
        self,
        name: FullTrackName,
        cache: Cache,
        filler: Callable[[CachedTrack, Location, Location, GroupOrder], Hole],
        holes: Collection[Hole] = (),
        disk: DiskTrack | None = None,
    ) -> None:
        super().__init__(name)
        self.known = LocationSet()
        self.on_idle: Callable[[], None] = lambda: None
        self.on_lack: Callable[[], None] = lambda: None
        self.on_steer: Callable[[], None] = lambda: None
        self.on_group_request: Callable[[int], None] = lambda _: None
        self.live_start = Location(0, 0)
        """From here on somebody was promised all that is published."""
        self.doubtful = False
        """Something may have been published of which nothing came, since a stream was reset, or a datagram
        may have been lost: the Largest Object may be another one than we know.
        """
        self.finished = False
        """Its publisher has said that nothing more comes."""
        self._cache = cache
        self._filler = filler
        self._holes = holes
        self._ledger = Ledger(MAX_KNOWN, self._ids_of)
        self._told = LocationSet()
        self._streams: Counter[tuple[int, int]] = Counter()
        self._deferred: list[Callable[[], None]] | None = None
        self._waiters: list[Callable[[], None]] = []
        self._count = 0
        self._partial: set[CachedObject] = set()
        """Those of which something has not come."""
        self._lifetime = math.inf
        self._expiries: list[tuple[float, Location]] = []
        """A heap of when Objects expire; there may be another one at a Location meanwhile, or none."""
        self._timer: asyncio.TimerHandle | None = None
        self.disk: DiskTrack | None = None
        if disk is not None:
            self._restore(disk)

    def _restore(self, disk: DiskTrack) -> None:
        self.describe(disk.properties)
        self.largest, self.ended, self.finished = disk.largest, disk.ended, disk.finished
        for start, end in disk.absent:
            self.known.add(start, end)
        self.disk = disk
        disk.on_lack = self._lack

    # What the relay tells.

    def describe(self, properties: Properties) -> None:
        """Take over the Track Properties; the newest set replaces the one before (moqt 13)."""
        self.properties = properties
        duration = get(properties, PropertyType.MAX_CACHE_DURATION)
        self._lifetime = duration / 1000 if isinstance(duration, int) else math.inf
        priority = get(properties, PropertyType.DEFAULT_PUBLISHER_PRIORITY)
        self.priority = priority if isinstance(priority, int) else 128
        order = get(properties, PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER)
        self.order = GroupOrder(order) if isinstance(order, int) else GroupOrder.ASCENDING
        self._tell_disk()

    def saw(self, largest: Location | None, *, tell: bool = False) -> None:
        """A publisher says that its Largest Object is this (moqt 5.3); with `tell` it said so unasked."""
        if largest is not None and (self.largest is None or largest > self.largest):
            self.largest = largest
            self._tell_disk()
            for watcher in list(self._watchers) if tell else ():
                watcher.on_largest()

    def begin(
        self,
        header: ObjectHeader,
        *,
        live: bool,
        first: bool = False,
        ends: bool = False,
        after: int | None = None,
        hole: Hole | None = None,
        recalled: float | None = None,
    ) -> Writer | None:
        """An Object has begun to come, on a subscription (`live`) or a fetch; None if it is of no use. With
        `recalled` it comes from disk, and expires then.

        Raises MalformedTrack.
        """
        location = header.location
        priority = self.priority if header.priority is None else header.priority
        self._ledger.record(header, b"", priority=priority)
        known = self.get(location)
        item = known if isinstance(known, CachedObject) else None
        if header.status is not ObjectStatus.NORMAL:
            self._take_status(header, priority, live, ends)
            return None
        if item is None:
            if self.fault or location in self.known:  # moqt 15 #4
                return None
            item = CachedObject(
                location,
                (),
                header.size,
                header.subgroup,
                priority,
                header.raw_properties,
                datagram=header.datagram,
                missing=header.size,
                track=self,
                first=first,
                ends=ends,
                after=after,
                hole=hole,
            )
            if hole is not None:
                hole.ahead += OVERHEAD + item.size
                hole.unused.add(item)
            item.writers += 1  # So that it is not thrown out at once.
            if recalled is not None:
                item.recalled, item.expires = True, recalled
            self._store(item, header)
            item.writers -= 1
        elif (item.size, item.datagram, item.priority) != (header.size, header.datagram, priority) or (
            item.subgroup != header.subgroup and not item.datagram
        ):
            raise MalformedTrack(f"a second, different Object at {location}")
        elif item.properties != header.raw_properties:
            self._update(item, header)
        self._note(location, location)
        item.writers += 1  # Nothing can throw it out meanwhile.
        if live:
            self.saw(location)
            self.doubtful = self.doubtful or header.datagram
            self._tell_once(item)
        item.writers -= 1
        writer = Writer(self, item)
        self._changed()
        return writer

    def _update(self, item: CachedObject, header: ObjectHeader) -> None:
        """Take over the newest properties of an Object; the immutable ones must be the same (moqt 13, 15 #3).
        Raises MalformedTrack.
        """
        if _immutable(header.properties) != _immutable(decode_properties(item.properties)):
            raise MalformedTrack(f"other immutable properties of the Object at {item.location}")
        before = item.cost
        item.properties = header.raw_properties
        self._cache.grow(item.cost - before)

    def extend(self, item: CachedObject, data: memoryview) -> None:
        """The next bytes of an Object."""
        if len(data) == item.size:  # One copy, and nothing to gather it in.
            item.payload = (bytes(data),)
            item.missing = 0
            self._partial.discard(item)
            self._keep(item)
            self._cache.grow(item.size)
            self._tell_piece(item, memoryview(item.payload[0]))
            data = data[:0]
        while data:
            if item.segments is None:
                item.segments = []
            place = (item.size - item.missing) % SEGMENT
            if not place:
                segment = bytearray(min(item.missing, SEGMENT))
                item.segments.append(segment)
                self._cache.grow(len(segment))
            segment = item.segments[-1]
            size = min(len(data), len(segment) - place)
            segment[place : place + size] = data[:size]
            item.missing -= size
            data = data[size:]
            if not item.missing:
                item.payload = tuple(item.segments)
                item.segments = None
                self._partial.discard(item)
                self._keep(item)
            self._tell_piece(item, memoryview(segment)[place : place + size])
        self._changed()

    def _tell_piece(self, item: CachedObject, piece: memoryview) -> None:
        for watcher in list(self._watchers):
            watcher.on_piece(item, piece)

    def left(self, item: CachedObject, code: int, *, resume: bool) -> None:
        """No stream brings `item` any more. What has not come is unknown."""
        if item.missing and resume:
            self.known.remove(item.location, item.location)
        elif item.missing:
            self.evict(item)
            for watcher in list(self._watchers):
                watcher.on_failed(item, code)
        elif item.expires <= asyncio.get_running_loop().time():
            self.evict(item)
        self._changed()

    def learn(self, start: Location, end: Location) -> None:
        """Whatever exists from `start` to `end` is here."""
        self._note(start, end)
        self._changed()

    def open_stream(self, group: int, subgroup: int) -> None:
        """A stream of a subscription brings Objects of the Subgroup."""
        self._streams[group, subgroup] += 1

    def close_stream(self, group: int, subgroup: int, code: int | None, *, resume: bool) -> None:
        """It has ended by FIN (`code` None) or reset; with `resume`, another one will go on."""
        key = (group, subgroup)
        self._streams[key] -= 1
        if not self._streams[key]:
            del self._streams[key]
        self.doubtful = self.doubtful or code is not None
        if code is None or (key not in self._streams and not resume):
            self._tell_or_defer(lambda: self._tell_subgroup_end(group, subgroup, code))

    def end_group(self, group: int, object_id: int) -> None:
        """The stream that brought the end of a Group says that it ends before `object_id`. Raises
        MalformedTrack.
        """
        self._ledger.end_group(group, object_id)
        self.learn(Location(group, object_id), Location(group, MAX_VARINT))

    def end_track(self, location: Location) -> None:
        """No Object at `location` or after it exists."""
        if self.ended is None or location < self.ended:
            self.ended = location
        self.learn(location, LAST)
        self._tell_disk()

    def end_subgroup(self, group: int, subgroup: int, last: int) -> None:
        """A whole Subgroup has come, up to Object `last`. Raises MalformedTrack."""
        self._ledger.end_subgroup(group, subgroup, last)

    def spoil(self, reason: str) -> None:
        """The Track is malformed: all that is sent of it ends, nothing of it is kept (moqt 15 #5)."""
        if not self.fault:
            self.fault = reason
            self._deferred = None
            if self.disk is not None:
                self.disk.drop()
            self.clear()
            self.close(DoneCode.MALFORMED_TRACK)
            self._changed()

    def give_up(self) -> None:
        """What has begun and is brought by nobody will not come."""
        for item in [item for item in self._partial if not item.writers]:
            self.left(item, ResetCode.INTERNAL_ERROR, resume=False)

    def release(self, hole: Hole) -> None:
        """What was fetched for a hole, and nobody has used, need not stay."""
        for item in hole.unused:
            assert isinstance(item, CachedObject)
            item.hole = None
        hole.unused.clear()

    def stop(self) -> None:
        """The relay ends."""
        if self._timer is not None:
            self._timer.cancel()

    def clear(self) -> None:
        """Keep nothing."""
        for item in list(self.kept()):
            self.evict(item)

    def kept(self) -> Iterator[CachedObject]:
        """The Objects that are here, or on their way."""
        for entry in self._groups.values():
            for item in entry.objects.values():
                assert isinstance(item, CachedObject)
                yield item

    # Catching up after a publisher was lost.

    def defer(self) -> None:
        """From now on keep what comes to yourself, until `catch_up`: something that comes before it is
        missing.
        """
        if self._deferred is None:
            self._deferred = []

    def catch_up(self) -> None:
        """Tell the watchers what they were not told, in order."""
        deferred, self._deferred = self._deferred, None
        for item in self._torn():  # It will not come whole.
            self._told.add(item.location, item.location)
        if self.largest is not None:
            for item in list(self.objects(self.live_start, self.largest)):
                self._tell_once(item)
        for tell in deferred or ():
            tell()

    @property
    def torn(self) -> bool:
        """Whether an Object is still coming though a later one of its Subgroup is here, as after a fetch that
        has overtaken a subscription: neither can follow the other on a stream.
        """
        return bool(self._torn())

    def _torn(self) -> set[StoredObject]:
        return {
            item
            for item in self._partial
            if item.location >= self.live_start
            and any(
                other.subgroup == item.subgroup and number > item.location.object
                for number, other in self._groups[item.location.group].objects.items()
            )
        }

    def live_gap(self) -> tuple[Location, Location] | None:
        """What somebody was promised and is not here."""
        if self.largest is None or self.largest < self.live_start:
            return None
        return self.gap(self.live_start, self.largest)

    # What senders ask.

    def watch(self, watcher: TrackWatcher) -> None:
        if not self._watchers:
            self.live_start = Location(0, 0) if self.largest is None else successor(self.largest)
        super().watch(watcher)
        self.on_steer()
        if self.finished:
            asyncio.get_running_loop().call_soon(watcher.on_removed, DoneCode.TRACK_ENDED)

    def unwatch(self, watcher: TrackWatcher) -> None:
        super().unwatch(watcher)
        if self._watchers:
            self.on_steer()
        else:
            self.on_idle()

    def steer(self) -> None:
        self.on_steer()

    def request_group(self, group: int) -> None:
        self.on_group_request(group)

    def close(self, code: DoneCode) -> None:
        self._tell_or_defer(lambda: self._close(code))

    @property
    def subscribers(self) -> int:
        """How many subscriptions follow the Track."""
        return len(self._watchers)

    @property
    def watched(self) -> bool:
        """Whether anybody follows the Track."""
        return bool(self._watchers)

    @property
    def paused(self) -> bool:
        """Whether all who follow the Track are paused."""
        return all(watcher.paused for watcher in self._watchers)

    @property
    def empty(self) -> bool:
        """Whether nothing of it is kept."""
        return not self._count and (self.disk is None or not self.disk.stored)

    @property
    def blank(self) -> bool:
        """Whether nothing is known of it."""
        return self.largest is None and not self.known

    @property
    def current(self) -> bool:
        """Whether the Group of the Largest Object is here, so that a subscriber can begin with it."""
        return (
            self.largest is not None
            and self.has(Location(self.largest.group, 0), self.largest)
            and not self._partial
        )

    @property
    def complete(self) -> bool:
        """Whether all of it is here, and nothing more will come."""
        end = self.largest if self.ended is None and self.finished else self.ended
        return end is not None and self.has(Location(0, 0), end) and not self._partial

    def has(self, start: Location, end: Location) -> bool:
        """Whether all from `start` to `end` is here, or on disk."""
        while (gap := self.gap(start, end)) is not None:
            if self.disk is None or self.disk.stored.gap(*gap) is not None:
                return False
            start = successor(gap[1])
        return True

    def starts_subgroup(self, item: StoredObject) -> bool:
        return isinstance(item, CachedObject) and item.first

    def ends_group(self, item: StoredObject) -> bool:
        return isinstance(item, CachedObject) and item.ends

    def follows(self, previous: int, item: StoredObject) -> bool:
        group, object_id = item.location.group, item.location.object
        if object_id <= previous + 1:
            return object_id > previous
        if isinstance(item, CachedObject) and item.after == previous:
            return True
        between = Location(group, previous + 1), Location(group, object_id - 1)
        return self.gap(*between) is None and all(
            other.subgroup != item.subgroup for other in self.objects(*between)
        )

    def gap(self, start: Location, end: Location, *, last: bool = False) -> tuple[Location, Location] | None:
        return self.known.last_gap(start, end) if last else self.known.gap(start, end)

    def fill_hole(self, start: Location, end: Location, order: GroupOrder) -> Hole:
        return self._filler(self, start, end, order)

    def bring_rest(self, item: StoredObject) -> Hole | None:
        if not item.missing:
            return None
        if isinstance(item, CachedObject) and item.writers:
            return self.hole_at(item.location)
        return self._filler(self, item.location, item.location, GroupOrder.ASCENDING)

    def hurry(self) -> None:
        self._changed()

    def hole_at(self, location: Location) -> Hole | None:
        return next((hole for hole in self._holes if hole.start <= location <= hole.end), None)

    def wait(self, wake: Callable[[], None]) -> None:
        self._waiters.append(wake)

    def use(self, item: StoredObject) -> None:
        if isinstance(item, CachedObject):
            if item.hole is None:
                self._cache.hits += 1
            else:
                self._cache.misses += 1
            self._cache.use(item)
            if self.disk is not None:
                self.disk.use(item.location)
            self._take_from_hole(item)

    def _take_from_hole(self, item: CachedObject) -> None:
        if item.hole is not None:
            item.hole.ahead -= OVERHEAD + item.size
            item.hole.unused.discard(item)
            item.hole = None
            self._changed()

    def expire(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._expiries and self._expiries[0][0] <= now:
            item = self.get(heapq.heappop(self._expiries)[1])
            # One that is still coming goes when it has come.
            if isinstance(item, CachedObject) and item.expires <= now and not item.writers:
                self.evict(item)

    def evict(self, item: CachedObject) -> None:
        """Keep an Object no longer; from now on it is unknown (moqt 15 #6)."""
        if item.newer is None:
            return
        self._count -= 1
        self._partial.discard(item)
        self._cache.discard(item)
        self._take_from_hole(item)
        item.lost = item.missing > 0
        group, object_id = item.location.group, item.location.object
        entry = self._groups[group]
        del entry.objects[object_id]
        del entry.ids[bisect_left(entry.ids, object_id)]
        if not entry.ids:
            del self._groups[group]
            del self._group_ids[bisect_left(self._group_ids, group)]
            self._cache.shrink(GROUP_OVERHEAD)
        if not self._count:
            self._cache.shrink(TRACK_OVERHEAD)
        self.known.remove(item.location, item.location)
        self._lack()

    # Inside.

    def _lack(self) -> None:
        self.on_lack()
        if self.empty:
            self.on_idle()

    def _tell_disk(self) -> None:
        if self.disk is not None:
            self.disk.describe(self.properties, self.largest, self.ended, self.finished)

    def _keep(self, item: CachedObject) -> None:
        if self.disk is not None and not self.fault:
            self.disk.keep(item)

    def wake(self) -> None:
        """Something has changed for those who wait."""
        self._changed()

    async def changes(self) -> None:
        """Wait for the next change."""
        changed = asyncio.Event()
        self.wait(changed.set)
        await changed.wait()

    def _store(self, item: CachedObject, header: ObjectHeader) -> None:
        location = item.location
        entry = self._group(location.group)
        entry.objects[location.object] = item
        insort(entry.ids, location.object)
        item.expires = min(item.expires, asyncio.get_running_loop().time() + self._lifetime)
        self._count += 1
        if item.expires < math.inf:
            self._expect_expiry(item)
        around = (GROUP_OVERHEAD if len(entry.ids) == 1 else 0) + (TRACK_OVERHEAD if self._count == 1 else 0)
        self._cache.add(item)
        self._cache.grow(around)
        if item.missing:
            self._partial.add(item)
        else:
            self._keep(item)
        for kind, here in (
            (PropertyType.PRIOR_GROUP_ID_GAP, location.group),
            (PropertyType.PRIOR_OBJECT_ID_GAP, location.object),
        ):
            gap = get(header.properties, kind)
            if isinstance(gap, int) and 0 < gap <= here:
                if kind is PropertyType.PRIOR_GROUP_ID_GAP:
                    self._note(Location(here - gap, 0), Location(here - 1, MAX_VARINT))
                else:
                    self._note(Location(location.group, here - gap), Location(location.group, here - 1))

    def _note(self, start: Location, end: Location) -> None:
        """It is known from now on what exists there. What does not exist is forgotten, that is, unknown
        again, when it is in too many pieces.
        """
        self.known.add(start, end)
        if len(self.known) > 2 * self._count + MAX_RANGES:
            self.known = LocationSet()
            for item in self.kept():
                if item.writers or not item.missing:
                    self.known.add(item.location, item.location)
            self.known.add(start, end)
        if self.disk is not None and (start != end or self.get(start) is None):
            self.disk.learn(start, end, self.objects(start, end))

    def _take_status(self, header: ObjectHeader, priority: int, live: bool, ends: bool) -> None:
        location = header.location
        if header.status is ObjectStatus.END_OF_TRACK:
            self.end_track(location)
        else:
            self.learn(location, Location(location.group, MAX_VARINT))
        item = CachedObject(
            location, (), 0, header.subgroup, priority, b"", header.status, header.datagram, ends=ends
        )
        if live:
            self._tell_once(item)

    def _ids_of(self, group: int) -> Sequence[int]:
        entry = self._groups.get(group)
        return entry.ids if entry is not None else ()

    def _close(self, code: DoneCode) -> None:
        super().close(code)
        self._tell_disk()
        self.on_idle()

    def _tell_once(self, item: StoredObject) -> None:
        self._tell_or_defer(lambda: self._tell_now(item))

    def _tell_now(self, item: StoredObject) -> None:
        if item.location not in self._told:
            self._told.add(item.location, item.location)
            self._told.shorten(MAX_RANGES)
            self._tell(item)

    def _tell_or_defer(self, tell: Callable[[], None]) -> None:
        if self._deferred is None:
            tell()
        else:
            self._deferred.append(tell)

    def _tell_subgroup_end(self, group: int, subgroup: int, code: int | None) -> None:
        for watcher in list(self._watchers):
            watcher.on_subgroup_end(group, subgroup, code)

    def _changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    def _expect_expiry(self, item: CachedObject) -> None:
        if len(self._expiries) > 2 * self._count + 64:  # Most of them have gone before.
            found = (self.get(location) for _, location in self._expiries)
            here = {(one.expires, one.location) for one in found if isinstance(one, CachedObject)}
            self._expiries = sorted(here)  # Which is a heap.
        heapq.heappush(self._expiries, (item.expires, item.location))
        self._set_timer()

    def _set_timer(self) -> None:
        when = self._expiries[0][0] + 0.001
        if self._timer is None or self._timer.when() > when:
            self.stop()
            self._timer = asyncio.get_running_loop().call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        if self._expiries:
            self._set_timer()


def _immutable(properties: Properties) -> list[int | bytes]:
    return [value for kind, value in properties if kind == PropertyType.IMMUTABLE_PROPERTIES]
