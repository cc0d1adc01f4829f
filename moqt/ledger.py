"""What a receiver knows about the Objects of one Track: finds duplicates, and what makes a Track malformed
(moqt 20.1).
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moqt.errors import MalformedTrack
from moqt.filters import Location
from moqt.quic.api import Buffer
from moqt.wire import ObjectHeader, ObjectStatus, Properties, PropertyType, check_object_properties, get

__all__ = ["Ledger", "MalformedTrack"]


class _Known(NamedTuple):
    """What must be the same when an Object comes again. `subgroup` is None for delivery mode Datagram."""

    subgroup: int | None
    size: int
    checksum: int


@dataclass(slots=True)
class _Subgroup:
    priority: int
    largest: int = -1
    last: int | None = None
    """The Object ID that is the last of all, once the Subgroup has come to its end."""


@dataclass(slots=True)
class _Group:
    objects: dict[int, _Known] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    """Those of `objects`, ascending."""
    subgroups: dict[int, _Subgroup] = field(default_factory=dict)
    largest: int = -1
    end: int | None = None
    """No Object with this ID or a larger one exists."""
    marked: bool = False
    """Whether an Object of status End of Group came."""


class Ledger:
    """The Locations received, with a checksum of each payload; `limit` of them and of their Groups and
    Subgroups at most, then the oldest Groups are forgotten.

    A cache finds duplicates itself: with `cached`, which gives the IDs of the Objects of a Group, ascending,
    nothing is kept here for each Object.
    """

    def __init__(self, limit: int, cached: Callable[[int], Sequence[int]] | None = None) -> None:
        self._limit = limit
        self._cached = cached
        self._count = 0
        self._groups: dict[int, _Group] = {}
        self._group_ids: list[int] = []
        """Those of `_groups`, ascending."""
        self._largest: Location | None = None
        self._track_end: Location | None = None

    def record(self, header: ObjectHeader, payload: Buffer, *, priority: int) -> bool:
        """Note an Object; True if it is new. `priority` is its effective Publisher Priority.

        Raises MalformedTrack when it contradicts what came before.
        """
        location = header.location
        if header.status is ObjectStatus.END_OF_TRACK:
            return self._end_track(location)
        if header.status is ObjectStatus.END_OF_GROUP:
            self.end_group(location.group, location.object)
            group = self._group(location.group)
            new, group.marked = not group.marked, True
            return new
        self._forget()
        self._check_ends(location)
        group = self._group(location.group)
        subgroup = None if header.datagram else header.subgroup
        if subgroup is not None:
            self._check_subgroup(group, subgroup, location, priority)
        if self._cached is None:
            known = _Known(subgroup, len(payload), zlib.crc32(payload))
            before = group.objects.setdefault(location.object, known)
            if before is not known:
                if before != known:
                    raise MalformedTrack(f"a second, different Object at {location}")
                return False
            self._count += 1
            insort(group.ids, location.object)
        if header.properties:
            check_object_properties(header.properties)
            self._check_gaps(location, header.properties)
        group.largest = max(group.largest, location.object)
        if self._largest is None or location > self._largest:
            self._largest = location
        return True

    def end_group(self, group: int, object_id: int) -> None:
        """Note that no Object of `group` with this ID or a larger one exists. Raises MalformedTrack when such
        an Object came.
        """
        entry = self._group(group)
        if entry.largest >= object_id:
            raise MalformedTrack(
                f"group {group} ends before object {object_id}, but object {entry.largest} came"
            )
        entry.end = object_id if entry.end is None else min(entry.end, object_id)

    def end_subgroup(self, group: int, subgroup: int, last: int) -> None:
        """Note that a whole Subgroup has come, and that `last` is its last Object. Raises MalformedTrack when
        it ended elsewhere before, or went on.
        """
        entry = self._group(group).subgroups.get(subgroup)
        if entry is None:  # Forgotten.
            return
        if entry.last not in (None, last) or entry.largest > last:
            raise MalformedTrack(
                f"subgroup {subgroup} of group {group} ends with object {last}, "
                f"but came to {max(entry.largest, entry.last or 0)}"
            )
        entry.last = last

    def _end_track(self, location: Location) -> bool:
        if self._largest is not None and self._largest >= location:
            raise MalformedTrack(f"the Track ends at {location}, but the Object at {self._largest} came")
        new = self._track_end is None
        self._track_end = location if self._track_end is None else min(self._track_end, location)
        return new

    def _check_ends(self, location: Location) -> None:
        group = self._groups.get(location.group)
        if group is not None and group.end is not None and location.object >= group.end:
            raise MalformedTrack(f"the Object at {location} lies beyond the end of its Group")
        if self._track_end is not None and location >= self._track_end:
            raise MalformedTrack(f"the Object at {location} lies beyond the End of Track")

    def _check_subgroup(self, group: _Group, subgroup: int, location: Location, priority: int) -> None:
        entry = group.subgroups.get(subgroup)
        if entry is None:
            entry = group.subgroups[subgroup] = _Subgroup(priority)
            self._count += 1
        if entry.priority != priority:
            raise MalformedTrack(f"the Object at {location} has another priority than its Subgroup")
        if entry.last is not None and location.object > entry.last:
            raise MalformedTrack(f"the Object at {location} lies beyond the end of its Subgroup")
        entry.largest = max(entry.largest, location.object)

    def _check_gaps(self, location: Location, properties: Properties) -> None:
        """A gap must not cover an Object that came (moqt 13)."""
        objects = self._cached or (lambda group: self._groups[group].ids)
        for kind, here, known in (
            (PropertyType.PRIOR_GROUP_ID_GAP, location.group, self._group_ids),
            (PropertyType.PRIOR_OBJECT_ID_GAP, location.object, objects(location.group)),
        ):
            gap = get(properties, kind)
            if isinstance(gap, int) and (gap > here or _any_within(known, here - gap, here)):
                raise MalformedTrack(
                    f"{kind.name} {gap} of the Object at {location} contradicts what came before"
                )

    def _group(self, group: int) -> _Group:
        entry = self._groups.get(group)
        if entry is None:
            self._forget()
            self._count += 1
            entry = self._groups[group] = _Group()
            insort(self._group_ids, group)
        return entry

    def _forget(self) -> None:
        """Make room for one more, at the cost of the Groups that came first."""
        while self._groups and self._count >= self._limit:
            oldest = next(iter(self._groups))
            group = self._groups.pop(oldest)
            self._count -= len(group.objects) + len(group.subgroups) + 1
            del self._group_ids[bisect_left(self._group_ids, oldest)]


def _any_within(ids: Sequence[int], start: int, end: int) -> bool:
    """Whether one of `ids`, which ascend, is from `start` up to `end`, exclusive."""
    index = bisect_left(ids, start)
    return index < len(ids) and ids[index] < end
