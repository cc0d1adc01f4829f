"""Locations and filters (moqt 2.2, 6, 8)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import RequestCode, RequestRefused, UsageError
from moqt.filters import (
    FilterType,
    Location,
    LocationFilter,
    RangeFilter,
    RangeKind,
    check_range_filters,
    matches,
    matches_track,
)
from moqt.wire import PropertyType, encode_properties

MAX = 2**64 - 1
L = Location
F = LocationFilter


def test_locations_are_ordered_by_group_then_object() -> None:
    assert L(1, 9) < L(2, 0) < L(2, 1)
    assert max(L(0, MAX), L(1, 0)) == L(1, 0)


@pytest.mark.parametrize(
    ("location_filter", "largest", "start"),
    [
        (F.none(), None, L(0, 0)),
        (F.none(), L(5, 6), L(0, 0)),
        (F.relative_start(0), L(5, 6), L(6, 0)),
        (F.relative_start(1), L(5, 6), L(5, 0)),
        (F.relative_start(2), L(5, 6), L(4, 0)),
        (F.relative_start(6), L(5, 6), L(0, 0)),
        (F.relative_start(7), L(5, 6), L(0, 0)),
        (F.relative_start(MAX), L(5, 6), L(0, 0)),
        (F.relative_start(0), L(MAX, 6), L(MAX, 0)),
        (F.relative_start(0), None, L(0, 0)),
        (F.relative_start(3), None, L(0, 0)),
        (F.absolute_start(12, 5), None, L(12, 5)),
        (F.absolute_start(0, 0), L(5, 6), L(0, 0)),
        (F.groups(4, 7), L(5, 6), L(4, 0)),
        (F.absolute_range(L(3, 2), L(3, 9)), L(5, 6), L(3, 2)),
        (F.next_object(), L(5, 6), L(5, 7)),
        (F.next_object(), None, L(0, 0)),
    ],
)
def test_start(location_filter: LocationFilter, largest: Location | None, start: Location) -> None:
    assert location_filter.start(largest) == start


def test_next_object_after_the_last_possible_one_lets_nothing_of_its_group_through() -> None:
    assert L(5, MAX) < F.next_object().start(L(5, MAX)) < L(6, 0)


@pytest.mark.parametrize(
    ("location_filter", "end"),
    [
        (F.none(), None),
        (F.relative_start(1), None),
        (F.absolute_start(1, 2), None),
        (F.next_object(), None),
        (F.groups(4, 7), L(7, MAX)),
        (F.groups(4, 4), L(4, MAX)),
        (F(FilterType.ABSOLUTE_START_GROUP_END, 12, 5, 3), L(15, MAX)),
        (F.absolute_range(L(3, 2), L(3, 2)), L(3, 2)),
        (F.absolute_range(L(3, 2), L(8, 0)), L(8, 0)),
        (F.absolute_range(L(0, 0), L(MAX, MAX)), L(MAX, MAX)),
    ],
)
def test_end(location_filter: LocationFilter, end: Location | None) -> None:
    assert location_filter.end == end


def test_an_inverted_range_in_one_group_is_a_value() -> None:
    """What it costs depends on the request (moqt 25 #8)."""
    inverted = F.absolute_range(L(3, 5), L(3, 2))
    assert inverted.end is not None
    assert inverted.end < inverted.start(None)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (FilterType.NONE, (1,)),
        (FilterType.NEXT_OBJECT, (0, 1)),
        (FilterType.RELATIVE_START, (1, 1)),
        (FilterType.ABSOLUTE_START, (1, 1, 1)),
        (FilterType.ABSOLUTE_START_GROUP_END, (1, 1, 1, 1)),
        (FilterType.ABSOLUTE_START_GROUP_END, (MAX, 0, 1)),
        (FilterType.ABSOLUTE_RANGE, (MAX - 1, 0, 2, 0)),
        (FilterType.ABSOLUTE_START, (-1, 0)),
        (FilterType.ABSOLUTE_START, (0, MAX + 1)),
    ],
)
def test_location_filters_that_cannot_be(kind: FilterType, fields: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        LocationFilter(kind, *fields)


def test_ranges_that_cannot_be() -> None:
    with pytest.raises(UsageError):
        F.groups(5, 4)
    with pytest.raises(UsageError):
        F.absolute_range(L(5, 0), L(4, 9))


def ranges(kind: RangeKind, *bounds: tuple[int, int | None], **rest: Any) -> RangeFilter:
    return RangeFilter(kind, bounds, **rest)


IDS_0_3 = ranges(RangeKind.OBJECTID, (0, 3))
PROPERTY = ranges(RangeKind.OBJECT_PROPERTY, (1, 2), property_type=0x78)
TRACK_PROPERTY = ranges(RangeKind.TRACK_PROPERTY, (1, 2), property_type=0x78)


@pytest.mark.parametrize(
    ("range_filter", "fault"),
    [
        (IDS_0_3, ""),
        (RangeFilter(RangeKind.OBJECTID), ""),
        (ranges(RangeKind.OBJECTID, (3, 5), (10, None)), ""),
        (ranges(RangeKind.OBJECTID, (3, 5), (5, 5)), ""),
        (ranges(RangeKind.PRIORITY, (0, 255)), ""),
        (PROPERTY, ""),
        (TRACK_PROPERTY, ""),
        (ranges(RangeKind.OBJECTID, (3, 2)), "ascending"),
        (ranges(RangeKind.OBJECTID, (3, 5), (4, 9)), "ascending"),
        (ranges(RangeKind.OBJECTID, (3, None), (9, 10)), "ascending"),
        (ranges(RangeKind.OBJECTID, (-1, 3)), "ascending"),
        (ranges(RangeKind.OBJECTID, (0, MAX + 1)), "above"),
        (ranges(RangeKind.OBJECTID, (MAX + 1, None)), "above"),
        (ranges(RangeKind.PRIORITY, (0, 256)), "above 255"),
        (ranges(RangeKind.PRIORITY, (256, None)), "above 255"),
        (ranges(RangeKind.OBJECTID, (0, 1), set_id=256), "SetID"),
        (ranges(RangeKind.OBJECTID, (0, 1), property_type=2), "property type"),
        (ranges(RangeKind.OBJECT_PROPERTY, (0, 1)), "property type"),
        (ranges(RangeKind.OBJECT_PROPERTY, (0, 1), property_type=0x79), "odd"),
        (RangeFilter(RangeKind.OBJECTID, set_id=1), "no Range"),
        (RangeFilter(RangeKind.OBJECT_PROPERTY, property_type=2), "no Range"),
    ],
)
def test_faults(range_filter: RangeFilter, fault: str) -> None:
    if not fault:
        assert range_filter.fault == ""
        check_range_filters([range_filter], limit=2)
        return
    assert fault in range_filter.fault
    assert not range_filter.removes
    with pytest.raises(RequestRefused, match=fault) as caught:
        check_range_filters([range_filter], limit=2)
    assert caught.value.code is RequestCode.INVALID_FILTER


def test_removal() -> None:
    assert RangeFilter(RangeKind.OBJECTID).removes
    assert not IDS_0_3.removes


@pytest.mark.parametrize(
    ("filters", "limit", "legal"),
    [
        ([], 0, True),
        ([RangeFilter(RangeKind.OBJECTID)], 0, True),
        ([IDS_0_3], 0, False),
        ([IDS_0_3], 1, True),
        ([ranges(RangeKind.OBJECTID, (0, 1), (3, 4)), ranges(RangeKind.SUBGROUP, (0, 1))], 3, True),
        ([ranges(RangeKind.OBJECTID, (0, 1), (3, 4)), ranges(RangeKind.SUBGROUP, (0, 1))], 2, False),
        ([IDS_0_3, IDS_0_3], 9, False),
        ([IDS_0_3, ranges(RangeKind.OBJECTID, (8, None))], 9, False),
        ([IDS_0_3, ranges(RangeKind.OBJECTID, (8, None), set_id=1)], 9, True),
        ([IDS_0_3, ranges(RangeKind.SUBGROUP, (0, 3))], 9, True),
        ([PROPERTY, ranges(RangeKind.OBJECT_PROPERTY, (1, 2), property_type=0x7A)], 9, True),
        ([PROPERTY, PROPERTY], 9, False),
        ([RangeFilter(RangeKind.OBJECTID)] * 2, 9, False),
        ([RangeFilter(RangeKind.OBJECTID), IDS_0_3], 9, False),
        ([RangeFilter(RangeKind.OBJECTID), ranges(RangeKind.SUBGROUP, (0, 3))], 9, True),
    ],
)
def test_combinations(filters: list[RangeFilter], limit: int, legal: bool) -> None:
    if legal:
        check_range_filters(filters, limit=limit)
        return
    with pytest.raises(RequestRefused) as caught:
        check_range_filters(filters, limit=limit)
    assert caught.value.code is RequestCode.INVALID_FILTER


def passes(filters: list[RangeFilter], **rest: Any) -> bool:
    arguments: dict[str, Any] = {"subgroup": 0, "object_id": 0, "priority": 128, "properties": ()}
    return matches(filters, **(arguments | rest))


def test_no_filter_passes_everything() -> None:
    assert passes([])


@pytest.mark.parametrize("value", range(20))
def test_ranges_of_one_filter_or(value: int) -> None:
    """The example of moqt 8: 3 to 5 and 10 to 15."""
    bounds = (3, 5), (10, 15)
    expected = 3 <= value <= 5 or 10 <= value <= 15
    assert passes([ranges(RangeKind.OBJECTID, *bounds)], object_id=value) is expected
    assert passes([ranges(RangeKind.SUBGROUP, *bounds)], subgroup=value) is expected
    assert passes([ranges(RangeKind.PRIORITY, *bounds)], priority=value) is expected
    by_property = [ranges(RangeKind.OBJECT_PROPERTY, *bounds, property_type=0x78)]
    assert passes(by_property, properties=((0x78, value),)) is expected


def test_open_range() -> None:
    assert not passes([ranges(RangeKind.OBJECTID, (8, None))], object_id=7)
    assert passes([ranges(RangeKind.OBJECTID, (8, None))], object_id=MAX)


def test_one_set_is_and_and_sets_are_or() -> None:
    both = [IDS_0_3, ranges(RangeKind.SUBGROUP, (1, 1))]
    assert passes(both, object_id=3, subgroup=1)
    assert not passes(both, object_id=3, subgroup=2)
    assert not passes(both, object_id=4, subgroup=1)
    either = [*both, ranges(RangeKind.PRIORITY, (0, 9), set_id=1)]
    assert passes(either, object_id=4, subgroup=2, priority=9)
    assert passes(either, object_id=3, subgroup=1, priority=10)
    assert not passes(either, object_id=4, subgroup=1, priority=10)


def test_object_properties() -> None:
    assert not passes([PROPERTY])
    assert not passes([PROPERTY], properties=((0x78, 3),))
    assert not passes([PROPERTY], properties=((0x7A, 1),))
    immutable = PropertyType.IMMUTABLE_PROPERTIES, encode_properties(((0x78, 2),))
    assert passes([PROPERTY], properties=(immutable,))


def test_track_properties() -> None:
    assert matches_track([TRACK_PROPERTY], ((0x78, 2),))
    assert not matches_track([TRACK_PROPERTY], ((0x78, 3),))
    assert not matches_track([TRACK_PROPERTY], ())
    assert matches_track([], ())
    assert matches_track([IDS_0_3], ())
    other_set = ranges(RangeKind.OBJECTID, (0, 3), set_id=1)
    assert matches_track([TRACK_PROPERTY, other_set], ())
    assert passes([TRACK_PROPERTY], track_properties=None)
    assert passes([TRACK_PROPERTY], track_properties=((0x78, 1),))
    assert not passes([TRACK_PROPERTY], track_properties=((0x78, 0),))
    assert not passes([TRACK_PROPERTY, other_set], object_id=4, track_properties=())
    assert passes([TRACK_PROPERTY, other_set], object_id=3, track_properties=())


@given(
    st.lists(st.tuples(st.sampled_from([25, 26]), st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)))
)
def test_matches_is_the_rule_spelt_out(rows: list[tuple[bool, int, int, int]]) -> None:
    filters = [
        RangeFilter(
            RangeKind.SUBGROUP if by_subgroup else RangeKind.OBJECTID, ((min(a, b), max(a, b)),), set_id
        )
        for by_subgroup, set_id, a, b in rows
    ]
    for subgroup, object_id in ((1, 8), (5, 5), (9, 0)):
        sets = {item.set_id for item in filters}
        expected = not sets or any(
            all(
                item.passes(subgroup if item.kind is RangeKind.SUBGROUP else object_id)
                for item in filters
                if item.set_id == set_id
            )
            for set_id in sets
        )
        assert passes(filters, subgroup=subgroup, object_id=object_id) is expected
