"""What a hostile peer does to a session that serves: one coroutine for each kind of attack.

An attack uses a connection that is up, does its harm, and returns what has to come of it: a session code with
which the connection must be closed, LIVES if it must not be closed, or None if the specification lets the
session choose, or the bytes are too random to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any, Final

from moqt.errors import MoqtError, SessionCode, StreamStopped
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.quic.api import Connection, NoStreamCredit, Stream
from tests.fuzz.material import (
    CONTROL,
    GOAWAY,
    NEGATIVE,
    REPLIES,
    REQUESTS,
    SETUP,
    SUBSCRIBE,
    UPDATE,
    Material,
)
from tests.fuzz.stage import LARGE, SERVED
from tests.moqt.hostile import MAXIMUM, Ids, Speaker, frame, full_name, namespace, prefixed, vi
from tests.moqt.test_hostile_peer import (
    ROWS,
    Close,
    Place,
    Row,
    as_datagram,
    as_request,
    as_setup,
    as_stream,
    on_control,
)

__all__ = ["ATTACKS", "FIRST", "FRESH", "LIVES", "Attacker", "Verdict"]

LIVES: Final = -1
Verdict = int | None

PV: Final = SessionCode.PROTOCOL_VIOLATION
PLAIN: Final = frame(SETUP)


class Attacker(Speaker):
    """A hostile client. `reads` says whether it takes what the other side sends."""

    def __init__(self, connection: Connection, random: Random, *, reads: bool) -> None:
        super().__init__(connection)
        self.random = random
        self.material = Material(random, SERVED)
        self.sent = 0
        """Messages, streams and datagrams."""
        self.going = False
        """Whether it has said GOAWAY."""
        self.next_id = 1000  # What is written down elsewhere has smaller ones.
        self._tasks: set[asyncio.Task[None]] = set()
        if reads:
            self.run(self._accept())

    def take_id(self) -> int:
        """A Request ID that was not used yet."""
        number, self.next_id = self.next_id, self.next_id + 2
        return number

    async def open(self, data: bytes, *, bidirectional: bool, fin: bool = False) -> Stream:
        self.sent += 1
        return await super().open(data, bidirectional=bidirectional, fin=fin)

    async def say(self, data: bytes, *, fin: bool = False) -> None:
        self.sent += 1
        self.going = self.going or data[:1] == vi(GOAWAY)
        await super().say(data, fin=fin)

    async def add(self, stream: Stream, data: bytes, *, fin: bool = False) -> None:
        """Go on on a stream; no matter if the other side wants no more."""
        self.sent += 1
        with suppress(StreamStopped):
            await stream.write(data, fin=fin)

    def datagram(self, data: bytes) -> None:
        self.sent += 1
        self.connection.send_datagram(data)

    def leave(self, stream: Stream) -> None:
        """End a request stream in one of the ways there are, or not at all."""
        code = self.random.choice((0, 1, 0x12, 0x19B, 2**62 - 1))
        match self.random.randrange(5):
            case 0:
                stream.reset(code)
            case 1:
                stream.stop(code)
            case 2:
                stream.reset(code)
                stream.stop(code)
            case 3:
                with suppress(MoqtError):
                    stream.hand(b"", fin=True)

    async def settle(self) -> None:
        """Wait until the other side has got all; it may have closed the connection then."""
        with suppress(MoqtError):
            await self.connection.ping()
            await self.connection.ping()

    async def gone(self) -> None:
        """Leave nothing behind on this side."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.connection.close()
        await self.connection.wait_closed()

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Go on with something until `gone`."""
        task = asyncio.create_task(coroutine, name="attacker")
        self._tasks.add(task)
        task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, MoqtError):
            task.get_loop().call_exception_handler({"message": "the fuzzer failed", "exception": error})

    async def _accept(self) -> None:
        while True:
            self.run(self._read(await self.connection.accept()))

    async def _read(self, stream: Stream) -> None:
        if stream.bidirectional or self.random.random() < 0.9:
            while await stream.read():
                pass
        else:
            stream.stop(1)


# Requests.


async def spoilt_request(a: Attacker) -> Verdict:
    """A request with faults, of which the session may see all or only a part."""
    data = a.material.spoil(a.material.request(a.random.choice(REQUESTS), a.take_id()))
    stream = await a.request(data, fin=a.random.random() < 0.3)
    if a.random.random() < 0.5:
        a.leave(stream)
    return None


async def spoilt_vector(a: Attacker) -> Verdict:
    """A message of moqt 26.2 or 26.4, with faults."""
    await a.request(a.material.spoil(a.random.choice(CONTROL)), fin=a.random.random() < 0.5)
    return None


async def wrong_opening(a: Attacker) -> Verdict:
    """A request stream that starts with what is no request (moqt 20 #3)."""
    await a.request(a.material.message(a.random.choice(REPLIES)))
    return PV


async def wrong_sequel(a: Attacker) -> Verdict:
    """A request, and messages behind it that have no place there, or do."""
    kind = a.random.choice(REQUESTS)
    stream = await a.request(a.material.request(kind, a.take_id()))
    if a.random.random() < 0.5:
        await a.settle()
    for _ in range(a.random.randint(1, 4)):
        number = a.take_id() if a.random.random() < 0.8 else 0
        data = a.material.message(a.random.choice((UPDATE, UPDATE, *REPLIES)), number)
        await a.add(stream, a.material.spoil(data) if a.random.random() < 0.3 else data)
    a.leave(stream)
    return None


async def request_ids(a: Attacker) -> Verdict:
    """IDs of the other side, IDs twice, and IDs far away (moqt 3.3)."""
    kind = a.random.choice((0x03, 0x0D, 0x50))
    number = a.random.choice((1, MAXIMUM, MAXIMUM - 1, 2**62, 2**63))
    await a.request(_plain(kind, number))
    if number % 2:
        return SessionCode.INVALID_REQUEST_ID
    if a.random.random() < 0.5:
        await a.settle()
        await a.request(_plain(kind, number))
        return SessionCode.INVALID_REQUEST_ID
    return None


async def flood(a: Attacker) -> Verdict:
    """As many requests as the other side has room for, each ended somehow."""
    streams = []
    for _ in range(a.random.choice((20, 60, 150))):
        try:
            streams.append(await a.request(a.material.request(a.random.choice(REQUESTS), a.take_id())))
        except NoStreamCredit:
            break
        if a.random.random() < 0.1:
            await a.settle()
        if a.random.random() < 0.5:
            a.leave(streams.pop())
    if a.random.random() < 0.7:
        for stream in streams:
            a.leave(stream)
    return None


async def hopping(a: Attacker) -> Verdict:
    """Subscribe to what there is and cancel it, again and again."""
    for _ in range(a.random.choice((5, 30))):
        track = a.random.choice(SERVED)
        try:
            stream = await a.request(a.material.request(a.random.choice((0x03, 0x16)), a.take_id(), track))
        except NoStreamCredit:
            break
        if a.random.random() < 0.4:
            await a.settle()
        stream.reset(1)
        stream.stop(1)
    return None


async def updates(a: Attacker) -> Verdict:
    """REQUEST_UPDATEs by the dozen on one subscription or fetch (moqt 20 #18)."""
    kind = a.random.choice((0x03, 0x03, 0x16, 0x50, 0x06))
    body = _plain(kind, a.take_id(), LARGE)
    count = a.random.choice((1, 10, 16, 17, 200))
    empty = a.random.random() < 0.5
    many = b"".join(
        frame(UPDATE, vi(a.take_id()), vi(0) if empty else a.material.parameters(UPDATE))
        for _ in range(count)
    )
    stream = await a.request(body)
    a.sent += count
    await a.add(stream, many)
    if empty and count > Limits().max_request_updates:
        return SessionCode.TOO_MANY_REQUEST_UPDATES
    return LIVES if empty else None


async def tokens(a: Attacker) -> Verdict:
    """Aliases registered, used, deleted, used again, and too large (moqt 2.7)."""
    for _ in range(a.random.randint(1, 8)):
        token = prefixed(a.material.token())
        await a.request(
            frame(SUBSCRIBE, vi(a.take_id()), full_name(LARGE), vi(1, 0x03), token),
            fin=a.random.random() < 0.5,
        )
        if a.random.random() < 0.5:
            await a.settle()
    return None


async def overflow(a: Attacker) -> Verdict:
    """More tokens than fit (moqt 20 #32)."""
    for alias in range(1000, 1005):
        token = prefixed(vi(1, alias, 0) + bytes(1000))
        await a.request(frame(SUBSCRIBE, vi(a.take_id()), full_name(LARGE), vi(1, 0x03), token))
    return SessionCode.AUTH_TOKEN_CACHE_OVERFLOW


async def never_reading(a: Attacker) -> Verdict:
    """Subscriptions, fills and fetches of more than fits into the windows, by somebody who does not read."""
    everything = b"\x01\x23" + prefixed(b"\x01\x21\x02\x00\x00")
    for number in range(a.random.choice((1, 8, 40))):
        kind = a.random.choice((0x03, 0x16))
        parameters = everything if kind == 0x03 else b"\x00"
        try:
            await a.request(frame(kind, vi(a.take_id()), full_name(SERVED[number % 2]), parameters))
        except NoStreamCredit:
            break
    return LIVES


async def namespaces(a: Attacker) -> Verdict:
    """Namespaces announced, watched, moved and withdrawn, with odd bytes in their fields."""
    for _ in range(a.random.choice((3, 20, 60))):
        kind = a.random.choice((0x06, 0x06, 0x50))
        prefix = a.material.foreign() if kind == 0x06 else a.material.fields()
        try:
            stream = await a.request(frame(kind, vi(a.take_id()), namespace(*prefix), vi(0)))
        except NoStreamCredit:
            break
        if kind == 0x50 and a.random.random() < 0.5:
            moved = vi(1, 0x34) + namespace(*a.material.fields())
            await a.add(stream, frame(UPDATE, vi(a.take_id()), moved))
        if a.random.random() < 0.5:
            a.leave(stream)
    return None


async def everything_is_mine(a: Attacker) -> Verdict:
    """A publisher of all there is, which never answers (moqt 11, a prefix without fields)."""
    await a.request(frame(0x06, vi(a.take_id()), namespace(), vi(0)))
    await a.settle()
    missing = FullTrackName((b"nobody",), a.material.octets())
    await a.request(frame(0x03, vi(a.take_id()), full_name(missing), vi(0)))
    return None


async def publish(a: Attacker) -> Verdict:
    """PUBLISH and SUBSCRIBE_TRACKS, and data for them that nobody has asked for."""
    alias = a.random.randrange(4)
    track = FullTrackName(a.material.foreign(), a.material.octets())
    body = frame(0x1D, vi(a.take_id()), full_name(track), vi(alias), a.material.parameters(0x1D, most=1))
    stream = await a.request(body)
    await a.request(a.material.request(0x51, a.take_id()))
    for _ in range(a.random.randrange(4)):
        data = a.material.subgroup(alias)
        await a.stream(
            a.material.spoil(data) if a.random.random() < 0.3 else data, fin=a.random.random() < 0.5
        )
    if a.random.random() < 0.5:
        await a.add(stream, a.material.message(0x0B), fin=True)
    else:
        a.leave(stream)
    return None


async def slow(a: Attacker) -> Verdict:
    """A request byte by byte, and never its end."""
    data = a.material.request(a.random.choice(REQUESTS), a.take_id())
    stream = await a.request(data[:1])
    for at in range(1, min(len(data) - 1, 60)):
        await a.add(stream, data[at : at + 1])
        if at % 8 == 0:
            await a.settle()
    return None


# Data streams and datagrams.


async def data_streams(a: Attacker) -> Verdict:
    """Data that nobody has asked for, whole or with faults, ended or not."""
    for _ in range(a.random.randint(1, 6)):
        data = a.material.data_stream()
        if a.random.random() < 0.5:
            data = a.material.spoil(data)
        stream = await a.stream(data, fin=a.random.random() < 0.4)
        if a.random.random() < 0.3:
            stream.reset(a.random.choice((0, 1, 5, MAXIMUM >> 2)))
    return None


async def stream_flood(a: Attacker) -> Verdict:
    """Streams by the hundred, of one harmless kind."""
    kind = a.random.randrange(5)
    for number in range(300):
        try:
            match kind:
                case 0:  # Reset before it says anything.
                    a.connection.open(bidirectional=False).reset(0)
                    a.sent += 1
                case 1:  # For an alias that is unknown; a huge Object that does not come.
                    await a.stream(vi(0x30, 1000 + number, 0, 0, 2**26))
                case 2:  # For a fetch that nobody has made.
                    await a.stream(vi(0x05, number) + b"\x1c\x00\x00\x80\x01x", fin=True)
                case 3:
                    await a.stream(vi(0x132B3E28) + bytes(2000))
                case 4:
                    await a.stream(b"\xf0\x13")
        except NoStreamCredit:
            await a.settle()
    return LIVES


async def mid_object(a: Attacker) -> Verdict:
    """FIN inside an Object, or inside a header; whether it is looked at depends on who wants the stream."""
    data = a.material.subgroup(5) if a.random.random() < 0.5 else a.material.fetch(1)
    await a.stream(data[: a.random.randint(1, len(data))], fin=True)
    return None


async def unknown_stream(a: Attacker) -> Verdict:
    """A stream of no known type (moqt 20 #1)."""
    await a.stream(vi(a.random.choice((0, 1, 3, 6, 0x16, 0x80, 0x1234, MAXIMUM))) + a.material.octets())
    return PV


async def datagrams(a: Attacker) -> Verdict:
    """Datagrams with and without faults."""
    for _ in range(a.random.randint(1, 30)):
        data = a.material.datagram()
        a.datagram((a.material.spoil(data) if a.random.random() < 0.3 else data)[:1000])
    return None


# The control stream.


async def goaway(a: Attacker) -> Verdict:
    """GOAWAY with a URI from a client, or twice (moqt 20 #13)."""
    plain = frame(GOAWAY, prefixed(b""), vi(a.random.choice((0, 1, 2**62))))
    match a.random.randrange(4):
        case 0:
            await a.say(frame(GOAWAY, prefixed(b"moqt://h/"), vi(0)))
        case 1:
            await a.say(plain + plain)
        case 2:
            await a.say(frame(GOAWAY, prefixed(bytes(8193)), vi(0)))
        case 3:
            stream = await a.request(_plain(0x50, a.take_id()))
            await a.add(stream, plain + plain)
    return PV


async def goaway_and_go_on(a: Attacker) -> Verdict:
    """GOAWAY is no fault, once; whoever sends it may ask on."""
    again = a.going
    await a.say(frame(GOAWAY, prefixed(b""), vi(0)))
    await a.request(_plain(0x0D, a.take_id()))
    return PV if again else LIVES


async def control(a: Attacker) -> Verdict:
    """What has no place on a control stream (moqt 20 #4)."""
    match a.random.randrange(6):
        case 0:
            await a.stream(PLAIN)
        case 1:
            await a.say(PLAIN)
        case 2:
            await a.say(b"", fin=True)
        case 3:
            assert a.control is not None
            await a.settle()
            a.control.reset(a.random.choice((0, 1)))
        case 4:
            kinds = [kind for kind in REPLIES if kind not in (GOAWAY, SETUP)]
            await a.say(a.material.message(a.random.choice(kinds)))
        case 5:
            await a.say(_plain(0x50, a.take_id()))
    return PV


async def abrupt(a: Attacker) -> Verdict:
    """Gone in the middle of everything."""
    await flood(a)
    a.connection.close(a.random.choice((0, 1, 3, 0x19B, 2**62 - 1)), "bye \x1b[2J\u202e")
    return None


# Before SETUP: these make a control stream of their own.


async def spoilt_setup(a: Attacker) -> Verdict:
    """A SETUP with faults."""
    data = a.material.message(SETUP)
    await a.open_control(a.material.spoil(data) if a.random.random() < 0.6 else data)
    return None


async def early(a: Attacker) -> Verdict:
    """Requests and data before SETUP, which may never come (moqt 3.1)."""
    for _ in range(a.random.choice((1, 40))):
        await a.request(a.material.request(a.random.choice(REQUESTS), a.take_id()))
        await a.stream(a.material.data_stream())
    if a.random.random() < 0.5:
        await a.open_control(PLAIN)
    return None


async def slow_setup(a: Attacker) -> Verdict:
    """SETUP byte by byte, or only its beginning."""
    data = frame(SETUP, vi(0x07) + prefixed(b"slow/1"))
    count = a.random.choice((1, 3, len(data)))
    await a.open_control(data[:1])
    for at in range(1, count):
        await a.say(data[at : at + 1])
        if at % 4 == 0:
            await a.settle()
    if count == len(data):
        return LIVES
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            await a.connection.wait_closed()
    return SessionCode.CONTROL_MESSAGE_TIMEOUT


def _plain(kind: int, number: int, track: FullTrackName | None = None) -> bytes:
    """A request without a fault."""
    if kind in (0x03, 0x0D, 0x16):
        return frame(kind, vi(number), full_name(track or LARGE), vi(0))
    return frame(kind, vi(number), namespace(b"plain", b"%d" % number), vi(0))


# The tables of moqt 20 and 26.6, which say exactly what has to happen.


def _rows(*places: Place) -> list[Row]:
    """Rows about a server with limits as they are by default."""
    return [row for row in ROWS if row.place in places and False in row.roles and row.limits == Limits()]


async def by_the_table(a: Attacker) -> Verdict:
    """A row of `tests.moqt.test_hostile_peer`."""
    row = a.random.choice(_rows(as_request, on_control, as_stream, as_datagram))
    data = row.data if isinstance(row.data, bytes) else row.data(Ids(0, 1))
    a.sent += 1
    if row.place is as_request:
        await a.request(data, fin=row.fin)
    elif row.place is on_control:
        await a.say(data, fin=row.fin)
    elif row.place is as_stream:
        await a.stream(data, fin=row.fin)
    else:
        a.datagram(data)
    return row.reaction.code if isinstance(row.reaction, Close) else LIVES


async def setup_by_the_table(a: Attacker) -> Verdict:
    """A row about SETUP."""
    row = a.random.choice(_rows(as_setup))
    assert isinstance(row.data, bytes)
    await a.open_control(row.data, fin=row.fin)
    return row.reaction.code if isinstance(row.reaction, Close) else LIVES


async def negative(a: Attacker) -> Verdict:
    """A request of moqt 26.6."""
    vectors = [vector for vector in NEGATIVE if vector[0][0] in REQUESTS]
    data, expected = a.random.choice(vectors)
    await a.request(data)
    if not expected.startswith("close"):
        return LIVES
    return int(expected.split()[1], 16)


ATTACKS: Final[tuple[Callable[[Attacker], Awaitable[Verdict]], ...]] = (
    spoilt_request,
    spoilt_request,
    spoilt_vector,
    wrong_opening,
    wrong_sequel,
    wrong_sequel,
    request_ids,
    flood,
    hopping,
    updates,
    tokens,
    overflow,
    never_reading,
    namespaces,
    everything_is_mine,
    publish,
    slow,
    data_streams,
    data_streams,
    stream_flood,
    mid_object,
    unknown_stream,
    datagrams,
    goaway,
    goaway_and_go_on,
    control,
    abrupt,
)
FRESH: Final[tuple[Callable[[Attacker], Awaitable[Verdict]], ...]] = (
    spoilt_setup,
    setup_by_the_table,
    early,
    slow_setup,
)
"""They open the control stream themselves."""
FIRST: Final[tuple[Callable[[Attacker], Awaitable[Verdict]], ...]] = (by_the_table, negative)
"""They are the first on their connection, since their Request IDs are fixed."""
