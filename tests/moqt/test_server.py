"""The sessions of a server, over connections in memory; `serve` itself is in test_loopback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moqt.errors import DoneCode, RequestCode, RequestRejected, SessionClosed, SessionCode
from moqt.limits import Limits
from moqt.quic.api import QuicOptions
from moqt.quic.link import Link, pair
from moqt.server import Server, SessionHandler
from moqt.session import Session
from moqt.track import Track
from moqt.tracks import Tracks
from tests.moqt.ends import NAME, Peer, collect, objects_of, places, publish_groups, take

pytestmark = pytest.mark.virtual


def offered() -> Tracks:
    tracks = Tracks()
    tracks.add(Track(NAME, one_subgroup=True))
    return tracks


@asynccontextmanager
async def serving(
    tracks: Tracks | None = None, handler: SessionHandler | None = None, *, announce: bool = False
) -> AsyncIterator[Server]:
    server = Server(tracks, handler, Limits(setup_deadline=3), announce, policy=None)
    try:
        yield server
    finally:
        await server.close()
        assert not server.sessions
        assert not server._tasks


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Session]:
    link = pair()
    server.accept(link.server)
    async with Session(link.client) as session:
        yield session


async def test_sessions_share_the_tracks() -> None:
    tracks = offered()
    async with serving(tracks) as server, client_of(server) as one, client_of(server) as other:
        await asyncio.sleep(0.1)
        assert len(server.sessions) == 2
        subscriptions = [await session.subscribe(NAME) for session in (one, other)]
        publish_groups(next(iter(tracks)), range(3), 2)
        for subscription in subscriptions:
            assert len(await take(subscription, 6)) == 6
        await one.close()
        await asyncio.sleep(0.1)
        assert len(server.sessions) == 1
        publish_groups(next(iter(tracks)), [9], 1)
        assert len(await take(subscriptions[1], 1)) == 1


async def test_namespaces_are_announced_where_asked() -> None:
    for announce in (True, False):
        tracks = offered()
        tracks.announce(NAME.namespace)
        async with serving(tracks, announce=announce) as server, client_of(server) as session:
            await asyncio.sleep(0.1)
            assert bool(session.peer_namespaces) is announce


async def test_a_session_goes_on_when_its_handler_has_returned() -> None:
    seen: list[Session] = []

    async def handler(session: Session) -> None:
        seen.append(session)

    async with serving(offered(), handler) as server, client_of(server) as session:
        await asyncio.sleep(1)
        assert list(server.sessions) == seen
        await session.track_status(NAME)


async def test_a_handler_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The peer is told that it was our fault."""

    async def handler(_session: Session) -> None:
        raise ZeroDivisionError("a mistake")

    with caplog.at_level(logging.ERROR, "moqt.server"):
        async with serving(offered(), handler) as server, client_of(server) as session:
            error = await session.wait_closed()
            await asyncio.sleep(0.1)
            assert not server.sessions
    assert isinstance(error, SessionClosed)
    assert error.code == SessionCode.INTERNAL_ERROR
    assert "a mistake" in caplog.text


async def test_a_handler_that_meets_an_error_of_the_session() -> None:
    async def handler(session: Session) -> None:
        await session.subscribe(NAME)

    async with serving(None, handler) as server, client_of(server) as session:
        error = await session.wait_closed()
        assert isinstance(error, SessionClosed)
        assert error.code == SessionCode.NO_ERROR
        with pytest.raises(SessionClosed):
            await session.subscribe(NAME)


async def test_a_peer_that_never_sets_up() -> None:
    link = pair()
    async with serving() as server:
        server.accept(link.server)
        assert (await link.client.wait_closed()).code == SessionCode.CONTROL_MESSAGE_TIMEOUT
        await asyncio.sleep(0.1)
        assert not server._tasks


async def test_closing_in_the_middle_of_everything() -> None:
    """Sessions that run, that are being set up, and whose handler is at work."""

    async def handler(_session: Session) -> None:
        await asyncio.sleep(1000)

    links: list[Link] = []
    async with serving(offered(), handler) as server:
        for _ in range(3):
            links.append(pair())
            server.accept(links[-1].server)
        running = Session(links[0].client)
        await running.start()
        await Peer(links[1].client).set_up(b"\xaf")
    for link in links:
        await link.client.wait_closed()
    await running.close()


