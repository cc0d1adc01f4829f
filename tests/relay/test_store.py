"""What a relay hands to the disk, and what it knows of it."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt import FullTrackName, GroupOrder, Location
from moqt.fetching import successor
from moqt.filters import MAX_VARINT
from moqt.locations import LocationSet
from moqt.relay import store as store_module
from moqt.relay.cache import CachedObject
from moqt.relay.database import LEAST_BYTES, KeptObject, KeptTrack, Outcome, StoreFailed
from moqt.relay.store import GATHER, RETRY, USE, DiskTrack, Store

pytestmark = pytest.mark.virtual

NAME = FullTrackName((b"a",), b"k")
EPOCH = 1.8e9
LAST = Location(MAX_VARINT, MAX_VARINT)


def clock() -> float:
    """Seconds since 1970, in virtual time."""
    return EPOCH + asyncio.get_running_loop().time()


@asynccontextmanager
async def opened(directory: Path, limit: int = LEAST_BYTES) -> AsyncIterator[Store]:
    store = Store(directory, limit, clock=clock)
    try:
        yield store
    finally:
        await store.close()


def an_object(group: int, object_id: int, size: int = 1000, **more: Any) -> CachedObject:
    """As it is in memory, complete."""
    payload = random.Random(f"{group} {object_id}").randbytes(size)
    return CachedObject(Location(group, object_id), (payload,), size, 0, 128, b"", **more)


async def contents(track: DiskTrack) -> list[tuple[Location, bytes]]:
    found: list[KeptObject] = []
    start = Location(0, 0)
    while items := await track.read(start, LAST):
        found += items
        start = successor(items[-1].location)
    return [(item.location, b"".join(item.payload)) for item in found]


def content(*items: CachedObject) -> list[tuple[Location, bytes]]:
    return [(item.location, b"".join(item.payload)) for item in items]


def ranges(locations: LocationSet) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [((low.group, low.object), (high.group, high.object)) for low, high in locations]


async def test_objects_and_what_is_known_are_there_after_a_restart(tmp_path: Path) -> None:
    first, second = an_object(0, 0, first=True), an_object(0, 1, ends=True, after=0, expires=1000.0)
    async with opened(tmp_path) as store:
        track = store.track(NAME)
        track.learn(Location(0, 0), Location(0, 9), [first, second])
        track.keep(first)
        track.keep(second)
        track.learn(Location(0, 5), LAST, [])
        track.describe(((0x40, 1),), Location(0, 1), Location(1, 0), True)
        assert not track.stored
        await asyncio.sleep(2 * GATHER)
        assert ranges(track.stored) == [((0, 0), (0, 1))]
        assert await contents(track) == content(first, second)
        assert store.skipped == first.pins == second.pins == 0
    async with opened(tmp_path) as store:
        track = store.tracks[NAME]
        assert store.track(NAME) is track
        assert store.track(FullTrackName((b"a",), b"other")) is not track
        assert (track.properties, track.largest, track.ended) == (
            ((0x40, 1),),
            Location(0, 1),
            Location(1, 0),
        )
        assert track.finished
        assert ranges(track.stored) == [((0, 0), (0, 1))]
        assert ranges(track.absent) == [((0, 2), (MAX_VARINT, MAX_VARINT))]
        assert await contents(track) == content(first, second)
        one, other = await track.read(Location(0, 0), LAST)
        assert (one.first, one.ends, one.after) == (True, False, None)
        assert (other.first, other.ends, other.after) == (False, True, 0)
        assert track.expiry(one) == float("inf")
        assert track.expiry(other) == pytest.approx(1000.0)


async def test_nothing_is_written_of_a_track_without_objects(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        track = store.track(NAME)
        track.learn(Location(0, 0), LAST, [])
        track.describe((), None, Location(0, 0), True)
        await asyncio.sleep(1)
        assert not store.tracks
    async with opened(tmp_path) as store:
        assert not store.tracks


async def test_an_object_stays_in_memory_until_it_is_written(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        track = store.track(NAME)
        item = an_object(0, 0)
        track.keep(item)
        track.keep(item)
        assert item.busy
        await asyncio.sleep(2 * GATHER)
        assert not item.busy
        track.keep(item)
        assert item.busy  # It is compared with what is there.
        await asyncio.sleep(2 * GATHER)
        assert not item.busy
        track.keep(an_object(0, 0, recalled=True))
        assert store.unwritten == 0
        assert await contents(track) == content(item)


async def test_what_the_disk_does_not_take_in_time_is_not_kept(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        store.queue = 3_000_000
        track = store.track(NAME)
        items = [an_object(0, object_id, 1_000_000) for object_id in range(7)]
        for item in items:
            track.keep(item)
        # Two are being written, three wait.
        assert [item.busy for item in items] == [True] * 5 + [False] * 2
        assert store.skipped == 2
        await asyncio.sleep(1)
        track.keep(items[-1])
        too_large = an_object(1, 0, LEAST_BYTES // 8 + 1)
        track.keep(too_large)
        assert store.skipped == 3
        assert not too_large.busy
    async with opened(tmp_path) as store:
        assert await contents(store.track(NAME)) == content(*items[:5], items[6])


async def test_a_track_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    """moqt 15 #5, at each step: before it is written, meanwhile, and after it."""
    for step in range(3):
        async with opened(tmp_path / str(step)) as store:
            track = store.track(NAME)
            items = [an_object(0, object_id, 100_000) for object_id in range(20)]
            for item in items:
                track.keep(item)
            if step == 1:
                store._write()
                assert store._writing is not None
            elif step == 2:
                await asyncio.sleep(1)
                assert track.stored
            track.drop()
            assert not track.stored
            track.keep(an_object(9, 9))
            await asyncio.sleep(1)
            assert not track.stored
            assert not store.tracks
            assert not any(item.busy for item in items)
            anew = store.track(NAME)
            anew.keep(an_object(5, 5))
        async with opened(tmp_path / str(step)) as store:
            assert await contents(store.track(NAME)) == content(an_object(5, 5))


