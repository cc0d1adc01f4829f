"""Objects of one Track on their way to the application (moqt 12)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from moqt.asking import OwnRequest
from moqt.errors import (
    MalformedTrack,
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionClosed,
    StreamReset,
    UsageError,
)
from moqt.filters import MAX_VARINT, Location
from moqt.ledger import Ledger
from moqt.names import FullTrackName
from moqt.quic.api import ConnectionClosed, Stream
from moqt.requests import RequestStream
from moqt.wire import (
    DataStreamDecoder,
    EndOfRange,
    Event,
    FetchHeader,
    ObjectDatagram,
    ObjectHeader,
    ObjectStatus,
    PayloadChunk,
    Properties,
    PropertyType,
    RangeStatus,
    SubgroupHeader,
    check_track_properties,
    encode_properties,
    get,
    unknown_mandatory_properties,
)

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = ["DataHeader", "Inlet", "Item", "RangeNotice", "ReceivedObject", "Reception", "Sink", "StreamEnd"]

LAST = Location(MAX_VARINT, MAX_VARINT)
_DEFAULT_PRIORITY = 128

_ITEM_COST = 256
"""Bytes that an item takes besides its payload, by our reckoning."""

_TURN = 512
"""Objects, markers and pieces that are taken before others get their turn: what came at once may hold a
million.
"""

_PREALLOCATED = 64 * 1024
"""Bytes of an Object for which memory is taken before they have come."""


@dataclass(frozen=True, slots=True)
class ReceivedObject:
    """An Object as it came. `priority` is the effective Publisher Priority; `fill`: it came on a fill or
    fetch stream; `datagram` is its delivery mode.
    """

    location: Location
    payload: bytearray
    subgroup: int
    priority: int
    status: ObjectStatus
    properties: Properties
    fill: bool
    datagram: bool = False


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """A data stream has ended: by FIN (`code` None), or broken with `code`. `group` is None for a fill or
    fetch stream, and for a stream that broke before it said of which Group it is.
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


Item: TypeAlias = ReceivedObject | StreamEnd | RangeNotice
Header: TypeAlias = SubgroupHeader | FetchHeader
DataHeader: TypeAlias = Header | ObjectDatagram


class Inlet(ABC):
    """Where the Objects of one data stream go, as their bytes come. Methods may raise MalformedTrack."""

    @abstractmethod
    def object(self, header: ObjectHeader) -> Callable[[memoryview], None] | None:
        """An Object begins; what is returned takes its payload, None: it is not wanted."""

    @abstractmethod
    def marker(self, event: EndOfRange) -> None:
        """A range without Objects, on a fetch stream."""

    @abstractmethod
    async def room(self) -> bool:
        """Wait until more may come; the stream is not read meanwhile. False: the rest is not wanted, and the
        stream is stopped.
        """

    @abstractmethod
    def end(self, code: int | None) -> None:
        """The stream has ended by FIN (`code` None), or was reset by the peer."""

    @abstractmethod
    def cut(self) -> None:
        """Nothing more comes, because the connection or the request is over. Called after `end` too."""


Sink = Callable[[DataHeader], Inlet]
"""Opens the inlet for a data stream, or for a datagram, which brings one Object."""


