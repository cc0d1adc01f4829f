"""New tokens for what goes on, and for what was refused (moqt 5.3, 11)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moqt.authorization import Action
from moqt.errors import DoneCode, RequestCode, RequestRejected, ResetCode, StreamReset
from moqt.filters import LocationFilter
from moqt.limits import Limits
from moqt.names import TrackNamespace
from moqt.quic.api import QuicOptions
from moqt.quic.link import pair
from moqt.session import Session
from moqt.track import Track
from moqt.tracks import Tracks
from tests.moqt.ends import (
    NAME,
    NAMESPACE,
    collect,
    objects_of,
    old_track,
    publish,
    publish_groups,
    tables_of,
)
from tests.moqt.rights import Lasting, until

pytestmark = pytest.mark.virtual

LASTS = 60.0


@asynccontextmanager
async def ends(track: Track | None = None) -> AsyncIterator[tuple[Session, Session, Lasting]]:
    """A client whose token lasts until LASTS, and a server with the policy; both offer Tracks."""
    link = pair(client=QuicOptions(max_stream_data=4096, max_data=32768))
    policy, tracks = Lasting(), Tracks()
    tracks.add(track or old_track())
    server = Session(link.server, tracks=tracks, announce=False, policy=policy)
    client = Session(link.client, tracks=Tracks(), announce=True, limits=Limits(receive_buffer=1000))
    try:
        await asyncio.gather(server.start(), client.start())
        await client.renew(until(int(LASTS)))  # Not in SETUP: that token would hold for all requests.
        yield client, server, policy
    finally:
        await asyncio.gather(server.close(), client.close())


@pytest.mark.parametrize("renews", [True, False])
async def test_all_that_goes_on_is_renewed(renews: bool) -> None:
    """A subscription, a fetch, a watch and an announcement live on with the new token, and new requests come
    with it; without it all of them end, each with its code.
    """
    track = Track(NAME, one_subgroup=True)
    publish_groups(track, range(20), 50)
    async with ends(track) as (client, server, policy):
        subscription = await client.subscribe(NAME)
        fetch = await client.fetch(NAME, filter=LocationFilter.absolute_start(0, 0))
        watch = await client.subscribe_namespace(NAMESPACE)
        announcement = await client.publish_namespace((b"ours",))
        await asyncio.sleep(LASTS - 10)
        if renews:
            await client.renew(until(1000))
            updates = [asked for asked in policy.asked if asked.action is Action.REQUEST_UPDATE]
            assert {asked.updates for asked in updates} == {
                Action.SUBSCRIBE,
                Action.FETCH,
                Action.SUBSCRIBE_NAMESPACE,
                Action.PUBLISH_NAMESPACE,
            }
            assert {asked.tokens for asked in updates} == {((1, b"1000"),)}
        await asyncio.sleep(20)
        assert (server.peer_namespaces == {(b"ours",): 1}) is renews
        assert announcement.over.is_set() is not renews
        if renews:
            publish(track, (20, 0))
            server.tracks.announce((*NAMESPACE, b"x"))
            assert (await anext(subscription)).location.group == 20  # type: ignore[union-attr]  # an Object
            assert (await anext(watch)).namespace == (*NAMESPACE, b"x")
            assert len(objects_of(await collect(fetch))) == 20 * 50
            await client.track_status(NAME)
            assert policy.asked[-1].tokens == ((1, b"1000"),)
        else:
            assert await collect(subscription) == []
            assert subscription.done is not None
            assert subscription.done.status == DoneCode.EXPIRED
            with pytest.raises(StreamReset) as caught:
                await collect(fetch)
            assert caught.value.code == ResetCode.EXPIRED_AUTH_TOKEN
            with pytest.raises(StreamReset) as caught:
                await anext(watch)
            assert caught.value.code == ResetCode.EXPIRED_AUTH_TOKEN
            assert isinstance(announcement.error, StreamReset)
            assert announcement.error.code == ResetCode.EXPIRED_AUTH_TOKEN
            with pytest.raises(RequestRejected, match="SUBSCRIBE with EXPIRED_AUTH_TOKEN"):
                await client.subscribe(NAME)
        for made in (subscription, fetch, watch, announcement):
            await made.close()
        await asyncio.sleep(10)
        assert set(tables_of(client).values()) == set(tables_of(server).values()) == {0}


async def test_a_renewal_that_is_refused_ends_that_request_and_nothing_else() -> None:
    async with ends() as (client, server, _):
        subscription = await client.subscribe(NAME)
        await asyncio.sleep(2)
        await client.renew(until(1))  # Expired already.
        assert await collect(subscription) == []
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.UPDATE_FAILED
        await client.renew(until(1000))
        async with await client.subscribe(NAME):
            assert len(server.publishing._subscriptions) == 1


async def test_a_renewal_while_a_request_waits_for_its_reply() -> None:
    """The update is sent behind the request, and answered behind its reply."""
    async with ends() as (client, server, policy):
        asking = asyncio.ensure_future(client.subscribe(NAME))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client._requests
        await client.renew(until(1000))
        async with await asking:
            await asyncio.sleep(LASTS + 20)
            assert server.publishing._subscriptions
        assert [asked.action for asked in policy.asked[1:3]] == [Action.SUBSCRIBE, Action.REQUEST_UPDATE]


async def test_the_log_tells_of_a_refused_namespace_if_nobody_else_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the beginning of its name."""
    async with ends() as (client, _, _):
        await client.renew(until(1))
        await asyncio.sleep(2)
        client.tracks.announce((b"ours" * 50,))
        await asyncio.sleep(1)
        (record,) = (record for record in caplog.records if record.levelname == "ERROR")
        assert f" {'ours' * 10}… was not announced: " in record.getMessage()


