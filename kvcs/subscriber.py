"""Receive KV caches: find a publication, verify it, hand out its layers as they become usable (kvcs 7)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Final

from kvcs.assembly import Layer, Missing, SegmentAssembly, choose_tracks
from kvcs.codecs import CODECS
from kvcs.discovery import DISCOVERY_WAIT, Found, discover
from kvcs.errors import InvalidValue, KvcsError, ManifestRejected
from kvcs.identity import Descriptor, ScopeKey, Tokens, block_keys
from kvcs.layout import Geometry
from kvcs.manifest import Manifest, SegmentEntry
from kvcs.names import PublicationName
from kvcs.progress import LayerTimes, Progress
from kvcs.retrieval import Retrieval
from kvcs.source import Source, Wanted
from moqt.session import Session

__all__ = ["CacheIncomplete", "NothingFound", "Reception", "Subscriber"]

logger = logging.getLogger(__name__)

RANKING: Final = 0.2
"""Seconds that other publications have to show their manifests once one of them can be used."""


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


class Subscriber:
    """Receives caches of one model in one scope over `session`.

    `codecs` are the codecs to take, the preferred first. `patience` is how many seconds may pass without
    progress before the rest counts as missing, `budget` how many the whole may take, from the call of
    `receive` on (None: no bound but patience): not more than recomputing would (kvcs 7.4). `segment_wait` is
    how long to wait for a further segment when those announced are done and do not cover the tokens; not
    when all was complete from the start, since then nothing more is likely to come. `require_signed` accepts
    only "manifest.cose". Raises InvalidValue.
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
        unknown = sorted(set(codecs) - set(CODECS))
        if unknown or not codecs:
            raise InvalidValue(
                f"expected codecs of {', '.join(CODECS)}, got {', '.join(unknown) or 'none at all'}"
            )
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
        started = asyncio.get_running_loop().time()
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
        wanted = Wanted(
            keys=keys,
            layers=layers or (0, last),
            blocks=len(keys) if blocks is None else min(len(keys), blocks),
            codecs=self.codecs,
            require_signed=self.require_signed,
            geometry=self.geometry,
        )
        progress = Progress()
        try:
            async with asyncio.timeout(self.budget) as whole:
                sources = await self._find(tokens, wanted, publications, wait, progress)
            return Reception(self, wanted, sources, progress, started)
        except BaseException as error:
            await progress.close()
            if isinstance(error, TimeoutError) and whole.expired():
                raise NothingFound(
                    f"nothing of use was found within the time budget of {self.budget:g} s"
                ) from None
            raise

    async def _find(
        self,
        tokens: Tokens,
        wanted: Wanted,
        publications: Sequence[PublicationName] | None,
        wait: float,
        progress: Progress,
    ) -> list[Source]:
        """The publications to receive from, the best first; the first one is of use. Raises NothingFound."""
        blocks = len(wanted.keys)
        faults: list[str] = []
        while True:
            if publications is None:
                found = await self.discover(tokens[: blocks * self.descriptor.block_tokens], wait=wait)
                names = [one.name for one in found]
            else:
                names = list(dict.fromkeys(publications))
            sources = [Source(self.session, name, wanted, progress) for name in names]
            await self._wait_for_manifests(sources, progress)
            sources.sort(key=Source.rank)
            if sources and sources[0].usable:
                return sources
            if self.session.error is not None:
                raise self.session.error
            late = f"no manifest came within {self.patience:g} s"  # kvcs 14 #6
            faults += [f"{source}: {source.fault or late}" for source in sources]
            silent = not all(source.ready for source in sources)
            if not sources or publications is not None or silent or found[0].blocks == 1:
                raise NothingFound(
                    f"no usable publication was found: {'; '.join(faults)}"
                    if faults
                    else f"no publication was found within {wait:g} s: check that the scope key, the tokens "
                    "(those of the first block at least) and the whole descriptor (block_tokens, too) are "
                    "those of the publisher, and that it has begun (with these tokens no publication of more "
                    "is found); or try a longer wait"
                )
            blocks = found[0].blocks - 1  # kvcs 7.1: those of a shorter prefix may be of use.

    async def _wait_for_manifests(self, sources: Sequence[Source], progress: Progress) -> None:
        """Wait until it is known whether the publications are of use: for so long as patience lasts, and not
        much longer than for the first that is.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self.patience
        with suppress(TimeoutError):
            while not all(source.ready for source in sources):
                if any(source.usable for source in sources):
                    end = min(end, loop.time() + RANKING)
                progress.news.clear()
                async with asyncio.timeout_at(end):
                    await progress.news.wait()
                progress.check()
        for source in sources:
            if source.fault is not None:
                logger.warning("publication %s is not used: %s", source, source.fault)


class Reception:
    """A cache on its way: `async for` gives each Layer as soon as it is usable, those of one segment in
    ascending order.

    The iteration ends when all that is announced and wanted has come. It raises CacheIncomplete as soon as a
    layer that is due is known not to come, or when patience or budget are over; with `partial` set, it gives
    all that is usable and then ends, and `missing` tells the rest. Use it in `async with`.

    Each segment comes from the first publication, in the order of their rank, that offers it, and from the
    next one when that fails.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        wanted: Wanted,
        sources: Sequence[Source],
        progress: Progress,
        started: float,
    ) -> None:
        self.partial = False
        self._subscriber = subscriber
        self._wanted = wanted
        self._sources = sources
        self._progress = progress
        self._started = started
        self._retrievals: list[Retrieval] = []
        self._tried: list[set[Source]] = []
        """For each segment: the publications that it came from, and can't come from again."""
        self._over = False
        self._out_of_time = False
        self._start_segments()

    @property
    def publication(self) -> PublicationName:
        """The publication that the cache comes from: that of segment 0."""
        return self._retrievals[0].source.name

    @property
    def manifest(self) -> Manifest:
        """Its newest manifest."""
        manifest = self._retrievals[0].source.manifest
        assert manifest is not None
        return manifest

    @property
    def blocks(self) -> int:
        """Blocks of the context that are announced and wanted so far."""
        return min(self._wanted.blocks, self._covered)

    @property
    def received(self) -> int:
        """Octets of Objects received and verified."""
        return sum(retrieval.assembly.received for retrieval in self._retrievals)

    @property
    def rejected(self) -> int:
        """Objects discarded because a check failed."""
        return self._progress.rejected

    @property
    def times(self) -> dict[tuple[int, int], LayerTimes]:
        """By (segment, layer): when its first Object came, and when it became usable."""
        return self._progress.times

    @property
    def reason(self) -> str:
        """Why something is missing, as far as it is known; "" if nothing is."""
        return self._progress.reason if self.missing else ""

    @property
    def cause(self) -> Exception | None:
        """What was raised by the network or the peer, where that is the reason."""
        return self._progress.cause if self.missing else None

    @property
    def missing(self) -> list[Missing]:
        """What is announced, wanted, and not here."""
        return [pair for retrieval in self._retrievals for pair in retrieval.assembly.missing()]

    async def __aenter__(self) -> Reception:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._progress.close()

    def __aiter__(self) -> AsyncIterator[Layer]:
        return self

    async def __anext__(self) -> Layer:
        asked = asyncio.get_running_loop().time()
        while not self._over:
            self._progress.check()
            self._progress.news.clear()
            self._follow_manifests()
            layer = self._take()
            if layer is not None:
                return layer
            if not self._handle_lost():
                await self._wait(asked)
        raise StopAsyncIteration

    @property
    def _covered(self) -> int:
        """Blocks of the segments that have begun."""
        return sum(retrieval.assembly.entry.blocks for retrieval in self._retrievals)

    def _follow_manifests(self) -> None:
        """Take over what the manifests say now."""
        for number, retrieval in enumerate(self._retrievals):
            source, assembly = retrieval.source, retrieval.assembly
            entry = source.segments[number] if number < len(source.segments) else None
            if retrieval.stopped:
                continue
            if source.fault is not None:
                self._give_up(retrieval, str(source.fault))
            elif entry is assembly.entry:
                continue
            elif entry is None or entry.blocks != assembly.entry.blocks:
                self._begin_anew(number)
                break
            else:
                try:
                    retrieval.update(entry)
                except ManifestRejected as error:
                    raise self._incomplete(str(error)) from error
        self._start_segments()

    def _start_segments(self) -> None:
        """Start what the manifests have announced since."""
        while not self._out_of_time and self._covered < self._wanted.blocks:
            number = len(self._retrievals)
            for source in self._sources:
                if source.usable and number < len(source.segments):
                    entry = source.segments[number]
                    if entry.first_block == self._covered:
                        break
            else:
                return
            self._retrievals.append(Retrieval(source, self._assembly(entry), self._progress))
            self._tried.append(set())
            self._progress.came()

    def _begin_anew(self, number: int) -> None:
        """The segments from `number` on are no longer what they were: they have grown, which they may before
        anything of them is listed.
        """
        changed = self._retrievals[number:]
        whole = all(retrieval.assembly.untouched for retrieval in changed)
        for retrieval in changed:
            self._give_up(retrieval, f"segment {number} has changed while it was received")
        if whole:
            del self._retrievals[number:], self._tried[number:]

    def _assembly(self, entry: SegmentEntry) -> SegmentAssembly:
        blocks = min(entry.blocks, self._wanted.blocks - entry.first_block)
        geometry = self._wanted.geometry
        tracks = choose_tracks(entry, self._wanted.codecs, geometry)
        return SegmentAssembly(entry, geometry, tracks, self._wanted.layers, blocks)

    def _take(self) -> Layer | None:
        """The usable layer that is due, the lowest one of the earliest segment."""
        usable = [
            (assembly.due, number)
            for number, assembly in enumerate(retrieval.assembly for retrieval in self._retrievals)
            if assembly.usable(assembly.due)
        ]
        return self._retrievals[min(usable)[1]].assembly.take() if usable else None

    def _handle_lost(self) -> bool:
        """Deal with layers that are due and will not come: from another publication, skipped, or an error.
        Whether there were any.
        """
        any_lost = False
        for number, retrieval in enumerate(self._retrievals):
            if retrieval.assembly.due in retrieval.lost:
                any_lost = True
                if self._replace(number):
                    continue
                if not self.partial:
                    raise self._incomplete(self._progress.reason)
                retrieval.assembly.skip()
        return any_lost

    def _replace(self, number: int) -> bool:
        """Have a segment come from the next publication that offers it (kvcs 7.4)."""
        old = self._retrievals[number]
        self._tried[number].add(old.source)
        if self._out_of_time:
            return False
        for source in self._sources:
            if source in self._tried[number] or not source.usable or number >= len(source.segments):
                continue
            assembly = self._continued(old, source, source.segments[number])
            if assembly is not None:
                logger.warning("segment %d now comes from publication %s", number, source)
                old.give_up()
                self._progress.left = False
                self._retrievals[number] = Retrieval(source, assembly, self._progress)
                self._progress.came()
                return True
        return False

    def _continued(self, old: Retrieval, source: Source, entry: SegmentEntry) -> SegmentAssembly | None:
        """How the segment that `old` began can come from `source`; None if it can't."""
        known = old.assembly.entry
        if (entry.first_block, entry.blocks) != (known.first_block, known.blocks):
            return None
        # kvcs 7.4: never Objects of two publications in one segment, unless both say deterministic.
        deterministic = all(
            one.manifest is not None and one.manifest.deterministic for one in (old.source, source)
        )
        if deterministic and set(old.assembly.tracks) <= set(entry.tracks):
            try:
                if not old.assembly.contradictions(entry):
                    old.assembly.update(entry)
                    return old.assembly
            except ManifestRejected as error:
                logger.warning("publication %s is not what it says: %s", source, error)
        return self._assembly(entry) if old.assembly.untouched else None

    async def _wait(self, asked: float) -> None:
        """Wait for news, within patience, counted from `asked` at the earliest, and budget."""
        loop = asyncio.get_running_loop()
        subscriber, progress = self._subscriber, self._progress
        done = all(retrieval.assembly.done for retrieval in self._retrievals)
        live = any(retrieval.live for retrieval in self._retrievals)
        if done and (self._covered >= self._wanted.blocks or not live):
            self._over = True
            return
        patience = subscriber.segment_wait if done else subscriber.patience
        budget_end = math.inf if subscriber.budget is None else self._started + subscriber.budget
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(max(asked, progress.last) + patience, budget_end)):
                await progress.news.wait()
                return
        now = loop.time()
        if now < min(max(asked, progress.last) + patience, budget_end):
            return  # Something came meanwhile, though no whole layer.
        if done:
            self._over = True
            return
        self._out_of_time = now >= budget_end
        reason = f"nothing came for {patience:g} s"
        if self._out_of_time:
            reason = f"the time budget of {subscriber.budget:g} s is over"
        for retrieval in self._retrievals:
            self._give_up(retrieval, reason)

    def _give_up(self, retrieval: Retrieval, reason: str) -> None:
        """What is not here now will not come from where it was to come (kvcs 7.4: never wait for ever)."""
        if not retrieval.assembly.done:
            self._progress.because(reason)
            retrieval.give_up()

    def _incomplete(self, reason: str) -> CacheIncomplete:
        for retrieval in self._retrievals:
            retrieval.give_up()
        return CacheIncomplete(reason, self.missing)
