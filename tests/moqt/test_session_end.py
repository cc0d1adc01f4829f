"""How a session ends, and that it never looks like a clean end of anything else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from moqt.errors import (
    ConnectionLost,
    DoneCode,
    MoqtError,
    SessionClosed,
    SessionCode,
)
from moqt.filters import Location, LocationFilter
from moqt.limits import Limits
from moqt.namespaces import NamespaceWatch
from moqt.quic.link import pair
from moqt.session import Session
from moqt.subscribing import FetchStream, Item, Subscription
from moqt.track import Track
from moqt.tracks import Tracks
from moqt.wire import (
    FetchEncoder,
    FetchOk,
    Message,
    PublishDone,
    PublishNamespace,
    RequestOk,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
)
from tests.moqt.ends import (
    NAME,
    NAMESPACE,
    NEW,
    OLD,
    WHOLE,
    Ends,
    collect,
    hostile,
    objects_of,
    old_track,
    places,
    publish,
    publish_groups,
    sessions,
    tables_of,
    take,
)
from tests.moqt.raw import subgroup, subscribe_at

pytestmark = pytest.mark.virtual

ALL = LocationFilter.absolute_start(0, 0)


def now() -> float:
    return asyncio.get_running_loop().time()


REQUESTS: dict[str, Callable[[Session], Awaitable[object]]] = {
    "subscribe": lambda session: session.subscribe(NAME, fill=WHOLE),
    "fetch": lambda session: session.fetch(NAME, filter=ALL),
    "track_status": lambda session: session.track_status(NAME),
    "publish_namespace": lambda session: session.publish_namespace(NAMESPACE),
    "subscribe_namespace": lambda session: session.subscribe_namespace(NAMESPACE),
}


async def gather_into(received: list[Item], items: Subscription | FetchStream) -> None:
    async for item in items:
        received.append(item)


@asynccontextmanager
async def everything() -> AsyncIterator[tuple[Ends, dict[str, asyncio.Future[object]]]]:
    """One of each that may wait, waiting: as futures of the subscriber."""
    track = old_track()
    async with sessions(track=track, limits=Limits(reply_deadline=60)) as ends:
        session = ends.subscriber
        silent = Track(NAME.__class__(NAMESPACE, b"silent"))
        ends.tracks.add(silent)
        subscription = await session.subscribe(NAME, fill=WHOLE)
        await take(subscription, len(OLD))
        publish(track, (2, 2))
        other = await session.subscribe(silent.name)
        silent.append(0, 0, bytes(40_000_000))
        fetch = await session.fetch(silent.name, filter=ALL)
        watch = await session.subscribe_namespace(())
        await session.publish_namespace(NAMESPACE)
        ends.link.stall()
        waiting: dict[str, asyncio.Future[object]] = {
            "subscription": asyncio.ensure_future(collect(subscription)),
            "object": asyncio.ensure_future(collect(other)),
            "fetch": asyncio.ensure_future(collect(fetch)),
            "watch": asyncio.ensure_future(anext(watch)),
            "update": asyncio.ensure_future(subscription.update(priority=1)),
            "pending subscribe": asyncio.ensure_future(session.subscribe(NAME)),
            "pending status": asyncio.ensure_future(session.track_status(NAME)),
            "finish": asyncio.ensure_future(ends.publisher.finish(DoneCode.GOING_AWAY, deadline=60)),
        }
        await asyncio.sleep(0.1)
        yield ends, waiting


@pytest.mark.parametrize("how", ["cut", "close", "our close", "idle"])
async def test_everything_that_waits_is_told(how: str) -> None:
    async with everything() as (ends, waiting):
        expected: type[MoqtError] = ConnectionLost
        match how:
            case "cut":
                ends.link.cut("a digger")
            case "close":
                ends.link.resume()
                ends.publisher.connection.close(0x9A, "enough")
                expected = SessionClosed
            case "our close":
                await ends.subscriber.close(0x9A, "enough")
                expected = SessionClosed
            case _:
                await asyncio.sleep(31)
        await asyncio.sleep(0.5)
        finished = waiting.pop("finish")
        if how == "our close":
            ends.link.resume()
        for name, future in waiting.items():
            assert future.done(), name
            error = future.exception()
            assert isinstance(error, expected), name
            if isinstance(error, ConnectionLost) and how == "cut":
                assert "a digger" in str(error)
            if isinstance(error, SessionClosed):
                assert (error.code, error.reason, error.remote) == (0x9A, "enough", how == "close")
        for kind, request in REQUESTS.items():
            with pytest.raises(expected):
                await request(ends.subscriber)
            assert kind
        assert set(tables_of(ends.subscriber).values()) == {0}
        error = await ends.subscriber.wait_closed()
        assert isinstance(error, expected)
        assert ends.subscriber.closed
        await finished


async def test_the_code_is_seen_on_the_other_side() -> None:
    async with sessions() as ends:
        await ends.subscriber.close(SessionCode.UNAUTHORIZED, "who are you?")
        error = await ends.publisher.wait_closed()
        assert isinstance(error, SessionClosed)
        assert (error.code, error.reason, error.remote) == (SessionCode.UNAUTHORIZED, "who are you?", True)
        await ends.subscriber.close(3, "a second close has no effect")
        error = await ends.subscriber.wait_closed()
        assert isinstance(error, SessionClosed)
        assert (error.code, error.remote) == (SessionCode.UNAUTHORIZED, False)
        with pytest.raises(SessionClosed):
            await ends.publisher.goaway()


async def test_what_had_come_before_the_end_is_still_given() -> None:
    """All of a subscription had arrived, and PUBLISH_DONE, when the publisher closed: nothing is lost, though
    the application is slow.
    """
    limits = Limits(receive_buffer=3000)
    async with sessions(limits=limits) as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        publish_groups(ends.track, range(40), 5)
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        await asyncio.sleep(1)
        await ends.publisher.close()
        await asyncio.sleep(1)
        assert ends.subscriber.closed
        assert len(places(await collect(subscription))) == 200
        assert subscription.done is not None


@pytest.mark.parametrize("turns", range(1, 6))
async def test_all_comes_at_once_with_the_end(turns: int) -> None:
    """Data, PUBLISH_DONE and the close: the subscription has ended before the session did."""
    async with hostile() as (session, peer):
        talk, subscription = await subscribe_at(session, peer, filter=LocationFilter.none())
        for group in range(3):
            await peer.send(subgroup((0, b"a"), group=group), fin=True)
        await talk.say(PublishDone(DoneCode.TRACK_ENDED, 3), fin=True)
        for _ in range(turns):
            await asyncio.sleep(0)
        peer.connection.close(7, "bye")
        assert len(objects_of(await collect(subscription))) == 3
        assert session.closed


async def test_a_fetch_that_had_come_before_the_end() -> None:
    limits = Limits(receive_buffer=300)
    track = Track(NAME)
    publish_groups(track, range(40), 5)
    async with sessions(track=track, limits=limits) as ends:
        fetch = await ends.subscriber.fetch(NAME, filter=ALL)
        await asyncio.sleep(1)
        await ends.publisher.close()
        assert len(places(await collect(fetch))) == 200


async def test_what_had_come_in_part_is_given_and_then_it_raises() -> None:
    limits = Limits(receive_buffer=3000)
    async with sessions(limits=limits) as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        publish_groups(ends.track, range(40), 5)
        await asyncio.sleep(1)
        await ends.publisher.close()
        received: list[Item] = []
        with pytest.raises(SessionClosed):
            await gather_into(received, subscription)
        assert len(places(received)) == 200


@pytest.mark.parametrize("done", [True, False])
async def test_a_cut_stream_is_no_end(done: bool) -> None:
    """PUBLISH_DONE had come, and all streams of it had begun; one was cut in the middle."""
    async with hostile() as (session, peer):
        talk, subscription = await subscribe_at(session, peer, filter=LocationFilter.none())
        await peer.send(subgroup((0, b"a")), fin=True)
        await peer.send(subgroup((0, b"bcd"), group=1)[:-1])
        if done:
            await talk.say(PublishDone(DoneCode.TRACK_ENDED, 2), fin=True)
        await asyncio.sleep(0.1)
        session.connection._link.cut("gone")  # type: ignore[attr-defined]  # the memory link behind it
        received: list[Item] = []
        with pytest.raises(ConnectionLost):
            await gather_into(received, subscription)
        assert [item.payload for item in objects_of(received)] == [b"a"]


async def test_a_cut_fetch_is_no_end() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.fetch(NAME, filter=ALL))
        talk, request = await peer.request()
        encoder = FetchEncoder(request.request_id)
        await talk.say(FetchOk(False, Location(5, 0)), fin=True)
        await peer.send(encoder.header() + encoder.object(Location(0, 0), 1) + b"a")
        fetch = await asking
        await asyncio.sleep(0.1)
        session.connection._link.cut("gone")  # type: ignore[attr-defined]  # the memory link behind it
        received: list[Item] = []
        with pytest.raises(ConnectionLost):
            await gather_into(received, fetch)
        assert len(received) == 1


async def test_closing_while_the_application_does_not_read() -> None:
    """Nothing waits for it."""
    limits = Limits(receive_buffer=1000)
    async with sessions(limits=limits) as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        publish_groups(ends.track, range(40), 5)
        await asyncio.sleep(1)
        await ends.publisher.close()
        async with asyncio.timeout(1):
            await ends.subscriber.close()
        with pytest.raises(SessionClosed):
            await collect(subscription)
        assert not ends.subscriber._tasks


async def test_a_task_of_the_session_may_close_it() -> None:
    async with sessions() as ends:
        ended = asyncio.Event()

        async def close() -> None:
            await ends.subscriber.close(5, "from inside")
            ended.set()

        ends.subscriber.spawn(close(), "suicide")
        async with asyncio.timeout(1):
            await ended.wait()
        error = await ends.publisher.wait_closed()
        assert isinstance(error, SessionClosed)
        assert error.code == 5


async def test_a_task_of_the_session_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Half a session is worse than none: it is closed, and the failure is logged."""
    async with sessions() as ends:

        async def fail() -> None:
            raise RuntimeError("a mistake")

        with caplog.at_level(logging.ERROR, "moqt.tasks"):
            ends.subscriber.spawn(fail(), "a task")
            error = await ends.publisher.wait_closed()
        assert isinstance(error, SessionClosed)
        assert error.code == SessionCode.INTERNAL_ERROR
        assert "a mistake" in caplog.text


