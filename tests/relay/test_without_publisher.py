"""What relays serve from their caches when the publisher is silent, or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvcs.errors import KvcsError
from kvcs.subscriber import CacheIncomplete
from moqt import (
    DoneCode,
    Fill,
    FullTrackName,
    Location,
    LocationFilter,
    RangeNotice,
    RangeStatus,
    ReceivedObject,
    RequestCode,
    RequestRejected,
    Session,
    StreamEnd,
    Subscription,
    Tracks,
)
from moqt.publishing import Publishing
from moqt.subscribing import FetchStream
from moqt.wire import PropertyType
from tests.kvcs.stage import CACHE, MODEL, TOKENS, put_layers
from tests.moqt.scene import (
    EVERYTHING,
    NAMESPACE,
    at_hand,
    check_exactly_once,
    collect,
    filled,
    make_track,
    objects,
)
from tests.relay.network import Network, join, network, until
from tests.relay.test_kvcs import check, production, receive

pytestmark = pytest.mark.virtual

SIZE = 10_000
WAYS = ["silent", "gone", "all gone"]


async def lose(net: Network, way: str) -> None:
    """The publisher falls silent, or is gone; with "all gone", so is every relay but the last."""
    if way == "silent":
        net.links[0].stall()
        return
    net.links[0].cut()
    if way == "all gone" and len(net.relays) > 1:
        net.links[1].cut()
    await asyncio.sleep(0.1)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.requirement("R8a")
@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pause", [0.0, 60.0])
async def test_a_complete_publication(relays: int, way: str, pause: float) -> None:
    """Found, and received whole, at once: by discovery, manifest and data tracks as ever."""
    async with production(relays=relays, subscribers=2) as (net, publisher):
        publication = publisher.publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        check(await receive(net))
        await lose(net, way)
        await asyncio.sleep(pause)
        started = now()
        check(await receive(net, 1))
        assert now() - started < 3


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("way", WAYS)
async def test_a_publication_that_was_in_production(relays: int, way: str) -> None:
    """A new subscriber gets what is here, and is told what is missing, within the bound of its patience."""
    async with production(relays=relays, subscribers=2) as (net, publisher):
        publication = publisher.publish(TOKENS)
        first = asyncio.ensure_future(receive(net))
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE, last=1)
        await asyncio.sleep(1)
        second = asyncio.ensure_future(receive(net, 1))
        await asyncio.sleep(0.2)
        await lose(net, way)
        started = now()
        for receiving in (first, second):
            with pytest.raises(CacheIncomplete) as caught:
                await receiving
            assert {missing.layer for missing in caught.value.missing} == set(range(2, MODEL.layers))
        assert now() - started < 20
        if way == "gone":
            with pytest.raises(KvcsError):  # It is not offered: it would never become whole.
                await receive(net, 1)


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("request_", ["SUBSCRIBE", "FETCH", "FETCH of whole groups"])
async def test_a_track_with_a_hole(relays: int, way: str, request_: str) -> None:
    """moqt 10: what is here, and End of Unknown Range for what is not; never a wait without a bound."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(3), 2, SIZE)
    async with network(track, relays=relays, relay_options={"linger": 0.0}) as net:
        session = net.sessions[0]
        for group in (0, 2):
            async with await session.fetch(track.name, filter=LocationFilter.groups(group, group)) as part:
                assert len(objects(await collect(part))) == 2
        await asyncio.sleep(1)
        await lose(net, way)
        started = now()
        reception: Subscription | FetchStream
        if request_ == "SUBSCRIBE":
            reception = await join(session, track.name)
        elif request_ == "FETCH":
            reception = await session.fetch(track.name, filter=EVERYTHING)
        else:
            reception = await session.fetch(track.name, filter=LocationFilter.groups(0, 2))
        assert now() - started < 6
        items = await collect(reception)
        assert now() - started < 30
        assert [item.location for item in objects(items)] == [
            Location(group, number) for group in (0, 2) for number in (0, 1)
        ]
        notices = [item for item in items if isinstance(item, RangeNotice)]
        assert RangeNotice(RangeStatus.UNKNOWN, Location(1, (1 << 64) - 1)) in notices
        if isinstance(reception, Subscription):
            assert reception.done is not None
            assert reception.done.status == DoneCode.INTERNAL_ERROR


