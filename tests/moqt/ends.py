"""Two sessions with a simulated network between them; or a session and a raw peer that says what it likes."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from moqt.authorization import Policy
from moqt.errors import DoneCode
from moqt.filters import Location, LocationFilter
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.quic.api import ConnectionClosed, Stream
from moqt.quic.link import Link, pair
from moqt.quic.memory import MemoryConnection
from moqt.session import Session
from moqt.subscribing import FetchStream, Fill, Item, ReceivedObject, StreamEnd, Subscription
from moqt.track import Track
from moqt.tracks import Tracks
from moqt.wire import (
    Message,
    MessageDecoder,
    Request,
    RequestError,
    Setup,
    SetupOptions,
    TrackStatus,
    encode,
)

NAMESPACE = (b"kvcs-1", b"scope")
NAME = FullTrackName(NAMESPACE, b"k0")
OTHER = FullTrackName(NAMESPACE, b"v0")
WHOLE = Fill(filter=LocationFilter.absolute_start(0, 0))

At = tuple[int, int]
"""A Location, short."""


@dataclass(frozen=True, slots=True)
class Ends:
    """A publisher and a subscriber. `track` is NAME in `tracks`."""

    link: Link
    publisher: Session
    subscriber: Session
    tracks: Tracks
    track: Track

    @property
    def connections(self) -> tuple[MemoryConnection, MemoryConnection]:
        """Of the publisher and of the subscriber."""
        if self.publisher.connection.is_client:
            return self.link.client, self.link.server
        return self.link.server, self.link.client


@asynccontextmanager
async def sessions(
    *,
    track: Track | None = None,
    limits: Limits | None = None,
    publisher_dials: bool = False,
    announce: bool = False,
    **network: Any,
) -> AsyncIterator[Ends]:
    """Both, after SETUP; `limits` are those of both, `network` is for `pair`. At the end both are closed."""
    link = pair(**network)
    track = Track(NAME, one_subgroup=True) if track is None else track
    tracks = Tracks()
    tracks.add(track)
    publishing, subscribing = (link.client, link.server) if publisher_dials else (link.server, link.client)
    publisher = Session(publishing, tracks=tracks, announce=announce, limits=limits)
    subscriber = Session(subscribing, limits=limits)
    try:
        await asyncio.gather(publisher.start(), subscriber.start())
        yield Ends(link, publisher, subscriber, tracks, track)
    finally:
        await asyncio.gather(publisher.close(), subscriber.close())


class Talk:
    """One request stream of the raw peer: bytes out, messages in."""

    def __init__(self, stream: Stream, decoder: MessageDecoder) -> None:
        self.stream = stream
        self._decoder = decoder
        self._messages: deque[Message] = deque()

    async def next(self) -> Message | None:
        """The next message of the session; None at its FIN."""
        while not self._messages:
            data = await self.stream.read()
            if not data:
                return None
            self._messages.extend(self._decoder.feed(data))
        return self._messages.popleft()

    async def say(self, *messages: Message | bytes, fin: bool = False) -> None:
        """Send messages, or bytes."""
        await self.stream.write(_bytes(messages), fin=fin)


class Peer:
    """A raw peer of a session."""

    def __init__(self, connection: MemoryConnection) -> None:
        self.connection = connection
        self.control: Stream | None = None
        self._next_id = 0 if connection.is_client else 1

    def id(self) -> int:
        """A Request ID that the peer may use."""
        number, self._next_id = self._next_id, self._next_id + 2
        return number

    async def set_up(self, options: SetupOptions | bytes | None = None) -> None:
        """Open the control stream with SETUP."""
        setup = options if isinstance(options, bytes) else encode(Setup(options or SetupOptions()))
        self.control = self.connection.open(bidirectional=False)
        await self.control.write(setup)

    async def ask(
        self, *messages: Message | bytes, fin: bool = False, kind: type[Request] | None = None
    ) -> Talk:
        """Open a request stream with messages. `kind` says what request it is, where that is bytes."""
        stream = self.connection.open(bidirectional=True)
        if messages and isinstance(messages[0], Request):
            kind = type(messages[0])
        talk = Talk(stream, MessageDecoder(request=kind))
        await talk.say(*messages, fin=fin)
        return talk

    async def send(self, data: bytes, *, fin: bool = False) -> Stream:
        """Open a unidirectional stream with some bytes."""
        stream = self.connection.open(bidirectional=False)
        await stream.write(data, fin=fin)
        return stream

    async def request(self) -> tuple[Talk, Any]:
        """The next request of the session."""
        while not (stream := await self.connection.accept()).bidirectional:
            pass
        talk = Talk(stream, MessageDecoder())
        return talk, await talk.next()

    async def closed(self) -> ConnectionClosed:
        """How the session was closed; it must be by now, or very soon."""
        async with asyncio.timeout(1):
            return await self.connection.wait_closed()

    async def alive(self) -> None:
        """Fail unless the session still answers requests."""
        assert self.connection.closed is None
        talk = await self.ask(TrackStatus(self.id(), FullTrackName((b"nowhere",), b"")), fin=True)
        async with asyncio.timeout(1):
            answer = await talk.next()
        assert isinstance(answer, RequestError)


@asynccontextmanager
async def hostile(
    *,
    peer_dials: bool = True,
    track: Track | None = None,
    tracks: Tracks | None = None,
    policy: Policy | None = None,
    limits: Limits | None = None,
    setup: SetupOptions | bytes | None = None,
    **network: Any,
) -> AsyncIterator[tuple[Session, Peer]]:
    """A session that offers `track` among `tracks`, and its raw peer, after SETUP."""
    link = pair(**network)
    tracks = Tracks() if tracks is None else tracks
    tracks.add(Track(NAME, one_subgroup=True) if track is None else track)
    ours, theirs = (link.server, link.client) if peer_dials else (link.client, link.server)
    session = Session(ours, tracks=tracks, announce=False, policy=policy, limits=limits)
    peer = Peer(theirs)
    try:
        await asyncio.gather(session.start(), peer.set_up(setup))
        yield session, peer
    finally:
        await session.close()
        peer.connection.close()
        await peer.connection.wait_closed()


def _bytes(messages: Iterable[Message | bytes]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else encode(part) for part in messages)


def payload(location: Location | At) -> bytes:
    """What the tests publish at a Location: no two are the same, sizes differ."""
    group, number = location if isinstance(location, tuple) else (location.group, location.object)
    return f"{group}/{number} ".encode() * (1 + (group * 7 + number * 3) % 11)


def publish(track: Track, *locations: At, subgroup: int = 0) -> None:
    """Publish Objects with their `payload`."""
    for group, number in locations:
        track.append(group, number, payload((group, number)), subgroup=subgroup)


def publish_groups(track: Track, groups: Iterable[int], objects: int) -> None:
    """Publish whole Groups."""
    for group in groups:
        publish(track, *((group, number) for number in range(objects)))
        track.end_group(group, objects)


async def collect(items: Subscription | FetchStream) -> list[Item]:
    """All items to the end of the iteration."""
    return [item async for item in items]


async def take(items: Subscription | FetchStream, count: int) -> list[ReceivedObject]:
    """The next `count` Objects with a payload, whatever comes between."""
    taken: list[ReceivedObject] = []
    while len(taken) < count:
        item = await anext(items)
        if isinstance(item, ReceivedObject) and not item.status:
            taken.append(item)
    return taken


def objects_of(items: Iterable[Item]) -> list[ReceivedObject]:
    """The Objects with a payload."""
    return [item for item in items if isinstance(item, ReceivedObject) and not item.status]


def places(items: Iterable[Item]) -> list[At]:
    """Where the Objects are; that each has the payload that was published there is checked."""
    received = objects_of(items)
    for item in received:
        assert item.payload == payload(item.location)
    return [(item.location.group, item.location.object) for item in received]


def ends_of(items: Iterable[Item]) -> list[StreamEnd]:
    """The ends of streams."""
    return [item for item in items if isinstance(item, StreamEnd)]


def check_once(found: Iterable[At], expected: Iterable[At]) -> None:
    """Each of `expected` is there, exactly once, and nothing else."""
    counts = Counter(found)
    assert [place for place, count in counts.items() if count > 1] == []
    assert sorted(counts) == sorted(expected)


OLD: list[At] = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
NEW: list[At] = [(2, 2), (2, 3), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (6, 0)]
"""The Track of many tests: what was there before, and what comes after. Group 2 is in progress."""


def old_track(*, one_subgroup: bool = True) -> Track:
    """A Track with OLD."""
    track = Track(NAME, one_subgroup=one_subgroup)
    publish(track, *OLD)
    track.end_group(0, 2)
    track.end_group(1, 3)
    return track


async def finish(ends: Ends, subscription: Subscription, code: DoneCode = DoneCode.TRACK_ENDED) -> list[Item]:
    """End the Track, and take all that is left."""
    ends.tracks.remove(NAME, code)
    items = await collect(subscription)
    assert subscription.done is not None
    assert subscription.done.status == code
    return items


def tables_of(session: Session) -> dict[str, int]:
    """How many entries the tables of a session have that must be empty when all is over."""
    incoming, publishing = session.incoming, session.publishing
    return {
        "requests": len(session._requests),
        "serving": session.serving,
        "aliases": len(incoming._by_alias),
        "expected": len(incoming._by_request),
        "parked": len(incoming._parked),
        "unidentified": len(incoming._unidentified),
        "subscriptions": len(publishing._subscriptions),
        "fetches": publishing._fetches,
        "prefixes": len(publishing.prefixes),
        "scheduled": len(session.scheduler._open) + len(session.scheduler._unopened),
        "followers": len(session._followers),
    }
