"""How a subscription ends, and what may come before it begins (moqt 4.2, 9, 12.6)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import pytest

from moqt.errors import DoneCode, RequestRejected, ResetCode, StreamReset
from moqt.filters import Location, LocationFilter
from moqt.limits import Limits
from moqt.quic.api import QuicOptions, Stream
from moqt.subscribing import ReceivedObject, StreamEnd
from moqt.track import Track
from moqt.wire import (
    DataStreamDecoder,
    ObjectStatus,
    Parameters,
    PublishDone,
    RequestError,
    RequestOk,
    RequestUpdate,
    SubgroupHeader,
    Subscribe,
    SubscribeOk,
)
from tests.moqt.ends import (
    NAME,
    NEW,
    OLD,
    WHOLE,
    At,
    Peer,
    Talk,
    check_once,
    collect,
    ends_of,
    finish,
    hostile,
    objects_of,
    old_track,
    places,
    publish,
    publish_groups,
    sessions,
    tables_of,
    take,
)
from tests.moqt.raw import subgroup, subscribe_at, subscribed

pytestmark = pytest.mark.virtual

# The end.


@pytest.mark.parametrize("jitter", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(12))
async def test_publish_done_that_overtakes_its_streams_loses_nothing(seed: int, jitter: float) -> None:
    async with (
        sessions(track=old_track(), seed=seed, jitter=jitter, loss=0.1, chunk=64) as ends,
        await ends.subscriber.subscribe(NAME, fill=WHOLE) as subscription,
    ):
        publish(ends.track, *NEW)
        for group in (2, 3, 4, 6):
            ends.track.end_group(group, 9)
        items = await finish(ends, subscription)
        check_once(places(items), OLD + NEW)
        assert subscription.done is not None
        assert subscription.done.stream_count == len(ends_of(items)) == 5
        assert ends.subscriber.connection.closed is None


@pytest.mark.parametrize("seed", range(6))
async def test_the_stream_count_is_true(seed: int) -> None:
    """It counts what the peer got to see: fills, Subgroups, reset ones too, but none never opened."""
    async with hostile(track=old_track(one_subgroup=False), seed=seed, jitter=0.02) as (session, peer):
        track = next(iter(session.tracks))
        talk = await peer.ask(Subscribe(peer.id(), NAME, Parameters(fill=Parameters())))
        assert isinstance(await talk.next(), SubscribeOk)
        seen = []

        async def accept() -> None:
            while True:
                seen.append(await peer.connection.accept())

        accepting = asyncio.ensure_future(accept())
        chance = random.Random(seed)
        for group in range(5, 12):
            for number in range(3):
                publish(track, (group, number), subgroup=number)
            if chance.random() < 0.5:
                await asyncio.sleep(0.03)
            if chance.random() < 0.5:
                track.end_group(group, 3)
            if chance.random() < 0.4:
                narrow = LocationFilter.groups(group, group + 2)
                await talk.say(RequestUpdate(peer.id(), Parameters(location_filter=narrow)))
        session.tracks.remove(NAME, DoneCode.GOING_AWAY)
        while not isinstance(message := await talk.next(), PublishDone):
            assert isinstance(message, RequestOk)
        await asyncio.sleep(1)
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        assert message.stream_count == len(seen) - 1  # One is the control stream.


async def test_streams_that_were_never_opened_do_not_count() -> None:
    """Stream credit for the fill alone; then the subscriber narrows, and nothing of it is ever opened."""
    async with hostile(track=old_track(one_subgroup=False), client=QuicOptions(max_uni_streams=2)) as (
        session,
        peer,
    ):
        track = next(iter(session.tracks))
        control = await peer.connection.accept()
        talk = await peer.ask(Subscribe(peer.id(), NAME, Parameters(fill=Parameters())))
        assert isinstance(await talk.next(), SubscribeOk)
        fill = await peer.connection.accept()
        for group in range(5, 9):
            publish(track, (group, 0))
        await asyncio.sleep(0.1)
        narrow = LocationFilter.groups(99, 99)
        await talk.say(RequestUpdate(peer.id(), Parameters(location_filter=narrow)))
        assert isinstance(await talk.next(), RequestOk)
        session.tracks.remove(NAME, DoneCode.GOING_AWAY)
        while await fill.read():
            pass
        assert await talk.next() == PublishDone(DoneCode.GOING_AWAY, 1, "")
        assert control.stopped is None


async def test_publish_done_waits_for_streams_that_never_came() -> None:
    """But not for ever (moqt 4.2), and it is told that they are missing."""
    async with subscribed(limits=Limits(done_deadline=3.0)) as (_, _peer, subscription, talk):
        started = asyncio.get_running_loop().time()
        await talk.say(PublishDone(DoneCode.TRACK_ENDED, 1), fin=True)
        assert await collect(subscription) == [StreamEnd(None, False, ResetCode.INTERNAL_ERROR)]
        assert 3.0 <= asyncio.get_running_loop().time() - started < 3.1


async def test_publish_done_with_an_unknown_count_waits_for_what_runs() -> None:
    async with subscribed(limits=Limits(done_deadline=3.0), filter=LocationFilter.none()) as (
        _,
        peer,
        subscription,
        talk,
    ):
        stream = await peer.send(subgroup((0, b"a")))
        await talk.say(PublishDone(DoneCode.TRACK_ENDED), fin=True)
        await asyncio.sleep(10)
        assert subscription.done is not None
        await stream.write(b"\x00\x01b", fin=True)
        assert [item.payload for item in objects_of(await collect(subscription))] == [b"a", b"b"]


async def test_a_count_that_no_memory_could_hold() -> None:
    async with subscribed() as (_, peer, subscription, talk):
        for _ in range(200):
            peer.connection.open(bidirectional=False).reset(4)
            await asyncio.sleep(0.01)
        await talk.say(PublishDone(DoneCode.TRACK_ENDED, 2**63), fin=True)
        assert 1 <= len(await collect(subscription)) <= 64


async def test_a_counted_stream_that_was_reset_before_its_header() -> None:
    """It can't be told whose it was, so the wait for it is short."""
    async with subscribed() as (_, peer, subscription, talk):
        started = asyncio.get_running_loop().time()
        stream = peer.connection.open(bidirectional=False)
        stream.reset(4)
        await talk.say(PublishDone(DoneCode.TRACK_ENDED, 1), fin=True)
        assert await collect(subscription) == [StreamEnd(None, False, ResetCode.GOING_AWAY)]
        assert asyncio.get_running_loop().time() - started < 1


