"""Back-pressure and priority: little waits in QUIC, the most urgent goes first, nothing is lost (moqt 14)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import pytest

from moqt.errors import DoneCode, StreamReset
from moqt.filters import GroupOrder, Location, LocationFilter
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.quic.api import WATERMARK, QuicOptions
from moqt.quic.memory import MemoryConnection
from moqt.session import Session
from moqt.subscribing import Fill, Item, ReceivedObject, Subscription
from moqt.track import Track
from moqt.wire import FetchOk, Parameters, Subscribe, SubscribeOk
from tests.moqt.ends import (
    NAME,
    NAMESPACE,
    OTHER,
    WHOLE,
    At,
    Ends,
    check_once,
    collect,
    hostile,
    objects_of,
    places,
    publish,
    publish_groups,
    sessions,
    tables_of,
)
from tests.moqt.raw import subgroup, subscribed

pytestmark = pytest.mark.virtual

SLICE = 64 * 1024
MIB = 1024 * 1024
ALL = LocationFilter.absolute_start(0, 0)


def held_by(session: Session) -> int:
    """Bytes that have arrived at a session and were not taken by its application."""
    connection = session.connection
    assert isinstance(connection, MemoryConnection)
    receptions = [made for made in session._requests if isinstance(made, Subscription)]
    return connection.held + sum(reception._held for reception in receptions)


@pytest.mark.parametrize("live", [True, False])
async def test_a_consumer_that_stops_reading(live: bool) -> None:
    """64 MiB are published meanwhile: the publisher has at most the watermark in QUIC, the receiver at most
    its buffer and its window; then all comes, once.
    """
    piece = bytes(range(256)) * 4096
    count = 64
    options = QuicOptions(max_data=4 * MIB, max_stream_data=MIB // 2, max_uni_streams=5)
    limits = Limits(receive_buffer=3 * MIB)
    # All that has arrived of a new stream is read before it is known whose it is: of 4 streams beside the
    # control stream, a window each. The windows themselves may be full.
    bound = limits.receive_buffer + 4 * options.max_stream_data + options.max_data
    async with sessions(limits=limits, client=options, window=MIB) as ends:
        publisher, _ = ends.connections
        if live:
            subscription = await ends.subscriber.subscribe(NAME)
        for group in range(count):
            ends.track.append(group, 0, piece)
            ends.track.end_group(group, 1)
            await asyncio.sleep(0.001)
        if not live:
            subscription = await ends.subscriber.subscribe(NAME, fill=WHOLE)
        await asyncio.sleep(60)
        assert publisher.stats.peak_unsent <= WATERMARK + SLICE
        assert held_by(ends.subscriber) <= bound
        assert publisher.stats.sent < 16 * MIB
        found: list[At] = []
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        async for item in subscription:
            if isinstance(item, ReceivedObject) and not item.status:
                assert item.payload == piece
                found.append((item.location.group, item.location.object))
                assert held_by(ends.subscriber) <= bound
                await asyncio.sleep(0.01)
        check_once(found, [(group, 0) for group in range(count)])
        assert publisher.stats.peak_unsent <= WATERMARK + SLICE


async def test_small_objects_count_for_what_they_cost() -> None:
    """Empty Objects, ends of streams and notices have no payload, and are bounded all the same."""
    limits = Limits(receive_buffer=10_000)
    options = QuicOptions(max_data=65536, max_stream_data=4096)
    async with sessions(limits=limits, client=options) as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        for number in range(20_000):
            ends.track.append(0, number, b"")
        await asyncio.sleep(10)
        assert len(subscription._items) < 100
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        assert len(objects_of(await collect(subscription))) == 20_000


async def test_notices_are_bounded() -> None:
    async with subscribed(limits=Limits(receive_buffer=10_000)) as (session, peer, subscription, _talk):
        asking = asyncio.ensure_future(session.fetch(NAME, filter=ALL))
        talk, request = await peer.request()
        await talk.say(FetchOk(False, Location(99999, 0)))
        fetch = await asking
        marker = b"".join(bytes.fromhex("808c") + bytes((1, n)) for n in range(100))
        await peer.send(b"\x05" + bytes((request.request_id,)) + marker * 100, fin=True)
        await asyncio.sleep(1)
        assert len(fetch._items) < 100
        assert len(await collect(fetch)) == 10_001
        await subscription.close()


async def test_one_slow_reader_does_not_hold_up_another() -> None:
    """Each has its own buffer; what it does not read waits in its own streams."""
    limits = Limits(receive_buffer=MIB)
    options = QuicOptions(max_data=16 * MIB, max_stream_data=MIB)
    async with sessions(limits=limits, client=options) as ends:
        ends.tracks.add(other := Track(OTHER, one_subgroup=True))
        slow = await ends.subscriber.subscribe(NAME)
        quick = await ends.subscriber.subscribe(OTHER)
        for track in (ends.track, other):
            for number in range(20):
                track.append(0, number, bytes(MIB))
            track.end_group(0, 20)
        ends.tracks.remove(OTHER, DoneCode.TRACK_ENDED)
        assert len(objects_of(await collect(quick))) == 20
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        assert len(objects_of(await collect(slow))) == 20


async def test_requests_are_answered_while_data_is_stuck() -> None:
    """The peer reads no data, and still gets replies (moqt 3.1)."""
    options = QuicOptions(max_data=MIB, max_stream_data=256 * 1024)
    limits = Limits(receive_buffer=1000)
    async with sessions(limits=limits, client=options) as ends:
        ends.tracks.add(Track(OTHER))
        await ends.subscriber.subscribe(NAME)
        for group in range(10):
            ends.track.append(group, 0, bytes(MIB))
        await asyncio.sleep(1)
        started = asyncio.get_running_loop().time()
        for _ in range(5):
            assert (await ends.subscriber.track_status(OTHER)).largest is None
        assert asyncio.get_running_loop().time() - started < 0.5


# Stream credit.


def layers(track: Track, count: int, blocks: int = 2) -> None:
    publish_groups(track, range(count), blocks)


@pytest.mark.requirement("R9b")
@pytest.mark.parametrize("credit", [3, 256])
@pytest.mark.parametrize("live", [True, False])
async def test_160_subgroup_streams_of_two_tracks(credit: int, live: bool) -> None:
    """With three streams at a time, and with credit for all of them at once."""
    options = QuicOptions(max_uni_streams=credit)
    async with sessions(client=options, window=20_000) as ends:
        ends.tracks.add(other := Track(OTHER, one_subgroup=True))
        names = (NAME, OTHER)
        if live:
            subscriptions = [await ends.subscriber.subscribe(name) for name in names]
        for group in range(80):
            for track in (ends.track, other):
                publish_groups(track, [group], 3)
        if not live:
            subscriptions = [await ends.subscriber.subscribe(name, fill=WHOLE) for name in names]
        for name in names:
            ends.tracks.remove(name, DoneCode.TRACK_ENDED)
        every = [(group, number) for group in range(80) for number in range(3)]
        for items in await asyncio.gather(*map(collect, subscriptions)):
            check_once(places(items), every)
        if live:
            assert {s.done.stream_count for s in subscriptions if s.done is not None} == {80}


@pytest.mark.requirement("R9b")
async def test_160_streams_are_open_at_once() -> None:
    """None of the Groups has ended, so all their streams stay open."""
    async with sessions(client=QuicOptions(max_uni_streams=161)) as ends:
        ends.tracks.add(other := Track(OTHER, one_subgroup=True))
        subscriptions = [await ends.subscriber.subscribe(name) for name in (NAME, OTHER)]
        for group in range(80):
            for track in (ends.track, other):
                publish(track, (group, 0))
        await asyncio.sleep(1)
        assert [len(subscription._streams) for subscription in subscriptions] == [80, 80]
        for track in (ends.track, other):
            for group in range(80):
                publish(track, (group, 1))
                track.end_group(group, 2)
            ends.tracks.remove(track.name, DoneCode.TRACK_ENDED)
        for items in await asyncio.gather(*map(collect, subscriptions)):
            check_once(places(items), [(group, number) for group in range(80) for number in range(2)])


async def test_streams_open_lazily() -> None:
    """Not when their first Object is published, but when its bytes go."""
    async with hostile(client=QuicOptions(max_data=2 * MIB, max_stream_data=MIB)) as (session, peer):
        track = next(iter(session.tracks))
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await talk.next(), SubscribeOk)
        for group in range(64):
            track.append(group, 0, bytes(300_000))
            track.end_group(group, 1)
        await asyncio.sleep(1)
        opened = 0
        while peer.connection._incoming:
            opened += 1
            await peer.connection.accept()
        assert opened <= 9  # The control stream, and what fits into the windows.


async def test_an_object_larger_than_the_window_of_its_stream() -> None:
    options = QuicOptions(max_stream_data=65536, max_data=1024 * 1024)
    async with sessions(client=options) as ends:
        content = bytes(range(256)) * 12_000
        ends.track.append(0, 0, content)
        subscription = await ends.subscriber.subscribe(NAME, fill=WHOLE)
        ends.track.append(1, 0, content[::-1])
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        received = objects_of(await collect(subscription))
        assert [item.payload for item in received] == [content, content[::-1]]


# Priority.


async def arrivals(*subscriptions: Subscription) -> list[tuple[int, At]]:
    """(which subscription, Location) of all Objects, as they come."""
    order: list[tuple[int, At]] = []

    async def read(number: int, subscription: Subscription) -> None:
        async for item in subscription:
            if isinstance(item, ReceivedObject) and not item.status:
                order.append((number, (item.location.group, item.location.object)))

    await asyncio.gather(*itertools.starmap(read, enumerate(subscriptions)))
    return order


def finish(ends: Ends, *names: FullTrackName) -> None:
    for name in names or (NAME,):
        ends.tracks.remove(name, DoneCode.TRACK_ENDED)


async def test_64_groups_at_once_go_in_order() -> None:
    """Group 0 is complete before Group 8 begins, though all were published in one go."""
    async with sessions(window=128 * 1024) as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        for group in range(64):
            for number in range(4):
                ends.track.append(group, number, bytes(32_000), priority=2 * group)
            ends.track.end_group(group, 4)
        finish(ends)
        order = [at for _, at in await arrivals(subscription)]
        assert order.index((0, 3)) < order.index((8, 0))
        for group in range(56):
            assert order.index((group, 3)) < order.index((group + 8, 0))


async def test_priority_of_the_publisher() -> None:
    """A more urgent Object overtakes what waits, whatever its Group."""
    async with sessions(track=Track(NAME), window=64 * 1024) as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        for group in range(40):
            ends.track.append(group, 0, bytes(100_000), priority=100)
            ends.track.end_group(group, 1)
        await asyncio.sleep(0.03)
        ends.track.append(99, 0, b"urgent", priority=3)
        ends.track.end_group(99, 1)
        finish(ends)
        order = [at for _, at in await arrivals(subscription)]
        assert order.index((99, 0)) < 20


async def test_priority_of_the_subscriber_comes_first() -> None:
    """Though the publisher thinks otherwise (moqt 14)."""
    async with sessions(track=Track(NAME), window=64 * 1024) as ends:
        ends.tracks.add(other := Track(OTHER))
        low = await ends.subscriber.subscribe(NAME, priority=200)
        high = await ends.subscriber.subscribe(OTHER, priority=10)
        for group in range(20):
            ends.track.append(group, 0, bytes(100_000), priority=0)
            ends.track.end_group(group, 1)
        for group in range(20):
            other.append(group, 0, bytes(100_000), priority=255)
            other.end_group(group, 1)
        finish(ends, NAME, OTHER)
        order = await arrivals(low, high)
        assert [number for number, _ in order].index(0) > 10
        last_of_high = max(index for index, (number, _) in enumerate(order) if number == 1)
        assert sum(number == 0 for number, _ in order[:last_of_high]) <= 8


async def test_an_update_of_the_priority() -> None:
    async with sessions(track=Track(NAME), window=32 * 1024) as ends:
        ends.tracks.add(other := Track(OTHER))
        one = await ends.subscriber.subscribe(NAME, priority=10)
        two = await ends.subscriber.subscribe(OTHER, priority=100)
        for track in (ends.track, other):
            for group in range(40):
                track.append(group, 0, bytes(100_000))
                track.end_group(group, 1)
        order_of = asyncio.ensure_future(arrivals(one, two))
        await two.update(priority=1)
        finish(ends, NAME, OTHER)
        order = [number for number, _ in await order_of]
        last_of_two = max(index for index, number in enumerate(order) if number == 1)
        assert order[:last_of_two].count(0) < 20


@pytest.mark.parametrize("count", [2, 5])
async def test_equal_tracks_alternate(count: int) -> None:
    async with sessions(window=64 * 1024) as ends:
        tracks = [ends.track] + [
            Track(FullTrackName(NAMESPACE, b"%d" % number), one_subgroup=True) for number in range(1, count)
        ]
        for track in tracks[1:]:
            ends.tracks.add(track)
        subscriptions = [await ends.subscriber.subscribe(track.name) for track in tracks]
        for track in tracks:
            for number in range(40):
                track.append(0, number, bytes(60_000))
            track.end_group(0, 40)
        finish(ends, *(track.name for track in tracks))
        order = [number for number, _ in await arrivals(*subscriptions)]
        for index in range(0, len(order) - 4 * count, count):
            assert set(order[index : index + 4 * count]) == set(range(count))


@pytest.mark.parametrize(
    ("order", "first"), [(GroupOrder.DESCENDING, "late"), (GroupOrder.ASCENDING, "early"), (None, "track")]
)
async def test_group_order(order: GroupOrder | None, first: str) -> None:
    """The subscription's; without one, the publisher's preference."""
    track = Track(NAME, one_subgroup=True, order=GroupOrder.DESCENDING)
    async with sessions(track=track, window=32 * 1024) as ends:
        subscription = await ends.subscriber.subscribe(NAME, order=order)
        for group in range(60):
            ends.track.append(group, 0, bytes(100_000))
            ends.track.end_group(group, 1)
        finish(ends)
        groups = [at[0] for _, at in await arrivals(subscription)]
        middle = groups[30:]
        if first == "early":
            assert groups == sorted(groups)
        else:
            assert middle == sorted(middle, reverse=True)


async def test_a_fill_goes_before_what_is_live_in_its_group() -> None:
    """moqt 14 step 4; and Groups go in order, however they are delivered (step 3)."""
    async with sessions(track=Track(NAME), window=32 * 1024) as ends:
        for group in range(4):
            ends.track.append(group, 0, bytes(400_000))
        subscription = await ends.subscriber.subscribe(NAME, fill=WHOLE)
        for group in (3, 4):
            for number in range(1, 4):
                ends.track.append(group, number, bytes(200_000))
        finish(ends)
        order = [at for _, at in await arrivals(subscription)]
        assert order.index((3, 0)) < order.index((3, 3)) < order.index((4, 3))


async def test_a_fill_in_the_other_order_yields() -> None:
    async with sessions(track=Track(NAME), window=32 * 1024) as ends:
        for group in range(10):
            ends.track.append(group, 0, bytes(300_000))
        fill = Fill(filter=LocationFilter.none(), order=GroupOrder.DESCENDING)
        subscription = await ends.subscriber.subscribe(NAME, fill=fill)
        for group in range(10, 14):
            ends.track.append(group, 0, bytes(100_000))
        finish(ends)
        order = [at[0] for _, at in await arrivals(subscription)]
        assert order.index(13) < order.index(5)
        assert [group for group in order if group < 10] == list(range(9, -1, -1))


# Credit comes back.


async def test_a_reception_that_is_closed_while_it_is_full() -> None:
    """What waits for room is let go; the windows are free again."""
    options = QuicOptions(max_data=MIB, max_stream_data=256 * 1024, max_uni_streams=3)
    async with sessions(limits=Limits(receive_buffer=1000), client=options) as ends:
        for _ in range(20):
            subscription = await ends.subscriber.subscribe(NAME, fill=WHOLE)
            group = 0 if ends.track.largest is None else ends.track.largest.group + 1
            ends.track.append(group, 0, bytes(300_000))
            ends.track.end_group(group, 1)
            await asyncio.sleep(0.2)
            await subscription.close()
        await asyncio.sleep(0.2)
        assert held_by(ends.subscriber) == 0
        assert set(tables_of(ends.subscriber).values()) == {0}
        async with await ends.subscriber.fetch(NAME, filter=ALL) as fetch:
            assert len(objects_of(await collect(fetch))) == 20


async def test_a_reception_that_fails_while_it_is_full() -> None:
    async with subscribed(limits=Limits(receive_buffer=1000), filter=LocationFilter.none()) as (
        session,
        peer,
        subscription,
        talk,
    ):
        stream = await peer.send(subgroup(*((number, bytes(900)) for number in range(50))))
        await asyncio.sleep(0.1)
        talk.stream.reset(1)
        await asyncio.sleep(0.1)
        assert stream.stopped is not None
        received: list[Item] = []
        with pytest.raises(StreamReset):
            await gather_into(received, subscription)
        assert 1 <= len(received) < 5
        assert len(session._tasks) == 2


async def gather_into(received: list[Item], items: Subscription) -> None:
    async for item in items:
        received.append(item)


@pytest.mark.parametrize("prefix", [Parameters(), Parameters(forward=False)])
async def test_no_bytes_for_nobody(prefix: Parameters) -> None:
    """What nobody wants, or is paused, costs nothing on the way."""
    async with hostile() as (session, peer):
        track = next(iter(session.tracks))
        if prefix.forward is False:
            talk = await peer.ask(Subscribe(peer.id(), NAME, prefix))
            assert isinstance(await talk.next(), SubscribeOk)
        connection = session.connection
        assert isinstance(connection, MemoryConnection)
        before = connection.stats.sent
        publish(track, *spread(50))
        await asyncio.sleep(1)
        assert connection.stats.sent == before


def spread(count: int) -> Iterable[At]:
    return [(number, 0) for number in range(count)]
