"""PUBLISH and SUBSCRIBE_TRACKS: Tracks that publishers offer by themselves, directly and through relays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from moqt import (
    DoneCode,
    FullTrackName,
    Item,
    Location,
    MoqtError,
    RequestCode,
    RequestRejected,
    Session,
    Track,
    Tracks,
)
from moqt.delivery import Delivery
from moqt.errors import RequestRefused
from moqt.filters import RangeFilter, RangeKind
from moqt.offers import Offer, publish
from moqt.quic.api import QuicOptions
from moqt.quic.link import pair
from moqt.wire import PropertyType, RequestUpdate
from tests.moqt.scene import (
    EVERYTHING,
    NAMESPACE,
    at_hand,
    check_exactly_once,
    collect,
    filled,
    make_track,
    objects,
    piece,
)
from tests.relay.network import Network, join, network, until

pytestmark = pytest.mark.virtual

SIZE = 10_000


class Taking(Tracks):
    """Takes every Track that is offered to it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[FullTrackName, Offer] = {}
        self.items: dict[FullTrackName, list[Item]] = {}

    async def published(self, peer: object, offer: Offer) -> None:
        await offer.accept()
        self.taken[offer.track] = offer
        items = self.items.setdefault(offer.track, [])
        async for item in offer:
            items.append(item)


@asynccontextmanager
async def taker(net: Network, **options: Any) -> AsyncIterator[tuple[Session, Taking]]:
    """One more subscriber at the last relay, which takes what is published to it."""
    link = pair(**options)
    taking = Taking()
    session = Session(link.client, tracks=taking, announce=False)
    server = Session(link.server, tracks=net.relays[-1].tracks, announce=False)
    await asyncio.gather(session.start(), server.start())
    try:
        yield session, taking
    finally:
        await asyncio.gather(session.close(), server.close())


@asynccontextmanager
async def publishing(net: Network, *tracks: Track, forward: bool = True) -> AsyncIterator[Session]:
    """A publisher at the first relay that sends PUBLISH for its Tracks, and announces nothing."""
    link = pair()
    session = Session(link.client, announce=False)
    server = Session(link.server, tracks=net.relays[0].tracks, announce=False)
    await asyncio.gather(session.start(), server.start())
    serving = [asyncio.ensure_future(publish(session, track, forward=forward)) for track in tracks]
    try:
        await asyncio.sleep(0.5)
        yield session
    finally:
        await asyncio.gather(session.close(), server.close())
        for one in serving:
            with suppress(MoqtError):
                await one


