"""Objects that a relay has in part only, and what it takes for the end of something."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from moqt import Location, LocationFilter, ReceivedObject, StreamEnd, Track
from moqt.errors import DoneCode, RequestRejected, ResetCode
from moqt.filters import GroupOrder
from moqt.tracks import Tracks
from tests.kvcs.stage import Wiretap
from tests.moqt.scene import (
    EVERYTHING,
    NAMESPACE,
    check_exactly_once,
    collect,
    filled,
    make_track,
    noise,
    objects,
    piece,
)
from tests.relay.network import Network, join, network, until

pytestmark = pytest.mark.virtual

SIZE = 100_000


async def half_an_object(net: Network, track: Track) -> None:
    """The relay has a part of Object {0, 0}, and its publisher is gone."""
    await asyncio.sleep(1)
    piece(track, 0, 0, SIZE)
    await until(
        lambda: (
            track.name in net.relays[0].feeds
            and any(0 < item.missing < 60_000 for item in net.cached(track.name).kept())
        )
    )
    net.links[0].cut()
    await asyncio.sleep(0.1)


def check_payloads(received: list[ReceivedObject]) -> None:
    for item in received:
        assert item.payload == noise(item.location, SIZE)


@pytest.mark.parametrize("pressure", [False, True])
async def test_half_an_object_that_was_evicted_is_never_written_on(pressure: bool) -> None:
    """moqt 12.6, 15 #13: its stream is reset; the next Object does not go into the middle of it."""
    track, other = make_track(b"k", one_subgroup=True), make_track(b"other")
    async with network(track, window=16384, relay_options={"cache_bytes": 3 * SIZE}) as net:
        others = Tracks()
        others.add(other)
        others.announce(NAMESPACE)
        await net.publish(others)
        live = await join(net.sessions[0], track.name)
        drain = asyncio.create_task(collect(await join(net.sessions[0], other.name)))
        await half_an_object(net, track)
        if pressure:
            for number in range(4):
                piece(other, 0, number, SIZE)
            await asyncio.sleep(3)
        else:
            for item in list(net.cached(track.name).kept()):
                net.cached(track.name).evict(item)
        await net.publish(net.tracks)
        for number in range(1, 3):
            piece(track, 0, number, SIZE)
        await asyncio.sleep(15)
        track.end_group(0, 3)
        net.end(track)
        others.remove(other.name, DoneCode.TRACK_ENDED)
        items = await collect(live)
        await drain
    check_payloads(objects(items))
    assert any(isinstance(item, StreamEnd) and item.code is not None for item in items)


async def test_the_code_of_a_reset_inside_an_object_is_passed_on() -> None:
    """moqt 15 #15."""
    track = make_track(b"k", one_subgroup=True)
    tracks = Tracks()
    tracks.add(track)
    tracks.announce(NAMESPACE)
    async with network(window=16384) as net:
        _, publisher = await net.publish(tracks)
        live = await join(net.sessions[0], track.name)
        await asyncio.sleep(1)
        piece(track, 0, 0, SIZE)
        await until(lambda: any(0 < item.missing < 60_000 for item in net.cached(track.name).kept()))
        (delivery,) = publisher.publishing._subscriptions
        delivery._reset((0, 0), ResetCode.DELIVERY_TIMEOUT)
        await asyncio.sleep(1)
        tracks.remove(track.name, DoneCode.TRACK_ENDED)
        ends = [item for item in await collect(live) if isinstance(item, StreamEnd)]
    assert [item.code for item in ends] == [ResetCode.DELIVERY_TIMEOUT]


@pytest.mark.parametrize("cache", [0, 3 * SIZE, 1 << 30])
@pytest.mark.parametrize("pause", [0.0, 0.05, 0.1, 0.2])
async def test_no_stream_ends_inside_an_object(cache: int, pause: float) -> None:
    track, other = make_track(b"k", one_subgroup=True), make_track(b"other")
    async with network(track, other, window=16384, relay_options={"cache_bytes": cache}) as net:
        live = await join(net.sessions[0], track.name)
        drain = asyncio.create_task(collect(await join(net.sessions[0], other.name)))
        await half_an_object(net, track)
        await net.publish(net.tracks)
        piece(other, 0, 0, 4 * SIZE if cache else 1000)
        await asyncio.sleep(pause)
        for number in range(1, 4):
            piece(track, 0, number, SIZE)
        track.end_group(0, 4)
        await asyncio.sleep(20)
        net.end(track)
        net.end(other)
        items = await collect(live)
        await drain
    check_payloads(objects(items))
    if not any(isinstance(item, StreamEnd) and item.code is not None for item in items):
        check_exactly_once(track, objects(items))