async def test_a_counted_stream_that_is_missing_while_another_is_read() -> None:
    async with subscribed(filter=LocationFilter.none()) as (_, peer, subscription, talk):
        started = asyncio.get_running_loop().time()
        peer.connection.open(bidirectional=False).reset(4)
        stream = await peer.send(subgroup((0, b"a")))
        await talk.say(PublishDone(DoneCode.TRACK_ENDED, 2), fin=True)
        await asyncio.sleep(1)
        await stream.write(b"", fin=True)
        items = await collect(subscription)
        assert ends_of(items) == [StreamEnd(0, False, None), StreamEnd(None, False, 4)]
        assert asyncio.get_running_loop().time() - started < 1.6


async def test_a_fill_that_was_reset_before_its_header() -> None:
    async with hostile() as (session, peer):
        _, subscription = await subscribe_at(session, peer, fill=WHOLE, largest=Location(3, 0))
        assert subscription.expects_fill
        peer.connection.open(bidirectional=False).reset(4)
        assert await anext(subscription) == StreamEnd(None, True, 4)


async def test_the_subscriber_fins_when_it_has_all() -> None:
    async with subscribed(filter=LocationFilter.none()) as (_, peer, subscription, talk):
        await talk.say(PublishDone(DoneCode.TRACK_ENDED, 1), fin=True)
        reading = asyncio.ensure_future(talk.next())
        await asyncio.sleep(0.5)
        assert not reading.done()
        await peer.send(subgroup((0, b"a")), fin=True)
        assert await reading is None
        assert len(await collect(subscription)) == 2


async def test_only_the_first_end_counts() -> None:
    async with sessions(window=4096) as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        ends.track.append(0, 0, bytes(100_000))
        ends.track.end_group(0, 1)
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        finishing = asyncio.ensure_future(ends.publisher.finish(DoneCode.GOING_AWAY, deadline=5))
        assert len(objects_of(await collect(subscription))) == 1
        assert subscription.done == PublishDone(DoneCode.TRACK_ENDED, 1, "")
        await finishing
        assert not ends.publisher.closed


