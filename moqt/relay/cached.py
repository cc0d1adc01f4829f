"""A Track as a relay knows it: what of it is here, what does not exist, and what is unknown (moqt 15)."""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from moqt.errors import DoneCode, MalformedTrack, ResetCode
from moqt.fetching import LAST, successor
from moqt.filters import MAX_VARINT, GroupOrder, Location
from moqt.ledger import Ledger
from moqt.locations import LocationSet
from moqt.names import FullTrackName
from moqt.relay.cache import GROUP_OVERHEAD, OVERHEAD, SEGMENT, TRACK_OVERHEAD, Cache, CachedObject, Writer
from moqt.relay.followed import MAX_RANGES, FollowedTrack
from moqt.track import Hole, StoredObject
from moqt.wire import ObjectHeader, ObjectStatus, Properties, PropertyType, decode_properties, get

if TYPE_CHECKING:
    from moqt.relay.store import DiskTrack

__all__ = ["CachedTrack"]

MAX_KNOWN = 1 << 14
"""Groups and Subgroups remembered for each Track, to find contradictions (moqt 20.1); they take up to 750
bytes each.
"""


class CachedTrack(FollowedTrack):
    """A Track as a relay knows it. What is `known` and not here does not exist; the rest is unknown.

    `filler` fetches a range, `holes` are those that are being filled; `on_lack` is called when something is
    no longer kept. `disk` is what is kept of it on disk, also of an earlier life.
    """

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
        self.on_lack: Callable[[], None] = lambda: None
        self.doubtful = False
        """Something may have been published of which nothing came, since a stream was reset, or a datagram
        may have been lost: the Largest Object may be another one than we know.
        """
        self._cache = cache
        self._filler = filler
        self._holes = holes
        self._ledger = Ledger(MAX_KNOWN, self._ids_of)
        self._streams: Counter[tuple[int, int]] = Counter()
        self._count = 0
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
            self._take_status(header, priority, live, ends, after)
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
            self.saw(location, tell=self._deferred is not None)  # Those below do not get it yet.
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

    def left(self, item: CachedObject, code: int, *, resume: bool) -> None:
        """No stream brings `item` any more. What has not come is unknown."""
        if item.missing and resume:
            self.known.remove(item.location, item.location)
        elif item.missing:
            self.evict(item, code)
        elif item.expires <= asyncio.get_running_loop().time():
            self.evict(item)
        self._cache.trim()
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
        self._cache.trim()

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

    # What senders ask.

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

    def hole_at(self, location: Location) -> Hole | None:
        return next((hole for hole in self._holes if hole.start <= location <= hole.end), None)

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

    def evict(self, item: CachedObject, code: int = ResetCode.INTERNAL_ERROR) -> None:
        """Keep an Object no longer; from now on it is unknown (moqt 15 #6). Streams that are inside it are
        reset with `code`.
        """
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
        if item.lost and not self.fault:
            self._told.remove(item.location, item.location)
            for watcher in list(self._watchers):
                watcher.on_failed(item, code)
        self._lack()

    # Inside.

    def _close(self, code: DoneCode) -> None:
        self._tell_disk()
        super()._close(code)

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

    def _take_status(
        self, header: ObjectHeader, priority: int, live: bool, ends: bool, after: int | None
    ) -> None:
        location = header.location
        if header.status is ObjectStatus.END_OF_TRACK:
            self.end_track(location)
        else:
            self.learn(location, Location(location.group, MAX_VARINT))
        item = CachedObject(
            location,
            (),
            0,
            header.subgroup,
            priority,
            b"",
            header.status,
            header.datagram,
            ends=ends,
            after=after,
        )
        if live:
            self._tell_once(item)

    def _ids_of(self, group: int) -> Sequence[int]:
        entry = self._groups.get(group)
        return entry.ids if entry is not None else ()

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
