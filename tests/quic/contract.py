"""What every implementation of moqt.quic.api has to do. `test_contract.py` runs it over each."""

from __future__ import annotations

import array
import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from typing import ClassVar

import pytest

from moqt.errors import StreamReset, StreamStopped, UsageError
from moqt.quic.api import WATERMARK, ConnectionClosed, NoStreamCredit, QuicOptions, Stream
from moqt.quic.base import READ_SIZE, BaseStream
from tests.quic.ends import AnyConnection, Ends

SMALL = QuicOptions(max_data=512 * 1024, max_stream_data=64 * 1024)


async def read_all(stream: Stream) -> bytes:
    parts = []
    while data := await stream.read():
        parts.append(data)
    return b"".join(parts)


async def until_quiet(end: AnyConnection) -> None:
    """Return when pings have gone to and fro a few times: what could move has moved."""
    for _ in range(10):
        await end.ping()


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


class Offer:
    """A feeder that offers `each` zero bytes on each of some streams, opened one after the other."""

    def __init__(self, connection: AnyConnection, *, streams: int, each: int) -> None:
        self.connection = connection
        self.left = [each] * streams
        self.streams: list[Stream] = []
        self.peak = 0
        connection.feeder = self.feed
        connection.kick()

    def feed(self) -> None:
        connection = self.connection
        for index, left in enumerate(self.left):
            if not left or (index == len(self.streams) and not self._open()):
                continue
            stream = self.streams[index]
            while left and stream.stopped is None:
                room = min(
                    left, stream.credit, connection.credit, 64 * 1024, max(0, WATERMARK - connection.unsent)
                )
                if room <= 0:
                    break
                left -= room
                stream.hand(bytes(room), fin=not left)
            self.left[index] = left
            self.peak = max(self.peak, connection.unsent)

    def _open(self) -> bool:
        if self.connection.stream_credit(bidirectional=False) <= 0:
            return False
        self.streams.append(self.connection.open(bidirectional=False))
        return True


