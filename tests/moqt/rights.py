"""Policies, peers and requests of the tests of rights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from moqt.authorization import AccessRequest, Action, Allowed, Decision, Denied
from moqt.errors import (
    RequestCode,
    StreamReset,
)
from moqt.filters import LocationFilter
from moqt.names import FullTrackName, TrackNamespace
from moqt.quic.api import QuicOptions, Stream
from moqt.track import Track, Wanted
from moqt.tracks import Tracks
from moqt.wire import (
    AliasType,
    Fetch,
    FetchOk,
    Message,
    Parameters,
    Publish,
    PublishNamespace,
    Request,
    RequestOk,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    Token,
    TrackStatus,
)
from tests.moqt.ends import NAME, Peer, Talk, publish_groups

__all__ = [
    "EXPIRED",
    "NARROW",
    "NOWHERE",
    "REPLIES",
    "RESERVED",
    "Script",
    "Lasting",
    "until",
    "Slow",
    "WANTED",
    "WHOLE",
    "Watched",
    "data_stream",
    "drained",
    "each_action",
    "everything",
    "long_track",
    "now",
    "reply",
    "value",
    "with_token",
]

NOWHERE = FullTrackName((b"nowhere", b"at all"), b"k0")
RESERVED = FullTrackName((b".session",), b"k0")
WHOLE = LocationFilter.absolute_start(0, 0)
EXPIRED = Denied(RequestCode.EXPIRED_AUTH_TOKEN, "the token has expired")

# What a peer may want of a Track, its namespace, or the prefix that is its namespace.
WANTED: dict[Action, Callable[[int, FullTrackName, Parameters], Request]] = {
    Action.SUBSCRIBE: lambda number, track, more: Subscribe(number, track, more),
    Action.FETCH: lambda number, track, more: Fetch(number, track, more),
    Action.TRACK_STATUS: lambda number, track, more: TrackStatus(number, track, more),
    Action.PUBLISH: lambda number, track, more: Publish(number, track, 1, more),
    Action.PUBLISH_NAMESPACE: lambda number, track, more: PublishNamespace(number, track.namespace, more),
    Action.SUBSCRIBE_NAMESPACE: lambda number, track, more: SubscribeNamespace(number, track.namespace, more),
    Action.SUBSCRIBE_TRACKS: lambda number, track, more: SubscribeTracks(number, track.namespace, more),
}
each_action = pytest.mark.parametrize("action", list(WANTED))


class Script:
    """A policy that allows some actions, and is asked again every 30 s while something goes on.

    `takes` is how long it thinks; with `denied` it allows nothing any more.
    """

    def __init__(
        self, *actions: Action, takes: float = 0.0, expires: float | None = None, again: float | None = 30.0
    ) -> None:
        self.actions = {Action.SETUP, *actions}
        self.takes = takes
        self.denied: Denied | None = None
        self.asked: list[AccessRequest] = []
        self.pending = 0
        self._allowed = Allowed(revalidate_after=again, expires_after=expires)

    async def decide(self, request: AccessRequest) -> Decision:
        self.asked.append(request)
        if self.takes:
            self.pending += 1
            try:
                await asyncio.sleep(self.takes)
            finally:
                self.pending -= 1
        if self.denied is not None:
            return self.denied
        return self._allowed if self.actions.issuperset(request.needs) else Denied()


class Lasting:
    """Allows what comes with the token b"<n>" until the second n. SETUP is open to all."""

    def __init__(self) -> None:
        self.asked: list[AccessRequest] = []

    async def decide(self, request: AccessRequest) -> Decision:
        self.asked.append(request)
        if request.action is Action.SETUP:
            return Allowed()
        ends = [float(value) for _, value in request.tokens + request.held_tokens]
        if max(ends, default=0.0) > asyncio.get_running_loop().time():
            return Allowed(revalidate_after=5.0)
        return Denied(RequestCode.EXPIRED_AUTH_TOKEN, "too late")


def until(second: int) -> tuple[Token, ...]:
    return (Token(AliasType.USE_VALUE, type=1, value=b"%d" % second),)


class Watched(Tracks):
    """Tracks that tell whether anybody has looked."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[str] = []

    def get(self, name: FullTrackName) -> Track | None:
        self.touched.append("get")
        return super().get(name)

    async def find(
        self, name: FullTrackName, asker: object, *, rendezvous: float = 0.0, wanted: Wanted | None = None
    ) -> Track:
        self.touched.append("find")
        return await super().find(name, asker, rendezvous=rendezvous)

    def offered(self, peer: object, namespace: TrackNamespace, present: bool) -> None:
        self.touched.append("offered")

    def wanted(self, asker: object, prefix: TrackNamespace, present: bool) -> None:
        self.touched.append("wanted")

    @property
    def namespaces(self) -> tuple[TrackNamespace, ...]:
        self.touched.append("namespaces")
        return super().namespaces


class Slow(Tracks):
    """Tracks that take so many seconds to be found, as those of a relay may."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def get(self, name: FullTrackName) -> Track | None:
        return None

    async def find(
        self, name: FullTrackName, asker: object, *, rendezvous: float = 0.0, wanted: Wanted | None = None
    ) -> Track:
        await asyncio.sleep(self._seconds)
        track = super().get(name)
        assert track is not None
        return track


def value(text: bytes) -> Token:
    return Token(AliasType.USE_VALUE, None, 1, text)


def with_token(*texts: bytes) -> Parameters:
    return Parameters(tokens=tuple(map(value, texts)))


async def everything(stream: Stream) -> bytes:
    """All bytes to FIN."""
    data = b""
    async with asyncio.timeout(30):
        while more := await stream.read():
            data += more
    return data


async def reply(talk: Talk) -> Message | None:
    async with asyncio.timeout(1):
        return await talk.next()


NARROW = QuicOptions(max_stream_data=4096, max_data=32768)
"""Of a peer that takes a few Objects of a stream, and no more until they are read."""


def long_track() -> Track:
    """A Track that does not fit into what a NARROW peer takes."""
    track = Track(NAME, one_subgroup=True)
    publish_groups(track, range(20), 50)
    return track


def now() -> float:
    return asyncio.get_running_loop().time()


REPLIES: dict[Action, type[Message]] = {
    Action.SUBSCRIBE: SubscribeOk,
    Action.FETCH: FetchOk,
    Action.TRACK_STATUS: RequestOk,
    Action.PUBLISH_NAMESPACE: RequestOk,
    Action.SUBSCRIBE_NAMESPACE: RequestOk,
}


async def data_stream(peer: Peer) -> Stream:
    """The next data stream, behind the control stream."""
    async with asyncio.timeout(1):
        while (stream := await peer.connection.accept()).bidirectional or stream.id in (2, 3):
            pass
    return stream


async def drained(stream: Stream) -> tuple[int, int | None]:
    """How many bytes come now, and the code of the reset, if there is one."""
    size = 0
    try:
        async with asyncio.timeout(0.5):
            while data := await stream.read():
                size += len(data)
        return size, None
    except StreamReset as reset:
        return size, reset.code
    except TimeoutError:
        return size, -1
