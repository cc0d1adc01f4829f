"""Which bytes of a session go next: the most urgent data stream first, handed to QUIC by watermark.

Bytes that were handed to the QUIC library can't be reordered, so no more than `WATERMARK` of them may wait
there. Streams are opened when their first bytes go, so that few are in flight at a time (spec/quic.md,
recommendation 1).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from moqt.quic.api import WATERMARK, Buffer, Connection, ConnectionClosed, Stream

__all__ = ["BrokenSource", "Outgoing", "Scheduler", "Source", "Urgency"]

Urgency = tuple[int, int, int, int]
"""Subscriber Priority, Publisher Priority, rank of the Group, rank of the delivery: lower goes first (moqt
14).
"""

Source = Iterator[tuple[Urgency | None, tuple[Buffer, ...]] | None]
"""What a stream is pulled from: (urgency or None for unchanged, pieces); None stands for "nothing now", and
`Scheduler.start` asks again.
"""


class BrokenSource(Exception):
    """Raised by a source: the stream can't go on and is reset with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


_SLICE = 64 * 1024
"""Bytes handed over before urgency is looked at again; most Objects fit in."""


_TURN = 512
"""Slices that are handed over before others get their turn: small Objects may make many."""

_BLOCKED = 256
"""Streams whose windows are full: while there are more, none is opened, since each pass looks at all."""

_STREAM_COST = 3072
"""Bytes that a stream takes besides what it holds, by our reckoning."""
_PIECE_COST = 384
"""The same for a piece of what it holds."""


class Pinned(Protocol):
    """What must stay in memory while it is being sent."""

    pins: int


class Outgoing:
    """One data stream to be sent: bytes that wait, and how urgent they are.

    With a `source`, the bytes are pulled from it when none wait; its end is the end of the stream. Without
    one they are pushed. `on_end(code)` is called once, when FIN was handed over (None) or the stream was
    reset by us or stopped by the peer (the code); `opened` tells whether the peer can see the stream.
    """

    __slots__ = (
        "_gone",
        "_held",
        "_parts",
        "_source",
        "backlog",
        "broken",
        "ended",
        "ending",
        "on_end",
        "opened",
        "queued",
        "stream",
        "urgency",
    )

    def __init__(
        self,
        urgency: Urgency,
        *,
        source: Source | None = None,
        on_end: Callable[[int | None], None],
    ) -> None:
        self.urgency = urgency
        self.on_end = on_end
        self.stream: Stream | None = None
        self.opened = False
        self.ending = False
        self.ended = False
        self.queued = False
        self.backlog = 0
        """Bytes that wait."""
        self.broken: int | None = None
        self._parts: deque[memoryview] = deque()
        self._gone = 0
        self._held: deque[tuple[int, Pinned]] = deque()
        """What is pinned, with the number of bytes that must be gone before it is not."""
        self._source = source

    @property
    def gone(self) -> int:
        """Bytes that were handed to QUIC."""
        return self._gone

    @property
    def end(self) -> int:
        """Bytes in all, those that wait included."""
        return self._gone + self.backlog

    @property
    def waits(self) -> bool:
        """Whether there is anything that was not handed over yet."""
        return not self.ended and bool(self._parts or self._source is not None or self.ending)

    @property
    def weight(self) -> int:
        """Bytes of memory that stay taken while it waits."""
        return _STREAM_COST + self.backlog + _PIECE_COST * len(self._parts)

    def hold(self, item: Pinned) -> None:
        """Keep `item` pinned until all bytes that wait now are handed over."""
        item.pins += 1
        self._held.append((self._gone + self.backlog, item))

    def _refill(self) -> None:
        while self._source is not None and not self._parts:
            try:
                step = next(self._source)
            except StopIteration:
                self._source = None
                self.ending = True
                return
            except BrokenSource as broken:
                self._source = None
                self.broken = broken.code
                return
            if step is None:
                return
            urgency, pieces = step
            if urgency is not None:
                self.urgency = urgency
            self._add(pieces)

    def _add(self, pieces: tuple[Buffer, ...]) -> None:
        for piece in pieces:
            if len(piece):
                self._parts.append(memoryview(piece))
                self.backlog += len(piece)

    def _take(self, room: int) -> list[memoryview]:
        """Up to `room` bytes, in pieces."""
        taken = []
        before = self.backlog
        while room > 0 and self._parts:
            part = self._parts[0]
            if len(part) > room:
                taken.append(part[:room])
                self._parts[0] = part[room:]
                self.backlog -= room
                break
            taken.append(self._parts.popleft())
            self.backlog -= len(part)
            room -= len(part)
        self._release(before - self.backlog)
        return taken

    def _release(self, size: int) -> None:
        """`size` bytes more are gone: unpin what they belonged to."""
        self._gone += size
        while self._held and self._held[0][0] <= self._gone:
            self._held.popleft()[1].pins -= 1

    def _clear(self) -> None:
        self._parts.clear()
        self._source = None
        self.backlog = 0
        while self._held:
            self._held.popleft()[1].pins -= 1


