"""Serves Tracks to one session: SUBSCRIBE, fill, FETCH, TRACK_STATUS and the namespaces (moqt 6 to 12)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from moqt.errors import DoneCode, RequestCode, RequestRefused, ResetCode, StreamReset, StreamStopped
from moqt.filters import (
    MAX_VARINT,
    GroupOrder,
    Location,
    LocationFilter,
    RangeFilter,
    check_range_filters,
    matches,
)
from moqt.names import FullTrackName, TrackNamespace, is_prefix
from moqt.quic.api import Buffer
from moqt.requests import RequestStream
from moqt.scheduler import Outgoing, Urgency
from moqt.track import StoredObject, Track, TrackWatcher
from moqt.wire import (
    Fetch,
    FetchEncoder,
    FetchOk,
    Namespace,
    NamespaceDone,
    ObjectStatus,
    Parameters,
    PublishDone,
    RequestError,
    RequestOk,
    RequestUpdate,
    SubgroupEncoder,
    SubgroupHeader,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
    decode_properties,
)

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = ["Publishing", "request_error"]

logger = logging.getLogger(__name__)

_LAST = Location(MAX_VARINT, MAX_VARINT)


def request_error(refusal: RequestRefused, retry_after: float) -> RequestError:
    """The REQUEST_ERROR for a refusal; only an overload invites to retry, after `retry_after` seconds (moqt
    4.2).
    """
    retry = int(retry_after * 1000) + 1 if refusal.code is RequestCode.EXCESSIVE_LOAD else 0
    return RequestError(refusal.code, retry, refusal.reason, None)


def _rank(order: GroupOrder, group: int) -> int:
    return group if order is GroupOrder.ASCENDING else MAX_VARINT - group


def _passes(item: StoredObject, filters: tuple[RangeFilter, ...]) -> bool:
    return not filters or matches(
        filters,
        subgroup=item.subgroup,
        object_id=item.location.object,
        priority=item.priority,
        properties=decode_properties(item.properties),
    )


def _fetch_source(
    request_id: int,
    order: GroupOrder,
    items: Iterable[StoredObject],
    filters: tuple[RangeFilter, ...],
    urgency: Callable[[StoredObject], Urgency],
) -> Iterator[tuple[Urgency | None, tuple[Buffer, ...]]]:
    """The bytes of a fetch or fill stream, Object by Object (moqt 12.4)."""
    encoder = FetchEncoder(request_id, order)
    yield None, (encoder.header(),)
    for item in items:
        if _passes(item, filters):
            header = encoder.object(
                item.location,
                item.size,
                subgroup=item.subgroup,
                priority=item.priority,
                properties=item.properties,
            )
            yield urgency(item), (header, *item.payload)


class _Served(TrackWatcher):
    """One subscription of the peer."""

    def __init__(
        self, publishing: Publishing, stream: RequestStream, message: Subscribe, track: Track, alias: int
    ) -> None:
        parameters = message.parameters
        self.publishing = publishing
        self.request = stream
        self.track = track
        self.alias = alias
        self.forward = parameters.forward is not False
        self.priority = 128 if parameters.subscriber_priority is None else parameters.subscriber_priority
        self.order = parameters.group_order or track.order
        self.filters = parameters.range_filters
        self.filter = parameters.location_filter or LocationFilter.none()
        self.start, self.end = Location(0, 0), _LAST
        self._select(self.filter)
        self.stream_count = 0
        self.over = asyncio.Event()
        self._streams: dict[tuple[int, int], tuple[Outgoing, SubgroupEncoder]] = {}
        self._fills: set[Outgoing] = set()
        self._sending: set[Outgoing] = set()
        self._refused: set[tuple[int, int]] = set()
        self._ending: DoneCode | None = None
        self._drained = asyncio.Event()

    # What the Track tells.

    def on_object(self, item: StoredObject) -> None:
        key = (item.location.group, item.subgroup)
        if (
            not self.start <= item.location <= self.end
            or key in self._refused
            or not _passes(item, self.filters)
        ):
            return
        if not self.forward:
            # moqt 12.6: a stream from which an Object was left out must not end with FIN.
            self._reset(key, ResetCode.CANCELLED)
            return
        outgoing, encoder = self._streams.get(key) or self._open(item)
        header = encoder.object(
            item.location.object, item.size, status=item.status, properties=item.properties
        )
        fin = item.status is not ObjectStatus.NORMAL
        self.publishing.scheduler.push(outgoing, header, *item.payload, fin=fin)
        if item.status is ObjectStatus.END_OF_GROUP:
            self._finish_group(item.location.group)

    def on_removed(self, code: DoneCode) -> None:
        if self._ending is None:
            self._ending = code
            self.publishing.session.spawn(self._finish(), "PUBLISH_DONE")

    def _open(self, item: StoredObject) -> tuple[Outgoing, SubgroupEncoder]:
        group = item.location.group
        key = (group, item.subgroup)
        header = SubgroupHeader(
            self.alias,
            group,
            item.subgroup,
            item.priority,
            end_of_group=item.status is not ObjectStatus.END_OF_TRACK and self._holds_group_end(group),
            first_object=item.status is ObjectStatus.NORMAL and self.track.starts_subgroup(item),
            has_properties=True,
        )
        encoder = SubgroupEncoder(header)
        urgency = (self.priority, item.priority, _rank(self.order, group), 1)
        outgoing = Outgoing(urgency, on_end=lambda code: self._stream_ended(key, outgoing, code))
        self._sending.add(outgoing)
        self._streams[key] = outgoing, encoder
        self.publishing.scheduler.push(outgoing, encoder.header())
        return outgoing, encoder

    def _holds_group_end(self, group: int) -> bool:
        """Whether the stream of this Group, if it ends with FIN, ends with the Group's last Object (moqt
        12.2).
        """
        return self.track.one_subgroup and not self.filters and self.end >= Location(group, MAX_VARINT)

    def _finish_group(self, group: int) -> None:
        for key in [key for key in self._streams if key[0] == group]:
            self.publishing.scheduler.push(self._streams[key][0], fin=True)

    def _stream_ended(self, key: tuple[int, int], outgoing: Outgoing, code: int | None) -> None:
        current = self._streams.get(key)
        if current is not None and current[0] is outgoing:
            del self._streams[key]
            if code is not None and outgoing.stream is not None and outgoing.stream.stopped is not None:
                self._refused.add(key)  # moqt 12.6: a Subgroup that the peer stopped is not opened again.
        self._ended(outgoing)

    def _ended(self, outgoing: Outgoing) -> None:
        self._sending.discard(outgoing)
        self._fills.discard(outgoing)
        self.stream_count += outgoing.opened
        if not self._sending:
            self._drained.set()

    def _reset(self, key: tuple[int, int], code: ResetCode) -> None:
        current = self._streams.pop(key, None)
        if current is not None:
            self.publishing.scheduler.reset(current[0], code)

    # What the peer asks.

    def _select(self, location_filter: LocationFilter) -> None:
        self.filter = location_filter
        self.start = location_filter.start(self.track.largest)
        self.end = location_filter.end or _LAST

    def fill(self, request_id: int, parameters: Parameters) -> None:
        """Open the fill stream that a SUBSCRIBE or REQUEST_UPDATE asks for, if there is anything in its range
        (moqt 7.2).
        """
        largest = self.track.largest
        if not self.forward or largest is None:
            return
        location_filter = parameters.location_filter or self.filter
        start = location_filter.start(largest)
        end = min(location_filter.end or _LAST, largest)
        if start > end:
            return
        order = parameters.group_order or self.order
        priority = self.priority if parameters.subscriber_priority is None else parameters.subscriber_priority
        kinds = {known.kind for known in parameters.range_filters}
        filters = parameters.range_filters + tuple(known for known in self.filters if known.kind not in kinds)

        def urgency(item: StoredObject) -> Urgency:
            # moqt 14 step 3: a fill in the other order yields to the subscription; step 4: in one Group the
            # fill goes first.
            rank = _rank(order, item.location.group) if order is self.order else MAX_VARINT + 1
            return priority, item.priority, rank, 0

        source = _fetch_source(request_id, order, self.track.objects(start, end, order), filters, urgency)
        outgoing = Outgoing((priority, 0, 0, 0), source=source, on_end=lambda _code: self._ended(outgoing))
        self._fills.add(outgoing)
        self._sending.add(outgoing)
        self.publishing.scheduler.start(outgoing)

    def update(self, message: RequestUpdate) -> None:
        """Apply a REQUEST_UPDATE (moqt 6.2, 9). Raises RequestRefused."""
        parameters = message.parameters
        kinds = {known.kind for known in parameters.range_filters}
        filters = tuple(known for known in self.filters if known.kind not in kinds) + tuple(
            known for known in parameters.range_filters if not known.removes
        )
        limits = self.publishing.session.limits
        check_range_filters(parameters.range_filters, limit=limits.max_filter_ranges)
        check_range_filters(filters, limit=limits.max_filter_ranges)
        if parameters.fill is not None:
            check_range_filters(parameters.fill.range_filters, limit=limits.max_filter_ranges)
            if len(self._fills) >= limits.max_fills:
                raise RequestRefused(
                    RequestCode.EXCESSIVE_LOAD, f"{limits.max_fills} fills of this subscription are running"
                )
        self.filters = filters
        if parameters.location_filter is not None:
            self._select(parameters.location_filter)
            for key in [key for key in self._streams if not self.start.group <= key[0] <= self.end.group]:
                self._reset(key, ResetCode.CANCELLED)
        if parameters.forward is not None:
            if parameters.forward and not self.forward:
                self._refused.clear()  # moqt 12.6: resuming may open stopped Subgroups again.
            self.forward = parameters.forward
        if parameters.subscriber_priority is not None:
            self.priority = parameters.subscriber_priority
            for outgoing in self._sending - self._fills:
                self.publishing.scheduler.reprioritise(outgoing, (self.priority, *outgoing.urgency[1:]))
        if parameters.fill is not None:
            self.fill(message.request_id, parameters.fill)

    def cancel(self) -> None:
        """The subscription is over: nothing more is sent, and all its streams are reset (moqt 3.4)."""
        self.track.unwatch(self)
        self._streams.clear()
        for outgoing in list(self._sending):
            self.publishing.scheduler.reset(outgoing, ResetCode.CANCELLED)
        self.over.set()

    async def _finish(self) -> None:
        """Send PUBLISH_DONE when all streams of the subscription are closed (moqt 4.2)."""
        assert self._ending is not None
        self.track.unwatch(self)
        try:
            if self._streams:
                # These Groups have not ended, so their streams can't end with FIN; but what was published
                # shall leave.
                await self.publishing.scheduler.flush()
                for key in list(self._streams):
                    self._reset(key, ResetCode.GOING_AWAY)
            if self._sending:
                self._drained.clear()
                await self._drained.wait()
            if not self.over.is_set():
                await self.request.send(PublishDone(self._ending, self.stream_count, ""), fin=True)
        except StreamStopped:
            pass  # The subscriber left meanwhile.
        finally:
            self.over.set()


class Publishing:
    """Answers the requests of one session's peer for what `session.tracks` offers."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.scheduler = session.scheduler
        self._next_alias = 0
        self._fetches = 0
        self._prefixes: list[TrackNamespace] = []
        self._subscriptions: set[_Served] = set()

    async def subscribe(self, stream: RequestStream, message: Subscribe) -> None:
        """Serve a SUBSCRIBE until it ends."""
        parameters = message.parameters
        track = self._track(message.track)
        limit = self.session.limits.max_filter_ranges
        check_range_filters(parameters.range_filters, limit=limit)
        if parameters.fill is not None:
            check_range_filters(parameters.fill.range_filters, limit=limit)
        served = _Served(self, stream, message, track, self._next_alias)
        self._next_alias += 1
        self._subscriptions.add(served)
        # moqt 7.3: one snapshot of the Largest Object for the reply, the end of the fill and the start of the
        # subscription; nothing is published between these lines, since none of them waits.
        reply = SubscribeOk(
            served.alias, Parameters(largest=track.largest), self._properties(track, parameters)
        )
        track.watch(served)
        if parameters.fill is not None:
            served.fill(message.request_id, parameters.fill)
        try:
            await stream.send(reply)
            await self.follow(
                stream,
                served.over,
                lambda update: self._update(served, update),
                fail=lambda: served.on_removed(DoneCode.UPDATE_FAILED),  # moqt 4.2
            )
        finally:
            self._subscriptions.discard(served)
            served.cancel()

    async def _update(self, served: _Served, message: RequestUpdate) -> None:
        served.update(message)
        if not served.over.is_set():
            await served.request.send(RequestOk(Parameters(largest=served.track.largest)))

    async def fetch(self, stream: RequestStream, message: Fetch) -> None:
        """Serve a FETCH until it ends (moqt 6.3, 10)."""
        limits = self.session.limits
        if self._fetches >= limits.max_fetches:  # kvcs 10
            raise RequestRefused(
                RequestCode.EXCESSIVE_LOAD, f"{limits.max_fetches} fetches are running already"
            )
        parameters = message.parameters
        track = self._track(message.track)
        check_range_filters(parameters.range_filters, limit=limits.max_filter_ranges)
        location_filter = parameters.location_filter or LocationFilter.none()
        start = location_filter.start(track.largest)
        if track.largest is None or start > track.largest:
            raise RequestRefused(
                RequestCode.INVALID_RANGE, "nothing is published from the start of the range on"
            )
        end = min(location_filter.end or _LAST, track.largest)
        if location_filter.end is not None and location_filter.end < start:  # moqt 25 #8
            raise RequestRefused(RequestCode.INVALID_RANGE, "the range ends before it starts")
        order = parameters.group_order or GroupOrder.ASCENDING
        priority = 128 if parameters.subscriber_priority is None else parameters.subscriber_priority

        def urgency(item: StoredObject) -> Urgency:
            return priority, item.priority, _rank(order, item.location.group), 0

        over = asyncio.Event()
        source = _fetch_source(
            message.request_id, order, track.objects(start, end, order), parameters.range_filters, urgency
        )
        outgoing = Outgoing((priority, 0, 0, 0), source=source, on_end=lambda _code: over.set())
        last = track.last_in(start, end) or start
        reply = FetchOk(
            track.ended is not None and last == track.largest,
            last,
            Parameters(),
            self._properties(track, parameters),
        )

        async def update(message: RequestUpdate) -> None:
            nonlocal priority
            if message.parameters.subscriber_priority is not None:
                priority = message.parameters.subscriber_priority
                self.scheduler.reprioritise(outgoing, (priority, *outgoing.urgency[1:]))
            await stream.send(RequestOk())

        self._fetches += 1
        self.scheduler.start(outgoing)
        try:
            await stream.send(reply)
            await self.follow(stream, over, update, fail=over.set)
            await stream.finish()
        finally:
            self._fetches -= 1
            self.scheduler.reset(outgoing, ResetCode.CANCELLED)

    async def track_status(self, stream: RequestStream, message: TrackStatus) -> None:
        """Answer a TRACK_STATUS."""
        track = self._track(message.track)
        reply = RequestOk(Parameters(largest=track.largest), self._properties(track, message.parameters))
        await stream.send(reply, fin=True)

    async def subscribe_namespace(self, stream: RequestStream, message: SubscribeNamespace) -> None:
        """Serve a SUBSCRIBE_NAMESPACE until it ends: NAMESPACE and NAMESPACE_DONE as namespaces come and go
        (moqt 11).
        """
        tracks = self.session.tracks
        prefix = message.prefix
        self._claim(prefix)
        sent: set[TrackNamespace] = set()
        over = asyncio.Event()
        changed = asyncio.Event()
        changed.set()

        async def update(message: RequestUpdate) -> None:
            nonlocal prefix
            wanted = message.parameters.prefix
            if wanted is not None and wanted != prefix:
                self._prefixes.remove(prefix)
                try:
                    self._claim(wanted)
                except RequestRefused:
                    self._prefixes.append(prefix)
                    raise
                prefix = wanted
                sent.clear()
                changed.set()
            await stream.send(RequestOk())

        async def tell() -> None:
            while True:
                await changed.wait()
                changed.clear()
                present = {known for known in tracks.namespaces if is_prefix(prefix, known)}
                for namespace in sorted(sent - present):
                    sent.discard(namespace)
                    await stream.send(NamespaceDone(namespace[len(prefix) :]))
                for namespace in tracks.namespaces:
                    if namespace in present and namespace not in sent:
                        sent.add(namespace)
                        await stream.send(Namespace(namespace[len(prefix) :]))

        def on_change(_namespace: TrackNamespace, _present: bool) -> None:
            changed.set()

        tracks.watch(on_change)
        teller = None
        try:
            await stream.send(RequestOk())
            teller = self.session.spawn(tell(), "NAMESPACE")
            await self.follow(stream, over, update, fail=over.set)
            await stream.finish()
        finally:
            tracks.unwatch(on_change)
            self._prefixes.remove(prefix)
            if teller is not None:
                teller.cancel()

    async def finish(self, code: DoneCode) -> None:
        """End all subscriptions of this session with PUBLISH_DONE and wait until it is sent."""
        subscriptions = list(self._subscriptions)
        for served in subscriptions:
            served.on_removed(code)
        for served in subscriptions:
            await served.over.wait()

    def _track(self, name: FullTrackName) -> Track:
        track = self.session.tracks.get(name)
        if track is None:
            raise RequestRefused(RequestCode.DOES_NOT_EXIST, "no such Track here")
        return track

    def _properties(self, track: Track, parameters: Parameters) -> tuple[tuple[int, int | bytes], ...]:
        return () if parameters.include_properties is False else track.properties

    def _claim(self, prefix: TrackNamespace) -> None:
        if any(is_prefix(prefix, known) or is_prefix(known, prefix) for known in self._prefixes):
            raise RequestRefused(
                RequestCode.PREFIX_OVERLAP, "the prefix overlaps with another one of this session"
            )
        self._prefixes.append(prefix)

    async def follow(
        self,
        stream: RequestStream,
        over: asyncio.Event,
        update: Callable[[RequestUpdate], Awaitable[None]],
        *,
        fail: Callable[[], None],
    ) -> None:
        """Handle what the requester says until it cancels or `over` is set; `fail` is called when an update
        is refused.
        """

        def on_stopped(_code: int) -> None:  # STOP_SENDING alone is a cancel as well (moqt 9).
            stream.cancel()
            over.set()

        async def listen() -> None:
            try:
                while (message := await stream.receive()) is not None:
                    if isinstance(message, RequestUpdate):
                        try:
                            self.session.tokens_of(message.parameters)
                            await update(message)
                        except RequestRefused as refusal:
                            await stream.send(request_error(refusal, self.session.limits.retry_after))
                            fail()
            except (StreamReset, StreamStopped):
                stream.cancel()
                over.set()

        stream.stream.on_stopped = on_stopped
        listener = self.session.spawn(listen(), "REQUEST_UPDATE")
        try:
            await over.wait()
        finally:
            listener.cancel()