async def test_a_handler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sessions() as ends:

        def fail(_name: object) -> None:
            raise RuntimeError("a mistake")

        monkeypatch.setattr(ends.tracks, "get", fail)
        with pytest.raises(SessionClosed) as caught:
            await ends.subscriber.subscribe(NAME)
        assert (caught.value.code, caught.value.remote) == (SessionCode.INTERNAL_ERROR, True)


# Leaving in order.


async def test_finish_waits_until_the_subscribers_have_all() -> None:
    async with sessions(window=8192) as ends:
        subscriptions = [await ends.subscriber.subscribe(NAME, fill=WHOLE) for _ in range(3)]
        collecting = asyncio.gather(*map(collect, subscriptions))
        for number in range(3):
            ends.track.append(0, number, bytes(200_000))
        ends.track.end_group(0, 3)
        await ends.publisher.finish(DoneCode.GOING_AWAY, deadline=60)
        await ends.publisher.close()
        for items in await collecting:
            assert len(objects_of(items)) == 3
        assert {subscription.done for subscription in subscriptions} == {
            PublishDone(DoneCode.GOING_AWAY, 1, "")
        }


async def test_finish_does_not_wait_for_ever() -> None:
    async with hostile() as (session, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await talk.next(), SubscribeOk)
        next(iter(session.tracks)).append(0, 0, bytes(9_000_000))
        started = now()
        await session.finish(DoneCode.GOING_AWAY, deadline=7)
        assert now() - started == pytest.approx(7, abs=0.1)


