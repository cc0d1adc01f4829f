"""The Objects of one Track.

The Track is the only store: the publisher appends to it and every session's publishing reads from it.
Payloads are kept as the views that were given, without a copy, so their bytes must not change afterwards
(kvcs 3.4: Objects are never modified).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moqt.errors import (
    DoneCode,
    LocationTaken,
    MalformedTrack,
    ProtocolError,
    RequestRefused,
    UsageError,
)
from moqt.filters import MAX_PRIORITY, MAX_VARINT, GroupOrder, Location, LocationFilter
from moqt.locations import LocationSet
from moqt.names import FullTrackName, check_namespace
from moqt.quic.api import Buffer
from moqt.wire import (
    ObjectStatus,
    Properties,
    check_object_properties,
    check_track_properties,
    decode_properties,
    encode_properties,
)

__all__ = ["Hole", "StoredObject", "Track", "TrackWatcher", "Wanted"]


@dataclass(slots=True, eq=False)
class StoredObject:
    """One Object of a Track. `payload` is its bytes in pieces, `size` their sum; a status Object has no
    payload.

    `datagram` is its delivery mode. In a cache, `missing` of the bytes have not come yet, and `payload` is
    complete with the last of them; `lost` says that they never will. `pins` counts who is sending it.
    """

    location: Location
    payload: tuple[Buffer, ...]
    size: int
    subgroup: int
    priority: int
    properties: bytes
    status: ObjectStatus = ObjectStatus.NORMAL
    datagram: bool = False
    missing: int = 0
    lost: bool = False
    pins: int = 0

    def since(self, offset: int) -> tuple[Buffer, ...]:
        """What has come so far of the payload, from `offset` on; 0 unless the Object is on its way."""
        return self.payload if offset < self.size else ()


@dataclass(slots=True)
class _Group:
    objects: dict[int, StoredObject] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    subgroups: dict[int, tuple[StoredObject, StoredObject]] = field(default_factory=dict)
    """The first and the last Object of each."""
    end: int | None = None
    """Nothing more comes; no Object with this ID or a larger one exists."""


class TrackWatcher:
    """What a Track tells those who follow it. Methods are called synchronously and must not raise.

    While `paused`, it has no use for Objects (moqt 9, Forward State).
    """

    paused = False

    def on_object(self, item: StoredObject) -> None:
        """An Object, or a status Object (End of Group, End of Track), was published, or has begun to come."""
        raise NotImplementedError

    def on_piece(self, item: StoredObject, data: Buffer) -> None:
        """More of an Object has come."""

    def on_failed(self, item: StoredObject, code: int) -> None:
        """The rest of an Object that has begun will not come; its stream was reset with `code`."""

    def on_subgroup_end(self, group: int, subgroup: int, code: int | None) -> None:
        """Nothing more comes in the Subgroup: its stream ended with FIN (`code` None) or was reset (moqt
        12.6).
        """

    def on_largest(self) -> None:
        """The Largest Object is another one, although none has come (moqt 4.2, PUBLISH_STATE_NOTIFY)."""

    def on_removed(self, code: DoneCode) -> None:
        """The Track was withdrawn; `code` is what PUBLISH_DONE shall say."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Hole:
    """A range of a cached Track that is fetched. When it is `done`, what could not be found out is in
    `unknown`, and `refusal` says why. `replied`: the publisher has said how far the Track goes. `ahead`
    counts the bytes that have come and that nobody has used, `unused` are those Objects; somebody who is
    `hungry` waits for more. Where the range is a `guess`, what did not come is asked for again.
    """

    start: Location
    end: Location
    done: bool = False
    unknown: LocationSet = field(default_factory=LocationSet)
    refusal: RequestRefused | None = None
    replied: bool = False
    ahead: int = 0
    unused: set[StoredObject] = field(default_factory=set)
    hungry: bool = False
    guess: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants of the Objects that exist already, and whether also those to come (`live`)."""

    filter: LocationFilter
    order: GroupOrder
    live: bool


class Track:
    """The Objects of one Track as their publisher knows them: what is not here and not after `largest` does
    not exist. A cache knows less (`authoritative` is False): some Locations are a `gap`, of which nobody here
    can tell whether there is an Object.

    `properties` are the Track Properties; `priority` is the Publisher Priority of Objects that name none.
    With `one_subgroup`, all Objects of a Group must share one Subgroup, and the end of that Subgroup's stream
    then tells the end of the Group (moqt 12.2, END_OF_GROUP).
    """

    authoritative = True
    fault: str = ""
    """What makes the Track malformed (moqt 20.1); it is of no more use then."""

    def __init__(
        self,
        name: FullTrackName,
        *,
        properties: Properties = (),
        priority: int = 128,
        order: GroupOrder = GroupOrder.ASCENDING,
        one_subgroup: bool = False,
    ) -> None:
        check_namespace(name.namespace, name.name)
        try:
            encode_properties(properties)
            check_track_properties(properties)
        except (ProtocolError, MalformedTrack) as error:
            raise UsageError(f"{name}: the Track Properties are no good: {error}") from None
        if not 0 <= priority <= 255:
            raise UsageError(f"a Publisher Priority is 0 to 255, not {priority}")
        self.name = name
        self.properties = properties
        self.priority = priority
        self.order = order
        self.one_subgroup = one_subgroup
        self.largest: Location | None = None
        self.ended: Location | None = None
        self.readers = 0
        """Fetches that are being served from it."""
        self._groups: dict[int, _Group] = {}
        self._group_ids: list[int] = []
        self._watchers: list[TrackWatcher] = []

    def append(
        self,
        group: int,
        object_id: int,
        payload: Buffer | Sequence[Buffer],
        *,
        subgroup: int = 0,
        priority: int | None = None,
        properties: bytes = b"",
        datagram: bool = False,
    ) -> bool:
        """Publish an Object. `payload` is its bytes, in one or several pieces, which are not copied.

        With `datagram` subscribers get it in a QUIC datagram, which may be lost; it is dropped for those to
        whom it is too large (moqt 12.5). It has no Subgroup then.

        `properties` are encoded (`moqt.wire.encode_properties`). Returns False when the same Object, byte for
        byte, is there already. Raises LocationTaken when another payload stands at this Location (kvcs 6,
        moqt 15 #3), UsageError when the Group or the Track has ended, when the Object is out of order in its
        Subgroup (moqt 12.6), or for a value out of range.
        """
        location = Location(group, object_id)
        pieces = (payload,) if isinstance(payload, (bytes, bytearray, memoryview)) else payload
        octets = tuple(map(_octets, pieces))
        item = StoredObject(
            location,
            octets,
            sum(map(len, octets)),
            subgroup,
            self.priority if priority is None else priority,
            properties,
            datagram=datagram,
        )
        known = self.get(location)
        if known is not None:
            if known.size == item.size and _content(known) == _content(item):
                return False
            raise LocationTaken(
                f"{self.name}: another Object stands at group {group}, object {object_id}; "
                "an Object is never changed: publish anew under another name"
            )
        self._check(item)
        entry = self._group(group)
        entry.objects[object_id] = item
        insort(entry.ids, object_id)
        if not datagram:
            entry.subgroups[subgroup] = entry.subgroups.get(subgroup, (item,))[0], item
        if self.largest is None or location > self.largest:
            self.largest = location
        self._tell(item)
        return True

    def end_group(self, group: int, object_id: int) -> None:
        """Publish End of Group at `object_id`: nothing more comes in this Group. Raises UsageError on
        contradiction.
        """
        location = Location(group, object_id)
        _check_range(location)
        entry = self._groups.get(group, _Group())
        if entry.end is not None:
            raise UsageError(f"{self.name}: group {group} has ended already, before object {entry.end}")
        if entry.ids and entry.ids[-1] >= object_id:
            raise UsageError(
                f"{self.name}: group {group} can't end before object {object_id}: {entry.ids[-1]} exists"
            )
        if self.ended is not None and location >= self.ended:
            raise UsageError(f"{self.name}: the Track ended at {self.ended}, before the end of group {group}")
        self._group(group).end = object_id
        self._tell_end(self._status(location, ObjectStatus.END_OF_GROUP))

    def end(self, location: Location) -> None:
        """Publish End of Track at `location`: no Object at it or after it exists, and nothing more comes in
        its Group. Raises UsageError on contradiction.
        """
        _check_range(location)
        if self.ended is not None:
            raise UsageError(f"{self.name}: the Track has ended already, at {self.ended}")
        if self.largest is not None and self.largest >= location:
            raise UsageError(f"{self.name}: the Track can't end at {location}: {self.largest} exists")
        self.ended = location
        entry = self._groups.get(location.group)
        if entry is not None and entry.end is None:
            entry.end = location.object
        self._tell_end(self._status(location, ObjectStatus.END_OF_TRACK))

    def get(self, location: Location) -> StoredObject | None:
        """The Object at `location`, if it exists."""
        entry = self._groups.get(location.group)
        return entry.objects.get(location.object) if entry else None

    def group_end(self, group: int) -> int | None:
        """The Object ID before which the Group has ended, or None while it may grow."""
        entry = self._groups.get(group)
        return entry.end if entry else None

    def starts_subgroup(self, item: StoredObject) -> bool:
        """Whether `item` is the first Object of its Subgroup (moqt 12.2, FIRST_OBJECT)."""
        entry = self._groups.get(item.location.group)
        first = entry.subgroups.get(item.subgroup) if entry else None
        return first is None or first[0] is item

    def ends_group(self, item: StoredObject) -> bool:
        """Whether the stream of a Subgroup, opened with `item`, if it ends with FIN, ends with the Group's
        last Object (moqt 12.2, END_OF_GROUP).
        """
        return self.one_subgroup and item.status is not ObjectStatus.END_OF_TRACK

    def follows(self, previous: int, item: StoredObject) -> bool:
        """Whether `item` may follow Object `previous` on one subgroup stream (moqt 12.6)."""
        return item.location.object > previous

    def following(
        self, after: Location | None, start: Location, end: Location, order: GroupOrder
    ) -> StoredObject | None:
        """The first Object from `start` to `end` that comes behind `after` (None: at all) in the order of
        delivery: Groups in `order`, inside a Group by Object ID (moqt 10).
        """
        step = 1 if order is GroupOrder.ASCENDING else -1
        group = after.group if after else start.group if step > 0 else end.group
        index = bisect_left(self._group_ids, group) if step > 0 else bisect_right(self._group_ids, group) - 1
        while 0 <= index < len(self._group_ids):
            group = self._group_ids[index]
            if not start.group <= group <= end.group:
                return None
            first = start.object if group == start.group else 0
            if after is not None and group == after.group:
                first = max(first, after.object + 1)
            ids = self._groups[group].ids
            place = bisect_left(ids, first)
            if place < len(ids) and (group < end.group or ids[place] <= end.object):
                return self._groups[group].objects[ids[place]]
            index += step
        return None

    # What a cache does not know.

    def gap(self, start: Location, end: Location, *, last: bool = False) -> tuple[Location, Location] | None:
        """The first (or `last`) range within `start` to `end` of which nothing is known; None if all is."""
        return None

    def fill_hole(self, start: Location, end: Location, order: GroupOrder) -> Hole:
        """Have a range that begins or, in descending order, ends with a `gap` fetched; it may be cut to less.

        Progress is told to those who called `wait`.
        """
        return Hole(start, end, done=True)

    def bring_rest(self, item: StoredObject) -> Hole | None:
        """The hole that brings the rest of an Object; it is fetched if nobody brings it."""
        return None

    def hurry(self) -> None:
        """Somebody has become hungry for what a hole brings."""

    def hole_at(self, location: Location) -> Hole | None:
        """The hole around `location` that is being filled now."""
        return None

    def wait(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, at the next change of what is here or known. A publisher's Track has all."""

    def use(self, item: StoredObject) -> None:
        """Somebody is about to send `item`."""

    def expire(self) -> None:
        """Forget what is too old to be sent (moqt 13, MAX_CACHE_DURATION)."""

    def objects(
        self, start: Location, end: Location, order: GroupOrder = GroupOrder.ASCENDING
    ) -> Iterator[StoredObject]:
        """The Objects from `start` to `end`, both inclusive, Groups in `order`, inside a Group by Object ID
        (moqt 10).

        Objects that are published while the iteration runs may or may not come; take `end` no larger than
        `largest` to have a range that no longer changes.
        """
        groups = self._group_ids[
            bisect_left(self._group_ids, start.group) : bisect_right(self._group_ids, end.group)
        ]
        for group in groups if order is GroupOrder.ASCENDING else reversed(groups):
            entry = self._groups[group]
            for object_id in entry.ids[_within(entry.ids, group, start, end)]:
                yield entry.objects[object_id]

    def last_in(self, start: Location, end: Location) -> Location | None:
        """The Location of the last Object from `start` to `end`, both inclusive; None if there is none."""
        index = bisect_right(self._group_ids, end.group)
        while index > 0 and (group := self._group_ids[index - 1]) >= start.group:
            ids = self._groups[group].ids
            place = _within(ids, group, start, end)
            if place.start < place.stop:
                return Location(group, ids[place.stop - 1])
            index -= 1
        return None

    def watch(self, watcher: TrackWatcher) -> None:
        """Tell `watcher` of all that is published from now on."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: TrackWatcher) -> None:
        """Stop telling `watcher`; no effect if it doesn't watch."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def steer(self) -> None:
        """A watcher has been paused, or goes on."""

    def request_group(self, group: int) -> None:
        """A subscriber would like a new Group to begin: `group`, or, with 0, the next one (moqt 5.3,
        NEW_GROUP_REQUEST). A publisher that has dynamic Groups overrides this.
        """

    def close(self, code: DoneCode) -> None:
        """Let every subscription end with PUBLISH_DONE `code`. The Objects stay."""
        for watcher in list(self._watchers):
            watcher.on_removed(code)
        self._watchers.clear()

    def _check(self, item: StoredObject) -> None:
        """Raise UsageError unless `item`, at a free Location, may be published now."""
        location = item.location
        _check_range(location)
        if not 0 <= item.subgroup <= MAX_VARINT or not 0 <= item.priority <= MAX_PRIORITY:
            raise UsageError(
                f"{self.name}: no Subgroup ID or priority: {item.subgroup}, {item.priority} at {location}"
            )
        if item.properties:
            try:
                check_object_properties(decode_properties(item.properties))
            except (ProtocolError, MalformedTrack) as error:
                raise UsageError(f"{self.name}: the properties at {location} are no good: {error}") from None
        if self.ended is not None and location >= self.ended:
            raise UsageError(
                f"{self.name}: the Track ended at {self.ended}, so nothing can be published at {location}"
            )
        entry = self._groups.get(location.group)
        if entry is None:
            return
        if entry.end is not None:
            raise UsageError(
                f"{self.name}: group {location.group} ended before object {entry.end}, "
                f"so object {location.object} can't be published"
            )
        if item.datagram:
            return
        last = entry.subgroups.get(item.subgroup)
        if last is None:
            if self.one_subgroup and entry.subgroups:
                raise UsageError(
                    f"{self.name}: all Objects of group {location.group} must be in one Subgroup"
                )
        elif last[1].location > location:
            raise UsageError(
                f"{self.name}: {location} comes after {last[1].location}: "
                "inside a Subgroup, Objects are published in ascending order"
            )
        elif last[1].priority != item.priority:
            raise UsageError(f"{self.name}: all Objects of a Subgroup have one priority; see {location}")

    def _group(self, group: int) -> _Group:
        entry = self._groups.get(group)
        if entry is None:
            entry = self._groups[group] = _Group()
            insort(self._group_ids, group)
        return entry

    def _status(self, location: Location, status: ObjectStatus) -> StoredObject:
        """A status Object, which goes with the last Object of its Group, if there is one."""
        entry = self._groups.get(location.group)
        last = entry.objects[entry.ids[-1]] if entry and entry.ids else None
        subgroup, priority = (last.subgroup, last.priority) if last else (0, self.priority)
        datagram = last is not None and last.datagram
        return StoredObject(location, (), 0, subgroup, priority, b"", status, datagram)

    def _tell(self, item: StoredObject) -> None:
        for watcher in list(self._watchers):
            watcher.on_object(item)

    def _tell_end(self, item: StoredObject) -> None:
        """A status Object ends all Subgroups of its Group."""
        self._tell(item)
        group = item.location.group
        entry = self._groups.get(group)
        for subgroup in {item.subgroup, *(entry.subgroups if entry else ())}:
            for watcher in list(self._watchers):
                watcher.on_subgroup_end(group, subgroup, None)


def _check_range(location: Location) -> None:
    if not 0 <= location.group <= MAX_VARINT or not 0 <= location.object <= MAX_VARINT:
        raise UsageError(f"a Group ID or Object ID is outside 0 … 2^64-1: {location}")


def _within(ids: Sequence[int], group: int, start: Location, end: Location) -> slice:
    """Where the Objects from `start` to `end` stand among the IDs of a Group between them."""
    low = bisect_left(ids, start.object) if group == start.group else 0
    high = bisect_right(ids, end.object) if group == end.group else len(ids)
    return slice(low, high)


def _octets(piece: Buffer) -> Buffer:
    """`piece` as a sequence of octets: itself where it is one; a view more would cost 200 bytes an Object."""
    plain = isinstance(piece, bytes) or (
        isinstance(piece, memoryview) and piece.ndim == 1 and piece.format == "B"
    )
    return piece if plain else memoryview(piece).cast("B")


def _content(item: StoredObject) -> tuple[bytes, int, int, bytes, bool]:
    return b"".join(item.payload), item.subgroup, item.priority, item.properties, item.datagram
