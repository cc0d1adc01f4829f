"""One relay, or two in a row, between a publisher and its subscribers."""

from __future__ import annotations

import asyncio

import pytest

from moqt import Track
from tests.moqt.scene import check_exactly_once, collect, filled, make_track, objects, piece
from tests.relay.network import join, network

pytestmark = pytest.mark.virtual

GROUPS, PER_GROUP, SIZE = 3, 3, 3000


def steps(track: Track) -> list[tuple[int, int]]:
    """What is published, in order; Object PER_GROUP stands for the end of the Group."""
    return [(group, object_id) for group in range(GROUPS) for object_id in range(PER_GROUP + 1)]


def publish(track: Track, step: tuple[int, int]) -> None:
    group, object_id = step
    if object_id < PER_GROUP:
        piece(track, group, object_id, SIZE)
    else:
        track.end_group(group, PER_GROUP)


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("boundary", range(GROUPS * (PER_GROUP + 1) + 1))
@pytest.mark.parametrize("warm", [False, True])
async def test_late_join_at_every_object_boundary(relays: int, boundary: int, warm: bool) -> None:
    """Exactly once, byte for byte, whether the relays have the Track or not."""
    track = make_track(b"k", one_subgroup=True)
    async with network(track, relays=relays, subscribers=2, seed=boundary, jitter=0.004) as net:
        early = await join(net.sessions[0], track.name) if warm else None
        for step in steps(track)[:boundary]:
            publish(track, step)
            await asyncio.sleep(0.003)
        subscription = await join(net.sessions[1], track.name)
        for step in steps(track)[boundary:]:
            publish(track, step)
            await asyncio.sleep(0.003)
        await asyncio.sleep(1)  # A Track that is withdrawn can't be fetched from any more.
        net.end(track)
        items = objects(await collect(subscription))
        check_exactly_once(track, items)
        if early is not None:
            check_exactly_once(track, objects(await collect(early)))


async def test_upstream_bytes_are_one_times_for_eight_subscribers() -> None:
    track = make_track(b"k", one_subgroup=True)
    async with network(track, subscribers=8) as net:
        subscriptions = [await join(session, track.name) for session in net.sessions]
        before = net.upstream_bytes
        for group in range(8):
            filled(track, [group], 4, 50_000)
            await asyncio.sleep(0.01)
        late = [await join(session, track.name) for session in (await net.subscriber())[1:]]
        net.end(track)
        for subscription in [*subscriptions, *late]:
            check_exactly_once(track, objects(await collect(subscription)))
        assert net.upstream_bytes - before < 1.01 * 8 * 4 * 50_000