@pytest.mark.parametrize(
    "what",
    [EVERYTHING, LocationFilter.groups(0, 9), LocationFilter.absolute_range(Location(0, 0), Location(9, 0))],
)
async def test_a_descending_fetch_says_nothing_of_what_is_published_later(what: LocationFilter) -> None:
    """moqt 10: a gap at its beginning reaches to End Location, not to the end that was asked for."""
    track = make_track(b"k")
    filled(track, range(2), 2, 100)
    async with network(track, subscribers=3) as net:
        async with await net.sessions[0].fetch(track.name, filter=what, order=GroupOrder.DESCENDING) as fetch:
            assert len(objects(await collect(fetch))) == 4
        live = await join(net.sessions[1], track.name)
        await asyncio.sleep(1)
        filled(track, range(2, 6), 2, 100)
        track.end(Location(6, 0))
        await asyncio.sleep(1)
        async with await net.sessions[2].fetch(track.name, filter=EVERYTHING) as fetch:
            check_exactly_once(track, objects(await collect(fetch)))
        net.end(track)
        check_exactly_once(track, objects(await collect(live)))


@pytest.mark.parametrize("relays", [1, 2])
async def test_the_end_of_a_group_behind_an_id_that_is_left_out(relays: int) -> None:
    """moqt 12.6: it may follow on the stream on which it came."""
    track = make_track(b"k", one_subgroup=True)
    async with network(track, relays=relays) as net:
        live = await join(net.sessions[0], track.name)
        await asyncio.sleep(1)
        for number in range(3):
            piece(track, 0, number, SIZE)
        track.end_group(0, 4)
        await asyncio.sleep(1)
        net.end(track)
        items = await collect(live)
    check_exactly_once(track, objects(items))
    assert all(item.code is None for item in items if isinstance(item, StreamEnd))


async def test_a_whole_track_that_came_before_the_subscription_stood() -> None:
    """A FETCH brings all of it, and the publisher is lost before its SUBSCRIBE_OK: it is there."""
    track = make_track(b"k")
    filled(track, range(2), 2, 100)
    track.end(Location(2, 0))
    taps: list[Wiretap] = []
    async with network(track, tap=lambda link: taps.append(Wiretap(link))) as net:
        # SUBSCRIBE_OK (0x04) of the publisher is late.
        taps[0].delay = lambda piece: 0.3 if piece.from_client and piece.data[:1] == b"\x04" else 0.0
        first = asyncio.create_task(net.sessions[0].fetch(track.name, filter=EVERYTHING))
        await until(
            lambda: (
                track.name in net.relays[0].feeds
                and net.cached(track.name).has(Location(0, 0), Location(1, 1))
            )
        )
        net.links[0].cut()
        await asyncio.sleep(0.2)
        await net.publish(net.tracks)
        with suppress(RequestRejected):  # It may have been asked too soon.
            await (await first).close()
        await asyncio.sleep(60)
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            check_exactly_once(track, objects(await collect(fetch)))


@pytest.mark.parametrize("what", [LocationFilter.groups(2, 3), EVERYTHING])
@pytest.mark.parametrize("relays", [1, 2])
async def test_a_paused_subscriber_hides_nothing_from_others(what: LocationFilter, relays: int) -> None:
    track = make_track(b"k")
    filled(track, range(2), 2, 100)
    async with network(track, subscribers=2, relays=relays) as net:
        paused = await join(net.sessions[0], track.name)
        await asyncio.sleep(1)
        await paused.update(forward=False)
        await asyncio.sleep(1)
        filled(track, range(2, 4), 2, 100)
        await asyncio.sleep(5)
        async with await net.sessions[1].fetch(track.name, filter=what) as fetch:
            got = objects(await collect(fetch))
    assert len(got) == (8 if what is EVERYTHING else 4)