class Reception(OwnRequest):
    """A queue of Objects, bounded in bytes, which the data streams fill and the application empties.

    While more than `limits.receive_buffer` bytes wait, those of Objects that have not come whole included,
    the streams are not read, and flow control then stops the peer.
    """

    def __init__(self, session: Session, stream: RequestStream, track: FullTrackName) -> None:
        super().__init__(session, stream)
        self.track = track
        self.properties: Properties = ()
        self.sink: Sink | None = None
        """Takes the Objects as they come, instead of the queue."""
        self._ledger = Ledger(session.limits.max_known_objects)
        self._items: deque[Item] = deque()
        self._held = 0
        self._finished = False
        self._closed = False
        self._lost: Exception | None = None
        self._cut = False
        """A data stream was cut by the end of the connection."""
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._streams: set[Stream] = set()
        self._timers: list[asyncio.TimerHandle] = []

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        while not self._items:
            self._check_ended()
            self._wake.clear()
            await self._wake.wait()
        item = self._items.popleft()
        self._hold(-_cost(item))
        return item

    async def close(self) -> None:
        """Cancel what has not ended yet, and drop what was not taken. Idempotent."""
        if not self._closed:
            self._closed = True
            self._items.clear()
            if not self._finished:
                self.request.cancel()
            self._end()

    def fail(self, error: Exception) -> None:
        """End the iteration with `error`, after what was received before."""
        super().fail(error)
        self._end()

    def lost(self, error: Exception) -> None:
        """The connection has ended: so does this, when what had arrived before is read. After our own close
        nobody wants it.
        """
        if isinstance(error, SessionClosed) and not error.remote:
            self.fail(error)
        else:
            self._lost = error
            self._settle()

    def begin(self, stream: Stream, header: Header) -> None:
        """A data stream of this reception has come; `receive` is going to read it."""
        self._streams.add(stream)

    def suspect(self, code: int) -> None:
        """A stream was reset with `code` before it said whose it is; perhaps it was one of ours."""
        raise NotImplementedError

    async def receive(
        self, stream: Stream, decoder: DataStreamDecoder, header: Header, events: Iterator[Event]
    ) -> None:
        """Read a data stream to its end; `events` are those decoded behind the header already. Raises
        ProtocolError, ConnectionClosed.
        """
        try:
            if self.sink is None:
                code = await self._read(stream, decoder, header, events)
            else:
                code = await self._pour(self.sink(header), stream, decoder, header, events)
        except MalformedTrack as error:  # moqt 20 #36
            self._malformed(error)
        except UsageError:
            if not self._over:
                raise
            # `_end` stopped the stream while we waited for it.
        except ConnectionClosed:
            self._cut = True
            raise
        else:
            self._stream_ended(header, code)
        finally:
            self._streams.discard(stream)
            self._settle()

    def take_datagram(self, datagram: ObjectDatagram) -> None:
        """An Object came in a datagram: it is lost if there is no room for it."""
        header = ObjectHeader(
            datagram.location,
            0,
            datagram.priority,
            datagram.properties,
            encode_properties(datagram.properties),
            datagram.status,
            len(datagram.payload),
            datagram=True,
        )
        if self._over or not self._wanted(header, None):
            return
        try:
            if self.sink is not None:
                inlet = self.sink(datagram)
                write = inlet.object(header)
                if write is not None and datagram.payload:
                    write(memoryview(datagram.payload))
                inlet.end(None)
            elif self._room.is_set():
                self._hold(len(datagram.payload))
                self._take(header, bytearray(datagram.payload), None)
                if datagram.end_of_group:
                    self._ledger.end_group(datagram.location.group, datagram.location.object + 1)
        except MalformedTrack as error:
            self._malformed(error)

    @property
    def _over(self) -> bool:
        return self._closed or self._finished or self._error is not None

    def _wanted(self, header: ObjectHeader, request_id: int | None) -> bool:
        """Whether the Object lies in the range that was asked for; `request_id` is None on a subgroup
        stream.
        """
        raise NotImplementedError

    def _take_properties(self, properties: Properties) -> None:
        """Take over the Track Properties. When they say that the Track can't be used, cancel and raise
        RequestRejected (moqt 13.1) or MalformedTrack (moqt 20.1).
        """
        self.properties = properties
        unknown = unknown_mandatory_properties(properties)
        try:
            check_track_properties(properties)
            if unknown:
                raise RequestRejected(
                    RequestCode.UNSUPPORTED_EXTENSION,
                    f"the Track has the mandatory property {unknown[0]:#x}, which is not known here",
                )
        except MalformedTrack as error:
            self._malformed(error)
            raise
        except RequestRejected as error:
            self._broken(error)
            raise

    def _malformed(self, error: MalformedTrack) -> None:
        self.request.cancel(ResetCode.MALFORMED_TRACK)
        self.fail(error)

    def _stream_ended(self, header: Header, code: int | None) -> None:
        """A data stream has come to its end: FIN (`code` None) or reset."""
        fill = isinstance(header, FetchHeader)
        self._put(StreamEnd(None if isinstance(header, FetchHeader) else header.group, fill, code))

    def _settle(self) -> None:
        """Look whether all has come."""
        if self._lost is not None and not self._streams and not self._over:
            self.fail(self._lost)

    def _check_ended(self) -> None:
        if self._finished or self._closed:
            raise StopAsyncIteration
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        """All has come. Our FIN tells the publisher so (moqt 3.4)."""
        self._finished = True
        self._end()
        self.session.spawn(self.request.finish(), "FIN")

    def _end(self) -> None:
        """Nothing more is taken."""
        self._wake.set()
        self._room.set()
        for stream in self._streams:
            stream.stop(ResetCode.CANCELLED)
        for timer in self._timers:
            timer.cancel()
        self.session.forget(self)

    def _after(self, seconds: float, callback: Callable[..., None], *arguments: object) -> None:
        """Call back, unless this has ended before."""
        if not self._over:
            self._timers.append(asyncio.get_running_loop().call_later(seconds, callback, *arguments))

    def _put(self, item: Item) -> None:
        if not self._over:
            self._items.append(item)
            self._hold(_cost(item))
            self._wake.set()

    def _hold(self, size: int) -> None:
        """Count bytes that came, or went. While the queue is empty there is room for the rest of what has
        come in part: else nothing would ever be whole.
        """
        self._held += size
        if self._held <= self.session.limits.receive_buffer or not self._items or self._over:
            self._room.set()
        else:
            self._room.clear()

    async def _read(
        self, stream: Stream, decoder: DataStreamDecoder, header: Header, events: Iterator[Event]
    ) -> int | None:
        """Read to the end; None for FIN, or the code of a reset."""
        fill = header.request_id if isinstance(header, FetchHeader) else None
        partial = self.session.partial
        filled = 0
        buffer = bytearray()
        current: ObjectHeader | None = None
        try:
            while True:
                for turn, event in enumerate(events, 1):
                    if not turn % _TURN:
                        await asyncio.sleep(0)
                    if type(event) is PayloadChunk:
                        size = len(event.data)
                        buffer[filled : filled + size] = event.data
                        self._hold(size)
                        if not event.last or current is None:
                            filled += size
                            if not partial.take(stream, size):
                                stream.stop(ResetCode.EXCESSIVE_LOAD)
                                return ResetCode.EXCESSIVE_LOAD
                            continue
                        if filled:
                            filled = 0
                            partial.give(stream)
                        self._take(current, buffer, fill)
                    elif type(event) is ObjectHeader:
                        current = event
                        if event.size > self.session.limits.max_object_size:
                            stream.stop(ResetCode.EXCESSIVE_LOAD)
                            return ResetCode.EXCESSIVE_LOAD
                        buffer = bytearray(min(event.size, _PREALLOCATED))
                        if event.size:
                            continue
                        self._take(event, buffer, fill)
                    elif type(event) is EndOfRange:
                        self._put(RangeNotice(event.kind, event.location))
                    if not self._room.is_set():
                        await self._wait_for_room()
                if not self._room.is_set():
                    await self._wait_for_room()
                data = await stream.read()
                if not data:
                    break
                events = decoder.feed(data)
            decoder.finish()
        except StreamReset as error:
            return error.code
        finally:
            self._hold(-filled)
            partial.give(stream)
        if isinstance(header, SubgroupHeader) and current and current.status is ObjectStatus.NORMAL:
            self._note_end(header, current)
        return None

    async def _wait_for_room(self) -> None:
        while not self._room.is_set():  # Others that waited may have taken it.
            await self._room.wait()

    async def _pour(
        self,
        inlet: Inlet,
        stream: Stream,
        decoder: DataStreamDecoder,
        header: Header,
        events: Iterator[Event],
    ) -> int | None:
        """`_read` into a sink. No faster than the peer sends, no slower: the sink has its own bounds."""
        fill = header.request_id if isinstance(header, FetchHeader) else None
        partial = self.session.partial
        write: Callable[[memoryview], None] | None = None
        try:
            while True:
                for turn, event in enumerate(events, 1):
                    if not turn % _TURN:
                        await asyncio.sleep(0)
                    if type(event) is PayloadChunk:
                        if write is not None:
                            write(event.data)
                            if event.last:
                                partial.give(stream)
                            elif not partial.take(stream, len(event.data)):
                                stream.stop(ResetCode.EXCESSIVE_LOAD)
                                inlet.end(ResetCode.EXCESSIVE_LOAD)
                                return ResetCode.EXCESSIVE_LOAD
                    elif type(event) is ObjectHeader:
                        if event.size > self.session.limits.max_object_size:
                            stream.stop(ResetCode.EXCESSIVE_LOAD)
                            inlet.end(ResetCode.EXCESSIVE_LOAD)
                            return ResetCode.EXCESSIVE_LOAD
                        write = inlet.object(event) if self._wanted(event, fill) else None
                    elif type(event) is EndOfRange:
                        inlet.marker(event)
                if not await inlet.room():
                    stream.stop(ResetCode.CANCELLED)
                    inlet.end(ResetCode.CANCELLED)
                    return ResetCode.CANCELLED
                data = await stream.read()
                if not data:
                    break
                events = decoder.feed(data)
            decoder.finish()
            inlet.end(None)
        except StreamReset as error:
            inlet.end(error.code)
            return error.code
        finally:
            partial.give(stream)
            inlet.cut()
        return None

    def _note_end(self, header: SubgroupHeader, last: ObjectHeader) -> None:
        """What FIN of a subgroup stream tells (moqt 12.2, 12.6). Raises MalformedTrack."""
        if header.end_of_group:
            self._ledger.end_group(header.group, last.location.object + 1)

    def _take(self, header: ObjectHeader, payload: bytearray, request_id: int | None) -> None:
        """Queue an Object, unless it is here already or was not asked for."""
        priority = header.priority
        if priority is None:
            default = get(self.properties, PropertyType.DEFAULT_PUBLISHER_PRIORITY)
            priority = default if isinstance(default, int) else _DEFAULT_PRIORITY
        if self._wanted(header, request_id) and self._ledger.record(header, payload, priority=priority):
            self._put(
                ReceivedObject(
                    header.location,
                    payload,
                    header.subgroup,
                    priority,
                    header.status,
                    header.properties,
                    request_id is not None,
                    header.datagram,
                )
            )
        self._hold(-len(payload))  # What came in part has come.


def _cost(item: Item) -> int:
    return _ITEM_COST + (len(item.payload) if isinstance(item, ReceivedObject) else 0)