async def test_finish() -> None:
    """Each subscriber gets all and PUBLISH_DONE; one that takes nothing holds up no other."""
    tracks = offered()
    async with serving(tracks) as server, client_of(server) as good, client_of(server) as stuck:
        subscription = await good.subscribe(NAME)
        await stuck.subscribe(NAME)
        stuck.connection._link.stall()  # type: ignore[attr-defined]  # the memory link behind it
        publish_groups(next(iter(tracks)), range(3), 2)
        finishing = asyncio.ensure_future(server.finish(DoneCode.GOING_AWAY, deadline=5))
        async with asyncio.timeout(1):
            assert len(places(await collect(subscription))) == 6
        assert subscription.done is not None
        await finishing
        with pytest.raises(RequestRejected):
            await subscription.update(priority=1)
        stuck.connection._link.resume()  # type: ignore[attr-defined]  # the memory link behind it


@pytest.mark.parametrize("stuck", ["unread", "stalled", "idle"])
async def test_leave(stuck: str) -> None:
    """Those who read get all, also what is published while they are asked to leave, and PUBLISH_DONE
    GOING_AWAY before the time is over, whatever others do; who does not is closed with GOAWAY_TIMEOUT then.
    """
    tracks = offered()
    track = next(iter(tracks))
    async with serving(tracks) as server, client_of(server) as good:
        link = pair(client=QuicOptions(max_data=1 << 16, max_stream_data=1 << 14))
        server.accept(link.server)
        async with Session(link.client, limits=Limits(receive_buffer=1000)) as other:
            subscription = await good.subscribe(NAME)
            left = await other.subscribe(NAME)
            if stuck == "stalled":
                link.stall()
            publish_groups(track, range(3), 2)
            for number in range(40):
                track.append(3, number, bytes(1 << 14))
            track.end_group(3, 40)
            if stuck == "idle":
                await left.close()
            leaving = asyncio.ensure_future(server.leave(deadline=7))
            begun = asyncio.get_running_loop().time()
            await asyncio.sleep(5.5)
            track.append(4, 0, b"late")
            track.end_group(4, 1)
            items = await collect(subscription)
            assert 6 <= asyncio.get_running_loop().time() - begun < 7
            assert len(objects_of(items)) == 47
            assert subscription.done is not None
            assert subscription.done.status == DoneCode.GOING_AWAY
            assert good.goaway_received.is_set()
            with pytest.raises(RequestRejected) as refused:
                await good.track_status(NAME)
            assert refused.value.code == RequestCode.GOING_AWAY
            async with asyncio.timeout(2):
                await leaving
            link.resume()
            if stuck == "idle":
                assert not other.closed
            else:
                error = await other.wait_closed()
                assert isinstance(error, SessionClosed)
                assert error.code == SessionCode.GOAWAY_TIMEOUT
            assert not good.closed


async def test_leave_ends_when_all_have_left() -> None:
    """moqt 16: what is open goes on until the peers leave it; who has nothing open holds nothing up."""
    tracks = offered()
    track = next(iter(tracks))
    async with serving(tracks) as server, client_of(server) as reader, client_of(server) as idle:
        watch = await idle.subscribe_namespace(NAME.namespace)
        subscription = await reader.subscribe(NAME)
        leaving = asyncio.ensure_future(server.leave(deadline=600))
        await reader.goaway_received.wait()
        for group in range(3):
            await asyncio.sleep(100)
            assert not leaving.done()
            publish_groups(track, [group], 2)
            assert len(await take(subscription, 2)) == 2
        assert subscription.done is None
        await subscription.close()
        async with asyncio.timeout(10):
            await leaving
        assert not reader.closed
        assert not idle.closed
        await watch.close()


async def test_leave_waits_for_who_asked_before() -> None:
    """A SUBSCRIBE that came before GOAWAY, of a Track that is still looked up, is served like the others."""
    track, found = Track(NAME, one_subgroup=True), asyncio.Event()

    class Slow(Tracks):
        async def find(self, *_: object, **__: object) -> Track:
            await found.wait()
            return track

    async with serving(Slow()) as server, client_of(server) as reader:
        asking = asyncio.ensure_future(reader.subscribe(NAME, deadline=60))
        await asyncio.sleep(1)
        leaving = asyncio.ensure_future(server.leave(deadline=600))
        await asyncio.sleep(10)
        assert not leaving.done()
        found.set()
        subscription = await asking
        publish_groups(track, range(3), 2)
        assert len(await take(subscription, 6)) == 6
        assert not leaving.done()
        await subscription.close()
        async with asyncio.timeout(10):
            await leaving
