"""Asks the peer of one session for Tracks: subscriptions, fills, fetches and namespaces (moqt 6 to 12)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moqt.errors import (
    ProtocolError,
    RequestRejected,
    ResetCode,
    SessionCode,
    StreamReset,
    StreamStopped,
    UsageError,
)
from moqt.filters import MAX_VARINT, GroupOrder, Location, LocationFilter, RangeFilter
from moqt.ledger import Ledger, MalformedTrack
from moqt.names import FullTrackName, TrackNamespace, check_namespace
from moqt.quic.api import ConnectionClosed, Stream
from moqt.requests import RequestStream
from moqt.wire import (
    UNKNOWN_STREAM_COUNT,
    DataStreamDecoder,
    EndOfRange,
    Event,
    FetchHeader,
    FetchOk,
    Message,
    Namespace,
    NamespaceDone,
    ObjectHeader,
    ObjectStatus,
    PaddingHeader,
    Parameters,
    PayloadChunk,
    Properties,
    PropertyType,
    PublishDone,
    PublishStateNotify,
    RangeStatus,
    RequestError,
    RequestOk,
    RequestUpdate,
    SubgroupHeader,
    SubscribeOk,
    get,
)

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = [
    "Announcement",
    "FetchStream",
    "Fill",
    "Item",
    "NamespaceEvent",
    "NamespaceWatch",
    "OwnRequest",
    "RangeNotice",
    "ReceivedObject",
    "StreamEnd",
    "Subscribing",
    "Subscription",
    "TrackStatusResult",
]

_LAST = Location(MAX_VARINT, MAX_VARINT)
_DEFAULT_PRIORITY = 128
_RETIRED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """What FILL_PARAMETERS ask for: Objects that exist already (moqt 7). `timeout_ms` bounds a relay's search
    for them.
    """

    filter: LocationFilter
    order: GroupOrder = GroupOrder.ASCENDING
    range_filters: tuple[RangeFilter, ...] = ()
    priority: int | None = None
    timeout_ms: int | None = None

    def parameters(self) -> Parameters:
        """The nested parameters. The Group order is always said, since the reader needs it (moqt 7.2 #16)."""
        return Parameters(
            location_filter=self.filter,
            group_order=self.order,
            range_filters=self.range_filters,
            subscriber_priority=self.priority,
            fill_timeout=self.timeout_ms,
        )


@dataclass(frozen=True, slots=True)
class ReceivedObject:
    """An Object as it came. `priority` is the effective Publisher Priority; `fill`: it came on a fill or
    fetch stream.
    """

    location: Location
    payload: bytearray
    subgroup: int
    priority: int
    status: ObjectStatus
    properties: Properties
    fill: bool


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """A data stream has ended: by FIN (`code` None), or broken with `code`. `group` is None for a fill or
    fetch stream.
    """

    group: int | None
    fill: bool
    code: int | None


@dataclass(frozen=True, slots=True)
class RangeNotice:
    """On a fill or fetch stream: the Objects after the last one up to `end`, inclusive, are missing; `kind`
    says why.
    """

    kind: RangeStatus
    end: Location


Item = ReceivedObject | StreamEnd | RangeNotice


@dataclass(frozen=True, slots=True)
class NamespaceEvent:
    """A full namespace appeared (`present`) or went."""

    namespace: TrackNamespace
    present: bool


@dataclass(frozen=True, slots=True)
class TrackStatusResult:
    """What TRACK_STATUS tells: the Largest Object (None: nothing published yet) and the Track Properties."""

    largest: Location | None
    properties: Properties


class OwnRequest:
    """What all requests of ours have in common: the stream, the replies to updates, and how it ended."""

    def __init__(self, session: Session, stream: RequestStream) -> None:
        self.session = session
        self.request = stream
        self._updates: deque[asyncio.Future[Message]] = deque()
        self._error: Exception | None = None

    async def _update(self, parameters: Parameters, request_id: int) -> Message:
        """Send a REQUEST_UPDATE and return its REQUEST_OK. Raises RequestRejected, DeadlineExceeded and what
        ended the request.
        """
        self._check_alive()
        limit = self.session.peer_setup.max_request_updates
        if limit and len(self._updates) >= limit:
            raise UsageError(
                f"{limit} REQUEST_UPDATEs are unanswered, more the peer does not take; await them first"
            )
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._updates.append(future)
        await self.request.send(RequestUpdate(request_id, parameters))
        return await self.session.in_time(future, "the reply to a REQUEST_UPDATE")

    def _answer(self, message: RequestOk | RequestError) -> None:
        future = self._updates.popleft()
        if future.done():
            return
        if isinstance(message, RequestError):
            future.set_exception(rejected(message))
        else:
            future.set_result(message)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    async def follow(self) -> None:
        """Read the request stream to its end."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """The request has ended by `error`; the first one counts."""
        if self._error is None:
            self._error = error
        for future in self._updates:
            if not future.done():
                future.set_exception(self._error)
                future.exception()  # Whoever waits gets it; nobody has to.


def rejected(message: RequestError) -> RequestRejected:
    """The exception for a REQUEST_ERROR (moqt 4.2: Retry Interval is milliseconds plus one)."""
    retry = None if message.retry_interval == 0 else (message.retry_interval - 1) / 1000
    return RequestRejected(message.code, message.reason, retry, message.redirect)


class _Reception(OwnRequest):
    """Objects of one Track on their way to the application: a queue, bounded in bytes, which the data streams
    fill.
    """

    def __init__(self, session: Session, stream: RequestStream, track: FullTrackName) -> None:
        super().__init__(session, stream)
        self.track = track
        self.properties: Properties = ()
        self._ledger = Ledger(session.limits.max_known_objects)
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._finished = False
        self._closed = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        while not self._items:
            self._check_alive()
            if self._finished or self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        item = self._items.popleft()
        if isinstance(item, ReceivedObject):
            self._bytes -= len(item.payload)
            if self._bytes <= self.session.limits.receive_buffer:
                self._room.set()
        return item

    async def close(self) -> None:
        """Cancel what has not ended yet. Idempotent."""
        if not self._closed:
            self._closed = True
            self._items.clear()
            self._release()
            self.session.forget(self)
            if self._finished:
                with suppress(StreamStopped, ConnectionClosed):  # It is over on the other side too.
                    await self.request.finish()
            else:
                self.request.cancel()

    def fail(self, error: Exception) -> None:
        """End the iteration with `error`, after what was received before."""
        super().fail(error)
        self._release()

    def _release(self) -> None:
        self._wake.set()
        self._room.set()

    def _put(self, item: Item) -> None:
        self._items.append(item)
        if isinstance(item, ReceivedObject):
            self._bytes += len(item.payload)
            if self._bytes > self.session.limits.receive_buffer:
                self._room.clear()
        self._wake.set()

    @property
    def _over(self) -> bool:
        return self._closed or self._finished or self._error is not None

    def _wanted(self, location: Location, fill: bool, request_id: int) -> bool:
        raise NotImplementedError

    async def receive(
        self,
        stream: Stream,
        decoder: DataStreamDecoder,
        header: SubgroupHeader | FetchHeader,
        events: Iterator[Event],
    ) -> None:
        """Read a data stream of this reception to its end; `events` are those decoded behind the header
        already.
        """
        fill = isinstance(header, FetchHeader)
        request_id = header.request_id if isinstance(header, FetchHeader) else 0
        group = None if isinstance(header, FetchHeader) else header.group
        code: int | None = None
        last, filled = -1, 0
        buffer = bytearray()
        current: ObjectHeader | None = None
        try:
            while True:
                for event in events:
                    if type(event) is PayloadChunk:
                        size = len(event.data)
                        buffer[filled : filled + size] = event.data
                        filled += size
                        if event.last and current is not None:
                            await self._take(current, buffer, fill, request_id)
                    elif type(event) is ObjectHeader:
                        current, filled = event, 0
                        if event.status is ObjectStatus.NORMAL:
                            last = event.location.object
                        if event.size > self.session.limits.max_object_size:
                            stream.stop(ResetCode.EXCESSIVE_LOAD)
                            raise StreamReset(ResetCode.EXCESSIVE_LOAD)
                        buffer = bytearray(event.size)
                        if not event.size:
                            await self._take(current, buffer, fill, request_id)
                    elif type(event) is EndOfRange:
                        self._put(RangeNotice(event.kind, event.location))
                if self._over:
                    stream.stop(ResetCode.CANCELLED)
                    return
                data = await stream.read()
                if not data:
                    break
                events = decoder.feed(data)
            decoder.finish()
            if isinstance(header, SubgroupHeader) and header.end_of_group and last >= 0:
                self._ledger.end_group(header.group, max(last, self._ledger.largest_in(header.group)) + 1)
        except StreamReset as error:
            code = error.code
        except MalformedTrack as error:
            stream.stop(ResetCode.MALFORMED_TRACK)
            self.request.cancel(ResetCode.MALFORMED_TRACK)
            self.fail(error)
            return
        self._put(StreamEnd(group, fill, code))

    async def _take(self, header: ObjectHeader, payload: bytearray, fill: bool, request_id: int) -> None:
        priority = header.priority
        if priority is None:
            default = get(self.properties, PropertyType.DEFAULT_PUBLISHER_PRIORITY)
            priority = default if isinstance(default, int) else _DEFAULT_PRIORITY
        if not self._wanted(header.location, fill, request_id):
            return
        new = self._ledger.record(
            header.location,
            payload,
            subgroup=header.subgroup,
            priority=priority,
            status=header.status,
            properties=header.properties,
        )
        if new and not self._over:
            self._put(
                ReceivedObject(
                    header.location,
                    payload,
                    header.subgroup,
                    priority,
                    header.status,
                    header.properties,
                    fill,
                )
            )
        await self._room.wait()


class Subscription(_Reception):
    """A subscription to a Track: `async for` gives its Objects as they come, and tells when streams end.

    The iteration ends when the publisher has ended the subscription with PUBLISH_DONE and all its streams
    have come to their end; `done` is then set. It raises when the subscription or the session breaks. Leaving
    the `async with` block cancels.
    """

    def __init__(
        self, session: Session, stream: RequestStream, track: FullTrackName, location_filter: LocationFilter
    ) -> None:
        super().__init__(session, stream, track)
        self.alias = -1
        self.largest: Location | None = None
        self.expects_fill = False
        self.done: PublishDone | None = None
        self.fill_ids: dict[int, tuple[Location, Location]] = {}
        self._filter = location_filter
        self._start, self._end = Location(0, 0), _LAST
        self._streams_seen = 0
        self._reading = 0
        self._timer: asyncio.TimerHandle | None = None
        assert stream.request is not None
        self._replies = {stream.request.request_id: asyncio.Event()}

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def accepted(self, message: SubscribeOk, fill: Fill | None) -> None:
        """Take over what SUBSCRIBE_OK says."""
        assert self.request.request is not None
        self.alias = message.track_alias
        self.properties = message.properties
        self.largest = message.parameters.largest
        self._select(self._filter)
        self._expect(self.request.request.request_id, fill)
        self.expects_fill = self.request.request.request_id in self.fill_ids

    def _select(self, location_filter: LocationFilter) -> None:
        self._filter = location_filter
        self._start = location_filter.start(self.largest)
        self._end = location_filter.end or _LAST

    def _expect(self, request_id: int, fill: Fill | None) -> None:
        """Whether a fill stream will come (moqt 7.2 #8), and with which Objects."""
        if fill is not None and self.largest is not None:
            start = fill.filter.start(self.largest)
            end = min(fill.filter.end or _LAST, self.largest)
            if start <= end:
                self.fill_ids[request_id] = start, end
        if request_id in self._replies:
            self._replies.pop(request_id).set()

    async def replied(self, request_id: int) -> None:
        """Wait for the reply to the request with this ID, or the end of the subscription."""
        event = self._replies.get(request_id)
        if event is not None:
            await event.wait()

    def _wanted(self, location: Location, fill: bool, request_id: int) -> bool:
        # moqt 7.3: the subscriber applies each filter again.
        start, end = self.fill_ids.get(request_id, (_LAST, _LAST)) if fill else (self._start, self._end)
        return start <= location <= end

    async def update(
        self,
        *,
        forward: bool | None = None,
        priority: int | None = None,
        filter: LocationFilter | None = None,
        range_filters: tuple[RangeFilter, ...] = (),
        fill: Fill | None = None,
    ) -> None:
        """Send a REQUEST_UPDATE and wait for its reply; what is None stays as it is (moqt 4.2).

        Raises RequestRejected (the publisher then ends the subscription), DeadlineExceeded, and what broke
        the subscription.
        """
        parameters = Parameters(
            forward=forward,
            subscriber_priority=priority,
            location_filter=filter,
            range_filters=range_filters,
            fill=fill.parameters() if fill else None,
        )
        request_id = self.session.next_request_id()
        if fill is not None:
            self._replies[request_id] = asyncio.Event()
            self.session.subscribing.expect_fill(request_id, self, fill.order)
        reply = await self._update(parameters, request_id)
        assert isinstance(reply, RequestOk)
        if reply.parameters.largest is not None:
            self.largest = reply.parameters.largest
        if filter is not None:
            self._select(filter)
        self._expect(request_id, fill)

    async def receive(
        self,
        stream: Stream,
        decoder: DataStreamDecoder,
        header: SubgroupHeader | FetchHeader,
        events: Iterator[Event],
    ) -> None:
        self._streams_seen += 1
        self._reading += 1
        try:
            await super().receive(stream, decoder, header, events)
        finally:
            self._reading -= 1
            self._check_done()

    async def follow(self) -> None:
        """Read the request stream to its end."""
        try:
            while (message := await self.request.receive()) is not None:
                if isinstance(message, PublishDone):
                    self.done = message
                    self._timer = asyncio.get_running_loop().call_later(
                        self.session.limits.done_deadline, self._check_done, True
                    )
                    self._check_done()
                elif isinstance(message, (RequestOk, RequestError)):
                    self._answer(message)
                elif isinstance(message, PublishStateNotify) and message.parameters.largest is not None:
                    self.largest = message.parameters.largest
        except (StreamReset, RequestRejected) as error:
            if not self._over:
                self.fail(error)

    def _check_done(self, time_is_up: bool = False) -> None:
        """After PUBLISH_DONE: whether all its streams have been seen to their end, or we have waited long
        enough (moqt 4.2).
        """
        if self.done is None or self._over:
            return
        complete = (
            self.done.stream_count != UNKNOWN_STREAM_COUNT and self._streams_seen >= self.done.stream_count
        )
        if not self._reading and (complete or time_is_up):
            self._finished = True
            self._release()

    def _release(self) -> None:
        super()._release()
        for event in self._replies.values():
            event.set()
        if self._over and self._timer is not None:
            self._timer.cancel()


class FetchStream(_Reception):
    """A fetch: `async for` gives its Objects in order, and ends when the last has come. It raises when the
    fetch breaks.

    `end` is the FETCH_OK, once it came. Leaving the `async with` block cancels.
    """

    def __init__(
        self, session: Session, stream: RequestStream, track: FullTrackName, location_filter: LocationFilter
    ) -> None:
        super().__init__(session, stream, track)
        self.end: FetchOk | None = None
        self._start = location_filter.start(None)
        self._last = location_filter.end or _LAST
        self._data_ended = False

    async def __aenter__(self) -> FetchStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _wanted(self, location: Location, fill: bool, request_id: int) -> bool:
        return self._start <= location <= self._last

    async def update(self, *, priority: int) -> None:
        """Change the Subscriber Priority. Raises RequestRejected, DeadlineExceeded."""
        await self._update(Parameters(subscriber_priority=priority), self.session.next_request_id())

    async def receive(
        self,
        stream: Stream,
        decoder: DataStreamDecoder,
        header: SubgroupHeader | FetchHeader,
        events: Iterator[Event],
    ) -> None:
        await super().receive(stream, decoder, header, events)
        if self._items and isinstance(end := self._items[-1], StreamEnd) and end.code is not None:
            self._items.pop()
            self.fail(StreamReset(end.code))
        self._data_ended = True
        self._check_done()

    def accepted(self, message: FetchOk) -> None:
        """Take over what FETCH_OK says. Raises ProtocolError (moqt 20 #21)."""
        if message.end < self._start:
            raise ProtocolError(
                SessionCode.PROTOCOL_VIOLATION,
                f"FETCH_OK ends at {message.end}, before the start of the request {self._start}",
            )
        self.end = message
        self.properties = message.properties
        self._check_done()

    async def follow(self) -> None:
        """Read the request stream to its end."""
        try:
            while (message := await self.request.receive()) is not None:
                if isinstance(message, (RequestOk, RequestError)):
                    self._answer(message)
        except (StreamReset, RequestRejected) as error:
            if not self._over:
                self.fail(error)

    def _check_done(self) -> None:
        if self._data_ended and self.end is not None and not self._over:
            self._finished = True
            self._release()


class NamespaceWatch(OwnRequest):
    """A SUBSCRIBE_NAMESPACE: `async for` gives a NamespaceEvent for each namespace that comes or goes, until
    it breaks.
    """

    def __init__(self, session: Session, stream: RequestStream, prefix: TrackNamespace) -> None:
        super().__init__(session, stream)
        self.prefix = prefix
        self.namespaces: dict[TrackNamespace, None] = {}
        self._events: deque[NamespaceEvent] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    async def __aenter__(self) -> NamespaceWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[NamespaceEvent]:
        return self

    async def __anext__(self) -> NamespaceEvent:
        while not self._events:
            self._check_alive()
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

    async def close(self) -> None:
        """End the watch. Idempotent."""
        if not self._closed:
            self._closed = True
            self._wake.set()
            self.session.forget(self)
            self.request.cancel()

    def fail(self, error: Exception) -> None:
        """End the iteration with `error`, after the events that came before."""
        super().fail(error)
        self._wake.set()

    async def follow(self) -> None:
        """Read the request stream to its end."""
        try:
            while (message := await self.request.receive()) is not None:
                if isinstance(message, (RequestOk, RequestError)):
                    self._answer(message)
                elif isinstance(message, (Namespace, NamespaceDone)):
                    self._note((*self.prefix, *message.suffix), isinstance(message, Namespace))
            raise StreamReset(
                ResetCode.CANCELLED
            )  # moqt 11: at FIN all its namespaces are gone; it was no end of ours.
        except (StreamReset, RequestRejected) as error:
            if not self._closed:
                self.fail(error)

    def _note(self, namespace: TrackNamespace, present: bool) -> None:
        try:
            check_namespace(namespace)
        except ValueError as error:
            raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, str(error)) from None
        if present:
            self.namespaces[namespace] = None
        elif namespace in self.namespaces:
            del self.namespaces[namespace]
        else:  # moqt 20 #20
            raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, "NAMESPACE_DONE without its NAMESPACE")
        self._events.append(NamespaceEvent(namespace, present))
        self._wake.set()