class Contract:
    """Subclasses say what the ends are. `exact`: nothing is lost or reordered on the way."""

    exact: ClassVar[bool] = True

    def connect(
        self, client: QuicOptions | None = None, server: QuicOptions | None = None
    ) -> AbstractAsyncContextManager[Ends]:
        raise NotImplementedError

    @pytest.fixture
    async def ends(self) -> AsyncIterator[Ends]:
        async with self.connect() as ends:
            yield ends

    @pytest.fixture
    async def small(self) -> AsyncIterator[Ends]:
        """Ends with small receive windows on both sides."""
        async with self.connect(SMALL, SMALL) as ends:
            yield ends

    # Streams.

    async def test_bytes_and_fin_arrive(self, ends: Ends) -> None:
        for opener, other in ((ends.client, ends.server), (ends.server, ends.client)):
            stream = opener.open(bidirectional=False)
            assert not stream.bidirectional
            await stream.write(b"one")
            incoming = await other.accept()
            assert incoming.id == stream.id
            await stream.write(b"two", fin=True)
            assert await read_all(incoming) == b"onetwo"
            assert await incoming.read() == b""

    async def test_traffic_is_counted(self, ends: Ends) -> None:
        before = ends.client.traffic.sent, ends.server.traffic.received
        stream = ends.client.open(bidirectional=False)
        await stream.write(bytes(100_000), fin=True)
        await read_all(await ends.server.accept())
        await until_quiet(ends.client)
        client, server = ends.client.traffic, ends.server.traffic
        assert 100_000 <= client.sent - before[0] < 200_000
        assert 100_000 <= server.received - before[1] < 200_000
        for traffic in (client, server):
            assert traffic.rtt is None or 0 < traffic.rtt < 10

    async def test_ids_say_who_opened(self, ends: Ends) -> None:
        ids = []
        for end in (ends.client, ends.server):
            for bidirectional in (True, False):
                for _ in range(2):
                    stream = end.open(bidirectional=bidirectional)
                    ids.append(stream.id)
        assert ids == [0, 4, 2, 6, 1, 5, 3, 7]

    async def test_both_directions_of_a_bidirectional_stream(self, ends: Ends) -> None:
        async def answer() -> None:
            stream = await ends.server.accept()
            assert stream.bidirectional
            await stream.write(b"answer to " + await read_all(stream), fin=True)

        stream = ends.client.open(bidirectional=True)
        async with asyncio.TaskGroup() as group:
            group.create_task(answer())
            await stream.write(b"question", fin=True)
            assert await read_all(stream) == b"answer to question"

    async def test_a_stream_of_a_fin_alone(self, ends: Ends) -> None:
        await ends.client.open(bidirectional=False).write(b"", fin=True)
        assert await (await ends.server.accept()).read() == b""

    async def test_a_stream_without_data_is_invisible(self, ends: Ends) -> None:
        ends.client.open(bidirectional=False)
        second = ends.client.open(bidirectional=False)
        await second.write(b"x")
        assert (await ends.server.accept()).id == second.id

    async def test_the_first_stream_appears_when_it_gets_data_later(self, ends: Ends) -> None:
        first = ends.client.open(bidirectional=False)
        second = ends.client.open(bidirectional=False)
        await second.write(b"2", fin=True)
        assert await read_all(await ends.server.accept()) == b"2"
        await first.write(b"1", fin=True)
        incoming = await ends.server.accept()
        assert incoming.id == first.id
        assert await read_all(incoming) == b"1"

    async def test_hand_takes_buffers_of_any_item(self, ends: Ends) -> None:
        numbers = array.array("I", range(100))
        stream = ends.client.open(bidirectional=False)
        stream.hand(memoryview(numbers))
        stream.hand(bytearray(b"tail"), fin=True)
        assert await read_all(await ends.server.accept()) == numbers.tobytes() + b"tail"

    async def test_wrong_direction_is_the_callers_fault(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=False)
        with pytest.raises(UsageError):
            await stream.read()
        with pytest.raises(UsageError):
            stream.stop(1)
        await stream.write(b"x")
        incoming = await ends.server.accept()
        with pytest.raises(UsageError):
            incoming.hand(b"x")
        with pytest.raises(UsageError):
            incoming.reset(1)

    async def test_after_fin_or_reset_writing_is_the_callers_fault(self, ends: Ends) -> None:
        finished, aborted = (ends.client.open(bidirectional=False) for _ in range(2))
        await finished.write(b"x", fin=True)
        aborted.reset(1)
        for stream in (finished, aborted):
            with pytest.raises(UsageError):
                stream.hand(b"x")
            with pytest.raises(UsageError):
                await stream.write(b"x")

    async def test_one_reader_at_a_time(self, ends: Ends) -> None:
        await ends.client.open(bidirectional=True).write(b"x")
        stream = await ends.server.accept()
        assert await stream.read() == b"x"
        reader = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        with pytest.raises(UsageError):
            await stream.read()
        reader.cancel()

    async def test_a_cancelled_read_loses_nothing(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=False)
        await stream.write(b"first")
        incoming = await ends.server.accept()
        assert await incoming.read() == b"first"
        for turns in range(5):
            reader = asyncio.create_task(incoming.read())
            for _ in range(turns):
                await asyncio.sleep(0)
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
        await stream.write(b"second", fin=True)
        assert await read_all(incoming) == b"second"

    async def test_what_has_waited_is_read_in_parts_of_bounded_size(self, ends: Ends) -> None:
        data = random.Random(4).randbytes(3 * READ_SIZE)
        stream = ends.client.open(bidirectional=False)
        writing = asyncio.create_task(stream.write(data, fin=True))
        incoming = await ends.server.accept()
        assert isinstance(incoming, BaseStream)
        while incoming.unread < len(data):
            await ends.client.ping()
        await writing
        parts = []
        while part := await incoming.read():
            parts.append(part)
            assert not (incoming.released and incoming.unread)  # The end comes with the last part.
        assert b"".join(parts) == data
        assert len(parts) > 2
        assert max(map(len, parts)) <= READ_SIZE

    # Aborting.

    async def test_a_reset_comes_at_once_with_its_code(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=False)
        await stream.write(b"unread")
        incoming = await ends.server.accept()
        await ends.client.ping()
        stream.reset(0x1234)
        await ends.client.ping()
        with pytest.raises(StreamReset) as caught:
            await incoming.read()
        assert caught.value.code == 0x1234
        with pytest.raises(StreamReset):
            await incoming.read()

    async def test_a_reset_wakes_the_reader(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=True)
        await stream.write(b"x")
        incoming = await ends.server.accept()
        assert await incoming.read() == b"x"
        reader = asyncio.create_task(incoming.read())
        await asyncio.sleep(0)
        stream.reset(5)
        with pytest.raises(StreamReset) as caught:
            await reader
        assert caught.value.code == 5

    async def test_a_stream_that_was_reset_before_any_data(self, ends: Ends) -> None:
        ends.client.open(bidirectional=False).reset(7)
        incoming = await ends.server.accept()
        with pytest.raises(StreamReset) as caught:
            await incoming.read()
        assert caught.value.code == 7

    async def test_a_reset_drops_what_was_not_sent(self, small: Ends) -> None:
        stream = small.client.open(bidirectional=False)
        stream.hand(bytes(1 << 20))
        incoming = await small.server.accept()
        await until_quiet(small.client)
        assert small.client.unsent > 0
        stream.reset(1)
        assert small.client.unsent == 0
        with pytest.raises(StreamReset):
            await read_all(incoming)

    async def test_a_reset_of_a_finished_stream_has_no_effect(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=False)
        await stream.write(b"all", fin=True)
        await until_quiet(ends.client)
        stream.reset(1)
        await until_quiet(ends.client)
        assert await read_all(await ends.server.accept()) == b"all"

    async def test_stop_ends_writing_with_its_code(self, small: Ends) -> None:
        stream = small.client.open(bidirectional=False)
        codes: list[int] = []
        stream.on_stopped = codes.append
        writer = asyncio.create_task(stream.write(bytes(1 << 20)))
        incoming = await small.server.accept()
        await incoming.read()
        incoming.stop(0x77)
        with pytest.raises(StreamStopped) as caught:
            await writer
        assert caught.value.code == stream.stopped == 0x77
        assert codes == [0x77]
        with pytest.raises(StreamStopped):
            stream.hand(b"x")
        stream.reset(1)
        assert small.client.unsent == 0
        with pytest.raises(UsageError):
            await incoming.read()
        await until_quiet(small.client)
        assert codes == [0x77]

    async def test_stop_wakes_the_reader_of_this_side(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=True)
        reader = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        stream.stop(1)
        with pytest.raises(UsageError):
            await reader

    async def test_stop_of_one_direction_leaves_the_other(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=True)
        await stream.write(b"a")
        incoming = await ends.server.accept()
        stream.stop(9)
        await stream.write(b"b", fin=True)
        assert await read_all(incoming) == b"ab"
        await until_quiet(ends.client)
        with pytest.raises(StreamStopped):
            await incoming.write(b"x")

    async def test_stop_after_the_fin_only_drops(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=False)
        await stream.write(bytes(1000), fin=True)
        incoming = await ends.server.accept()
        await until_quiet(ends.client)
        assert ends.server.held == 1000
        incoming.stop(3)
        assert ends.server.held == 0
        await until_quiet(ends.client)
        assert stream.stopped is None

    # Flow control.

    async def test_an_object_much_larger_than_the_window(self, small: Ends) -> None:
        data = noise(16 << 20)
        stream = small.server.open(bidirectional=False)
        digest = hashlib.sha256()

        async def read() -> None:
            incoming = await small.client.accept()
            while part := await incoming.read():
                digest.update(part)
                assert small.client.held <= SMALL.max_stream_data

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            await stream.write(data, fin=True)
        assert digest.digest() == hashlib.sha256(data).digest()

    async def test_the_reader_who_stops_bounds_both_sides(self, small: Ends) -> None:
        offer = Offer(small.server, streams=1, each=64 << 20)
        incoming = await small.client.accept()
        await until_quiet(small.client)
        assert 0 < small.client.held <= SMALL.max_stream_data
        assert offer.peak <= WATERMARK + 64 * 1024
        handed = (64 << 20) - offer.left[0]
        assert handed <= SMALL.max_stream_data
        # It goes on when the reader goes on.
        taken = 0
        while taken < 1 << 20:
            taken += len(await incoming.read())
        assert (64 << 20) - offer.left[0] > handed

    async def test_credit_counts_down_and_comes_back(self, small: Ends) -> None:
        stream = small.client.open(bidirectional=False)
        assert stream.credit == SMALL.max_stream_data
        before = small.client.credit
        stream.hand(bytes(1000))
        assert small.client.unsent == 1000
        assert stream.credit == SMALL.max_stream_data - 1000
        assert small.client.credit == before - 1000
        incoming = await small.server.accept()
        stream.hand(bytes(stream.credit))
        assert stream.credit == 0
        await until_quiet(small.client)
        assert small.client.unsent == 0
        assert stream.credit == 0
        taken = 0
        while taken < SMALL.max_stream_data:
            taken += len(await incoming.read())
        await until_quiet(small.client)
        assert stream.credit > SMALL.max_stream_data // 2

    async def test_bytes_beyond_the_credit_wait_for_it(self, small: Ends) -> None:
        data = noise(1 << 20)
        stream = small.client.open(bidirectional=False)
        stream.hand(data[:500_000])
        assert stream.credit == 0
        await until_quiet(small.client)
        assert 0 < small.client.unsent < 500_000
        stream.hand(data[500_000:], fin=True)
        assert await read_all(await small.server.accept()) == data
        await until_quiet(small.client)
        assert small.client.unsent == 0

    async def test_a_throttled_stream_lets_others_pass(self, small: Ends) -> None:
        """Bytes of a stream that nobody reads stand first in line; those of the next stream go before."""
        first, second = (small.client.open(bidirectional=False) for _ in range(2))
        first.hand(bytes(100_000), fin=True)
        second.hand(b"passes", fin=True)
        unread = await small.server.accept()
        incoming = await small.server.accept()
        if incoming.id != second.id:
            unread, incoming = incoming, unread
        assert await read_all(incoming) == b"passes"
        assert small.client.unsent > 0
        assert len(await read_all(unread)) == 100_000

    async def test_unread_streams_do_not_starve_control_and_requests(self, small: Ends) -> None:
        """The windows are full of data that nobody reads; requests still go to and fro."""
        offer = Offer(small.server, streams=32, each=1 << 20)
        while small.client.held < SMALL.max_data // 2:
            await small.client.ping()
        await until_quiet(small.client)
        assert small.server.credit == 0
        request = small.client.open(bidirectional=True)
        await request.write(b"request")
        answer = await small.server.accept()
        assert await answer.read() == b"request"
        for round_ in range(300):
            await answer.write(round_.to_bytes(2, "big") * 512)
            size = 0
            while size < 1024:
                size += len(await request.read())
        assert sum(offer.left) > 0

    async def test_the_credit_of_stopped_streams_comes_back(self, small: Ends) -> None:
        """Far more than the connection's window is sent to streams that are stopped unread."""
        offer = Offer(small.server, streams=64, each=128 * 1024)
        for _ in range(64):
            (await small.client.accept()).stop(1)
        while offer.streams[-1].stopped is None or len(offer.streams) < 64:
            await small.client.ping()
        await until_quiet(small.client)
        assert small.client.held == 0
        await self._a_stream_still_works(small)

    async def test_the_credit_of_reset_streams_comes_back(self, small: Ends) -> None:
        for _ in range(64):
            stream = await small.server.open_when_possible(bidirectional=False)
            stream.hand(bytes(min(stream.credit, small.server.credit)))
            await small.client.accept()
            stream.reset(1)
            await small.server.ping()
        await until_quiet(small.client)
        assert small.client.held == 0
        await self._a_stream_still_works(small)

    async def _a_stream_still_works(self, ends: Ends) -> None:
        data = noise(1 << 20)
        stream = await ends.server.open_when_possible(bidirectional=False)
        async with asyncio.TaskGroup() as group:
            group.create_task(stream.write(data, fin=True))
            assert await read_all(await ends.client.accept()) == data

    async def test_many_writers_at_once(self, small: Ends) -> None:
        blobs = {index: noise(100_000, index) for index in range(20)}
        received: list[bytes] = []

        async def send(blob: bytes) -> None:
            stream = await small.client.open_when_possible(bidirectional=False)
            await stream.write(blob, fin=True)

        async with asyncio.TaskGroup() as group:
            for blob in blobs.values():
                group.create_task(send(blob))

            async def receive() -> None:
                received.append(await read_all(await small.server.accept()))

            for _ in blobs:
                group.create_task(receive())
        assert sorted(received) == sorted(blobs.values())

    # Stream credit.

    async def test_160_streams_through_a_limit_of_3(self) -> None:
        few = QuicOptions(max_uni_streams=3, max_bidi_streams=3)
        async with self.connect(few, few) as ends:
            for bidirectional in (False, True):

                async def send(stream_bidirectional: bool) -> None:
                    for index in range(160):
                        stream = await ends.client.open_when_possible(bidirectional=stream_bidirectional)
                        await stream.write(index.to_bytes(2, "big") * 100, fin=True)

                async with asyncio.TaskGroup() as group:
                    group.create_task(send(bidirectional))
                    numbers = set()
                    for _ in range(160):
                        stream = await ends.server.accept()
                        numbers.add(int.from_bytes((await read_all(stream))[:2], "big"))
                        if bidirectional:
                            await stream.write(b"", fin=True)
                assert numbers == set(range(160))

    async def test_160_streams_at_once(self, ends: Ends) -> None:
        """All are open and half sent before any ends; limits of 128 would not do."""
        streams = [ends.server.open(bidirectional=False) for _ in range(160)]
        for stream in streams:
            stream.hand(stream.id.to_bytes(4, "big") * 500)
        incoming = [await ends.client.accept() for _ in streams]
        for stream in streams:
            stream.hand(stream.id.to_bytes(4, "big") * 500, fin=True)
        for stream in incoming:
            assert await read_all(stream) == stream.id.to_bytes(4, "big") * 1000

    async def test_open_refuses_without_credit(self) -> None:
        few = QuicOptions(max_uni_streams=3, max_bidi_streams=2)
        async with self.connect(few, few) as ends:
            for bidirectional, limit in ((False, 3), (True, 2)):
                assert ends.client.stream_credit(bidirectional=bidirectional) == limit
                streams = [ends.client.open(bidirectional=bidirectional) for _ in range(limit)]
                assert ends.client.stream_credit(bidirectional=bidirectional) == 0
                with pytest.raises(NoStreamCredit):
                    ends.client.open(bidirectional=bidirectional)
                assert len({stream.id for stream in streams}) == limit

    async def test_openers_wait_in_line(self) -> None:
        few = QuicOptions(max_uni_streams=2)
        async with self.connect(few, few) as ends:
            opened: list[int] = []

            async def opener(number: int) -> None:
                stream = await ends.client.open_when_possible(bidirectional=False)
                opened.append(number)
                await stream.write(b"x", fin=True)

            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(opener(number))
                for _ in range(20):
                    await read_all(await ends.server.accept())
            assert opened == list(range(20))

    async def test_a_cancelled_opener_gives_its_turn_away(self) -> None:
        few = QuicOptions(max_uni_streams=1)
        async with self.connect(few, few) as ends:
            first = ends.client.open(bidirectional=False)
            waiting = [
                asyncio.create_task(ends.client.open_when_possible(bidirectional=False)) for _ in range(3)
            ]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await first.write(b"x", fin=True)
            await read_all(await ends.server.accept())
            await (await waiting[1]).write(b"y", fin=True)
            assert await read_all(await ends.server.accept()) == b"y"
            waiting[2].cancel()

    async def test_streams_nobody_accepts_or_reads_are_bounded(self) -> None:
        """Stream credit comes back when the application is done with a stream, not when its bytes came."""
        few = QuicOptions(max_uni_streams=5)
        async with self.connect(few, few) as ends:
            for _ in range(5):
                await ends.client.open(bidirectional=False).write(b"x", fin=True)
            await until_quiet(ends.client)
            assert ends.client.stream_credit(bidirectional=False) == 0
            streams = [await ends.server.accept() for _ in range(5)]
            await until_quiet(ends.client)
            assert ends.client.stream_credit(bidirectional=False) == 0
            for stream in streams:
                await read_all(stream)
            await until_quiet(ends.client)
            assert ends.client.stream_credit(bidirectional=False) > 0

    async def test_a_cancelled_accept_loses_no_stream(self, ends: Ends) -> None:
        accepting = asyncio.create_task(ends.server.accept())
        await asyncio.sleep(0)
        await ends.client.open(bidirectional=False).write(b"x", fin=True)
        await ends.client.ping()
        accepting.cancel()
        stream = None
        with suppress(asyncio.CancelledError):
            stream = await accepting
        if stream is None:
            stream = await ends.server.accept()
        assert await read_all(stream) == b"x"

    # Sending order.

    async def test_streams_leave_in_the_order_of_handing(self, ends: Ends) -> None:
        if not self.exact:
            return
        finished: list[int] = []

        async def read(stream: Stream) -> None:
            await read_all(stream)
            finished.append(stream.id)

        Offer(ends.server, streams=16, each=100_000)
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(read(await ends.client.accept()))
        assert finished == sorted(finished)

    async def test_the_feeder_tops_up_to_the_watermark(self, ends: Ends) -> None:
        offer = Offer(ends.server, streams=8, each=1 << 20)
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(read_all(await ends.client.accept()))
        assert WATERMARK // 2 < offer.peak <= WATERMARK

    async def test_a_write_overtakes_data(self, ends: Ends) -> None:
        """Control bytes do not queue behind megabytes of data."""
        offer = Offer(ends.server, streams=1, each=64 << 20)
        incoming = await ends.client.accept()
        await ends.server.open(bidirectional=True).write(b"urgent")
        control = await ends.client.accept()
        taken = 0

        async def drain() -> None:
            nonlocal taken
            while True:
                taken += len(await incoming.read())

        draining = asyncio.create_task(drain())
        assert await control.read() == b"urgent"
        draining.cancel()
        assert offer.left[0] > 0
        assert taken < 32 << 20

    # The end.

    async def test_close_tells_code_and_reason_to_both(self) -> None:
        for from_client in (True, False):
            async with self.connect() as ends:
                closer, other = (ends.client, ends.server) if from_client else (ends.server, ends.client)
                closer.close(0x1F, "going – home")
                closer.close(1, "not this one")
                assert closer.closed is not None
                here, there = await closer.wait_closed(), await other.wait_closed()
                for end, remote in ((here, False), (there, True)):
                    assert (end.code, end.reason) == (0x1F, "going – home")
                    assert end.application
                    assert end.remote is remote

    async def test_what_was_written_just_before_the_close_leaves(self, ends: Ends) -> None:
        if not self.exact:
            return
        await ends.client.open(bidirectional=False).write(b"last words", fin=True)
        ends.client.close(0, "bye")
        assert await read_all(await ends.server.accept()) == b"last words"
        assert (await ends.server.wait_closed()).reason == "bye"

    async def test_a_long_reason_is_cut(self, ends: Ends) -> None:
        ends.client.close(2, "é" * 5000)
        end = await ends.server.wait_closed()
        assert end.reason == "é" * 450

    async def _waiters(self, ends: Ends, end: AnyConnection) -> dict[str, asyncio.Task[object]]:
        """Tasks at one end that wait for everything there is to wait for."""
        other = ends.server if end is ends.client else ends.client
        await other.open(bidirectional=False).write(b"x")
        reading = await end.accept()
        assert await reading.read() == b"x"
        while end.stream_credit(bidirectional=False) > 1:
            end.open(bidirectional=False)
        stuck = end.open(bidirectional=False)
        stuck.hand(bytes(stuck.credit))
        tasks: dict[str, asyncio.Task[object]] = {
            "read": asyncio.create_task(reading.read()),
            "write": asyncio.create_task(stuck.write(b"more")),
            "accept": asyncio.create_task(end.accept()),
            "open": asyncio.create_task(end.open_when_possible(bidirectional=False)),
        }
        await until_quiet(end)
        assert not any(task.done() for task in tasks.values())
        return tasks

    @pytest.mark.parametrize("here", [True, False])
    async def test_close_wakes_everyone(self, here: bool) -> None:
        few = QuicOptions(max_uni_streams=4, max_stream_data=64 * 1024)
        async with self.connect(few, few) as ends:
            tasks = await self._waiters(ends, ends.client)
            tasks["ping"] = asyncio.create_task(ends.client.ping())
            await asyncio.sleep(0)
            (ends.client if here else ends.server).close(3, "over")
            for name, task in tasks.items():
                with pytest.raises(ConnectionClosed) as caught:
                    await task
                assert (caught.value.code, caught.value.remote) == (3, not here), name
            await self._everything_raises(ends.client)

    async def test_a_cut_wakes_everyone(self) -> None:
        few = QuicOptions(max_uni_streams=4, max_stream_data=64 * 1024, idle_timeout=1.0, keepalive=None)
        async with self.connect(few, few) as ends:
            tasks = await self._waiters(ends, ends.server)
            ends.cut()
            tasks["ping"] = asyncio.create_task(ends.server.ping())
            for name, task in tasks.items():
                with pytest.raises(ConnectionClosed) as caught:
                    await task
                assert not caught.value.application, name
                assert not caught.value.remote
            await self._everything_raises(ends.server)
            assert not (await ends.client.wait_closed()).application

    async def _everything_raises(self, end: AnyConnection) -> None:
        assert end.closed is not None
        for bidirectional in (True, False):
            with pytest.raises(ConnectionClosed):
                end.open(bidirectional=bidirectional)
            with pytest.raises(ConnectionClosed):
                await end.open_when_possible(bidirectional=bidirectional)
        with pytest.raises(ConnectionClosed):
            await end.accept()
        with pytest.raises(ConnectionClosed):
            await end.ping()
        with pytest.raises(ConnectionClosed):
            end.send_datagram(b"x")
        end.kick()
        end.close()

    async def test_a_dead_connection_never_looks_like_a_finished_stream(self) -> None:
        options = QuicOptions(idle_timeout=1.0, keepalive=None)
        async with self.connect(options, options) as ends:
            stream = ends.client.open(bidirectional=False)
            await stream.write(b"part")
            incoming = await ends.server.accept()
            await ends.client.ping()
            ends.cut()
            assert await incoming.read() == b"part"
            for _ in range(2):
                with pytest.raises(ConnectionClosed):
                    await incoming.read()
            await ends.client.wait_closed()
            with pytest.raises(ConnectionClosed):
                stream.hand(b"more")
            with pytest.raises(ConnectionClosed):
                await stream.write(b"more")

    async def test_what_came_before_the_peers_close_can_be_read(self, ends: Ends) -> None:
        whole, part = (ends.client.open(bidirectional=False) for _ in range(2))
        await whole.write(b"whole", fin=True)
        await part.write(b"part")
        await until_quiet(ends.client)
        ends.client.close(0, "bye")
        await ends.server.wait_closed()
        streams = {stream.id: stream for stream in [await ends.server.accept(), await ends.server.accept()]}
        assert await read_all(streams[whole.id]) == b"whole"
        assert await streams[part.id].read() == b"part"
        with pytest.raises(ConnectionClosed):
            await streams[part.id].read()
        with pytest.raises(ConnectionClosed):
            await ends.server.accept()

    async def test_after_our_own_close_nothing_is_read(self, ends: Ends) -> None:
        await ends.client.open(bidirectional=False).write(b"whole", fin=True)
        incoming = await ends.server.accept()
        await until_quiet(ends.client)
        await ends.client.open(bidirectional=False).write(b"not accepted", fin=True)
        await until_quiet(ends.client)
        ends.server.close(0, "bye")
        with pytest.raises(ConnectionClosed):
            await incoming.read()
        with pytest.raises(ConnectionClosed):
            await ends.server.accept()

    async def test_aborting_after_the_end_has_no_effect(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=True)
        await stream.write(b"x")
        incoming = await ends.server.accept()
        ends.client.close()
        await ends.server.wait_closed()
        for end in (stream, incoming):
            end.reset(1)
            end.stop(1)
        assert ends.client.closed is not None

    async def test_a_callback_that_raises_closes_the_connection(self, ends: Ends) -> None:
        faults: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(repr(context["exception"])))

        def feeder() -> None:
            raise KeyError("bug")

        ends.client.feeder = feeder
        ends.client.kick()
        here, there = await ends.client.wait_closed(), await ends.server.wait_closed()
        loop.set_exception_handler(None)
        assert faults == ["KeyError('bug')"]
        assert (here.code, here.remote) == (1, False)
        assert (there.code, there.remote) == (1, True)

    async def test_closing_within_a_callback(self, ends: Ends) -> None:
        stream = ends.client.open(bidirectional=False)
        stream.on_stopped = lambda code: ends.client.close(code, "stopped")
        await stream.write(b"x")
        (await ends.server.accept()).stop(42)
        assert (await ends.server.wait_closed()).code == 42
        assert (await ends.client.wait_closed()).code == 42

    # The rest.

    async def test_ping(self, ends: Ends) -> None:
        await asyncio.gather(*(end.ping() for end in (ends.client, ends.server) for _ in range(3)))
        assert ends.client.closed is None

    async def test_datagrams(self, ends: Ends) -> None:
        for sender, receiver in ((ends.client, ends.server), (ends.server, ends.client)):
            arrived: asyncio.Queue[bytes] = asyncio.Queue()
            receiver.on_datagram = arrived.put_nowait
            for number in range(30):
                sender.send_datagram(bytes([number]) * 1000)
            data = await arrived.get()
            assert data == data[:1] * 1000
            with pytest.raises(UsageError):
                sender.send_datagram(bytes(1452))

    async def test_about_itself(self, ends: Ends) -> None:
        assert ends.client.is_client
        assert not ends.server.is_client
        for end in (ends.client, ends.server):
            assert end.alpn == "moqt-22"
            assert end.id
            assert end.peer
            assert end.closed is None
            assert end.unsent == 0
