"""The Objects of a Track, and the Tracks of an endpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import DoneCode, LocationTaken, UsageError
from moqt.filters import GroupOrder, Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.track import StoredObject, Track, TrackWatcher
from moqt.tracks import Tracks
from moqt.wire import ObjectStatus, PropertyType, encode_properties
from tests.counted import Counted

NAME = FullTrackName((b"a",), b"t")
TOP = 2**64 - 1
At = tuple[int, int]


class Watcher(TrackWatcher):
    def __init__(self) -> None:
        self.told: list[tuple[int, int, ObjectStatus]] = []
        self.codes: list[DoneCode] = []

    def on_object(self, item: StoredObject) -> None:
        self.told.append((item.location.group, item.location.object, item.status))

    def on_removed(self, code: DoneCode) -> None:
        self.codes.append(code)


NORMAL, GROUP, TRACK = ObjectStatus.NORMAL, ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK


def test_published_and_told() -> None:
    track, watcher = Track(NAME), Watcher()
    track.watch(watcher)
    assert track.largest is None
    assert track.append(0, 0, b"abc")
    assert track.append(0, 2, [b"a", memoryview(b"bc"), bytearray(b"d")], subgroup=3, priority=7)
    assert track.largest == Location(0, 2)
    item = track.get(Location(0, 2))
    assert item is not None
    assert (item.size, b"".join(item.payload), item.subgroup, item.priority) == (4, b"abcd", 3, 7)
    assert track.get(Location(0, 1)) is None
    assert track.get(Location(1, 0)) is None
    track.append(4, 1, b"")
    track.append(2, 5, b"late")
    assert track.largest == Location(4, 1)
    track.end_group(4, 2)
    track.end(Location(6, 0))
    assert (track.ended, track.group_end(4), track.group_end(2), track.group_end(9)) == (
        Location(6, 0),
        2,
        None,
        None,
    )
    assert watcher.told == [
        (0, 0, NORMAL),
        (0, 2, NORMAL),
        (4, 1, NORMAL),
        (2, 5, NORMAL),
        (4, 2, GROUP),
        (6, 0, TRACK),
    ]
    track.unwatch(watcher)
    track.unwatch(watcher)
    track.append(5, 0, b"")
    assert len(watcher.told) == 6


@pytest.mark.requirement("R3.4b")
def test_two_payloads_at_one_location_are_impossible() -> None:
    track, watcher = Track(NAME), Watcher()
    track.watch(watcher)
    track.append(0, 0, b"abc", subgroup=1)
    assert not track.append(0, 0, [b"a", b"bc"], subgroup=1)
    for other in (
        {"payload": b"abd"},
        {"payload": b"ab"},
        {"subgroup": 2},
        {"priority": 1},
        {"properties": encode_properties(((0x78, 1),))},
    ):
        fields = {"payload": b"abc", "subgroup": 1, **other}
        payload = fields.pop("payload")
        with pytest.raises(LocationTaken):
            track.append(0, 0, payload, **fields)  # type: ignore[arg-type]  # options of any kind
    track.end_group(0, 1)
    assert not track.append(0, 0, b"abc", subgroup=1)
    assert len(watcher.told) == 2
    item = track.get(Location(0, 0))
    assert item is not None
    assert b"".join(item.payload) == b"abc"


@pytest.mark.parametrize(
    ("group", "number", "options"),
    [
        (-1, 0, {}),
        (0, -1, {}),
        (TOP + 1, 0, {}),
        (0, TOP + 1, {}),
        (0, 9, {"subgroup": -1}),
        (0, 9, {"subgroup": TOP + 1}),
        (0, 9, {"priority": 256}),
        (0, 9, {"priority": -1}),
        (0, 9, {"properties": b"\xff"}),
        (0, 9, {"properties": encode_properties(((0x4000, 1),))}),
        (0, 4, {}),  # Object 5 of its Subgroup is there.
        (0, 9, {"priority": 7}),  # Its Subgroup has another one.
        (1, 2, {}),  # The Group has ended.
        (1, 3, {}),
        (7, 0, {}),  # The Track has ended.
        (9, 0, {}),
    ],
)
def test_what_can_not_be_published(group: int, number: int, options: dict[str, object]) -> None:
    track = Track(NAME)
    track.append(0, 5, b"")
    track.append(1, 0, b"")
    track.end_group(1, 2)
    track.end(Location(7, 0))
    watcher = Watcher()
    track.watch(watcher)
    with pytest.raises(UsageError):
        track.append(group, number, b"", **options)  # type: ignore[arg-type]  # options of any kind
    assert not watcher.told
    assert track.largest == Location(1, 0)
    assert [item.location for item in track.objects(Location(0, 0), Location(TOP, TOP))] == [
        Location(0, 5),
        Location(1, 0),
    ]


def test_subgroups_of_a_group_may_interleave() -> None:
    track = Track(NAME)
    for number, subgroup in ((5, 0), (3, 1), (6, 0), (4, 1), (0, 2)):
        track.append(0, number, b"", subgroup=subgroup, priority=subgroup)
    found = [item.location.object for item in track.objects(Location(0, 0), Location(0, TOP))]
    assert found == [0, 3, 4, 5, 6]
    starts = {
        item.location.object
        for item in track.objects(Location(0, 0), Location(0, TOP))
        if track.starts_subgroup(item)
    }
    assert starts == {0, 3, 5}


def test_one_subgroup() -> None:
    track = Track(NAME, one_subgroup=True)
    track.append(0, 0, b"", subgroup=5)
    with pytest.raises(UsageError):
        track.append(0, 1, b"", subgroup=6)
    track.append(0, 1, b"", subgroup=5)
    track.append(1, 0, b"", subgroup=6)


@pytest.mark.parametrize(("group", "number"), [(0, 3), (0, 5), (1, 9), (7, 0), (8, 0), (-1, 0), (TOP + 1, 0)])
def test_ends_of_groups_that_contradict(group: int, number: int) -> None:
    track = Track(NAME)
    track.append(0, 5, b"")
    track.end_group(1, 9)
    track.end(Location(7, 0))
    with pytest.raises(UsageError):
        track.end_group(group, number)


@pytest.mark.parametrize("location", [Location(0, 0), Location(0, 5), Location(-1, 0), Location(0, TOP + 1)])
def test_ends_of_the_track_that_contradict(location: Location) -> None:
    track = Track(NAME)
    track.append(0, 5, b"")
    with pytest.raises(UsageError):
        track.end(location)
    assert track.ended is None
    track.end(Location(0, 6))
    with pytest.raises(UsageError):
        track.end(Location(0, 6))
    with pytest.raises(UsageError):
        track.append(0, 6, b"")
    with pytest.raises(UsageError):
        track.append(0, 4, b"", subgroup=9)  # Its Group has ended with the Track.


def test_status_objects_go_with_the_last_object() -> None:
    track = Track(NAME, priority=9)
    seen: list[tuple[int, int]] = []

    class Last(Watcher):
        def on_object(self, item: StoredObject) -> None:
            if item.status is not NORMAL:
                seen.append((item.subgroup, item.priority))

    track.watch(Last())
    track.append(0, 0, b"", subgroup=1, priority=50)
    track.append(0, 3, b"", subgroup=2, priority=60)
    track.end_group(0, 4)
    track.end_group(1, 0)
    track.append(2, 0, b"", subgroup=7, priority=70)
    track.end(Location(2, 1))
    assert seen == [(2, 60), (0, 9), (7, 70)]


@pytest.mark.parametrize(
    "properties", [((0x22, 3),), ((PropertyType.DYNAMIC_GROUPS, 2),), ((0x0B, b"\x0b\x00"),), ((0x04, b"x"),)]
)
def test_track_properties_that_no_peer_would_take(properties: tuple[tuple[int, int | bytes], ...]) -> None:
    with pytest.raises(UsageError):
        Track(NAME, properties=properties)


def test_a_track_needs_a_name_and_a_priority() -> None:
    with pytest.raises(ValueError, match="empty"):
        Track(FullTrackName((b"",), b"t"))
    with pytest.raises(UsageError):
        Track(NAME, priority=256)


places = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)))
place = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(present=places, start=place, end=place, order=st.sampled_from(GroupOrder))
def test_ranges_against_a_list(present: set[At], start: At, end: At, order: GroupOrder) -> None:
    track = Track(NAME)
    for at in sorted(present, key=lambda at: (at[0] * 7 % 5, at[1])):
        track.append(*at, b"")
    inside = [at for at in present if start <= at <= end]
    sign = 1 if order is GroupOrder.ASCENDING else -1
    found = [
        (item.location.group, item.location.object)
        for item in track.objects(Location(*start), Location(*end), order)
    ]
    assert found == sorted(inside, key=lambda at: (sign * at[0], at[1]))
    last = track.last_in(Location(*start), Location(*end))
    assert last == (Location(*max(inside)) if inside else None)
    assert track.largest == (Location(*max(present)) if present else None)


def test_a_range_that_is_read_while_more_is_published() -> None:
    track = Track(NAME)
    for group in range(3):
        track.append(group, 0, b"")
    reading = track.objects(Location(0, 0), Location(2, 0))
    assert next(reading).location == Location(0, 0)
    track.append(1, 1, b"")
    track.append(9, 0, b"")
    assert [item.location for item in reading][-1] == Location(2, 0)


def test_payloads_are_not_copied() -> None:
    content = bytearray(b"abc")
    track = Track(NAME)
    track.append(0, 0, content)
    item = track.get(Location(0, 0))
    assert item is not None
    content[0] = ord("x")
    assert b"".join(item.payload) == b"xbc"


# Tracks.


def test_tracks() -> None:
    tracks, watcher = Tracks(), Watcher()
    track, other = Track(NAME), Track(FullTrackName((b"a",), b"u"))
    tracks.add(track)
    tracks.add(other)
    with pytest.raises(UsageError):
        tracks.add(Track(NAME))
    assert list(tracks) == [track, other]
    track.watch(watcher)
    assert tracks.get(NAME) is track
    tracks.remove(NAME, DoneCode.EXPIRED)
    tracks.remove(NAME, DoneCode.GOING_AWAY)
    assert watcher.codes == [DoneCode.EXPIRED]
    assert tracks.get(NAME) is None
    track.append(0, 0, b"")
    assert not watcher.told
    tracks.add(track)


def test_namespaces() -> None:
    tracks = Tracks()
    told: list[tuple[TrackNamespace, bool]] = []

    def note(namespace: TrackNamespace, present: bool) -> None:
        told.append((namespace, present))

    tracks.announce((b"before",))
    tracks.watch(note)
    tracks.announce((b"a",))
    tracks.announce((b"a",))
    tracks.announce(())
    tracks.withdraw((b"before",))
    tracks.withdraw((b"never",))
    assert told == [((b"a",), True), ((), True), ((b"before",), False)]
    assert tracks.namespaces == ((b"a",), ())
    tracks.unwatch(note)
    tracks.unwatch(note)
    tracks.withdraw(())
    assert len(told) == 3
    with pytest.raises(ValueError, match="empty"):
        tracks.announce((b"",))


def test_a_range_is_looked_up_and_not_compared_with_all_there_is() -> None:
    """Its cost is that of what lies in it (moqt 21): a peer chooses both."""
    track = Track(NAME)
    for group in range(2000):
        track.append(Counted(group), Counted(0), b"x")
    for number in range(1, 2000):
        track.append(Counted(7), Counted(number), b"x", subgroup=1)
    Counted.comparisons = 0
    found = [item.location for item in track.objects(Location(7, 1000), Location(8, 3))]
    assert found == [*(Location(7, number) for number in range(1000, 2000)), Location(8, 0)]
    assert [item.location for item in track.objects(Location(7, 4), Location(7, 4))] == [Location(7, 4)]
    assert track.last_in(Location(7, 0), Location(7, 12)) == Location(7, 12)
    assert track.last_in(Location(7, 0), Location(9, 0)) == Location(9, 0)
    assert track.last_in(Location(8, 1), Location(8, 9)) is None
    assert track.last_in(Location(2000, 0), Location(3000, 0)) is None
    assert Counted.comparisons < 4000
