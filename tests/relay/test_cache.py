"""What a relay keeps, for how long, and how it serves what it does not have any more."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from moqt import (
    Fill,
    FullTrackName,
    GroupOrder,
    Limits,
    Location,
    LocationFilter,
    RangeNotice,
    RangeStatus,
    ReceivedObject,
    Session,
    StreamEnd,
    Subscription,
    Track,
)
from moqt.errors import DoneCode, MalformedTrack, ResetCode, StreamReset
from moqt.relay.cache import GROUP_OVERHEAD, OVERHEAD, SEGMENT, TRACK_OVERHEAD, Cache
from moqt.relay.cached import CachedTrack
from moqt.relay.inlets import FetchInlet, SubgroupInlet
from moqt.subscribing import FetchStream
from moqt.track import Hole
from moqt.wire import (
    EndOfRange,
    ObjectHeader,
    ObjectStatus,
    Properties,
    PropertyType,
    SubgroupHeader,
    decode_properties,
    encode_properties,
)
from tests.counted import Counted
from tests.moqt.scene import EVERYTHING, at_hand, collect, filled, make_track, noise, objects, piece
from tests.relay.network import Network, join, network, until

pytestmark = pytest.mark.virtual

SIZE = 10_000
ORDERS = [GroupOrder.ASCENDING, GroupOrder.DESCENDING]


def in_order(track: Track, order: GroupOrder) -> list[tuple[Location, bytes]]:
    assert track.largest is not None
    return [
        (item.location, b"".join(item.payload))
        for item in track.objects(Location(0, 0), track.largest, order)
    ]


async def fetched(
    net: Network, track: Track, order: GroupOrder, what: LocationFilter = EVERYTHING
) -> list[tuple[Location, bytes]]:
    async with await net.sessions[0].fetch(track.name, filter=what, order=order) as fetch:
        return [(item.location, bytes(item.payload)) for item in objects(await collect(fetch))]


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
async def test_fetch_over_a_cold_cache(relays: int, order: GroupOrder) -> None:
    track = make_track(b"k")
    filled(track, [0, 1, 5], 4, SIZE)
    async with network(track, relays=relays) as net:
        assert await fetched(net, track, order) == in_order(track, order)
        before = net.upstream_bytes
        assert await fetched(net, track, order) == in_order(track, order)
        assert net.upstream_bytes - before < 1000  # From the cache.


@pytest.mark.parametrize("order", ORDERS)
async def test_fetch_over_holes_after_eviction(order: GroupOrder) -> None:
    """Objects that were thrown out are fetched again, and only those."""
    track = make_track(b"k")
    filled(track, range(4), 4, SIZE)
    async with network(track) as net:
        assert await fetched(net, track, order) == in_order(track, order)
        cached = net.cached(track.name)
        for item in list(cached.kept()):
            if item.location in {Location(0, 1), Location(1, 0), Location(1, 1), Location(3, 3)}:
                cached.evict(item)
        before = net.upstream_bytes
        assert await fetched(net, track, order) == in_order(track, order)
        assert 4 * SIZE <= net.upstream_bytes - before < 4.2 * SIZE


@pytest.mark.parametrize("order", ORDERS)
async def test_what_does_not_exist_is_not_asked_for_again(order: GroupOrder) -> None:
    track = make_track(b"k")
    for group, object_id in ((0, 3), (0, 7), (4, 0), (9, 1)):
        piece(track, group, object_id, SIZE)
    async with network(track) as net:
        assert await fetched(net, track, order) == in_order(track, order)
        before = net.upstream_bytes
        assert await fetched(net, track, order) == in_order(track, order)
        part = LocationFilter.absolute_range(Location(0, 5), Location(9, 0))
        assert [location for location, _ in await fetched(net, track, order, part)] == sorted(
            [Location(0, 7), Location(4, 0)], reverse=order is GroupOrder.DESCENDING
        )
        assert net.upstream_bytes == before


async def test_fetch_ok_of_whole_groups_names_the_last_object() -> None:
    """moqt 10, 25 #7: FETCH_OK waits until that is known."""
    track = make_track(b"k")
    filled(track, range(4), 4, SIZE)
    async with network(track) as net:
        fetch = await net.sessions[0].fetch(track.name, filter=LocationFilter.groups(1, 2))
        assert len(objects(await collect(fetch))) == 8
        assert fetch.end is not None
        assert fetch.end.end == Location(2, 3)
        assert not fetch.end.end_of_track


