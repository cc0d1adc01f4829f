"""The most urgent Object goes first, whatever was published before (moqt 14)."""

from __future__ import annotations

import asyncio

import pytest

from moqt import Fill, GroupOrder, Limits, LocationFilter, QuicOptions, StreamEnd, Subscription
from moqt.quic.api import WATERMARK
from tests.moqt.scene import (
    EVERYTHING,
    NAMESPACE,
    SLICE,
    Wire,
    check_exactly_once,
    collect,
    filled,
    make_track,
    objects,
    piece,
    quiet,
    sessions,
)

pytestmark = pytest.mark.virtual

MIB = 1 << 20
OBJECT = 64 * 1024

AHEAD = WATERMARK + 256 * 1024 + 2 * SLICE
"""Bytes that can't be overtaken any more: handed over already, or in the congestion window of the link."""


async def read_all(*subscriptions: Subscription) -> None:
    """Take everything, so that no window is in the way."""
    await asyncio.gather(*map(collect, subscriptions))


@pytest.mark.parametrize("publisher_is_client", [False, True])
async def test_64_groups_published_at_once_leave_one_after_the_other(publisher_is_client: bool) -> None:
    track = make_track(b"k")
    async with sessions(track, publisher_is_client=publisher_is_client) as scene:
        subscription = await scene.subscriber.subscribe(track.name)
        wire = Wire(scene)
        filled(track, range(64), 4, OBJECT)
        scene.end(track)
        await read_all(subscription)
        for group in range(56):
            assert wire.end(alias=0, group=group) < wire.begin(alias=0, group=group + 8)
        # Here, where no stream window is in the way, not even neighbours overlap by more than a piece.
        for group in range(63):
            assert wire.end(alias=0, group=group) < wire.end(alias=0, group=group + 1)


async def test_a_window_that_is_full_lets_the_next_group_go() -> None:
    """A Group that waits for its stream's window keeps nobody, and is first again when credit comes."""
    track = make_track(b"k")
    small = QuicOptions(max_stream_data=64 * 1024)
    async with sessions(track, client=small) as scene:
        subscription = await scene.subscriber.subscribe(track.name)
        wire = Wire(scene)
        filled(track, range(16), 4, OBJECT)
        scene.end(track)
        await read_all(subscription)
        assert wire.begin(alias=0, group=1) < wire.end(alias=0, group=0)
        assert [wire.end(alias=0, group=group) for group in range(16)] == sorted(
            wire.end(alias=0, group=group) for group in range(16)
        )


async def test_a_more_urgent_object_published_later_overtakes() -> None:
    bulk, urgent = make_track(b"bulk", priority=200), make_track(b"urgent", priority=100)
    async with sessions(bulk, urgent) as scene:
        subscriptions = [await scene.subscriber.subscribe(track.name) for track in (bulk, urgent)]
        reading = asyncio.ensure_future(read_all(*subscriptions))
        wire = Wire(scene)
        filled(bulk, range(8), 32, OBJECT)
        await wire.reached(2 * MIB)
        published_at = wire.offset
        piece(urgent, 5, 0, OBJECT)
        piece(bulk, 1000, 0, OBJECT, priority=10)  # Urgency is of the Object, not only of the Track.
        for track in (bulk, urgent):
            scene.end(track)
        await reading
        assert wire.end(alias=1) <= published_at + AHEAD + 2 * OBJECT
        assert wire.end(alias=0, group=1000) < wire.begin(alias=1)
        assert wire.end(alias=0, group=7) > 16 * MIB


async def test_the_subscriber_priority_beats_the_publisher_priority() -> None:
    tracks = [make_track(b"k", priority=0), make_track(b"v", priority=255)]
    async with sessions(*tracks) as scene:
        first = await scene.subscriber.subscribe(tracks[0].name, priority=200)
        second = await scene.subscriber.subscribe(tracks[1].name, priority=10)
        wire = Wire(scene)
        for track in tracks:
            filled(track, range(4), 4, OBJECT)
            scene.end(track)
        await read_all(first, second)
        assert wire.end(alias=1) < wire.begin(alias=0)


