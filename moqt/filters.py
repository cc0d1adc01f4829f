"""Locations, and the filters that select Objects: Location Filter and range filters (moqt 6 and 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

from moqt.errors import RequestCode, RequestRefused, UsageError

MAX_VARINT: Final = 2**64 - 1
MAX_PRIORITY: Final = 255

Properties: TypeAlias = tuple[tuple[int, int | bytes], ...]


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """Where an Object is in its track; ordered by group, then object (moqt 2.2)."""

    group: int
    object: int


class GroupOrder(IntEnum):
    """In which order a fetch, a fill or competing streams deliver groups (moqt 5.1)."""

    ASCENDING = 1
    DESCENDING = 2


class FilterType(IntEnum):
    """Types of Location Filter (moqt 6.1)."""

    NONE = 0x00
    RELATIVE_START = 0x01
    ABSOLUTE_START = 0x02
    ABSOLUTE_START_GROUP_END = 0x03
    ABSOLUTE_RANGE = 0x04
    NEXT_OBJECT = 0x05


FIELD_COUNT: Final = {
    FilterType.NONE: 0,
    FilterType.RELATIVE_START: 1,
    FilterType.ABSOLUTE_START: 2,
    FilterType.ABSOLUTE_START_GROUP_END: 3,
    FilterType.ABSOLUTE_RANGE: 4,
    FilterType.NEXT_OBJECT: 0,
}
"""How many of the four `LocationFilter.fields` a type carries on the wire."""


@dataclass(frozen=True, slots=True)
class LocationFilter:
    """A range of Locations, inclusive at both ends; build it with one of the class methods.

    Raises UsageError for a field outside 0 … 2^64-1, a field that the type does not have, or an end group
    above 2^64-1.
    """

    type: FilterType
    start_group: int = 0
    start_object: int = 0
    end_group_delta: int = 0
    end_object: int = 0

    def __post_init__(self) -> None:
        if not all(0 <= value <= MAX_VARINT for value in self.fields):
            raise UsageError("a number in a Location Filter is outside 0 … 2^64-1")
        if any(self.fields[FIELD_COUNT[self.type] :]):
            raise UsageError(f"a Location Filter of type {self.type.name} has no such field")
        if self.start_group + self.end_group_delta > MAX_VARINT:  # moqt 6.1
            raise UsageError("the end group of a Location Filter is above 2^64-1")

    @property
    def fields(self) -> tuple[int, int, int, int]:
        """The four fields in the order of the wire; the type says how many of them are sent."""
        return self.start_group, self.start_object, self.end_group_delta, self.end_object

    @classmethod
    def none(cls) -> LocationFilter:
        """Everything; in REQUEST_UPDATE: remove the filter."""
        return cls(FilterType.NONE)

    @classmethod
    def relative_start(cls, groups: int) -> LocationFilter:
        """From a whole group on: 0 the next group, 1 the current one, n the one n-1 before the current."""
        return cls(FilterType.RELATIVE_START, groups)

    @classmethod
    def absolute_start(cls, group: int, object: int) -> LocationFilter:
        """From {group, object} on."""
        return cls(FilterType.ABSOLUTE_START, group, object)

    @classmethod
    def groups(cls, first: int, last: int) -> LocationFilter:
        """The whole groups first … last. Raises UsageError if last < first."""
        return cls(FilterType.ABSOLUTE_START_GROUP_END, first, 0, last - first)

    @classmethod
    def absolute_range(cls, start: Location, end: Location) -> LocationFilter:
        """All from start to end, both included. Raises UsageError if end is in an earlier group."""
        return cls(FilterType.ABSOLUTE_RANGE, start.group, start.object, end.group - start.group, end.object)

    @classmethod
    def next_object(cls) -> LocationFilter:
        """All after the Largest Object."""
        return cls(FilterType.NEXT_OBJECT)

    def start(self, largest: Location | None) -> Location:
        """The first Location inside, given the Largest Object (None: nothing published yet); moqt 6.1."""
        match self.type:
            case FilterType.NONE:
                return Location(0, 0)
            case FilterType.RELATIVE_START:
                if largest is None:  # the draft is silent: what aiomoqt does (moqt 6.1)
                    return Location(0, 0)
                return Location(min(max(largest.group + 1 - self.start_group, 0), MAX_VARINT), 0)
            case FilterType.NEXT_OBJECT:
                # After Object 2^64-1 this is a bound that no Object of the group reaches: what is meant.
                return Location(0, 0) if largest is None else Location(largest.group, largest.object + 1)
            case _:
                return Location(self.start_group, self.start_object)

    @property
    def end(self) -> Location | None:
        """The last Location inside; None: open. A group end is {group, 2^64-1}."""
        match self.type:
            case FilterType.ABSOLUTE_START_GROUP_END:
                return Location(self.start_group + self.end_group_delta, MAX_VARINT)
            case FilterType.ABSOLUTE_RANGE:
                return Location(self.start_group + self.end_group_delta, self.end_object)
            case _:
                return None


class RangeKind(IntEnum):
    """Range filters, numbered as their Message Parameters (moqt 8)."""

    SUBGROUP = 0x25
    OBJECTID = 0x26
    PRIORITY = 0x27
    OBJECT_PROPERTY = 0x28
    TRACK_PROPERTY = 0x29

    @property
    def has_property_type(self) -> bool:
        """Whether filters of this kind name a property type."""
        return self >= RangeKind.OBJECT_PROPERTY


@dataclass(frozen=True, slots=True)
class RangeFilter:
    """One range filter: a value passes if it lies in one of `ranges`.

    Ranges are absolute and inclusive; an end of None is open. Without ranges the filter removes those of its
    kind (REQUEST_UPDATE). `fault` says why it is an INVALID_FILTER ("": it is not); such a filter still
    decodes, because it costs its request and not the session (moqt 8).
    """

    kind: RangeKind
    ranges: tuple[tuple[int, int | None], ...] = ()
    set_id: int = 0
    property_type: int | None = None
    fault: str = field(default="")

    def __post_init__(self) -> None:
        if not self.fault:
            object.__setattr__(self, "fault", self._find_fault())

    @property
    def removes(self) -> bool:
        """Whether this removes the filters of its kind; Length 0 on the wire."""
        return not self.ranges and not self.fault

    def passes(self, value: int) -> bool:
        """Whether `value` lies in one of the ranges."""
        return any(start <= value and (end is None or value <= end) for start, end in self.ranges)

    def _find_fault(self) -> str:
        if not 0 <= self.set_id <= 255:
            return "a SetID is outside 0 … 255"
        if not self.ranges:
            return "" if self.set_id == 0 and self.property_type is None else "there is no Range"
        if self.kind.has_property_type != (self.property_type is not None):
            return "a property type belongs to property filters, and to no other"
        if self.property_type is not None and (
            self.property_type % 2 or not 0 <= self.property_type <= MAX_VARINT
        ):
            return "the property type is odd: properties of such types are no numbers"
        largest = MAX_PRIORITY if self.kind is RangeKind.PRIORITY else MAX_VARINT
        previous: int | None = 0
        for start, end in self.ranges:
            if previous is None or start < previous or (end is not None and end < start):
                return "Ranges are not in ascending order"
            if start > largest or (end is not None and end > largest):
                return f"a value is above {largest}"
            previous = end
        return ""


def check_range_filters(filters: Sequence[RangeFilter], *, limit: int) -> None:
    """Raise RequestRefused(INVALID_FILTER) for filters that a peer may not ask for (moqt 8).

    That is: a fault, two filters with the same kind, SetID and property type, a removal next to filters of
    its kind, or more than `limit` Ranges in sum (our MAX_FILTER_RANGES).
    """
    seen: set[tuple[RangeKind, int, int | None]] = set()
    removed = {filter.kind for filter in filters if filter.removes}
    total = 0
    for filter in filters:
        key = filter.kind, filter.set_id, filter.property_type
        if filter.fault:
            raise RequestRefused(RequestCode.INVALID_FILTER, f"{filter.kind.name} filter: {filter.fault}")
        if key in seen or (filter.kind in removed and not filter.removes):
            raise RequestRefused(RequestCode.INVALID_FILTER, f"{filter.kind.name} filter given twice")
        seen.add(key)
        total += len(filter.ranges)
    if total > limit:
        raise RequestRefused(RequestCode.INVALID_FILTER, f"{total} Ranges, more than {limit}")


def matches(
    filters: Iterable[RangeFilter],
    *,
    subgroup: int,
    object_id: int,
    priority: int,
    properties: Properties,
    track_properties: Properties | None = None,
) -> bool:
    """Whether an Object passes: Ranges of a filter OR, filters with one SetID AND, SetIDs OR (moqt 8).

    An Object without the property fails an OBJECT_PROPERTY filter. TRACK_PROPERTY filters are looked at only
    when `track_properties` is given.
    """
    verdicts: dict[int, bool] = {}
    for filter in filters:
        if not verdicts.setdefault(filter.set_id, True):
            continue
        match filter.kind:
            case RangeKind.SUBGROUP:
                value: int | None = subgroup
            case RangeKind.OBJECTID:
                value = object_id
            case RangeKind.PRIORITY:
                value = priority
            case RangeKind.OBJECT_PROPERTY:
                value = _number(properties, filter.property_type)
            case RangeKind.TRACK_PROPERTY:
                if track_properties is None:
                    continue
                value = _number(track_properties, filter.property_type)
        verdicts[filter.set_id] = value is not None and filter.passes(value)
    return not verdicts or any(verdicts.values())


def matches_track(filters: Iterable[RangeFilter], properties: Properties) -> bool:
    """Whether a track passes the TRACK_PROPERTY filters of a SUBSCRIBE_TRACKS (moqt 8)."""
    verdicts: dict[int, bool] = {}
    for filter in filters:
        passed = verdicts.setdefault(filter.set_id, True)
        if passed and filter.kind is RangeKind.TRACK_PROPERTY:
            value = _number(properties, filter.property_type)
            verdicts[filter.set_id] = value is not None and filter.passes(value)
    return not verdicts or any(verdicts.values())


def _number(properties: Properties, property_type: int | None) -> int | None:
    from moqt.wire.properties import get  # not at the top: moqt.wire stands on this module

    value = None if property_type is None else get(properties, property_type)
    return value if isinstance(value, int) else None
