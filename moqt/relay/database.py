"""The file in which a relay keeps Objects across restarts: SQLite, driven from one thread.

SQLite and not LMDB, for what a cache needs on a disk that may fail: a full disk or a bad block is an error
code, where a memory map ends the process with SIGBUS; free pages are taken again whatever the size of the
next Object, where LMDB looks for a run of neighbours; and it comes with Python.

- A rollback journal, not a write-ahead log: what is new goes into free pages, of which nothing need be saved,
  so each byte is written about once, and not twice (three times as fast, at a third of the processor time).
  Room is made in a transaction of its own, since pages that the same transaction has freed must be saved.
- `synchronous=FULL`: what was committed outlives a power loss, what was not is rolled back as a whole. Each
  Object has a checksum, since SQLite does not see a flipped bit in a blob.
- Many small Objects go into one statement: each statement gives up the interpreter's lock and waits for it
  again, some milliseconds beside a busy event loop.
- The file does not grow over its bound (`max_page_count`), and is locked as long as it is open.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from moqt.errors import MoqtError, UsageError
from moqt.filters import MAX_VARINT, Location
from moqt.locations import LocationSet
from moqt.names import FullTrackName
from moqt.quic.api import Buffer
from moqt.relay.cache import LEAST_BYTES
from moqt.wire import Properties, decode_properties, encode_properties
from moqt.wire.vi64 import Reader, encode_namespace, encode_prefixed

__all__ = [
    "LEAST_BYTES",
    "Batch",
    "Database",
    "KeptObject",
    "KeptTrack",
    "LoadedTrack",
    "Outcome",
    "StoreFailed",
]

logger = logging.getLogger(__name__)

APPLICATION: Final = 0x6D6F7174
"""What tells our files from those of others: "moqt"."""

SCHEMA_VERSION: Final = 1

PAGE: Final = 16 << 10
"""Bytes; of 4, 8, 16, 32 and 64 KiB the one that is fast and wastes little, whatever the size of Objects."""

LEAST_ROOM: Final = 4 << 10
"""Bytes that an Object counts for at least: the relay remembers its Location, in 100 bytes or less."""

STATEMENT: Final = 1 << 20
ROWS: Final = 64
"""Bytes and Objects for one INSERT."""

MARKS: Final = 256
"""Objects for one UPDATE."""

VICTIMS: Final = 64
"""Objects that are thrown out at a time."""

_SCHEMA: Final = """
CREATE TABLE tracks (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, properties BLOB NOT NULL,
    largest BLOB, ended BLOB, finished INTEGER NOT NULL
);
CREATE TABLE objects (
    id INTEGER PRIMARY KEY, track INTEGER NOT NULL REFERENCES tracks ON DELETE CASCADE,
    location BLOB NOT NULL, subgroup BLOB NOT NULL, datagram INTEGER NOT NULL, priority INTEGER NOT NULL,
    properties BLOB NOT NULL, first INTEGER NOT NULL, ends INTEGER NOT NULL, after BLOB, expires REAL,
    checksum INTEGER NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL,
    UNIQUE (track, location)
);
CREATE INDEX objects_by_use ON objects (used);
CREATE INDEX objects_by_expiry ON objects (expires) WHERE expires IS NOT NULL;
CREATE TABLE payloads (
    object INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE, payload BLOB NOT NULL
);
CREATE TABLE absent (
    track INTEGER NOT NULL REFERENCES tracks ON DELETE CASCADE, first BLOB NOT NULL, last BLOB NOT NULL,
    PRIMARY KEY (track, first)
) WITHOUT ROWID;
"""


class StoreFailed(MoqtError):
    """The cache on disk can't be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class KeptObject:
    """One Object, with all that makes it the same when it is served again (moqt 15 #2).

    `expires` is in seconds since 1970 (inf: never). `payload` is in pieces. `datagram` is its delivery
    mode; `first`, `ends` and `after` are those of CachedObject.
    """

    location: Location
    subgroup: int
    priority: int
    properties: bytes
    payload: tuple[Buffer, ...]
    datagram: bool = False
    first: bool = False
    ends: bool = False
    after: int | None = None
    expires: float = math.inf

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return sum(map(len, self.payload))