async def test_the_subscriber_priority_is_changed_by_an_update() -> None:
    tracks = [make_track(b"k"), make_track(b"v")]
    async with sessions(*tracks) as scene:
        first = await scene.subscriber.subscribe(tracks[0].name, priority=200)
        second = await scene.subscriber.subscribe(tracks[1].name, priority=100)
        wire = Wire(scene)
        for track in tracks:
            filled(track, range(8), 16, OBJECT)  # 8 MiB each.
            scene.end(track)
        reading = asyncio.ensure_future(read_all(first, second))
        await wire.reached(2 * MIB)
        assert {alias for alias, _ in wire.order} == {1}
        await first.update(priority=10)
        updated_at = wire.offset
        await reading
        assert wire.begin(alias=0) <= updated_at + AHEAD
        assert wire.end(alias=0) <= updated_at + AHEAD + 8 * MIB + 10_000
        assert wire.end(alias=0) < wire.end(alias=1)


async def test_the_priority_of_a_fetch_is_changed_by_an_update() -> None:
    tracks = [make_track(b"k"), make_track(b"v")]
    for track in tracks:
        filled(track, range(8), 16, OBJECT)
    async with sessions(*tracks) as scene:
        wire = Wire(scene)
        slow = await scene.subscriber.fetch(tracks[0].name, filter=EVERYTHING, priority=250)
        quick = await scene.subscriber.fetch(tracks[1].name, filter=EVERYTHING, priority=100)
        taking = [asyncio.ensure_future(collect(fetch)) for fetch in (slow, quick)]
        await wire.reached(2 * MIB)
        await slow.update(priority=3)
        await taking[0]
        assert not taking[1].done()
        await taking[1]
        ends = [mark.header for mark in wire.ends]
        assert ends[-1] != ends[0]  # What was behind at first came to its end before the other.


async def test_two_equal_tracks_alternate() -> None:
    tracks = [make_track(b"k"), make_track(b"v")]
    async with sessions(*tracks) as scene:
        subscriptions = [await scene.subscriber.subscribe(track.name) for track in tracks]
        wire = Wire(scene)
        for track in tracks:
            filled(track, range(2), 64, 32 * 1024)
            scene.end(track)
        await read_all(*subscriptions)
        sent = {0: 0, 1: 0}
        total = {alias: sum(size for known, size in wire.order if known == alias) for alias in sent}
        for alias, size in wire.order:
            sent[alias] += size
            if sent[0] < total[0] and sent[1] < total[1]:
                assert abs(sent[0] - sent[1]) <= 2 * SLICE
        assert sent == total


@pytest.mark.parametrize("way", ["live", "fill", "fetch"])
async def test_group_order_descending(way: str) -> None:
    track = make_track(b"k")
    descending = GroupOrder.DESCENDING
    async with sessions(track) as scene:
        if way != "live":
            filled(track, range(16), 2, OBJECT)
        wire = Wire(scene, descending)
        if way == "fetch":
            fetch = await scene.subscriber.fetch(track.name, filter=EVERYTHING, order=descending)
            items = await collect(fetch)
        else:
            fill = Fill(filter=EVERYTHING, order=descending)
            subscription = await scene.subscriber.subscribe(track.name, order=descending, fill=fill)
            if way == "live":
                filled(track, range(16), 2, OBJECT)
            scene.end(track)
            items = await collect(subscription)
        expected = [(group, number) for group in reversed(range(16)) for number in range(2)]
        assert [(mark.location.group, mark.location.object) for mark in wire.ends] == expected
        check_exactly_once(track, objects(items))


async def test_a_fill_goes_before_the_live_objects_of_its_group() -> None:
    track = make_track(b"k")
    for number in range(128):
        piece(track, 0, number, OBJECT)
    async with sessions(track) as scene:
        wire = Wire(scene)
        subscription = await scene.subscriber.subscribe(
            track.name, filter=LocationFilter.next_object(), fill=Fill(filter=EVERYTHING)
        )
        assert subscription.expects_fill
        for number in range(128, 136):
            piece(track, 0, number, OBJECT)
        track.end_group(0, 136)
        published_at = wire.offset
        scene.end(track)
        items = await collect(subscription)
        assert published_at + AHEAD < wire.end()  # The fill was still under way.
        assert wire.end() < wire.begin(alias=0)
        check_exactly_once(track, objects(items))
        assert [item.fill for item in objects(items)] == [True] * 128 + [False] * 8


