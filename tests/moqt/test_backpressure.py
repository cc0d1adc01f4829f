"""Who reads slowly slows the publisher down; nothing piles up on the way, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from moqt import Fill, Limits, Location, LocationFilter, QuicOptions, ReceivedObject, StreamEnd, Subscription
from moqt.quic.api import WATERMARK
from tests.moqt.scene import (
    EVERYTHING,
    SLICE,
    at_hand,
    check_exactly_once,
    collect,
    filled,
    make_track,
    noise,
    objects,
    piece,
    quiet,
    sessions,
)

pytestmark = pytest.mark.virtual

MIB = 1 << 20
OBJECT = 64 * 1024


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_consumer_that_stops_reading_while_64_mib_are_published(seed: int) -> None:
    """The publisher publishes all it has at once; the bytes wait in its Track, not in QUIC."""
    track = make_track(b"k")
    groups, per_group = 16, 64
    options = QuicOptions(max_data=8 * MIB, max_stream_data=MIB)
    limits = Limits(receive_buffer=2 * MIB)
    async with sessions(track, seed=seed, jitter=0.005, limits=limits, client=options) as scene:
        subscription = await scene.subscriber.subscribe(track.name)
        for group in range(groups):
            filled(track, [group], per_group, OBJECT)
            await asyncio.sleep(0.001)
        scene.end(track)
        await quiet()
        stopped_at = scene.sender.stats.sent
        await quiet()
        assert scene.sender.stats.sent == stopped_at  # It has really stopped.

        items = at_hand(subscription)
        held = sum(len(item.payload) for item in objects(items))
        assert limits.receive_buffer - OBJECT < held <= limits.receive_buffer + groups * OBJECT
        assert scene.receiver.stats.peak_held <= options.max_data
        in_flight = 2 * groups * OBJECT  # One Object waits and one is gathered, for each stream.
        assert stopped_at <= limits.receive_buffer + in_flight + options.max_data + SLICE

        items += await collect(subscription)
        assert subscription.done is not None
        assert subscription.done.stream_count == groups
        assert len([item for item in items if isinstance(item, StreamEnd)]) == groups
        check_exactly_once(track, objects(items))
        assert scene.sender.stats.sent > groups * per_group * OBJECT
        assert scene.sender.stats.peak_unsent <= WATERMARK + SLICE
        assert scene.receiver.stats.peak_held <= options.max_data


async def test_a_fetch_that_is_not_read_stops_the_publisher_too() -> None:
    track = make_track(b"k")
    filled(track, range(8), 64, OBJECT)
    options = QuicOptions(max_data=8 * MIB, max_stream_data=MIB)
    limits = Limits(receive_buffer=2 * MIB)
    async with sessions(track, limits=limits, client=options) as scene:
        fetch = await scene.subscriber.fetch(track.name, filter=EVERYTHING)
        await quiet()
        assert scene.sender.stats.sent <= limits.receive_buffer + options.max_stream_data + 2 * OBJECT
        items = at_hand(fetch)
        assert sum(len(item.payload) for item in objects(items)) <= limits.receive_buffer + OBJECT
        check_exactly_once(track, objects(items + await collect(fetch)))
        assert scene.sender.stats.peak_unsent <= WATERMARK + SLICE


@pytest.mark.parametrize("publisher_is_client", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_160_groups_while_the_peer_grants_3_streams(seed: int, publisher_is_client: bool) -> None:
    tracks = [make_track(b"k"), make_track(b"v")]
    few = QuicOptions(max_uni_streams=3)
    async with sessions(
        *tracks,
        publisher_is_client=publisher_is_client,
        seed=seed,
        jitter=0.02,
        loss=0.05,
        ragged=True,
        client=few,
        server=few,
    ) as scene:
        subscriptions = [await scene.subscriber.subscribe(track.name) for track in tracks]
        for group in range(80):
            for track in tracks:
                filled(track, [group], 2, 3000)
        for track in tracks:
            scene.end(track)
        for track, subscription in zip(tracks, subscriptions, strict=True):
            items = await collect(subscription)
            check_exactly_once(track, objects(items))
            assert subscription.done is not None
            assert subscription.done.stream_count == 80


@pytest.mark.requirement("R9b")
async def test_160_subgroup_streams_at_once() -> None:
    """80 layers and two tracks: the first Object of each Group has come before the first Group ends."""
    tracks = [make_track(b"k"), make_track(b"v")]
    async with sessions(*tracks) as scene:
        subscriptions = [await scene.subscriber.subscribe(track.name) for track in tracks]

        async def take(subscription: Subscription, count: int) -> list[Location]:
            items = [await anext(subscription) for _ in range(count)]
            return [item.location for item in items if isinstance(item, ReceivedObject)]

        for object_id in range(3):
            for group in range(80):
                for track in tracks:
                    piece(track, group, object_id, 1000)
            for subscription in subscriptions:
                got = await take(subscription, 80)
                assert sorted(got) == [Location(group, object_id) for group in range(80)]
        for track in tracks:
            for group in range(80):
                track.end_group(group, 3)
            scene.end(track)
        for subscription in subscriptions:
            ends = [item for item in await collect(subscription) if isinstance(item, StreamEnd)]
            assert sorted(end.group for end in ends if end.group is not None and end.code is None) == [
                *range(80)
            ]
            assert subscription.done is not None
            assert subscription.done.stream_count == 80


@pytest.mark.parametrize("way", ["subscription", "fill", "fetch"])
async def test_an_object_larger_than_the_windows(way: str) -> None:
    """8 MiB through a stream window of 256 KiB and a connection window of 1 MiB."""
    track = make_track(b"k")
    small = QuicOptions(max_data=MIB, max_stream_data=MIB // 4)
    size = 8 * MIB
    limits = Limits(receive_buffer=MIB)
    async with sessions(track, limits=limits, client=small, jitter=0.002, seed=5) as scene:
        if way != "subscription":
            piece(track, 0, 0, size)
        if way == "fetch":
            items = await collect(await scene.subscriber.fetch(track.name, filter=EVERYTHING))
        else:
            fill = Fill(filter=EVERYTHING) if way == "fill" else None
            subscription = await scene.subscriber.subscribe(track.name, fill=fill)
            if way == "subscription":
                piece(track, 0, 0, size)
            scene.end(track)
            items = await collect(subscription)
        (received,) = objects(items)
        assert received.payload == noise(Location(0, 0), size)
        assert scene.sender.stats.peak_unsent <= WATERMARK + SLICE
        assert scene.receiver.stats.peak_held <= small.max_data


async def test_one_of_two_subscriptions_stops_reading() -> None:
    """Its stream is throttled; the other subscription gets all, and later so does the first one."""
    tracks = [make_track(b"k"), make_track(b"v")]
    async with sessions(*tracks, limits=Limits(receive_buffer=MIB)) as scene:
        stopped, running = [await scene.subscriber.subscribe(track.name) for track in tracks]
        for track in tracks:
            filled(track, [0], 512, OBJECT)
            scene.end(track)
        check_exactly_once(tracks[1], objects(await collect(running)))
        items = at_hand(stopped)
        assert sum(len(item.payload) for item in objects(items)) <= MIB + OBJECT
        check_exactly_once(tracks[0], objects(items + await collect(stopped)))


async def test_a_subscription_that_stops_reading_many_groups() -> None:
    """Many streams that are not read fill no more than their windows; requests and fetches go on."""
    slow, quick = make_track(b"k"), make_track(b"v")
    filled(quick, range(4), 16, OBJECT)
    options = QuicOptions(max_data=16 * MIB, max_stream_data=MIB // 2)
    async with sessions(slow, quick, limits=Limits(receive_buffer=MIB), client=options) as scene:
        stopped = await scene.subscriber.subscribe(slow.name)
        for group in range(24):
            filled(slow, [group], 16, OBJECT)
        await quiet()
        fetch = await scene.subscriber.fetch(quick.name, filter=LocationFilter.absolute_start(0, 0))
        check_exactly_once(quick, objects(await collect(fetch)))
        scene.end(slow)
        check_exactly_once(slow, objects(at_hand(stopped) + await collect(stopped)))
