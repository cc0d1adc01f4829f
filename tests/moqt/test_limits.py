"""What happens at the bounds of one session (moqt 18, 21): the peer is told so, and nobody else is."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from moqt.errors import RequestCode
from moqt.limits import Limits, Pace
from moqt.quic.link import pair
from moqt.server import Server
from moqt.session import Session
from moqt.tracks import Tracks
from moqt.wire import PublishNamespace, RequestError, RequestOk, SubscribeNamespace, TrackStatus
from tests.moqt.ends import NAME, NAMESPACE, Peer, hostile

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("kind", [PublishNamespace, SubscribeNamespace])
async def test_namespaces_of_a_session(
    kind: type[PublishNamespace] | type[SubscribeNamespace],
) -> None:
    """One too many is refused, with an invitation to try again; when one has gone there is room."""
    limits = Limits(max_announcements=2, max_prefixes=2, retry_after=2.5)
    async with hostile(limits=limits) as (session, peer):
        talks = [await peer.ask(kind(peer.id(), (b"n", bytes([number])))) for number in range(2)]
        for talk in talks:
            assert isinstance(await talk.next(), RequestOk)
        refused = await peer.ask(kind(peer.id(), (b"n", b"9")))
        answer = await refused.next()
        assert isinstance(answer, RequestError)
        assert answer.code == RequestCode.EXCESSIVE_LOAD
        assert answer.retry_after == 2.5
        assert len(session.peer_namespaces) + len(session.publishing.prefixes) == 2
        talks[0].stream.reset(0)
        await asyncio.sleep(0.1)
        again = await peer.ask(kind(peer.id(), (b"n", b"9")))
        assert isinstance(await again.next(), RequestOk)


async def test_a_namespace_announced_often_counts_often() -> None:
    async with hostile(limits=Limits(max_announcements=2)) as (_, peer):
        answers = []
        for _ in range(3):
            answers.append(await (await peer.ask(PublishNamespace(peer.id(), NAMESPACE))).next())
        assert [isinstance(answer, RequestOk) for answer in answers] == [True, True, False]


async def test_other_sessions_have_their_own() -> None:
    """And a publisher that was refused announces again when it was told to."""
    server = Server(Tracks(), None, Limits(max_announcements=1, retry_after=2.0), False, None)
    tracks = Tracks()
    for name in (b"a", b"b"):
        tracks.announce((name,))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.close)
        sessions = []
        for _ in range(2):
            link = pair()
            server.accept(link.server)
            session = Session(link.client, tracks=tracks, announce=True)
            sessions.append(await stack.enter_async_context(session))
        await asyncio.sleep(1)
        assert [set(session.peer_namespaces) for session in server.sessions] == [{(b"a",)}] * 2
        tracks.withdraw((b"a",))
        await asyncio.sleep(3)
        assert [set(session.peer_namespaces) for session in server.sessions] == [{(b"b",)}] * 2


async def test_a_refused_announcement_that_is_withdrawn_is_not_repeated() -> None:
    link = pair()
    tracks = Tracks()
    tracks.announce(NAMESPACE)
    session = Session(link.client, tracks=tracks, announce=True)
    peer = Peer(link.server)
    try:
        await asyncio.gather(session.start(), peer.set_up())
        talk, request = await peer.request()
        assert isinstance(request, PublishNamespace)
        await talk.say(RequestError(RequestCode.EXCESSIVE_LOAD, 1001, "", None), fin=True)
        await asyncio.sleep(0.1)
        tracks.withdraw(NAMESPACE)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await peer.request()
    finally:
        await session.close()
        peer.connection.close()
        await peer.connection.wait_closed()


def test_pace() -> None:
    pace = Pace(2.0, 3)
    assert [pace.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert [pace.take(now) for now in (10.4, 10.5, 10.6, 11.0)] == [False, True, False, True]
    assert [pace.take(100.0) for _ in range(4)] == [True, True, True, False]


async def test_requests_in_a_short_time() -> None:
    """A flood is answered EXCESSIVE_LOAD, though each request is over at once; then it may go on."""
    limits = Limits(max_requests=5, request_rate=10.0, retry_after=0.5)
    async with hostile(limits=limits) as (session, peer):

        async def ask() -> RequestCode | None:
            talk = await peer.ask(TrackStatus(peer.id(), NAME), fin=True)
            answer = await talk.next()
            return RequestCode(answer.code) if isinstance(answer, RequestError) else None

        await asyncio.sleep(1)
        codes = [await ask() for _ in range(100)]
        taken = [code for code in codes if code is None]
        assert codes[:5] == [None] * 5
        assert set(codes) == {None, RequestCode.EXCESSIVE_LOAD}
        assert 5 < len(taken) < 40
        await asyncio.sleep(0.5)
        assert await ask() is None
        assert not session.closed
