"""A hostile peer: the raw end of a `moqt.quic.link.pair`, with no Session on it, that says what a test
tells it to say, byte by byte, to a real Session on the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from moqt.errors import SessionClosed
from moqt.filters import Location, LocationFilter
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.quic.api import Connection, Stream
from moqt.quic.link import pair
from moqt.session import Session
from moqt.track import Track
from moqt.tracks import Tracks
from moqt.wire import (
    Message,
    MessageDecoder,
    Request,
    RequestError,
    Subscribe,
    SubscribeOk,
    Token,
    encode,
    encode_vi64,
)

T = TypeVar("T")

NAMESPACE = (b"a", b"b")
OFFERED = FullTrackName(NAMESPACE, b"offered")
"""A Track that the session serves: Objects (0,0), (0,1) and (1,0)."""
WANTED = FullTrackName(NAMESPACE, b"wanted")
"""What the session asks the hostile peer for."""
ALIAS = 7
"""The Track Alias under which the hostile peer accepts a SUBSCRIBE for WANTED."""
MAXIMUM = 2**64 - 1

PATIENCE = 3600.0
"""Virtual seconds within which everything must have happened."""


def vi(*values: int) -> bytes:
    """Varints in a row."""
    return b"".join(map(encode_vi64, values))


def prefixed(data: bytes) -> bytes:
    return vi(len(data)) + data


def frame(kind: int, *body: bytes, length: int | None = None) -> bytes:
    """A control message with any body; `length` is what its length field claims."""
    data = b"".join(body)
    return vi(kind) + (len(data) if length is None else length).to_bytes(2) + data


def namespace(*fields: bytes) -> bytes:
    return vi(len(fields)) + b"".join(map(prefixed, fields))


def full_name(name: FullTrackName) -> bytes:
    return namespace(*name.namespace) + prefixed(name.name)


@dataclass(frozen=True, slots=True)
class Ids:
    """The first Request ID of the hostile peer, and that of the session."""

    mine: int
    session: int


Bytes: TypeAlias = bytes | Callable[[Ids], bytes]
"""What the hostile peer says; some of it depends on the Request IDs, which depend on its role."""


class Speaker:
    """A raw end of a connection: it says what it is told to say, byte by byte."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.control: Stream | None = None

    async def open_control(self, data: bytes, *, fin: bool = False) -> Stream:
        """Our control stream, which starts with `data`."""
        self.control = self.connection.open(bidirectional=False)
        await self.control.write(data, fin=fin)
        return self.control

    async def say(self, data: bytes, *, fin: bool = False) -> None:
        """Go on on our control stream."""
        assert self.control is not None
        await self.control.write(data, fin=fin)

    async def open(self, data: bytes, *, bidirectional: bool, fin: bool = False) -> Stream:
        stream = self.connection.open(bidirectional=bidirectional)
        await stream.write(data, fin=fin)
        return stream

    async def request(self, data: bytes, *, fin: bool = False) -> Stream:
        return await self.open(data, bidirectional=True, fin=fin)

    async def stream(self, data: bytes, *, fin: bool = False) -> Stream:
        return await self.open(data, bidirectional=False, fin=fin)


class Hostile(Speaker):
    """The hostile peer, and what the test sees of the session that it talks to."""

    def __init__(self, session: Session, connection: Connection) -> None:
        super().__init__(connection)
        self.session = session
        self.ids = Ids(0, 1) if connection.is_client else Ids(1, 0)
        self.asked: list[asyncio.Task[object]] = []
        """What the application of the session is doing."""
        self.uni: list[Stream] = []
        """The data streams that the session opened and that were taken."""

    def spell(self, data: Bytes) -> bytes:
        return data if isinstance(data, bytes) else data(self.ids)

    async def accept(self) -> Stream:
        """The next request stream of the session; what comes before it is kept in `uni`."""
        while True:
            stream = await in_time(self.connection.accept())
            if stream.bidirectional:
                return stream
            self.uni.append(stream)

    async def ask(self, application: Callable[[Session], Awaitable[object]]) -> Stream:
        """Let the application ask the hostile peer for something; returns the stream with the request, read
        that far.
        """

        async def run() -> object:
            return await application(self.session)

        self.asked.append(asyncio.create_task(run(), name="application"))
        stream = await self.accept()
        decoder = MessageDecoder()
        while not decoder.feed(await in_time(stream.read())):
            pass
        return stream

    async def close_code(self) -> int:
        """The code with which the session closes, as both sides see it."""
        closed = await in_time(self.connection.wait_closed())
        assert closed.application
        assert closed.remote
        error = await in_time(self.session.wait_closed())
        assert isinstance(error, SessionClosed)
        assert not error.remote
        assert error.code == closed.code
        return closed.code

    async def assert_alive(self) -> None:
        """The session lives, and serves a SUBSCRIBE."""
        request = Subscribe(self.ids.mine + 100_000, OFFERED)
        stream = await self.request(encode(request))
        [reply] = await messages(stream, request, 1)
        assert isinstance(reply, SubscribeOk)
        assert reply.parameters.largest == Location(1, 0)
        await in_time(self.connection.ping())
        assert self.connection.closed is None
        assert not self.session.closed


