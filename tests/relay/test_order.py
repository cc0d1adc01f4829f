"""The order of delivery, and what is unknown in it, against a plain list of Locations."""

from __future__ import annotations

import asyncio
import random

import pytest

from moqt import FullTrackName, GroupOrder, Location, RangeStatus
from moqt.fetching import Puller, ranges
from moqt.locations import LocationSet
from moqt.relay.cache import Cache
from moqt.relay.cached import CachedTrack
from moqt.track import Hole
from moqt.wire import DataStreamDecoder, EndOfRange, ObjectHeader, ObjectStatus

GROUPS, OBJECTS = 4, 4
PLACES = [Location(group, object_id) for group in range(GROUPS) for object_id in range(OBJECTS)]
ORDERS = [GroupOrder.ASCENDING, GroupOrder.DESCENDING]


def delivered(order: GroupOrder, places: list[Location]) -> list[Location]:
    sign = 1 if order is GroupOrder.ASCENDING else -1
    return sorted(places, key=lambda place: (sign * place.group, place.object))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(200))
def test_ranges(order: GroupOrder, seed: int) -> None:
    chance = random.Random(seed)
    start, end = sorted(chance.choices(PLACES, k=2))
    inside = delivered(order, [place for place in PLACES if start <= place <= end])
    first = chance.choice([None, *range(len(inside))])
    last = chance.choice([None, *range(0 if first is None else first, len(inside))])
    expected = inside[0 if first is None else first + 1 : None if last is None else last + 1]
    found = ranges(
        order, start, end, None if first is None else inside[first], None if last is None else inside[last]
    )
    assert [place for low, high in found for place in inside if low <= place <= high] == expected


@pytest.mark.parametrize("seed", range(100))
def test_the_last_gap(seed: int) -> None:
    chance = random.Random(seed)
    known = LocationSet()
    for place in chance.sample(PLACES, 8):
        known.add(place, place)
    start, end = sorted(chance.choices(PLACES, k=2))
    gap = known.last_gap(start, end)
    unknown = [place for place in PLACES if start <= place <= end and place not in known]
    if gap is None:
        assert not unknown
    else:
        assert not unknown or unknown[-1] <= gap[1]
        assert gap[0] not in known
        assert gap[1] not in known
        assert start <= gap[0] <= gap[1] <= end
        assert known.gap(*gap) == gap


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(100))
async def test_what_a_stream_says_of_each_location(order: GroupOrder, seed: int) -> None:
    """Objects that are here come; what is unknown is said to be unknown; what is left out does not exist."""
    chance = random.Random(seed)

    def no_one(_: CachedTrack, start: Location, end: Location, __: GroupOrder) -> Hole:
        hole = Hole(start, end, done=True)
        hole.unknown.add(start, end)
        return hole

    track = CachedTrack(FullTrackName((b"n",), b"t"), Cache(1 << 20), no_one)
    here, absent = set(), set()
    for place in PLACES:
        what = chance.choice(["here", "absent", "unknown"])
        if what == "here":
            track.begin(ObjectHeader(place, 0, 128, (), b"", ObjectStatus.NORMAL, 0), live=False)
            here.add(place)
        elif what == "absent":
            track.learn(place, place)
            absent.add(place)
        if place.object == OBJECTS - 1:
            track.learn(Location(place.group, OBJECTS), Location(place.group, (1 << 64) - 1))
    start, end = sorted(chance.choices(PLACES, k=2))
    puller = Puller(track, start, end, order, (), lambda _: (0, 0, 0, 0), patience=None)
    data = b"".join(bytes(piece) for step in puller._source(0) if step for piece in step[1])
    decoder = DataStreamDecoder()
    events = decoder.feed(data)
    next(events)
    decoder.order = order
    said: dict[Location, str] = {}
    last: Location | None = None
    for event in events:
        assert isinstance(event, (ObjectHeader, EndOfRange))
        for low, high in ranges(order, start, end, last, event.location):
            for place in PLACES:
                if low <= place <= high:
                    unknown = isinstance(event, EndOfRange) and event.kind is RangeStatus.UNKNOWN
                    said[place] = "unknown" if unknown else "absent"
        if isinstance(event, ObjectHeader):
            said[event.location] = "here"
        last = event.location
    for place in PLACES:
        if start <= place <= end:
            expected = "here" if place in here else "absent" if place in absent else "unknown"
            assert said.get(place, "absent") == expected
    await asyncio.sleep(0)
