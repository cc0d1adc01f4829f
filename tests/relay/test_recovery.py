"""What subscribers of a relay get when its publisher was lost and has come back, or is only slow."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from moqt import DoneCode, Fill, FullTrackName, GroupOrder, Location, StoredObject
from moqt.errors import MalformedTrack
from moqt.relay.cache import Cache, Writer
from moqt.relay.cached import CachedTrack
from moqt.track import Hole, TrackWatcher
from moqt.wire import ObjectHeader, ObjectStatus
from tests.moqt.scene import EVERYTHING, check_exactly_once, collect, filled, make_track, objects, piece
from tests.relay.network import join, network, until

pytestmark = pytest.mark.virtual

SIZE = 100


class Watcher(TrackWatcher):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []
        self.largest = 0

    def on_object(self, item: StoredObject) -> None:
        self.told.append(("object", (item.location.group, item.location.object)))

    def on_piece(self, item: StoredObject, data: object) -> None:
        pass

    def on_failed(self, item: StoredObject, code: int) -> None:
        self.told.append(("failed", (item.location.group, item.location.object)))

    def on_largest(self) -> None:
        self.largest += 1

    def on_subgroup_end(self, group: int, subgroup: int, code: int | None) -> None:
        self.told.append(("end", (group, subgroup, code)))

    def on_removed(self, code: DoneCode) -> None:
        self.told.append(("removed", code))


@pytest.fixture
def track() -> Iterator[CachedTrack]:
    def nobody(_: CachedTrack, start: Location, end: Location, __: GroupOrder) -> Hole:
        raise AssertionError("nothing is asked for")

    made = CachedTrack(FullTrackName((b"n",), b"t"), Cache(1 << 20), nobody)
    yield made
    made.stop()


def begin(track: CachedTrack, group: int, object_id: int, *, live: bool = True) -> Writer:
    header = ObjectHeader(Location(group, object_id), 0, 128, (), b"", ObjectStatus.NORMAL, SIZE)
    writer = track.begin(header, live=live)
    assert writer is not None
    return writer


def payload(size: int = SIZE) -> memoryview:
    return memoryview(bytes(size))


async def test_the_end_of_a_track_waits_for_what_was_missed(track: CachedTrack) -> None:
    """The publisher ends its subscription while what was published in its absence is still being fetched."""
    watcher = Watcher()
    track.watch(watcher)
    begin(track, 0, 0).write(payload())
    track.defer()
    begin(track, 0, 2).write(payload())
    track.close(DoneCode.TRACK_ENDED)
    assert watcher.told == [("object", (0, 0))]
    begin(track, 0, 1, live=False).write(payload())
    track.catch_up()
    expected = [("object", (0, number)) for number in range(3)]
    assert watcher.told == [*expected, ("removed", DoneCode.TRACK_ENDED)]


async def test_the_largest_object_is_told_while_objects_are_not(track: CachedTrack) -> None:
    """Else a relay below would deny what has come here and is kept back until what is missing has come."""
    watcher = Watcher()
    track.watch(watcher)
    begin(track, 0, 0).write(payload())
    track.defer()
    begin(track, 0, 2).write(payload())
    assert watcher.told == [("object", (0, 0))]
    assert (watcher.largest, track.largest) == (1, Location(0, 2))


async def test_what_is_malformed_ends_at_once(track: CachedTrack) -> None:
    watcher = Watcher()
    track.watch(watcher)
    begin(track, 0, 0).write(payload())
    track.defer()
    begin(track, 0, 1)
    with pytest.raises(MalformedTrack):
        begin(track, 0, 0).write(memoryview(b"x" * SIZE))
    track.spoil("a second payload")
    assert watcher.told[-1] == ("removed", DoneCode.MALFORMED_TRACK)


async def test_nothing_follows_an_object_of_which_something_has_not_come(track: CachedTrack) -> None:
    """A fetch has overtaken the subscription: on a stream its Object would come into the middle of the one
    before it.
    """
    watcher = Watcher()
    track.watch(watcher)
    track.defer()
    first = begin(track, 0, 0)
    first.write(payload(SIZE - 1))
    assert not track.torn
    begin(track, 0, 1, live=False).write(payload())
    assert track.torn
    begin(track, 1, 0)  # The last of its Subgroup may still be coming.
    first.write(payload(1))
    assert not track.torn
    track.catch_up()
    assert watcher.told == [("object", (0, 0)), ("object", (0, 1)), ("object", (1, 0))]


async def test_an_object_that_will_not_come_whole_is_left_out(track: CachedTrack) -> None:
    """Rather than to have another one follow it: the subscriber is told by the end of its stream."""
    watcher = Watcher()
    track.watch(watcher)
    track.defer()
    begin(track, 0, 0).write(payload(SIZE - 1))
    track.saw(Location(0, 1))
    begin(track, 0, 1, live=False).write(payload())
    track.catch_up()
    assert watcher.told == [("object", (0, 1))]


async def test_a_known_end_is_no_reason_to_call_the_last_object_here_the_last() -> None:
    """The End of Track has overtaken the Objects before it, as it may on a stream of its own: FETCH_OK must
    not say that there are none, or a relay below takes them for non-existent.
    """
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(2), 2, SIZE)
    async with network(track) as net:
        subscription = await join(net.sessions[0], track.name)
        await asyncio.sleep(1)
        net.cached(track.name).end_track(Location(3, 0))
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            assert len(objects(await collect(fetch))) == 4
            assert fetch.end is not None
            assert not fetch.end.end_of_track
        filled(track, [2], 2, SIZE)
        track.end(Location(3, 0))
        await asyncio.sleep(1)
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            assert len(objects(await collect(fetch))) == 6
            assert fetch.end is not None
            assert fetch.end.end_of_track
        net.end(track)
        check_exactly_once(track, objects(await collect(subscription)))


async def test_a_publisher_far_away_has_its_time_to_reply() -> None:
    """Its replies take longer than those of one who counts as silent meanwhile, but there is nobody else."""
    first, second = make_track(b"first"), make_track(b"second")
    for track in (first, second):
        filled(track, [0], 2, SIZE)
    async with network(first, second, subscribers=0) as net:
        net.links[0].cut()
        await net.publish(net.tracks, latency=0.45)
        _, session = await net.subscriber()
        await asyncio.sleep(2)
        for track in (first, second):
            await session.subscribe(track.name)
        asking = asyncio.ensure_future(session.fetch(first.name, filter=EVERYTHING))
        await asyncio.sleep(0.6)
        assert net.relays[0].silent
        async with await session.fetch(second.name, filter=EVERYTHING) as fetch:
            assert len(objects(await collect(fetch))) == 2
        async with await asking as fetch:
            assert len(objects(await collect(fetch))) == 2


@pytest.mark.parametrize("cuts", [1, 2, 3])
async def test_a_publisher_that_is_lost_again_while_it_is_caught_up_with(cuts: int) -> None:
    """What is published meanwhile is told in order when it is there to stay: each Object once."""
    track = make_track(b"k", one_subgroup=True)
    async with network(track, jitter=0.004, seed=cuts, relay_options={"grace": 30.0}) as net:
        subscription = await join(net.sessions[0], track.name)
        link = net.links[0]
        places = (divmod(number, 3) for number in itertools.count())
        piece(track, *next(places), 20_000)
        await asyncio.sleep(0.1)
        link.cut()
        for _ in range(cuts):
            piece(track, *next(places), 20_000)
            link, _ = await net.publish(net.tracks)
            await until(lambda: net.relays[0].feeds[track.name]._recovery is not None)
            piece(track, *next(places), 20_000)
            await asyncio.sleep(0.015)
            link.cut()
        await net.publish(net.tracks)
        piece(track, *next(places), 20_000)
        await asyncio.sleep(5)
        net.end(track)
        check_exactly_once(track, objects(await collect(subscription)))


@pytest.mark.parametrize("order", list(GroupOrder))
async def test_a_publisher_that_is_lost_in_the_middle_of_a_fill_and_comes_back(order: GroupOrder) -> None:
    """What the fill lacks is fetched from it then; each Object once."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(4), 3, 20_000)
    async with network(track, window=16384) as net:
        fill = Fill(filter=EVERYTHING, order=order)
        subscription = await join(net.sessions[0], track.name, fill=fill)
        received = [await anext(subscription) for _ in range(3)]
        net.links[0].cut()
        await asyncio.sleep(0.5)
        await net.publish(net.tracks)
        await asyncio.sleep(5)
        net.end(track)
        check_exactly_once(track, objects([*received, *await collect(subscription)]))


async def test_a_fetch_of_what_was_published_during_a_loss_is_not_cut_short() -> None:
    """By the second of two relays, which has lost nothing itself, before the first one has caught up."""
    track = make_track(b"t")
    filled(track, [0], 1, SIZE)
    async with network(track, relays=2, relay_options={"cache_bytes": 0}) as net:
        await join(net.sessions[0], track.name)
        net.links[0].cut()
        await asyncio.sleep(0.1)
        filled(track, range(1, 30), 3, SIZE)
        await net.publish(net.tracks)
        await until(lambda: net.relays[1].feeds[track.name].track.largest == track.largest)
        assert net.relays[0].feeds[track.name]._recovery is not None
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            check_exactly_once(track, objects(await collect(fetch)))
