"""Asks the peer of one session for Tracks: subscriptions, fills and fetches (moqt 6 to 12)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moqt.asking import OwnRequest
from moqt.errors import (
    ProtocolError,
    ResetCode,
    SessionCode,
    StreamReset,
    UsageError,
)
from moqt.filters import GroupOrder, Location, LocationFilter, RangeFilter
from moqt.names import FullTrackName
from moqt.namespaces import Announcement, NamespaceEvent, NamespaceWatch
from moqt.quic.api import Stream
from moqt.reception import (
    LAST,
    Header,
    Item,
    RangeNotice,
    ReceivedObject,
    Reception,
    StreamEnd,
)
from moqt.requests import RequestStream
from moqt.wire import (
    UNKNOWN_STREAM_COUNT,
    DataStreamDecoder,
    Event,
    FetchHeader,
    FetchOk,
    Message,
    ObjectDatagram,
    ObjectHeader,
    PaddingHeader,
    Parameters,
    Properties,
    PublishDone,
    PublishStateNotify,
    SubgroupHeader,
    SubscribeOk,
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
    "RangeNotice",
    "ReceivedObject",
    "StreamEnd",
    "Subscribing",
    "Subscription",
    "TrackStatusResult",
]

_RETIRED = 1024
"""Track Aliases of the past that are known to be of the past."""

_SUSPECTED = 64
"""Streams reset before their header that a subscription takes note of."""

_NOTHING = (LAST, Location(0, 0))


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

    def range(self, largest: Location | None) -> tuple[Location, Location] | None:
        """What the fill stream will hold when the reply says `largest`; None if there will be none (moqt 7.2
        #8).
        """
        if largest is None:
            return None
        start, end = self.filter.start(largest), min(self.filter.end or LAST, largest)
        return (start, end) if start <= end else None


@dataclass(frozen=True, slots=True)
class TrackStatusResult:
    """What TRACK_STATUS tells: the Largest Object (None: nothing published yet) and the Track Properties."""

    largest: Location | None
    properties: Properties


class Subscription(Reception):
    """A subscription to a Track: `async for` gives its Objects as they come, and tells when streams end.

    The iteration ends when the publisher has ended the subscription with PUBLISH_DONE and all its streams
    have come to their end; `done` is then set. When streams that it counts did not come, a StreamEnd without
    a Group says so before. The iteration raises when the subscription or the session breaks. Leaving the
    `async with` block cancels.
    """

    def __init__(
        self,
        session: Session,
        stream: RequestStream,
        track: FullTrackName,
        location_filter: LocationFilter,
        *,
        filtered: bool,
        forward: bool,
    ) -> None:
        super().__init__(session, stream, track)
        self.alias = -1
        self.largest: Location | None = None
        self.expects_fill = False
        self.done: PublishDone | None = None
        self.on_largest: Callable[[], None] = lambda: None
        """Called when the publisher has told `largest` anew, unasked."""
        self._filter = location_filter
        self._range = _NOTHING
        self._pending: dict[int, tuple[Location, Location]] = {}
        """What else subgroup streams may bring, by the updates of the filter that are under way."""
        self._fills: dict[int, tuple[Location, Location]] = {}
        self._filtered = filtered
        """Whether a whole Subgroup may come without some of its Objects."""
        self._forward = forward
        self._streams_ended = 0
        self._due: set[int] = set()
        """Fills whose stream has not come."""
        self._suspected: list[int] = []
        """Codes of the streams that may have been ours."""
        self._time_is_up = False

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def accepted(self, message: SubscribeOk, request_id: int, fill: Fill | None) -> None:
        """Take over what SUBSCRIBE_OK says. Raises as `_take_properties` and `Subscribing.register`."""
        self._take_properties(message.properties)
        self.alias = message.track_alias
        self.largest = message.parameters.largest
        try:
            self.open()
        except UsageError as error:
            self._broken(error)
            raise
        self.expects_fill = self._expect(request_id, fill)

    @property
    def forward(self) -> bool:
        """Whether Objects are sent, or the subscription is paused."""
        return self._forward

    def open(self) -> None:
        """Take in what comes under `alias`. Raises as `Subscribing.register`."""
        self._range = _selected(self._filter, self.largest)
        self.session.subscribing.register(self)

    async def update(
        self,
        *,
        forward: bool | None = None,
        priority: int | None = None,
        filter: LocationFilter | None = None,
        range_filters: tuple[RangeFilter, ...] = (),
        fill: Fill | None = None,
        new_group: int | None = None,
        object_timeout: float | None = None,
        subgroup_timeout: float | None = None,
    ) -> bool:
        """Send a REQUEST_UPDATE and wait for its reply; what is None stays as it is (moqt 4.2). Returns
        whether a fill stream will come.

        Raises RequestRejected (the publisher then ends the subscription), DeadlineExceeded, UsageError for
        filters that the peer has not allowed, and what broke the subscription.
        """
        subscribing = self.session.subscribing
        subscribing.check_ranges(range_filters + (fill.range_filters if fill else ()))
        parameters = Parameters(
            forward=forward,
            subscriber_priority=priority,
            location_filter=filter,
            range_filters=range_filters,
            fill=fill.parameters() if fill else None,
            new_group_request=new_group,
            object_delivery_timeout=None if object_timeout is None else int(object_timeout * 1000),
            subgroup_delivery_timeout=None if subgroup_timeout is None else int(subgroup_timeout * 1000),
        )
        request_id = self.session.ids.next()
        if fill is not None:
            self._suspected.clear()
            subscribing.expect(request_id, self, fill.order, wait=True)
        if filter is not None:
            # Objects that the new filter selects may overtake the reply; where it starts may depend on that.
            self._pending[request_id] = Location(0, 0), filter.end or LAST
        self._filtered = self._filtered or filter is not None or bool(range_filters)
        try:
            reply = await self._update(parameters, request_id)
        except BaseException:
            subscribing.unexpect(request_id)
            raise
        if reply.parameters.largest is not None:
            self.largest = reply.parameters.largest
        if filter is not None:
            self._filter = filter
            self._range = _selected(filter, self.largest)
            del self._pending[request_id]
        if forward is not None:
            self._forward = forward
        return self._expect(request_id, fill)

    def _expect(self, request_id: int, fill: Fill | None) -> bool:
        """Whether a fill stream will come, and with which Objects."""
        selected = fill.range(self.largest) if fill is not None and self._forward else None
        if selected is None:
            self.session.subscribing.unexpect(request_id)
            return False
        self._fills[request_id] = selected
        self._due.add(request_id)
        for code in self._suspected:
            self._after(self.session.limits.suspicion, self._fill_lost, request_id, code)
        self.session.subscribing.replied(request_id)
        return True

    def begin(self, stream: Stream, header: Header) -> None:
        super().begin(stream, header)
        if isinstance(header, FetchHeader):
            self._due.discard(header.request_id)

    def suspect(self, code: int) -> None:
        if len(self._suspected) >= _SUSPECTED:
            return
        self._suspected.append(code)
        for request_id in self._due:
            self._after(self.session.limits.suspicion, self._fill_lost, request_id, code)
        self._settle()

    def _fill_lost(self, request_id: int, code: int) -> None:
        if request_id in self._due:
            self._due.discard(request_id)
            self._put(StreamEnd(None, True, code))

    def _wanted(self, header: ObjectHeader, request_id: int | None) -> bool:
        # moqt 7.3: the subscriber applies each filter again.
        if request_id is None:
            ranges = [self._range, *self._pending.values()]
        else:
            ranges = [self._fills.get(request_id, _NOTHING)]
        return any(start <= header.location <= end for start, end in ranges)

    def _stream_ended(self, header: Header, code: int | None) -> None:
        self._streams_ended += 1
        if isinstance(header, FetchHeader):
            del self._fills[header.request_id]
        super()._stream_ended(header, code)

    def _note_end(self, header: SubgroupHeader, last: ObjectHeader) -> None:
        super()._note_end(header, last)
        if not self._filtered:
            self._ledger.end_subgroup(header.group, last.subgroup, last.location.object)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, PublishDone):
            self.done = message
            self._after(self.session.limits.done_deadline, self._waited)
            self._settle()
        elif isinstance(message, PublishStateNotify) and message.parameters.largest is not None:
            self.largest = message.parameters.largest
            self.on_largest()

    def _waited(self) -> None:
        self._time_is_up = True
        self._settle()

    def _settle(self) -> None:
        """After PUBLISH_DONE: whether all its streams have come to their end, or we have waited long enough
        (moqt 4.2).
        """
        if self.done is not None and not (self._over or self._streams or self._cut):
            unknown = self.done.stream_count == UNKNOWN_STREAM_COUNT
            missing = len(self._suspected) if unknown else self.done.stream_count - self._streams_ended
            if self._time_is_up or (missing <= 0 and not unknown):
                if missing > 0:
                    for code in self._suspected[:missing] or [ResetCode.INTERNAL_ERROR]:
                        self._put(StreamEnd(None, False, code))
                self._finish()
            elif not unknown and len(self._suspected) >= missing:
                self._after(self.session.limits.suspicion, self._waited)
        super()._settle()


class FetchStream(Reception):
    """A fetch: `async for` gives its Objects in order, and ends when the last has come. It raises when the
    fetch breaks.

    `end` is the FETCH_OK, once it came. Leaving the `async with` block cancels.
    """

    def __init__(
        self, session: Session, stream: RequestStream, track: FullTrackName, location_filter: LocationFilter
    ) -> None:
        super().__init__(session, stream, track)
        self.end: FetchOk | None = None
        self._start, self._last = _selected(location_filter, None)
        self._begun = False
        self._data_ended = False
        self._suspected: int | None = None
        """Code of a stream that may have been ours."""
        self._said_all = False

    async def __aenter__(self) -> FetchStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def update(self, *, priority: int) -> None:
        """Change the Subscriber Priority. Raises RequestRejected, DeadlineExceeded, and what broke the
        fetch.
        """
        await self._update(Parameters(subscriber_priority=priority), self.session.ids.next())

    def accepted(self, message: FetchOk) -> None:
        """Take over what FETCH_OK says. Raises ProtocolError (moqt 20 #21), and as `_take_properties`."""
        if message.end < self._start:
            raise ProtocolError(
                SessionCode.PROTOCOL_VIOLATION,
                f"FETCH_OK ends at {message.end}, before the start of the request {self._start}",
            )
        self._take_properties(message.properties)
        self.end = message
        self._settle()

    def begin(self, stream: Stream, header: Header) -> None:
        super().begin(stream, header)
        self._begun = True

    def suspect(self, code: int) -> None:
        self._suspected = code
        self._await_data()

    def _wanted(self, header: ObjectHeader, request_id: int | None) -> bool:
        return self._start <= header.location <= self._last

    def _stream_ended(self, header: Header, code: int | None) -> None:
        if code is None:
            super()._stream_ended(header, code)
            self._data_ended = True
        else:
            self._broken(StreamReset(code))

    def _on_fin(self) -> None:
        self._said_all = True
        self._await_data()

    def _await_data(self) -> None:
        if self._said_all and not self._begun:
            limits = self.session.limits
            if self._suspected is None:
                self._after(limits.data_deadline, self._data_lost, ResetCode.INTERNAL_ERROR)
            else:
                self._after(limits.suspicion, self._data_lost, self._suspected)

    def _data_lost(self, code: int) -> None:
        if not self._begun:
            self._broken(StreamReset(code))

    def _settle(self) -> None:
        if self._data_ended and self.end is not None and not self._over:
            self._finish()
        super()._settle()


@dataclass(slots=True)
class _Expected:
    """A fetch or fill stream that may come. It is parked until `ready`, when the reply is known that says
    what it holds.
    """

    reception: Reception
    order: GroupOrder
    ready: bool


class Subscribing:
    """Brings the data streams of one session to the subscriptions and fetches that they belong to."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._by_alias: dict[int, Subscription] = {}
        self._by_request: dict[int, _Expected] = {}
        self._retired: deque[int] = deque(maxlen=_RETIRED)
        self._parked: dict[asyncio.Future[None], int | FetchHeader] = {}
        """Who waits for a Track Alias or for the reply to a request."""
        self._unidentified: set[asyncio.Task[None]] = set()
        self._ended = False
        self._settled = asyncio.Event()

    def check_ranges(self, range_filters: tuple[RangeFilter, ...]) -> None:
        """Raise UsageError for range filters that the peer would refuse (moqt 8)."""
        limit = self._session.peer_setup.max_filter_ranges
        faults = [known.fault for known in range_filters if known.fault]
        if faults:
            raise UsageError(faults[0])
        ranges = sum(len(known.ranges) for known in range_filters)
        if ranges > limit or (range_filters and not limit):
            raise UsageError(f"the peer takes {limit} Ranges in range filters, not {ranges}")

    def register(self, subscription: Subscription) -> None:
        """Route the alias of a SUBSCRIBE_OK. Raises ProtocolError when it stands for another Track (moqt 20
        #16), UsageError when it stands for another subscription to the same Track: their streams could not be
        told apart.
        """
        alias = subscription.alias
        current = self._by_alias.get(alias)
        if current is not None and current.track != subscription.track:
            raise ProtocolError(
                SessionCode.DUPLICATE_TRACK_ALIAS,
                f"alias {alias} stands for {current.track} and for {subscription.track}",
            )
        if current is not None:
            raise UsageError(
                f"the publisher takes one alias for all subscriptions to {subscription.track}: "
                "end the other one first"
            )
        self._by_alias[alias] = subscription
        self._unpark(alias)

    def expect(self, request_id: int, reception: Reception, order: GroupOrder, *, wait: bool) -> None:
        """Route the fetch or fill stream with this Request ID, with `wait` once `replied` is called."""
        self._by_request[request_id] = _Expected(reception, order, not wait)

    def replied(self, request_id: int) -> None:
        """The reply is here that tells what the stream of this request holds."""
        expected = self._by_request.get(request_id)
        if expected is not None:
            expected.ready = True
            self._unpark(FetchHeader(request_id))

    def unexpect(self, request_id: int) -> None:
        """No stream with this Request ID is wanted."""
        self._by_request.pop(request_id, None)
        self._unpark(FetchHeader(request_id))

    def forget(self, request: OwnRequest) -> None:
        """The request is over: late streams of it are stopped."""
        if isinstance(request, Subscription) and self._by_alias.get(request.alias) is request:
            del self._by_alias[request.alias]
            self._retired.append(request.alias)
        for number in [number for number, known in self._by_request.items() if known.reception is request]:
            self.unexpect(number)

    def arrived(self, task: asyncio.Task[None]) -> None:
        """A stream has come, which `task` reads."""
        self._unidentified.add(task)
        task.add_done_callback(self._identified)

    def identified(self) -> None:
        """The task that calls knows what its stream is."""
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._identified(task)

    def _identified(self, task: asyncio.Task[None]) -> None:
        self._unidentified.discard(task)
        self._check_settled()

    async def on_stream(self, stream: Stream, data: bytes) -> None:
        """Read a data stream that began with `data`, to its end. Raises ProtocolError, ConnectionClosed."""
        decoder = DataStreamDecoder()
        try:
            header, events = await _read_header(stream, decoder, data)
        except StreamReset as reset:
            self.nameless(reset.code)
            return
        reception = await self._find(header, decoder)
        if reception is None or header is None:
            stream.stop(ResetCode.CANCELLED)
            return
        reception.begin(stream, header)
        self.identified()
        await reception.receive(stream, decoder, header, events)

    def on_datagram(self, datagram: ObjectDatagram) -> None:
        """An Object came in a datagram; one of a Track Alias that is not known is dropped (moqt 9)."""
        subscription = self._by_alias.get(datagram.track_alias)
        if subscription is not None:
            subscription.take_datagram(datagram)

    def nameless(self, code: int) -> None:
        """A stream was reset before it said whose it is."""
        receptions = {*self._by_alias.values(), *(known.reception for known in self._by_request.values())}
        for reception in receptions:
            reception.suspect(code)

    def end(self) -> None:
        """The connection has ended, and all streams that came are known."""
        self._ended = True
        for future in self._parked:
            if not future.done():
                future.set_result(None)
        self._check_settled()

    async def settled(self) -> None:
        """After the end of the connection: wait until each stream that came has found its reception."""
        await self._settled.wait()

    def _check_settled(self) -> None:
        if self._ended and not self._unidentified:
            self._settled.set()

    async def _find(self, header: Header | None, decoder: DataStreamDecoder) -> Reception | None:
        """Whose stream it is; None if nobody wants it."""
        if header is None:
            return None
        if isinstance(header, SubgroupHeader):
            alias = header.track_alias
            if alias not in self._by_alias and alias not in self._retired:
                await self._park(alias)
            return self._by_alias.get(alias)
        expected = self._by_request.get(header.request_id)
        if expected is not None and not expected.ready:
            await self._park(header)
        expected = self._by_request.get(header.request_id)
        if expected is None or not expected.ready:
            return None
        del self._by_request[header.request_id]  # One request, one stream (moqt 7.2 #6, 10).
        decoder.order = expected.order
        return expected.reception

    async def _park(self, key: int | FetchHeader) -> None:
        """Wait for the reply that overtook nothing, within bounds (moqt 9)."""
        if self._ended or len(self._parked) >= self._session.limits.parked_streams:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parked[future] = key
        try:
            async with asyncio.timeout(self._session.limits.parked_deadline):
                await future
        except TimeoutError:
            pass
        finally:
            del self._parked[future]

    def _unpark(self, key: int | FetchHeader) -> None:
        for future, waited in self._parked.items():
            if waited == key and not future.done():
                future.set_result(None)


async def _read_header(
    stream: Stream, decoder: DataStreamDecoder, data: bytes
) -> tuple[Header | None, Iterator[Event]]:
    """The header of a stream that began with `data`, and the events behind it; None for padding, and for a
    stream that is empty.
    """
    while True:
        events = decoder.feed(data)
        header = next(events, None)
        if header is not None:
            break
        data = await stream.read()
        if not data:
            decoder.finish()
            return None, events
    if isinstance(header, PaddingHeader):
        return None, events
    assert isinstance(header, (SubgroupHeader, FetchHeader))
    return header, events


def _selected(location_filter: LocationFilter, largest: Location | None) -> tuple[Location, Location]:
    return location_filter.start(largest), location_filter.end or LAST
