"""Connection and streams over aioquic, client and server alike.

The endpoint in `moqt.quic.udp` gives it datagrams and takes those that it builds; one `transport_pass` per
batch handles the events, lets the feeder top up, builds packets and sets the timer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable
from typing import Final, Protocol

from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import AlertDescription

from moqt.errors import UsageError
from moqt.names import printable
from moqt.quic.api import Buffer, ConnectionClosed, QuicOptions, Traffic
from moqt.quic.base import BaseConnection, BaseStream, Signal, cut_reason
from moqt.quic.engine import Engine, NetworkAddress, StreamState

logger = logging.getLogger(__name__)

__all__ = ["AioquicConnection", "AioquicStream", "DatagramPort", "explain"]

DATAGRAMS_WAITING: Final = 64
"""DATAGRAM frames that may wait to be sent; more are dropped, as the network might have done."""

CLOSE_ANSWERS: Final = 8
"""How often our close is sent again to a peer that goes on sending (RFC 9000 10.2.1)."""

CRYPTO_ERROR: Final = 0x100
IDLE_TIMEOUT: Final = "idle time-out: nothing came from the peer for {:g} s"

ALERTS: Final = {
    AlertDescription.handshake_failure: "no common cipher, group or signature algorithm",
    AlertDescription.bad_certificate: "the certificate was not accepted; it must be signed by the trusted CA "
    "(is it the right CA file?) and made for the name or address that was dialled",
    AlertDescription.certificate_expired: "the certificate is expired, or not valid yet (are the clocks "
    "right?)",
    AlertDescription.certificate_unknown: "the certificate was not accepted",
    AlertDescription.unknown_ca: "the certificate is signed by an unknown CA (is it the right CA file?)",
    AlertDescription.decrypt_error: "a signature in the handshake was wrong (does the key belong to the "
    "certificate?)",
    AlertDescription.protocol_version: "no common version of TLS",
    AlertDescription.certificate_required: "a client certificate is required",
    AlertDescription.no_application_protocol: "no common application protocol (ALPN): the two sides speak "
    "different versions of MOQT, or the other is not a MOQT endpoint",
}

_CERTIFICATE_NAME: Final = re.compile(
    r"(?:DNSPattern|IPAddressPattern)\(pattern=(?:b|IPv[46]Address\()'([^']*)'\)+"
)
"""How aioquic writes a name that a certificate is made for."""


class DatagramPort(Protocol):
    """What a connection needs of its endpoint."""

    @property
    def blocked(self) -> bool:
        """Whether the kernel takes no more datagrams now; `transport_pass` is called when it does again."""

    def send(self, datagrams: list[tuple[bytes, NetworkAddress]]) -> None: ...
    def add_id(self, connection: AioquicConnection, connection_id: bytes) -> None: ...
    def remove_id(self, connection: AioquicConnection, connection_id: bytes) -> None: ...
    def remove(self, connection: AioquicConnection) -> None:
        """The connection is over: forget it."""


class AioquicStream(BaseStream):
    """One end of a stream."""

    def __init__(
        self,
        connection: AioquicConnection,
        state: StreamState,
        stream_id: int,
        *,
        readable: bool,
        writable: bool,
    ) -> None:
        super().__init__(connection, stream_id, readable=readable, writable=writable)
        self.state = state
        state.sink = self

    @property
    def credit(self) -> int:
        return self.state.credit

    @property
    def unsent(self) -> int:
        return self.state.unsent


class AioquicConnection(BaseConnection[AioquicStream]):
    """One end of a connection, from its first packet on.

    When the handshake is complete, `ready` is set and `on_ready` called. `settled` is done when it is
    complete or has failed. `host` is the peer's, for the listener to count.
    """

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        options: QuicOptions,
        port: DatagramPort,
        peer: str,
        on_ready: Callable[[AioquicConnection], None],
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
    ) -> None:
        self.engine = Engine(
            configuration=configuration,
            options=options,
            owner=self,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        super().__init__(
            is_client=configuration.is_client,
            alpn="",
            peer=peer,
            name=self.engine.original_destination_connection_id.hex()[:8],
            options=options,
        )
        self.ready = False
        self.host = ""
        self.settled: asyncio.Future[None] = self._loop.create_future()
        self._port = port
        self._received = 0
        self._sent = 0
        self._on_ready = on_ready
        self._pongs: dict[int, Signal] = {}
        self._ping_ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._keepalive: asyncio.TimerHandle | None = None
        self._handshake: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()
        self._close_datagrams: list[tuple[bytes, NetworkAddress]] = []
        self._close_answers = 0

    # Connection.

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._received, self._sent, self.engine.rtt)

    @property
    def unsent(self) -> int:
        return self.engine.unsent

    @property
    def full_credit(self) -> int:
        return self.engine.credit

    @property
    def held(self) -> int:
        """Bytes that have arrived, in order or not, and were not read."""
        return self.engine.held

    def stream_credit(self, *, bidirectional: bool) -> int:
        return self.engine.stream_credit(bidirectional)

    def send_datagram(self, data: Buffer) -> None:
        self.check_open()
        limit = self.engine.datagram_limit
        if limit < 0:
            raise UsageError("the peer takes no datagrams")
        if len(data) > limit:
            raise UsageError(f"a datagram of {len(data)} bytes does not fit into a packet: at most {limit}")
        if self.engine.datagrams_waiting < DATAGRAMS_WAITING:
            self.engine.send_datagram_frame(bytes(data))
            self.kick()

    async def ping(self) -> None:
        self.check_open()
        uid = next(self._ping_ids)
        self._pongs[uid] = Signal()
        self.engine.send_ping(uid)
        self.kick()
        try:
            await self._pongs[uid].wait()
        finally:
            del self._pongs[uid]
        self.check_open()

    def close(self, code: int = 0, reason: str = "") -> None:
        self._close(ConnectionClosed(code, cut_reason(reason), remote=False, application=True), None)

    def abort(self, code: int, reason: str) -> None:
        """Close with a transport error: the handshake took too long, or aioquic failed."""
        self._close(ConnectionClosed(code, cut_reason(reason), remote=False, application=False), 0)

    # For the endpoint.

    def datagrams_received(self, datagrams: list[tuple[bytes, NetworkAddress]]) -> None:
        """Take a batch from the network; `transport_pass` comes after it."""
        if self.closed is not None:
            # Ours was lost, or crossed what the peer sent before it came: say it again, less and less often.
            self._close_answers += 1
            if self._close_answers <= CLOSE_ANSWERS:
                self._send(self._close_datagrams)
            return
        self._received += sum(len(data) for data, _ in datagrams)
        now = self._heard_at = self._loop.time()
        for data, address in datagrams:
            try:
                self.engine.receive_datagram(data, address, now)
            except Exception as error:
                self._loop.call_exception_handler(
                    {"message": f"aioquic failed on a datagram of connection {self.id}", "exception": error}
                )
                self.abort(QuicErrorCode.INTERNAL_ERROR, "internal error")
                return

    def expect_handshake(self, seconds: float) -> None:
        """Give the connection up if its handshake takes longer."""
        self._handshake = self._loop.call_later(seconds, self.lost, "the handshake took too long")

    def lost(self, reason: str) -> None:
        """The network says that the peer can't be reached: give the connection up."""
        self._finish(ConnectionClosed(0, reason, remote=False, application=False))

    # What the base asks for.

    def transport_open(self, bidirectional: bool) -> AioquicStream:
        stream_id, state = self.engine.open(bidirectional)
        stream = AioquicStream(self, state, stream_id, readable=bidirectional, writable=True)
        self._streams[stream_id] = stream
        return stream

    def transport_send(self, stream: BaseStream, data: Buffer, fin: bool) -> None:
        assert isinstance(stream, AioquicStream)
        stream.state.urgent = stream.urgent
        self.engine.send(stream.id, stream.state, data, fin)

    def transport_reset(self, stream: BaseStream, code: int) -> None:
        assert isinstance(stream, AioquicStream)
        self.engine.reset(stream.id, stream.state, code)

    def transport_stop(self, stream: BaseStream, code: int) -> None:
        assert isinstance(stream, AioquicStream)
        self.engine.stop(stream.id, stream.state, code)
        self.kick()

    def transport_consumed(self, stream: BaseStream, size: int) -> None:
        assert isinstance(stream, AioquicStream)
        if self.closed is None and self.engine.consumed(stream.state, size):
            self.kick()

    def transport_released(self, stream: BaseStream) -> None:
        assert isinstance(stream, AioquicStream)
        if self.engine.released(stream.id, stream.state):
            self.kick()

    def transport_pass(self) -> None:
        if self.closed is not None:
            return
        now = self._loop.time()
        self._handle_events()
        while self.closed is None and not self._port.blocked:
            self.feed()
            if self.closed is not None:
                break
            datagrams = self.engine.datagrams_to_send(now)
            if datagrams:
                self._send(datagrams)
            # Once more if everything handed over has left: the feeder may have stopped at the watermark.
            if not datagrams or self.engine.unsent or self.feeder is None:
                break
        if self.closed is None:
            if not self._port.blocked:
                self._set_timer()
            self.more_credit()

    def ended(self, why: ConnectionClosed) -> None:
        super().ended(why)
        for signal in self._pongs.values():
            signal.wake()
        if not self.settled.done():
            self.settled.set_result(None)
            logger.info("handshake of %s with %s failed: %s", self.id, self.peer, why)

    # For the engine.

    def stream_opened(self, stream_id: int, state: StreamState) -> None:
        self.arrived(AioquicStream(self, state, stream_id, readable=True, writable=not stream_id & 2))

    def stream_done(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)

    # Within.

    def _handle_events(self) -> None:
        engine = self.engine
        while (event := engine.next_event()) is not None:
            match event:
                case events.StopSendingReceived(error_code=code, stream_id=stream_id):
                    if engine.state(stream_id) is not None:
                        self._streams[stream_id].received_stop(code)
                case events.DatagramFrameReceived(data=data):
                    if self.on_datagram is not None:
                        self.call_out(self.on_datagram, data)
                case events.PingAcknowledged(uid=uid):
                    if uid in self._pongs:
                        self._pongs[uid].wake()
                case events.ConnectionIdIssued(connection_id=connection_id):
                    self._port.add_id(self, connection_id)
                case events.ConnectionIdRetired(connection_id=connection_id):
                    self._port.remove_id(self, connection_id)
                case events.HandshakeCompleted(alpn_protocol=alpn):
                    self.alpn = alpn or ""
                    self.ready = True
                    self.reserve = min(self.reserve, engine.credit // 8)
                    if self._handshake is not None:
                        self._handshake.cancel()
                    if not self.settled.done():
                        self.settled.set_result(None)
                    self._keep_alive()
                    self.call_out(self._on_ready, self)
                case _:
                    pass
            if self.closed is not None:
                return
        if engine.termination is not None:
            event, remote = engine.termination
            why = _why(event, remote, engine.idle_timeout)
            if remote or not engine.closing:
                self._finish(why)
            else:
                self._begin_closing(why)

    def _close(self, why: ConnectionClosed, frame_type: int | None) -> None:
        if self.closed is None:
            if self.ready and self.engine.unsent:
                self._send(self.engine.datagrams_to_send(self._loop.time()))
            self.engine.close(error_code=why.code, frame_type=frame_type, reason_phrase=why.reason)
            self._begin_closing(why)

    def _begin_closing(self, why: ConnectionClosed) -> None:
        """Send our close, and stay for a while to say it again (RFC 9000 10.2.1)."""
        self._cancel_timers()
        if self.engine.started or self.is_client:
            self._close_datagrams = self.engine.datagrams_to_send(self._loop.time())
        self.ended(why)
        self._send(self._close_datagrams)
        when = self.engine.get_timer()
        if when is None or not self._close_datagrams:
            self._finish(why)
        else:
            self._timer = self._loop.call_at(when, self._finish, why)

    def _send(self, datagrams: list[tuple[bytes, NetworkAddress]]) -> None:
        self._sent += sum(len(data) for data, _ in datagrams)
        self._port.send(datagrams)

    def _finish(self, why: ConnectionClosed) -> None:
        """It is over: leave nothing behind."""
        self._cancel_timers()
        self.ended(why)
        self.engine.finish()
        self._port.remove(self)
        self.over()

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._keepalive, self._handshake):
            if timer is not None:
                timer.cancel()
        self._timer = self._keepalive = self._handshake = None

    def _set_timer(self) -> None:
        when = self.engine.get_timer()
        if when is None:
            return
        if self._timer is not None:
            # One that fires too early is cheaper than a new one for each pass: it looks again.
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        now = self._loop.time()
        when = self.engine.get_timer()
        if when is not None and when > now:
            self._timer = self._loop.call_at(when, self._timer_fired)
        else:
            # A little late: aioquic compares sums of floats that differ from its own timer in the last bit.
            self.engine.handle_timer(now + 1e-6)
            self.transport_pass()

    def _keep_alive(self) -> None:
        """Send a PING if the peer was silent for long."""
        self._keepalive = None
        if self.options.keepalive is not None:
            due = self._heard_at + self.options.keepalive
            if due <= self._loop.time():
                self.engine.send_ping(0)
                self.kick()
                due = self._loop.time() + self.options.keepalive
            self._keepalive = self._loop.call_at(due, self._keep_alive)


