"""The Objects that a relay keeps, and the bound on what they take (moqt 15)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moqt.errors import MalformedTrack, ResetCode
from moqt.filters import Location
from moqt.quic.api import Buffer
from moqt.track import Hole, StoredObject

if TYPE_CHECKING:
    from moqt.relay.cached import CachedTrack

__all__ = ["CACHE_DIR_BYTES", "LEAST_BYTES", "Cache", "CachedObject", "Writer"]

SEGMENT = 1 << 16
"""Bytes for which memory is taken at once: no more than that before any of them has come."""

OVERHEAD = 480
"""Bytes that a cached Object takes besides its payload and properties, as measured."""

GROUP_OVERHEAD = 512
"""The same for a Group of which an Object is here."""

TRACK_OVERHEAD = 6500
"""The same for a Track."""

LEAST_BYTES = 16 << 20
"""The smallest bound that a file of the cache on disk can have."""

CACHE_DIR_BYTES = 10 << 30
"""The bound that it has by default."""

MAX_BUSY = 64
"""Objects that can't be thrown out and are passed over at a time, to make room."""


@dataclass(slots=True, eq=False)
class CachedObject(StoredObject):
    """An Object of which `missing` bytes have not come; `writers` streams bring it.

    `first`, `ends` and `after` say how it came on a subgroup stream: as the first of its Subgroup, on a
    stream that ends with the Group, behind that Object on the same stream (moqt 12.2, 12.6). `older` and
    `newer` are its neighbours in the order of use.
    """

    track: CachedTrack | None = None
    segments: list[bytearray] | None = None
    """What the payload is gathered in while it comes."""
    writers: int = 0
    expires: float = math.inf
    first: bool = False
    ends: bool = False
    after: int | None = None
    hole: Hole | None = None
    """What it was fetched for, until somebody uses it."""
    recalled: bool = False
    """Whether it came from disk."""
    older: CachedObject | None = None
    newer: CachedObject | None = None

    def since(self, offset: int) -> tuple[Buffer, ...]:
        if not offset and not self.missing:
            return self.payload
        arrived = self.size - self.missing
        pieces = []
        start = 0
        for segment in self.segments or self.payload:
            end = min(start + len(segment), arrived)
            if end > offset:
                pieces.append(memoryview(segment)[max(offset - start, 0) : end - start])
            start += len(segment)
        return tuple(pieces)

    def has(self, offset: int, data: memoryview) -> bool:
        """Whether `data` is what came at `offset`."""
        for piece in self.since(offset):
            size = min(len(piece), len(data))
            if data[:size] != piece[:size]:
                return False
            data = data[size:]
            if not data:
                break
        return True

    @property
    def busy(self) -> bool:
        """Whether it must stay: it is being sent, is about to be, or is on its way."""
        return self.pins > 0 or self.writers > 0 or self.hole is not None

    @property
    def cost(self) -> int:
        """Bytes of memory."""
        taken = sum(map(len, self.segments)) if self.segments is not None else self.size - self.missing
        return OVERHEAD + len(self.properties) + taken


class Cache:
    """The bound in bytes over all Tracks: what was used longest ago goes first, but no Object that is being
    sent, or on its way.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.evicted = 0
        self.hits = 0
        """Objects that fetches and fills took from what was here."""
        self.misses = 0
        """Objects that were fetched for them."""
        self._count = 0
        # A ring through all Objects in the order of use: an OrderedDict takes 150 bytes for each.
        self._ring = CachedObject(Location(0, 0), (), 0, 0, 0, b"")
        self._ring.older = self._ring.newer = self._ring

    def __len__(self) -> int:
        return self._count

    def add(self, item: CachedObject) -> None:
        """Take an Object in."""
        self._count += 1
        self._link(item)
        self.grow(item.cost)

    def grow(self, size: int) -> None:
        """An Object has taken `size` bytes more."""
        self.bytes += size
        self.trim()

    def shrink(self, size: int) -> None:
        """So much is no longer taken."""
        self.bytes -= size

    def use(self, item: CachedObject) -> None:
        """It was wanted just now."""
        if item.newer is not None:
            self._unlink(item)
            self._link(item)

    def discard(self, item: CachedObject) -> None:
        """It is no longer kept; no effect if it was not."""
        if item.newer is not None:
            self._unlink(item)
            self._count -= 1
            self.bytes -= item.cost

    def _link(self, item: CachedObject) -> None:
        newest = self._ring.older
        assert newest is not None
        item.older, item.newer = newest, self._ring
        newest.newer = self._ring.older = item

    def _unlink(self, item: CachedObject) -> None:
        assert item.older is not None
        assert item.newer is not None
        item.older.newer, item.newer.older = item.newer, item.older
        item.older = item.newer = None

    def trim(self) -> None:
        """Keep within the limit, as far as what is busy allows: call it when something is no longer."""
        busy = 0
        while self.bytes > self.limit and busy < MAX_BUSY:
            item = self._ring.newer
            assert item is not None
            if item.track is None:  # The ring's own: nothing is here.
                break
            if item.busy:
                busy += 1
                self.use(item)  # So that it is not looked at each time.
            else:
                self.evicted += 1
                item.track.evict(item)


class Writer:
    """One Object as one stream brings it. Several may bring the same one: what is here already is compared,
    the rest is taken from whoever is ahead.
    """

    def __init__(self, track: CachedTrack, item: CachedObject) -> None:
        self._track = track
        self._item = item
        self._offset = 0
        item.writers += 1
        if not item.size:
            self._leave()

    def write(self, data: memoryview) -> None:
        """The next bytes. Raises MalformedTrack when they are not what came before (moqt 15 #3)."""
        item = self._item
        if self._track.fault:
            return
        known = min(len(data), item.size - item.missing - self._offset)
        if known and not item.has(self._offset, data[:known]):
            raise MalformedTrack(f"a second, different payload at {item.location}")
        self._offset += len(data)
        if known < len(data):
            self._track.extend(item, data[known:])
        if self._offset == item.size:
            self._leave()

    def abandon(self, code: int, *, resume: bool) -> None:
        """The stream has ended; no effect if all has come. With `resume` the rest may come another way."""
        if self._offset < self._item.size:
            self._offset = self._item.size
            self._leave(code, resume)

    def _leave(self, code: int = ResetCode.INTERNAL_ERROR, resume: bool = False) -> None:
        self._item.writers -= 1
        if not self._item.writers:
            self._track.left(self._item, code, resume=resume)
