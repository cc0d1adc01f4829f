"""Data streams that the peer of a session opens: whose they are (moqt 7.2, 9, 10).

Every session has this half, also one that only publishes: what reads the Objects is loaded with the first
request for them (`moqt.subscribing`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moqt.asking import OwnRequest
from moqt.errors import ProtocolError, ResetCode, SessionCode, StreamReset, UsageError
from moqt.filters import GroupOrder, RangeFilter
from moqt.quic.api import Stream
from moqt.wire import (
    DataStreamDecoder,
    Event,
    FetchHeader,
    ObjectDatagram,
    PaddingHeader,
    SubgroupHeader,
)

if TYPE_CHECKING:
    from moqt.reception import Header, Reception
    from moqt.session import Session
    from moqt.subscribing import Subscription

__all__ = ["Incoming"]

_RETIRED = 1024
"""Track Aliases of the past that are known to be of the past."""


@dataclass(slots=True)
class _Expected:
    """A fetch or fill stream that may come. It is parked until `ready`, when the reply is known that says
    what it holds.
    """

    reception: Reception
    order: GroupOrder
    ready: bool


class Incoming:
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
        alias = getattr(request, "alias", None)  # Those of subscriptions.
        if alias is not None and self._by_alias.get(alias) is request:
            del self._by_alias[alias]
            self._retired.append(alias)
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
