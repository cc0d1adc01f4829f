"""What was published while a publisher was away, and comes late or never: nobody takes a part for the
whole (moqt 12.6).
"""

from __future__ import annotations

import asyncio

import pytest

from moqt import Location, ReceivedObject, StreamEnd
from moqt.errors import DoneCode
from moqt.relay.followed import FollowedTrack
from moqt.track import TrackWatcher
from tests.moqt.scene import check_exactly_once, collect, make_track, objects, piece
from tests.relay.network import join, network, until

pytestmark = pytest.mark.virtual


def locations(received: list[ReceivedObject]) -> list[tuple[int, int]]:
    return [(item.location.group, item.location.object) for item in received]


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_publisher_that_is_back_before_its_loss_is_noticed(relays: int, goes_on: bool) -> None:
    """What it published in between goes before what comes now, on the stream of the Subgroup."""
    track = make_track(b"k", one_subgroup=True)
    async with network(track, relays=relays) as net:
        live = await join(net.sessions[0], track.name)
        reading = asyncio.create_task(collect(live))
        for number in range(2):
            piece(track, 0, number, 1000)
        await asyncio.sleep(1)
        net.links[0].stall()
        for number in range(2, 4):
            piece(track, 0, number, 1000)
        await asyncio.sleep(1)
        await net.publish(net.tracks)
        await asyncio.sleep(1)
        for number in range(4, 6):
            piece(track, 0, number, 1000)
        if not goes_on:
            track.end_group(0, 6)
        await asyncio.sleep(1)
        net.links[0].cut()
        await asyncio.sleep(3)
        if goes_on:
            piece(track, 0, 6, 1000)
            track.end_group(0, 7)
        piece(track, 1, 0, 1000)
        track.end_group(1, 1)
        await asyncio.sleep(1)
        net.end(track)
        items = await reading
    check_exactly_once(track, objects(items))
    assert locations(objects(items)) == sorted(locations(objects(items)))
    assert all(item.code is None for item in items if isinstance(item, StreamEnd))


@pytest.mark.parametrize("same_group", [True, False])
async def test_what_nobody_has_any_more_is_no_end(same_group: bool) -> None:
    """The publisher is back, and ends the Track before the relay could ask for what it had missed."""
    track = make_track(b"k", one_subgroup=True)
    async with network(track) as net:
        live = await join(net.sessions[0], track.name)
        piece(track, 0, 0, 1000)
        await asyncio.sleep(1)
        net.links[0].cut()
        piece(track, 0, 1, 1000)
        if not same_group:
            track.end_group(0, 2)
            piece(track, 1, 0, 1000)
            track.end_group(1, 1)
        await asyncio.sleep(0.1)
        await net.publish(net.tracks)
        await until(lambda: net.relays[0].feeds[track.name]._recovery is not None)
        group, number = (0, 2) if same_group else (2, 0)
        piece(track, group, number, 1000)
        track.end_group(group, number + 1)
        track.end(Location(3, 0))
        net.end(track)
        items = await collect(live)
    ends = [item for item in items if isinstance(item, StreamEnd) and item.group == 0]
    assert [item.code is None for item in ends] == [False]
    assert live.done is not None
    assert live.done.status != DoneCode.TRACK_ENDED


@pytest.mark.parametrize("cache", [0, 200_000, 1 << 30])
async def test_what_was_missed_is_more_than_the_cache_holds(cache: int) -> None:
    """It is told by a reset, and the live Objects go on; the relay does not fetch it again and again."""
    track = make_track(b"k", one_subgroup=True)
    size, missed, more = 40_000, 11, 30
    async with network(track, relay_options={"cache_bytes": cache}) as net:
        live = await join(net.sessions[0], track.name)
        reading = asyncio.create_task(collect(live))
        piece(track, 0, 0, size)
        await asyncio.sleep(1)
        net.links[0].cut()
        for number in range(1, missed + 1):
            piece(track, 0, number, size)
        await asyncio.sleep(0.1)
        net.links[0], _ = await net.publish(net.tracks)
        for number in range(missed + 1, missed + 1 + more):
            await asyncio.sleep(1)
            piece(track, 0, number, size)
        await asyncio.sleep(20)
        assert net.relays[0].feeds[track.name]._recovery is None
        assert net.upstream_bytes < 2 * size * (1 + missed + more)
        net.end(track)
        items = await reading
    got = locations(objects(items))
    assert got == sorted(set(got))
    assert got[-1] == (0, missed + more)
    if got != [(0, number) for number in range(1 + missed + more)]:
        assert cache < 1 << 30
        assert any(isinstance(item, StreamEnd) and item.code is not None for item in items)
        assert live.done is not None
        assert live.done.status != DoneCode.TRACK_ENDED


async def test_what_is_promised_to_those_who_go_on() -> None:
    """What follows the Largest Object of that moment, even if the answer to the pause comes later."""
    track, watcher = FollowedTrack(make_track(b"k").name), TrackWatcher()
    watcher.paused = True
    track.watch(watcher)
    for told, later in ((4, 9), (12, 15)):
        track.largest = Location(0, told)
        watcher.paused = False
        track.steer()
        track.largest = Location(0, later)
        track.steer()
        assert track.live_start == Location(0, told + 1)
        watcher.paused = True
        track.steer()
