"""Serves Tracks to one session: the requests of its peer (moqt 6 to 12)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from moqt.authorization import Authority
from moqt.delivery import DEFAULT_PRIORITY, Delivery, rank
from moqt.errors import DoneCode, RequestCode, RequestRefused, ResetCode, StreamReset, StreamStopped
from moqt.fetching import LAST, Puller, seconds_of, successor
from moqt.filters import FilterType, GroupOrder, Location, LocationFilter, check_range_filters
from moqt.names import FullTrackName, TrackNamespace
from moqt.namespaces import serve_namespaces
from moqt.requests import RequestStream
from moqt.scheduler import Urgency
from moqt.track import StoredObject, Track, Wanted
from moqt.wire import (
    Fetch,
    FetchOk,
    Parameters,
    Properties,
    RequestError,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
)

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = ["Publishing", "request_error"]

T = TypeVar("T")


def request_error(refusal: RequestRefused, retry_after: float) -> RequestError:
    """The REQUEST_ERROR for a refusal; only an overload invites to retry, after `retry_after` seconds (moqt
    4.2).
    """
    retry = int(retry_after * 1000) + 1 if refusal.code is RequestCode.EXCESSIVE_LOAD else 0
    return RequestError(refusal.code, retry, refusal.reason, refusal.redirect)


class Publishing:
    """Answers the requests of one session's peer for what `session.tracks` offers.

    Its methods serve one request each, until that request has ended.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.prefixes: list[TrackNamespace] = []
        """Those of the SUBSCRIBE_NAMESPACEs that are served."""
        self.track_prefixes: list[TrackNamespace] = []
        """The same of the SUBSCRIBE_TRACKS."""
        self._next_alias = 0
        self._fetches = 0
        self._fetching: set[asyncio.Task[None]] = set()
        self._subscriptions: dict[Delivery, asyncio.Task[None]] = {}
        self._finding: set[asyncio.Task[None]] = set()
        """Those that serve a request whose Track is looked up."""

    @property
    def subscriptions(self) -> int:
        """How many are served."""
        return len(self._subscriptions)

    @property
    def fetches(self) -> int:
        """How many are served."""
        return self._fetches

    def shed(self) -> bool:
        """End the subscription that is furthest behind with TOO_FAR_BEHIND; False if none is."""
        worst = max(self._subscriptions, key=lambda delivery: delivery.behind, default=None)
        if worst is None or not worst.behind:
            return False
        worst.fall_behind()
        return True

    async def subscribe(self, stream: RequestStream, message: Subscribe, authority: Authority) -> None:
        """Serve a SUBSCRIBE. Raises RequestRefused before the reply."""
        parameters = message.parameters
        limit = self.session.limits.max_filter_ranges
        check_range_filters(parameters.range_filters, limit=limit)
        if parameters.fill is not None:
            check_range_filters(parameters.fill.range_filters, limit=limit)
        wanted = None
        if parameters.fill is not None and parameters.forward is not False:
            wanted = Wanted(
                parameters.fill.location_filter or parameters.location_filter or LocationFilter.none(),
                parameters.fill.group_order or parameters.group_order or GroupOrder.ASCENDING,
                live=True,
            )
        track = await self._find(stream, message.track, parameters, wanted)
        authority.check()
        delivery = Delivery(self.session, stream, parameters, track, self.new_alias())
        # moqt 7.3: one snapshot of the Largest Object for the reply, the end of the fill and the start of the
        # subscription; nothing is published between these lines, since none of them waits.
        reply = SubscribeOk(
            delivery.alias,
            Parameters(expires=authority.expires, largest=track.largest),
            _properties(track, parameters),
        )
        track.watch(delivery)
        if parameters.fill is not None:
            delivery.fill(message.request_id, parameters.fill)
        if parameters.new_group_request is not None:
            track.request_group(parameters.new_group_request)

        authority.when_lost(delivery.revoke)
        try:
            await stream.send(reply)
            await self.serve_delivery(stream, delivery, authority)
        finally:
            delivery.cancel()

    def new_alias(self) -> int:
        """A Track Alias that was not used yet."""
        self._next_alias += 1
        return self._next_alias - 1

    async def serve_delivery(self, stream: RequestStream, delivery: Delivery, authority: Authority) -> None:
        """Answer the updates of a subscription until it is over."""

        async def update(message: RequestUpdate) -> None:
            delivery.update(message)
            answer = RequestOk(Parameters(expires=authority.expires, largest=delivery.track.largest))
            if not stream.over:
                await stream.send(answer)

        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._subscriptions[delivery] = task
        try:
            await self.follow(
                stream,
                authority,
                delivery.over,
                update,
                fail=lambda: delivery.on_removed(DoneCode.UPDATE_FAILED),  # moqt 4.2
            )
        finally:
            delivery.cancel()
            del self._subscriptions[delivery]

    async def fetch(self, stream: RequestStream, message: Fetch, authority: Authority) -> None:
        """Serve a FETCH (moqt 6.3, 10). Raises RequestRefused before the reply."""
        limits = self.session.limits
        if self._fetches >= limits.max_fetches:  # kvcs 10
            raise RequestRefused(
                RequestCode.EXCESSIVE_LOAD, f"{limits.max_fetches} fetches are running already"
            )
        parameters = message.parameters
        check_range_filters(parameters.range_filters, limit=limits.max_filter_ranges)
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._fetches += 1
        self._fetching.add(task)
        try:
            wanted = Wanted(
                parameters.location_filter or LocationFilter.none(),
                parameters.group_order or GroupOrder.ASCENDING,
                live=False,
            )
            track = await self._find(stream, message.track, parameters, wanted)
            authority.check()
            track.readers += 1
            try:
                await self._fetch(stream, message, track, authority)
            finally:
                track.readers -= 1
        finally:
            self._fetches -= 1
            self._fetching.discard(task)

    async def _fetch(self, stream: RequestStream, message: Fetch, track: Track, authority: Authority) -> None:
        parameters = message.parameters
        location_filter = parameters.location_filter or LocationFilter.none()
        start, end = _fetch_range(track, location_filter)
        order = parameters.group_order or GroupOrder.ASCENDING
        priority = (
            DEFAULT_PRIORITY if parameters.subscriber_priority is None else parameters.subscriber_priority
        )

        def urgency(item: StoredObject) -> Urgency:
            return priority, item.priority, rank(order, item.location.group), 0

        over = asyncio.Event()
        puller = Puller(
            track,
            start,
            end,
            order,
            parameters.range_filters,
            urgency,
            patience=seconds_of(parameters.fill_timeout),
        )
        outgoing = puller.outgoing(
            self.session.scheduler, message.request_id, (priority, 0, 0, 0), lambda _code: over.set()
        )

        async def update(message: RequestUpdate) -> None:
            nonlocal priority
            if message.parameters.subscriber_priority is not None:
                priority = message.parameters.subscriber_priority
                self.session.scheduler.reprioritise(outgoing, (priority, *outgoing.urgency[1:]))
            await stream.send(RequestOk(Parameters(expires=authority.expires)))

        self.session.scheduler.start(outgoing)
        authority.when_lost(lambda denied: self.session.scheduler.reset(outgoing, denied.reset_code))
        try:
            # moqt 25 #7: without an End Object in the filter, the last Object that is covered.
            told = end
            if location_filter.type is not FilterType.ABSOLUTE_RANGE:
                told = await _last_in(track, start, end)
            if told == track.largest and track.ended is None:
                # A cache may be about to learn whether that is the end of the Track.
                while (hole := track.hole_at(told)) is not None and not hole.replied:
                    await _change(track)
            authority.check()
            reply = FetchOk(
                # What lies between may still be on its way to a cache that knows of the end.
                track.ended is not None
                and told == track.largest
                and track.gap(successor(told), track.ended) is None,
                told,
                Parameters(),
                _properties(track, parameters),
            )
            await stream.send(reply)
            await self.follow(stream, authority, over, update, fail=over.set)
        finally:
            self.session.scheduler.reset(outgoing, ResetCode.CANCELLED)

    async def track_status(self, stream: RequestStream, message: TrackStatus, authority: Authority) -> None:
        """Answer a TRACK_STATUS."""
        nothing = Wanted(LocationFilter.next_object(), GroupOrder.ASCENDING, live=False)
        track = await self._find(stream, message.track, message.parameters, nothing)
        authority.check()
        reply = RequestOk(Parameters(largest=track.largest), _properties(track, message.parameters))
        await stream.send(reply, fin=True)

    async def subscribe_namespace(
        self, stream: RequestStream, message: SubscribeNamespace, authority: Authority
    ) -> None:
        """Serve a SUBSCRIBE_NAMESPACE (moqt 11). Raises RequestRefused before the reply."""
        await serve_namespaces(self.session, stream, message, authority)

    async def follow(
        self,
        stream: RequestStream,
        authority: Authority,
        over: asyncio.Event,
        update: Callable[[RequestUpdate], Awaitable[None]],
        *,
        fail: Callable[[], None],
    ) -> None:
        """Handle what the requester says until it cancels or `over` is set, and FIN then; `fail` is called
        when an update is refused, by `authority` or by `update`.
        """

        def on_stopped(_code: int) -> None:  # STOP_SENDING alone is a cancel as well (moqt 9).
            stream.cancel()
            over.set()

        stream.stream.on_stopped = on_stopped
        ending = asyncio.ensure_future(over.wait())

        async def take(message: RequestUpdate) -> None:
            parameters = message.parameters
            tokens = self.session.gate.tokens_of(parameters)
            allowed = await _unless(ending, authority.update(tokens, namespace=parameters.prefix))
            if allowed is not None and not stream.over:
                await update(message)

        try:
            while not over.is_set():
                message = await _unless(ending, stream.receive())
                if message is None:  # No cancel: the requester has nothing more to say (moqt 3.4).
                    await over.wait()
                elif isinstance(message, RequestUpdate):
                    try:
                        await take(message)
                    except RequestRefused as refusal:
                        if not stream.over:
                            await stream.send(request_error(refusal, self.session.limits.retry_after))
                            fail()
            await stream.finish()
        except (StreamReset, StreamStopped):
            stream.cancel()
        finally:
            ending.cancel()
            over.set()

    async def idle(self) -> None:
        """Wait until no subscription and no fetch is served, or about to be."""
        while serving := {*self._subscriptions.values(), *self._fetching, *self._finding}:
            await asyncio.wait(serving)

    async def finish(self, code: DoneCode) -> None:
        """End all subscriptions of this session with PUBLISH_DONE, and wait until each subscriber has left:
        it does when it has seen all. Fetches run to their end.
        """
        for delivery in self._subscriptions:
            delivery.on_removed(code)
        if self._subscriptions or self._fetching:
            await asyncio.wait({*self._subscriptions.values(), *self._fetching})

    async def _find(
        self, stream: RequestStream, name: FullTrackName, parameters: Parameters, wanted: Wanted | None
    ) -> Track:
        """The Track that is asked for. Raises RequestRefused, StreamStopped when the requester leaves."""
        tracks = self.session.tracks
        track = tracks.get(name)
        if track is not None and track.authoritative:
            return track
        asked = seconds_of(parameters.rendezvous_timeout) or 0.0
        rendezvous = min(asked, self.session.limits.max_rendezvous)
        finding = asyncio.ensure_future(tracks.find(name, self.session, rendezvous=rendezvous, wanted=wanted))

        def on_stopped(_code: int) -> None:
            finding.cancel()

        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._finding.add(task)
        stream.stream.on_stopped = on_stopped
        try:
            if stream.stream.stopped is not None:
                raise StreamStopped(stream.stream.stopped)
            return await finding
        except asyncio.CancelledError:
            if stream.stream.stopped is None:
                raise
            raise StreamStopped(stream.stream.stopped) from None
        finally:
            finding.cancel()
            self._finding.discard(task)
            stream.stream.on_stopped = None


