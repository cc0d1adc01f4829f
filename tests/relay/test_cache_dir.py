"""A relay with a cache on disk: what it serves after a restart, and what memory does not hold."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcs.errors import KvcsError
from moqt import (
    DoneCode,
    GroupOrder,
    Location,
    LocationFilter,
    RangeNotice,
    RangeStatus,
    ReceivedObject,
    RequestCode,
    RequestRejected,
    Session,
    Track,
    Tracks,
)
from moqt.filters import MAX_VARINT
from moqt.relay import Relay
from moqt.relay.database import LEAST_BYTES, Outcome
from moqt.relay.store import Store
from moqt.wire import ObjectStatus, PropertyType, encode_properties
from tests.kvcs.stage import CACHE, TOKENS, put_layers
from tests.moqt.scene import (
    EVERYTHING,
    NAMESPACE,
    at_hand,
    check_exactly_once,
    collect,
    filled,
    make_track,
    noise,
    objects,
    piece,
)
from tests.relay.network import Network, join, network, until
from tests.relay.test_kvcs import check, production, receive
from tests.relay.test_store import clock

pytestmark = pytest.mark.virtual

SIZE = 10_000
ORDERS = [GroupOrder.ASCENDING, GroupOrder.DESCENDING]


def on_disk(directory: Path, limit: int = 4 * LEAST_BYTES, **more: Any) -> dict[str, Any]:
    """Options of a relay that keeps its cache there."""
    return {"store": Store(directory, limit, clock=clock), "linger": 0.0, **more}


@asynccontextmanager
async def restarted(directory: Path, subscribers: int = 1, **more: Any) -> AsyncIterator[Network]:
    """A relay that has only its directory: no publisher, no upstream."""
    async with AsyncExitStack() as stack:
        relay = Relay(**on_disk(directory, **more))
        stack.push_async_callback(relay.close)
        net = Network(Tracks(), [relay], [], None, [], stack)  # type: ignore[arg-type]  # There is none.
        for _ in range(subscribers):
            link, session = await net.subscriber()
            net.links.append(link)
            net.sessions.append(session)
        yield net


async def fetched(
    session: Session,
    track: Track,
    order: GroupOrder = GroupOrder.ASCENDING,
    what: LocationFilter = EVERYTHING,
) -> list[ReceivedObject]:
    async with await session.fetch(track.name, filter=what, order=order) as fetch:
        return [item for item in await collect(fetch) if isinstance(item, ReceivedObject)]


def told(items: list[ReceivedObject]) -> list[tuple[Any, ...]]:
    """All that a subscriber sees of Objects."""
    return [
        (item.location, bytes(item.payload), item.subgroup, item.priority, item.properties) for item in items
    ]


def published(track: Track, order: GroupOrder = GroupOrder.ASCENDING) -> list[Location]:
    assert track.largest is not None
    return [item.location for item in track.objects(Location(0, 0), track.largest, order)]


def varied() -> Track:
    """A complete Track with everything that can differ."""
    properties = ((0x40, 7), (0x41, b"of the track"), (PropertyType.DEFAULT_PUBLISHER_PRIORITY, 9))
    track = make_track(b"varied", properties=properties, priority=9)
    gap = encode_properties(((PropertyType.PRIOR_OBJECT_ID_GAP, 4), (0x43, b"of the object" * 100)))
    piece(track, 0, 0, 1, priority=0)
    piece(track, 0, 1, 0, subgroup=5)
    piece(track, 0, 2, 3_000_001, priority=0)
    piece(track, 0, 9, 70_000, subgroup=5, properties=gap)
    track.end_group(0, 20)
    piece(track, 3, 0, 5000, priority=255)
    piece(track, 3, 7, 1 << 20, priority=255)
    track.end(Location(3, 8))
    return track


@pytest.mark.requirement("R8a")
@pytest.mark.parametrize("how", ["subscribed", "fetched"])
async def test_a_complete_track_is_served_after_a_restart(tmp_path: Path, how: str) -> None:
    """With no upstream: found by its namespace, each field of each Object, and what does not exist."""
    track = varied()
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        if how == "subscribed":
            subscription = await join(net.sessions[0], track.name)
            net.end(track)
            before = [item for item in await collect(subscription) if isinstance(item, ReceivedObject)]
        else:
            before = await fetched(net.sessions[0], track)
        await asyncio.sleep(1)
    for _ in range(2):
        async with restarted(tmp_path) as net:
            session = net.sessions[0]
            watch = await session.subscribe_namespace(NAMESPACE[:1])
            await asyncio.sleep(0.1)
            assert list(watch.namespaces) == [NAMESPACE]
            assert net.relays[0].cache.bytes == 0  # Nothing was read yet.
            for order in ORDERS:
                async with await session.fetch(track.name, filter=EVERYTHING, order=order) as fetch:
                    items = await collect(fetch)
                    assert fetch.end is not None
                    assert fetch.end.end == track.largest
                    # A fill tells of no end that came before.
                    assert fetch.end.end_of_track == (how == "fetched")
                    assert sorted(fetch.properties) == sorted(track.properties)
                kinds = {item.kind for item in items if isinstance(item, RangeNotice)}
                assert kinds <= {RangeStatus.NON_EXISTENT}
                assert [item.location for item in objects(items)] == [
                    location for location in published(track, order) if location != Location(0, 1)
                ]
            subscription = await join(session, track.name)
            assert sorted(subscription.properties) == sorted(track.properties)
            again = [item for item in await collect(subscription) if isinstance(item, ReceivedObject)]
            assert subscription.done is not None
            assert subscription.done.status == DoneCode.TRACK_ENDED
            assert sorted(told(again)) == sorted(told(before))
            check_exactly_once(track, again)


@pytest.mark.requirement("R8a")
async def test_a_kv_cache_after_a_restart(tmp_path: Path) -> None:
    async with production(relay_options=on_disk(tmp_path)) as (net, publisher):
        publication = publisher.publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        check(await receive(net))
        net.links[0].cut()
        await asyncio.sleep(1)
    async with restarted(tmp_path, subscribers=2) as net:
        check(await receive(net))
        check(await receive(net, 1))


async def test_a_kv_cache_that_was_in_production_is_not_offered(tmp_path: Path) -> None:
    async with production(relay_options=on_disk(tmp_path)) as (net, publisher):
        publication = publisher.publish(TOKENS)
        receiving = asyncio.ensure_future(receive(net))
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE, last=1)
        await asyncio.sleep(1)
        net.links[0].cut()
        with pytest.raises(KvcsError):
            await receiving
    async with restarted(tmp_path) as net:
        assert net.relays[0].feeds
        with pytest.raises(KvcsError):
            await receive(net)


@pytest.mark.parametrize("order", ORDERS)
async def test_holes_are_filled_from_upstream_and_only_they(tmp_path: Path, order: GroupOrder) -> None:
    """Groups 1 and 3, and half of Group 5, are on disk."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(7), 4, SIZE)
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        for group in (1, 3):
            await fetched(net.sessions[0], track, what=LocationFilter.groups(group, group))
        half = LocationFilter.absolute_range(Location(5, 1), Location(5, 2))
        await fetched(net.sessions[0], track, what=half)
    async with restarted(tmp_path) as net:
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING, order=order) as fetch:
            items = await collect(fetch)
        assert {item.location.group for item in objects(items)} == {1, 3, 5}
        # Nobody can tell what else there is.
        unknown = [Location(0, MAX_VARINT), Location(2, MAX_VARINT), Location(5, 0), Location(6, 3)]
        if order is GroupOrder.DESCENDING:
            rest = [Location(group, MAX_VARINT) for group in (5, 4, 2, 0)]
            unknown = [Location(6, 3), Location(5, 0), *rest]
        notices = [item for item in items if isinstance(item, RangeNotice)]
        assert [item.end for item in notices if item.kind is RangeStatus.UNKNOWN] == unknown
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        before = net.upstream_bytes
        received = await fetched(net.sessions[0], track, order)
        assert [item.location for item in received] == published(track, order)
        check_exactly_once(track, received)
        assert 18 * SIZE <= net.upstream_bytes - before < 18.5 * SIZE


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [SIZE, 700_000])
async def test_what_memory_does_not_hold_comes_from_disk(
    tmp_path: Path, order: GroupOrder, size: int
) -> None:
    track = make_track(b"k")
    filled(track, range(4), 8, size)
    limit = 12 * size
    options = on_disk(tmp_path, cache_bytes=limit)
    async with network(track, relay_options=options, subscribers=3) as net:
        options["store"].queue = 1 << 30  # None may be skipped here.
        for group in range(4):
            await fetched(net.sessions[0], track, what=LocationFilter.groups(group, group))
            await asyncio.sleep(1)
        assert net.cached(track.name)._count < 16
        net.links[0].cut()
        await asyncio.sleep(10)
        watch = await net.sessions[0].subscribe_namespace(NAMESPACE)
        found = await asyncio.gather(*(fetched(session, track, order) for session in net.sessions))
        for received in found:
            assert [item.location for item in received] == published(track, order)
            check_exactly_once(track, received)
        assert net.relays[0].cache.bytes <= limit
        assert not watch.namespaces  # The Track has not ended.


