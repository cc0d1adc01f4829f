"""Parts of aioquic's sending side, made quicker: the sender of a stream, a sent packet, the pacer.

With `moqt.quic.receiving` and `moqt.quic.engine`, which puts them into a connection, the only place that uses
private attributes of aioquic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeAlias

from aioquic import tls
from aioquic.buffer import encode_uint_var
from aioquic.quic.congestion.base import QuicCongestionControl
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.recovery import QuicPacketPacer
from aioquic.quic.stream import QuicStream, QuicStreamSender

from moqt.quic.api import Buffer

__all__ = ["DataPacket", "OrderedSender", "Owner", "Pacer", "SendQueue", "Sink", "StreamState"]

STREAM: Final = 0x08
STREAM_FIN: Final = 0x01
STREAM_LENGTH: Final = 0x02
STREAM_OFFSET: Final = 0x04

MERGED: Final = 4096
"""Bytes up to which what is handed over becomes one piece: many small ones cost more than a copy."""

BURST: Final = 64
BURST_SECONDS: Final = 0.002

PACE_AT_START: Final = 2.0
"""Congestion windows in a round trip during slow start, as Linux does for TCP."""

PACE: Final = 1.25
"""The same afterwards (RFC 9002 7.7)."""

UNLOGGED: Final[list[dict[str, object]]] = []
"""What is logged of a packet where there is no qlog: one list for all packets. Nobody appends to it."""


class Sink(Protocol):
    """Where what a stream brings goes."""

    def received(self, data: bytes, fin: bool) -> None: ...
    def received_reset(self, code: int) -> None: ...


class Owner(Protocol):
    """Who is told of streams that come and go."""

    def stream_opened(self, stream_id: int, state: StreamState) -> None:
        """The peer has opened a stream: give `state` a sink."""

    def stream_done(self, stream_id: int) -> None:
        """A stream is over in both directions; what was received may be unread."""


class StreamState:
    """What the engine keeps of one stream that the application knows."""

    __slots__ = ("consumed", "done", "prefix", "quic", "released", "sink", "throttled", "urgent")

    def __init__(self, quic: QuicStream, stream_id: int) -> None:
        self.quic = quic
        self.sink: Sink | None = None
        self.consumed = 0
        self.released = False
        self.done = False
        self.urgent = False
        self.throttled = False
        self.prefix = encode_uint_var(stream_id)

    @property
    def credit(self) -> int:
        """Bytes that the stream's flow control allows beyond all handed over."""
        return max(0, self.quic.max_stream_data_remote - self.quic.sender._buffer_stop)

    @property
    def unsent(self) -> int:
        """Bytes handed over and not yet in a packet; 0 after a reset."""
        sender = self.quic.sender
        return 0 if sender._reset_error_code is not None else sender._buffer_stop - sender.highest_offset


class Pieces:
    """What a stream was handed and may still have to send, as it was handed: nothing large is copied."""

    __slots__ = ("_starts", "_views")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._views: list[memoryview] = []

    def append(self, offset: int, data: Buffer) -> None:
        """`data` comes at `offset` of the stream. A bytearray is copied: its owner may use it again."""
        if self._views and len(self._views[-1]) + len(data) <= MERGED:
            self._views[-1] = memoryview(bytes(self._views[-1]) + data)
        else:
            self._starts.append(offset)
            self._views.append(memoryview(bytes(data) if isinstance(data, bytearray) else data))

    def get(self, start: int, stop: int) -> bytes | memoryview:
        """The bytes from one offset to another, none of which was dropped."""
        if start == stop:
            return b""
        index = bisect_right(self._starts, start) - 1
        first = self._starts[index]
        view = self._views[index][start - first : stop - first]
        size = stop - start
        if len(view) == size:
            return view
        parts = [view]
        missing = size - len(view)
        while missing:
            index += 1
            parts.append(self._views[index][:missing])
            missing -= len(parts[-1])
        return b"".join(parts)

    def drop(self, stop: int) -> None:
        """Let go of what lies wholly before an offset."""
        count = bisect_right(self._starts, stop) - 1
        if count >= 0 and self._starts[count] + len(self._views[count]) <= stop:
            count += 1
        if count > 0:
            del self._starts[:count], self._views[:count]

    def clear(self) -> None:
        """Let go of all."""
        self._starts.clear()
        self._views.clear()


