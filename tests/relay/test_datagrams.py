"""Objects in datagrams: directly, and through relays, which keep their delivery mode (moqt 12.5, 15 #3)."""

from __future__ import annotations

import asyncio

import pytest

from moqt import DoneCode, Location, ReceivedObject, Track
from moqt.filters import RangeFilter, RangeKind
from moqt.wire import (
    ObjectDatagram,
    ObjectStatus,
    Properties,
    SubgroupEncoder,
    SubgroupHeader,
    encode_datagram,
    encode_properties,
)
from tests.moqt.scene import (
    EVERYTHING,
    at_hand,
    check_exactly_once,
    collect,
    make_track,
    noise,
    objects,
    piece,
    sessions,
)
from tests.relay.network import join, network

pytestmark = pytest.mark.virtual

SIZE = 900
SOME: Properties = ((0x78, 7),)


def publish(track: Track, group: int, count: int) -> None:
    """A Group in datagrams, the first one with properties."""
    for number in range(count):
        properties = encode_properties(SOME) if not number else b""
        piece(track, group, number, SIZE, datagram=True, properties=properties)


async def test_without_a_relay() -> None:
    """Live in datagrams, and old Objects by a fill, which says how they would have come."""
    track = make_track(b"k")
    publish(track, 0, 3)
    async with sessions(track) as scene:
        before = scene.sender.stats.datagrams
        subscription = await join(scene.subscriber, track.name)
        publish(track, 1, 3)
        track.end_group(1, 3)
        await asyncio.sleep(1)
        items = [item for item in at_hand(subscription) if isinstance(item, ReceivedObject)]
        check_exactly_once(track, [item for item in items if item.payload])
        assert all(item.datagram for item in items)
        assert {item.location.group for item in items if item.fill} == {0}
        assert [item.status for item in items if not item.payload] == [ObjectStatus.END_OF_GROUP]
        assert [item.properties for item in items if item.location.object == 0] == [SOME] * 2
        assert scene.sender.stats.datagrams - before == 4
        await subscription.close()


@pytest.mark.parametrize("relays", [1, 2])
async def test_through_relays(relays: int) -> None:
    """Live, and from the caches, to which a fetch was made as well."""
    track = make_track(b"k")
    async with network(track, relays=relays, subscribers=2) as net:
        early = await join(net.sessions[0], track.name)
        for group in range(2):
            publish(track, group, 3)
            track.end_group(group, 3)
        await asyncio.sleep(1)
        before = net.upstream_bytes
        late = await join(net.sessions[1], track.name)
        fetch = await net.sessions[1].fetch(track.name, filter=EVERYTHING)
        fetched = objects(await collect(fetch))
        publish(track, 2, 3)
        await asyncio.sleep(1)
        assert net.upstream_bytes == before  # The fill and the fetch came from the cache.
        for received in (objects(at_hand(early)), objects(at_hand(late))):
            check_exactly_once(track, received)
            assert all(item.datagram for item in received)
        assert len(fetched) == 6
        assert all(item.datagram for item in fetched)
        await early.close()
        await late.close()


async def test_what_is_lost_is_fetched_by_who_wants_it() -> None:
    """A datagram that the relay did not get is a hole in its cache like any other."""
    track = make_track(b"k")
    async with network(track) as net:
        subscription = await join(net.sessions[0], track.name)
        publish(track, 0, 1)
        watchers, track._watchers = track._watchers, []
        piece(track, 0, 1, SIZE, datagram=True)  # As if it had been lost.
        track._watchers = watchers
        piece(track, 0, 2, SIZE, datagram=True)
        await asyncio.sleep(1)
        assert [item.location.object for item in objects(at_hand(subscription))] == [0, 2]
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            assert [item.location.object for item in objects(await collect(fetch))] == [0, 1, 2]
        await subscription.close()


async def test_a_paused_or_filtered_subscription_gets_none() -> None:
    track = make_track(b"k")
    async with sessions(track) as scene:
        filters = (RangeFilter(RangeKind.OBJECTID, ((1, None),)),)
        subscription = await scene.subscriber.subscribe(track.name, range_filters=filters)
        publish(track, 0, 3)
        await asyncio.sleep(1)
        assert [item.location.object for item in objects(at_hand(subscription))] == [1, 2]
        await subscription.update(forward=False)
        publish(track, 1, 3)
        await asyncio.sleep(1)
        assert not at_hand(subscription)
        await subscription.close()


async def test_an_object_that_is_too_large_is_dropped() -> None:
    """moqt 12.5: silently; a fetch brings it."""
    track = make_track(b"k")
    async with sessions(track) as scene:
        subscription = await scene.subscriber.subscribe(track.name)
        piece(track, 0, 0, 20_000, datagram=True)
        piece(track, 0, 1, SIZE, datagram=True)
        await asyncio.sleep(1)
        assert [item.location.object for item in objects(at_hand(subscription))] == [1]
        async with await scene.subscriber.fetch(track.name, filter=EVERYTHING) as fetch:
            assert len(objects(await collect(fetch))) == 2
        await subscription.close()


async def test_another_delivery_mode_makes_the_track_malformed() -> None:
    """moqt 12.5, 15 #3."""
    track = make_track(b"k")
    async with network(track) as net:
        subscription = await join(net.sessions[0], track.name)
        publish(track, 0, 1)
        await asyncio.sleep(1)
        assert len(objects(at_hand(subscription))) == 1
        alias = track._watchers[0].alias  # type: ignore[attr-defined]  # The publisher's Delivery.
        stream = net.publisher.connection.open(bidirectional=False)
        encoder = SubgroupEncoder(SubgroupHeader(alias, 0, 0, 128))
        payload = bytes(noise(Location(0, 0), SIZE))
        stream.hand(encoder.header() + encoder.object(0, SIZE) + payload, fin=True)
        await collect(subscription)
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.MALFORMED_TRACK


async def test_datagrams_of_nobody_are_dropped() -> None:
    """Of an alias that is not known, and when nobody takes what came (moqt 9)."""
    track = make_track(b"k")
    async with sessions(track) as scene:
        subscription = await scene.subscriber.subscribe(track.name)

        def send(alias: int, group: int, payload: bytes) -> None:
            datagram = ObjectDatagram(alias, Location(group, 0), 128, payload=payload)
            scene.publisher.connection.send_datagram(encode_datagram(datagram))

        send(77, 0, b"nobody")
        count = scene.subscriber.limits.receive_buffer // 1000 + 2000
        for group in range(count):
            send(subscription.alias, group, bytes(1000))
            if not group % 100:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        kept = len(objects(at_hand(subscription)))
        assert 0 < kept < count
        assert subscription._held <= scene.subscriber.limits.receive_buffer + 2000
        await subscription.close()