async def in_time(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(PATIENCE):
        return await awaitable


async def read_all(stream: Stream) -> bytes:
    """Everything up to FIN."""
    data = b""
    while more := await in_time(stream.read()):
        data += more
    return data


async def messages(stream: Stream, request: Request | type[Request], count: int) -> list[Message]:
    """The next messages about `request` from the session, `count` of them at least."""
    decoder = MessageDecoder(request=request if isinstance(request, type) else type(request))
    found: list[Message] = []
    while len(found) < count:
        data = await in_time(stream.read())
        assert data, f"FIN after {found}"
        found += decoder.feed(data)
    return found


async def assert_refused(stream: Stream, code: int) -> None:
    """The answer on a request stream is REQUEST_ERROR `code` and FIN."""
    decoder = MessageDecoder(request=Subscribe)
    answers = decoder.feed(await read_all(stream))
    decoder.finish()
    [error] = answers
    assert isinstance(error, RequestError)
    assert error.code == code, error


def offered() -> Tracks:
    tracks = Tracks()
    track = Track(OFFERED, properties=((0x78, 5),))
    for group, object_id in ((0, 0), (0, 1), (1, 0)):
        track.append(group, object_id, b"object %d %d" % (group, object_id))
    tracks.add(track)
    tracks.announce(NAMESPACE)
    return tracks


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """How a meeting begins. `setup` is the first thing on the hostile peer's control stream; None: it is
    left to the test, and the session is not waited for.
    """

    setup: bytes | None = frame(0x2F00)
    limits: Limits = field(default_factory=Limits)
    tokens: tuple[Token, ...] = ()


@asynccontextmanager
async def meeting(session_is_client: bool, scene: Scene | None = None) -> AsyncIterator[Hostile]:
    """A session, as client or as server, and its hostile peer; SETUP is done. Nothing is left at the end."""
    scene = scene or Scene()
    link = pair()
    ends = (link.client, link.server) if session_is_client else (link.server, link.client)
    session = Session(ends[0], tracks=offered(), announce=False, limits=scene.limits, tokens=scene.tokens)
    peer = Hostile(session, ends[1])
    starting = asyncio.create_task(session.start(), name="start")
    try:
        if scene.setup is not None:
            await peer.open_control(scene.setup)
            await in_time(starting)
        yield peer
    finally:
        await session.close()
        peer.connection.close()
        await peer.connection.wait_closed()
        for task in (starting, *peer.asked):
            task.cancel()
        await asyncio.gather(starting, *peer.asked, return_exceptions=True)


# What an application may be doing.


async def subscribe(session: Session) -> list[object]:
    """Subscribe to WANTED, from its start, and return all that came."""
    everything = LocationFilter.none()
    async with await session.subscribe(WANTED, filter=everything) as subscription:
        return [item async for item in subscription]


async def fetch(session: Session) -> list[object]:
    """Fetch groups 1 to 9 of WANTED, and return all that came."""
    async with await session.fetch(WANTED, filter=LocationFilter.groups(1, 9)) as objects:
        return [item async for item in objects]


async def track_status(session: Session) -> object:
    return await session.track_status(WANTED)


async def subscribe_namespace(session: Session) -> list[object]:
    async with await session.subscribe_namespace(NAMESPACE) as watch:
        return [event async for event in watch]


async def publish_namespace(session: Session) -> None:
    announcement = await session.publish_namespace(NAMESPACE)
    await session.wait_closed()
    await announcement.close()


async def update(session: Session) -> list[object]:
    """Subscribe, and update the subscription at once."""
    async with await session.subscribe(WANTED) as subscription:
        await subscription.update(priority=1)
        return [item async for item in subscription]
