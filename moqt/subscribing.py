"""Asks the peer of one session for Tracks: subscriptions, fills and fetches (moqt 6 to 12)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moqt.errors import ProtocolError, ResetCode, SessionCode, StreamReset, UsageError
from moqt.filters import GroupOrder, Location, LocationFilter, RangeFilter
from moqt.names import FullTrackName
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
    FetchHeader,
    FetchOk,
    Message,
    ObjectHeader,
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
    "FetchStream",
    "Fill",
    "Item",
    "RangeNotice",
    "ReceivedObject",
    "StreamEnd",
    "Subscription",
    "TrackStatusResult",
]

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
        """Take over what SUBSCRIBE_OK says. Raises as `_take_properties` and `Incoming.register`."""
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
        """Take in what comes under `alias`. Raises as `Incoming.register`."""
        self._range = _selected(self._filter, self.largest)
        self.session.incoming.register(self)

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
        incoming = self.session.incoming
        incoming.check_ranges(range_filters + (fill.range_filters if fill else ()))
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
            incoming.expect(request_id, self, fill.order, wait=True)
        if filter is not None:
            # Objects that the new filter selects may overtake the reply; where it starts may depend on that.
            self._pending[request_id] = Location(0, 0), filter.end or LAST
        self._filtered = self._filtered or filter is not None or bool(range_filters)
        try:
            reply = await self._update(parameters, request_id)
        except BaseException:
            incoming.unexpect(request_id)
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
            self.session.incoming.unexpect(request_id)
            return False
        self._fills[request_id] = selected
        self._due.add(request_id)
        for code in self._suspected:
            self._after(self.session.limits.suspicion, self._fill_lost, request_id, code)
        self.session.incoming.replied(request_id)
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


def _selected(location_filter: LocationFilter, largest: Location | None) -> tuple[Location, Location]:
    return location_filter.start(largest), location_filter.end or LAST
