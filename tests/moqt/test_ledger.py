"""What a receiver knows of a Track. What makes one malformed is tried on sessions too: test_checks_data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import MalformedTrack
from moqt.filters import Location, Properties
from moqt.ledger import Ledger
from moqt.wire import ObjectHeader, ObjectStatus, PropertyType, encode_properties
from tests.counted import Counted


def header(
    group: int,
    number: int,
    *,
    subgroup: int = 0,
    status: ObjectStatus = ObjectStatus.NORMAL,
    properties: Properties = (),
    datagram: bool = False,
) -> ObjectHeader:
    return ObjectHeader(Location(group, number), subgroup, None, properties, b"", status, 0, datagram)


def record(
    ledger: Ledger, group: int, number: int, payload: bytes = b"x", *, priority: int = 128, **rest: int
) -> bool:
    return ledger.record(header(group, number, **rest), payload, priority=priority)  # type: ignore[arg-type]  # options of any kind


def end_group(ledger: Ledger, group: int, number: int) -> bool:
    return ledger.record(header(group, number, status=ObjectStatus.END_OF_GROUP), b"", priority=128)


def end_track(ledger: Ledger, group: int, number: int) -> bool:
    return ledger.record(header(group, number, status=ObjectStatus.END_OF_TRACK), b"", priority=128)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_each_object_is_new_once(places: list[tuple[int, int]]) -> None:
    ledger, seen = Ledger(1000), set[tuple[int, int]]()
    for place in places:
        assert record(ledger, *place, b"%d/%d" % place) == (place not in seen)
        seen.add(place)


def test_statuses_are_new_once() -> None:
    ledger = Ledger(1000)
    assert [end_group(ledger, 1, 4) for _ in range(3)] == [True, False, False]
    assert [end_track(ledger, 5, 0) for _ in range(3)] == [True, False, False]


def test_an_end_that_the_bit_told_first_is_still_delivered() -> None:
    ledger = Ledger(1000)
    record(ledger, 1, 3)
    ledger.end_group(1, 4)
    assert end_group(ledger, 1, 4)


def test_of_two_ends_the_earlier_counts() -> None:
    ledger = Ledger(1000)
    record(ledger, 1, 3)
    end_group(ledger, 1, 9)
    ledger.end_group(1, 4)
    with pytest.raises(MalformedTrack):
        record(ledger, 1, 4)
    end_track(ledger, 5, 0)
    end_track(ledger, 3, 0)
    with pytest.raises(MalformedTrack):
        record(ledger, 4, 0)


@pytest.mark.parametrize(
    "again",
    [
        (header(0, 0), b"y", 128),
        (header(0, 0), b"xx", 128),
        (header(0, 0, subgroup=1), b"x", 128),
        (header(0, 0, datagram=True), b"x", 128),
        (header(0, 0), b"x", 127),
    ],
)
def test_the_same_object_otherwise(again: tuple[ObjectHeader, bytes, int]) -> None:
    ledger = Ledger(1000)
    assert record(ledger, 0, 0)
    with pytest.raises(MalformedTrack):
        ledger.record(again[0], again[1], priority=again[2])


def test_datagrams_have_no_subgroup() -> None:
    """So their priorities may differ (moqt 12.5)."""
    ledger = Ledger(1000)
    for number in range(3):
        assert ledger.record(header(0, number, datagram=True), b"x", priority=number)
    assert record(ledger, 0, 9, priority=77)


def test_the_end_of_a_subgroup() -> None:
    ledger = Ledger(1000)
    record(ledger, 0, 3, subgroup=1)
    ledger.end_subgroup(0, 1, 3)
    ledger.end_subgroup(0, 1, 3)
    assert not record(ledger, 0, 3, subgroup=1)
    assert record(ledger, 0, 2, subgroup=1)
    record(ledger, 0, 4, subgroup=2)
    with pytest.raises(MalformedTrack):
        record(ledger, 0, 4, subgroup=1)
    with pytest.raises(MalformedTrack):
        ledger.end_subgroup(0, 1, 2)
    with pytest.raises(MalformedTrack):
        ledger.end_subgroup(0, 2, 3)
    ledger.end_subgroup(7, 7, 7)  # Nothing is known of it.


def gap(kind: PropertyType, size: int) -> Properties:
    return ((kind, size),)


@pytest.mark.parametrize(
    ("kind", "size", "malformed"),
    [
        (PropertyType.PRIOR_OBJECT_ID_GAP, 0, False),
        (PropertyType.PRIOR_OBJECT_ID_GAP, 4, False),
        (PropertyType.PRIOR_OBJECT_ID_GAP, 5, True),
        (PropertyType.PRIOR_OBJECT_ID_GAP, 9, True),
        (PropertyType.PRIOR_OBJECT_ID_GAP, 10, True),
        (PropertyType.PRIOR_OBJECT_ID_GAP, 2**62, True),
        (PropertyType.PRIOR_GROUP_ID_GAP, 2, False),
        (PropertyType.PRIOR_GROUP_ID_GAP, 3, True),
        (PropertyType.PRIOR_GROUP_ID_GAP, 9, True),
    ],
)
def test_gaps(kind: PropertyType, size: int, malformed: bool) -> None:
    ledger = Ledger(1000)
    record(ledger, 5, 0)
    record(ledger, 8, 4)
    item = header(8, 9, properties=gap(kind, size))
    if malformed:
        with pytest.raises(MalformedTrack):
            ledger.record(item, b"x", priority=128)
    else:
        assert ledger.record(item, b"x", priority=128)


def test_a_gap_down_to_the_very_first() -> None:
    for kind in (PropertyType.PRIOR_OBJECT_ID_GAP, PropertyType.PRIOR_GROUP_ID_GAP):
        assert Ledger(9).record(header(4, 4, properties=gap(kind, 4)), b"x", priority=128)


def test_a_gap_inside_the_immutable_properties() -> None:
    ledger = Ledger(1000)
    record(ledger, 0, 0)
    inner = encode_properties(gap(PropertyType.PRIOR_OBJECT_ID_GAP, 1))
    item = header(0, 1, properties=((PropertyType.IMMUTABLE_PROPERTIES, inner),))
    with pytest.raises(MalformedTrack):
        ledger.record(item, b"x", priority=128)


@pytest.mark.parametrize("groups", [1, 2, 50, 5000])
def test_memory_is_bounded(groups: int) -> None:
    """The Groups that came first are forgotten."""
    ledger = Ledger(100)
    for number in range(5000):
        record(ledger, number % groups, number)
    for number in range(5000):
        end_group(ledger, 10_000 + number, 1)
    assert ledger._count <= 102
    assert sum(len(group.objects) + 1 for group in ledger._groups.values()) == ledger._count


@pytest.mark.parametrize("kind", [PropertyType.PRIOR_GROUP_ID_GAP, PropertyType.PRIOR_OBJECT_ID_GAP])
def test_a_gap_is_not_compared_with_all_that_came(kind: PropertyType) -> None:
    """A peer that says with each Object that a million before it do not exist costs no more than others."""
    ledger, count, step = Ledger(1 << 20), 2000, 1 << 20
    Counted.comparisons = 0
    for number in range(1, count + 1):
        ids = [Counted(number * step), Counted(0)]
        if kind is PropertyType.PRIOR_OBJECT_ID_GAP:
            ids.reverse()
        place = header(*ids, properties=((kind, step - 1),))
        assert ledger.record(place, b"", priority=128)
    assert Counted.comparisons < 100 * count


@pytest.mark.parametrize("cached", [False, True])
def test_subgroups_count(cached: bool) -> None:
    """A Group of one Subgroup for each Object is forgotten like many Groups (moqt 21)."""
    ledger = Ledger(100, (lambda _group: ()) if cached else None)
    for number in range(1000):
        ledger.record(header(0, number, subgroup=number), b"", priority=128)
        [group] = ledger._groups.values()
        assert len(group.subgroups) <= 100