class OrderedSender(QuicStreamSender):
    """A sending half that is quick in the usual case: bytes leave and are acknowledged in order.

    Fresh bytes are those from `highest_offset` to `_buffer_stop`; `_pending` holds lost ranges only.
    """

    def __init__(self, stream_id: int | None, writable: bool) -> None:
        super().__init__(stream_id, writable)
        self._pieces = Pieces()

    def write(self, data: Buffer, end_stream: bool = False) -> None:
        if len(data):
            self._pieces.append(self._buffer_stop, data)
            self._buffer_stop += len(data)
            self.buffer_is_empty = False
        if end_stream:
            self._buffer_fin = self._buffer_stop
            self._pending_eof = True
            self.buffer_is_empty = False

    @property
    def next_offset(self) -> int:
        return self._pending[0].start if len(self._pending) else self.highest_offset

    @property
    def owes_again(self) -> bool:
        """Whether something that was sent before has to be sent again."""
        return bool(len(self._pending)) or (self._pending_eof and self.highest_offset == self._buffer_fin)

    def take(self, size: int, max_offset: int) -> tuple[int, bytes | memoryview, bool] | None:
        """The next frame of at most `size` bytes, as (offset, data, fin); None if nothing may be sent."""
        if len(self._pending):
            start, stop = self._pending[0].start, self._pending[0].stop
            if stop > start + size:
                stop = start + size
            self._pending.subtract(start, stop)
        else:
            start = self.highest_offset
            stop = min(self._buffer_stop, start + size, max_offset)
            if stop > start:
                self.highest_offset = stop
            elif not (self._pending_eof and start == self._buffer_fin):
                return None
            else:
                stop = start
        fin = stop == self._buffer_fin
        if fin:
            self._pending_eof = False
        if self.highest_offset == self._buffer_stop and not self._pending_eof and not len(self._pending):
            self.buffer_is_empty = True
        return start, self._pieces.get(start, stop), fin

    def on_data_delivery(self, delivery: QuicDeliveryState, start: int, stop: int, fin: bool) -> None:
        # aioquic's buffer is empty here: it does the reckoning, which says what is not needed any more.
        if (
            delivery is QuicDeliveryState.ACKED
            and start == self._buffer_start
            and not fin
            and self._reset_error_code is None
            and not len(self._acked)
        ):
            self._buffer_start = stop
        else:
            super().on_data_delivery(delivery, start, stop, fin)
        self._pieces.drop(self._buffer_start)

    def reset(self, error_code: int) -> None:
        super().reset(error_code)
        if self._reset_error_code is not None:
            self._pieces.clear()


Frame: TypeAlias = tuple[int, StreamState, int, int, bool]
"""Stream ID, state, start, stop, fin."""


class Filling:
    """What goes into one packet: frames, and their bytes: of each its head and its data."""

    __slots__ = ("credit", "frames", "fresh", "full", "pieces", "room")

    def __init__(self, room: int, credit: int) -> None:
        self.room = room
        self.credit = credit
        self.fresh = 0
        self.full = False
        self.frames: list[Frame] = []
        self.pieces: list[bytes | memoryview] = []