async def test_a_fetch_of_what_is_here_needs_no_publisher() -> None:
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(3), 2, SIZE)
    async with network(track, relay_options={"linger": 0.0}) as net:
        session = net.sessions[0]
        part = LocationFilter.groups(0, 1)
        async with await session.fetch(track.name, filter=part) as fetch:
            await collect(fetch)
        await until(lambda: not track._watchers)
        net.links[0].stall()
        started, before = now(), net.upstream_bytes
        async with await session.fetch(track.name, filter=part) as fetch:
            assert len(objects(await collect(fetch))) == 4
        assert now() - started < 0.2
        assert net.upstream_bytes == before


ASK: dict[str, Callable[[Session, FullTrackName], Awaitable[object]]] = {
    "SUBSCRIBE": join,
    "FETCH": lambda session, name: session.fetch(name, filter=EVERYTHING),
    "TRACK_STATUS": lambda session, name: session.track_status(name),
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_cold_track_of_a_silent_publisher(
    ask: Callable[[Session, FullTrackName], Awaitable[object]],
) -> None:
    """TIMEOUT (moqt 17.2), within the time that a publisher has for its reply."""
    track = make_track(b"k")
    filled(track, [0], 1, SIZE)
    async with network(track, relay_options={"answer": 2.0}) as net:
        net.links[0].stall()
        started = now()
        with pytest.raises(RequestRejected) as caught:
            await ask(net.sessions[0], track.name)
        assert caught.value.code == RequestCode.TIMEOUT
        assert now() - started < 2.5


async def test_what_a_silent_publisher_said_not_to_have() -> None:
    """It does not have it: nobody waits for it to say so again."""
    async with network(relay_options={"answer": 4.0}) as net:
        name = FullTrackName(NAMESPACE, b"no")
        for stalled in (False, True):
            if stalled:
                net.links[0].stall()
            started = now()
            with pytest.raises(RequestRejected) as caught:
                await net.sessions[0].subscribe(name)
            assert caught.value.code == RequestCode.DOES_NOT_EXIST
            assert now() - started < 1


async def test_a_silent_publisher_does_not_keep_others_from_being_asked() -> None:
    """One has announced the namespace and says nothing; an upstream has the Track."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(2), 2, SIZE)
    async with network(track, relays=2) as net:
        dead = Tracks()
        dead.announce(NAMESPACE)
        link, _ = await net.publish(dead, relay=1)
        await asyncio.sleep(1)
        link.stall()
        started = now()
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            assert len(objects(await collect(fetch))) == 4
        assert now() - started < 2


async def test_a_publisher_that_wakes_up_is_caught_up_with() -> None:
    """A subscriber that is served without it gets what it missed, once, when it replies."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, [0], 2, SIZE)
    async with network(track, relay_options={"linger": 0.0, "grace": 30.0}) as net:
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            await collect(fetch)
        await until(lambda: not track._watchers)
        net.links[0].stall()
        filled(track, [1], 2, SIZE)
        subscription = await join(net.sessions[0], track.name)
        await asyncio.sleep(1)
        assert len(objects(at_hand(subscription))) == 2
        net.links[0].resume()
        await asyncio.sleep(1)
        filled(track, [2], 2, SIZE)
        await asyncio.sleep(1)
        net.end(track)
        items = objects(await collect(subscription))
        assert sorted(item.location for item in items) == [
            Location(group, number) for group in (1, 2) for number in (0, 1)
        ]


async def test_a_namespace_is_offered_as_long_as_it_is_whole_in_the_cache() -> None:
    """kvcs 14 #10: without a publisher, until an Object of it is dropped."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(2), 2, SIZE)
    track.end(Location(2, 0))
    async with network(track, subscribers=2) as net:
        watch = await net.sessions[1].subscribe_namespace(NAMESPACE[:1])
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            await collect(fetch)
        net.links[0].cut()
        await asyncio.sleep(60)
        assert list(watch.namespaces) == [NAMESPACE]
        late = await net.sessions[0].subscribe_namespace(NAMESPACE)
        await asyncio.sleep(0.1)
        assert list(late.namespaces) == [NAMESPACE]
        cached = net.cached(track.name)
        cached.evict(next(iter(cached.kept())))
        await asyncio.sleep(0.1)
        assert not watch.namespaces
        assert not late.namespaces


async def test_a_namespace_that_was_never_whole_is_not_offered() -> None:
    track, never = make_track(b"k", one_subgroup=True), make_track(b"never ends")
    filled(track, range(2), 2, SIZE)
    filled(never, range(2), 2, SIZE)
    track.end(Location(2, 0))
    async with network(track, never, subscribers=2) as net:
        watch = await net.sessions[1].subscribe_namespace(NAMESPACE)
        for name, groups in ((track.name, 2), (never.name, 1)):
            async with await net.sessions[0].fetch(name, filter=LocationFilter.groups(0, groups - 1)) as part:
                await collect(part)
        net.links[0].cut()
        await asyncio.sleep(1)
        assert not watch.namespaces


async def test_a_namespace_is_no_longer_offered_when_its_time_is_over() -> None:
    """moqt 15 #6: MAX_CACHE_DURATION bounds it."""
    track = make_track(b"k", one_subgroup=True, properties=((PropertyType.MAX_CACHE_DURATION, 20_000),))
    async with network(track, subscribers=2) as net:
        watch = await net.sessions[1].subscribe_namespace(NAMESPACE)
        subscription = await join(net.sessions[0], track.name)
        filled(track, range(2), 2, SIZE)
        track.end(Location(2, 0))
        await asyncio.sleep(1)
        net.links[0].cut()
        await asyncio.sleep(1)
        assert len(objects(await collect(subscription))) == 4
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.TRACK_ENDED
        await asyncio.sleep(10)
        assert list(watch.namespaces) == [NAMESPACE]
        await asyncio.sleep(20)
        assert not watch.namespaces
        assert not net.relays[0].feeds


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("request_", ["SUBSCRIBE", "FETCH"])
async def test_a_publisher_that_withdraws_a_track_at_its_end(relays: int, request_: str) -> None:
    """A cold relay takes what exists with the subscription, so that nothing is lost when no fetch can be
    made any more.
    """
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(4), 4, SIZE)
    async with network(track, relays=relays, window=16384) as net:
        reception: Subscription | FetchStream
        if request_ == "SUBSCRIBE":
            reception = await join(net.sessions[0], track.name)
        else:
            reception = await net.sessions[0].fetch(track.name, filter=EVERYTHING)
        reading = asyncio.ensure_future(collect(reception))
        net.end(track)
        items = await reading
        check_exactly_once(track, objects(items))
        assert not [item for item in items if isinstance(item, RangeNotice)]