async def test_the_cache_is_bounded_and_the_least_recently_used_goes_first() -> None:
    track = make_track(b"k")
    filled(track, range(10), 4, SIZE)
    limit = 20 * (SIZE + OVERHEAD)
    async with network(track, relay_options={"cache_bytes": limit}) as net:
        for group in range(5):
            await fetched(net, track, GroupOrder.ASCENDING, LocationFilter.groups(group, group))
        await fetched(net, track, GroupOrder.ASCENDING, LocationFilter.groups(0, 0))
        await fetched(net, track, GroupOrder.ASCENDING, LocationFilter.groups(5, 8))
        cached = net.cached(track.name)
        assert net.relays[0].cache.bytes <= limit
        kept = {item.location.group for item in cached.kept()}
        assert kept == {0, 5, 6, 7, 8}
        assert await fetched(net, track, GroupOrder.ASCENDING) == in_order(track, GroupOrder.ASCENDING)


@pytest.mark.parametrize("order", ORDERS)
async def test_a_fetch_of_more_than_the_cache_holds(order: GroupOrder) -> None:
    """Fetching upstream goes no further ahead than the subscriber reads."""
    track = make_track(b"k")
    filled(track, range(10), 4, 100_000)
    async with network(track, relay_options={"cache_bytes": 1_000_000}) as net:
        before = net.upstream_bytes
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING, order=order) as fetch:
            items = []
            async for item in fetch:
                items.append(item)
                await asyncio.sleep(0.2)
        assert [(item.location, bytes(item.payload)) for item in objects(items)] == in_order(track, order)
        assert net.upstream_bytes - before < 1.5 * 4_000_000
        assert net.relays[0].cache.bytes <= 1_000_000


async def test_an_object_that_is_being_sent_is_not_thrown_out() -> None:
    track = make_track(b"k")
    options = {"cache_bytes": 1_800_000}
    async with network(track, relay_options=options, subscribers=2) as net:
        slow = await join(net.sessions[1], track.name)
        net.links[-1].stall()
        piece(track, 0, 0, 1_000_000)
        piece(track, 0, 1, 1_000_000)
        await asyncio.sleep(1)
        other = make_track(b"other")
        net.tracks.add(other)
        filled(other, [0], 8, 100_000)
        assert await fetched(net, other, GroupOrder.ASCENDING) == in_order(other, GroupOrder.ASCENDING)
        kept = {item.location for item in net.cached(track.name).kept()}
        assert kept == {Location(0, 0), Location(0, 1)}
        net.links[-1].resume()
        track.end_group(0, 2)
        await asyncio.sleep(2)
        assert [item.location.object for item in objects(at_hand(slow))] == [0, 1]
        await fetched(net, other, GroupOrder.ASCENDING)
        assert net.relays[0].cache.bytes <= 1_800_000
        await slow.close()


async def test_expired_objects_are_unknown_and_fetched_again() -> None:
    """moqt 15 #6: MAX_CACHE_DURATION."""
    track = make_track(b"k", properties=((PropertyType.MAX_CACHE_DURATION, 5000),))
    filled(track, range(2), 2, SIZE)
    async with network(track) as net:
        whole = in_order(track, GroupOrder.ASCENDING)
        assert await fetched(net, track, GroupOrder.ASCENDING) == whole
        await asyncio.sleep(4)
        before = net.upstream_bytes
        assert await fetched(net, track, GroupOrder.ASCENDING) == whole
        assert net.upstream_bytes == before
        await asyncio.sleep(2)
        assert len(net.relays[0].cache) == 0
        assert await fetched(net, track, GroupOrder.ASCENDING) == whole
        assert net.upstream_bytes - before > 4 * SIZE


