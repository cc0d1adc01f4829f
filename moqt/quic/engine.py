"""aioquic's sans-IO connection with our flow control, stream limits and sending order.

EVERY use of a private attribute of aioquic stands here, in `sending` or in `receiving`: it is pinned < 1.8.
What differs from the `QuicConnection` that we derive from:

- receive windows move when the application has read, where aioquic doubles them whenever data arrives;
- stream limits are options, and their credit returns when the application is done with a stream;
- bytes leave in the order in which they were handed over, control and request streams first; aioquic takes
  turns, and goes round all live streams for each packet;
- packets that carry nothing but stream data are built and read here: aioquic's general code takes three times
  as long for them (spec/quic.md, "py-spy shares"). Whatever is not such a packet goes the way of aioquic.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, cast

from aioquic import tls
from aioquic._buffer import Buffer as QuicBuffer
from aioquic._crypto import CryptoError
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    MAX_STREAM_DATA_FRAME_CAPACITY,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionState,
    QuicNetworkPath,
    QuicReceiveContext,
)
from aioquic.quic.events import ConnectionTerminated, StreamReset
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicStreamFrame,
)
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import MAX_ACK_RANGES, QuicPacketSpace
from aioquic.quic.stream import FinalSizeError, QuicStream, StreamFinishedError

from moqt.quic.api import Buffer, QuicOptions
from moqt.quic.base import worth_telling
from moqt.quic.receiving import Fragments, peek_varint, read_varint, unprotect
from moqt.quic.sending import (
    STREAM,
    STREAM_FIN,
    STREAM_LENGTH,
    STREAM_OFFSET,
    UNLOGGED,
    DataPacket,
    OrderedSender,
    Owner,
    Pacer,
    SendQueue,
    StreamState,
)

if TYPE_CHECKING:
    from aioquic.quic.packet_builder import QuicSentPacket

__all__ = ["Engine", "StreamState"]

NetworkAddress = tuple[str, int] | tuple[str, int, int, int]

AEAD_TAG: Final = 16
ONE_RTT: Final = tls.Epoch.ONE_RTT
KEY_UPDATE_PACKETS: Final = 1 << 22
"""Packets sent under one key, about 6 GB: half of what AES-GCM allows (RFC 9001 6.6). aioquic sets none."""

MAX_FRAGMENTS: Final = 1024
"""Pieces of one stream that may have arrived ahead of others (RFC 9000 21.6)."""

# aioquic tells of TLS failures by a warning on stderr; they reach our callers as exceptions.
logging.getLogger("quic").addHandler(logging.NullHandler())


class Engine(QuicConnection):
    """One connection, client or server.

    `unsent` is the number of bytes handed over and not yet packetised.
    """

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        options: QuicOptions,
        owner: Owner,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        for limit, streams in (
            (self._local_max_streams_bidi, options.max_bidi_streams),
            (self._local_max_streams_uni, options.max_uni_streams),
        ):
            limit.value = limit.sent = streams
        self._loss._pacer = Pacer(self._loss._cc, max_datagram_size=self._max_datagram_size)
        self.unsent = 0
        self._owner = owner
        self._window = options.max_data
        self._stream_window = options.max_stream_data
        self._consumed = 0
        self._states: dict[int, StreamState] = {}
        self._queue = SendQueue()
        # Streams with a reset or STOP_SENDING that is not settled yet.
        self._aborting: dict[int, QuicStream] = {}
        self._key_update_at = KEY_UPDATE_PACKETS

    # For the connection above.

    @property
    def rtt(self) -> float | None:
        """The smoothed round-trip time in seconds; None before it was measured."""
        loss = self._loss
        return loss._rtt_smoothed if loss._rtt_initialized else None

    @property
    def credit(self) -> int:
        """Bytes that the connection's flow control allows beyond all handed over; below 0 if too much was."""
        return self._remote_max_data - self._remote_max_data_used - self.unsent

    @property
    def datagram_limit(self) -> int:
        """The longest DATAGRAM that fits into a packet and that the peer takes; -1 if it takes none."""
        remote = self._remote_max_datagram_frame_size or 0
        header = 3 + len(self._peer_cid.cid)
        return min(remote, self._max_datagram_size - header - AEAD_TAG) - 3 if remote > 3 else -1

    @property
    def datagrams_waiting(self) -> int:
        return len(self._datagrams_pending)

    @property
    def termination(self) -> tuple[ConnectionTerminated, bool] | None:
        """How the connection is ending and whether the peer ended it, as soon as that is known.

        aioquic's own event comes only when the closing period is over.
        """
        if self._close_event is None:
            return None
        return self._close_event, self._state is QuicConnectionState.DRAINING

    @property
    def closing(self) -> bool:
        """Whether there is a close of ours to be sent, or was."""
        return self._close_pending or self._state is QuicConnectionState.CLOSING

    @property
    def started(self) -> bool:
        """Whether a packet of the peer was understood."""
        return self._state is not QuicConnectionState.FIRSTFLIGHT

    @property
    def idle_timeout(self) -> float:
        """Seconds of silence, as agreed with the peer."""
        return self._idle_timeout()

    @property
    def held(self) -> int:
        """Bytes that have arrived, in order or not, and were not read."""
        return self._local_max_data.used - self._consumed

    def stream_credit(self, bidirectional: bool) -> int:
        if bidirectional:
            return self._remote_max_streams_bidi - self._local_next_stream_id_bidi // 4
        return self._remote_max_streams_uni - self._local_next_stream_id_uni // 4

    def open(self, bidirectional: bool) -> tuple[int, StreamState]:
        stream_id = self.get_next_available_stream_id(is_unidirectional=not bidirectional)
        return stream_id, self._know(stream_id, self._get_or_create_stream_for_send(stream_id))

    def state(self, stream_id: int) -> StreamState | None:
        """The state of a stream that an event was about; None if it is over."""
        state = self._states.get(stream_id)
        if state is None and stream_id in self._streams:
            state = self._know(stream_id, self._streams[stream_id])
            self._owner.stream_opened(stream_id, state)
        return state

    def send(self, stream_id: int, state: StreamState, data: Buffer, fin: bool) -> None:
        sender = state.quic.sender
        assert isinstance(sender, OrderedSender)
        sender.write(data, end_stream=fin)
        self.unsent += len(data)
        self._queue.add(stream_id, state)

    def reset(self, stream_id: int, state: StreamState, code: int) -> None:
        """Abort our sending side, unless everything was acknowledged."""
        if not state.quic.sender.is_finished:
            self.unsent -= state.unsent
            state.quic.sender.reset(code)
            self._aborted(stream_id, state.quic)

    def stop(self, stream_id: int, state: StreamState, code: int) -> None:
        """Send STOP_SENDING, unless everything has arrived."""
        if not state.quic.receiver.is_finished:
            state.quic.receiver.stop(code)
            self._aborting[stream_id] = state.quic

    def consumed(self, state: StreamState, size: int) -> bool:
        """The application has read or dropped `size` bytes. Whether the peer should hear of it now."""
        state.consumed += size
        self._consumed += size
        stream = state.quic
        news = False
        if not stream.receiver.is_finished and stream.receiver._stop_error_code is None:
            limit = state.consumed + self._stream_window
            arrived = stream.receiver.highest_offset
            if worth_telling(limit, stream.max_stream_data_local, arrived, self._stream_window):
                stream.max_stream_data_local = limit
                news = True
        return self._raise_max_data() or news

    def released(self, stream_id: int, state: StreamState) -> bool:
        """The application is done with the receiving half; with the stream over, its credit returns.

        Whether the peer should hear of it now.
        """
        state.released = True
        if state.done:
            self._return_credit(stream_id)
        return state.done

    def check_done(self, stream_id: int) -> None:
        """Forget the stream if it is over in both directions."""
        stream = self._streams.get(stream_id)
        if stream is None or not stream.is_finished:
            return
        del self._streams[stream_id]
        self._queue.drop(stream_id)
        self._aborting.pop(stream_id, None)
        state = self._states.pop(stream_id, None)
        if state is not None:
            state.done = True
            if state.released:
                self._return_credit(stream_id)
            self._owner.stream_done(stream_id)

    def finish(self) -> None:
        """End at once what is left of the closing period; the qlog file is written."""
        if self._state is not QuicConnectionState.TERMINATED and self._close_event is not None:
            self._close_end()

    def _confirm_handshake(self) -> None:
        super()._confirm_handshake()
        self._crypto_buffers.clear()  # 48 KiB for each connection, of which nothing is used any more.

    # Windows and credit.

    def _know(self, stream_id: int, stream: QuicStream) -> StreamState:
        sender = stream.sender
        if not sender.is_finished and sender._reset_error_code is None and not sender._buffer_stop:
            stream.sender = OrderedSender(stream_id, writable=True)
        stream.receiver._ranges = Fragments()
        state = self._states[stream_id] = StreamState(stream, stream_id)
        return state

    def _return_credit(self, stream_id: int) -> None:
        if (stream_id & 1) == self._is_client:
            self._stream_limit(stream_id).value += 1

    def _raise_max_data(self) -> bool:
        limit = self._local_max_data
        value = self._consumed + self._window
        if worth_telling(value, limit.value, limit.used, self._window):
            limit.value = value
        return limit.value != limit.sent

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        self._raise_max_data()
        limit = self._local_max_data
        # aioquic doubles the window when more than half of it is used: for the call, nothing is.
        used, limit.used = limit.used, 0
        try:
            super()._write_connection_limits(builder=builder, space=space)
        finally:
            limit.used = used

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream
    ) -> None:
        stream_id = stream.stream_id
        if (
            stream.max_stream_data_local_sent == stream.max_stream_data_local
            or stream.receiver.is_finished
            or stream_id is None
        ):
            return
        frame = builder.start_frame(
            QuicFrameType.MAX_STREAM_DATA,
            capacity=MAX_STREAM_DATA_FRAME_CAPACITY,
            handler=self._on_max_stream_data_delivery,
            handler_args=(stream,),
        )
        frame.push_uint_var(stream_id)
        frame.push_uint_var(stream.max_stream_data_local)
        stream.max_stream_data_local_sent = stream.max_stream_data_local
        if self._quic_logger is not None and builder.quic_logger_frames is not None:
            builder.quic_logger_frames.append(
                self._quic_logger.encode_max_stream_data_frame(
                    maximum=stream.max_stream_data_local, stream_id=stream_id
                )
            )

    # Sending.

    def _handle_max_stream_data_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: QuicBuffer
    ) -> None:
        stream_id = peek_varint(buf)
        super()._handle_max_stream_data_frame(context, frame_type, buf)
        state = self._states.get(stream_id)
        if state is not None and state.throttled:
            state.throttled = False
            self._queue.add(stream_id, state)

    def _on_stream_delivery(
        self,
        delivery: QuicDeliveryState,
        stream_id: int,
        state: StreamState,
        start: int,
        stop: int,
        fin: bool,
    ) -> None:
        sender = state.quic.sender
        sender.on_data_delivery(delivery, start, stop, fin)
        if sender.is_finished:
            self.check_done(stream_id)
        elif delivery is QuicDeliveryState.LOST and not sender.buffer_is_empty:
            self._queue.again[stream_id] = state

    def _aborted(self, stream_id: int, stream: QuicStream) -> None:
        self._aborting[stream_id] = stream
        self._queue.drop(stream_id)

    def _handle_stop_sending_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: QuicBuffer
    ) -> None:
        stream_id = peek_varint(buf)
        state = self._states.get(stream_id)
        unsent = state.unsent if state is not None else 0
        super()._handle_stop_sending_frame(context, frame_type, buf)  # resets our side with the peer's code
        self.unsent -= unsent
        self._aborted(stream_id, self._streams[stream_id])

    def _write_application(
        self, builder: QuicPacketBuilder, network_path: QuicNetworkPath, now: float
    ) -> None:
        # aioquic writes everything but stream data: it sees the streams with a reset or STOP_SENDING only.
        self._streams_queue = []
        for stream_id, stream in list(self._aborting.items()):
            sender, receiver = stream.sender, stream.receiver
            receiver.stop_pending = receiver.stop_pending and not receiver.is_finished
            if sender.reset_pending or receiver.stop_pending:
                self._streams_queue.append(stream)
            elif (sender._reset_error_code is None or sender.is_finished) and (
                receiver._stop_error_code is None or receiver.is_finished
            ):
                del self._aborting[stream_id]
                self.check_done(stream_id)
        super()._write_application(builder, network_path, now)
        if self._handshake_complete and self._pacing_at is None:
            self._write_data_packets(builder, now)

    def _write_stream_frame(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream, max_offset: int
    ) -> int:
        return 0

    def _write_data_packets(self, builder: QuicPacketBuilder, now: float) -> None:
        """Fill packets with stream data, as many as congestion window and pacing allow."""
        if self._queue.empty:
            return
        if builder._packet is not None:
            builder._end_packet()
        builder._flush_current_datagram()
        crypto = self._cryptos[ONE_RTT]
        pacer = self._loss._pacer
        cid = self._peer_cid.cid
        flags = 0x41 | self._spin_bit << 5
        overhead = 3 + len(cid) + AEAD_TAG
        largest = self._max_datagram_size
        deliver = self._on_stream_delivery  # made once: what each packet keeps adds up to megabytes
        while True:
            size = largest
            if builder.max_flight_bytes is not None:
                size = min(size, builder.max_flight_bytes - builder._flight_bytes)
            if builder.max_total_bytes is not None:
                size = min(size, builder.max_total_bytes - builder._total_bytes)
            # A packet of less than half the size waits until acknowledgements make room for a better one.
            if size * 2 < largest:
                return
            self._pacing_at = pacer.next_send_time(now=now)
            if self._pacing_at is not None:
                return
            filling = self._queue.fill(size - overhead, self._remote_max_data - self._remote_max_data_used)
            if not filling.frames:
                return
            self._remote_max_data_used += filling.fresh
            self.unsent -= filling.fresh
            log = UNLOGGED
            if self._quic_logger is not None:
                log = []
                for (stream_id, _, offset, _, fin), data in zip(
                    filling.frames, filling.pieces[1::2], strict=True
                ):
                    frame = QuicStreamFrame(data=bytes(data), fin=fin, offset=offset)
                    log.append(self._quic_logger.encode_stream_frame(frame, stream_id=stream_id))
            number = builder._packet_number
            if number >= self._key_update_at:
                self._key_update_at = number + KEY_UPDATE_PACKETS
                self.request_key_update()
            payload = b"".join(filling.pieces)
            header = bytes((flags | crypto.key_phase << 2,)) + cid + (number & 0xFFFF).to_bytes(2, "big")
            datagram = crypto.encrypt_packet(header, payload, number)
            builder._packet_number = number + 1
            packet = DataPacket(number, len(datagram), filling.frames, deliver, log)
            builder._packets.append(cast("QuicSentPacket", packet))
            builder._datagrams.append(datagram)
            builder._flight_bytes += len(datagram)
            builder._total_bytes += len(datagram)
            pacer.update_after_send(now=now)

    # Receiving.

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        if not self._receive_quickly(data, addr, now):
            super().receive_datagram(data, addr, now)

    def _receive_quickly(self, data: bytes, addr: NetworkAddress, now: float) -> bool:
        """Handle a 1-RTT packet on the established path under the current key; False for all others."""
        length = len(self.host_cid)
        if (
            data[0] & 0x80
            or not self._handshake_confirmed
            or self._state is not QuicConnectionState.CONNECTED
            or self._close_pending
            or self._quic_logger is not None
            or data[1 : 1 + length] != self.host_cid
            or self._network_paths[0].addr != addr
            or not self._network_paths[0].is_validated
        ):
            return False
        space = self._spaces[ONE_RTT]
        try:
            packet = unprotect(self._cryptos[ONE_RTT].recv, data, length, space.expected_packet_number)
        except CryptoError:
            return True
        if packet is None:
            return False
        first, number, payload = packet
        if number in space.received_packets:
            return True
        if number > space.expected_packet_number:
            space.expected_packet_number = number + 1
        if number > self._spin_highest_pn:
            self._spin_bit = bool(first & 0x20) != self._is_client
            self._spin_highest_pn = number
        try:
            ack_eliciting = self._read_payload(payload, now)
        except QuicConnectionError as error:
            self.close(error.error_code, error.frame_type, error.reason_phrase)
            return True
        if self._state is not QuicConnectionState.CONNECTED or self._close_pending:
            return True
        self._close_at = now + self._idle_timeout()
        self._ack_eliciting_sent_since_receipt = False
        if number > space.largest_received_packet:
            space.largest_received_packet = number
            space.largest_received_time = now
        space.ack_queue.add(number)
        space.received_packets.add(number)
        if len(space.ack_queue) > MAX_ACK_RANGES:
            space.ack_queue.shift()
        if ack_eliciting:
            # RFC 9000 13.2.2: a second packet is not left to the timer, which costs slow start a round trip.
            space.ack_at = now + self._ack_delay if space.ack_at is None else now
        return True

    def _read_payload(self, payload: bytes, now: float) -> bool:
        """Handle the frames of a packet: STREAM frames here, from the first other one on aioquic."""
        at = 0
        end = len(payload)
        while at < end:
            kind = payload[at]
            if kind & 0xF8 != STREAM:
                context = QuicReceiveContext(
                    epoch=ONE_RTT,
                    host_cid=self.host_cid,
                    network_path=self._network_paths[0],
                    quic_logger_frames=None,
                    time=now,
                    version=None,
                )
                eliciting, _ = self._payload_received(context, payload[at:] if at else payload)
                return eliciting or at > 0
            try:
                stream_id, at = read_varint(payload, at + 1)
                offset, at = read_varint(payload, at) if kind & STREAM_OFFSET else (0, at)
                size, at = read_varint(payload, at) if kind & STREAM_LENGTH else (end - at, at)
            except IndexError:
                size = end + 1
            if at + size > end:
                raise QuicConnectionError(QuicErrorCode.FRAME_ENCODING_ERROR, kind, "Failed to parse frame")
            self._receive_stream_data(
                kind, stream_id, offset, payload[at : at + size], bool(kind & STREAM_FIN)
            )
            at += size
        if not end:
            raise QuicConnectionError(
                QuicErrorCode.PROTOCOL_VIOLATION, QuicFrameType.PADDING, "Packet contains no frames"
            )
        return True

    def _handle_reset_stream_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: QuicBuffer
    ) -> None:
        super()._handle_reset_stream_frame(context, frame_type, buf)
        if not self._events or not isinstance(self._events[-1], StreamReset):
            return
        # At once and not as an event, so that the sink hears of it before the stream can be over.
        event = self._events.pop()
        assert isinstance(event, StreamReset)
        state = self.state(event.stream_id)
        assert state is not None
        assert state.sink is not None
        # What the peer had sent and nobody has read counts as read.
        self.consumed(state, state.quic.receiver.highest_offset - state.consumed)
        state.sink.received_reset(event.error_code)
        self.check_done(event.stream_id)

    def _handle_stream_frame(self, context: QuicReceiveContext, frame_type: int, buf: QuicBuffer) -> None:
        stream_id = buf.pull_uint_var()
        offset = buf.pull_uint_var() if frame_type & STREAM_OFFSET else 0
        length = buf.pull_uint_var() if frame_type & STREAM_LENGTH else buf.capacity - buf.tell()
        data = buf.pull_bytes(length)
        fin = bool(frame_type & STREAM_FIN)
        if self._quic_logger is not None and context.quic_logger_frames is not None:
            frame = QuicStreamFrame(data=data, fin=fin, offset=offset)
            context.quic_logger_frames.append(
                self._quic_logger.encode_stream_frame(frame, stream_id=stream_id)
            )
        self._receive_stream_data(frame_type, stream_id, offset, data, fin)

    def _receive_stream_data(self, kind: int, stream_id: int, offset: int, data: bytes, fin: bool) -> None:
        """Check a STREAM frame against the limits and give its data in order to the sink (RFC 9000 19.8)."""
        state = self._states.get(stream_id)
        if state is None:
            self._assert_stream_can_receive(kind, stream_id)
            try:
                self._get_or_create_stream(kind, stream_id)
            except StreamFinishedError:
                return
            state = self.state(stream_id)
            assert state is not None
        elif (stream_id & 3) == 2 + (not self._is_client):
            self._assert_stream_can_receive(kind, stream_id)
        stream = state.quic
        receiver = stream.receiver
        stop = offset + len(data)
        if stop > stream.max_stream_data_local:
            raise QuicConnectionError(QuicErrorCode.FLOW_CONTROL_ERROR, kind, "Over stream data limit")
        fresh = stop - receiver.highest_offset
        if fresh > 0:
            window = self._local_max_data
            if window.used + fresh > window.value:
                raise QuicConnectionError(
                    QuicErrorCode.FLOW_CONTROL_ERROR, kind, "Over connection data limit"
                )
        if (
            offset == receiver._buffer_start == receiver.highest_offset
            and not fin
            and data
            and receiver._final_size is None
            and not receiver.is_finished
        ):
            receiver._buffer_start = receiver.highest_offset = stop
            window.used += fresh
        else:
            try:
                event = receiver.handle_frame(QuicStreamFrame(data=data, fin=fin, offset=offset))
            except FinalSizeError as error:
                raise QuicConnectionError(QuicErrorCode.FINAL_SIZE_ERROR, kind, str(error)) from error
            if len(receiver._ranges) > MAX_FRAGMENTS:
                raise QuicConnectionError(QuicErrorCode.INTERNAL_ERROR, kind, "Too many fragments")
            if fresh > 0:
                self._local_max_data.used += fresh
            if event is None:
                return
            data, fin = event.data, event.end_stream
        assert state.sink is not None
        state.sink.received(data, fin)
        if fin:
            self.check_done(stream_id)
