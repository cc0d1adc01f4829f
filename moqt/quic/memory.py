"""An end of a connection in one process, for tests: what `moqt.quic.link` connects."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moqt.errors import UsageError
from moqt.quic.api import Buffer, ConnectionClosed, QuicOptions, Traffic
from moqt.quic.base import BaseConnection, BaseStream, Signal, cut_reason, worth_telling

if TYPE_CHECKING:
    from moqt.quic.link import Link

__all__ = ["EndStats", "MemoryConnection", "MemoryStream"]

PACKET_OVERHEAD: Final = 64


@dataclass(slots=True)
class EndStats:
    """What one end has sent, and the most it ever held. Bytes of stream data."""

    sent: int = 0
    pieces: int = 0
    delayed: int = 0
    datagrams: int = 0
    peak_unsent: int = 0
    peak_held: int = 0


class MemoryStream(BaseStream):
    """One end of a stream."""

    def __init__(
        self,
        connection: MemoryConnection,
        stream_id: int,
        *,
        readable: bool,
        writable: bool,
        send_window: int,
        receive_window: int,
    ) -> None:
        super().__init__(connection, stream_id, readable=readable, writable=writable)
        # Sending: `waiting` is what was handed over and not sent.
        self.waiting = bytearray()
        self.fin_waiting = False
        self.sent = 0
        self.peer_limit = send_window
        self.sending_done = not writable
        # Receiving.
        self.arrived = 0
        self.consumed = 0
        self.window = receive_window
        self.advertised = receive_window
        self.receiving_done = not readable

    @property
    def credit(self) -> int:
        return max(0, self.peer_limit - self.sent - len(self.waiting))

    @property
    def unsent(self) -> int:
        return len(self.waiting)


class MemoryConnection(BaseConnection[MemoryStream]):
    """One end of a `Link`."""

    peer_end: MemoryConnection

    def __init__(self, link: Link, *, is_client: bool, alpn: str, options: QuicOptions) -> None:
        name = "client" if is_client else "server"
        super().__init__(
            is_client=is_client,
            alpn=alpn,
            peer="memory:" + ("server" if is_client else "client"),
            name=f"memory-{name}",
            options=options,
        )
        self.stats = EndStats()
        self._link = link
        # Sending.
        self._unsent = 0
        self._sent = 0
        self._in_flight = 0
        self._peer_limit = 0
        self._urgent: dict[int, MemoryStream] = {}
        self._in_line: deque[tuple[MemoryStream, int]] = deque()
        self._opened = {True: 0, False: 0}
        self._peer_streams = {True: 0, False: 0}
        self._pongs: dict[int, Signal] = {}
        self._ping_ids = itertools.count()
        # Receiving. Streams: how many the peer has opened, may open by our count, and was told of.
        self._arrived = 0
        self._consumed = 0
        self._advertised = options.max_data
        self._peer_opened = {True: 0, False: 0}
        self._unseen: set[int] = set()
        self._stream_limit = {True: options.max_bidi_streams, False: options.max_uni_streams}
        self._stream_limit_told = dict(self._stream_limit)

    def meet(self, peer_end: MemoryConnection) -> None:
        """Take the peer's transport parameters, as the handshake does."""
        self.peer_end = peer_end
        self._peer_limit = peer_end.options.max_data
        self.reserve = min(self.reserve, self._peer_limit // 8)
        self._peer_streams = dict(peer_end._stream_limit)

    # Connection.

    @property
    def traffic(self) -> Traffic:
        """Bytes of stream data, on their way included."""
        stats = self._link.stats
        ours, theirs = (stats.client, stats.server) if self.is_client else (stats.server, stats.client)
        return Traffic(theirs.sent, ours.sent, None)

    @property
    def unsent(self) -> int:
        return self._unsent

    @property
    def full_credit(self) -> int:
        return self._peer_limit - self._sent - self._unsent

    @property
    def held(self) -> int:
        """Bytes that have arrived and were not read."""
        return self._arrived - self._consumed

    def stream_credit(self, *, bidirectional: bool) -> int:
        return self._peer_streams[bidirectional] - self._opened[bidirectional]

    def send_datagram(self, data: Buffer) -> None:
        self.check_open()
        room = self.options.max_datagram_size - PACKET_OVERHEAD
        if len(data) > room:
            raise UsageError(f"a datagram of {len(data)} bytes does not fit into a packet: at most {room}")
        self.stats.datagrams += 1
        self._link.post_datagram(self, bytes(data))

    async def ping(self) -> None:
        self.check_open()
        uid = next(self._ping_ids)
        self._pongs[uid] = Signal()
        self._link.post(self, self.peer_end.on_ping, uid)
        try:
            await self._pongs[uid].wait()
        finally:
            del self._pongs[uid]
        self.check_open()

    def close(self, code: int = 0, reason: str = "") -> None:
        if self.closed is None:
            reason = cut_reason(reason)
            self._send_some()
            self._link.post(self, self.peer_end.on_close, code, reason)
            self.ended(ConnectionClosed(code, reason, remote=False, application=True))
            self._loop.call_later(3 * self._link.latency, self.over)

    def ended(self, why: ConnectionClosed) -> None:
        super().ended(why)
        for signal in self._pongs.values():
            signal.wake()
        self._link.end_closed()

    # What the base asks for.

    def transport_open(self, bidirectional: bool) -> MemoryStream:
        number = self._opened[bidirectional]
        self._opened[bidirectional] += 1
        stream = self._make_stream(number * 4 + (not self.is_client) + 2 * (not bidirectional))
        self._streams[stream.id] = stream
        return stream

    def transport_send(self, stream: BaseStream, data: Buffer, fin: bool) -> None:
        assert isinstance(stream, MemoryStream)
        stream.waiting += data
        stream.fin_waiting = fin
        self._unsent += len(data)
        self.stats.peak_unsent = max(self.stats.peak_unsent, self._unsent)
        self._stand_in_line(stream)

    def transport_reset(self, stream: BaseStream, code: int) -> None:
        assert isinstance(stream, MemoryStream)
        if not stream.sending_done:
            self._drop_waiting(stream)
            self._link.post(self, self.peer_end.on_reset, stream.id, code, stream.sent)
            self._maybe_done(stream)

    def transport_stop(self, stream: BaseStream, code: int) -> None:
        self._link.post(self, self.peer_end.on_stop, stream.id, code)

    def transport_consumed(self, stream: BaseStream, size: int) -> None:
        assert isinstance(stream, MemoryStream)
        if self.closed is not None:
            return
        stream.consumed += size
        self._consumed += size
        if not stream.receiving_done and not stream.reading_stopped:
            limit = stream.consumed + stream.window
            if worth_telling(limit, stream.advertised, stream.arrived, stream.window):
                stream.advertised = limit
                self._link.post(self, self.peer_end.on_max_stream_data, stream.id, limit)
        limit = self._consumed + self.options.max_data
        if worth_telling(limit, self._advertised, self._arrived, self.options.max_data):
            self._advertised = limit
            self._link.post(self, self.peer_end.on_max_data, limit)

    def transport_released(self, stream: BaseStream) -> None:
        assert isinstance(stream, MemoryStream)
        self._maybe_done(stream)

    def transport_pass(self) -> None:
        while self.closed is None:
            self.feed()
            if not self._send_some():
                break
        self.more_credit()

    # What arrives from the other end.

    def on_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        stream = self._find(stream_id)
        if stream is None or stream.receiving_done:
            return
        stream.arrived += len(data)
        self._arrived += len(data)
        assert stream.arrived <= stream.advertised, "the sender broke the window of the stream"
        assert self._arrived <= self._advertised, "the sender broke the window of the connection"
        self.stats.peak_held = max(self.stats.peak_held, self.held)
        stream.receiving_done = fin
        stream.received(data, fin)
        if fin:
            self._maybe_done(stream)

    def on_reset(self, stream_id: int, code: int, final_size: int) -> None:
        stream = self._find(stream_id)
        if stream is None or stream.receiving_done:
            return
        self._arrived += final_size - stream.arrived
        stream.arrived = final_size
        stream.receiving_done = True
        self.transport_consumed(stream, final_size - stream.consumed)
        stream.received_reset(code)
        self._maybe_done(stream)

    def on_stop(self, stream_id: int, code: int) -> None:
        stream = self._find(stream_id)
        if stream is not None and not stream.sending_done:
            self.transport_reset(stream, code)
            stream.received_stop(code)

    def on_max_data(self, limit: int) -> None:
        self._peer_limit = max(self._peer_limit, limit)

    def on_max_stream_data(self, stream_id: int, limit: int) -> None:
        stream = self._find(stream_id)
        if stream is not None:
            throttled = stream.sent >= stream.peer_limit and stream.waiting
            stream.peer_limit = max(stream.peer_limit, limit)
            if throttled:
                self._stand_in_line(stream)

    def on_max_streams(self, bidirectional: bool, limit: int) -> None:
        self._peer_streams[bidirectional] = max(self._peer_streams[bidirectional], limit)

    def on_acknowledged(self, stream_id: int, size: int, fin: bool) -> None:
        self._in_flight -= size
        stream = self._streams.get(stream_id)
        if fin and stream is not None and not stream.sending_done:
            stream.sending_done = True
            self._maybe_done(stream)

    def on_datagram_frame(self, data: bytes) -> None:
        if self.on_datagram is not None:
            self.call_out(self.on_datagram, data)

    def on_ping(self, uid: int) -> None:
        self._link.post(self, self.peer_end.on_pong, uid)

    def on_pong(self, uid: int) -> None:
        if uid in self._pongs:
            self._pongs[uid].wake()

    def on_close(self, code: int, reason: str) -> None:
        self.ended(ConnectionClosed(code, reason, remote=True, application=True))
        self.over()

    # Within.

    def _make_stream(self, stream_id: int) -> MemoryStream:
        bidirectional = not stream_id & 2
        ours = (stream_id & 1) == (not self.is_client)
        return MemoryStream(
            self,
            stream_id,
            readable=bidirectional or not ours,
            writable=bidirectional or ours,
            send_window=self.peer_end.options.max_stream_data,
            receive_window=self.options.max_stream_data,
        )

    def _find(self, stream_id: int) -> MemoryStream | None:
        """The stream that a frame is about; made if the peer has just opened it, None if it is over."""
        bidirectional = not stream_id & 2
        number = stream_id // 4
        if (stream_id & 1) != self.is_client or stream_id in self._streams:
            return self._streams.get(stream_id)
        if number < self._peer_opened[bidirectional] and stream_id not in self._unseen:
            return None
        assert number < self._stream_limit_told[bidirectional], "the peer opened more streams than allowed"
        # Opening a stream opens all below it (RFC 9000 2.1); the application hears of each with its first
        # frame.
        for other in range(self._peer_opened[bidirectional], number + 1):
            self._unseen.add(other * 4 + stream_id % 4)
        self._peer_opened[bidirectional] = max(self._peer_opened[bidirectional], number + 1)
        self._unseen.discard(stream_id)
        stream = self._make_stream(stream_id)
        self.arrived(stream)
        self._tell_stream_limit(bidirectional)
        return stream

    def _stand_in_line(self, stream: MemoryStream) -> None:
        if stream.urgent:
            self._urgent[stream.id] = stream
        else:
            self._in_line.append((stream, stream.sent + len(stream.waiting)))

    def _send_some(self) -> bool:
        """Send what the congestion window has room for: urgent streams, then in the order of handing over.

        Whether anything was sent.
        """
        before = self.stats.pieces
        for stream in list(self._urgent.values()):
            while self._send_piece(stream, stream.sent + len(stream.waiting)):
                pass
            if not stream.waiting and not stream.fin_waiting:
                del self._urgent[stream.id]
        while self._in_line:
            stream, stop = self._in_line[0]
            if self._send_piece(stream, stop):
                continue
            pending = stream.sent < stop if stream.waiting else stream.fin_waiting
            throttled = stream.waiting and stream.sent >= stream.peer_limit
            if pending and not throttled:
                break
            # All of it is sent, or the stream is throttled: it stands in line again when its credit comes.
            self._in_line.popleft()
        return self.stats.pieces > before

    def _send_piece(self, stream: MemoryStream, stop: int) -> bool:
        """Send some bytes below the offset `stop`. False if nothing can be sent."""
        if self._in_flight >= self._link.window:
            return False
        size = min(
            len(stream.waiting),
            stop - stream.sent,
            self._link.piece_size(),
            stream.peer_limit - stream.sent,
            self._peer_limit - self._sent,
        )
        fin = stream.fin_waiting and size == len(stream.waiting)
        if size <= 0 and not fin:
            return False
        data = bytes(memoryview(stream.waiting)[:size])
        del stream.waiting[:size]
        stream.sent += size
        self._sent += size
        self._unsent -= size
        self._in_flight += size
        self.stats.sent += size
        self.stats.pieces += 1
        if fin:
            stream.fin_waiting = False
        self._link.post_piece(self, stream.id, data, fin)
        return True

    def _drop_waiting(self, stream: MemoryStream) -> None:
        self._unsent -= len(stream.waiting)
        stream.waiting.clear()
        stream.fin_waiting = False
        stream.sending_done = True
        self._urgent.pop(stream.id, None)

    def _maybe_done(self, stream: MemoryStream) -> None:
        """Forget a stream that is over on both sides; return the credit of one that the peer opened, once the
        application is done with it too.
        """
        ours = (stream.id & 1) != self.is_client
        if not (stream.sending_done and stream.receiving_done and (ours or stream.released)):
            return
        if self._streams.pop(stream.id, None) is None or ours:
            return
        self._stream_limit[stream.bidirectional] += 1
        self._tell_stream_limit(stream.bidirectional)

    def _tell_stream_limit(self, bidirectional: bool) -> None:
        limit = self._stream_limit[bidirectional]
        told = self._stream_limit_told[bidirectional]
        # In batches: when the peer has fewer left to open than we would give.
        if told - self._peer_opened[bidirectional] < limit - told:
            self._stream_limit_told[bidirectional] = limit
            self._link.post(self, self.peer_end.on_max_streams, bidirectional, limit)
