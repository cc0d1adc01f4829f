"""Receive KV caches: find a publication, verify it, hand out its layers as they become usable (kvcs 7)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcs.assembly import Layer, Missing, SegmentAssembly, choose_tracks
from kvcs.discovery import DISCOVERY_WAIT, Found, discover
from kvcs.errors import InvalidValue, KvcsError, ManifestRejected, ObjectRejected, PeerFault
from kvcs.identity import Descriptor, ScopeKey, Tokens, block_keys
from kvcs.layout import Geometry
from kvcs.manifest import Manifest, SegmentEntry, check, check_successor, confirmed_segments
from kvcs.names import MANIFEST, MANIFEST_COSE, DataTrack, PublicationName
from moqt.errors import MoqtError, RequestCode, RequestRejected
from moqt.filters import Location, LocationFilter, RangeFilter, RangeKind
from moqt.names import FullTrackName
from moqt.session import Session
from moqt.subscribing import Fill, ReceivedObject, StreamEnd, Subscription
from moqt.wire import ObjectStatus

__all__ = ["CacheIncomplete", "NothingFound", "Reception", "Subscriber"]

logger = logging.getLogger(__name__)

LARGE_MANIFEST: Final = 256 * 1024
"""Octets from which a manifest is parsed off the event loop (security 4.4)."""

SETTLE: Final = 1.0
"""Seconds without an Object, once a track's end is known, after which what is missing is fetched."""

REPAIRS: Final = 2
"""How often the missing Objects of one Group are fetched again from one publication."""


class NothingFound(KvcsError):
    """No usable publication of any prefix of the tokens; the text says what was found and why it was of no
    use.
    """


