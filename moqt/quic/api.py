"""What a QUIC connection and its streams look like to the rest of moqt.

The classes here are abstract: `moqt.quic.connection` implements them over aioquic, `moqt.quic.memory` in
memory. Nothing in this module knows a QUIC library.

How the sending side works. Bytes that were handed to a connection can no longer be reordered, so a scheduler
that wants the most urgent bytes to leave first must hand over little at a time: it sets `Connection.feeder`,
and whenever the connection may have room the feeder is called; it then calls `Stream.hand` while
`Connection.unsent < WATERMARK`, `Connection.credit > 0` and `Stream.credit > 0`. Control and request streams,
which carry little and are always urgent, use `await Stream.write(...)`.

How the receiving side works. Flow-control windows move when the application reads (not when bytes arrive), so
not reading a stream throttles its sender after `QuicOptions.max_stream_data` bytes. Streams that nobody reads
hold at most their own window; keep `max_data` well above the sum of the windows of streams that may be left
unread, and control streams never starve.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from moqt.errors import MoqtError, UsageError
from moqt.names import printable

__all__ = [
    "WATERMARK",
    "Buffer",
    "Connection",
    "ConnectionClosed",
    "NoStreamCredit",
    "QuicOptions",
    "Stream",
    "Traffic",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes in one contiguous piece."""

WATERMARK = 512 * 1024
"""Bytes: a feeder stops handing data over when `Connection.unsent` has reached this (spec/quic.md,
recommendation 1).
"""


class ConnectionClosed(MoqtError):
    """The QUIC connection has ended; every reader, writer and waiter of it gets this.

    `application` is True when one side closed it with an application code (for MOQT: a session code of
    moqt.md 17.1) and False when the transport ended it: idle time-out, transport or TLS error, an unreachable
    peer, a cut. `remote` says that the peer ended it. `code` is the application code or the QUIC transport
    error code.
    """

    def __init__(self, code: int, reason: str, *, remote: bool, application: bool) -> None:
        self.code = code
        self.reason = reason
        self.remote = remote
        self.application = application
        super().__init__(code, reason, remote, application)

    def __str__(self) -> str:
        what = "application" if self.application else "transport"
        whom = "by the peer" if self.remote else "by this side"
        reason = f": {printable(self.reason)}" if self.reason else ""
        return f"connection closed {whom} ({what} code {self.code:#x}){reason}"


class NoStreamCredit(MoqtError):
    """The peer allows no more streams of this kind now; `Connection.open_when_possible` waits for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuicOptions:
    """What an endpoint offers and how it behaves. Sizes are bytes, times are seconds.

    `max_data` and `max_stream_data` are receive windows: how much the peer may send beyond what the
    application has read, over all streams and for one stream. They bound the memory that a peer can take.
    `max_datagram_size` is the UDP payload; keep 1452 on an Ethernet, use up to 8900 with jumbo frames and
    16000 on loopback. `keepalive` is the silence after which a PING is sent (None: never); `idle_timeout` is
    the silence after which the connection is given up. `qlog_dir` makes each connection write a qlog file
    there (slow, for debugging).
    """

    max_datagram_size: int = 1452
    max_data: int = 16 * 1024 * 1024
    max_stream_data: int = 4 * 1024 * 1024
    max_uni_streams: int = 256
    max_bidi_streams: int = 128
    idle_timeout: float = 30.0
    keepalive: float | None = 10.0
    qlog_dir: Path | None = None

    def __post_init__(self) -> None:
        if not 1200 <= self.max_datagram_size <= 16000:
            raise UsageError(f"max_datagram_size must be 1200 to 16000 bytes, not {self.max_datagram_size}")
        if self.max_stream_data < 4096:
            raise UsageError(f"max_stream_data must be at least 4096 bytes, not {self.max_stream_data}")
        if self.max_data < self.max_stream_data:
            raise UsageError(
                "max_data, the window of all streams together, must not be below max_stream_data"
            )
        if not 1 <= self.max_uni_streams <= 1 << 20 or not 0 <= self.max_bidi_streams <= 1 << 20:
            raise UsageError("max_uni_streams must be 1 to 2^20 and max_bidi_streams 0 to 2^20")
        if self.idle_timeout <= 0:
            raise UsageError(f"idle_timeout must be above 0 seconds, not {self.idle_timeout}")
        if self.keepalive is not None and self.keepalive <= 0:
            raise UsageError(f"keepalive must be above 0 seconds or None, not {self.keepalive}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over a connection so far: bytes of UDP payload, and the smoothed round-trip time in seconds
    (None: not known yet).
    """

    received: int
    sent: int
    rtt: float | None


