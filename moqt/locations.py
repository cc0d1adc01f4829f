"""A set of Locations, kept as the ranges that it is made of: what a cache knows of a Track."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from moqt.filters import Location

__all__ = ["LocationSet"]

_BITS = 64
_OBJECTS = (1 << _BITS) - 1


def _number(location: Location) -> int:
    """Locations in order are integers in order: behind {g, 2^64-1} comes {g+1, 0}."""
    return location.group << _BITS | location.object


def _location(number: int) -> Location:
    return Location(number >> _BITS, number & _OBJECTS)


class LocationSet:
    """Ranges of Locations, inclusive at both ends; neighbours are joined, so that the set is as small as it
    can be.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[Location, Location]]:
        return (
            (_location(start), _location(end)) for start, end in zip(self._starts, self._ends, strict=True)
        )

    def __contains__(self, location: Location) -> bool:
        number = _number(location)
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number <= self._ends[index]

    def add(self, start: Location, end: Location) -> None:
        """Put the Locations `start` to `end` in; no effect if `end` is before `start`."""
        low, high = _number(start), _number(end)
        if low > high:
            return
        # All ranges that touch [low - 1, high + 1] become one with it.
        first = bisect_left(self._ends, low - 1)
        last = bisect_right(self._starts, high + 1)
        if first < last:
            low = min(low, self._starts[first])
            high = max(high, self._ends[last - 1])
        self._starts[first:last] = [low]
        self._ends[first:last] = [high]

    def remove(self, start: Location, end: Location) -> None:
        """Take the Locations `start` to `end` out."""
        low, high = _number(start), _number(end)
        if low > high:
            return
        first = bisect_left(self._ends, low)
        last = bisect_right(self._starts, high)
        kept = []
        if first < last:
            if self._starts[first] < low:
                kept.append((self._starts[first], low - 1))
            if self._ends[last - 1] > high:
                kept.append((high + 1, self._ends[last - 1]))
        self._starts[first:last] = [range_start for range_start, _ in kept]
        self._ends[first:last] = [range_end for _, range_end in kept]

    def shorten(self, limit: int) -> None:
        """Take the lowest Locations out until there are at most `limit` ranges."""
        excess = len(self._starts) - limit
        if excess > 0:
            del self._starts[:excess], self._ends[:excess]

    def gap(self, start: Location, end: Location) -> tuple[Location, Location] | None:
        """The first range within `start` to `end` of which nothing is in the set; None if all is in."""
        low, high = _number(start), _number(end)
        index = bisect_left(self._ends, low)
        if index < len(self._starts) and self._starts[index] <= low:
            low = self._ends[index] + 1
            index += 1
        if low > high:
            return None
        if index < len(self._starts):
            high = min(high, self._starts[index] - 1)
        return _location(low), _location(high)

    def last_gap(self, start: Location, end: Location) -> tuple[Location, Location] | None:
        """The last range within `start` to `end` of which nothing is in the set; None if all is in."""
        low, high = _number(start), _number(end)
        index = bisect_right(self._starts, high) - 1
        if index >= 0 and self._ends[index] >= high:
            high = self._starts[index] - 1
            index -= 1
        if low > high:
            return None
        if index >= 0:
            low = max(low, self._ends[index] + 1)
        return _location(low), _location(high)