async def test_a_fill_in_the_other_order_yields_to_the_live_objects() -> None:
    track = make_track(b"k")
    filled(track, range(8), 16, OBJECT)
    async with sessions(track) as scene:
        wire = Wire(scene, GroupOrder.DESCENDING)
        fill = Fill(filter=EVERYTHING, order=GroupOrder.DESCENDING)
        subscription = await scene.subscriber.subscribe(track.name, fill=fill)
        filled(track, [8], 4, OBJECT)
        published_at = wire.offset
        scene.end(track)
        items = await collect(subscription)
        assert wire.end(alias=0) <= published_at + AHEAD + 4 * OBJECT < wire.end()
        check_exactly_once(track, objects(items))


async def test_an_urgent_fill_goes_before_everything_live() -> None:
    track, live = make_track(b"k"), make_track(b"v")
    filled(track, range(8), 16, OBJECT)
    async with sessions(track, live) as scene:
        wire = Wire(scene)
        watching = await scene.subscriber.subscribe(live.name, priority=50)
        filled(live, range(8), 16, OBJECT)
        scene.end(live)
        reading = asyncio.ensure_future(collect(watching))
        await wire.reached(MIB)
        subscription = await scene.subscriber.subscribe(track.name, fill=Fill(filter=EVERYTHING, priority=1))
        asked_at = wire.offset
        scene.end(track)
        await collect(subscription)
        await reading
        assert wire.begin() <= asked_at + AHEAD
        assert wire.end() < wire.end(alias=0)


async def test_requests_go_through_while_data_waits() -> None:
    """Of the 32 MiB that wait, nothing delays a message by more than the round trip that it may take until
    the congestion window has room.
    """
    track = make_track(b"k")
    async with sessions(track) as scene:
        clock = asyncio.get_running_loop().time
        subscription = await scene.subscriber.subscribe(track.name)
        wire = Wire(scene)
        reading = asyncio.ensure_future(collect(subscription))
        filled(track, range(64), 8, OBJECT)
        await wire.reached(MIB)
        started = clock()
        await scene.subscriber.track_status(track.name)
        await subscription.update(priority=7)
        await scene.publisher.publish_namespace(NAMESPACE)
        watch = await scene.subscriber.subscribe_namespace(NAMESPACE[:1])
        scene.tracks.announce(NAMESPACE)
        await anext(watch)
        await scene.subscriber.goaway()
        await scene.publisher.goaway_received.wait()
        # 10 messages, one after the other, of which the publisher sent 5 while it had data to send.
        assert clock() - started <= (10 + 5 * 2) * scene.link.latency + 1e-9
        assert not reading.done()
        assert wire.offset < 32 * MIB
        await watch.close()
        scene.end(track)
        check_exactly_once(track, objects(await reading))


async def test_requests_go_through_while_the_windows_are_full() -> None:
    """A consumer that reads nothing has taken all the credit for data, but not what requests need."""
    track = make_track(b"k")
    options = QuicOptions(max_data=2 * MIB, max_stream_data=MIB)
    limits = Limits(receive_buffer=OBJECT)
    async with sessions(track, limits=limits, client=options) as scene:
        subscription = await scene.subscriber.subscribe(track.name)
        filled(track, range(16), 8, OBJECT)
        await quiet()
        assert scene.sender.credit == 0
        assert (await scene.subscriber.track_status(track.name)).largest == track.largest
        await subscription.update(priority=7)
        await scene.publisher.publish_namespace(NAMESPACE)
        async with await scene.subscriber.subscribe_namespace(NAMESPACE[:1]) as watch:
            for number in range(300):
                scene.tracks.announce((*NAMESPACE, b"%d" % number))
                assert (await anext(watch)).present
        scene.end(track)
        items = await collect(subscription)
        check_exactly_once(track, objects(items))
        assert len([item for item in items if isinstance(item, StreamEnd)]) == 16