class Scheduler:
    """Feeds one connection. It is the connection's `feeder`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._turn = itertools.count()
        # Streams that the peer can see go on without stream credit; those not opened yet need one each.
        self._open: list[tuple[Urgency, int, Outgoing]] = []
        self._unopened: list[tuple[Urgency, int, Outgoing]] = []
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._stopped: ConnectionClosed | None = None
        self._stale = False
        """Streams are more or less urgent than their place in the heaps says."""
        self._resting = False
        self._blocked: set[Outgoing] = set()
        """Streams whose own windows were full when they were looked at."""
        connection.feeder = self._feed

    @property
    def weight(self) -> int:
        """Bytes of memory that stay taken while all waits that waits."""
        return sum(outgoing.weight for heap in (self._open, self._unopened) for *_, outgoing in heap)

    def start(self, outgoing: Outgoing) -> None:
        """Send what `outgoing` has; streams with a source need this once."""
        self._queue(outgoing)
        self._connection.kick()

    def push(self, outgoing: Outgoing, *pieces: Buffer, fin: bool = False) -> None:
        """Add bytes, and with `fin` the end of the stream. No effect on a stream that has ended."""
        if outgoing.ended or outgoing.ending:
            return
        outgoing._add(pieces)
        outgoing.ending = fin
        self.start(outgoing)

    def reprioritise(self, outgoing: Outgoing, urgency: Urgency) -> None:
        """Change how urgent a stream is (REQUEST_UPDATE)."""
        outgoing.urgency = urgency
        self._stale = self._stale or outgoing.queued

    def reset(self, outgoing: Outgoing, code: int) -> None:
        """End the stream with RESET_STREAM; one that the peer doesn't know yet is never opened. No effect
        after its end.
        """
        if not outgoing.ended:
            if outgoing.stream is not None:
                outgoing.stream.reset(code)
            self._end(outgoing, code)
            self._connection.kick()

    async def drain(self, streams: Collection[Outgoing]) -> None:
        """Wait until all that these streams have now, and get meanwhile, is put into packets. Raises
        ConnectionClosed.

        It takes as long as the peer takes to give credit.
        """
        await self._wait(
            lambda: not any(one.waits or (one.stream is not None and one.stream.unsent) for one in streams)
        )

    async def flush(self) -> None:
        """Wait until everything of the session is put into packets, which may be never while others go on
        sending: bound it. Raises ConnectionClosed.
        """
        await self._wait(lambda: not (self._open or self._unopened or self._connection.unsent))

    def stop(self, closed: ConnectionClosed) -> None:
        """The connection has ended: nothing more is sent, and nobody waits for it."""
        self._stopped = closed
        self._open.clear()
        self._unopened.clear()
        self._blocked.clear()
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(closed)
        self._waiters.clear()

    async def _wait(self, condition: Callable[[], bool]) -> None:
        if self._stopped is not None:
            raise self._stopped
        if condition():
            return
        future = asyncio.get_running_loop().create_future()
        self._waiters.append((condition, future))
        self._connection.kick()
        await future

    def _wake(self) -> None:
        for waiter in [waiter for waiter in self._waiters if waiter[1].done() or waiter[0]()]:
            self._waiters.remove(waiter)
            if not waiter[1].done():
                waiter[1].set_result(None)

    def _open_stream(self, outgoing: Outgoing) -> Stream:
        stream = self._connection.open(bidirectional=False)
        stream.on_stopped = lambda code: self._end(outgoing, code)
        outgoing.stream = stream
        outgoing.opened = True
        return stream

    def _end(self, outgoing: Outgoing, code: int | None) -> None:
        if not outgoing.ended:
            outgoing.ended = True
            outgoing._clear()
            self._blocked.discard(outgoing)
            outgoing.on_end(code)

    def _queue(self, outgoing: Outgoing) -> None:
        if not outgoing.queued and not outgoing.ended and self._stopped is None:
            outgoing.queued = True
            heap = self._open if outgoing.opened else self._unopened
            heapq.heappush(heap, (outgoing.urgency, next(self._turn), outgoing))

    def _next(self, can_open: bool) -> Outgoing | None:
        while True:
            heaps = [heap for heap in ((self._open, self._unopened) if can_open else (self._open,)) if heap]
            if not heaps:
                return None
            outgoing = heapq.heappop(min(heaps, key=lambda heap: heap[0][:2]))[2]
            outgoing.queued = False
            if not outgoing.ended:
                return outgoing

    def _sort(self) -> None:
        for heap in (self._open, self._unopened):
            heap[:] = [(outgoing.urgency, turn, outgoing) for _, turn, outgoing in heap if not outgoing.ended]
            heapq.heapify(heap)
        self._stale = False

    def _feed(self) -> None:
        if self._resting:
            return
        connection = self._connection
        if self._stale:
            self._sort()
        waiting: list[Outgoing] = []
        slices = 0
        while (room := min(WATERMARK - connection.unsent, connection.credit)) > 0:
            can_open = connection.stream_credit(bidirectional=False) > 0 and len(self._blocked) < _BLOCKED
            outgoing = self._next(can_open)
            if outgoing is None:
                break
            if not self._send(outgoing, min(room, _SLICE)):
                waiting.append(outgoing)
                continue
            slices += 1
            if slices == _TURN:
                self._resting = True
                asyncio.get_running_loop().call_soon(self._go_on)
                break
        for outgoing in waiting:
            self._queue(outgoing)
        if self._waiters:
            self._wake()

    def _go_on(self) -> None:
        self._resting = False
        self._connection.kick()

    def _send(self, outgoing: Outgoing, room: int) -> bool:
        """Hand over one slice; False when the stream's own window is full."""
        if not outgoing._parts:
            outgoing._refill()
        if not outgoing._parts and not outgoing.ending:
            self._check_broken(outgoing)
            return True
        stream = outgoing.stream or self._open_stream(outgoing)
        taken = outgoing._take(min(room, stream.credit))
        if not taken and outgoing._parts:
            return False
        if not outgoing._parts:
            outgoing._refill()
        fin = outgoing.ending and not outgoing._parts
        for index, part in enumerate(taken):
            stream.hand(part, fin=fin and index == len(taken) - 1)
        if fin:
            if not taken:
                stream.hand(b"", fin=True)
            self._end(outgoing, None)
            return True
        if outgoing._parts:
            self._queue(outgoing)
        else:
            self._check_broken(outgoing)
        if outgoing._parts and stream.credit <= 0:
            self._blocked.add(outgoing)
        else:
            self._blocked.discard(outgoing)
        return True

    def _check_broken(self, outgoing: Outgoing) -> None:
        if outgoing.broken is not None:
            self.reset(outgoing, outgoing.broken)