class Announcement(OwnRequest):
    """A PUBLISH_NAMESPACE that the peer accepted; `close` withdraws it."""

    def __init__(self, session: Session, stream: RequestStream, namespace: TrackNamespace) -> None:
        super().__init__(session, stream)
        self.namespace = namespace

    async def close(self) -> None:
        """Withdraw the namespace (moqt 11). Idempotent."""
        self.session.forget(self)
        self.request.cancel()

    async def follow(self) -> None:
        """Read the request stream to its end."""
        try:
            while (message := await self.request.receive()) is not None:
                if isinstance(message, (RequestOk, RequestError)):
                    self._answer(message)
        except (StreamReset, RequestRejected) as error:
            self.fail(error)


class Subscribing:
    """Brings the data streams of one session to the subscriptions and fetches that they belong to."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._by_alias: dict[int, Subscription] = {}
        self._by_request: dict[int, tuple[Subscription | FetchStream, GroupOrder]] = {}
        self._retired_aliases: deque[int] = deque(maxlen=_RETIRED)
        self._waiters: dict[int, list[asyncio.Future[Subscription | None]]] = {}
        self._parked = 0

    def register(self, subscription: Subscription) -> None:
        """Route the alias of a SUBSCRIBE_OK. Raises ProtocolError when it stands for another Track (moqt 20
        #16).
        """
        alias = subscription.alias
        current = self._by_alias.get(alias)
        if current is not None and current.track != subscription.track:
            raise ProtocolError(
                SessionCode.DUPLICATE_TRACK_ALIAS,
                f"alias {alias} stands for {current.track} and for {subscription.track}",
            )
        self._by_alias[alias] = subscription
        for future in self._waiters.pop(alias, ()):
            if not future.done():
                future.set_result(subscription)

    def expect_fill(self, request_id: int, reception: Subscription | FetchStream, order: GroupOrder) -> None:
        """Route the fill or fetch stream with this Request ID."""
        self._by_request[request_id] = reception, order

    def forget(self, reception: OwnRequest) -> None:
        """The reception is over: late streams of it are stopped."""
        if isinstance(reception, Subscription) and self._by_alias.get(reception.alias) is reception:
            del self._by_alias[reception.alias]
            self._retired_aliases.append(reception.alias)
        for request_id in [known for known, (owner, _) in self._by_request.items() if owner is reception]:
            del self._by_request[request_id]

    async def on_stream(self, stream: Stream, data: bytes) -> None:
        """Read a data stream that began with `data`."""
        decoder = DataStreamDecoder()
        header: Event | None = None
        events: Iterator[Event] = iter(())
        try:
            while header is None:
                events = decoder.feed(data)
                header = next(events, None)
                if header is None:
                    data = await stream.read()
                    if not data:
                        decoder.finish()
                        return
        except StreamReset:
            return  # It has said nothing yet.
        if isinstance(header, PaddingHeader):
            stream.stop(ResetCode.CANCELLED)
            return
        assert isinstance(header, (SubgroupHeader, FetchHeader))
        reception = await self._find(header, decoder)
        if reception is None:
            stream.stop(ResetCode.CANCELLED)
        else:
            await reception.receive(stream, decoder, header, events)

    async def _find(
        self, header: SubgroupHeader | FetchHeader, decoder: DataStreamDecoder
    ) -> Subscription | FetchStream | None:
        if isinstance(header, FetchHeader):
            reception, decoder.order = self._by_request.get(header.request_id, (None, GroupOrder.ASCENDING))
            if isinstance(reception, Subscription):
                # The range of the fill is known with the reply; the stream may overtake it.
                await reception.replied(header.request_id)
            return reception
        alias = header.track_alias
        if alias in self._by_alias:
            return self._by_alias[alias]
        if alias in self._retired_aliases or self._parked >= self._session.limits.parked_streams:
            return None
        future: asyncio.Future[Subscription | None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(alias, []).append(future)
        self._parked += 1
        try:
            async with asyncio.timeout(self._session.limits.parked_deadline):
                return await future
        except TimeoutError:
            return None
        finally:
            self._parked -= 1