@pytest.mark.parametrize("relays", [1, 2])
async def test_the_first_bytes_pass_before_the_last_have_come(relays: int) -> None:
    """Cut-through, of a live Object, of a fill and of a fetch."""
    size = 4 << 20
    live, old = make_track(b"live"), make_track(b"old")
    piece(old, 0, 0, size)
    async with network(live, old, relays=relays, subscribers=2, window=65536) as net:
        publisher, last = net.links[0].client.stats, net.links[-2].server.stats
        subscription = await join(net.sessions[0], live.name)
        start, passed = publisher.sent, last.sent
        piece(live, 0, 0, size)
        await until(lambda: last.sent >= 100_000 + passed)
        assert publisher.sent - start < size / 2
        async with asyncio.timeout(100):
            assert (await anext(subscription)).payload == noise(Location(0, 0), size)  # type: ignore[union-attr]  # an Object
        await subscription.close()

        start, passed = publisher.sent, last.sent
        fill = await join(net.sessions[0], old.name)
        await until(lambda: last.sent >= 100_000 + passed)
        assert publisher.sent - start < size / 2
        # Another one joins in the middle and gets the same bytes.
        other = net.links[-1].server.stats
        passed = other.sent
        fetch = await net.sessions[1].fetch(old.name, filter=EVERYTHING)
        await until(lambda: other.sent >= passed + 100_000)
        assert publisher.sent - start < size
        for reception in (fill, fetch):
            item = await anext(reception)
            assert isinstance(item, ReceivedObject)
            assert item.payload == noise(Location(0, 0), size)
            await reception.close()
        assert publisher.sent - start < 1.01 * size


async def test_fill_timeout_reports_what_did_not_come() -> None:
    """moqt 7.4: End of Timed-Out Range, and on with what is here."""
    track = make_track(b"k")
    filled(track, range(3), 2, SIZE)
    async with network(track) as net:
        await fetched(net, track, GroupOrder.ASCENDING, LocationFilter.groups(2, 2))
        net.links[0].stall()
        fill = Fill(filter=EVERYTHING, timeout_ms=500)
        async with await join(net.sessions[0], track.name, fill=fill) as subscription:
            await asyncio.sleep(1)
            items = at_hand(subscription)
            assert items[0] == RangeNotice(RangeStatus.TIMED_OUT, Location(1, (1 << 64) - 1))
            assert [item.location for item in objects(items)] == [Location(2, 0), Location(2, 1)]
            assert items[-1] == StreamEnd(None, True, None)
        net.links[0].resume()


async def test_what_no_publisher_has_any_more_is_unknown() -> None:
    """moqt 10: End of Unknown Range, and on with what is here."""
    track = make_track(b"k")
    filled(track, range(3), 2, SIZE)
    async with network(track) as net:
        await fetched(net, track, GroupOrder.ASCENDING, LocationFilter.groups(1, 1))
        net.tracks.remove(track.name, DoneCode.TRACK_ENDED)
        await asyncio.sleep(0.5)
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            items = await collect(fetch)
        assert items[0] == RangeNotice(RangeStatus.UNKNOWN, Location(0, (1 << 64) - 1))
        assert [item.location for item in objects(items)] == [Location(1, 0), Location(1, 1)]
        assert items[3] == RangeNotice(RangeStatus.NON_EXISTENT, Location(1, (1 << 64) - 1))
        assert items[4] == RangeNotice(RangeStatus.UNKNOWN, Location(2, 1))


async def test_a_fetch_inside_an_object_breaks_when_the_rest_can_t_come() -> None:
    track = make_track(b"k")
    piece(track, 0, 0, 4 << 20)
    async with network(track, window=65536) as net:
        fetch = await net.sessions[0].fetch(track.name, filter=EVERYTHING)
        await asyncio.sleep(0.2)
        net.links[0].cut()
        with pytest.raises(StreamReset) as caught:
            await collect(fetch)
        assert caught.value.code == ResetCode.INTERNAL_ERROR