@pytest.mark.parametrize(
    ("code", "reset"),
    [
        (DoneCode.TRACK_ENDED, None),
        (DoneCode.GOING_AWAY, ResetCode.GOING_AWAY),
        (DoneCode.INTERNAL_ERROR, ResetCode.INTERNAL_ERROR),
        (DoneCode.EXPIRED, ResetCode.CANCELLED),
    ],
)
async def test_the_end_in_the_middle_of_a_group(code: DoneCode, reset: ResetCode | None) -> None:
    """What was published before leaves. TRACK_ENDED says that it was all, so FIN is true; else the Group is
    not whole, and its stream must be reset.
    """
    async with sessions(window=8192) as ends, await ends.subscriber.subscribe(NAME) as subscription:
        publish_groups(ends.track, [0], 2)
        ends.track.append(1, 0, bytes(300_000))
        ends.track.append(1, 1, bytes(100_000))
        items = await finish(ends, subscription, code)
        assert [item.location for item in objects_of(items)] == [
            Location(0, 0),
            Location(0, 1),
            Location(1, 0),
            Location(1, 1),
        ]
        assert ends_of(items) == [StreamEnd(0, False, None), StreamEnd(1, False, reset)]
        assert subscription.done is not None
        assert subscription.done.stream_count == 2


async def test_the_end_of_one_track_while_another_keeps_sending() -> None:
    """GOING_AWAY in mid-group must not wait until the whole session has nothing to send."""
    track = Track(NAME, one_subgroup=True)
    async with sessions(track=track, window=16384) as ends:
        other = Track(NAME.__class__(NAME.namespace, b"busy"), one_subgroup=True)
        ends.tracks.add(other)
        busy = await ends.subscriber.subscribe(other.name)
        draining = asyncio.ensure_future(collect(busy))
        subscription = await ends.subscriber.subscribe(NAME)

        async def load() -> None:
            for group in range(2000):
                other.append(group, 0, bytes(50_000))
                other.end_group(group, 1)
                await asyncio.sleep(0.02)

        loading = asyncio.ensure_future(load())
        publish(track, (0, 0))
        await take(subscription, 1)
        async with asyncio.timeout(2):  # Less than `linger`: its own bytes have left long before.
            await finish(ends, subscription, DoneCode.GOING_AWAY)
        loading.cancel()
        await busy.close()
        await asyncio.gather(loading, draining, return_exceptions=True)


async def test_end_of_group_and_end_of_track_are_delivered() -> None:
    async with sessions() as ends, await ends.subscriber.subscribe(NAME) as subscription:
        publish_groups(ends.track, [0], 1)
        publish(ends.track, (1, 0))
        ends.track.end(Location(1, 1))
        items = await finish(ends, subscription)
        statuses = [
            (item.location, item.status) for item in items if isinstance(item, ReceivedObject) and item.status
        ]
        assert statuses == [
            (Location(0, 1), ObjectStatus.END_OF_GROUP),
            (Location(1, 1), ObjectStatus.END_OF_TRACK),
        ]
        assert [end.code for end in ends_of(items)] == [None, None]


# Cancelling.


async def data_streams(peer: Peer, count: int) -> list[Stream]:
    """The next data streams of the session; the control stream is left out."""
    streams: list[Stream] = []
    while len(streams) < count:
        stream = await peer.connection.accept()
        if stream.id != (3 if peer.connection.is_client else 2):
            streams.append(stream)
    return streams


async def read_all(stream: Stream) -> None:
    while await stream.read():
        pass


@pytest.mark.parametrize("how", ["reset", "stop", "both"])
async def test_cancelled_by_the_subscriber(how: str) -> None:
    """All its streams are reset (moqt 3.4), and nothing is kept."""
    track = Track(NAME)
    publish(track, (0, 0))
    track.append(0, 1, bytes(5_000_000))
    async with hostile(track=track) as (session, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME, Parameters(fill=Parameters())))
        assert isinstance(await talk.next(), SubscribeOk)
        publish(track, (1, 0), (2, 0))
        streams = await data_streams(peer, 3)
        if how != "stop":
            talk.stream.reset(ResetCode.CANCELLED)
        if how != "reset":
            talk.stream.stop(ResetCode.CANCELLED)
        await asyncio.sleep(0.1)
        for stream in streams:
            with pytest.raises(StreamReset):
                await read_all(stream)
        assert set(tables_of(session).values()) == {0}
        publish(track, (3, 0))
        await peer.alive()
        assert not track._watchers


