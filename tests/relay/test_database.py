"""The file of the cache on disk: what comes back, what makes room, and what can happen to a file."""

from __future__ import annotations

import contextlib
import math
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moqt import FullTrackName, Location
from moqt.errors import UsageError
from moqt.filters import MAX_VARINT
from moqt.relay.database import LEAST_BYTES, LEAST_ROOM, Batch, Database, KeptObject, KeptTrack, StoreFailed
from moqt.wire import PropertyType

LIMIT = LEAST_BYTES
TRACK = KeptTrack(1, FullTrackName((b"a", b"\x00\xff"), b"k"), ((PropertyType.MAX_CACHE_DURATION, 10**15),))
FIRST, LAST = Location(0, 0), Location(MAX_VARINT, MAX_VARINT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "objects.sqlite3"


@contextlib.contextmanager
def database(path: Path, limit: int = LIMIT) -> Iterator[Database]:
    made = Database(path, limit)
    try:
        yield made
    finally:
        made.close()


def an_object(group: int, object_id: int, size: int = 1000, *, expires: float = math.inf) -> KeptObject:
    """Its payload is told by its Location."""
    octets = random.Random(f"{group} {object_id}").randbytes(size)
    return KeptObject(Location(group, object_id), 0, 128, b"", (octets,) if octets else (), expires=expires)


def write(made: Database, *items: KeptObject, **more: Any) -> None:
    outcome = made.write(Batch([TRACK], [(TRACK.id, item) for item in items], **more), 0.0)
    assert outcome.error is None


def read(made: Database, now: float = 0.0) -> list[KeptObject]:
    return made.read(TRACK.id, FIRST, LAST, limit=1 << 40, now=now)


def test_all_of_an_object_and_its_track_comes_back(path: Path) -> None:
    """moqt 15 #2."""
    track = KeptTrack(7, TRACK.name, TRACK.properties, Location(5, MAX_VARINT), Location(6, 0), True)
    items = [
        KeptObject(FIRST, 0, 0, b"", ()),
        KeptObject(
            Location(5, 3), MAX_VARINT, 255, b"\x02\x01", (b"ab", bytes(1 << 20)), False, True, True, 0, 1e10
        ),
        KeptObject(Location(5, 1 << 63), 1 << 63, 9, bytes(65536), (bytearray(b"x"),), after=MAX_VARINT),
        KeptObject(LAST, 1, 1, b"", (memoryview(b"last"),), datagram=True, first=True),
    ]
    with database(path) as made:
        absent = [(7, Location(5, 4), Location(5, 9)), (7, Location(9, 0), LAST)]
        assert made.write(Batch([track], [(7, item) for item in items], absent=absent), 0.0).error is None
    with database(path) as made:
        (loaded,) = made.load()
        assert loaded.track == track
        assert list(loaded.stored) == [(item.location, item.location) for item in items]
        assert list(loaded.absent) == [found[1:] for found in absent]
        items = [replace(item, payload=(b"".join(item.payload),) if item.size else ()) for item in items]
        assert made.read(7, FIRST, LAST, limit=1 << 40, now=0.0) == items
        assert made.read(7, Location(5, 0), Location(5, 3), limit=1 << 40, now=0.0) == [items[1]]
        assert made.read(7, FIRST, LAST, limit=3, now=0.0) == items[:2]
        assert made.read(8, FIRST, LAST, limit=1 << 40, now=0.0) == []


def test_what_is_known_of_a_track_is_replaced(path: Path) -> None:
    with database(path) as made:
        write(made, an_object(0, 0))
        newer = KeptTrack(1, TRACK.name, (), Location(3, 0), None, True)
        made.write(Batch([newer]), 0.0)
    with database(path) as made:
        assert [loaded.track for loaded in made.load()] == [newer]


@pytest.mark.parametrize("size", [5000, 9000, 33_000, 300_000, 1_900_000])
def test_the_file_is_bounded_and_what_was_used_longest_ago_goes_first(path: Path, size: int) -> None:
    with database(path) as made:
        most = number = 0
        for _ in range(4 * LIMIT // 1_000_000):
            items = [an_object(0, number + n, size) for n in range(max(1, 1_000_000 // size))]
            number += len(items)
            write(made, *items, used=[(1, FIRST)])
            most = max(most, sum(file.stat().st_size for file in path.parent.iterdir()))
        assert most <= LIMIT
        kept = [item.location.object for item in read(made)]
        assert kept == [0, *range(number - len(kept) + 1, number)]  # The first was used again and again.
        assert LIMIT / 2 < made.bytes <= LIMIT
        assert len(kept) * size > LIMIT / 3  # A row of more than half a page has one for itself.
    with database(path) as made:
        assert read(made) == [an_object(0, object_id, size) for object_id in kept]


def test_objects_are_bounded_also_if_they_are_empty(path: Path) -> None:
    most = LIMIT // 16 * 15 // LEAST_ROOM
    with database(path) as made:
        for number in range(4):
            write(made, *(an_object(number, object_id, 0) for object_id in range(most // 2)))
        kept = [item.location.group for item in read(made)]
        assert most - 1 <= len(kept) <= most
        assert set(kept) == {2, 3}


def test_what_has_expired_is_not_read_and_goes_with_the_next_batch(path: Path) -> None:
    with database(path) as made:
        write(made, an_object(0, 0, expires=50.0), an_object(0, 1, expires=60.0), an_object(0, 2))
        assert [item.location.object for item in read(made, now=49.9)] == [0, 1, 2]
        assert [item.location.object for item in read(made, now=50.0)] == [1, 2]
        assert made.write(Batch(), 49.0).expires == 50.0
        outcome = made.write(Batch(), 55.0)
        assert outcome.removed == [(1, Location(0, 0))]
        assert outcome.expires == 60.0
        assert made.write(Batch(), 60.0).expires == math.inf
        assert [item.location.object for item in read(made)] == [2]


def test_nothing_stays_of_a_track_whose_last_object_goes(path: Path) -> None:
    with database(path) as made:
        items = an_object(0, 0, expires=1.0), an_object(1, 0, expires=1.0), an_object(1, 1, expires=2.0)
        write(made, *items, absent=[(1, Location(0, 1), Location(0, 9)), (1, Location(1, 2), LAST)])
        made.write(Batch(), 1.0)
        (loaded,) = made.load()
        assert list(loaded.stored) == [(Location(1, 1), Location(1, 1))]
        assert list(loaded.absent) == [(Location(1, 2), LAST)]  # Of Group 0, nothing is known any more.
        made.write(Batch(), 2.0)
        assert list(made.load()) == []
    assert rows(path) == dict.fromkeys(("tracks", "objects", "payloads", "absent"), 0)


def test_what_comes_again_is_compared(path: Path) -> None:
    first = KeptObject(Location(0, 0), 5, 128, b"", (b"payload",))
    other = KeptObject(Location(0, 1), 5, 128, b"", (b"payload",), datagram=True)
    same = [
        replace(first, payload=(b"pay", b"load"), first=True, ends=True, after=3, properties=b"\x02\x01"),
        replace(other, subgroup=7),
    ]
    different = [
        replace(first, payload=(b"Payload",)),
        replace(first, payload=()),
        replace(first, priority=127),
        replace(first, subgroup=6),
        replace(first, datagram=True),
    ]
    with database(path) as made:
        write(made, first, other)
        assert made.write(Batch([TRACK], again=[(1, item) for item in same]), 0.0).contradictions == []
        for item in different:
            outcome = made.write(Batch([TRACK], again=[(1, item)]), 0.0)
            assert outcome.contradictions == [(1, first.location)]
        missing = an_object(3, 3)  # It has made room meanwhile.
        assert made.write(Batch([TRACK], again=[(1, missing)]), 0.0).contradictions == []
        assert read(made) == [first, other, missing]


def test_a_track_that_is_dropped(path: Path) -> None:
    other = KeptTrack(2, FullTrackName((b"a",), b"other"))
    with database(path) as made:
        write(made, an_object(0, 0), absent=[(1, Location(1, 0), LAST)])
        made.write(Batch([other], [(2, an_object(5, 5))]), 0.0)
        again = KeptTrack(3, TRACK.name)
        assert made.write(Batch([again], [(3, an_object(0, 1))], dropped=[1]), 0.0).error is None
        assert [loaded.track for loaded in made.load()] == [other, again]
        assert read(made) == []
        assert made.read(3, FIRST, LAST, limit=1, now=0.0) == [an_object(0, 1)]
    assert rows(path) == {"tracks": 2, "objects": 2, "payloads": 2, "absent": 0}


def test_a_smaller_bound_than_before(path: Path) -> None:
    with database(path, 4 * LIMIT) as made:
        for number in range(5):
            write(made, *(an_object(number, object_id, 1_000_000) for object_id in range(10)))
        assert path.stat().st_size > 2 * LIMIT
    with database(path) as made:
        assert path.stat().st_size <= LIMIT
        items = [Location(number, object_id) for number in range(5) for object_id in range(10)]
        assert [item.location for item in read(made)] == items[-15:]
        write(made, *(an_object(5, object_id, 1_000_000) for object_id in range(10)))
        assert path.stat().st_size <= LIMIT


def test_a_flipped_bit_costs_one_object(path: Path) -> None:
    items = [an_object(0, object_id, 50_000) for object_id in range(4)]
    with database(path) as made:
        write(made, *items)
    octets = path.read_bytes()
    place = octets.index(bytes(items[2].payload[0])[20_000:20_100])
    path.write_bytes(octets[:place] + bytes([octets[place] ^ 1]) + octets[place + 1 :])
    with database(path) as made:
        assert read(made) == [items[0], items[1], items[3]]
        (loaded,) = made.load()
        assert Location(0, 2) not in loaded.stored


def test_a_full_disk_loses_the_batch_and_no_more(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with database(path) as made:
        write(made, an_object(0, 0, 100_000))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 200_000, hard))
            outcome = made.write(Batch([TRACK], [(1, an_object(1, n, 100_000)) for n in range(20)]), 0.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert isinstance(outcome.error, sqlite3.Error)
        assert read(made) == [an_object(0, 0, 100_000)]
        write(made, an_object(2, 0, 100_000))
        assert read(made) == [an_object(0, 0, 100_000), an_object(2, 0, 100_000)]


def test_one_relay_at_a_time(path: Path) -> None:
    with database(path) as made:
        with pytest.raises(StoreFailed, match="in use by another relay"):
            Database(path, LIMIT)
        code = (
            f"from moqt.relay.database import *; Database(__import__('pathlib').Path({str(path)!r}), {LIMIT})"
        )
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "StoreFailed: " in other.stderr
        assert "in use by another relay: each needs a directory of its own" in other.stderr
        write(made, an_object(0, 0))
    with database(path) as made:
        assert read(made) == [an_object(0, 0)]


def test_files_that_are_not_ours(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("a letter to somebody\n" * 1000)
    with pytest.raises(StoreFailed, match="is no database: choose another directory"):
        Database(path, LIMIT)
    assert path.read_text().startswith("a letter")
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE precious (thing)")
    with pytest.raises(StoreFailed, match="a database of something else: choose another directory"):
        Database(path, LIMIT)
    path.unlink()
    with database(path) as made:
        write(made, an_object(0, 0))
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreFailed, match=r"another version of the relay \(schema 99.*remove it"):
        Database(path, LIMIT)


def test_a_damaged_file(path: Path) -> None:
    with database(path) as made:
        write(made, *(an_object(0, object_id) for object_id in range(100)))
    octets = path.read_bytes()
    path.write_bytes(octets[:100] + os.urandom(16_000) + octets[16_100:])
    with pytest.raises(StoreFailed, match="is damaged: remove it"):
        Database(path, LIMIT)


def test_the_file_is_for_its_owner_alone(path: Path) -> None:
    """So is its journal, and both stay so."""
    for number in range(2):
        with contextlib.closing(Database(path, LIMIT)) as made:
            write(made, an_object(0, number))
            assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


def test_places_where_no_file_can_be(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file is not a directory that this relay can write to \(.*exists"):
        Database(tmp_path / "file" / "objects.sqlite3", LIMIT)
    with pytest.raises(UsageError, match="/proc/no is not a directory that this relay can write to"):
        Database(Path("/proc/no/objects.sqlite3"), LIMIT)
    path.mkdir(parents=True)
    with pytest.raises(StoreFailed, match=r"objects\.sqlite3 can't be used for the cache: unable to open"):
        Database(path, LIMIT)
    with pytest.raises(StoreFailed, match=f"{LEAST_BYTES} bytes at least"):
        Database(path, LEAST_BYTES - 1)


WRITER = """
import sys
from pathlib import Path
from moqt.relay.database import Batch, Database
from tests.relay.test_database import LIMIT, TRACK, an_object

made = Database(Path(sys.argv[1]), LIMIT)
group = int(sys.argv[2])
while True:
    objects = [(TRACK.id, an_object(group, object_id, 100_000 * object_id)) for object_id in range(12)]
    assert made.write(Batch([TRACK], objects), 0.0).error is None
    print(group, flush=True)
    group += 1
"""


def test_kill_9_loses_at_most_what_was_not_committed(path: Path) -> None:
    """Ten times, at some moment of writing into a file that is full: whole batches are there, of whole
    Objects, and among them all that the writer has told of, but what had to make room.
    """
    group = 0
    for number in range(10):
        arguments = [sys.executable, "-c", WRITER, str(path), str(group)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(1 + number):
                told = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            told = max([told, *map(int, writer.stdout)])
        with database(path) as made:
            items = read(made)
            assert items == [
                an_object(*astuple(item.location), 100_000 * item.location.object) for item in items
            ]
            last = items[-1].location.group
            assert [item.location.object for item in items if item.location.group == last] == list(range(12))
            assert told <= last <= told + 1
        group = last + 1


def astuple(location: Location) -> tuple[int, int]:
    return location.group, location.object


def rows(path: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(path)) as made:
        return {
            table: made.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("tracks", "objects", "payloads", "absent")
        }