class Stream(ABC):
    """One QUIC stream. A unidirectional one is written by the side that opened it and read by the other."""

    id: int
    """QUIC stream ID."""

    bidirectional: bool

    stopped: int | None
    """The code of the peer's STOP_SENDING once it came; our sending side is then reset with it already."""

    on_stopped: Callable[[int], None] | None
    """Called once, synchronously, when STOP_SENDING arrives, with its code."""

    @abstractmethod
    async def read(self) -> bytes:
        """What has arrived in order and was not read, or the first of it; at least one byte, b"" from the
        peer's FIN on.

        Reading gives flow-control credit back to the peer. One reader at a time; cancelling it loses nothing.

        Raises StreamReset as soon as the peer has reset the stream, even if earlier bytes were not read.
        Raises ConnectionClosed when the connection has ended: at once after our own close, else after what
        had arrived, unless that ends with the FIN. A broken stream never looks like a finished one. Raises
        UsageError after `stop`.
        """

    @property
    @abstractmethod
    def credit(self) -> int:
        """Bytes that may still be handed over under the stream's flow control, beyond all handed over so far.

        The connection's own credit is another matter: `Connection.credit`.
        """

    @property
    @abstractmethod
    def unsent(self) -> int:
        """Bytes of this stream that were handed over and not yet put into a packet."""

    @abstractmethod
    def hand(self, data: Buffer, *, fin: bool = False) -> None:
        """Hand bytes over to be sent, without waiting.

        For feeders, which look at `credit`, `Connection.credit` and `Connection.unsent` first. Bytes leave in
        the order of handing over, across all streams; those of a stream without credit let others pass and
        count as `unsent` until credit comes. Outside the feeder it kicks. The buffer is not copied, unless
        it is a bytearray: what a memoryview shows must not change until the connection has let go of it.

        Raises StreamStopped, ConnectionClosed when writing has been ended for us; UsageError after our own
        FIN or reset.
        """

    @abstractmethod
    async def write(self, data: Buffer, *, fin: bool = False) -> None:
        """Hand bytes over in pieces, waiting for credit and for room.

        For control and request streams: what is written goes before what feeders hand over, and may use the
        last of the connection's credit, which feeders don't see. Returns when all is handed over, which is
        not yet sent, nor acknowledged. Raises as `hand` does, also while it waits.
        """

    @abstractmethod
    def reset(self, code: int) -> None:
        """Abort our sending side with RESET_STREAM; bytes not yet sent are dropped.

        No effect when all was acknowledged, or the stream was reset or stopped, or the connection has ended.
        """

    @abstractmethod
    def stop(self, code: int) -> None:
        """Ask the peer with STOP_SENDING to abort its sending side.

        Unread and later bytes are dropped and their credit returned; a waiting or later `read` raises
        UsageError. Nothing is sent when the peer has finished or reset the stream already.
        """


class Connection(ABC):
    """One QUIC connection whose handshake is complete."""

    is_client: bool
    alpn: str
    peer: str
    """The peer's address as text, for logs."""

    id: str
    """A short name of this connection, for logs."""

    feeder: Callable[[], None] | None
    """Called synchronously, before packets are built, whenever there may be room: after `kick`, after
    datagrams were processed (acknowledgements, credit), and on timers. What it hands over leaves in the same
    pass. If it raises, the connection is closed.
    """

    on_datagram: Callable[[bytes], None] | None
    """Called with each DATAGRAM that arrives; without one they are dropped."""

    closed: ConnectionClosed | None
    """Why the connection has ended; None while it lives."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """What went over it so far."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Bytes that have arrived, in order or not, and were not read."""

    @property
    @abstractmethod
    def unsent(self) -> int:
        """Bytes handed over and not yet put into packets for the first time, over all streams."""

    @property
    @abstractmethod
    def credit(self) -> int:
        """Bytes that feeders may still hand over under the connection's flow control.

        Up to 64 KiB less than there is: they stay for control and request streams.
        """

    @abstractmethod
    def stream_credit(self, *, bidirectional: bool) -> int:
        """How many streams of the kind may be opened right now."""

    @abstractmethod
    def open(self, *, bidirectional: bool) -> Stream:
        """Open a stream. The peer sees it with the first byte, FIN or reset.

        Raises NoStreamCredit, ConnectionClosed.
        """

    @abstractmethod
    async def open_when_possible(self, *, bidirectional: bool) -> Stream:
        """Like `open`, waiting for the peer's credit, first come first served. Raises ConnectionClosed."""

    @abstractmethod
    async def accept(self) -> Stream:
        """The next stream that the peer opened.

        A stream counts against our limits until it was accepted, is over, and its end was read (or it was
        stopped). Raises ConnectionClosed: at once after our own close, else when all that came is taken.
        """

    @abstractmethod
    def kick(self) -> None:
        """Call the feeder and transmit soon: one pass for any number of kicks in a turn of the event loop."""

    @abstractmethod
    def send_datagram(self, data: Buffer) -> None:
        """Send an unreliable DATAGRAM; when many wait already, drop it, as the network might have done.

        Raises UsageError when it does not fit into a packet or the peer takes none, ConnectionClosed.
        """

    @abstractmethod
    async def ping(self) -> None:
        """Return when the peer has acknowledged a PING. Raises ConnectionClosed."""

    @abstractmethod
    def close(self, code: int = 0, reason: str = "") -> None:
        """Close with an application code and a reason (UTF-8, cut to 900 bytes). Idempotent.

        Immediate, as QUIC has it: what was handed over and fits into the congestion window leaves before the
        close, but nothing of it is sent again, and the rest is dropped. What must arrive has to be known to
        have arrived (by a reply) before. `closed` is set at once; `wait_closed` returns when it is over.
        """

    @abstractmethod
    async def wait_closed(self) -> ConnectionClosed:
        """Wait until the connection is fully over: all is sent, nothing of it is left in the event loop.

        After our own close that takes three probe time-outs (about 0.1 s in a local network), in which a peer
        that did not hear of it is told again.
        """