async def test_fin_is_no_cancel() -> None:
    async with hostile() as (session, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME), fin=True)
        assert isinstance(await talk.next(), SubscribeOk)
        track = next(iter(session.tracks))
        publish(track, (0, 0))
        [stream] = await data_streams(peer, 1)
        assert await stream.read()
        session.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        assert await talk.next() == PublishDone(DoneCode.TRACK_ENDED, 1, "")


@pytest.mark.parametrize("how", ["reset", "stop", "fin"])
async def test_broken_off_by_the_publisher(how: str) -> None:
    """Never a clean end; our streams are stopped so that their credit comes back."""
    async with subscribed(filter=LocationFilter.none()) as (session, peer, subscription, talk):
        stream = await peer.send(subgroup((0, b"a")))
        assert len(await take(subscription, 1)) == 1
        match how:
            case "reset":
                talk.stream.reset(ResetCode.GOING_AWAY)
            case "stop":
                talk.stream.stop(ResetCode.GOING_AWAY)
                talk.stream.reset(ResetCode.GOING_AWAY)
            case _:
                await talk.say(b"", fin=True)
        with pytest.raises((StreamReset, RequestRejected)):
            await collect(subscription)
        await asyncio.sleep(0.1)
        assert stream.stopped is not None
        assert set(tables_of(session).values()) == {0}


async def test_closing_stops_what_is_being_read() -> None:
    """Even if the publisher does not reset its streams, as one is known not to (moqt 23)."""
    async with subscribed(filter=LocationFilter.none()) as (session, peer, subscription, talk):
        streams = [await peer.send(subgroup((0, b"a"), group=group)) for group in range(5)]
        await asyncio.sleep(0.1)
        await subscription.close()
        await subscription.close()
        await asyncio.sleep(0.1)
        assert [stream.stopped is not None for stream in streams] == [True] * 5
        assert talk.stream.stopped is not None
        late = await peer.send(subgroup((0, b"a"), group=9))
        await asyncio.sleep(0.1)
        assert late.stopped is not None
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)
        assert set(tables_of(session).values()) == {0}
        await peer.alive()


async def test_nothing_is_left_of_many_subscriptions() -> None:
    async with sessions(
        track=old_track(), server=QuicOptions(max_bidi_streams=3), client=QuicOptions(max_uni_streams=4)
    ) as ends:
        for number in range(200):
            subscription = await ends.subscriber.subscribe(NAME, fill=WHOLE)
            if number % 3:
                await anext(subscription)
            await subscription.close()
            if number % 7 == 0:
                publish(ends.track, (100 + number, 0))
        await asyncio.sleep(10)
        assert set(tables_of(ends.subscriber).values()) == {0}
        assert set(tables_of(ends.publisher).values()) == {0}
        assert not ends.track._watchers
        for session in (ends.publisher, ends.subscriber):
            assert len(session._tasks) == 2  # accept and the peer's control stream


async def test_a_subgroup_that_the_subscriber_stopped() -> None:
    """It is not opened again; others are, and it too after a pause (moqt 12.6)."""
    track = Track(NAME)
    async with hostile(track=track) as (_, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await talk.next(), SubscribeOk)
        publish(track, (0, 0), subgroup=0)
        publish(track, (0, 1), subgroup=1)
        streams = await data_streams(peer, 2)
        headers = [await header_of(stream) for stream in streams]
        streams[[header.subgroup for header in headers].index(0)].stop(ResetCode.CANCELLED)
        await asyncio.sleep(0.1)
        publish(track, (1, 0), subgroup=0)
        [stream] = await data_streams(peer, 1)
        assert (await header_of(stream)).group == 1
        track.end_group(1, 1)
        publish(track, (0, 2), subgroup=0)
        publish(track, (0, 3), subgroup=1)
        publish(track, (2, 0), subgroup=0)
        [stream] = await data_streams(peer, 1)
        assert (await header_of(stream)).group == 2
        await talk.say(RequestUpdate(peer.id(), Parameters(forward=False)))
        await talk.say(RequestUpdate(peer.id(), Parameters(forward=True)))
        assert [type(await talk.next()) for _ in range(2)] == [RequestOk, RequestOk]
        publish(track, (0, 4), subgroup=0)
        [stream] = await data_streams(peer, 1)
        header = await header_of(stream)
        assert (header.group, header.subgroup, header.first_object) == (0, 0, False)


