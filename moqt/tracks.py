"""What an endpoint offers: its Tracks, and the namespaces that it announces (moqt 11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moqt.errors import DoneCode, RequestCode, RequestRefused, UsageError
from moqt.names import FullTrackName, TrackNamespace, check_namespace
from moqt.track import Track, Wanted

if TYPE_CHECKING:
    from moqt.offers import Offer

__all__ = ["Tracks"]


class Tracks:
    """The Tracks and namespaces that an endpoint offers, shared by all its sessions."""

    def __init__(self) -> None:
        self._tracks: dict[FullTrackName, Track] = {}
        self._namespaces: dict[TrackNamespace, None] = {}
        self._watchers: list[Callable[[TrackNamespace, bool], None]] = []
        self._track_watchers: list[Callable[[Track], None]] = []

    def add(self, track: Track) -> None:
        """Offer `track`. Raises UsageError when one of this name is offered already."""
        if track.name in self._tracks:
            raise UsageError(f"a Track of the name {track.name} is offered already")
        self._tracks[track.name] = track
        for callback in list(self._track_watchers):
            callback(track)

    def remove(self, name: FullTrackName, code: DoneCode) -> None:
        """Offer the Track no longer and end its subscriptions with PUBLISH_DONE `code`; no effect if there is
        none.
        """
        track = self._tracks.pop(name, None)
        if track is not None:
            track.close(code)

    def discard(self, name: FullTrackName) -> None:
        """Offer the Track no longer, and let its subscriptions go on; no effect if there is none."""
        self._tracks.pop(name, None)

    def get(self, name: FullTrackName) -> Track | None:
        """The Track of this name, if it is offered."""
        return self._tracks.get(name)

    async def find(
        self,
        name: FullTrackName,
        asker: object,
        *,
        rendezvous: float = 0.0,
        wanted: Wanted | None = None,
    ) -> Track:
        """The Track that the session `asker` asks for; `rendezvous` is for how many seconds a relay may wait
        for its publisher (moqt 5.3), `wanted` (None: nothing) what exists already and is asked for. Raises
        RequestRefused.
        """
        track = self.get(name)
        if track is None:
            raise RequestRefused(RequestCode.DOES_NOT_EXIST, "no such Track here")
        return track

    def offered(self, peer: object, namespace: TrackNamespace, present: bool) -> None:
        """The session `peer` has announced a namespace, or withdrawn it: for a relay."""

    async def published(self, peer: object, offer: Offer) -> None:
        """The session `peer` offers a Track by PUBLISH: `accept` it, and return when nothing more of it is
        wanted. Raises RequestRefused (moqt 9).
        """
        raise RequestRefused(RequestCode.UNINTERESTED, "this endpoint subscribes to what it wants")

    def offers(self) -> Iterator[Track]:
        """The Tracks that are published to those who SUBSCRIBE_TRACKS (moqt 11)."""
        return iter(self)

    def may_offer(self, peer: object, track: Track) -> bool:
        """Whether a Track may be published to the session `peer`: not if it comes from there."""
        return True

    def watch_tracks(self, callback: Callable[[Track], None]) -> None:
        """Call `callback` with each Track that is offered from now on."""
        self._track_watchers.append(callback)

    def unwatch_tracks(self, callback: Callable[[Track], None]) -> None:
        """Undo `watch_tracks`."""
        self._track_watchers.remove(callback)

    def wanted_tracks(self, asker: object, prefix: TrackNamespace, present: bool) -> None:
        """The session `asker` wants all Tracks under `prefix`, or no longer: for a relay."""

    def wanted(self, asker: object, prefix: TrackNamespace, present: bool) -> None:
        """The session `asker` wants to know of namespaces under `prefix`, or no longer: for a relay."""

    def __iter__(self) -> Iterator[Track]:
        return iter(list(self._tracks.values()))

    @property
    def namespaces(self) -> tuple[TrackNamespace, ...]:
        """The announced namespaces, first announced first."""
        return tuple(self._namespaces)

    def announces(self, namespace: TrackNamespace) -> bool:
        """Whether the namespace is announced."""
        return namespace in self._namespaces

    def announce(self, namespace: TrackNamespace) -> None:
        """Tell every session that Tracks under `namespace` are here."""
        check_namespace(namespace)
        if namespace not in self._namespaces:
            self._namespaces[namespace] = None
            self._tell(namespace, True)

    def withdraw(self, namespace: TrackNamespace) -> None:
        """Undo `announce`; no effect if it was not announced."""
        if namespace in self._namespaces:
            del self._namespaces[namespace]
            self._tell(namespace, False)

    def watch(self, callback: Callable[[TrackNamespace, bool], None]) -> None:
        """Call `callback(namespace, present)` on every change from now on."""
        self._watchers.append(callback)

    def unwatch(self, callback: Callable[[TrackNamespace, bool], None]) -> None:
        """Undo `watch`; no effect if it doesn't watch."""
        if callback in self._watchers:
            self._watchers.remove(callback)

    def _tell(self, namespace: TrackNamespace, present: bool) -> None:
        for callback in list(self._watchers):
            callback(namespace, present)
