"""The half of a connection that knows no transport: buffers, waiting, refusing; shared by aioquic and memory.

An implementation derives from `BaseConnection` and `BaseStream`, answers the `_transport_...` hooks, and
reports what happens by calling `received`, `received_reset`, `received_stop` of the stream, and `more_credit`
and `ended` of the connection.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from moqt.errors import StreamReset, StreamStopped, UsageError
from moqt.quic.api import WATERMARK, Buffer, Connection, ConnectionClosed, NoStreamCredit, QuicOptions, Stream

__all__ = ["BaseConnection", "BaseStream", "Signal", "cut_reason", "worth_telling"]

INTERNAL_ERROR = 0x1
"""Application code when a callback of the layer above raised (SessionCode.INTERNAL_ERROR of moqt 17.1)."""

CONTROL_RESERVE = 64 * 1024
"""Bytes of the peer's connection window (an eighth of a small one) that `Connection.credit` hides, so that
feeders leave them to `write`.

Data streams that the peer's application does not read then never keep control and request streams from moving
(moqt 3.1).
"""

WRITE_AHEAD = 16 * 1024
"""Bytes of its own that a `write` may always have unsent, however much data waits ahead."""

READ_SIZE = 96 * 1024
"""Bytes that are joined at most for one `read`: one batch of datagrams. Blocks of megabytes that come and go
make glibc keep memory (its threshold for mmap follows them), 10 MB in a relay with 32 subscribers.
"""

REASON_LIMIT = 900
"""Bytes of UTF-8 of a close reason: the frame must fit into one datagram of 1200 bytes."""


class Signal:
    """Wakes everyone who waits. Nothing is remembered: those who come later look at the state first."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if future in self._waiting:
                self._waiting.remove(future)

    def wake(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


class BaseStream(Stream):
    """Reading, writing and their ends; the transport below moves the bytes."""

    def __init__(
        self, connection: BaseConnection[Any], stream_id: int, *, readable: bool, writable: bool
    ) -> None:
        self.id = stream_id
        self.bidirectional = readable and writable
        self.stopped: int | None = None
        self.on_stopped: Callable[[int], None] | None = None
        self.urgent = False
        self._connection = connection
        self._readable = readable
        self._writable = writable
        # Receiving. `released`: nothing of the receiving half is left for the application to take.
        self._blocks: list[bytes] = []
        """What waits longer is joined: many small pieces leave the heap full of holes when they are read."""
        self._chunks: list[bytes] = []
        """What has come behind `_blocks`: `_loose` bytes, READ_SIZE at most where it is in several pieces."""
        self._loose = 0
        self._at_fin = False
        self._reset_code: int | None = None
        self.reading_stopped = False
        self._arrival = Signal()
        self._reading = False
        self.released = not readable
        self._accepted = False
        # Sending.
        self._writing_ended = False

    @property
    def unread(self) -> int:
        """Bytes that have arrived in order and were not read."""
        return sum(map(len, self._blocks)) + self._loose

    async def read(self) -> bytes:
        if not self._readable:
            raise UsageError(f"stream {self.id} is ours alone to write: it can't be read")
        if self._reading:
            raise UsageError(f"stream {self.id} has a reader already")
        while True:
            if self._connection.closed_by_us:
                self._connection.check_open()
            if self.reading_stopped:
                raise UsageError(f"reading of stream {self.id} was stopped")
            if self._reset_code is not None:
                raise StreamReset(self._reset_code)
            if self._loose:
                data = self._next()
                self._take(len(data))
                return data
            if self._at_fin:
                return b""
            self._connection.check_open()
            self._reading = True
            try:
                await self._arrival.wait()
            finally:
                self._reading = False

    def hand(self, data: Buffer, *, fin: bool = False) -> None:
        self._check_writable()
        if isinstance(data, memoryview) and (data.itemsize != 1 or data.ndim != 1):
            data = data.cast("B")
        if fin:
            self._writing_ended = True
        if len(data) or fin:
            self._connection.transport_send(self, data, fin)
            self._connection.kick()

    async def write(self, data: Buffer, *, fin: bool = False) -> None:
        self.urgent = True
        rest = memoryview(data).cast("B")
        connection = self._connection
        while True:
            self._check_writable()
            room = min(
                self.credit,
                connection.full_credit,
                max(WATERMARK - connection.unsent, WRITE_AHEAD - self.unsent),
            )
            if room >= len(rest) or not rest:
                self.hand(rest, fin=fin)
                return
            if room > 0:
                self.hand(rest[:room])
                rest = rest[room:]
            await connection.room.wait()

    def reset(self, code: int) -> None:
        if not self._writable:
            raise UsageError(
                f"stream {self.id} is the peer's alone to write: it can't be reset, only stopped"
            )
        if self.stopped is None and self._connection.closed is None:
            self._writing_ended = True
            self._connection.transport_reset(self, code)
            self._connection.kick()

    def stop(self, code: int) -> None:
        if not self._readable:
            raise UsageError(f"stream {self.id} is ours alone to write: it can't be stopped, only reset")
        if self.reading_stopped or self._reset_code is not None or self._connection.closed is not None:
            return
        self.reading_stopped = True
        size = self.unread
        self._forget()
        if not self._at_fin:
            self._connection.transport_stop(self, code)
        self._arrival.wake()
        self._take(size)

    # What the transport reports.

    def received(self, data: bytes, fin: bool) -> None:
        """Bytes arrived in order; with `fin` they are the last."""
        if fin:
            self._at_fin = True
        if self.reading_stopped or self._reset_code is not None:
            self._take(len(data))
            return
        if data:
            if self._chunks and self._loose + len(data) > READ_SIZE:
                self._blocks.append(self._join())
            self._chunks.append(data)
            self._loose += len(data)
        elif not self._loose:
            self._take(0)
        self._arrival.wake()

    def received_reset(self, code: int) -> None:
        """The peer aborted its sending side. The transport counts what it had sent as read."""
        if self._reset_code is None and not self._at_fin:
            self._reset_code = code
            self._forget()
            self._release()
            self._arrival.wake()

    def received_stop(self, code: int) -> None:
        """The peer wants no more; the transport has reset our sending side."""
        if self.stopped is None:
            self.stopped = code
            self._connection.room.wake()
            if self.on_stopped is not None:
                self._connection.call_out(self.on_stopped, code)

    def mark_accepted(self) -> None:
        """The application has taken the stream that the peer opened."""
        self._accepted = True
        if self.released:
            self._connection.transport_released(self)

    def connection_ended(self) -> None:
        """The connection is over."""
        self._arrival.wake()

    def _check_writable(self) -> None:
        if not self._writable:
            raise UsageError(f"stream {self.id} is the peer's alone to write")
        if self.stopped is not None:
            raise StreamStopped(self.stopped)
        self._connection.check_open()
        if self._writing_ended:
            raise UsageError(f"stream {self.id} was finished or reset by us: it can't be written")

    def _next(self) -> bytes:
        """The first of the bytes that have arrived."""
        return self._blocks.pop(0) if self._blocks else self._join()

    def _join(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._loose = 0
        return data

    def _forget(self) -> None:
        """Drop what has arrived."""
        self._blocks.clear()
        self._chunks.clear()
        self._loose = 0

    def _take(self, size: int) -> None:
        """`size` bytes left for the application, or were dropped."""
        if size:
            self._connection.transport_consumed(self, size)
        if (self._at_fin and not self._loose) or self.reading_stopped:
            self._release()

    def _release(self) -> None:
        if not self.released:
            self.released = True
            if self._accepted:
                self._connection.transport_released(self)


StreamT = TypeVar("StreamT", bound=BaseStream)


class BaseConnection(Connection, Generic[StreamT]):
    """Opening, accepting, waiting and ending; the transport below moves the bytes.

    `room` wakes writers when credit or room may have come.
    """

    def __init__(self, *, is_client: bool, alpn: str, peer: str, name: str, options: QuicOptions) -> None:
        self.is_client = is_client
        self.alpn = alpn
        self.peer = peer
        self.id = name
        self.feeder: Callable[[], None] | None = None
        self.on_datagram: Callable[[bytes], None] | None = None
        self.closed: ConnectionClosed | None = None
        self.options = options
        self.room = Signal()
        self.reserve = CONTROL_RESERVE
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, StreamT] = {}
        self._incoming: deque[StreamT] = deque()
        self._arrivals = Signal()
        self._openers: dict[bool, deque[object]] = {True: deque(), False: deque()}
        self._opening = Signal()
        self._kick: asyncio.Handle | None = None
        self._feeding = False
        self._over: asyncio.Future[None] = self._loop.create_future()

    @property
    @abstractmethod
    def full_credit(self) -> int:
        """The connection's flow-control credit with the reserve for control and request streams."""

    @property
    def closed_by_us(self) -> bool:
        """Whether our own application has closed the connection: it wants nothing more of it."""
        return self.closed is not None and self.closed.application and not self.closed.remote

    @property
    def credit(self) -> int:
        return max(0, self.full_credit - self.reserve)

    def open(self, *, bidirectional: bool) -> StreamT:
        self.check_open()
        if self.stream_credit(bidirectional=bidirectional) <= 0:
            kind = "bidirectional" if bidirectional else "unidirectional"
            raise NoStreamCredit(f"the peer allows no more {kind} streams now")
        return self.transport_open(bidirectional)

    async def open_when_possible(self, *, bidirectional: bool) -> StreamT:
        queue = self._openers[bidirectional]
        ticket = object()
        queue.append(ticket)
        try:
            while True:
                self.check_open()
                if queue[0] is ticket and self.stream_credit(bidirectional=bidirectional) > 0:
                    return self.transport_open(bidirectional)
                await self._opening.wait()
        finally:
            queue.remove(ticket)
            self._opening.wake()

    async def accept(self) -> StreamT:
        while not self._incoming:
            self.check_open()
            await self._arrivals.wait()
        stream = self._incoming.popleft()
        stream.mark_accepted()
        return stream

    def kick(self) -> None:
        if self._kick is None and not self._feeding and self.closed is None:
            self._kick = self._loop.call_soon(self._kicked)

    async def wait_closed(self) -> ConnectionClosed:
        await asyncio.shield(self._over)
        assert self.closed is not None
        return self.closed

    def check_open(self) -> None:
        """Raise ConnectionClosed if the connection has ended."""
        if self.closed is not None:
            end = self.closed
            raise ConnectionClosed(end.code, end.reason, remote=end.remote, application=end.application)

    def feed(self) -> None:
        """Let the layer above hand over what there is room for."""
        if self.feeder is not None and self.closed is None:
            self._feeding = True
            self.call_out(self.feeder)
            self._feeding = False

    def call_out(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call the layer above. If it raises, the connection is closed: half a session is worse than none."""
        try:
            callback(*arguments)
        except Exception as error:
            self._loop.call_exception_handler(
                {
                    "message": f"a callback of connection {self.id} raised; the connection is closed",
                    "exception": error,
                }
            )
            self.close(INTERNAL_ERROR, "internal error")

    # What the transport reports.

    def arrived(self, stream: StreamT) -> None:
        """The peer has opened a stream."""
        self._streams[stream.id] = stream
        self._incoming.append(stream)
        self._arrivals.wake()

    def more_credit(self) -> None:
        """There may be room or credit that was not there before."""
        self.room.wake()
        if self._openers[True] or self._openers[False]:
            self._opening.wake()

    def ended(self, why: ConnectionClosed) -> None:
        """The connection has ended: tell everyone who waits, once.

        What arrived before the peer's close or the network's end can still be read, so that a complete stream
        is not lost because its connection has gone. After our own close nobody wants it.
        """
        if self.closed is not None:
            return
        self.closed = why
        if self._kick is not None:
            self._kick.cancel()
            self._kick = None
        if self.closed_by_us:
            self._incoming.clear()
        for stream in list(self._streams.values()):
            stream.connection_ended()
        self._streams.clear()
        self.feeder = None
        self.on_datagram = None
        self._arrivals.wake()
        self._opening.wake()
        self.room.wake()

    def over(self) -> None:
        """Nothing is left in the event loop."""
        if not self._over.done():
            self._over.set_result(None)

    def _kicked(self) -> None:
        self._kick = None
        self.transport_pass()

    # What the transport does.

    @abstractmethod
    def transport_open(self, bidirectional: bool) -> StreamT:
        """Make a stream; there is credit."""

    @abstractmethod
    def transport_send(self, stream: BaseStream, data: Buffer, fin: bool) -> None: ...

    @abstractmethod
    def transport_reset(self, stream: BaseStream, code: int) -> None:
        """Abort our sending side; no effect when everything of it was acknowledged."""

    @abstractmethod
    def transport_stop(self, stream: BaseStream, code: int) -> None: ...

    @abstractmethod
    def transport_consumed(self, stream: BaseStream, size: int) -> None:
        """`size` bytes were read or dropped: the windows move."""

    @abstractmethod
    def transport_released(self, stream: BaseStream) -> None:
        """The application is done with the receiving half: its stream credit may go back once the stream
        ends.
        """

    @abstractmethod
    def transport_pass(self) -> None:
        """Feed, build packets, send them, set the timer."""


def worth_telling(limit: int, told: int, arrived: int, window: int) -> bool:
    """Whether the peer should hear of a new flow-control limit now.

    In batches: when a quarter of the window would be given, or when the peer has less left than that gives.
    """
    gain = limit - told
    return gain * 4 >= window or gain > told - arrived


def cut_reason(reason: str) -> str:
    """A close reason of at most REASON_LIMIT bytes of UTF-8."""
    return reason.encode("utf-8", "replace")[:REASON_LIMIT].decode("utf-8", "ignore")
