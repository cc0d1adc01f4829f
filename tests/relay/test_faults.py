"""Publishers, subscribers and links that fail; what is left behind."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from moqt import (
    DoneCode,
    FullTrackName,
    Limits,
    RequestCode,
    RequestRejected,
    ResetCode,
    StreamEnd,
    StreamReset,
    Track,
    Tracks,
)
from moqt.errors import RequestRefused
from moqt.filters import Location
from moqt.namespaces import NamespaceWatch
from moqt.quic import link, memory
from moqt.subscribing import FetchStream, Subscription
from tests.moqt.scene import (
    EVERYTHING,
    NAMESPACE,
    at_hand,
    check_exactly_once,
    collect,
    filled,
    leftovers,
    make_track,
    noise,
    objects,
    piece,
)
from tests.relay.network import Network, join, network, until

pytestmark = pytest.mark.virtual

SIZE = 20_000


def same(track: Track) -> tuple[Track, Tracks]:
    """Another publisher's Track of the same name, and what offers it."""
    copy = Track(track.name, one_subgroup=track.one_subgroup)
    tracks = Tracks()
    tracks.add(copy)
    tracks.announce(NAMESPACE)
    return copy, tracks


def held(net: Network) -> dict[str, Any]:
    """What a relay has in its tables."""
    relay = net.relays[0]
    found: dict[str, Any] = {
        name: value
        for name, value in vars(relay).items()
        if hasattr(value, "__len__") and len(value) and name != "_fetching"
    }
    for feed in relay.feeds.values():
        for name in ("_sources", "_established", "_askers", "_recovery", "_linger", "_grace"):
            if value := getattr(feed, name):
                found[f"{feed.name}.{name}"] = value
        if feed._holes.open:
            found[f"{feed.name}._holes"] = feed._holes.open
    return found


async def test_unknown_tracks_and_errors_are_passed_on() -> None:
    track = make_track(b"k")
    async with network(track, relays=2) as net:
        for name in (FullTrackName(NAMESPACE, b"no"), FullTrackName((b"other",), b"k")):
            for request in (net.sessions[0].subscribe(name), net.sessions[0].track_status(name)):
                with pytest.raises(RequestRejected) as caught:
                    await request
                assert caught.value.code == RequestCode.DOES_NOT_EXIST
        with pytest.raises(RequestRejected) as caught:
            await net.sessions[0].fetch(track.name, filter=EVERYTHING)
        assert caught.value.code == RequestCode.INVALID_RANGE


async def test_two_hundred_subscribe_and_cancel_cycles_leave_nothing() -> None:
    track = make_track(b"k")
    async with network(track, relay_options={"linger": 2.0}) as net:
        server = next(iter(net.relays[0]._routes[NAMESPACE]))
        for number in range(200):
            subscription = await join(net.sessions[0], track.name)
            if number % 3 == 0:
                piece(track, number, 0, 100)
                track.end_group(number, 1)
                await anext(subscription)
            await subscription.close()
        cached = net.cached(track.name)
        await asyncio.sleep(10)
        assert not cached.watched
        assert not any(len(feed._sources) for feed in net.relays[0].feeds.values())
        cached.clear()
        await asyncio.sleep(10)
        found = held(net)
        assert set(found) == {"_routes", "_known"}
        assert not net.relays[0].feeds
        wanted_to_be_there = {"Session._tasks", "Answering.serving", "streams"}
        left = leftovers(server).keys() - wanted_to_be_there - {"watchers", "Session.peer_namespaces"}
        assert not left
        assert not leftovers(net.sessions[0]).keys() & {"Session._requests", "Incoming._by_alias"}