async def header_of(stream: Stream) -> SubgroupHeader:
    header = next(DataStreamDecoder().feed(await stream.read()))
    assert isinstance(header, SubgroupHeader)
    return header


@pytest.mark.parametrize(
    ("first", "joined", "expected"),
    [
        (True, (0, 0), True),
        (False, (0, 1), False),
    ],
)
async def test_first_object_and_end_of_group_bits(first: bool, joined: At, expected: bool) -> None:
    """FIRST_OBJECT says that nothing of the Subgroup was left out at its start (moqt 12.2)."""
    track = Track(NAME, one_subgroup=True)
    if not first:
        publish(track, (0, 0))
    async with hostile(track=track) as (_, peer):
        talk = await peer.ask(
            Subscribe(peer.id(), NAME, Parameters(location_filter=LocationFilter.next_object()))
        )
        assert isinstance(await talk.next(), SubscribeOk)
        publish(track, joined)
        [stream] = await data_streams(peer, 1)
        header = await header_of(stream)
        assert header.first_object is expected
        assert header.end_of_group


async def test_an_end_of_track_in_a_new_group_is_the_first_object_of_its_subgroup() -> None:
    """D06."""
    track = Track(NAME, one_subgroup=True)
    async with hostile(track=track) as (_, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await talk.next(), SubscribeOk)
        track.end(Location(13, 0))
        [stream] = await data_streams(peer, 1)
        await asyncio.sleep(0.1)
        assert await stream.read() == bytes.fromhex("51000d80" + "00" + "00" + "0004")
        assert await stream.read() == b""


# Streams that come before their SUBSCRIBE_OK.


async def early(
    peer: Peer, session: object, streams: Iterable[int], wait: float
) -> tuple[Talk, list[Stream]]:
    talk, _ = await peer.request()
    opened = [await peer.send(subgroup((0, b"%d" % group), group=group), fin=True) for group in streams]
    await asyncio.sleep(wait)
    await talk.say(SubscribeOk(1))
    return talk, opened


async def test_streams_that_come_before_their_subscribe_ok() -> None:
    async with hostile(limits=Limits(parked_streams=5)) as (session, peer):
        asking = asyncio.ensure_future(session.subscribe(NAME, filter=LocationFilter.none()))
        talk, opened = await early(peer, session, range(8), 0.5)
        subscription = await asking
        await talk.say(PublishDone(DoneCode.TRACK_ENDED, 5), fin=True)
        items = await collect(subscription)
        assert {item.location.group for item in objects_of(items)} == set(range(5))
        assert session.incoming._parked == {}
        assert len(opened) == 8


async def test_parked_streams_do_not_wait_for_ever() -> None:
    async with hostile(limits=Limits(parked_deadline=2.0)) as (session, peer):
        stream = await peer.send(subgroup((0, b"a"), alias=9))
        await asyncio.sleep(1.9)
        assert stream.stopped is None
        await asyncio.sleep(0.2)
        assert stream.stopped is not None
        assert session.incoming._parked == {}
        await peer.alive()


async def test_streams_of_a_subscription_that_was_rejected() -> None:
    async with hostile(limits=Limits(parked_deadline=2.0)) as (session, peer):
        asking = asyncio.ensure_future(session.subscribe(NAME, fill=WHOLE))
        talk, request = await peer.request()
        fill = await peer.send(b"\x05" + bytes((request.request_id,)))
        live = await peer.send(subgroup((0, b"a")))
        await asyncio.sleep(0.1)
        await talk.say(RequestError(0x10), fin=True)
        with pytest.raises(RequestRejected):
            await asking
        await asyncio.sleep(0.1)
        assert fill.stopped is not None
        await asyncio.sleep(2)
        assert live.stopped is not None
        assert set(tables_of(session).values()) == {0}


async def test_a_retired_alias() -> None:
    """Its late streams are stopped at once."""
    async with subscribed() as (_, peer, subscription, _talk):
        await subscription.close()
        stream = await peer.send(subgroup((0, b"a")))
        await asyncio.sleep(0.05)
        assert stream.stopped is not None
