"""Where a cached Track comes from: one subscription at each of its publishers (moqt 15 #7, #8, #14)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
from typing import TYPE_CHECKING, Any

from moqt.errors import (
    DoneCode,
    MalformedTrack,
    MoqtError,
    RequestCode,
    RequestRefused,
    RequestRejected,
    meaning,
)
from moqt.filters import GroupOrder, Location, LocationFilter
from moqt.names import FullTrackName, printable
from moqt.offers import Offer
from moqt.reception import DataHeader, Inlet
from moqt.relay.cached import CachedTrack
from moqt.relay.holes import Holes
from moqt.relay.inlets import FetchInlet, live_inlet
from moqt.relay.refusals import refusal
from moqt.session import Session
from moqt.subscribing import Fill, StreamEnd, Subscription
from moqt.track import Wanted
from moqt.wire import FetchHeader, PropertyType, get

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
        self._sources: dict[Session, asyncio.Task[None]] = {}
        self._holes = Holes(relay, self._sources.keys(), self._spoil)
        disk = None
        if relay.store is not None:
            disk = relay.store.track(name)
            disk.on_contradiction = self._spoil
        self.track = CachedTrack(name, relay.cache, self._holes.fill, self._holes.open, disk)
        self.track.on_idle = self.settle
        self.track.on_lack = lambda: relay.reconsider(name.namespace)
        self.track.on_steer = self._steer
        self.track.on_group_request = self._request_group
        self._relay = relay
        self._established: dict[Session, Subscription] = {}
        self._published: set[Session] = set()
        """Those of the publishers who have offered the Track themselves (PUBLISH)."""
        self._steering: asyncio.Task[None] | None = None
        self._group_request = -1
        """The new Group that the publishers were asked for, if it has not begun."""
        self._errors: dict[Session, MoqtError] = {}
        """Why publishers did not accept a subscription, while somebody waits for an answer."""
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

    @property
    def offering(self) -> Collection[Session]:
        """Those who have offered the Track by PUBLISH."""
        return self._published

    async def establish(
        self, asker: object, rendezvous: float, wanted: Wanted | None, *, upward: bool
    ) -> CachedTrack:
        """The Track, once a publisher has accepted our subscription to it (moqt 15 #7), or what is wanted is
        in the cache. Raises RequestRefused.
        """
        self._askers += 1
        try:
            await self._establish(asker, rendezvous, wanted, upward=upward)
            if wanted is not None and not wanted.live:
                await self._refresh(asker, wanted)
            return self.track
        finally:
            self._askers -= 1
            if not self._askers:
                self._errors.clear()
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
            if self._established.keys() - {asker} or self._has_all(wanted):
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
                    if session in self._sources:  # Its answer is for all who wait for it.
                        tried.setdefault(session, now)
                        pending = True
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
                raise self._refusal(tried, waited=bool(rendezvous) or waits, upward=upward)
            self._changed.clear()
            if pending:
                await self._changed.wait()
            else:
                try:
                    async with asyncio.timeout_at(min(end, now + AGAIN)):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def _refresh(self, asker: object, wanted: Wanted) -> None:
        """Ask for the Largest Object, if what is wanted lies beyond the one that we know and we may have
        missed some: else it would be denied that they exist.
        """
        track = self.track
        start, end = wanted.filter.start(track.largest), wanted.filter.end
        largest = track.largest
        # A publisher that we have paused, since all subscribers are, goes on without telling us.
        paused = any(not one.forward for one in self._established.values())
        if track.complete or not (track.doubtful or paused):
            return
        if largest is not None and start <= largest and (end <= largest if end else not paused):
            return
        for session in self._established.keys() - self._relay.silent - {asker}:
            try:
                with self._relay.asking(session):
                    status = await session.track_status(self.name, deadline=self._relay.answer)
                track.saw(status.largest)
                return
            except MoqtError as error:
                logger.info("%s: %s: %s", session.connection.id, self.name, printable(str(error)))

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
        return start <= end and track.has(start, end)

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

    def _refusal(self, tried: Collection[Session], *, waited: bool, upward: bool) -> RequestRefused:
        answer = refusal(error for session, error in self._errors.items() if session in tried)
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
        if not self._askers:
            self._errors.clear()  # They hold the sessions that failed.
        if self.track.watched or self._askers:
            if self._linger is not None:
                self._linger.cancel()
                self._linger = None
        elif self._linger is None and not self._relay.closed:
            loop = asyncio.get_running_loop()
            busy = self._holes.open or self.track.readers
            linger = max(self._relay.linger if self._sources else 0.0, 1.0 if busy else 0.0)
            self._linger = loop.call_later(linger, self._rest)

    def _rest(self) -> None:
        self._linger = None
        if self.track.watched or self._askers or self._holes.open or self.track.readers:
            self.settle()
            return
        for session, task in self._sources.items():
            if session not in self._published:
                task.cancel()
        if self._published:  # They can't be asked again: they are paused.
            self._steer()
            return
        self._errors.clear()
        self.track.give_up()
        if self.track.empty or self.track.fault:
            self._relay.drop(self)
        else:
            self._relay.reconsider(self.name.namespace)

    def cancel(self) -> list[asyncio.Task[None]]:
        """End everything; the tasks that are to be awaited."""
        tasks = [*self._sources.values()]
        tasks += [task for task in (self._recovery, self._steering) if task is not None]
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
        self._start_source(session, self._subscribe(session, fill))

    def _start_source(self, session: Session, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{session.connection.id} {self.name}")
        self._sources[session] = task
        self._errors.pop(session, None)

        def ended(task: asyncio.Task[None]) -> None:
            if self._sources.get(session) is task:
                del self._sources[session]
                self._established.pop(session, None)
            self._changed.set()

        task.add_done_callback(ended)
        return task

    async def _subscribe(self, session: Session, fill: Fill | None) -> None:
        """Follow one publisher until it has no more, or is lost."""
        track = self.track
        filling: FetchInlet | None = None

        def sink(header: DataHeader) -> Inlet:
            if isinstance(header, FetchHeader):
                assert filling is not None  # The stream waits for the reply.
                return filling
            return live_inlet(track, header)

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
                if fill is not None and subscription.expects_fill:
                    span = fill.range(subscription.largest)
                    assert span is not None
                    filling = self._holes.expect(track, *span, fill.order)
                await self._receive(session, subscription, filling)
        except MalformedTrack as error:
            self._spoil(str(error))
            return
        except MoqtError as error:
            if self._askers:
                self._errors[session] = error
            if isinstance(error, RequestRejected) and error.code == RequestCode.DOES_NOT_EXIST:
                self._relay.note_presence(self.name, False)
            logger.info("%s: %s: %s", session.connection.id, self.name, printable(str(error)))

    async def take(self, session: Session, offer: Offer) -> None:
        """A publisher offers the Track by PUBLISH (moqt 15 #10). Raises RequestRefused."""
        if self.track.fault:
            raise RequestRefused(RequestCode.MALFORMED_TRACK, "the Track is malformed")
        if session in self._established:
            raise RequestRefused(RequestCode.UNINTERESTED, "the Track is subscribed to already")
        track = self.track

        def sink(header: DataHeader) -> Inlet:
            assert not isinstance(header, FetchHeader)
            return live_inlet(track, header)

        track.describe(offer.properties)
        track.saw(offer.largest)
        self._askers += 1
        try:
            await offer.accept(sink=sink)
            # A task of its own: the request's is cancelled when the session ends, before all is read.
            waiting = self._sources.get(session)
            task = self._start_source(session, self._follow_offer(session, offer))
            if waiting is not None:  # The SUBSCRIBE that waits for a reply is completed by this.
                waiting.cancel()
            self._published.add(session)
            self._relay.offer(self)
        finally:  # The publisher may be gone already.
            self._askers -= 1
            self.settle()
        await asyncio.wait((task,))

    async def _follow_offer(self, session: Session, offer: Offer) -> None:
        try:
            await self._receive(session, offer, None)
        except MalformedTrack as error:
            self._spoil(str(error))
        except MoqtError as error:
            logger.info("%s: %s: %s", session.connection.id, self.name, printable(str(error)))
        finally:
            self._published.discard(session)
            if not self._published:
                self._relay.withdraw_offer(self)
            self.settle()

    async def _receive(
        self, session: Session, subscription: Subscription, filling: FetchInlet | None
    ) -> None:
        """Follow a publisher until it has no more, or is lost."""
        track = self.track
        track.describe(subscription.properties)
        # Another publisher stands, and has not brought what this one tells of: its connection may be dead,
        # unnoticed. What is missing goes before what comes now.
        largest = subscription.largest
        behind = largest is not None and (track.largest is None or track.largest < largest)
        behind = behind and bool(self._established) and track.watched
        # After a loss those below know an old one, and would deny what exists until we have caught up.
        track.saw(subscription.largest, tell=self._broken)
        subscription.on_largest = lambda: track.saw(subscription.largest, tell=True)
        self._established[session] = subscription
        self._relay.subscribed += 1
        self._on_established()
        if behind:
            self._recover()
        try:
            async for item in subscription:
                if filling is not None and isinstance(item, StreamEnd) and item.fill:
                    filling.cut()
        except (MalformedTrack, asyncio.CancelledError):
            raise
        except MoqtError:
            self._ended(session, None)
            raise
        else:
            self._ended(session, None if subscription.done is None else subscription.done.status)
        finally:
            self._established.pop(session, None)
            if filling is not None:
                filling.cut()

    def _ended(self, session: Session, status: int | None) -> None:
        self._established.pop(session, None)
        if status == DoneCode.MALFORMED_TRACK:  # Nobody knows which of what is here was right.
            self._spoil("a publisher has ended it as malformed")
        else:
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
        if self.track.watched:
            self._steer()

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

    # What subscribers ask of publishers.

    def _steer(self) -> None:
        """Pause the publishers when all subscribers are paused, or let them go on (moqt 15 #11)."""
        if self._steering is None and self._relay.closed is False:
            self._steering = asyncio.create_task(self._pause_or_resume(), name=f"pause of {self.name}")

    async def _pause_or_resume(self) -> None:
        track = self.track
        failed: set[Subscription] = set()
        try:
            while True:
                # Without subscribers the subscription is kept warm, if it is ours to end.
                forward = not track.paused or not (track.watched or self._published)
                late = {one for one in self._established.values() if one.forward != forward} - failed
                if not late:
                    return
                for update in [self._update(one, forward=forward) for one in late]:
                    await update
                failed |= {one for one in late if one.forward != forward}
                for subscription in late - failed:
                    track.saw(subscription.largest)
                if forward:
                    self._recover()
        finally:
            self._steering = None

    def _update(self, subscription: Subscription, **changes: Any) -> asyncio.Task[None]:
        """Ask a publisher for a change. One that refuses ends its subscription (moqt 4.2)."""

        async def update() -> None:
            try:
                await subscription.update(**changes)
            except MoqtError as error:
                logger.info("%s: %s", self.name, printable(str(error)))

        return self._relay.spawn(update(), f"update of {self.name}")

    def _request_group(self, group: int) -> None:
        """Pass a NEW_GROUP_REQUEST on, unless it is of no use, or was made already (moqt 5.3)."""
        track = self.track
        newest = -1 if track.largest is None else track.largest.group
        if get(track.properties, PropertyType.DYNAMIC_GROUPS) != 1 or 0 < group <= newest:
            return
        wanted = group or newest + 1
        if wanted <= self._group_request and newest < self._group_request:
            return
        self._group_request = wanted
        for subscription in self._established.values():
            self._update(subscription, new_group=group)

    def _give_up(self) -> None:
        self._grace = None
        self._broken = False
        self.track.catch_up()
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
            reached: Location | None = None
            evicted = self._relay.cache.evicted
            while track.watched:
                gap = track.live_gap()
                if gap is None and not track.torn:
                    break
                if gap is None:
                    await track.changes()
                    continue
                hole = self._holes.fill(track, *gap, GroupOrder.ASCENDING)
                while not hole.done:
                    hole.ahead = 0  # They are used when all is here.
                    await track.changes()
                # Nobody has it, or it has come before and did not stay: it is more than the cache holds.
                seen = reached is not None and gap[0] <= reached
                if gap[0] in hole.unknown or (seen and self._relay.cache.evicted > evicted):
                    if not self._broken:
                        track.lose(*gap)
                    break
                reached = gap[1]
        finally:
            self._recovery = None
            if not self._broken:  # Else the publisher was lost again: whoever comes next has it.
                track.catch_up()