@pytest.mark.parametrize("relays", [1, 2])
async def test_a_published_track_reaches_those_who_want_all_tracks(relays: int) -> None:
    """moqt 15 #10: those who SUBSCRIBE_TRACKS before it is published, and after."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, [0], 2, SIZE)
    async with network(relays=relays) as net, taker(net) as (early, to_early), taker(net) as (late, to_late):
        await early.subscribe_tracks(NAMESPACE[:1])
        async with publishing(net, track):
            await late.subscribe_tracks(())
            await asyncio.sleep(1)
            assert to_early.taken[track.name].largest == Location(0, 1)
            filled(track, [1, 2], 2, SIZE)
            await asyncio.sleep(1)
            track.close(DoneCode.TRACK_ENDED)
            await asyncio.sleep(1)
            for taking in (to_early, to_late):
                locations = [item.location for item in objects(taking.items[track.name])]
                assert sorted(locations) == [Location(g, n) for g in (1, 2) for n in (0, 1)]
                done = taking.taken[track.name].done
                assert done is not None
                assert done.status == DoneCode.TRACK_ENDED


@pytest.mark.parametrize("relays", [1, 2])
async def test_a_published_track_can_be_subscribed_to(relays: int) -> None:
    """Its publisher has announced no namespace; who is before it waits for it (moqt 5.3, 15 #10)."""
    track = make_track(b"k", one_subgroup=True)
    async with network(relays=1) as net:
        waiting = asyncio.ensure_future(net.relays[0].find(track.name, object(), 30.0, upward=False))
        await asyncio.sleep(1)
        async with publishing(net, track):
            assert (await waiting).name == track.name
            subscription = await join(net.sessions[0], track.name)
            filled(track, range(3), 2, SIZE)
            await asyncio.sleep(1)
            check_exactly_once(track, objects(at_hand(subscription)))
            await subscription.close()


async def test_a_published_track_is_paused_when_nobody_wants_it() -> None:
    """moqt 15 #11: and goes on for the next subscriber, with nothing lost of what it was promised."""
    track = make_track(b"k", one_subgroup=True)
    async with network(relay_options={"linger": 1.0}) as net, publishing(net, track):
        await asyncio.sleep(5)
        delivery = track._watchers[0]
        assert delivery.paused
        filled(track, [0], 2, SIZE)
        subscription = await net.sessions[0].subscribe(track.name)
        await until(lambda: not delivery.paused)
        filled(track, [1], 2, SIZE)
        await asyncio.sleep(1)
        assert [item.location.group for item in objects(at_hand(subscription))][-2:] == [1, 1]
        await subscription.update(forward=False)
        await until(lambda: delivery.paused)
        filled(track, [2], 2, SIZE)
        await subscription.update(forward=True)
        await until(lambda: not delivery.paused)
        await asyncio.sleep(1)
        filled(track, [3], 2, SIZE)
        await asyncio.sleep(1)
        assert [item.location.group for item in objects(at_hand(subscription))][-2:] == [3, 3]
        await subscription.close()


async def test_one_unpaused_subscriber_keeps_the_upstream_running() -> None:
    track = make_track(b"k", one_subgroup=True)
    async with network(track, subscribers=2) as net:
        subscriptions = [await session.subscribe(track.name) for session in net.sessions]
        delivery = track._watchers[0]
        await subscriptions[0].update(forward=False)
        await asyncio.sleep(1)
        assert not delivery.paused
        await subscriptions[1].update(forward=False)
        await until(lambda: delivery.paused)
        await subscriptions[0].close()
        await subscriptions[1].update(forward=True)
        await until(lambda: not delivery.paused)
        piece(track, 0, 0, SIZE)
        await asyncio.sleep(1)
        assert len(objects(at_hand(subscriptions[1]))) == 1
        await subscriptions[1].close()


async def test_a_publisher_that_publishes_what_it_is_asked_for() -> None:
    """The SUBSCRIBE that the relay waits with is completed by the PUBLISH."""
    track = make_track(b"k", one_subgroup=True)
    asked = asyncio.Event()

    class Slow(Tracks):
        async def find(self, name: FullTrackName, *more: object, **options: object) -> Track:
            asked.set()
            await asyncio.sleep(60)
            raise AssertionError("it was cancelled before")

    slow = Slow()
    slow.announce(NAMESPACE)
    async with network() as net:
        _, session = await net.publish(slow)
        joining = asyncio.ensure_future(net.sessions[0].subscribe(track.name))
        await asked.wait()
        offering = asyncio.ensure_future(publish(session, track))
        subscription = await joining
        filled(track, [0], 2, SIZE)
        await asyncio.sleep(1)
        check_exactly_once(track, objects(at_hand(subscription)))
        await subscription.close()
        await session.close()
        with pytest.raises(MoqtError):
            await offering


async def test_the_loss_of_a_publishing_publisher() -> None:
    """Its subscribers are told, and the Track is offered no longer."""
    track = make_track(b"k", one_subgroup=True)
    async with network(relay_options={"grace": 2.0}) as net, taker(net) as (session, taking):
        await session.subscribe_tracks(NAMESPACE)
        async with publishing(net, track):
            subscription = await join(net.sessions[0], track.name)
        await collect(subscription)
        await asyncio.sleep(1)
        for one in (subscription, taking.taken[track.name]):
            assert one.done is not None
            assert one.done.status == DoneCode.INTERNAL_ERROR
        assert not list(net.relays[0].tracks)
        assert not net.relays[0].feeds


async def test_nobody_gets_back_what_it_publishes() -> None:
    track, other = make_track(b"k"), make_track(b"other")
    async with network() as net, taker(net) as (session, taking), publishing(net, other):
        await session.subscribe_tracks(NAMESPACE)
        offering = asyncio.ensure_future(publish(session, track))
        await asyncio.sleep(1)
        assert set(taking.taken) == {other.name}
        await session.close()
        with pytest.raises(MoqtError):
            await offering


async def test_prefixes_and_filters_of_subscribe_tracks() -> None:
    """moqt 8, 11: overlaps are refused, for this kind of request by itself; TRACK_PROPERTY filters."""
    low = make_track(b"low", properties=((0x78, 1),))
    high = make_track(b"high", properties=((0x78, 5),))
    async with network() as net, taker(net) as (session, taking):
        await session.subscribe_namespace(NAMESPACE)
        await session.subscribe_tracks(
            NAMESPACE,
            range_filters=(RangeFilter(RangeKind.TRACK_PROPERTY, ((3, None),), property_type=0x78),),
        )
        for prefix in (NAMESPACE, NAMESPACE[:1], (*NAMESPACE, b"x")):
            with pytest.raises(RequestRejected) as caught:
                await session.subscribe_tracks(prefix)
            assert caught.value.code == RequestCode.PREFIX_OVERLAP
        await session.subscribe_tracks((b"elsewhere",))
        async with publishing(net, low, high):
            assert set(taking.taken) == {high.name}


async def test_publish_skipped_when_no_stream_is_left() -> None:
    """moqt 11: such a Track is named, and not offered again."""
    tracks = [make_track(f"t{number}".encode()) for number in range(4)]
    async with network() as net, taker(net, client=QuicOptions(max_bidi_streams=2)) as (session, taking):
        watch = await session.subscribe_tracks(NAMESPACE)
        async with publishing(net, *tracks):
            await asyncio.sleep(1)
            assert len(taking.taken) == 2
            assert {name for _, name in watch.skipped} == {
                track.name.name for track in tracks if track.name not in taking.taken
            }
            assert {namespace for namespace, _ in watch.skipped} == {NAMESPACE}


async def test_tracks_that_are_subscribed_to_paused() -> None:
    """moqt 11: FORWARD 0 is echoed; an update of the subscription resumes it."""
    track = make_track(b"k", one_subgroup=True)
    async with network() as net, taker(net) as (session, taking), publishing(net, track):
        await session.subscribe_tracks(NAMESPACE, forward=False)
        await asyncio.sleep(1)
        offer = taking.taken[track.name]
        assert not offer.forward
        filled(track, [0], 1, SIZE)
        await asyncio.sleep(1)
        assert not taking.items[track.name]
        await offer.update(forward=True)
        await asyncio.sleep(1)
        filled(track, [1], 1, SIZE)
        await asyncio.sleep(1)
        assert [item.location for item in objects(taking.items[track.name])] == [Location(1, 0)]


async def test_a_publisher_serves_subscribe_tracks_itself() -> None:
    """Without a relay: the Tracks that are there, and one that comes later."""
    first, second = make_track(b"first"), make_track(b"second")
    tracks, taking = Tracks(), Taking()
    tracks.add(first)
    link = pair()
    publisher = Session(link.server, tracks=tracks, announce=False)
    subscriber = Session(link.client, tracks=taking, announce=False)
    await asyncio.gather(publisher.start(), subscriber.start())
    watch = await subscriber.subscribe_tracks(NAMESPACE)
    await asyncio.sleep(1)
    tracks.add(second)
    await asyncio.sleep(1)
    assert list(taking.taken) == [first.name, second.name]
    await watch.close()
    await asyncio.sleep(1)
    tracks.add(make_track(b"third"))
    piece(first, 0, 0, SIZE)  # What was published goes on.
    await asyncio.sleep(1)
    assert len(taking.taken) == 2
    assert len(objects(taking.items[first.name])) == 1
    await asyncio.gather(publisher.close(), subscriber.close())


async def test_a_refused_offer() -> None:
    """UNINTERESTED from who has not asked (moqt 17.2)."""
    track = make_track(b"k")
    link = pair()
    ends = Session(link.server, announce=False), Session(link.client, announce=False)
    await asyncio.gather(*(end.start() for end in ends))
    with pytest.raises(RequestRejected) as caught:
        await publish(ends[0], track)
    assert caught.value.code == RequestCode.UNINTERESTED
    assert not track._watchers
    await asyncio.gather(*(end.close() for end in ends))


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("relays", [1, 2])
async def test_new_group_requests_are_passed_on(relays: int, dynamic: bool) -> None:
    """moqt 5.3: once, unless the Group is there already, and only to a Track with dynamic Groups."""
    asked: list[int] = []

    class Dynamic(Track):
        def request_group(self, group: int) -> None:
            asked.append(group)

    properties = ((PropertyType.DYNAMIC_GROUPS, 1),) if dynamic else ()
    track = Dynamic(FullTrackName(NAMESPACE, b"k"), properties=properties)
    piece(track, 4, 0, SIZE)
    async with network(track, relays=relays, subscribers=2) as net:
        subscriptions = [await session.subscribe(track.name) for session in net.sessions]
        for subscription in subscriptions:
            await subscription.update(new_group=3)
            await subscription.update(new_group=5)
            await subscription.update(new_group=0)
        await asyncio.sleep(1)
        assert asked == ([5] if dynamic else [])
        piece(track, 5, 0, SIZE)
        await asyncio.sleep(1)
        await subscriptions[1].update(new_group=0)
        await asyncio.sleep(1)
        assert asked == ([5, 0] if dynamic else [])
        for subscription in subscriptions:
            await subscription.close()


@pytest.mark.parametrize("relays", [1, 2])
async def test_publish_state_notify_is_passed_on(relays: int) -> None:
    """moqt 4.2: the Largest Object that a publisher tells of, unasked."""
    track = make_track(b"k")
    async with network(track, relays=relays) as net:
        subscription = await net.sessions[0].subscribe(track.name)
        assert subscription.largest is None
        track.largest = Location(7, 3)
        for watcher in track._watchers:
            watcher.on_largest()
        await asyncio.sleep(1)
        assert subscription.largest == Location(7, 3)
        await subscription.close()


async def test_a_publisher_that_can_t_be_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once; the relay goes on, and subscribers are told how it ends."""
    track = make_track(b"k", one_subgroup=True)
    honest = Delivery.update
    asked = 0

    def update(delivery: Delivery, message: RequestUpdate) -> None:
        nonlocal asked
        if delivery.track is track:
            asked += 1
            raise RequestRefused(RequestCode.INTERNAL_ERROR, "no")
        honest(delivery, message)

    async with network(track) as net:
        subscription = await net.sessions[0].subscribe(track.name)
        monkeypatch.setattr(Delivery, "update", update)
        await subscription.update(forward=False)
        await collect(subscription)
        assert asked == 1
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.UPDATE_FAILED
        filled(track, [0], 1, SIZE)
        async with await net.sessions[0].fetch(track.name, filter=EVERYTHING) as fetch:
            assert len(objects(await collect(fetch))) == 1


async def test_a_publisher_that_comes_back_paused_is_resumed() -> None:
    """moqt 15 #10, #11: somebody is waiting for it, and not paused."""
    track = make_track(b"k", one_subgroup=True)
    async with network(relay_options={"grace": 10.0}) as net:
        async with publishing(net, track):
            subscription = await join(net.sessions[0], track.name)
            filled(track, [0], 1, SIZE)
            await asyncio.sleep(1)
        async with publishing(net, track, forward=False):
            await asyncio.sleep(1)
            assert not track._watchers[-1].paused
            filled(track, [1], 1, SIZE)
            await asyncio.sleep(1)
            check_exactly_once(track, objects(at_hand(subscription)))
            await subscription.close()