def _why(event: events.ConnectionTerminated, remote: bool, idle_timeout: float) -> ConnectionClosed:
    if event.frame_type is None:
        return ConnectionClosed(event.error_code, event.reason_phrase, remote=remote, application=True)
    if not remote and event.reason_phrase == "Idle timeout":
        return ConnectionClosed(0, IDLE_TIMEOUT.format(idle_timeout), remote=False, application=False)
    reason = explain(event.error_code, event.reason_phrase)
    return ConnectionClosed(event.error_code, reason, remote=remote, application=False)


def explain(code: int, reason: str) -> str:
    """What a QUIC transport error means, in words a user can act on; `reason` may come from the peer."""
    text = _CERTIFICATE_NAME.sub(r"\1", printable(reason))
    if CRYPTO_ERROR <= code < 2 * CRYPTO_ERROR:
        alert = code - CRYPTO_ERROR
        known = {item.value: item for item in AlertDescription}.get(alert)
        name = f"TLS alert {alert}" + (f" ({known.name.replace('_', ' ')})" if known is not None else "")
        meaning = ALERTS.get(known) if known is not None else None
        return ": ".join(part for part in (name, text, meaning) if part)
    name = QuicErrorCode(code).name if code in QuicErrorCode._value2member_map_ else f"error {code:#x}"
    return f"QUIC {name}" + (f": {text}" if text else "")
