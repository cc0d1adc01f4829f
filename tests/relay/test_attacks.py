"""What a hostile publisher or subscriber could make a relay spend: memory, time, requests of others."""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from moqt import FullTrackName, Limits, Location, ReceivedObject, Session, Subscription
from moqt.errors import DoneCode, RequestCode
from moqt.quic.api import QuicOptions
from moqt.quic.link import Link, pair
from moqt.relay import Relay
from moqt.relay.cache import Cache
from moqt.relay.cached import CachedTrack
from moqt.relay.holes import FETCHES
from moqt.track import Hole
from moqt.wire import (
    ObjectHeader,
    ObjectStatus,
    Parameters,
    PropertyType,
    Publish,
    PublishDone,
    PublishNamespace,
    RequestError,
    RequestOk,
    SubgroupEncoder,
    SubgroupHeader,
    Subscribe,
    SubscribeOk,
)
from tests.moqt.ends import Peer
from tests.moqt.hostile import frame, full_name, prefixed, vi
from tests.moqt.scene import EVERYTHING, collect, filled, make_track, objects
from tests.relay.network import Network, join, network

pytestmark = pytest.mark.virtual

NAME = FullTrackName((b"intruder",), b"t")


async def served(net: Network, limits: Limits) -> tuple[Link, Session, Session]:
    """A session of the relay with these limits, and its peer."""
    link = pair()
    relay = Session(link.server, tracks=net.relays[0].tracks, announce=False, limits=limits)
    peer = Session(link.client)
    await net._meet(peer, relay)
    return link, relay, peer


@asynccontextmanager
async def guest(net: Network, limits: Limits | None = None) -> AsyncIterator[Peer]:
    """A peer of the relay that says what it likes."""
    link = pair()
    peer = Peer(link.client)
    relay = Session(link.server, tracks=net.relays[0].tracks, announce=False, limits=limits)
    await peer.set_up()
    await relay.start()
    try:
        yield peer
    finally:
        await relay.close()
        peer.connection.close()
        await peer.connection.wait_closed()


@asynccontextmanager
async def intruder(net: Network, name: FullTrackName) -> AsyncIterator[tuple[Peer, Subscription]]:
    """A publisher of a Track that says what it likes, under alias 1, and somebody who has subscribed."""
    async with guest(net) as peer:
        await peer.ask(PublishNamespace(peer.id(), name.namespace))
        _, victim = await net.subscriber()
        joining = asyncio.ensure_future(victim.subscribe(name))
        talk, request = await peer.request()
        assert isinstance(request, Subscribe)
        await talk.say(SubscribeOk(1))
        async with await joining as subscription:
            yield peer, subscription


async def test_what_it_takes_to_let_streams_wait_counts() -> None:
    """Groups of one byte each: to have them wait for a subscriber that does not read takes more than a byte
    (moqt 9).
    """
    track = make_track(b"k", one_subgroup=True)
    async with network(track, subscribers=0) as net:
        link, relay, peer = await served(net, Limits(max_behind=1 << 20))
        subscription = await join(peer, track.name)
        [delivery] = relay.publishing._subscriptions
        link.stall()
        waiting = 0
        for group in range(2000):
            track.append(group, 0, b"x")
            track.end_group(group, 1)
            await asyncio.sleep(0.001)
            waiting = max(waiting, len(delivery._sending))
        assert 100 < waiting < 400
        assert not delivery._sending
        link.resume()
        await collect(subscription)
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.TOO_FAR_BEHIND


async def test_what_a_publisher_announces_takes_no_memory() -> None:
    """Ten bytes that announce a megabyte cost no megabyte, neither the relay nor who has subscribed there."""
    async with network(subscribers=0) as net, intruder(net, NAME) as (peer, _):
        tracemalloc.start()
        try:
            for group in range(200):
                encoder = SubgroupEncoder(SubgroupHeader(1, group, priority=128))
                await peer.send(encoder.header() + encoder.object(0, 1 << 20) + b"x")
            await asyncio.sleep(1)
            assert len(net.relays[0].cache) == 200
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert taken < 200 * 200_000


async def test_nobody_can_have_a_publisher_asked_for_ever() -> None:
    """One SUBSCRIBE with a RENDEZVOUS_TIMEOUT of millions of years (moqt 5.1: a relay may shorten it)."""
    track = make_track(b"k")
    missing = FullTrackName(track.name.namespace, b"missing")
    parameters = Parameters(rendezvous_timeout=2**64 - 1)
    async with network(track, subscribers=0) as net, guest(net, Limits(max_rendezvous=20.0)) as peer:
        talk = await peer.ask(Subscribe(peer.id(), missing, parameters))
        async with asyncio.timeout(25):
            answer = await talk.next()
        assert isinstance(answer, RequestError)
        assert answer.code == RequestCode.TIMEOUT
        await asyncio.sleep(60)
        assert 1 < net.publisher.stats.requests["Subscribe"] <= 21


@pytest.mark.parametrize("leave", ["stop", "reset", "close"])
async def test_a_publisher_that_is_gone_at_once_leaves_nothing(leave: str) -> None:
    """Nobody must make a relay remember Tracks by PUBLISHes that it can't answer."""
    async with network(subscribers=0) as net, guest(net) as peer:
        for number in range(20):
            name = FullTrackName(NAME.namespace, b"%d" % number)
            talk = await peer.ask(Publish(peer.id(), name, number))
            if leave == "stop":
                talk.stream.stop(1)
            elif leave == "reset":
                talk.stream.reset(1)
        if leave == "close":
            peer.connection.close()
        await asyncio.sleep(30)
        assert not net.relays[0].feeds