@pytest.mark.parametrize(("size", "most"), [(1024, 1.5), (4096, 1.15), (32768, 1.03)])
async def test_memory_against_payload(size: int, most: float) -> None:
    """What the cache takes, and that it reckons with what it takes."""
    cache = Cache(1 << 30)
    track = CachedTrack(FullTrackName((b"n",), b"t"), cache, lambda _, start, end, __: Hole(start, end))
    payload = bytes(size)
    count = 16
    for group in range(16):  # Tables grow by doubling: the sizes of them are averaged out.
        header = SubgroupHeader(0, group, 0, 128)
        if group == 1:
            tracemalloc.start()
            before = cache.bytes
        inlet = SubgroupInlet(track, header)
        for number in range(count + 8 * group):
            write = inlet.object(
                ObjectHeader(Location(group, number), 0, 128, (), b"", ObjectStatus.NORMAL, size)
            )
            assert write is not None
            write(memoryview(payload)[: size // 3])
            write(memoryview(payload)[size // 3 :])
        inlet.end(None)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    kept = sum(item.size for item in track.kept() if item.location.group)
    assert taken < most * kept
    assert 0.85 * taken < cache.bytes - before < 1.15 * taken


def header(group: int, number: int, size: int = 0, *, subgroup: int = 0) -> ObjectHeader:
    return ObjectHeader(Location(group, number), subgroup, 128, (), b"", ObjectStatus.NORMAL, size, False)


def cached_track(cache: Cache) -> CachedTrack:
    return CachedTrack(FullTrackName((b"a",), b"t"), cache, lambda _, start, end, order: Hole(start, end))


@pytest.mark.parametrize("groups", [False, True], ids=["objects", "groups"])
async def test_the_order_in_which_a_publisher_sends_costs_nothing(groups: bool) -> None:
    """Neither to take the Objects in, nor to throw them out (moqt 21): the highest IDs first, on one stream,
    and the lowest behind them, on another.
    """
    cache, count = Cache(1 << 30), 1000
    track = cached_track(cache)
    Counted.comparisons = 0
    for number in (*range(count, 2 * count), *range(count)):
        place = (Counted(number), Counted(0)) if groups else (Counted(0), Counted(number))
        track.begin(header(*place, subgroup=number // count), live=True)
    assert len(cache) == 2 * count
    cache.limit = 0
    cache.grow(0)
    assert len(cache) == 0
    assert Counted.comparisons < 200 * count


async def test_a_payload_that_came_at_once_is_compared_with_one_that_comes_in_pieces() -> None:
    """moqt 15 #3, for Objects of more than a segment."""
    size = 5 * SEGMENT + 7
    content = memoryview(noise(Location(0, 0), size))
    track = cached_track(Cache(1 << 30))
    first = track.begin(header(0, 0, size), live=True)
    assert first is not None
    first.write(content)
    second, third = (track.begin(header(0, 0, size), live=True) for _ in range(2))
    assert second is not None
    assert third is not None
    for start in range(0, size, 100_000):
        second.write(content[start : start + 100_000])
    third.write(content[: 3 * SEGMENT])
    with pytest.raises(MalformedTrack):
        third.write(memoryview(bytes(size - 3 * SEGMENT)))


async def test_pieces_of_an_object_that_is_on_its_way() -> None:
    size = 3 * SEGMENT
    content = noise(Location(0, 0), size)
    track = cached_track(Cache(1 << 30))
    writer = track.begin(header(0, 0, size), live=True)
    assert writer is not None
    [item] = track.kept()
    assert item.since(0) == ()
    arrived = 0
    for step in (1, SEGMENT - 1, 5, SEGMENT, SEGMENT - 6):
        writer.write(memoryview(content)[arrived : arrived + step])
        arrived += step
        for offset in (0, 1, arrived - 1, arrived // 2):
            assert b"".join(item.since(offset)) == content[offset:arrived]
    assert item.since(arrived) == ()


async def test_what_is_known_of_what_is_not_here_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher of every other Object, each of which is thrown out at once (moqt 21)."""
    monkeypatch.setattr("moqt.relay.cached.MAX_RANGES", 100)
    monkeypatch.setattr("moqt.relay.followed.MAX_RANGES", 100)
    cache = Cache(3 * OVERHEAD + GROUP_OVERHEAD + TRACK_OVERHEAD)
    track = cached_track(cache)
    for number in range(1000):
        track.begin(header(0, 3 * number), live=True)
        track.learn(Location(0, 3 * number + 1), Location(0, 3 * number + 1))
        track.learn(Location(1, 2 * number), Location(1, 2 * number))
        assert len(track._told) <= 100
        assert len(track.known) <= 100 + 2 * len(cache) + 1
        for item in track.kept():
            assert item.location in track.known
        assert Location(1, 2 * number) in track.known
    assert len(cache) == 3


async def test_objects_without_payload_are_not_fetched_without_end() -> None:
    """What was fetched and nobody has used stays, and so it is bounded, of whatever size it is."""
    track, hole = cached_track(Cache(1 << 30)), Hole(Location(0, 0), Location(9, 0))
    asked = (hole.start, hole.end)
    inlet = FetchInlet(track, hole, GroupOrder.ASCENDING, asked, 10_000)
    for number in range(100):
        inlet.object(header(0, number))
    waiting = asyncio.ensure_future(inlet.room())
    await asyncio.sleep(1)
    assert not waiting.done()
    for item in list(track.kept()):
        track.use(item)
    assert hole.ahead == 0
    assert await waiting


async def test_a_fetch_in_too_many_pieces_is_no_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moqt.relay.inlets.MAX_RANGES", 100)
    track, hole = cached_track(Cache(1 << 30)), Hole(Location(0, 0), Location(9, 0))
    inlet = FetchInlet(track, hole, GroupOrder.ASCENDING, (hole.start, hole.end), 10_000)

    def markers() -> None:
        for number in range(1000):
            kind = RangeStatus.UNKNOWN if number % 2 else RangeStatus.NON_EXISTENT
            inlet.marker(EndOfRange(kind, Location(0, number)))

    with pytest.raises(MalformedTrack):
        markers()
    assert len(hole.unknown) == 101


@pytest.mark.parametrize("many", ["tracks", "groups"])
async def test_what_is_around_an_object_counts(many: str) -> None:
    """A Track or a Group for each empty Object takes much more than that (moqt 21)."""
    cache = Cache(1_000_000)
    tracks = [cached_track(cache) for _ in range(2000 if many == "tracks" else 1)]
    for number in range(2000):
        tracks[number % len(tracks)].begin(header(number, 0), live=True)
    around = OVERHEAD + GROUP_OVERHEAD + (TRACK_OVERHEAD if many == "tracks" else 0)
    assert len(cache) == min(2000, (1_000_000 - (many == "groups") * TRACK_OVERHEAD) // around)
    for track in tracks:
        track.clear()
    assert cache.bytes == 0


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("how", ["fill", "fetch"])
async def test_a_stopped_reader_does_not_hold_up_who_fetches_the_same(relays: int, how: str) -> None:
    """What it does not take is fetched for the others."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(20), 4, 100_000)
    options = {"cache_bytes": 4_000_000}  # 250,000 bytes are read ahead.
    async with network(track, relays=relays, subscribers=1, relay_options=options) as net:
        limits = Limits(receive_buffer=100_000)
        _, stopped = await net.subscriber(limits=limits, window=100_000)

        async def start(session: Session, what: LocationFilter) -> Subscription | FetchStream:
            if how == "fill":
                return await join(session, track.name, fill=Fill(filter=what))
            return await session.fetch(track.name, filter=what)

        first = await start(stopped, EVERYTHING)
        await asyncio.sleep(1)
        for groups in (range(15, 20), range(20)):
            started = asyncio.get_running_loop().time()
            second = await start(net.sessions[0], LocationFilter.groups(groups[0], groups[-1]))
            received = []
            async for item in second:
                if isinstance(item, ReceivedObject) and item.payload:
                    received.append(item.location)
                    if len(received) == 4 * len(groups):
                        break
            assert received == [Location(group, number) for group in groups for number in range(4)]
            assert asyncio.get_running_loop().time() - started < 5
            await second.close()
        await first.close()


async def test_the_newest_properties_count() -> None:
    """moqt 13, 15 #3: of the Track and of its Objects; not the immutable ones."""
    cache = Cache(1 << 30)
    track = CachedTrack(FullTrackName((b"n",), b"t"), cache, lambda _, start, end, __: Hole(start, end))

    def come(properties: Properties) -> None:
        raw = encode_properties(properties)
        header = ObjectHeader(Location(0, 0), 0, 128, properties, raw, ObjectStatus.NORMAL, 5)
        inlet = SubgroupInlet(track, SubgroupHeader(0, 0, 0, 128))
        write = inlet.object(header)
        assert write is not None
        write(memoryview(b"hello"))
        inlet.cut()

    immutable = (PropertyType.IMMUTABLE_PROPERTIES, encode_properties(((0x78, 1),)))
    come((immutable,))
    before = cache.bytes
    come((immutable, (0x7A, 5)))
    (item,) = track.kept()
    assert decode_properties(item.properties) == (immutable, (0x7A, 5))
    assert cache.bytes > before
    with pytest.raises(MalformedTrack):
        come(((PropertyType.IMMUTABLE_PROPERTIES, encode_properties(((0x78, 2),))),))
    track.clear()
    assert cache.bytes == 0


async def test_track_properties_of_a_later_reply_replace_those_before() -> None:
    """moqt 13: also those of FETCH_OK."""
    track = make_track(b"k", properties=((0x78, 1), (0x7A, 2)))
    filled(track, range(2), 1, SIZE)
    async with network(track) as net:
        await fetched(net, track, GroupOrder.ASCENDING, LocationFilter.groups(0, 0))
        track.properties = ((0x78, 3),)
        await fetched(net, track, GroupOrder.ASCENDING, LocationFilter.groups(1, 1))
        assert (await net.sessions[0].track_status(track.name)).properties == ((0x78, 3),)