@pytest.mark.parametrize("relays", [1, 2])
async def test_subscribe_and_cancel_cycles_leave_memory_flat(relays: int) -> None:
    """Subscriptions with fills, fetches, and requests for what does not exist, cancelled at any time."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(4), 4, SIZE)
    async with network(track, relays=relays, relay_options={"linger": 0.5}) as net:
        session = net.sessions[0]

        async def cycle(number: int) -> None:
            requests: list[Coroutine[Any, Any, Subscription | FetchStream | NamespaceWatch]] = [
                join(session, track.name),
                session.fetch(track.name, filter=EVERYTHING),
                session.subscribe(FullTrackName(NAMESPACE, b"no")),
                session.subscribe_namespace(NAMESPACE),
            ]
            for request in requests:
                task = asyncio.ensure_future(request)
                await asyncio.sleep(0.01 * (number % 7))
                task.cancel()
                with suppress(asyncio.CancelledError, RequestRejected):
                    await (await task).close()
            if number % 10 == 0:
                await asyncio.sleep(2)

        for number in range(60):
            await cycle(number)
        await asyncio.sleep(30)
        gc.collect()
        tracemalloc.start()
        try:
            for number in range(200):
                await cycle(number)
            await asyncio.sleep(30)
            gc.collect()
            # The simulated network keeps a note of each stream that there ever was.
            network_itself = (
                tracemalloc.Filter(False, link.__file__),
                tracemalloc.Filter(False, memory.__file__),
            )
            kept = tracemalloc.take_snapshot().filter_traces(network_itself)
            grown = sum(trace.size for trace in kept.traces)
        finally:
            tracemalloc.stop()
        assert grown < 100_000  # Of 800 requests: 125 bytes each, with rings of what is retired, and caches.
        found = held(net)
        assert not {name for name in found if "scene" in name}


async def test_a_subscriber_that_leaves_while_the_relay_waits_for_a_publisher() -> None:
    async with network() as net:
        waiting = asyncio.ensure_future(
            net.relays[0].find(FullTrackName((b"x",), b"k"), object(), 30.0, upward=False)
        )
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.sleep(15)
        assert waiting.cancelled()
        assert not net.relays[0].feeds


async def test_nobody_is_asked_for_what_he_asks_for() -> None:
    """Two relays that dial each other's tree do not send a request in circles."""
    tracks = Tracks()
    tracks.announce((b"mine",))
    name = FullTrackName((b"mine",), b"k")
    async with network(relays=2, subscribers=0) as net:
        _, session = await net.publish(tracks, relay=1)
        await asyncio.sleep(1)
        with pytest.raises(RequestRejected) as caught:
            await session.subscribe(name)
        assert caught.value.code == RequestCode.DOES_NOT_EXIST
        await asyncio.sleep(1)
        assert not any(relay.feeds for relay in net.relays)


async def test_rendezvous() -> None:
    """moqt 5.3: the SUBSCRIBE waits for its publisher; TIMEOUT when none comes."""
    track = make_track(b"late")
    piece(track, 0, 0, SIZE)
    tracks = Tracks()
    async with network() as net:
        find = net.relays[0].find
        name = FullTrackName((b"late",), b"late")
        with pytest.raises(RequestRefused) as caught:
            await find(name, object(), 2.0, upward=False)
        assert caught.value.code == RequestCode.TIMEOUT
        waiting = asyncio.ensure_future(find(name, object(), 30.0, upward=False))
        await asyncio.sleep(5)
        late = Track(name)
        late.append(0, 0, b"here")
        tracks.add(late)
        tracks.announce((b"late",))
        await net.publish(tracks)
        assert (await waiting).largest == Location(0, 0)