async def test_what_makes_room_is_told(tmp_path: Path) -> None:
    lacking = []
    async with opened(tmp_path) as store:
        old = store.track(FullTrackName((b"a",), b"old"))
        old.on_lack = lambda: lacking.append(old.stored)
        old.keep(an_object(0, 0, 2_000_000))
        await asyncio.sleep(1)
        track = store.track(NAME)
        for number in range(20):
            track.use(Location(0, 0))
            track.keep(an_object(0, number, 1_000_000))
            await asyncio.sleep(2 * USE)
            assert store.bytes <= LEAST_BYTES
        assert len(lacking) == 1
        assert not lacking[0]
        assert list(store.tracks.values()) == [track]
        assert await contents(track) == content(
            *(an_object(0, n, 1_000_000) for n in range(20) if Location(0, n) in track.stored)
        )
        assert Location(0, 0) in track.stored
        assert Location(0, 1) not in track.stored


async def test_what_expires_goes_while_nothing_else_happens(tmp_path: Path) -> None:
    """R8c: after MAX_CACHE_DURATION an Object is unknown, also if the relay was away meanwhile."""
    async with opened(tmp_path) as store:
        track = store.track(NAME)
        track.keep(an_object(0, 0, expires=50.0))
        track.keep(an_object(0, 1, expires=500.0))
        track.keep(an_object(0, 2, expires=600.0))
        await asyncio.sleep(49)
        assert ranges(track.stored) == [((0, 0), (0, 2))]
        await asyncio.sleep(2)
        assert ranges(track.stored) == [((0, 1), (0, 2))]
    await asyncio.sleep(460)
    async with opened(tmp_path) as store:
        track = store.track(NAME)
        assert await contents(track) == content(an_object(0, 2))
        await asyncio.sleep(1)
        assert ranges(track.stored) == [((0, 2), (0, 2))]
        await asyncio.sleep(100)
        assert not store.tracks


async def test_a_disk_that_fails_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as store:
        track = store.track(NAME)
        track.keep(an_object(0, 0))
        await asyncio.sleep(1)
        works = store._database.write

        def fail(*_: object) -> Outcome:
            return Outcome(error=sqlite3.OperationalError("database or disk is full"))

        monkeypatch.setattr(store._database, "write", fail)
        items = [an_object(1, object_id) for object_id in range(6)]
        for item in items[:3]:
            track.keep(item)
            await asyncio.sleep(RETRY / 2)  # The second one is not even tried.
        assert not any(item.busy for item in items)
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path / 'objects.sqlite3'} fails; Objects are kept in memory only: database or disk is full"
        ]
        assert await contents(track) == content(an_object(0, 0))
        monkeypatch.setattr(store._database, "write", works)
        await asyncio.sleep(RETRY)
        track.keep(items[4])
        await asyncio.sleep(1)
        assert await contents(track) == content(an_object(0, 0), items[4])
        assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


async def test_a_disk_that_can_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as store:
        track = store.track(NAME)
        track.keep(an_object(0, 0))
        await asyncio.sleep(1)

        def fail(*_: object, **__: object) -> None:
            raise sqlite3.DatabaseError("database disk image is malformed")

        monkeypatch.setattr(store._database, "read", fail)
        assert await contents(track) == []
        assert await contents(track) == []
        assert len(caplog.records) == 1


async def test_a_writer_that_breaks_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as store:
        track = store.track(NAME)

        def fail(*_: object) -> Outcome:
            raise MemoryError("no room")

        monkeypatch.setattr(store._database, "write", fail)
        item = an_object(0, 0)
        track.keep(item)
        await asyncio.sleep(1)
        assert not item.busy
        assert not track.stored
        assert len(caplog.records) == 1


