"""Where a cached Track comes from: one subscription at each of its publishers (moqt 15 #7, #8, #14)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from moqt.errors import (
    DoneCode,
    MalformedTrack,
    MoqtError,
    RequestCode,
    RequestRefused,
    RequestRejected,
    meaning,
)
from moqt.filters import GroupOrder, LocationFilter
from moqt.names import FullTrackName, printable
from moqt.reception import Header, Inlet
from moqt.relay.cache import CachedTrack
from moqt.relay.holes import Holes
from moqt.relay.inlets import FetchInlet, SubgroupInlet
from moqt.relay.refusals import refusal
from moqt.session import Session
from moqt.subscribing import Fill, StreamEnd
from moqt.track import Wanted
from moqt.wire import SubgroupHeader

if TYPE_CHECKING:
    from moqt.relay.relay import Relay

__all__ = ["Feed"]

logger = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds until a publisher that did not have a Track is asked again, while somebody waits for it."""


class Feed:
    """One Track of the relay and its publishers."""

    def __init__(self, relay: Relay, name: FullTrackName) -> None:
        self.name = name
        self._holes = Holes(relay, self._spoil)
        self.track = CachedTrack(name, relay.cache, self._holes.fill, self._holes.open)
        self.track.on_idle = self.settle
        self.track.on_lack = lambda: relay.reconsider(name.namespace)
        self._relay = relay
        self._sources: dict[Session, asyncio.Task[None]] = {}
        self._established: set[Session] = set()
        self._errors: dict[Session, MoqtError] = {}
        """Why publishers did not accept a subscription, since the last answer."""
        self._askers = 0
        self._changed = asyncio.Event()
        self._broken = False
        """Somebody may miss what was published while no publisher was there."""
        self._recovery: asyncio.Task[None] | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None

    @property
    def publishers(self) -> list[Session]:
        """Those whose subscription of ours stands."""
        return list(self._established)

    @property
    def fetching(self) -> int:
        """How many holes are being fetched."""
        return len(self._holes.open)

    async def establish(
        self, asker: object, rendezvous: float, wanted: Wanted | None, *, upward: bool
    ) -> CachedTrack:
        """The Track, once a publisher has accepted our subscription to it (moqt 15 #7), or what is wanted is
        in the cache. Raises RequestRefused.
        """
        self._askers += 1
        try:
            await self._establish(asker, rendezvous, wanted, upward=upward)
            return self.track
        finally:
            self._askers -= 1
            self.settle()

    async def _establish(
        self, asker: object, rendezvous: float, wanted: Wanted | None, *, upward: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + rendezvous
        patient = loop.time() + max(rendezvous, self._relay.upstream_wait)
        tried: dict[Session, float] = {}
        while True:
            if self.track.fault:
                raise RequestRefused(RequestCode.INTERNAL_ERROR, "the Track is malformed")
            if self._established - {asker} or self._has_all(wanted):
                return
            now = loop.time()
            pending = answering = False
            for tier in self._relay.candidates(self.name, asker, upward=upward):
                for session in tier:
                    if session not in self._sources and now >= tried.get(session, -AGAIN) + AGAIN:
                        if session in tried and now >= deadline:
                            continue
                        tried[session] = now
                        self._start(session, wanted)
                    pending = pending or session in self._sources
                    answering = answering or (session in self._sources and session not in self._relay.silent)
                if answering:
                    break
            if not answering and self._has_some(wanted):
                self._await_publisher()
                return
            if pending and not answering and now >= deadline and self._relay.lacks(self.name):
                raise RequestRefused(RequestCode.DOES_NOT_EXIST, "the publisher has no such Track")
            waits = not upward and self._relay.reconnecting and not self._relay.keeps(self.name.namespace)
            end = patient if waits else deadline
            if not pending and now >= end:
                raise self._refusal(waited=bool(rendezvous) or waits, upward=upward)
            self._changed.clear()
            if pending:
                await self._changed.wait()
            else:
                try:
                    async with asyncio.timeout_at(min(end, now + AGAIN)):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def _has_all(self, wanted: Wanted | None) -> bool:
        """Whether no publisher is needed: the Track is complete, or all that a fetch wants is here."""
        track = self.track
        track.expire()
        if track.complete:
            track.finished = track.finished or not self._established
            return True
        if wanted is None or wanted.live or wanted.filter.end is None or track.largest is None:
            return False
        start, end = wanted.filter.start(track.largest), wanted.filter.end
        return start <= end and track.gap(start, end) is None

    def _has_some(self, wanted: Wanted | None) -> bool:
        """Whether anything is here for somebody who wants what exists already."""
        return wanted is not None and self.track.largest is not None and not self.track.empty

    def _await_publisher(self) -> None:
        """Subscribers are served from the cache; they are kept for a while, and get what they missed when a
        publisher comes.
        """
        self._broken = True
        if self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(self._relay.grace, self._give_up)

    def _refusal(self, *, waited: bool, upward: bool) -> RequestRefused:
        answer = refusal(self._errors.values())
        self._errors.clear()
        if upward and answer is not None and answer.redirect is not None and answer.redirect.uri:
            answer = None  # moqt 20 #13: an upstream is a server, and takes no URI.
        if answer is not None and not (waited and answer.code == RequestCode.DOES_NOT_EXIST):
            return answer
        if waited:
            return RequestRefused(RequestCode.TIMEOUT, "no publisher of the Track came in time")
        return RequestRefused(RequestCode.DOES_NOT_EXIST, "no publisher of the Track is known here")

    def route(self, session: Session) -> None:
        """A session may have the Track from now on (moqt 15 #9)."""
        self.news()
        if (self.track.watched or self._askers) and session not in self._sources and not self.track.fault:
            self._start(session, None)

    def news(self) -> None:
        """Something has changed for those who wait for a publisher."""
        self._changed.set()

    def settle(self) -> None:
        """Keep the subscriptions for a while when the last subscriber has left."""
        if self.track.watched or self._askers:
            if self._linger is not None:
                self._linger.cancel()
                self._linger = None
        elif self._linger is None and not self._relay.closed:
            loop = asyncio.get_running_loop()
            self._linger = loop.call_later(self._relay.linger if self._sources else 0.0, self._rest)

    def _rest(self) -> None:
        self._linger = None
        if self.track.watched or self._askers or self._holes.open:
            self.settle()
            return
        for task in self._sources.values():
            task.cancel()
        self._errors.clear()
        self.track.give_up()
        if self.track.empty or self.track.fault:
            self._relay.drop(self)
        else:
            self._relay.reconsider(self.name.namespace)

    def cancel(self) -> list[asyncio.Task[None]]:
        """End everything; the tasks that are to be awaited."""
        tasks = [*self._sources.values()]
        if self._recovery is not None:
            tasks.append(self._recovery)
        for task in tasks:
            task.cancel()
        for timer in (self._linger, self._grace):
            if timer is not None:
                timer.cancel()
        self.track.stop()
        return tasks + self._holes.cancel()

    # Subscriptions.

    def _start(self, session: Session, wanted: Wanted | None) -> None:
        # What exists already comes with the subscription, for the first who asks: the publisher may be about
        # to leave, and a fetch would come too late.
        fill = None
        if wanted is not None and not self._sources and self.track.blank:
            if wanted.live:
                fill = Fill(filter=wanted.filter, order=wanted.order)
            else:
                self._holes.race(self.track, wanted)
        task = asyncio.create_task(
            self._subscribe(session, fill), name=f"{session.connection.id} {self.name}"
        )
        self._sources[session] = task

        def ended(_: asyncio.Task[None]) -> None:
            del self._sources[session]
            self._established.discard(session)
            self._changed.set()

        task.add_done_callback(ended)

    async def _subscribe(self, session: Session, fill: Fill | None) -> None:
        """Follow one publisher until it has no more, or is lost."""
        track = self.track
        filling: FetchInlet | None = None

        def sink(header: Header) -> Inlet:
            if isinstance(header, SubgroupHeader):
                return SubgroupInlet(track, header)
            assert filling is not None  # The stream waits for the reply.
            return filling

        lost = False
        status: int | None = None
        try:
            with self._relay.asking(session):
                # moqt 15 #12: all that is new, for everybody; each subscriber's filter is applied here.
                subscription = await session.subscribe(
                    self.name,
                    filter=LocationFilter.next_object(),
                    fill=fill,
                    sink=sink,
                    deadline=self._relay.answer,
                )
            async with subscription:
                track.describe(subscription.properties)
                track.saw(subscription.largest)
                if fill is not None and subscription.expects_fill:
                    span = fill.range(subscription.largest)
                    assert span is not None
                    filling = self._holes.expect(track, *span, fill.order)
                self._established.add(session)
                self._relay.subscribed += 1
                self._on_established()
                lost = True
                async for item in subscription:
                    if filling is not None and isinstance(item, StreamEnd) and item.fill:
                        filling.cut()
                status = None if subscription.done is None else subscription.done.status
        except MalformedTrack as error:
            self._spoil(str(error))
            return
        except MoqtError as error:
            self._errors[session] = error
            if isinstance(error, RequestRejected) and error.code == RequestCode.DOES_NOT_EXIST:
                self._relay.note_presence(self.name, False)
            logger.info("%s: %s: %s", session.connection.id, self.name, printable(str(error)))
        finally:
            if filling is not None:
                filling.cut()
        self._established.discard(session)
        if status == DoneCode.MALFORMED_TRACK:  # Nobody knows which of what is here was right.
            self._spoil("a publisher has ended it as malformed")
        elif lost:
            self._on_end(session, status)

    def _on_established(self) -> None:
        self._changed.set()
        self._errors.clear()
        self._relay.note_presence(self.name, True)
        self.track.finished = False
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._broken:
            self._broken = False
            self._recover()

    def _on_end(self, session: Session, status: int | None) -> None:
        """A publisher has ended its subscription with `status`, or was lost (None)."""
        track = self.track
        self._holes.patient_until = asyncio.get_running_loop().time() + self._relay.grace
        if track.complete:
            status = DoneCode.TRACK_ENDED  # Whatever has become of the publisher.
        elif status in (DoneCode.UNAUTHORIZED, DoneCode.EXPIRED):
            status = None  # That is about our right; whoever asked us has theirs.
        if status is None or (status == DoneCode.GOING_AWAY and self._relay.is_upstream(session)):
            self._broken = track.watched
            if self._established and track.watched:
                self._broken = False
                self._recover()
            elif track.watched and self._grace is None:
                # It may come back, or another one may have it (moqt 15 #9).
                self._grace = asyncio.get_running_loop().call_later(self._relay.grace, self._give_up)
        elif not self._established:
            if status == DoneCode.TRACK_ENDED:
                self.track.finished = True
            track.give_up()
            track.close(meaning(DoneCode, status))
            self._relay.reconsider(self.name.namespace)

    def _give_up(self) -> None:
        self._grace = None
        self.track.give_up()
        self.track.close(DoneCode.INTERNAL_ERROR)

    def _spoil(self, reason: str) -> None:
        logger.warning("%s is malformed: %s", self.name, printable(reason))
        self.track.spoil(reason)
        self._relay.drop(self)
        current = asyncio.current_task()
        for task in self._sources.values():
            if task is not current:
                task.cancel()

    # What was published while no publisher was there.

    def _recover(self) -> None:
        """Bring subscribers what was published while a publisher was lost, before what comes now."""
        self.track.defer()
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._catch_up(), name=f"recovery of {self.name}")

    async def _catch_up(self) -> None:
        track = self.track
        try:
            while (gap := track.live_gap()) is not None and track.watched:
                hole = self._holes.fill(track, *gap, GroupOrder.ASCENDING)
                while not hole.done:
                    hole.ahead = 0  # They are used when all is here.
                    await track.changes()
                if gap[0] in hole.unknown:
                    break
        finally:
            self._recovery = None
            track.catch_up()