@dataclass(frozen=True, slots=True)
class KeptTrack:
    """One Track. `ended` is where End of Track stands; `finished`, that its publisher has no more."""

    id: int
    name: FullTrackName
    properties: Properties = ()
    largest: Location | None = None
    ended: Location | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class LoadedTrack:
    """A Track of the file: where its Objects are, and where none exist."""

    track: KeptTrack
    stored: LocationSet
    absent: LocationSet


@dataclass(slots=True)
class Batch:
    """What is written in one transaction; Tracks are told by their `id`.

    `dropped` Tracks go before anything comes. Objects in `again` should be there: they are compared with what
    is. `used` are Objects that somebody wanted.
    """

    tracks: list[KeptTrack] = field(default_factory=list)
    objects: list[tuple[int, KeptObject]] = field(default_factory=list)
    again: list[tuple[int, KeptObject]] = field(default_factory=list)
    absent: list[tuple[int, Location, Location]] = field(default_factory=list)
    used: list[tuple[int, Location]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What a batch has done: `removed` Objects had expired, or made room for it; `contradictions` are where
    another Object was. With an `error` nothing of the batch was written. `bytes` of the file hold something
    now; the next Object expires at `expires`.
    """

    removed: list[tuple[int, Location]] = field(default_factory=list)
    contradictions: list[tuple[int, Location]] = field(default_factory=list)
    bytes: int = 0
    expires: float = math.inf
    error: BaseException | None = None


class Database:
    """The file `path`, of at most `limit` bytes. Its methods block; call one at a time.

    Raises UsageError for a directory that can't be written to, StoreFailed for a file that can't be used.
    Later failures are sqlite3.Error.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._limit = limit // 16 * 15
        """The rest is for the journal."""
        self._connection: sqlite3.Connection | None = None
        self._count = 0
        if limit < LEAST_BYTES:
            raise StoreFailed(f"the cache on disk needs {LEAST_BYTES} bytes at least, not {limit}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)  # SQLite gives its journal the same mode.
        except OSError as error:
            raise UsageError(
                f"{path.parent} is not a directory that this relay can write to ({error.strerror})"
            ) from None
        try:
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=0.0
            )
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise StoreFailed(self._why(error)) from None
        except StoreFailed:
            self.close()
            raise
        self._next_object = self._one("SELECT ifnull(max(id), 0) FROM objects") + 1
        self._next_use = self._one("SELECT ifnull(max(used), 0) FROM objects") + 1

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def bytes(self) -> int:
        """Bytes of the file that hold something."""
        pages: int = self._one("PRAGMA page_count") - self._one("PRAGMA freelist_count")
        return pages * PAGE

    def load(self) -> Iterator[LoadedTrack]:
        """All Tracks."""
        stored = self._sets("SELECT track, location, location FROM objects ORDER BY track, location")
        absent = self._sets("SELECT track, first, last FROM absent ORDER BY track, first")
        rows = self._execute("SELECT id, name, properties, largest, ended, finished FROM tracks")
        for number, name, properties, largest, ended, finished in rows:
            reader = Reader(name, what="a Track of the cache")
            track = KeptTrack(
                number,
                FullTrackName(reader.namespace(), reader.prefixed()),
                decode_properties(properties),
                _location(largest),
                _location(ended),
                bool(finished),
            )
            yield LoadedTrack(track, stored.get(number, LocationSet()), absent.get(number, LocationSet()))

    def write(self, batch: Batch, now: float) -> Outcome:
        """Write all of a batch, or nothing; what has expired by `now`, and what was used longest ago as far
        as room is needed, goes first.
        """
        outcome = Outcome()
        try:
            self._make_room(batch, now, outcome)
            with self._transaction():
                fresh = batch.objects + [one for one in batch.again if not self._is_there(*one, outcome)]
                self._insert(batch, fresh)
            self._count += len(fresh)
            outcome.expires = self._one("SELECT min(expires) FROM objects") or math.inf
            outcome.bytes = self.bytes
        except sqlite3.Error as error:
            outcome.error = error
        return outcome

    def read(self, track: int, start: Location, end: Location, *, limit: int, now: float) -> list[KeptObject]:
        """The Objects from `start` to `end` in ascending order, as many as make `limit` bytes; fewer only if
        there are no more. One that is damaged is thrown away.
        """
        rows = self._execute(
            "SELECT id, location, subgroup, datagram, priority, properties, first, ends, after, expires,"
            " checksum, payload FROM objects JOIN payloads ON object = id"
            " WHERE track = ? AND location BETWEEN ? AND ? AND (expires IS NULL OR expires > ?)"
            " ORDER BY location",
            (track, _key(start), _key(end), now),
        )
        found: list[KeptObject] = []
        damaged: list[int] = []
        size = 0
        for row in rows:
            number, location, subgroup, datagram, priority, properties, *more = row
            first, ends, after, expires, checksum, payload = more
            item = KeptObject(
                _location_of(location),
                _number_of(subgroup),
                priority,
                properties,
                (payload,) if payload else (),
                bool(datagram),
                bool(first),
                bool(ends),
                None if after is None else _number_of(after),
                math.inf if expires is None else expires,
            )
            if _checksum(properties, payload) == checksum:
                found.append(item)
            else:
                damaged.append(number)
                logger.warning("%s: an Object at %s is damaged, and thrown away", self.path, item.location)
            size += len(payload)
            if size >= limit:
                break
        rows.close()
        for number in damaged:
            self._execute("DELETE FROM objects WHERE id = ?", (number,))
        self._count -= len(damaged)
        return found

    # Opening.

    def _prepare(self) -> None:
        # All that comes is under one lock, which is kept: another relay gets "database is locked".
        self._execute("PRAGMA locking_mode = EXCLUSIVE")
        fresh = not self._one("PRAGMA page_count")
        if fresh:
            self._execute(f"PRAGMA page_size = {PAGE}")
            self._execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._execute("PRAGMA journal_mode = TRUNCATE")
        self._execute("PRAGMA synchronous = FULL")
        self._execute("PRAGMA foreign_keys = ON")
        self._execute("PRAGMA secure_delete = OFF")
        with self._transaction():
            if fresh:
                self._execute(f"PRAGMA application_id = {APPLICATION}")
                self._execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                for statement in _SCHEMA.split(";"):
                    self._execute(statement)
        if self._one("PRAGMA application_id") != APPLICATION:
            raise StoreFailed(f"{self.path} is a database of something else: choose another directory")
        version = self._one("PRAGMA user_version")
        if version != SCHEMA_VERSION:
            raise StoreFailed(
                f"{self.path} was written by another version of the relay (schema {version}, this one has "
                f"{SCHEMA_VERSION}): remove it, or choose another directory"
            )
        self._execute("DELETE FROM tracks WHERE id NOT IN (SELECT track FROM objects)")
        self._count = self._one("SELECT count(*) FROM objects")
        self._shrink()

    def _shrink(self) -> None:
        """Fit a file into its bound that had a larger one before."""
        if self._one("PRAGMA page_count") * PAGE > self._limit:
            self._evict(Outcome(), self._limit, self._limit // LEAST_ROOM)
            assert self._connection is not None
            # Not `execute`, which stops at the first page: this PRAGMA makes a row without columns for each.
            self._connection.executescript("PRAGMA incremental_vacuum")
        self._execute(f"PRAGMA max_page_count = {self._limit // PAGE}")

    def _why(self, error: sqlite3.Error) -> str:
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_BUSY:
            return f"{self.path.parent} is in use by another relay: each needs a directory of its own"
        if code == sqlite3.SQLITE_NOTADB:
            return f"{self.path} is no database: choose another directory"
        if code == sqlite3.SQLITE_CORRUPT:
            return f"{self.path} is damaged: remove it, and the cache begins anew"
        return f"{self.path} can't be used for the cache: {error}"

    # Writing.

    def _make_room(self, batch: Batch, now: float, outcome: Outcome) -> None:
        for number in batch.dropped:
            self._remove_all("track = ?", number, outcome)
        self._remove_all("expires <= ?", now, outcome)
        objects = batch.objects + batch.again
        need = sum(_room(item) for _, item in objects) + PAGE * ROWS
        self._evict(outcome, self._limit - need, self._limit // LEAST_ROOM - len(objects))

    def _evict(self, outcome: Outcome, target: int, most: int) -> None:
        """Throw out what was used longest ago, until no more than `target` bytes are taken, by no more than
        `most` Objects.
        """
        oldest = "SELECT id, track, location, size FROM objects ORDER BY used, id LIMIT ?"
        while (excess := self.bytes - target) > 0 or self._count > most:
            surplus = self._count - most
            victims = []
            for *victim, size in self._execute(oldest, (VICTIMS,)).fetchall():
                victims.append(victim)
                excess -= size
                surplus -= 1
                if excess <= 0 and surplus <= 0:
                    break
            if not victims:
                break
            self._remove(victims, outcome)

    def _remove_all(self, condition: str, argument: float, outcome: Outcome) -> None:
        """Throw out Objects, some at a time."""
        select = f"SELECT id, track, location FROM objects WHERE {condition} LIMIT ?"
        while victims := self._execute(select, (argument, VICTIMS)).fetchall():
            self._remove(victims, outcome)

    def _remove(self, victims: Sequence[Sequence[Any]], outcome: Outcome) -> None:
        """Throw out Objects: of each its number, its Track and its Location."""
        with self._transaction():
            removed = [(track, _location_of(location)) for _, track, location in victims]
            marks = ",".join("?" * len(victims))
            self._execute(f"DELETE FROM objects WHERE id IN ({marks})", [number for number, _, _ in victims])
            # Where nothing is left, what is known of the Group or the Track is not worth its room.
            for track, group in {(track, location.group) for track, location in removed}:
                low, high = _key(Location(group, 0)), _key(Location(group, MAX_VARINT))
                self._execute(
                    "DELETE FROM absent WHERE track = ? AND first BETWEEN ? AND ? AND NOT EXISTS"
                    " (SELECT 1 FROM objects WHERE track = ? AND location BETWEEN ? AND ?)",
                    (track, low, high, track, low, high),
                )
            for track in {track for track, _ in removed}:
                self._execute(
                    "DELETE FROM tracks WHERE id = ? AND NOT EXISTS (SELECT 1 FROM objects WHERE track = ?)",
                    (track, track),
                )
        self._count -= len(removed)
        outcome.removed += removed

    def _is_there(self, track: int, item: KeptObject, outcome: Outcome) -> bool:
        same = (
            "SELECT payload = ? AND priority = ? AND datagram = ? AND (datagram OR subgroup = ?)"
            " FROM objects JOIN payloads ON object = id WHERE track = ? AND location = ?"
        )
        subgroup, key = item.subgroup.to_bytes(8, "big"), _key(item.location)
        found = self._execute(
            same, (_payload(item), item.priority, item.datagram, subgroup, track, key)
        ).fetchone()
        if found is not None and not found[0]:
            outcome.contradictions.append((track, item.location))
        return found is not None

    def _insert(self, batch: Batch, objects: list[tuple[int, KeptObject]]) -> None:
        use = self._next_use
        for track in batch.tracks:
            values = (
                encode_namespace(track.name.namespace, track.name.name) + encode_prefixed(track.name.name),
                encode_properties(track.properties),
                None if track.largest is None else _key(track.largest),
                None if track.ended is None else _key(track.ended),
                track.finished,
            )
            self._execute(
                "INSERT INTO tracks VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                " properties = excluded.properties, largest = excluded.largest, ended = excluded.ended,"
                " finished = excluded.finished",
                (track.id, *values),
            )
        self._insert_objects(objects, use)
        for number, first, last in batch.absent:
            self._execute("REPLACE INTO absent VALUES (?, ?, ?)", (number, _key(first), _key(last)))
        for track_id, used in groupby(sorted(batch.used), key=itemgetter(0)):
            keys = [_key(location) for _, location in used]
            for index in range(0, len(keys), MARKS):
                some = keys[index : index + MARKS]
                marks = ", ".join("?" * len(some))
                self._execute(
                    f"UPDATE objects SET used = ? WHERE track = ? AND location IN ({marks})",
                    (use, track_id, *some),
                )
        self._next_use = use + 1

    def _insert_objects(self, objects: list[tuple[int, KeptObject]], use: int) -> None:
        rows: list[tuple[Any, ...]] = []
        payloads: list[tuple[int, Buffer]] = []
        size = 0
        for track, item in objects:
            if rows and (size + item.size > STATEMENT or len(rows) == ROWS):
                self._insert_rows(rows, payloads)
                rows, payloads, size = [], [], 0
            number = self._next_object
            self._next_object += 1
            payload = _payload(item)
            payloads.append((number, payload))
            rows.append(
                (
                    number,
                    track,
                    _key(item.location),
                    item.subgroup.to_bytes(8, "big"),
                    item.datagram,
                    item.priority,
                    item.properties,
                    item.first,
                    item.ends,
                    None if item.after is None else item.after.to_bytes(8, "big"),
                    None if item.expires == math.inf else item.expires,
                    _checksum(item.properties, payload),
                    len(payload),
                    use,
                )
            )
            size += len(payload)
        if rows:
            self._insert_rows(rows, payloads)

    def _insert_rows(self, rows: list[tuple[Any, ...]], payloads: list[tuple[int, Buffer]]) -> None:
        for table, values in (("objects", rows), ("payloads", payloads)):
            marks = ", ".join(["(" + ", ".join("?" * len(values[0])) + ")"] * len(values))
            self._execute(f"INSERT INTO {table} VALUES {marks}", list(chain.from_iterable(values)))

    # Inside.

    def _execute(self, statement: str, arguments: Any = ()) -> sqlite3.Cursor:
        assert self._connection is not None
        return self._connection.execute(statement, arguments)

    def _one(self, query: str) -> Any:
        return self._execute(query).fetchone()[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN EXCLUSIVE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            assert self._connection is not None
            if self._connection.in_transaction:  # A full disk has rolled it back already.
                self._execute("ROLLBACK")
            raise

    def _sets(self, query: str) -> dict[int, LocationSet]:
        result: dict[int, LocationSet] = {}
        for track, first, last in self._execute(query):
            result.setdefault(track, LocationSet()).add(_location_of(first), _location_of(last))
        return result


def _room(item: KeptObject) -> int:
    """No fewer than the bytes that an Object takes: small rows share a page, large ones have their own."""
    sizes = 256 + len(item.properties), 32 + item.size
    return sum(2 * size if size < PAGE // 2 else PAGE * (2 + size // (PAGE - 4)) for size in sizes)


def _payload(item: KeptObject) -> Buffer:
    return item.payload[0] if len(item.payload) == 1 else b"".join(item.payload)


def _checksum(properties: bytes, payload: Buffer) -> int:
    return zlib.crc32(payload, zlib.crc32(properties))


def _key(location: Location) -> bytes:
    """Locations in order are these octets in order; SQLite's integers have a sign, ours have not."""
    return location.group.to_bytes(8, "big") + location.object.to_bytes(8, "big")


def _location_of(key: bytes) -> Location:
    return Location(_number_of(key[:8]), _number_of(key[8:]))


def _location(key: bytes | None) -> Location | None:
    return None if key is None else _location_of(key)


def _number_of(octets: bytes) -> int:
    return int.from_bytes(octets, "big")