class CacheIncomplete(KvcsError):
    """The rest of the cache did not come, or not in time: `missing` says which blocks of which layers (kvcs
    7.4).
    """

    def __init__(self, reason: str, missing: Sequence[Missing]) -> None:
        super().__init__(f"{reason}; {len(missing)} blocks of layers are missing")
        self.reason = reason
        self.missing = tuple(missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    keys: list[bytes]
    layers: tuple[int, int]
    blocks: int
    codecs: tuple[str, ...]
    require_signed: bool


class Subscriber:
    """Receives caches of one model in one scope over `session`.

    `codecs` are the codecs to take, the preferred first. `patience` is how many seconds may pass without
    progress before the rest counts as missing, `budget` how many the whole may take (None: no bound but
    patience): not more than recomputing would (kvcs 7.4). `segment_wait` is how long to wait for a further
    segment when those announced are done and do not cover the tokens. `require_signed` accepts only
    "manifest.cose".
    """

    def __init__(
        self,
        session: Session,
        descriptor: Descriptor,
        scope_key: ScopeKey,
        *,
        codecs: Sequence[str] = ("raw", "x-shuffle-zlib"),
        patience: float = 10.0,
        budget: float | None = None,
        segment_wait: float = 1.0,
        require_signed: bool = False,
    ) -> None:
        self.session = session
        self.descriptor = descriptor
        self.scope_key = scope_key
        self.geometry = Geometry.of(descriptor)
        self.codecs = tuple(codecs)
        self.patience = patience
        self.budget = budget
        self.segment_wait = segment_wait
        self.require_signed = require_signed

    async def discover(self, tokens: Tokens, *, wait: float = DISCOVERY_WAIT) -> list[Found]:
        """The publications of the longest prefix of `tokens` that has any; see `kvcs.discovery.discover`."""
        return await discover(self.session, self.descriptor, self.scope_key, tokens, wait=wait)

    async def receive(
        self,
        tokens: Tokens,
        *,
        layers: tuple[int, int] | None = None,
        blocks: int | None = None,
        publications: Sequence[PublicationName] | None = None,
        wait: float = DISCOVERY_WAIT,
    ) -> Reception:
        """Find the cache of the longest prefix of `tokens`, check its manifest, and begin to receive it.

        `layers` (first, last) and `blocks` (the first n of the context) select a part. `publications` names
        them instead of discovery. The publications are ranked as kvcs 14 #5 says. Use the result in `async
        with`. Raises NothingFound, InvalidTokens, InvalidValue, and what the session raises.
        """
        last = self.descriptor.layers - 1
        if layers is not None and not 0 <= layers[0] <= layers[1] <= last:
            raise InvalidValue(f"layers {layers[0]}-{layers[1]} do not lie within 0-{last}")
        if blocks is not None and blocks < 1:
            raise InvalidValue(f"the number of blocks is 1 or more, not {blocks}")
        keys = block_keys(self.scope_key, self.descriptor, tokens)
        if not keys:
            raise NothingFound(
                f"{len(tokens)} tokens fill no block of {self.descriptor.block_tokens}: "
                "no publication can cover them"
            )
        wanted = _Wanted(
            keys=keys,
            layers=layers or (0, last),
            blocks=min(len(keys), blocks or len(keys)),
            codecs=self.codecs,
            require_signed=self.require_signed,
        )
        if publications is None:
            publications = [found.name for found in await self.discover(tokens, wait=wait)]
        sources = [_Source(self, name, wanted) for name in publications]
        await asyncio.gather(*(source.open() for source in sources))
        usable = sorted((source for source in sources if source.fault is None), key=_Source.rank)
        if not usable:
            for source in sources:
                await source.close()
            faults = "; ".join(f"{source.name.publication_id.hex()}: {source.fault}" for source in sources)
            raise NothingFound(
                f"no usable publication was found: {faults}" if faults else "no publication was found"
            )
        for source in sources:
            if source.fault is not None:
                logger.warning(
                    "publication %s is not used: %s", source.name.publication_id.hex(), source.fault
                )
                await source.close()
        return Reception(self, wanted, usable)


class _Source:
    """One publication: its manifest, kept up to date."""

    def __init__(self, subscriber: Subscriber, name: PublicationName, wanted: _Wanted) -> None:
        self.subscriber = subscriber
        self.name = name
        self.wanted = wanted
        self.manifest: Manifest | None = None
        self.confirmed: tuple[SegmentEntry, ...] = ()
        self.fault: Exception | None = None
        self.changed = asyncio.Event()
        self._version = -1
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    def track(self, name: bytes) -> FullTrackName:
        return FullTrackName(self.name.namespace, name)

    def rank(self) -> tuple[bool]:
        """Complete before incomplete, then the first announced, as sorting keeps the order (kvcs 14 #5)."""
        return (not all(entry.complete for entry in self.confirmed),)

    async def open(self) -> None:
        """Subscribe to the manifest and wait for its first version; `fault` says why the publication can't be
        used.
        """
        try:
            self._subscription = await self._subscribe()
            self._task = asyncio.create_task(self._follow(self._subscription))
            async with asyncio.timeout(self.subscriber.patience):
                while self.manifest is None and self.fault is None:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            self.fault = PeerFault(f"no manifest came within {self.subscriber.patience:g} s")  # kvcs 14 #6
        except (MoqtError, KvcsError) as error:
            self.fault = error

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.close()

    async def _subscribe(self) -> Subscription:
        # kvcs 7.2: signed first; the other only if that one does not exist and authenticity is not required.
        try:
            subscription = await self._join(MANIFEST_COSE)
        except RequestRejected as error:
            if error.code != RequestCode.DOES_NOT_EXIST:
                raise
            if self.wanted.require_signed:
                raise ManifestRejected(
                    "", "a signed manifest is required, and the publication has none"
                ) from None
            return await self._join(MANIFEST)
        await subscription.close()
        raise ManifestRejected("", "it is signed (manifest.cose), and this version can't verify signatures")

    async def _join(self, name: bytes) -> Subscription:
        fill = Fill(filter=LocationFilter.relative_start(1))
        return await self.subscriber.session.subscribe(
            self.track(name), filter=LocationFilter.next_object(), fill=fill
        )

    async def _follow(self, subscription: Subscription) -> None:
        try:
            async for item in subscription:
                if isinstance(item, ReceivedObject) and item.status is ObjectStatus.NORMAL:
                    await self._take(item)
        except (MoqtError, ManifestRejected) as error:
            if self.manifest is None or isinstance(error, ManifestRejected):
                self.fault = error
        finally:
            self.changed.set()

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
        confirmed = confirmed_segments(manifest, self.name, self.wanted.keys)
        if not confirmed:
            raise ManifestRejected("segments", "none is confirmed by the Block Keys of our tokens")
        if not choose_tracks(confirmed[0], self.wanted.codecs):
            offered = ", ".join(str(track) for track in confirmed[0].tracks)
            raise ManifestRejected("segments[0].tracks", f"found, but no usable codec: {offered}")
        self._version = item.location.group
        self.manifest = manifest
        self.confirmed = confirmed
        self.changed.set()


class _Retrieval:
    """One segment on its way from one publication, track by track."""

    def __init__(self, reception: Reception, source: _Source, assembly: SegmentAssembly) -> None:
        self.reception = reception
        self.source = source
        self.assembly = assembly
        self.lost: set[int] = set()
        """Layers that this publication will not bring."""
        self._session = source.subscriber.session
        self._repairs: dict[tuple[DataTrack, int], int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        receive = self._fetch if assembly.entry.complete else self._subscribe
        for track in assembly.tracks:
            self._spawn(self._retrieve(track, receive))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def repair(self, track: DataTrack, layer: int) -> None:
        """Fetch again what is missing of a Group, unless that was tried often enough."""
        self._spawn(self._repair(track, [layer]))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _retrieve(self, track: DataTrack, receive: Callable[[DataTrack], Awaitable[None]]) -> None:
        """Receive a track, fetch again what is missing then, and know the rest to be lost."""
        layers = range(self.assembly.first, self.assembly.last + 1)
        try:
            await receive(track)
        except MoqtError as error:
            self.reception.note(error)
        for _ in range(REPAIRS):
            await self._repair(track, [layer for layer in layers if self.assembly.missing_of(track, layer)])
        self.lost.update(layer for layer in layers if self.assembly.missing_of(track, layer))
        self.reception.wake.set()

    async def _subscribe(self, track: DataTrack) -> None:
        """Retrieval during production (kvcs 7.2)."""
        fill = Fill(filter=LocationFilter.absolute_start(self.assembly.first, 0))
        end_known = False
        async with await self._session.subscribe(
            self.source.track(track.name), filter=LocationFilter.next_object(), fill=fill
        ) as subscription:
            filled = not subscription.expects_fill
            while self.assembly.needs(track):
                # A track is complete on End of Track, on PUBLISH_DONE (the iteration ends), or when the fill
                # has ended and the manifest says so. Objects may still be on their way on other streams then,
                # but not for long.
                over = end_known or (filled and self.assembly.entry.complete)
                try:
                    async with asyncio.timeout(SETTLE if over else None):
                        item = await anext(subscription)
                except (TimeoutError, StopAsyncIteration):
                    return
                if isinstance(item, ReceivedObject):
                    end_known = end_known or item.status is ObjectStatus.END_OF_TRACK
                    self._place(track, item)
                elif isinstance(item, StreamEnd):
                    filled = filled or item.fill
                    if item.code is not None and item.group is not None:
                        self.repair(track, item.group)

    async def _fetch(self, track: DataTrack) -> None:
        """Retrieval of a completed segment (kvcs 7.3)."""
        await self._fetch_range(track, LocationFilter.groups(self.assembly.first, self.assembly.last))

    async def _fetch_range(self, track: DataTrack, selected: LocationFilter) -> None:
        ranges: tuple[RangeFilter, ...] = ()
        if self.assembly.blocks < self.assembly.entry.blocks and self._session.peer_setup.max_filter_ranges:
            ranges = (RangeFilter(RangeKind.OBJECTID, ((0, self.assembly.blocks - 1),)),)
        name = self.source.track(track.name)
        async with await self._session.fetch(name, filter=selected, range_filters=ranges) as fetch:
            async for item in fetch:
                if isinstance(item, ReceivedObject):
                    self._place(track, item)

    async def _repair(self, track: DataTrack, layers: list[int]) -> None:
        """Fetch what is missing of the given Groups in one go (kvcs 7.4)."""
        spans = [
            (layer, missing[0], missing[-1])
            for layer in layers
            if self._repairs.get((track, layer), 0) < REPAIRS
            and (missing := self.assembly.missing_of(track, layer))
        ]
        if not spans or self._session.closed:
            return
        for layer, _, _ in spans:
            self._repairs[track, layer] = self._repairs.get((track, layer), 0) + 1
        start, end = Location(spans[0][0], spans[0][1]), Location(spans[-1][0], spans[-1][2])
        logger.info("fetching what is missing of %s from %s to %s", track, start, end)
        try:
            await self._fetch_range(track, LocationFilter.absolute_range(start, end))
        except MoqtError as error:
            self.reception.note(error)
            if isinstance(error, RequestRejected) and error.retry_after:
                await asyncio.sleep(error.retry_after)

    def _place(self, track: DataTrack, item: ReceivedObject) -> None:
        layer, block = item.location.group, item.location.object
        if item.status is not ObjectStatus.NORMAL or not self.assembly.wants(track, layer, block):
            return
        try:
            usable = self.assembly.place(track, layer, block, item.payload)
        except ObjectRejected as error:
            logger.warning("%s, layer %d, block %d is discarded: %s", track, layer, block, error)
            self.reception.rejected += 1
            self.repair(track, layer)
        else:
            self.reception.placed(self.assembly.entry.segment, layer, usable)


@dataclass(slots=True)
class LayerTimes:
    """When a layer came, in seconds of the event loop's clock."""

    first_object: float
    usable: float | None = None


class Reception:
    """A cache on its way: `async for` gives each Layer as soon as it is usable, those of one segment in
    ascending order.

    The iteration ends when all that is announced and wanted has come. It raises CacheIncomplete as soon as a
    layer that is due is known not to come, or when patience or budget are over; with `partial` set before, it
    gives all that is usable and then ends, and `missing` tells the rest. Use it in `async with`.
    """

    def __init__(self, subscriber: Subscriber, wanted: _Wanted, sources: list[_Source]) -> None:
        self.partial = False
        self.rejected = 0
        """Objects discarded because a check failed."""
        self.wake = asyncio.Event()
        self.times: dict[tuple[int, int], LayerTimes] = {}
        self._subscriber = subscriber
        self._wanted = wanted
        self._sources = sources
        self._source = sources[0]
        self._alternatives = sources[1:]
        self._retrievals: list[_Retrieval] = []
        self._replaced: list[_Retrieval] = []
        self._next: list[int] = []
        self._reason = ""
        """Why the rest does not come, as far as it is known."""
        self._loop = asyncio.get_running_loop()
        self._started = self._progress = self._loop.time()
        self._over = False
        for source in sources:
            source.changed = self.wake

    @property
    def publication(self) -> PublicationName:
        """The publication that the cache comes from."""
        return self._source.name

    @property
    def manifest(self) -> Manifest:
        """Its newest manifest."""
        assert self._source.manifest is not None
        return self._source.manifest

    @property
    def blocks(self) -> int:
        """Blocks of the context that are announced and wanted so far."""
        return min(self._wanted.blocks, sum(entry.blocks for entry in self._source.confirmed))

    @property
    def received(self) -> int:
        """Octets of Objects received and verified."""
        return sum(retrieval.assembly.received for retrieval in self._retrievals)

    @property
    def reason(self) -> str:
        """Why something is missing, as far as it is known; "" otherwise."""
        return self._reason

    @property
    def missing(self) -> list[Missing]:
        """What is announced, wanted, and not here."""
        return [pair for retrieval in self._retrievals for pair in retrieval.assembly.missing()]

    async def __aenter__(self) -> Reception:
        return self

    async def __aexit__(self, *_: object) -> None:
        for retrieval in self._retrievals + self._replaced:
            await retrieval.close()
        for source in self._sources:
            await source.close()

    def __aiter__(self) -> AsyncIterator[Layer]:
        return self

    async def __anext__(self) -> Layer:
        while not self._over:
            self.wake.clear()
            self._follow_manifest()
            layer = self._take()
            if layer is not None:
                return layer
            self._give_up_lost()
            await self._wait()
        raise StopAsyncIteration

    def note(self, error: Exception) -> None:
        """An error of the network or the peer: others may still bring what is missing."""
        logger.info("%s", error)
        self._reason = str(error)

    def placed(self, segment: int, layer: int, usable: bool) -> None:
        """An Object was verified and placed."""
        self._progress = self._loop.time()
        times = self.times.setdefault((segment, layer), LayerTimes(self._progress))
        if usable:
            times.usable = self._progress
            self.wake.set()

    def _follow_manifest(self) -> None:
        """Start what the manifest has announced since."""
        if self._source.fault is not None:
            raise CacheIncomplete(str(self._source.fault), self.missing)
        for entry in self._source.confirmed:
            blocks = min(entry.blocks, self._wanted.blocks - entry.first_block)
            if entry.segment < len(self._retrievals):
                retrieval = self._retrievals[entry.segment]
                if retrieval.source is self._source and retrieval.assembly.entry is not entry:
                    self._progress = self._loop.time()
                    try:
                        dropped = retrieval.assembly.update(entry)
                    except ManifestRejected as error:
                        raise CacheIncomplete(str(error), self.missing) from error
                    for track, layer, block in dropped:
                        logger.warning(
                            "%s, layer %d, block %d is not what the manifest lists", track, layer, block
                        )
                        retrieval.repair(track, layer)
            elif blocks > 0 and (tracks := choose_tracks(entry, self._wanted.codecs)):
                assembly = SegmentAssembly(
                    entry, self._subscriber.geometry, tracks, self._wanted.layers, blocks
                )
                self._retrievals.append(_Retrieval(self, self._source, assembly))
                self._next.append(self._wanted.layers[0])

    def _take(self) -> Layer | None:
        """The usable layer that is due, the lowest one of the earliest segment."""
        for layer, segment in sorted((layer, segment) for segment, layer in enumerate(self._next)):
            assembly = self._retrievals[segment].assembly
            if layer <= assembly.last and assembly.usable(layer):
                self._next[segment] += 1
                return assembly.take(layer)
        return None

    def _give_up_lost(self) -> None:
        """Deal with layers that are due and will not come: from another publication, skipped, or an error."""
        for segment, retrieval in enumerate(self._retrievals):
            if self._next[segment] in retrieval.lost and not self._switch(segment):
                if not self.partial:
                    raise CacheIncomplete(
                        self._reason or f"layer {self._next[segment]} can't be had", self.missing
                    )
                self._next[segment] += 1
                self.wake.set()

    def _switch(self, segment: int) -> bool:
        """Have a segment come from the next publication that offers it (kvcs 7.4)."""
        old = self._retrievals[segment]
        for source in list(self._alternatives):
            if source.fault is not None or len(source.confirmed) <= segment or source.manifest is None:
                continue
            entry = source.confirmed[segment]
            tracks = choose_tracks(entry, self._wanted.codecs)
            if entry.blocks != old.assembly.entry.blocks or not tracks:
                continue
            assert old.source.manifest is not None
            # kvcs 7.4: never Objects of two publications in one segment, unless both say deterministic.
            if (
                old.source.manifest.deterministic
                and source.manifest.deterministic
                and tracks == old.assembly.tracks
            ):
                assembly = old.assembly
            elif old.assembly.untouched:
                assembly = SegmentAssembly(
                    entry, self._subscriber.geometry, tracks, self._wanted.layers, old.assembly.blocks
                )
            else:
                continue
            logger.warning(
                "segment %d now comes from publication %s", segment, source.name.publication_id.hex()
            )
            self._alternatives.remove(source)
            self._replaced.append(old)
            self._retrievals[segment] = _Retrieval(self, source, assembly)
            self._progress = self._loop.time()
            return True
        return False

    async def _wait(self) -> None:
        """Wait for news, within patience and budget."""
        subscriber = self._subscriber
        done = all(self._next[index] > one.assembly.last for index, one in enumerate(self._retrievals))
        if done and sum(entry.blocks for entry in self._source.confirmed) >= self._wanted.blocks:
            self._over = True
            return
        patience = subscriber.segment_wait if done else subscriber.patience
        end = self._progress + patience
        budget_end = None if subscriber.budget is None else self._started + subscriber.budget
        try:
            async with asyncio.timeout_at(end if budget_end is None else min(end, budget_end)):
                await self.wake.wait()
        except TimeoutError:
            now = self._loop.time()
            if done:
                self._over = True
            elif budget_end is not None and now >= budget_end:
                self._alternatives.clear()
                self._lose_all(f"the time budget of {subscriber.budget:g} s is over")
            elif now >= self._progress + patience:
                self._lose_all(f"nothing came for {patience:g} s")

    def _lose_all(self, reason: str) -> None:
        """What is not here now will not come from where it was to come (kvcs 7.4: never wait for ever)."""
        self._reason = reason
        for retrieval in self._retrievals:
            retrieval.lost.update(range(retrieval.assembly.first, retrieval.assembly.last + 1))
        self.wake.set()