class SendQueue:
    """Whose bytes leave next: control and request streams, what was lost, and then in the order of handing
    over.

    A stream whose flow control lets nothing through is marked `throttled` and not looked at until it is added
    again.
    """

    def __init__(self) -> None:
        self.again: dict[int, StreamState] = {}
        self._urgent: dict[int, StreamState] = {}
        # (stream ID, state, offset up to which bytes were handed over by then).
        self._fresh: deque[tuple[int, StreamState, int]] = deque()

    @property
    def empty(self) -> bool:
        return not (self._urgent or self.again or self._fresh)

    def add(self, stream_id: int, state: StreamState) -> None:
        """The stream has more to send."""
        if state.throttled:
            return
        if state.urgent:
            self._urgent[stream_id] = state
        else:
            if self._fresh and self._fresh[-1][1] is state:
                self._fresh.pop()
            self._fresh.append((stream_id, state, state.quic.sender._buffer_stop))

    def drop(self, stream_id: int) -> None:
        """The stream sends nothing more. What stands in line for it is passed over."""
        self._urgent.pop(stream_id, None)
        self.again.pop(stream_id, None)

    def fill(self, room: int, credit: int) -> Filling:
        """Take frames of at most `room` bytes in sum, with at most `credit` bytes not sent before."""
        filling = Filling(room, credit)
        for stream_id, state in list(self._urgent.items()) if self._urgent else ():
            sender = state.quic.sender
            while self._take(filling, stream_id, state, sender._buffer_stop):
                pass
            if sender.buffer_is_empty or state.throttled:
                del self._urgent[stream_id]
        for stream_id, state in list(self.again.items()) if self.again else ():
            sender = state.quic.sender
            while self._take(filling, stream_id, state, sender.highest_offset):
                pass
            assert isinstance(sender, OrderedSender)
            if not sender.owes_again:
                del self.again[stream_id]
        fresh = self._fresh
        while fresh and not filling.full:
            stream_id, state, stop = fresh[0]
            sender = state.quic.sender
            if sender.buffer_is_empty or state.throttled:
                fresh.popleft()
            elif not self._take(filling, stream_id, state, stop):
                if not state.throttled and sender.highest_offset < stop:
                    break
                fresh.popleft()
        return filling

    def _take(self, filling: Filling, stream_id: int, state: StreamState, stop: int) -> bool:
        """Take one frame with bytes below the offset `stop`. False if nothing can be taken."""
        stream = state.quic
        sender = stream.sender
        assert isinstance(sender, OrderedSender)
        offset = sender.next_offset
        position = encode_uint_var(offset) if offset else b""
        size = filling.room - 3 - len(state.prefix) - len(position)
        if size < 1:
            filling.full = True
            return False
        highest = sender.highest_offset
        taken = sender.take(size, min(stream.max_stream_data_remote, highest + filling.credit, stop))
        if taken is None:
            state.throttled = stream.max_stream_data_remote <= highest < sender._buffer_stop
            return False
        offset, data, fin = taken
        fresh = sender.highest_offset - highest
        filling.fresh += fresh
        filling.credit -= fresh
        filling.room = size - len(data)
        kind = STREAM | STREAM_LENGTH | (STREAM_OFFSET if offset else 0) | fin
        filling.pieces += (
            bytes((kind,)) + state.prefix + position + (len(data) | 0x4000).to_bytes(2, "big"),
            data,
        )
        filling.frames.append((stream_id, state, offset, offset + len(data), fin))
        return True


class DataPacket:
    """A sent 1-RTT packet of nothing but stream data: what aioquic takes a QuicSentPacket for, in half the
    memory. What each keeps while it is in flight adds up to megabytes.
    """

    __slots__ = ("_deliver", "_frames", "packet_number", "quic_logger_frames", "sent_bytes", "sent_time")

    epoch = tls.Epoch.ONE_RTT
    in_flight = True
    is_ack_eliciting = True
    is_crypto_packet = False
    packet_type = QuicPacketType.ONE_RTT

    def __init__(
        self,
        packet_number: int,
        sent_bytes: int,
        frames: Iterable[Frame],
        deliver: Callable[..., None],
        quic_logger_frames: list[dict[str, object]],
    ) -> None:
        self.packet_number = packet_number
        self.sent_bytes = sent_bytes
        self.sent_time: float | None = None
        self.quic_logger_frames = quic_logger_frames
        self._frames = tuple(frames)
        self._deliver = deliver

    @property
    def delivery_handlers(self) -> list[tuple[Callable[..., None], Frame]]:
        """Whom the packet's fate is told to: (handler, arguments after the delivery state)."""
        return [(self._deliver, frame) for frame in self._frames]


class Pacer(QuicPacketPacer):
    """Lets through what is due in 2 ms at once, up to one system call's worth.

    aioquic stops at 16 datagrams; timers of asyncio come every ms at best, which is 23 MB/s (spec/quic.md).
    It also sends one window in a round trip, which the window then never outgrows when the round trip was
    measured while both ends did their handshake: RFC 9002 7.7 wants more than one.
    """

    def __init__(self, congestion: QuicCongestionControl, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._congestion = congestion

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        threshold = self._congestion.ssthresh
        starting = threshold is None or congestion_window < threshold
        paced = int(congestion_window * (PACE_AT_START if starting else PACE))
        super().update_rate(paced, smoothed_rtt)
        assert self.packet_time is not None
        # By the packet's time, which has a floor: by the rate, a fast path had bursts of a few datagrams.
        self.bucket_max = max(self.bucket_max, min(BURST_SECONDS, BURST * self.packet_time))