async def test_finish_with_nobody_there() -> None:
    async with sessions() as ends:
        started = now()
        await ends.publisher.finish(DoneCode.GOING_AWAY, deadline=7)
        assert now() - started < 0.1
        ends.link.cut("gone")
        await ends.publisher.finish(DoneCode.GOING_AWAY, deadline=7)
        assert now() - started < 0.1


async def test_finish_while_the_connection_is_cut() -> None:
    async with sessions() as ends:
        await ends.subscriber.subscribe(NAME)
        ends.track.append(0, 0, bytes(9_000_000))
        finishing = asyncio.ensure_future(ends.publisher.finish(DoneCode.GOING_AWAY, deadline=50))
        await asyncio.sleep(0.1)
        ends.link.cut("gone")
        async with asyncio.timeout(1):
            await finishing


async def test_both_publish_and_subscribe() -> None:
    """A session works alike on both ends, in both roles at once."""
    link = pair(jitter=0.01, seed=2)
    one, other = Tracks(), Tracks()
    for tracks in (one, other):
        tracks.add(Track(NAME, one_subgroup=True))
        publish_groups(next(iter(tracks)), range(5), 3)
    client, server = Session(link.client, tracks=one), Session(link.server, tracks=other)
    async with client_and_server(client, server):
        for session in (client, server):
            async with await session.fetch(NAME, filter=ALL) as fetch:
                assert len(places(await collect(fetch))) == 15
        subscriptions = [await session.subscribe(NAME) for session in (client, server)]
        for tracks in (one, other):
            publish(next(iter(tracks)), *[(group + 5, number) for group, number in NEW])
        for subscription in subscriptions:
            assert len(await take(subscription, len(NEW))) == len(NEW)


