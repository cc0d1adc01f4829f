"""LocationSet against a plain set of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moqt.filters import MAX_VARINT, Location
from moqt.locations import LocationSet

SIDE = 6
locations = st.builds(Location, st.integers(0, SIDE - 1), st.integers(0, SIDE - 1))
steps = st.lists(st.tuples(st.booleans(), locations, locations), max_size=12)
EVERYTHING = [Location(group, number) for group in range(SIDE) for number in range(SIDE)]


def between(start: Location, end: Location) -> set[Location]:
    return {location for location in EVERYTHING if start <= location <= end}


@given(steps, locations, locations)
def test_like_a_set(changes: list[tuple[bool, Location, Location]], start: Location, end: Location) -> None:
    ranges, plain = LocationSet(), set[Location]()
    for add, low, high in changes:
        if add:
            ranges.add(low, high)
            plain |= between(low, high)
        else:
            ranges.remove(low, high)
            plain -= between(low, high)
    assert {location for location in EVERYTHING if location in ranges} == plain
    stored = list(ranges)
    assert all(low <= high for low, high in stored)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(stored))
    missing = sorted(between(start, end) - plain)
    gap = ranges.gap(start, end)
    if not missing:
        # Between the last Object that the test looks at and the next group there are more Locations.
        assert gap is None or not between(*gap)
    else:
        assert gap is not None
        assert missing[0] in between(*gap) or not between(*gap)


def test_a_group_and_the_next_are_neighbours() -> None:
    ranges = LocationSet()
    ranges.add(Location(0, 3), Location(0, MAX_VARINT))
    ranges.add(Location(1, 0), Location(1, 7))
    assert list(ranges) == [(Location(0, 3), Location(1, 7))]
    assert ranges.gap(Location(0, 0), Location(5, 0)) == (Location(0, 0), Location(0, 2))
    assert ranges.gap(Location(0, 3), Location(5, 0)) == (Location(1, 8), Location(5, 0))
    assert ranges.gap(Location(0, 4), Location(1, 7)) is None


def test_turned_round_ranges_change_nothing() -> None:
    ranges = LocationSet()
    ranges.add(Location(1, 0), Location(0, 5))
    assert len(ranges) == 0
    ranges.add(Location(0, 0), Location(0, 5))
    ranges.remove(Location(0, 3), Location(0, 2))
    assert list(ranges) == [(Location(0, 0), Location(0, 5))]


def test_the_lowest_go_when_there_are_too_many() -> None:
    ranges = LocationSet()
    for group in range(5):
        ranges.add(Location(group, 1), Location(group, 2))
    ranges.shorten(5)
    assert len(ranges) == 5
    ranges.shorten(2)
    assert list(ranges) == [(Location(group, 1), Location(group, 2)) for group in (3, 4)]