async def test_impossible_properties_are_not_taken_over() -> None:
    """A PUBLISH that is refused changes nothing of what others know of the Track (moqt 20.1)."""
    track = make_track(b"k", properties=((0x78, 5),))
    async with network(track) as net, guest(net) as peer:
        before = await net.sessions[0].track_status(track.name)
        impossible = vi(PropertyType.IMMUTABLE_PROPERTIES) + prefixed(b"\xff")
        body = frame(Publish.TYPE, vi(peer.id()), full_name(track.name), vi(7, 0), impossible)
        talk = await peer.ask(body, kind=Publish)
        answer = await talk.next()
        assert isinstance(answer, RequestError)
        assert answer.code == RequestCode.MALFORMED_TRACK
        assert await net.sessions[0].track_status(track.name) == before
        assert before.properties == ((0x78, 5),)


async def test_a_publication_that_is_over_and_has_no_end() -> None:
    """PUBLISH_DONE without a FIN behind it costs the stream, after a while; the session lives (moqt 3.4)."""
    async with network(subscribers=0) as net, guest(net) as peer:
        talk = await peer.ask(Publish(peer.id(), NAME, 1))
        assert await talk.next() == RequestOk()
        await talk.say(PublishDone(DoneCode.TRACK_ENDED, 0, ""))
        await asyncio.sleep(30)
        await peer.alive()
        assert talk.stream.stopped is not None


def calls_of(function: Callable[[], object]) -> int:
    """How many calls in Python a function makes: its cost, without a clock."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


async def test_prefixes_are_not_compared_with_each_other() -> None:
    """What is asked for upstream is found out again whenever somebody wants to know of another prefix."""
    relay = Relay()
    for number in range(2000):
        relay.wanted((b"x", b"%d" % number), True)
        relay.wanted((b"x", b"%d" % number, b"below"), True)
    assert relay._prefixes.needed() == {(b"x", b"%d" % number) for number in range(2000)}
    assert calls_of(relay._prefixes.needed) < 40_000
    relay.wanted((), True)
    assert relay._prefixes.needed() == {()}


async def test_the_end_of_a_fetch_costs_what_it_brought() -> None:
    """Somebody who asks for one Object after the other has each fetched on its own."""
    track = CachedTrack(NAME, Cache(1 << 30), lambda _track, start, end, _order: Hole(start, end))

    def begin(number: int, hole: Hole | None) -> None:
        place = Location(0, number)
        track.begin(ObjectHeader(place, 0, 128, (), b"", ObjectStatus.NORMAL, 0), live=False, hole=hole)

    for number in range(2000):
        begin(number, None)
    hole = Hole(Location(0, 2000), Location(0, 2003))
    for number in range(2000, 2004):
        begin(number, hole)
    pinned = [item for item in track.kept() if item.busy]
    assert len(pinned) == 4
    track.use(pinned[0])
    assert not pinned[0].busy
    assert calls_of(lambda: track.release(hole)) < 20
    assert not any(item.busy for item in track.kept())


async def test_those_who_read_slowly_do_not_keep_a_publisher_from_others() -> None:
    """As many fetches as a publisher is asked for at a time, each of which takes an Object now and then: they
    make room for who waits.
    """
    size, tracks = 256 * 1024, [make_track(b"%d" % number) for number in range(FETCHES + 1)]
    for track in tracks:
        filled(track, [0], 12, size)
    window = QuicOptions(max_data=size, max_stream_data=size)
    options = {"cache_bytes": 16 * size}
    async with network(*tracks, relay_options=options) as net:
        _, slow = await net.subscriber(limits=Limits(receive_buffer=size), client=window)
        fetches = [await slow.fetch(track.name, filter=EVERYTHING) for track in tracks[:FETCHES]]
        taken = [0] * FETCHES
        feeds = [net.relays[0].feeds[track.name] for track in tracks[:FETCHES]]

        async def drip(number: int) -> None:
            async for item in fetches[number]:
                taken[number] += isinstance(item, ReceivedObject)
                # Else what comes later would lie in the cache, and nobody would find it.
                assert taken[number] > 10 or net.relays[0].feeds[tracks[number].name] is feeds[number]
                await asyncio.sleep(20)

        dripping = [asyncio.create_task(drip(number)) for number in range(FETCHES)]
        await asyncio.sleep(5)
        async with asyncio.timeout(30):
            wanted = tracks[-1].name
            async with await net.sessions[0].fetch(wanted, filter=EVERYTHING) as fetch:
                assert len(objects(await collect(fetch))) == 12
        assert max(taken) < 12
        await asyncio.gather(*dripping)
        assert taken == [12] * FETCHES


async def test_publishers_that_failed_are_forgotten() -> None:
    """While a Track is followed, whoever announces its namespace is asked for it too (moqt 15 #9)."""
    track = make_track(b"k")
    async with network(track) as net, await join(net.sessions[0], track.name):
        for _ in range(5):
            async with guest(net) as peer:
                await peer.ask(PublishNamespace(peer.id(), ()))
                talk, request = await peer.request()
                assert isinstance(request, Subscribe)
                await talk.say(RequestError(RequestCode.DOES_NOT_EXIST), fin=True)
                await asyncio.sleep(1)
        await asyncio.sleep(1)
        gc.collect()
        assert not [known for known in gc.get_objects() if isinstance(known, Session) and known.closed]