async def test_reading_ahead_of_a_slow_subscriber_is_bounded(tmp_path: Path) -> None:
    track = make_track(b"k")
    filled(track, range(1), 40, 100_000)
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        await fetched(net.sessions[0], track)
        await asyncio.sleep(1)
    async with restarted(tmp_path, cache_bytes=1_000_000) as net:
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            items = []
            async for item in fetch:
                items.append(item)
                assert net.relays[0].cache.bytes <= 1_000_000
                await asyncio.sleep(0.5)
        check_exactly_once(track, objects(items))


async def test_a_subscriber_that_stops_reading_is_not_waited_for(tmp_path: Path) -> None:
    track = make_track(b"k")
    filled(track, range(1), 100, 100_000)
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        await fetched(net.sessions[0], track)
        await asyncio.sleep(1)
    async with restarted(tmp_path, subscribers=2, cache_bytes=8_000_000) as net:
        fetch = await net.sessions[0].fetch(track.name, filter=EVERYTHING)
        first = await anext(fetch)
        for _ in range(3):
            check_exactly_once(track, await fetched(net.sessions[1], track))
        await asyncio.sleep(60)
        assert not net.relays[0].feeds[track.name]._holes.open
        check_exactly_once(track, objects([first, *await collect(fetch)]))  # It goes on where it stopped.


