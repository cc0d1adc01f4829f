"""Which bytes go next (moqt 14), on a connection that only counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.quic.api import WATERMARK, Buffer, Connection, ConnectionClosed, NoStreamCredit, Stream, Traffic
from moqt.quic.virtual import run_virtual
from moqt.scheduler import Outgoing, Scheduler, Urgency

pytestmark = pytest.mark.virtual

SLICE = 64 * 1024
LOW, MIDDLE, HIGH = (200, 0, 0, 0), (100, 0, 0, 0), (1, 0, 0, 0)


class CountingStream(Stream):
    """Keeps what it was handed."""

    def __init__(self, connection: CountingConnection, number: int, window: int) -> None:
        self.id = number
        self.bidirectional = False
        self.stopped: int | None = None
        self.on_stopped: Callable[[int], None] | None = None
        self.data = bytearray()
        self.finished = False
        self.reset_code: int | None = None
        self.window = window
        self._connection = connection

    async def read(self) -> bytes:
        raise NotImplementedError

    @property
    def credit(self) -> int:
        return self.window - len(self.data)

    @property
    def unsent(self) -> int:
        return 0

    def hand(self, data: Buffer, *, fin: bool = False) -> None:
        assert not self.finished
        assert self.reset_code is None
        assert len(data) <= self.credit
        self.data += data
        self.finished = fin
        self._connection.handed(self, len(data))

    async def write(self, data: Buffer, *, fin: bool = False) -> None:
        raise NotImplementedError

    def reset(self, code: int) -> None:
        self.reset_code = code

    def stop(self, code: int) -> None:
        raise NotImplementedError

    def stopped_by_peer(self, code: int) -> None:
        self.stopped = code
        assert self.on_stopped is not None
        self.on_stopped(code)


class CountingConnection(Connection):
    """Has as much credit as the test gives, and sends when the test says."""

    def __init__(self, *, credit: int = 1 << 40, streams: int = 1000, window: int = 1 << 40) -> None:
        self.is_client = True
        self.alpn = self.peer = self.id = "counting"
        self.feeder: Callable[[], None] | None = None
        self.on_datagram: Callable[[bytes], None] | None = None
        self.closed: ConnectionClosed | None = None
        self.given = credit
        self.allowed = streams
        self.window = window
        self.opened: list[CountingStream] = []
        self.order: list[int] = []
        self.peak = 0
        self._unsent = 0
        self._kicked = False

    @property
    def traffic(self) -> Traffic:
        raise NotImplementedError

    @property
    def held(self) -> int:
        raise NotImplementedError

    @property
    def unsent(self) -> int:
        return self._unsent

    @property
    def credit(self) -> int:
        return self.given

    def stream_credit(self, *, bidirectional: bool) -> int:
        return self.allowed - len(self.opened)

    def open(self, *, bidirectional: bool) -> CountingStream:
        if self.stream_credit(bidirectional=bidirectional) <= 0:
            raise NoStreamCredit("none")
        stream = CountingStream(self, len(self.opened), self.window)
        self.opened.append(stream)
        return stream

    async def open_when_possible(self, *, bidirectional: bool) -> Stream:
        raise NotImplementedError

    async def accept(self) -> Stream:
        raise NotImplementedError

    def kick(self) -> None:
        self._kicked = True

    def send_datagram(self, data: Buffer) -> None:
        raise NotImplementedError

    async def ping(self) -> None:
        raise NotImplementedError

    def close(self, code: int = 0, reason: str = "") -> None:
        raise NotImplementedError

    async def wait_closed(self) -> ConnectionClosed:
        raise NotImplementedError

    def handed(self, stream: CountingStream, size: int) -> None:
        self._unsent += size
        self.given -= size
        self.peak = max(self.peak, self._unsent)
        if not self.order or self.order[-1] != stream.id:
            self.order.append(stream.id)

    def feed(self) -> None:
        """What a kick leads to."""
        assert self.feeder is not None
        if self._kicked:
            self._kicked = False
            self.feeder()

    def send(self, size: int = 1 << 60) -> None:
        """Put bytes into packets, and feed."""
        self._unsent -= min(size, self._unsent)
        self._kicked = True
        self.feed()

    def send_all(self) -> None:
        while self._unsent:
            self.send()


class Ends:
    """How streams ended, by name."""

    def __init__(self) -> None:
        self.codes: dict[str, int | None] = {}

    def outgoing(
        self,
        name: str,
        urgency: Urgency = MIDDLE,
        source: Iterator[tuple[Urgency | None, tuple[Buffer, ...]]] | None = None,
    ) -> Outgoing:
        def on_end(code: int | None) -> None:
            assert name not in self.codes
            self.codes[name] = code

        return Outgoing(urgency, source=source, on_end=on_end)


async def test_handed_over_by_watermark() -> None:
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)
    stream = ends.outgoing("a")
    scheduler.push(stream, bytes(3 * WATERMARK), fin=True)
    connection.feed()
    assert connection.unsent == WATERMARK
    connection.send(1000)
    assert connection.unsent == WATERMARK
    connection.send_all()
    assert len(connection.opened[0].data) == 3 * WATERMARK
    assert connection.opened[0].finished
    assert connection.peak == WATERMARK
    assert ends.codes == {"a": None}


async def test_the_most_urgent_first() -> None:
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)
    first = ends.outgoing("first", MIDDLE)
    scheduler.push(first, bytes(4 * WATERMARK), fin=True)
    connection.feed()
    for name, urgency in (("low", LOW), ("high", HIGH), ("middle", MIDDLE)):
        scheduler.push(ends.outgoing(name, urgency), bytes(2 * WATERMARK), fin=True)
    connection.send_all()
    assert list(ends.codes) == ["high", "middle", "first", "low"]


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ((1, 255, 255, 1), (2, 0, 0, 0)),
        ((1, 1, 255, 1), (1, 2, 0, 0)),
        ((1, 1, 1, 1), (1, 1, 2, 0)),
        ((1, 1, 1, 0), (1, 1, 1, 1)),
    ],
)
async def test_steps_of_urgency(lower: Urgency, higher: Urgency) -> None:
    """Subscriber Priority, Publisher Priority, Group, delivery."""
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)
    scheduler.push(ends.outgoing("second", higher), bytes(SLICE), fin=True)
    scheduler.push(ends.outgoing("first", lower), bytes(SLICE), fin=True)
    connection.send_all()
    connection.feed()
    connection.send_all()
    assert list(ends.codes) == ["first", "second"]


async def test_equals_take_turns_by_the_slice() -> None:
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)
    for name in "abc":
        scheduler.push(ends.outgoing(name), bytes(4 * SLICE), fin=True)
    connection.feed()
    connection.send_all()
    assert connection.order == [0, 1, 2] * 4


async def test_more_urgent_bytes_are_behind_no_more_than_the_watermark() -> None:
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)
    scheduler.push(ends.outgoing("long", LOW), bytes(9 * WATERMARK), fin=True)
    connection.feed()
    scheduler.push(ends.outgoing("urgent", HIGH), b"now", fin=True)
    connection.send(10)
    assert ends.codes == {"urgent": None}
    assert len(connection.opened[0].data) < WATERMARK + SLICE


async def test_streams_wait_for_stream_credit() -> None:
    connection, ends = CountingConnection(streams=2), Ends()
    scheduler = Scheduler(connection)
    streams = [ends.outgoing(name) for name in "abcd"]
    for stream in streams:
        scheduler.push(stream, b"head")
    connection.feed()
    connection.send_all()
    assert len(connection.opened) == 2
    for stream in streams:
        scheduler.push(stream, b"tail", fin=True)
    connection.feed()
    assert ends.codes == {"a": None, "b": None}  # Those that are open go on.
    connection.allowed = 3
    connection.send()
    assert list(ends.codes) == ["a", "b", "c"]
    assert bytes(connection.opened[2].data) == b"headtail"


async def test_a_stream_with_a_full_window_holds_up_no_other() -> None:
    connection, ends = CountingConnection(window=1000), Ends()
    scheduler = Scheduler(connection)
    scheduler.push(ends.outgoing("stuck", HIGH), bytes(5000), fin=True)
    scheduler.push(ends.outgoing("other", LOW), bytes(1000), fin=True)
    connection.feed()
    connection.send()
    assert list(ends.codes) == ["other"]
    assert len(connection.opened[0].data) == 1000
    connection.opened[0].window = 10_000
    connection.send()
    assert list(ends.codes) == ["other", "stuck"]


async def test_streams_with_full_windows_are_few() -> None:
    """Each is looked at in every pass: a peer that allows streams and no bytes on them gets no more."""
    connection, ends = CountingConnection(streams=1 << 20, window=1), Ends()
    scheduler = Scheduler(connection)
    for number in range(5000):
        scheduler.push(ends.outgoing(str(number)), b"ab", fin=True)
    for _ in range(100):
        connection.send()
        await asyncio.sleep(0)
    assert len(connection.opened) < 1024
    connection.window = 2
    while len(ends.codes) < 5000:
        for stream in connection.opened:
            stream.window = 2
        connection.send()
        await asyncio.sleep(0)
    assert len(connection.opened) == 5000


async def test_the_credit_of_the_connection() -> None:
    connection, ends = CountingConnection(credit=100), Ends()
    scheduler = Scheduler(connection)
    scheduler.push(ends.outgoing("a"), bytes(150), fin=True)
    connection.feed()
    connection.send()
    assert connection.given == 0
    assert not ends.codes
    connection.given = 1000
    connection.send()
    assert ends.codes == {"a": None}


async def test_ends() -> None:
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)
    late, empty, once = ends.outgoing("late"), ends.outgoing("empty"), ends.outgoing("once")
    scheduler.push(late, b"data")
    scheduler.push(empty, fin=True)
    scheduler.push(once, b"one", b"", b"two", fin=True)
    scheduler.push(once, b"too late")
    connection.feed()
    assert late.stream is not None
    assert not late.waits
    scheduler.push(late, fin=True)
    assert late.waits
    scheduler.push(late, b"too late")
    connection.send()
    assert ends.codes == {"empty": None, "once": None, "late": None}
    assert [bytes(stream.data) for stream in connection.opened] == [b"data", b"", b"onetwo"]
    assert all(stream.finished for stream in connection.opened)
    scheduler.push(late, b"far too late")
    scheduler.reset(late, 1)
    connection.send()
    assert connection.opened[0].reset_code is None


async def test_reset() -> None:
    """What the peer has not seen is never opened."""
    connection, ends = CountingConnection(streams=1), Ends()
    scheduler = Scheduler(connection)
    seen, unseen = ends.outgoing("seen"), ends.outgoing("unseen")
    for stream in (seen, unseen):
        scheduler.push(stream, bytes(10))
    connection.feed()
    for stream in (unseen, seen):
        scheduler.reset(stream, 4)
        scheduler.reset(stream, 5)
    connection.allowed = 9
    connection.send()
    assert len(connection.opened) == 1
    assert connection.opened[0].reset_code == 4
    assert ends.codes == {"unseen": 4, "seen": 4}
    assert (seen.opened, unseen.opened) == (True, False)


async def test_stopped_by_the_peer() -> None:
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)
    stream = ends.outgoing("a")
    scheduler.push(stream, bytes(2 * WATERMARK))
    connection.feed()
    connection.opened[0].stopped_by_peer(7)
    assert ends.codes == {"a": 7}
    handed = len(connection.opened[0].data)
    connection.send()
    assert len(connection.opened[0].data) == handed


async def test_reprioritised() -> None:
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)
    one, two = ends.outgoing("one", MIDDLE), ends.outgoing("two", LOW)
    for stream in (one, two):
        scheduler.push(stream, bytes(4 * WATERMARK), fin=True)
    connection.feed()
    scheduler.reprioritise(two, HIGH)
    connection.send_all()
    assert list(ends.codes) == ["two", "one"]
    scheduler.reprioritise(two, LOW)  # After its end it has no effect.


async def test_a_source_is_pulled_when_its_turn_has_come() -> None:
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)
    pulled = []

    def source() -> Iterator[tuple[Urgency | None, tuple[Buffer, ...]]]:
        yield None, (b"head",)
        for number in range(100):
            pulled.append(number)
            yield MIDDLE, (bytes(SLICE // 2), bytes(SLICE // 2))
        yield None, ()

    scheduler.start(ends.outgoing("a", HIGH, source()))
    connection.feed()
    assert len(pulled) == WATERMARK // SLICE
    connection.send_all()
    assert len(connection.opened[0].data) == 4 + 100 * SLICE
    assert ends.codes == {"a": None}


async def test_the_urgency_of_a_source_is_that_of_its_next_object() -> None:
    connection, ends = CountingConnection(), Ends()
    scheduler = Scheduler(connection)

    def source(*urgencies: Urgency) -> Iterator[tuple[Urgency | None, tuple[Buffer, ...]]]:
        yield None, (b"h",)
        for urgency in urgencies:
            yield urgency, (bytes(WATERMARK),)

    scheduler.start(ends.outgoing("a", HIGH, source(HIGH, LOW)))
    scheduler.start(ends.outgoing("b", HIGH, source(MIDDLE, MIDDLE)))
    connection.feed()
    connection.send_all()
    assert list(ends.codes) == ["b", "a"]


async def test_drain_and_flush() -> None:
    connection, ends = CountingConnection(credit=WATERMARK), Ends()
    scheduler = Scheduler(connection)
    mine, other = ends.outgoing("mine", HIGH), ends.outgoing("other", LOW)
    for stream in (mine, other):
        scheduler.push(stream, bytes(WATERMARK))
    draining = asyncio.ensure_future(scheduler.drain([mine]))
    flushing = asyncio.ensure_future(scheduler.flush())
    given_up = asyncio.ensure_future(scheduler.flush())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    connection.feed()
    await asyncio.sleep(0)
    assert (draining.done(), flushing.done()) == (True, False)
    connection.given = WATERMARK
    connection.send_all()
    await asyncio.sleep(0)
    assert flushing.done()
    await scheduler.drain([])


async def test_flush_of_nothing() -> None:
    connection = CountingConnection()
    scheduler = Scheduler(connection)
    await scheduler.flush()


async def test_stopped() -> None:
    """The end of the connection is told to who waits; nothing is kept."""
    connection, ends = CountingConnection(credit=0), Ends()
    scheduler = Scheduler(connection)
    stream = ends.outgoing("a")
    scheduler.push(stream, bytes(10))
    waiting = [asyncio.ensure_future(scheduler.flush()), asyncio.ensure_future(scheduler.drain([stream]))]
    await asyncio.sleep(0)
    scheduler.stop(ConnectionClosed(0, "gone", remote=False, application=False))
    for future in waiting:
        with pytest.raises(ConnectionClosed):
            await future
    with pytest.raises(ConnectionClosed):
        await scheduler.flush()
    scheduler.push(stream, bytes(10))
    connection.given = 100
    connection.send()
    assert not connection.opened


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 5), st.integers(0, 3 * SLICE)),
        st.tuples(st.just("fin"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("reset"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("stop"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("rank"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("send"), st.just(0), st.integers(0, WATERMARK)),
        st.tuples(st.just("credit"), st.just(0), st.integers(0, WATERMARK)),
        st.tuples(st.just("streams"), st.just(0), st.integers(0, 2)),
        st.tuples(st.just("window"), st.just(0), st.integers(0, WATERMARK)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_whatever_happens_each_stream_gets_its_bytes_in_order(steps: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        connection, ends = CountingConnection(credit=0, streams=0, window=0), Ends()
        scheduler = Scheduler(connection)
        streams = [ends.outgoing(str(number)) for number in range(6)]
        given_to: list[bytearray] = [bytearray() for _ in streams]
        finned: set[int] = set()
        for step, number, value in steps:
            stream = streams[number]
            match step:
                case "push" if not stream.ended and not stream.ending:
                    piece = bytes((number,)) * (value // 2) + bytes((number + 100,)) * (value - value // 2)
                    given_to[number] += piece
                    scheduler.push(stream, piece[: value // 3], piece[value // 3 :])
                case "fin" if not stream.ended:
                    finned.add(number)
                    scheduler.push(stream, fin=True)
                case "reset":
                    scheduler.reset(stream, 1)
                case "stop" if isinstance(stream.stream, CountingStream) and not stream.ended:
                    stream.stream.stopped_by_peer(2)
                case "rank":
                    scheduler.reprioritise(stream, (value, 0, 0, 0))
                case "send":
                    connection.send(value)
                case "credit":
                    connection.given += value
                case "streams":
                    connection.allowed += value
                case "window":
                    for opened in connection.opened:
                        opened.window += value
                    connection.window += value
            connection.feed()
            assert connection.unsent <= WATERMARK
        connection.given, connection.allowed, connection.window = 1 << 40, 1000, 1 << 40
        for opened in connection.opened:
            opened.window = 1 << 40
        connection.send()
        connection.send_all()
        for number, stream in enumerate(streams):
            code = ends.codes.get(str(number), "none")
            if isinstance(stream.stream, CountingStream):
                data = bytes(stream.stream.data)
                assert bytes(given_to[number]).startswith(data)
                if code in ("none", None):
                    assert data == given_to[number]
                assert stream.stream.finished == (code is None)
            if number in finned and code not in (1, 2):
                assert code is None

    run_virtual(play())