async def test_a_publisher_cut_in_mid_object_and_not_back() -> None:
    """The subscriber gets what is whole, and is told within the time of grace."""
    track = make_track(b"k", one_subgroup=True)
    async with network(track, relay_options={"grace": 3.0}, window=65536) as net:
        subscription = await join(net.sessions[0], track.name)
        piece(track, 0, 0, SIZE)
        piece(track, 0, 1, 4 << 20)
        await asyncio.sleep(0.2)
        net.links[0].cut()
        started = asyncio.get_running_loop().time()
        items = await collect(subscription)
        assert asyncio.get_running_loop().time() - started < 5
        assert [item.location for item in objects(items)] == [Location(0, 0)]
        assert [item.code for item in items if isinstance(item, StreamEnd)] == [ResetCode.INTERNAL_ERROR]
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.INTERNAL_ERROR


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("cut_at", range(12))
async def test_a_publisher_that_comes_back_is_not_missed(relays: int, cut_at: int) -> None:
    """Each Object once, whenever the connection breaks: also inside an Object."""
    track = make_track(b"k", one_subgroup=True)
    async with network(track, relays=relays, window=16384, seed=cut_at, jitter=0.003) as net:
        subscription = await join(net.sessions[0], track.name)
        reading = asyncio.ensure_future(collect(subscription))
        for number in range(12):
            piece(track, number // 4, number % 4, 60_000)
            if number % 4 == 3:
                track.end_group(number // 4, 4)
            await asyncio.sleep(0.02)
            if number == cut_at:
                net.links[0].cut()
                await asyncio.sleep(0.5)
                await net.publish(net.tracks)
        await asyncio.sleep(2)
        net.end(track)
        items = await reading
        check_exactly_once(track, objects(items))


@pytest.mark.parametrize("cut_at", range(0, 12, 3))
async def test_the_loss_of_one_of_two_publishers_is_not_felt(cut_at: int) -> None:
    track = make_track(b"k", one_subgroup=True)
    copy, tracks = same(track)
    async with network(track, window=16384, jitter=0.004, seed=cut_at) as net:
        await net.publish(tracks, latency=0.02)
        subscription = await join(net.sessions[0], track.name)
        reading = asyncio.ensure_future(collect(subscription))
        for number in range(12):
            for one in (track, copy):
                piece(one, number // 4, number % 4, 60_000)
                if number % 4 == 3:
                    one.end_group(number // 4, 4)
            await asyncio.sleep(0.02)
            if number == cut_at:
                net.links[0].cut()
        await asyncio.sleep(1)
        tracks.remove(copy.name, DoneCode.TRACK_ENDED)
        items = await reading
        check_exactly_once(track, objects(items))
        assert [item for item in items if isinstance(item, StreamEnd) and item.code is not None] == []


@pytest.mark.parametrize("size", [SIZE, SIZE + 1])
async def test_a_second_payload_at_a_location_makes_the_track_malformed(size: int) -> None:
    """moqt 15 #3, #5: subscriptions end with 0x12, fetches are reset with 0x12, nothing is kept."""
    track = make_track(b"k", one_subgroup=True)
    copy, tracks = same(track)
    async with network(track, subscribers=2, window=16384) as net:
        await net.publish(tracks)
        subscription = await join(net.sessions[0], track.name)
        await asyncio.sleep(0.5)
        piece(track, 0, 0, SIZE)
        await asyncio.sleep(0.5)
        copy.append(0, 0, noise(Location(7, 7), size))
        items = await collect(subscription)
        assert [item.payload for item in objects(items)] == [noise(Location(0, 0), SIZE)]
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.MALFORMED_TRACK
        await asyncio.sleep(1)
        assert len(net.relays[0].cache) == 0
        assert track.name not in net.relays[0].feeds


async def test_a_malformed_track_resets_its_fetches() -> None:
    track = make_track(b"k", one_subgroup=True)
    async with network(track, subscribers=2, window=8192) as net:
        piece(track, 0, 0, 2 << 20)
        fetch = await net.sessions[0].fetch(track.name, filter=EVERYTHING)
        await asyncio.sleep(0.2)
        net.cached(track.name).spoil("as if a second payload had come")
        with pytest.raises(StreamReset) as caught:
            await collect(fetch)
        assert caught.value.code == ResetCode.MALFORMED_TRACK


async def test_a_stopped_reader_changes_nothing_for_the_others() -> None:
    track = make_track(b"k", one_subgroup=True)
    async with network(track, subscribers=3) as net:
        subscriptions = [await join(session, track.name) for session in net.sessions]
        for group in range(8):
            filled(track, [group], 4, 1 << 20)
            await asyncio.sleep(0.05)
        await asyncio.sleep(2)
        net.end(track)
        for subscription in subscriptions[1:]:
            async with asyncio.timeout(60):
                check_exactly_once(track, objects(await collect(subscription)))
        check_exactly_once(track, objects(await collect(subscriptions[0])))


async def test_a_subscriber_that_falls_too_far_behind_loses_its_subscription() -> None:
    """It is told so, its bytes no longer hold the cache up, and the others feel nothing."""
    track = make_track(b"k", one_subgroup=True)
    size = 1 << 20
    async with network(track, relay_options={"cache_bytes": 8 * size}) as net:
        limits = Limits(receive_buffer=size)
        link, slow = await net.subscriber(limits=limits, relay_limits=Limits(max_behind=16 * size))
        behind = await join(slow, track.name)
        whole = asyncio.ensure_future(collect(await join(net.sessions[0], track.name)))
        for group in range(24):
            filled(track, [group], 2, size)
            await asyncio.sleep(0.5)
        assert net.relays[0].cache.bytes < 9 * size
        net.end(track)
        check_exactly_once(track, objects(await whole))
        items = await collect(behind)
        assert behind.done is not None
        assert behind.done.status == DoneCode.TOO_FAR_BEHIND
        assert 0 < len(objects(items)) < 24
        assert ResetCode.TOO_FAR_BEHIND in {item.code for item in items if isinstance(item, StreamEnd)}
        assert not link.server.closed


async def test_a_completed_track_is_served_when_its_publisher_has_left() -> None:
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(3), 3, SIZE)
    track.end(Location(3, 0))
    async with network(track, subscribers=2) as net:
        first = await join(net.sessions[0], track.name)
        assert len(objects([await anext(first) for _ in range(9)])) == 9
        net.end(track)
        await collect(first)
        await net.publisher.close()
        await asyncio.sleep(1)
        second = await join(net.sessions[1], track.name)
        check_exactly_once(track, objects(await collect(second)))
        assert second.done is not None
        assert second.done.status == DoneCode.TRACK_ENDED


async def test_namespaces_come_and_go_through_two_relays() -> None:
    """moqt 11, 15 #18: NAMESPACE to those who asked; PUBLISH_NAMESPACE only upwards."""
    async with network(relays=2, subscribers=2) as net:
        _, there = await net.subscriber(relay=0)
        watches = [await session.subscribe_namespace((b"x",)) for session in (*net.sessions, there)]
        longer = await there.subscribe_namespace((b"y", b"z"))
        tracks = Tracks()
        tracks.announce((b"x", b"1"))
        link, _ = await net.publish(tracks, relay=1)
        tracks.announce((b"y", b"z", b"2"))
        await asyncio.sleep(1)
        assert [list(watch.namespaces) for watch in watches] == [[(b"x", b"1")]] * 3
        assert list(longer.namespaces) == [(b"y", b"z", b"2")]
        link.cut()
        await asyncio.sleep(1)
        assert [list(watch.namespaces) for watch in watches] == [[]] * 3
        assert not longer.namespaces
        assert set(net.relays[1].upward.namespaces) == set()


async def test_subgroups_streams_and_their_ends_are_carried_over() -> None:
    """moqt 12.6, 15 #15: FIN, END_OF_GROUP and FIRST_OBJECT."""
    track = make_track(b"k")
    async with network(track) as net:
        subscription = await join(net.sessions[0], track.name)
        for object_id in range(6):
            piece(track, 0, object_id, 1000, subgroup=object_id % 2)
        track.end_group(0, 6)
        await asyncio.sleep(1)
        items = at_hand(subscription)
        assert {(item.location.object, item.subgroup) for item in objects(items)} == {
            (object_id, object_id % 2) for object_id in range(6)
        }
        ends = [item for item in items if isinstance(item, StreamEnd)]
        assert ends == [StreamEnd(0, False, None)] * 2
        await subscription.close()


async def test_one_upstream_subscription_and_it_is_kept_warm() -> None:
    track = make_track(b"k")
    async with network(track, subscribers=4, relay_options={"linger": 5.0}) as net:
        subscriptions = [await join(session, track.name) for session in net.sessions]
        watchers = track._watchers
        assert len(watchers) == 1
        for subscription in subscriptions:
            await subscription.close()
        await asyncio.sleep(4)
        assert len(watchers) == 1
        again = await join(net.sessions[0], track.name)
        await asyncio.sleep(20)
        assert len(watchers) == 1
        await again.close()
        await until(lambda: not watchers)


async def test_what_was_told_and_thrown_out_is_not_fetched_when_a_publisher_comes_back() -> None:
    """A Track larger than the cache: only what was missed is brought."""
    track = make_track(b"k", one_subgroup=True)
    async with network(track, relay_options={"cache_bytes": 300_000}) as net:
        reading = asyncio.ensure_future(collect(await join(net.sessions[0], track.name)))
        for group in range(20):
            filled(track, [group], 2, SIZE)
            await asyncio.sleep(0.1)
        net.links[0].cut()
        filled(track, [20], 2, SIZE)
        await asyncio.sleep(0.5)
        link, _ = await net.publish(net.tracks)
        await asyncio.sleep(2)
        assert 2 * SIZE < link.client.stats.sent < 3 * SIZE
        filled(track, [21], 2, SIZE)
        await asyncio.sleep(1)
        net.end(track)
        check_exactly_once(track, objects(await reading))