async def test_half_an_object_is_never_kept(tmp_path: Path) -> None:
    """The relay goes in the middle of an Object: it is unknown then, and comes whole from upstream."""
    track = make_track(b"k", one_subgroup=True)
    piece(track, 0, 0, SIZE)
    async with network(track, relay_options=on_disk(tmp_path), latency=1.0) as net:
        subscription = await join(net.sessions[0], track.name)
        await asyncio.sleep(1)
        piece(track, 0, 1, 2_000_000)
        await until(lambda: Location(0, 1) in net.cached(track.name).known)
        item = net.cached(track.name).get(Location(0, 1))
        assert item is not None
        await until(lambda: 0 < item.missing < 1_500_000)
        await subscription.close()
    async with restarted(tmp_path) as net:
        disk = net.relays[0].feeds[track.name].track.disk
        assert disk is not None
        assert list(disk.stored) == [(Location(0, 0), Location(0, 0))]
        assert [item.location for item in await fetched(net.sessions[0], track)] == [Location(0, 0)]
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        check_exactly_once(track, await fetched(net.sessions[0], track))


@pytest.mark.requirement("R8c")
@pytest.mark.parametrize("order", ORDERS)
async def test_expired_is_unknown_and_not_non_existent(tmp_path: Path, order: GroupOrder) -> None:
    """moqt 13: in wall-clock time, over a restart, and also for what was brought back into memory."""
    properties = ((PropertyType.MAX_CACHE_DURATION, 100_000),)
    track = make_track(b"k", properties=properties)
    filled(track, range(2), 2, SIZE)
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        await fetched(net.sessions[0], track, what=LocationFilter.groups(0, 0))
        await asyncio.sleep(50)
        await fetched(net.sessions[0], track, what=LocationFilter.groups(1, 1))
        await asyncio.sleep(1)
    async with restarted(tmp_path) as net:
        await asyncio.sleep(30)
        assert len(await fetched(net.sessions[0], track, order)) == 4
        await asyncio.sleep(30)
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING, order=order) as fetch:
            items = await collect(fetch)
        assert {item.location.group for item in objects(items)} == {1}
        assert {item.kind for item in items if isinstance(item, RangeNotice)} >= {RangeStatus.UNKNOWN}
    await asyncio.sleep(60)
    async with restarted(tmp_path) as net:
        await asyncio.sleep(1)
        assert not net.relays[0].feeds
        with pytest.raises(RequestRejected) as caught:
            await net.sessions[0].fetch(track.name, filter=EVERYTHING)
        assert caught.value.code == RequestCode.DOES_NOT_EXIST
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        check_exactly_once(track, await fetched(net.sessions[0], track))


async def test_what_expires_is_offered_no_longer(tmp_path: Path) -> None:
    track = make_track(b"k", properties=((PropertyType.MAX_CACHE_DURATION, 100_000),), one_subgroup=True)
    filled(track, range(2), 2, SIZE)
    track.end(Location(2, 0))
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        await fetched(net.sessions[0], track)
        await asyncio.sleep(1)
    async with restarted(tmp_path) as net:
        watch = await net.sessions[0].subscribe_namespace(NAMESPACE)
        await asyncio.sleep(1)
        assert list(watch.namespaces) == [NAMESPACE]
        await asyncio.sleep(100)
        assert not watch.namespaces
        assert not net.relays[0].feeds