async def test_a_fill_from_upstream_that_breaks_is_made_up_for_by_a_fetch() -> None:
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(4), 4, 100_000)
    async with network(track, window=16384) as net:
        subscription = await join(net.sessions[0], track.name)
        first = await anext(subscription)
        assert isinstance(first, ReceivedObject)
        delivery = track._watchers[0]
        (fill,) = delivery._fills  # type: ignore[attr-defined]  # The publisher's side of the relay's subscription.
        net.publisher.scheduler.reset(fill, 0)
        await asyncio.sleep(5)
        items = [first, *at_hand(subscription)]
        check_exactly_once(track, objects(items))
        assert [item.code for item in items if isinstance(item, StreamEnd)] == [None]
        await subscription.close()


async def test_a_cold_relay_takes_only_the_range_that_is_wanted() -> None:
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(10), 4, SIZE)
    async with network(track) as net:
        fill = Fill(filter=LocationFilter.relative_start(2))
        subscription = await join(net.sessions[0], track.name, fill=fill)
        await asyncio.sleep(1)
        assert [item.location.group for item in objects(at_hand(subscription))] == [8] * 4 + [9] * 4
        assert net.upstream_bytes < 9 * SIZE
        await subscription.close()


@pytest.mark.parametrize("before", [0, 2])
async def test_what_is_published_between_fetch_and_subscribe(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold relay sends both at once; what only the second one tells of is fetched after it."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(before), 2, 300_000)
    honest = Publishing.subscribe
    async with network(track, window=16384) as net:  # So that the fetch takes longer than the reply.

        async def late(publishing: Publishing, *arguments: object) -> None:
            if publishing.session is net.publisher:
                await asyncio.sleep(0.2)
                filled(track, [before], 2, SIZE)
            await honest(publishing, *arguments)  # type: ignore[arg-type]  # As they came.

        monkeypatch.setattr(Publishing, "subscribe", late)
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            items = await collect(fetch)
        check_exactly_once(track, objects(items))
        assert not [item for item in items if isinstance(item, RangeNotice)]