@asynccontextmanager
async def client_and_server(client: Session, server: Session) -> AsyncIterator[None]:
    try:
        await asyncio.gather(client.start(), server.start())
        yield
    finally:
        await asyncio.gather(client.close(), server.close())


@pytest.mark.parametrize(
    "message", [Subscribe(0, NAME), SubscribeNamespace(0, NAMESPACE), PublishNamespace(0, ())]
)
async def test_a_request_of_the_peer_ends_with_the_connection(message: Message) -> None:
    async with hostile() as (session, peer):
        await peer.ask(message)
        await asyncio.sleep(0.1)
        assert session.serving == 1
        session.connection._link.cut("gone")  # type: ignore[attr-defined]  # the memory link behind it
        await asyncio.sleep(0.1)
        assert set(tables_of(session).values()) == {0}
        assert not session.peer_namespaces
        assert not session.tracks._watchers
        assert not next(iter(session.tracks))._watchers


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("kind", ["subscribe", "fetch", "subscribe_namespace"])
async def test_the_reply_comes_with_the_end(kind: str, turns: int) -> None:
    """Whoever asked is told of the end, by the request or by what it gave."""
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(REQUESTS[kind](session))
        talk, request = await peer.request()
        replies: dict[str, Message] = {"subscribe": SubscribeOk(1), "fetch": FetchOk(False, Location(0, 0))}
        await talk.say(replies.get(kind, RequestOk()))
        for _ in range(turns):
            await asyncio.sleep(0)
        peer.connection.close(7, "bye")
        assert request is not None
        with pytest.raises(SessionClosed):
            await use(await asking)
        await asyncio.sleep(0.1)
        assert set(tables_of(session).values()) == {0}


async def use(made: object) -> None:
    assert isinstance(made, Subscription | FetchStream | NamespaceWatch)
    async for _ in made:
        pass
