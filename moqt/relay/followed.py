"""What those who follow a Track from elsewhere are told: each Object once, and what came while something
before it was missing in its turn (moqt 7.3, 15).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moqt.errors import DoneCode, ResetCode
from moqt.fetching import successor
from moqt.filters import Location
from moqt.locations import LocationSet
from moqt.names import FullTrackName
from moqt.relay.cache import CachedObject
from moqt.track import StoredObject, Track, TrackWatcher

__all__ = ["MAX_RANGES", "FollowedTrack"]

MAX_RANGES = 1 << 16
"""Ranges that are known of a Track, besides those of the Objects that are here (moqt 21)."""


class FollowedTrack(Track):
    """A Track whose Objects come from publishers, in parts, and may have to be told later than they came.

    `on_idle` is called when nobody follows the Track, or nothing is left of it, `on_steer` when those who
    follow it may all be paused, or not any more, `on_group_request` when one of them wants a new Group.
    """

    authoritative = False

    def __init__(self, name: FullTrackName) -> None:
        super().__init__(name)
        self.on_idle: Callable[[], None] = lambda: None
        self.on_steer: Callable[[], None] = lambda: None
        self.on_group_request: Callable[[int], None] = lambda _: None
        self.live_start = Location(0, 0)
        """From here on somebody was promised all that is published."""
        self.finished = False
        """Its publisher has said that nothing more comes."""
        self._told = LocationSet()
        self._all_paused = True
        self._lost = LocationSet()
        """What those who follow were promised, and will not get: nobody has it any more."""
        self._deferred: list[Callable[[], None]] | None = None
        self._waiters: list[Callable[[], None]] = []
        self._partial: set[CachedObject] = set()
        """The Objects of which something has not come."""

    # Those who follow it.

    @property
    def subscribers(self) -> int:
        """How many subscriptions follow the Track."""
        return len(self._watchers)

    @property
    def watched(self) -> bool:
        """Whether anybody follows the Track."""
        return bool(self._watchers)

    @property
    def paused(self) -> bool:
        """Whether all who follow the Track are paused."""
        return all(watcher.paused for watcher in self._watchers)

    def watch(self, watcher: TrackWatcher) -> None:
        if not self._watchers:
            self.live_start = Location(0, 0) if self.largest is None else successor(self.largest)
        super().watch(watcher)
        self.steer()
        if self.finished:
            asyncio.get_running_loop().call_soon(watcher.on_removed, DoneCode.TRACK_ENDED)

    def unwatch(self, watcher: TrackWatcher) -> None:
        super().unwatch(watcher)
        if self._watchers:
            self.steer()
        else:
            self._all_paused = True
            self._lost = LocationSet()
            self.on_idle()

    def steer(self) -> None:
        paused = self.paused
        if self._all_paused and not paused and self.largest is not None:
            # Whoever goes on is told our Largest Object now: what was published behind it is theirs.
            self.live_start = max(self.live_start, successor(self.largest))
        self._all_paused = paused
        self.on_steer()

    def request_group(self, group: int) -> None:
        self.on_group_request(group)

    def close(self, code: DoneCode) -> None:
        self._tell_or_defer(lambda: self._close(code))

    # Catching up after a publisher was lost.

    def defer(self) -> None:
        """From now on keep what comes to yourself, until `catch_up`: something that comes before it is
        missing.
        """
        if self._deferred is None:
            self._deferred = []

    def catch_up(self) -> None:
        """Tell the watchers what they were not told, in order."""
        deferred, self._deferred = self._deferred, None
        for item in self._torn():  # It will not come whole.
            self._told.add(item.location, item.location)
        if self.largest is not None:
            for item in list(self.objects(self.live_start, self.largest)):
                self._tell_once(item)
        for tell in deferred or ():
            tell()

    def lose(self, start: Location, end: Location) -> None:
        """Those who follow will not get what is from `start` to `end`: no stream of these Groups may end with
        FIN (moqt 12.6), nor may they be told that the Track has ended.
        """
        self._lost.add(start, end)

    @property
    def torn(self) -> bool:
        """Whether an Object is still coming though a later one of its Subgroup is here, as after a fetch that
        has overtaken a subscription: neither can follow the other on a stream.
        """
        return bool(self._torn())

    def _torn(self) -> set[StoredObject]:
        return {
            item
            for item in self._partial
            if item.location >= self.live_start
            and any(
                other.subgroup == item.subgroup and number > item.location.object
                for number, other in self._groups[item.location.group].objects.items()
            )
        }

    def live_gap(self) -> tuple[Location, Location] | None:
        """What somebody was promised, has not got, and is not here: the rest of an Object that nobody brings
        any more, or a range.
        """
        start = self.live_start
        broken = [one.location for one in self._partial if not one.writers and one.location >= start]
        if broken:
            return min(broken), min(broken)
        while self.largest is not None and start <= self.largest:
            gap = self.gap(start, self.largest)
            if gap is None:
                break
            untold = self._told.gap(*gap)
            if untold is not None:
                return untold
            start = successor(gap[1])
        return None

    # Those who wait for a change.

    def wait(self, wake: Callable[[], None]) -> None:
        self._waiters.append(wake)

    def wake(self) -> None:
        """Something has changed for those who wait."""
        self._changed()

    def hurry(self) -> None:
        self._changed()

    async def changes(self) -> None:
        """Wait for the next change."""
        changed = asyncio.Event()
        self.wait(changed.set)
        await changed.wait()

    # Inside.

    def _close(self, code: DoneCode) -> None:
        super().close(DoneCode.INTERNAL_ERROR if self._lost and code is DoneCode.TRACK_ENDED else code)
        self.on_idle()

    def _tell_once(self, item: StoredObject) -> None:
        self._tell_or_defer(lambda: self._tell_now(item))

    def _tell_now(self, item: StoredObject) -> None:
        if item.location not in self._told:
            self._told.add(item.location, item.location)
            self._told.shorten(MAX_RANGES)
            self._tell(item)

    def _tell_or_defer(self, tell: Callable[[], None]) -> None:
        if self._deferred is None:
            tell()
        else:
            self._deferred.append(tell)

    def _tell_piece(self, item: CachedObject, piece: memoryview) -> None:
        for watcher in list(self._watchers):
            watcher.on_piece(item, piece)

    def _tell_subgroup_end(self, group: int, subgroup: int, code: int | None) -> None:
        if code is None and any(start.group <= group <= end.group for start, end in self._lost):
            code = ResetCode.INTERNAL_ERROR
        for watcher in list(self._watchers):
            watcher.on_subgroup_end(group, subgroup, code)

    def _changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()
