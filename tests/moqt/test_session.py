"""The life of a session: SETUP, deadlines, GOAWAY (moqt 3, 16)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from moqt.errors import (
    ConnectionLost,
    DeadlineExceeded,
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionClosed,
    SessionCode,
    StreamReset,
    UsageError,
)
from moqt.filters import LocationFilter
from moqt.limits import Limits
from moqt.quic.api import QuicOptions
from moqt.quic.link import pair
from moqt.session import IMPLEMENTATION, Session
from moqt.track import Track
from moqt.uri import MoqtUri
from moqt.wire import (
    AliasType,
    Goaway,
    MessageDecoder,
    RequestOk,
    Setup,
    SetupOptions,
    Subscribe,
    SubscribeOk,
    Token,
    TrackStatus,
    encode,
)
from tests.moqt.ends import (
    NAME,
    NAMESPACE,
    WHOLE,
    Peer,
    hostile,
    publish,
    sessions,
    tables_of,
    take,
)
from tests.moqt.raw import both_roles, check_refused, subgroup, subscribe_at, unset

pytestmark = pytest.mark.virtual

ALL = LocationFilter.absolute_start(0, 0)
TOKEN = Token(AliasType.USE_VALUE, None, 0, b"secret")


def now() -> float:
    return asyncio.get_running_loop().time()


# SETUP.


async def test_setup() -> None:
    link = pair()
    limits = Limits(max_auth_token_cache_size=7, max_filter_ranges=8, max_request_updates=9)
    uri = MoqtUri.parse("moqt://relay.example:4433/a/b?c=d")
    client = Session(link.client, uri=uri, tokens=[TOKEN])
    server = Session(link.server, limits=limits)
    await asyncio.gather(client.start(), server.start())
    assert client.peer_setup == SetupOptions(
        max_auth_token_cache_size=7, max_filter_ranges=8, max_request_updates=9, implementation=IMPLEMENTATION
    )
    assert server.peer_setup.path == "/a/b?c=d"
    assert server.peer_setup.authority == "relay.example:4433"
    assert server.peer_setup.tokens == (TOKEN,)
    await asyncio.gather(client.close(), server.close())


@both_roles
async def test_no_setup_from_the_peer(peer_dials: bool) -> None:
    async with unset(peer_dials=peer_dials, limits=Limits(setup_deadline=3)) as (starting, session, peer):
        with pytest.raises(DeadlineExceeded):
            await starting
        assert now() == pytest.approx(3, abs=0.05)
        closed = await peer.closed()
        assert (closed.application, closed.code) == (True, SessionCode.CONTROL_MESSAGE_TIMEOUT)
        assert session.closed


async def test_no_credit_for_our_control_stream() -> None:
    link = pair(server=QuicOptions(max_uni_streams=1))
    link.client.open(bidirectional=False)
    session = Session(link.client, limits=Limits(setup_deadline=3))
    with pytest.raises(DeadlineExceeded):
        await session.start()
    assert (await link.server.wait_closed()).code == SessionCode.CONTROL_MESSAGE_TIMEOUT


@pytest.mark.parametrize("how", ["cut", "close"])
async def test_the_connection_ends_before_setup(how: str) -> None:
    async with unset() as (starting, session, peer):
        await asyncio.sleep(0.1)
        if how == "cut":
            peer.connection._link.cut("gone")
        else:
            peer.connection.close(3, "no")
        with pytest.raises(ConnectionLost if how == "cut" else SessionClosed):
            await starting
        assert session.closed


async def test_cancelled_before_setup() -> None:
    async with unset() as (starting, session, peer):
        await asyncio.sleep(0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert session.closed
        assert (await peer.closed()).code == SessionCode.NO_ERROR


async def test_a_session_that_was_never_started_can_be_closed() -> None:
    link = pair()
    session = Session(link.client)
    with pytest.raises(UsageError):
        await session.goaway()
    await session.close(5, "never mind")
    assert session.closed
    closed = await link.server.wait_closed()
    assert (closed.code, closed.reason) == (5, "never mind")


@both_roles
async def test_requests_before_setup(peer_dials: bool) -> None:
    """They wait for it (moqt 3.1), and so do data streams."""
    async with unset(peer_dials=peer_dials) as (starting, session, peer):
        session.tracks.add(Track(NAME))
        status = await peer.ask(TrackStatus(peer.id(), NAME), fin=True)
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        early = await peer.send(subgroup((0, b"a"), alias=4))
        reading = asyncio.ensure_future(status.next())
        await asyncio.sleep(1)
        assert not reading.done()
        await peer.set_up()
        await starting
        assert isinstance(await reading, RequestOk)
        assert isinstance(await talk.next(), SubscribeOk)
        _, subscription = await subscribe_at(session, peer, alias=4, filter=LocationFilter.none())
        assert [item.payload for item in await take(subscription, 1)] == [b"a"]
        assert early.stopped is None


async def test_tokens_go_with_every_request() -> None:
    link = pair()
    session, peer = Session(link.client, tokens=[TOKEN]), Peer(link.server)
    await asyncio.gather(session.start(), peer.set_up())
    asking: list[asyncio.Future[object]] = [
        asyncio.ensure_future(session.subscribe(NAME)),
        asyncio.ensure_future(session.fetch(NAME, filter=ALL)),
        asyncio.ensure_future(session.track_status(NAME)),
        asyncio.ensure_future(session.publish_namespace(NAMESPACE)),
        asyncio.ensure_future(session.subscribe_namespace(NAMESPACE)),
    ]
    for _ in asking:
        _, request = await peer.request()
        assert request.parameters.tokens == (TOKEN,)
    await session.close()
    for result in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(result, SessionClosed)
        assert not result.remote
    await peer.connection.wait_closed()


# Deadlines of requests.


REQUESTS: dict[str, Callable[[Session], Awaitable[object]]] = {
    "subscribe": lambda session: session.subscribe(NAME, fill=WHOLE),
    "fetch": lambda session: session.fetch(NAME, filter=ALL),
    "track_status": lambda session: session.track_status(NAME),
    "publish_namespace": lambda session: session.publish_namespace(NAMESPACE),
    "subscribe_namespace": lambda session: session.subscribe_namespace(NAMESPACE),
}
every_request = pytest.mark.parametrize("kind", REQUESTS)


@every_request
async def test_no_reply_in_time(kind: str) -> None:
    """The request is cancelled, and the session goes on."""
    async with hostile(limits=Limits(reply_deadline=2)) as (session, peer):
        started = now()
        asking = asyncio.ensure_future(REQUESTS[kind](session))
        talk, _ = await peer.request()
        with pytest.raises(DeadlineExceeded, match="the reply to"):
            await asking
        assert now() - started == pytest.approx(2)
        await asyncio.sleep(0.1)
        if kind == "track_status":  # It had said all with its FIN.
            assert await talk.next() is None
        else:
            with pytest.raises(StreamReset) as caught:
                await talk.next()
            assert caught.value.code == ResetCode.CANCELLED
        assert talk.stream.stopped == ResetCode.CANCELLED
        assert set(tables_of(session).values()) == {0}
        await peer.alive()


async def test_a_deadline_of_its_own() -> None:
    async with hostile() as (session, _peer):
        started = now()
        with pytest.raises(DeadlineExceeded):
            await session.subscribe(NAME, deadline=0.5)
        assert now() - started == pytest.approx(0.5)


async def test_no_stream_credit_in_time() -> None:
    async with hostile(client=QuicOptions(max_bidi_streams=1), limits=Limits(reply_deadline=2)) as (
        session,
        peer,
    ):
        first = asyncio.ensure_future(session.subscribe(NAME))
        talk, _ = await peer.request()
        await talk.say(SubscribeOk(1))
        subscription = await first
        with pytest.raises(DeadlineExceeded, match="stream credit"):
            await session.subscribe(NAME)
        second = asyncio.ensure_future(session.track_status(NAME))
        await asyncio.sleep(0.1)
        await subscription.close()
        talk.stream.reset(1)
        talk, request = await peer.request()
        assert request == TrackStatus(2 if session.connection.is_client else 3, NAME)
        await talk.say(RequestOk(), fin=True)
        await second


@every_request
async def test_the_peer_cancels_instead_of_answering(kind: str) -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(REQUESTS[kind](session))
        talk, _ = await peer.request()
        talk.stream.reset(ResetCode.GOING_AWAY)
        with pytest.raises(StreamReset):
            await asking
        assert set(tables_of(session).values()) == {0}
        await peer.alive()


@every_request
async def test_the_peer_ends_without_an_answer(kind: str) -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(REQUESTS[kind](session))
        talk, _ = await peer.request()
        await talk.say(b"", fin=True)
        with pytest.raises(RequestRejected):
            await asking
        assert set(tables_of(session).values()) == {0}
        await peer.alive()


# GOAWAY.


async def test_goaway_from_a_server_with_a_uri() -> None:
    async with hostile(peer_dials=False) as (session, peer):
        assert peer.control is not None
        assert not session.goaway_received.is_set()
        _, subscription = await subscribe_at(session, peer)
        await peer.control.write(encode(Goaway("moqt://other.example/", 3000)))
        await session.goaway_received.wait()
        assert session.peer_goaway == Goaway("moqt://other.example/", 3000)
        with pytest.raises(RequestRejected) as caught:
            await session.subscribe(NAME)
        assert caught.value.code == RequestCode.GOING_AWAY
        await peer.send(subgroup((0, b"a")), fin=True)
        assert len(await take(subscription, 1)) == 1


async def test_goaway_of_ours() -> None:
    """What runs goes on until the time is up; new requests are refused."""
    async with hostile() as (session, peer):
        track = next(iter(session.tracks))
        control = await peer.connection.accept()
        decoder = MessageDecoder(control=True)
        assert isinstance(decoder.feed(await control.read())[0], Setup)
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await talk.next(), SubscribeOk)
        await session.goaway("moqt://b.example/", timeout=5)
        assert decoder.feed(await control.read()) == [Goaway("moqt://b.example/", 5000)]
        with pytest.raises(UsageError):
            await session.goaway()
        await check_refused(await peer.ask(Subscribe(peer.id(), NAME)), RequestCode.GOING_AWAY)
        publish(track, (0, 0))
        await asyncio.sleep(4.5)
        assert peer.connection.closed is None
        await asyncio.sleep(0.6)
        assert (await peer.closed()).code == SessionCode.GOAWAY_TIMEOUT


@pytest.mark.parametrize("left", ["subscription of the peer", "subscription of ours", "nothing"])
async def test_goaway_and_what_is_left(left: str) -> None:
    async with hostile() as (session, peer):
        if left == "subscription of the peer":
            talk = await peer.ask(Subscribe(peer.id(), NAME))
            assert isinstance(await talk.next(), SubscribeOk)
        elif left == "subscription of ours":
            await subscribe_at(session, peer)
        await session.goaway(timeout=2)
        await asyncio.sleep(3)
        assert session.closed == (left != "nothing")


async def test_a_client_names_no_uri() -> None:
    async with hostile(peer_dials=False) as (session, _peer):
        with pytest.raises(UsageError):
            await session.goaway("moqt://b.example/")
        await session.goaway()


async def test_goaway_without_a_timeout() -> None:
    async with sessions() as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        await ends.publisher.goaway()
        await asyncio.sleep(100)
        publish(ends.track, (0, 0))
        assert len(await take(subscription, 1)) == 1
        assert ends.subscriber.peer_goaway == Goaway()
        await ends.subscriber.goaway(timeout=1)
        await asyncio.sleep(2)
        assert isinstance(await ends.publisher.wait_closed(), SessionClosed)


async def test_goaway_for_one_request() -> None:
    async with hostile() as (session, peer):
        talk, subscription = await subscribe_at(session, peer)
        await talk.say(Goaway(timeout=5))
        await peer.send(subgroup((0, b"a")), fin=True)
        assert len(await take(subscription, 1)) == 1
        assert subscription.request.goaway == Goaway(timeout=5)
        asking = asyncio.ensure_future(session.track_status(NAME))
        other, _ = await peer.request()
        await other.say(Goaway(), RequestOk(), fin=True)
        await asking