async def test_tracks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was kept first makes room, also while it is being written; it may come again."""
    monkeypatch.setattr(store_module, "MAX_TRACKS", 3)
    lacking: list[int] = []
    async with opened(tmp_path) as store:
        tracks = [store.track(FullTrackName((b"a",), bytes([number]))) for number in range(5)]
        for number, track in enumerate(tracks):
            track.on_lack = partial(lacking.append, number)
            track.learn(Location(0, 1), LAST, [])
            track.keep(an_object(0, number))
            if number == 3:
                store._write()  # It is on its way when the next one comes.
        assert len(store.tracks) == 3
        await asyncio.sleep(1)
        assert lacking == [0, 1]
        assert [bool(track.stored) for track in tracks] == [False, False, True, True, True]
        tracks[1].keep(an_object(0, 1))
        await asyncio.sleep(1)
        assert [bool(track.stored) for track in tracks] == [False, True, False, True, True]
    async with opened(tmp_path) as store:
        assert {name.name[0] for name in store.tracks} == {1, 3, 4}
        for name, track in store.tracks.items():
            assert await contents(track) == content(an_object(0, name.name[0]))
            assert ranges(track.absent) == [((0, 1), (MAX_VARINT, MAX_VARINT))]


async def test_a_track_that_makes_room_while_it_is_written_and_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written under its former number does not count as stored."""
    monkeypatch.setattr(store_module, "MAX_TRACKS", 1)
    async with opened(tmp_path) as store:
        one, other = (store.track(FullTrackName((b"a",), name)) for name in (b"one", b"other"))
        first, second = an_object(0, 0), an_object(0, 1)
        one.keep(first)
        store._write()
        other.keep(an_object(0, 0))
        one.keep(second)
        await asyncio.sleep(1)
        assert ranges(one.stored) == [((0, 1), (0, 1))]
        assert await contents(one) == content(second)
        assert not other.stored
        assert not first.busy
    async with opened(tmp_path) as store:
        assert list(store.tracks) == [one.name]


async def test_a_file_with_nonsense_in_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        store.track(NAME).keep(an_object(0, 0))
    connection = sqlite3.connect(tmp_path / "objects.sqlite3")
    connection.execute("UPDATE tracks SET name = x'05'")
    connection.commit()
    connection.close()
    with pytest.raises(StoreFailed, match=r"objects\.sqlite3 is damaged .*: remove it to begin anew"):
        Store(tmp_path, LEAST_BYTES, clock=clock)


def unread(name: str = "k") -> DiskTrack:
    return DiskTrack(
        None,  # type: ignore[arg-type]  # It is not asked.
        KeptTrack(1, FullTrackName((b"a",), name.encode())),
        LocationSet(),
        LocationSet(),
    )


places = st.builds(Location, st.integers(0, 3), st.integers(0, 3))
orders = st.sampled_from(GroupOrder)


def delivered(order: GroupOrder) -> Callable[[Location], tuple[int, int]]:
    sign = 1 if order is GroupOrder.ASCENDING else -1
    return lambda location: (sign * location.group, location.object)


@given(st.sets(places), places, places, orders)
def test_the_first_part_of_a_range(
    stored: set[Location], one: Location, other: Location, order: GroupOrder
) -> None:
    """Part by part, in the order of delivery, a range is divided into what is on disk and what is not."""
    track = unread()
    for location in stored:
        track.stored.add(location, location)
    start, end = min(one, other), max(one, other)
    everything = [Location(group, object_id) for group in range(4) for object_id in range(4)]
    wanted = sorted((place for place in everything if start <= place <= end), key=delivered(order))
    while wanted:
        first = wanted[0]
        begins = order is GroupOrder.ASCENDING or first in (start, Location(first.group, 0))
        rest = wanted if begins else [place for place in wanted if place.group == first.group]
        asked = (
            min(rest),
            max(place for place in rest if order is GroupOrder.ASCENDING or place.group == first.group),
        )
        low, high, there = track.part(*asked, order)
        assert asked[0] <= low <= high <= asked[1]
        if there:
            assert order is GroupOrder.ASCENDING or low.group == high.group
        part = [place for place in wanted if low <= place <= high]
        assert part[0] == first
        assert {place in stored for place in part} == {there}
        wanted = [place for place in wanted if place not in part]


@given(st.lists(st.tuples(places, places)), st.sets(places))
def test_what_is_learned(learned: list[tuple[Location, Location]], here: set[Location]) -> None:
    """All that is said to be empty is absent, is written once, and no Object is."""
    track = unread()
    track._store = _Silent()  # type: ignore[assignment]  # Nothing is written.
    items = [an_object(place.group, place.object) for place in here]
    empty = LocationSet()
    for start, end in learned:
        empty.add(start, end)
        track.learn(start, end, items)
    for place in here:
        empty.remove(place, place)
    assert list(track.absent) == list(empty)
    written = LocationSet()
    for low, high in track.unwritten:
        assert low <= high
        assert written.gap(low, high) == (low, high)
        written.add(low, high)
    assert list(written) == list(empty)


class _Silent:
    def describe(self, _: DiskTrack) -> None:
        pass
