"""What a receiver knows about the Objects of one Track: finds duplicates, and what makes a Track malformed
(moqt 20.1).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from moqt.errors import MoqtError
from moqt.filters import Location
from moqt.quic.api import Buffer
from moqt.wire import ObjectStatus, Properties, PropertyType

__all__ = ["Ledger", "MalformedTrack"]

_MANDATORY_TRACK_PROPERTIES = range(0x4000, 0x8000)


class MalformedTrack(MoqtError):
    """The publisher contradicts itself: nothing more of this Track can be believed. The session goes on (moqt
    20 #36).
    """


@dataclass(slots=True)
class _Group:
    checksums: dict[int, int] = field(default_factory=dict)
    priorities: dict[int, int] = field(default_factory=dict)
    largest: int = -1
    end: int | None = None


class Ledger:
    """The Locations received, with a checksum of each payload; `limit` of them at most, then the oldest
    Groups are forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._groups: dict[int, _Group] = {}
        self._largest: Location | None = None
        self._track_end: Location | None = None

    def record(
        self,
        location: Location,
        payload: Buffer,
        *,
        subgroup: int,
        priority: int,
        status: ObjectStatus,
        properties: Properties,
    ) -> bool:
        """Note an Object; True if it is new. Raises MalformedTrack when it contradicts what came before."""
        if any(kind in _MANDATORY_TRACK_PROPERTIES for kind, _ in properties):
            raise MalformedTrack(f"the Object at {location} carries a property that only a Track may have")
        if status is ObjectStatus.END_OF_TRACK:
            if (self._largest is not None and self._largest >= location) or self._track_end not in (
                None,
                location,
            ):
                raise MalformedTrack(f"End of Track at {location} contradicts what came before")
            known, self._track_end = self._track_end is not None, location
            return not known
        group = self._groups.setdefault(location.group, _Group())
        if status is ObjectStatus.END_OF_GROUP:
            known = group.end is not None
            self.end_group(location.group, location.object)
            return not known
        if group.end is not None and location.object >= group.end:
            raise MalformedTrack(f"the Object at {location} lies beyond the end of its Group")
        if self._track_end is not None and location >= self._track_end:
            raise MalformedTrack(f"the Object at {location} lies beyond the End of Track")
        if group.priorities.setdefault(subgroup, priority) != priority:
            raise MalformedTrack(f"the Object at {location} has another priority than its Subgroup")
        checksum = zlib.crc32(payload)
        known_checksum = group.checksums.get(location.object)
        if known_checksum is not None:
            if known_checksum != checksum:
                raise MalformedTrack(f"a second payload for {location}")
            return False
        self._check_gaps(location, properties)
        group.checksums[location.object] = checksum
        group.largest = max(group.largest, location.object)
        if self._largest is None or location > self._largest:
            self._largest = location
        self._count += 1
        if self._count > self._limit:
            self._forget()
        return True

    def end_group(self, group: int, object_id: int) -> None:
        """Note that no Object of `group` with this ID or a larger one exists. Raises MalformedTrack on
        contradiction.
        """
        entry = self._groups.setdefault(group, _Group())
        if entry.largest >= object_id or entry.end not in (None, object_id):
            raise MalformedTrack(
                f"the end of group {group} before object {object_id} contradicts what came before"
            )
        entry.end = object_id

    def largest_in(self, group: int) -> int:
        """The largest Object ID received of `group`; -1 if none."""
        entry = self._groups.get(group)
        return entry.largest if entry else -1

    def _check_gaps(self, location: Location, properties: Properties) -> None:
        """A gap property must not be repeated, nor cover an Object that came (moqt 13)."""
        for kind in (PropertyType.PRIOR_GROUP_ID_GAP, PropertyType.PRIOR_OBJECT_ID_GAP):
            gaps = [value for known, value in properties if known == kind]
            if len(gaps) > 1:
                raise MalformedTrack(f"the Object at {location} repeats {kind.name}")
            for gap in gaps:
                assert isinstance(gap, int)
                of_group = kind is PropertyType.PRIOR_GROUP_ID_GAP
                here = location.group if of_group else location.object
                received = self._groups if of_group else self._groups[location.group].checksums
                if gap > here or any(here - gap <= known < here for known in received):
                    raise MalformedTrack(
                        f"{kind.name} of the Object at {location} contradicts what came before"
                    )

    def _forget(self) -> None:
        oldest = min(self._groups)
        self._count -= len(self._groups.pop(oldest).checksums)
