"""Bytes that sessions make a relay hold are bounded, in each and in all; others feel nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from moqt import DoneCode, Limits, QuicOptions, Session, SessionClosed, StreamEnd, Subscription, Track, Tracks
from moqt.errors import SessionCode
from moqt.quic.link import pair
from moqt.relay import Relay
from moqt.relay.pressure import keep_within
from moqt.stats import Stats
from moqt.wire import PublishNamespace, RequestOk, SubgroupEncoder, SubgroupHeader, SubscribeOk
from tests.moqt.ends import Peer, take
from tests.moqt.scene import NAMESPACE, check_exactly_once, collect, filled, make_track, objects
from tests.relay.network import join

pytestmark = pytest.mark.virtual

MIB = 1 << 20


@dataclass(slots=True)
class Stage:
    """A relay and its sessions."""

    relay: Relay
    stats: Stats
    stack: AsyncExitStack
    limits: Limits = field(default_factory=Limits)

    async def session(self, **more: Any) -> Session:
        """One more client."""
        link = pair(client=QuicOptions(max_data=2 * MIB, max_stream_data=MIB))
        session = Session(link.client, **more)
        await self._meet(link.server, session)
        return session

    async def peer(self) -> Peer:
        """One more client, that says what it likes."""
        link = pair()
        peer = Peer(link.client)
        server = Session(link.server, tracks=self.relay.tracks, stats=self.stats, limits=self.limits)
        self.stack.push_async_callback(server.close)
        await asyncio.gather(server.start(), peer.set_up())
        return peer

    async def _meet(self, connection: Any, session: Session) -> None:
        server = Session(connection, tracks=self.relay.tracks, stats=self.stats, limits=self.limits)
        for end in (server, session):
            self.stack.push_async_callback(end.close)
        await asyncio.gather(server.start(), session.start())


@asynccontextmanager
async def stage(*, each: int = 1 << 40, total: int = 1 << 40) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        relay, stats = Relay(cache_bytes=64 * MIB), Stats()
        stack.push_async_callback(relay.close)
        relay.spawn(keep_within(stats, each=each, total=total), "pressure")
        yield Stage(relay, stats, stack)


def offered(track: Track) -> Tracks:
    tracks = Tracks()
    tracks.add(track)
    tracks.announce(NAMESPACE)
    return tracks


async def ended(subscription: Subscription) -> bool:
    """Whether it was ended with TOO_FAR_BEHIND; what was sent before is read."""
    items = await collect(subscription)
    assert subscription.done is not None
    assert any(isinstance(item, StreamEnd) for item in items)
    return subscription.done.status == DoneCode.TOO_FAR_BEHIND


async def test_a_session_that_lets_much_wait() -> None:
    """Of its subscriptions the one furthest behind is ended, until it is within bounds; the session lives."""
    first, second = make_track(b"k", one_subgroup=True), make_track(b"v", one_subgroup=True)
    tracks = offered(first)
    tracks.add(second)
    async with stage(each=12 * MIB) as made:
        await made.session(tracks=tracks, announce=True)
        good = await made.session()
        slow = await made.session(limits=Limits(receive_buffer=MIB))
        much, little = [await join(slow, track.name) for track in (first, second)]
        whole = [asyncio.ensure_future(collect(await join(good, track.name))) for track in (first, second)]
        filled(first, range(20), 2, MIB // 2)
        filled(second, range(8), 2, MIB // 2)
        await asyncio.sleep(5)
        assert max(session.buffered for session in made.stats.sessions) <= 12 * MIB
        for track in (first, second):
            tracks.remove(track.name, DoneCode.TRACK_ENDED)
        for track, task in zip((first, second), whole, strict=True):
            check_exactly_once(track, objects(await task))
        assert await ended(much)
        assert not await ended(little)
        assert not slow.closed
        assert made.stats.done["TOO_FAR_BEHIND"] == 1


async def test_all_together() -> None:
    """The session for which most is held pays for all."""
    tracks = [make_track(name, one_subgroup=True) for name in (b"a", b"b")]
    offer = offered(tracks[0])
    offer.add(tracks[1])
    async with stage(total=12 * MIB) as made:
        await made.session(tracks=offer, announce=True)
        slow = [await made.session(limits=Limits(receive_buffer=MIB)) for _ in range(2)]
        subscriptions = [await join(session, track.name) for session, track in zip(slow, tracks, strict=True)]
        filled(tracks[0], range(12), 2, MIB // 2)
        filled(tracks[1], range(9), 2, MIB // 2)
        await asyncio.sleep(5)
        assert sum(session.buffered for session in made.stats.sessions) <= 12 * MIB
        for track in tracks:
            offer.remove(track.name, DoneCode.TRACK_ENDED)
        assert [await ended(subscription) for subscription in subscriptions] == [True, False]


async def test_a_publisher_of_what_is_never_whole() -> None:
    """It is no slow reader: its session is closed. That of another publisher goes on."""
    track = make_track(b"good", one_subgroup=True)
    async with stage(each=6 * MIB) as made:
        await made.session(tracks=offered(track), announce=True)
        reader = await made.session()
        evil = await made.peer()
        announced = await evil.ask(PublishNamespace(evil.id(), (b"evil",)))
        assert isinstance(await announced.next(), RequestOk)
        asking = asyncio.ensure_future(join(reader, type(track.name)((b"evil",), b"t")))
        talk, _ = await evil.request()
        await talk.say(SubscribeOk(7))
        await asking
        subscription = await join(reader, track.name)
        for group in range(8):
            encoder = SubgroupEncoder(SubgroupHeader(7, group, 0, 0))
            await evil.send(encoder.header() + encoder.object(0, MIB) + bytes(MIB - 1))
        closed = await evil.connection.wait_closed()
        assert (closed.application, closed.code) == (True, SessionCode.INTERNAL_ERROR)
        await asyncio.sleep(1)
        assert all(session.buffered < MIB for session in made.stats.sessions)
        filled(track, range(3), 2, 1000)
        assert len(await take(subscription, 6)) == 6
        assert not isinstance(reader.error, SessionClosed)