async def test_a_malformed_track_is_removed_from_disk(tmp_path: Path) -> None:
    """moqt 15 #3, #5: a second payload at a Location, while the first is on disk."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(2), 2, SIZE)
    other = Track(track.name, one_subgroup=True)
    another = make_track(b"another")
    filled(another, range(1), 2, SIZE)
    async with network(track, another, relay_options=on_disk(tmp_path)) as net:
        await fetched(net.sessions[0], another)
        subscription = await join(net.sessions[0], track.name)
        await asyncio.sleep(1)
        disk = net.cached(track.name).disk
        assert disk is not None
        assert Location(0, 0) in disk.stored
        tracks = Tracks()
        tracks.add(other)
        tracks.announce(NAMESPACE)
        await net.publish(tracks)
        await asyncio.sleep(1)
        other.append(1, 0, bytes(SIZE))
        await collect(subscription)
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.MALFORMED_TRACK
        await asyncio.sleep(1)
    async with restarted(tmp_path) as net:
        assert list(net.relays[0].feeds) == [another.name]


@pytest.mark.parametrize("where", ["on disk", "in memory"])
async def test_a_contradiction_between_disk_and_publisher(tmp_path: Path, where: str) -> None:
    """moqt 15 #3: a second payload for an Object of an earlier life, whether it was read back or not."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(2), 2, SIZE)
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        await fetched(net.sessions[0], track)
        await asyncio.sleep(1)
    other = Track(track.name, one_subgroup=True)
    async with network(other, relay_options=on_disk(tmp_path)) as net:
        if where == "in memory":
            check_exactly_once(track, await fetched(net.sessions[0], track))
        subscription = await net.sessions[0].subscribe(track.name)
        await asyncio.sleep(1)
        other.append(0, 1, noise(Location(0, 1), SIZE))  # The same; no contradiction.
        await asyncio.sleep(1)
        assert subscription.done is None
        other.append(1, 0, bytes(SIZE))
        await collect(subscription)
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.MALFORMED_TRACK
        await asyncio.sleep(1)
    async with restarted(tmp_path) as net:
        assert not net.relays[0].feeds


@pytest.mark.parametrize("what", ["write", "read"])
async def test_a_disk_that_fails_while_the_relay_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """It is logged once; the relay serves from memory and from upstream."""

    def fail(*_: object, **__: object) -> Outcome:
        error = sqlite3.OperationalError("disk I/O error")
        if what == "read":
            raise error
        return Outcome(error=error)

    track = make_track(b"k", one_subgroup=True)
    filled(track, range(3), 4, SIZE)
    options = on_disk(tmp_path, cache_bytes=10 * SIZE)
    async with network(track, relay_options=options, subscribers=2) as net:
        options["store"].queue = 1 << 30  # All of it is kept.
        check_exactly_once(track, await fetched(net.sessions[0], track))
        await asyncio.sleep(1)
        monkeypatch.setattr(options["store"]._database, what, fail)
        for session in net.sessions:
            check_exactly_once(track, await fetched(session, track))
        subscription = await join(net.sessions[0], track.name)
        filled(track, range(3, 6), 4, SIZE)
        await asyncio.sleep(1)
        check_exactly_once(track, objects(at_hand(subscription)))
        logged = [record.getMessage() for record in caplog.records if "fails" in record.getMessage()]
        assert len(logged) == 1
        assert "disk I/O error" in logged[0]


async def test_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given up after a while, for the publisher."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(3), 4, SIZE)
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        check_exactly_once(track, await fetched(net.sessions[0], track))

    async def hang(*_: object) -> list[object]:
        await asyncio.sleep(1000)
        return []

    monkeypatch.setattr(Store, "read", hang)
    async with network(track, relay_options=on_disk(tmp_path)) as net:
        check_exactly_once(track, await fetched(net.sessions[0], track))
        assert "has not answered for 10 s" in caplog.text


@pytest.mark.parametrize("seed", range(8))
async def test_restarts_while_a_track_is_published(tmp_path: Path, seed: int) -> None:
    """After each restart a subscriber gets every Object once, whether it is on disk, upstream or to come."""
    rng = random.Random(seed)
    track = make_track(b"k", one_subgroup=True)
    group = 0
    for _ in range(4):
        options = on_disk(tmp_path, cache_bytes=rng.choice([200_000, 1 << 30]))
        async with network(track, relay_options=options, seed=seed, jitter=0.01) as net:
            subscription = await join(net.sessions[0], track.name)
            for _ in range(rng.randrange(4)):
                filled(track, [group], rng.randint(1, 5), rng.choice([0, 100, 40_000]))
                group += 1
                await asyncio.sleep(rng.choice([0, 0.01, 1]))
            await asyncio.sleep(1)
            items = [item for item in at_hand(subscription) if isinstance(item, ReceivedObject)]
            check_exactly_once(track, [item for item in items if item.status is ObjectStatus.NORMAL])
            if rng.random() < 0.5:
                await subscription.close()