async def test_a_namespace_is_announced_again_with_the_next_token(caplog: pytest.LogCaptureFixture) -> None:
    """Refused at first; accepted with another token; withdrawn by the peer when that has expired; accepted
    again with a third. The user of the session hears of all that, and the log does not repeat it.
    """
    heard: list[tuple[TrackNamespace, Exception | None]] = []
    async with ends() as (client, server, _):
        client.on_announced = lambda namespace, error: heard.append((namespace, error))
        await client.renew(until(1))
        await asyncio.sleep(2)
        client.tracks.announce((b"ours",))
        await asyncio.sleep(30)
        assert server.peer_namespaces == {}
        ((_, refused),) = heard
        assert isinstance(refused, RequestRejected)
        assert (refused.what, refused.code) == ("PUBLISH_NAMESPACE", RequestCode.EXPIRED_AUTH_TOKEN)
        await client.renew(until(50))
        await asyncio.sleep(1)
        assert server.peer_namespaces == {(b"ours",): 1}
        assert heard[1:] == [((b"ours",), None)]
        await asyncio.sleep(30)
        assert server.peer_namespaces == {}
        assert isinstance(heard[2][1], StreamReset)
        await client.renew(until(1000))
        await asyncio.sleep(1)
        assert server.peer_namespaces == {(b"ours",): 1}
        assert heard[3:] == [((b"ours",), None)]
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        client.tracks.withdraw((b"ours",))
        await asyncio.sleep(1)
        assert server.peer_namespaces == {}
        await client.renew(until(2000))
        await asyncio.sleep(1)
        assert server.peer_namespaces == {}
        assert len(heard) == 4


async def test_a_namespace_that_is_withdrawn_while_it_is_refused_is_not_announced_again() -> None:
    async with ends() as (client, server, policy):
        await client.renew(until(1))
        await asyncio.sleep(2)
        client.tracks.announce((b"ours",))
        await asyncio.sleep(1)
        client.tracks.withdraw((b"ours",))
        await asyncio.sleep(1)
        await client.renew(until(1000))
        await asyncio.sleep(1)
        assert server.peer_namespaces == {}
        assert [asked.action for asked in policy.asked] == [Action.SETUP, Action.PUBLISH_NAMESPACE]
