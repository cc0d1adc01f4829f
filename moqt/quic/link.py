"""Two ends of a QUIC connection in one process, for tests: no sockets, no TLS, a seed instead of luck.

The simulation is of streams, not of packets: pieces of streams travel with a latency, in order within a
stream and, with jitter, in any order between streams; loss delays a piece (and what follows it in its stream)
as a retransmission would. Windows, stream credit, STOP_SENDING and resets follow RFC 9000, and a congestion
window bounds what is under way, so that `unsent` grows where it would grow in a network. Use it with
`VirtualLoop`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moqt.quic.api import ConnectionClosed, QuicOptions
from moqt.quic.memory import EndStats, MemoryConnection

__all__ = ["Link", "LinkStats", "pair"]

IDLE_TIMEOUT: Final = "idle time-out: nothing came from the peer for {:g} s"


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Statistics of both ends."""

    client: EndStats
    server: EndStats


@dataclass(frozen=True, slots=True)
class _Way:
    """What a way is like; see `pair`."""

    latency: float
    jitter: float
    loss: float
    chunk: int
    ragged: bool
    window: int


class Link:
    """What lies between two ends. Everything it does at random comes from its seed."""

    def __init__(self, way: _Way, *, seed: int, client: QuicOptions, server: QuicOptions, alpn: str) -> None:
        self.latency = way.latency
        self.window = way.window
        self.steps = 0
        self.corrupt: Callable[[int, bytes], bytes] | None = None
        self._way = way
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._under_way: list[
            tuple[float, int, MemoryConnection, Callable[..., None], tuple[object, ...]]
        ] = []
        self._numbers = itertools.count()
        self._last_of_stream: dict[tuple[bool, int], float] = {}
        self._actions: dict[int, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._stalled = False
        self._client = MemoryConnection(self, is_client=True, alpn=alpn, options=client)
        self._server = MemoryConnection(self, is_client=False, alpn=alpn, options=server)
        self._client.meet(self._server)
        self._server.meet(self._client)

    @property
    def client(self) -> MemoryConnection:
        return self._client

    @property
    def server(self) -> MemoryConnection:
        return self._server

    @property
    def stats(self) -> LinkStats:
        return LinkStats(self._client.stats, self._server.stats)

    def at(self, step: int, action: Callable[[], None]) -> None:
        """Call `action` just before the `step`-th message from the start of the link is delivered (0: the
        first).

        `steps` counts what was delivered, so a test can run once to learn the number of steps, and then
        inject a fault at each.
        """
        self._actions[step] = action

    def cut(self, reason: str = "the network is gone") -> None:
        """End the connection for both at once, as a dead network would after its time-outs."""
        for end in (self._client, self._server):
            end.ended(ConnectionClosed(0, reason, remote=False, application=False))
            end.over()

    def stall(self) -> None:
        """From now on nothing arrives, until `resume`; the idle time-out runs."""
        if not self._stalled:
            self._stalled = True
            seconds = min(self._client.options.idle_timeout, self._server.options.idle_timeout)
            self._idle = self._loop.call_later(seconds, self.cut, IDLE_TIMEOUT.format(seconds))
            self._set_timer()

    def resume(self) -> None:
        """What was held back by `stall` arrives."""
        self._stalled = False
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._set_timer()

    # For the ends.

    def piece_size(self) -> int:
        return self._random.randint(1, self._way.chunk) if self._way.ragged else self._way.chunk

    def post(self, sender: MemoryConnection, receive: Callable[..., None], *arguments: object) -> None:
        """Let the other end have a message after the latency."""
        self._add(self._arrival(), sender.peer_end, receive, arguments)

    def post_datagram(self, sender: MemoryConnection, data: bytes) -> None:
        if self._random.random() >= self._way.loss:
            self.post(sender, sender.peer_end.on_datagram_frame, data)

    def post_piece(self, sender: MemoryConnection, stream_id: int, data: bytes, fin: bool) -> None:
        """A piece of a stream: in order within the stream; lost ones come late."""
        if self.corrupt is not None:
            data = self.corrupt(stream_id, data)
        when = self._arrival()
        if self._way.loss and self._random.random() < self._way.loss:
            when += 3 * self.latency + self._arrival() - self._loop.time()
            sender.stats.delayed += 1
        key = (sender.is_client, stream_id)
        when = max(when, self._last_of_stream.get(key, 0.0))
        self._last_of_stream[key] = when
        if fin:
            del self._last_of_stream[key]
        self._add(when, sender.peer_end, sender.peer_end.on_data, (stream_id, data, fin))
        self._add(when + self.latency, sender, sender.on_acknowledged, (stream_id, len(data), fin))

    def end_closed(self) -> None:
        """One end has closed; when both have, nothing is under way any more."""
        if self._client.closed is not None and self._server.closed is not None:
            self._under_way.clear()
            self._set_timer()
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None

    def _arrival(self) -> float:
        return self._loop.time() + self.latency + self._random.uniform(0.0, self._way.jitter)

    def _add(
        self, when: float, end: MemoryConnection, receive: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        heapq.heappush(self._under_way, (when, next(self._numbers), end, receive, arguments))
        if self._under_way[0][0] == when:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._under_way and not self._stalled:
            self._timer = self._loop.call_at(self._under_way[0][0], self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        now = self._loop.time() + 1e-9
        touched: dict[MemoryConnection, None] = {}
        while self._under_way and self._under_way[0][0] <= now and not self._stalled:
            _, _, end, receive, arguments = heapq.heappop(self._under_way)
            action = self._actions.pop(self.steps, None)
            self.steps += 1
            if action is not None:
                action()
            if end.closed is None:
                receive(*arguments)
                touched[end] = None
        for end in touched:
            end.transport_pass()
        self._set_timer()


def pair(
    *,
    seed: int = 0,
    latency: float = 0.01,
    jitter: float = 0.0,
    loss: float = 0.0,
    chunk: int = 16 * 1024,
    ragged: bool = False,
    window: int = 256 * 1024,
    client: QuicOptions | None = None,
    server: QuicOptions | None = None,
    alpn: str = "moqt-22",
) -> Link:
    """Two connected ends. Call it in a running event loop, best a `VirtualLoop`.

    `latency` and `jitter` are seconds one way (each message takes latency + 0..jitter); `loss` is the share
    of pieces that come late by about 4 latencies, and of datagrams that never come; `chunk` is the most bytes
    of a piece, and with `ragged` their number is random; `window` is the congestion window in bytes.
    """
    way = _Way(latency, jitter, loss, chunk, ragged, window)
    return Link(way, seed=seed, client=client or QuicOptions(), server=server or QuicOptions(), alpn=alpn)
