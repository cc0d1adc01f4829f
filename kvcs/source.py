"""One publication as a consumer sees it: its manifest, checked and kept up to date (kvcs 5, 7.2)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from kvcs.assembly import choose_tracks
from kvcs.errors import KvcsError, ManifestRejected, PeerFault
from kvcs.layout import Geometry
from kvcs.manifest import Manifest, SegmentEntry, check, check_successor, confirmed_segments
from kvcs.names import MANIFEST, MANIFEST_COSE, PublicationName
from kvcs.progress import Progress, insist
from moqt.errors import MoqtError, RequestCode, RequestRejected, StreamReset
from moqt.filters import LocationFilter
from moqt.names import FullTrackName
from moqt.session import Session
from moqt.subscribing import Fill, ReceivedObject, StreamEnd, Subscription
from moqt.wire import ObjectStatus

__all__ = ["Source", "Wanted"]

logger = logging.getLogger(__name__)

LARGE_MANIFEST: Final = 256 * 1024
"""Octets from which a manifest is parsed off the event loop (security 4.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a consumer looks for: the first `blocks` blocks of those that its Block Keys `keys` name, and
    `layers` (first, last) of them.
    """

    keys: list[bytes]
    blocks: int
    layers: tuple[int, int]
    codecs: tuple[str, ...]
    require_signed: bool
    geometry: Geometry


class Source:
    """One publication: its manifest, and the segments of it that the consumer can use.

    `segments` are those that the consumer's Block Keys confirm, up to the first that has no track with a
    wanted codec. `fault` says why the publication can't be used, or not any more.
    """

    def __init__(self, session: Session, name: PublicationName, wanted: Wanted, progress: Progress) -> None:
        self.session = session
        self.name = name
        self.manifest: Manifest | None = None
        self.segments: tuple[SegmentEntry, ...] = ()
        self.fault: Exception | None = None
        self._wanted = wanted
        self._progress = progress
        self._version = -1
        progress.spawn(self._run())

    @property
    def ready(self) -> bool:
        """Whether it is known if the publication can be used."""
        return self.manifest is not None or self.fault is not None

    @property
    def usable(self) -> bool:
        """Whether its manifest has come, and nothing is wrong with it."""
        return self.manifest is not None and self.fault is None

    def rank(self) -> tuple[bool, bool]:
        """Lower is better: complete before incomplete, what is not known yet last; sorting keeps the order
        otherwise (kvcs 14 #5).
        """
        return not self.usable, not all(entry.complete for entry in self.segments)

    def track(self, name: bytes) -> FullTrackName:
        """The full name of one of its tracks."""
        return FullTrackName(self.name.namespace, name)

    def __str__(self) -> str:
        return self.name.publication_id.hex()

    async def _run(self) -> None:
        try:
            await insist(self._follow, lambda: self._version, self._progress.note)
            if self.manifest is None:
                self.fault = PeerFault("its manifest track ended before a manifest came")
        except (MoqtError, KvcsError) as error:
            if self.manifest is None or isinstance(error, KvcsError):
                self.fault = error
            else:
                self._progress.note(error)
        self._progress.news.set()

    async def _subscribe(self) -> Subscription:
        # kvcs 7.2: signed first; the other only if that one does not exist and authenticity is not required.
        try:
            subscription = await self._join(MANIFEST_COSE)
        except RequestRejected as error:
            if error.code != RequestCode.DOES_NOT_EXIST:
                raise
            if self._wanted.require_signed:
                raise ManifestRejected(
                    "", "a signed manifest is required, and the publication has none"
                ) from None
            return await self._join(MANIFEST)
        await subscription.close()
        raise ManifestRejected("", "it is signed (manifest.cose), and this version can't verify signatures")

    async def _join(self, name: bytes) -> Subscription:
        fill = Fill(filter=LocationFilter.relative_start(1))
        return await self.session.subscribe(self.track(name), filter=LocationFilter.next_object(), fill=fill)

    async def _follow(self) -> bool:
        """Take each version that comes, until the publisher ends the track."""
        async with await self._subscribe() as subscription:
            async for item in subscription:
                if isinstance(item, ReceivedObject) and item.status is ObjectStatus.NORMAL:
                    await self._take(item)
                elif isinstance(item, StreamEnd) and item.code is not None and self._version < 0:
                    raise StreamReset(item.code)
        return True

    async def _take(self, item: ReceivedObject) -> None:
        if item.location.object != 0:
            raise ManifestRejected(
                "", f"a version is Object 0 of its Group, this one stands at {item.location}"
            )
        if item.location.group <= self._version:
            return  # Overtaken by a newer version.
        if len(item.payload) > LARGE_MANIFEST:
            manifest = await asyncio.to_thread(Manifest.parse, item.payload)
        else:
            manifest = Manifest.parse(item.payload)
        check(manifest, self.name)
        if self.manifest is not None:
            check_successor(self.manifest, manifest)
        self.segments = self._usable_segments(manifest)
        self.manifest = manifest
        self._version = item.location.group
        self._progress.news.set()

    def _usable_segments(self, manifest: Manifest) -> tuple[SegmentEntry, ...]:
        confirmed = confirmed_segments(manifest, self.name, self._wanted.keys)
        if not confirmed:
            raise ManifestRejected("segments", "none is confirmed by the Block Keys of our tokens")
        for number, entry in enumerate(confirmed):
            if not choose_tracks(entry, self._wanted.codecs, self._wanted.geometry):
                offered = ", ".join(map(str, entry.tracks))
                if number == 0:  # kvcs 14 #11
                    raise ManifestRejected("segments[0].tracks", f"found, but no usable codec: {offered}")
                return confirmed[:number]
        return confirmed