async def _unless(ending: asyncio.Future[Any], waiting: Coroutine[Any, Any, T]) -> T | None:
    """What `waiting` returns; None when `ending` is done before. An answer that is on its way is never
    interrupted, since only such a wait is.
    """
    task = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait((task, ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    return None if task.cancelled() else task.result()


def _fetch_range(track: Track, location_filter: LocationFilter) -> tuple[Location, Location]:
    """The first and last Location of a FETCH (moqt 6.3). Raises RequestRefused."""
    start = location_filter.start(track.largest)
    if track.largest is None or start > track.largest:
        raise RequestRefused(RequestCode.INVALID_RANGE, "nothing is published from the start of the range on")
    end = location_filter.end or LAST
    if end < start:  # moqt 25 #8
        raise RequestRefused(RequestCode.INVALID_RANGE, "the range ends before it starts")
    return start, min(end, track.largest)


async def _last_in(track: Track, start: Location, end: Location) -> Location:
    """The Location of the last Object from `start` to `end`, which a cache may have to find out (moqt 10: no
    FETCH_OK before). Raises RequestRefused.
    """
    if end == track.largest:
        return end
    while True:
        last = track.last_in(start, end)
        gap = track.gap(start if last is None else successor(last), end)
        if gap is None:
            return last or start
        hole = track.fill_hole(*gap, GroupOrder.ASCENDING)
        while not hole.done:
            await _change(track)
        if track.fault or (gap[0] in hole.unknown and last is None):
            raise hole.refusal or RequestRefused(
                RequestCode.INTERNAL_ERROR, "the end of the range can't be found out upstream"
            )
        if gap[0] in hole.unknown:
            return end  # What lies there is said to be unknown.


async def _change(track: Track) -> None:
    changed = asyncio.Event()
    track.wait(changed.set)
    await changed.wait()


def _properties(track: Track, parameters: Parameters) -> Properties:
    return () if parameters.include_properties is False else track.properties
