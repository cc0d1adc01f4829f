"""Fills, rule by rule of moqt 7.2."""

from __future__ import annotations

import asyncio

import pytest

from moqt.errors import DoneCode, RequestRejected, ResetCode, StreamReset
from moqt.filters import GroupOrder, Location, LocationFilter, RangeFilter, RangeKind
from moqt.limits import Limits
from moqt.quic.api import QuicOptions, Stream
from moqt.subscribing import Fill, ReceivedObject, StreamEnd
from moqt.track import Track
from moqt.wire import (
    DataStreamDecoder,
    FetchEncoder,
    FetchHeader,
    ObjectHeader,
    Parameters,
    PublishDone,
    RequestError,
    RequestOk,
    RequestUpdate,
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
    old_track,
    places,
    publish,
    sessions,
    tables_of,
    take,
)
from tests.moqt.raw import check_lives, subscribe_at

pytestmark = pytest.mark.virtual

RELATIVE = LocationFilter.relative_start(1)
NEXT = LocationFilter.next_object()


async def asked(peer: Peer, parameters: Parameters, *, control: bool = True) -> Talk:
    """SUBSCRIBE of a raw peer; what it opens next is a fill, if there is one."""
    if control:
        await peer.connection.accept()
    talk = await peer.ask(Subscribe(peer.id(), NAME, parameters))
    assert isinstance(await talk.next(), SubscribeOk)
    return talk


async def read_fill(stream: Stream, order: GroupOrder = GroupOrder.ASCENDING) -> tuple[int, list[At]]:
    """The Request ID and the Objects of a fill stream that ends with FIN."""
    decoder = DataStreamDecoder()
    found: list[At] = []
    number = -1
    while data := await stream.read():
        for event in decoder.feed(data):
            if isinstance(event, FetchHeader):
                number, decoder.order = event.request_id, order
            elif isinstance(event, ObjectHeader):
                found.append((event.location.group, event.location.object))
    decoder.finish()
    return number, found


async def check_no_stream(peer: Peer) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await peer.connection.accept()


# 3, 6, 7, 13: when there is a fill, and under which Request ID.


async def test_6_the_stream_has_the_request_id_of_what_asked_for_it() -> None:
    async with hostile(track=old_track()) as (_, peer):
        peer.id()
        talk = await asked(peer, Parameters(fill=Parameters(location_filter=LocationFilter.none())))
        assert await read_fill(await peer.connection.accept()) == (2, OLD)
        for _ in range(20):
            peer.id()
        update = RequestUpdate(peer.id(), Parameters(fill=Parameters(location_filter=RELATIVE)))
        await talk.say(update)
        assert await talk.next() == RequestOk(Parameters(largest=Location(2, 1)))
        assert await read_fill(await peer.connection.accept()) == (44, [(2, 0), (2, 1)])


async def test_3_and_13_a_fill_is_no_state() -> None:
    async with hostile(track=old_track()) as (_, peer):
        talk = await asked(peer, Parameters(fill=Parameters()))
        await peer.connection.accept()
        for parameters in (Parameters(), Parameters(location_filter=LocationFilter.none())):
            await talk.say(RequestUpdate(peer.id(), parameters))
            assert isinstance(await talk.next(), RequestOk)
        await check_no_stream(peer)


async def test_7_no_fill_while_it_is_paused() -> None:
    async with hostile(track=old_track()) as (_, peer):
        talk = await asked(peer, Parameters(forward=False, fill=Parameters()))
        await talk.say(RequestUpdate(peer.id(), Parameters(fill=Parameters())))
        await talk.say(RequestUpdate(peer.id(), Parameters(forward=True)))
        await check_no_stream(peer)
        await talk.say(RequestUpdate(peer.id(), Parameters(forward=False, fill=Parameters())))
        await check_no_stream(peer)
        await talk.say(RequestUpdate(peer.id(), Parameters(forward=True, fill=Parameters())))
        assert (await read_fill(await peer.connection.accept()))[1] == OLD


# 4, 8: what it holds.


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (NEXT, LocationFilter.absolute_start(0, 0), OLD),
        (NEXT, LocationFilter.none(), OLD),
        (NEXT, LocationFilter.relative_start(2), OLD[2:]),
        (NEXT, RELATIVE, OLD[5:]),
        (NEXT, LocationFilter.relative_start(9), OLD),
        (NEXT, LocationFilter.groups(0, 1), OLD[:5]),
        (NEXT, LocationFilter.groups(1, 99), OLD[2:]),
        (NEXT, LocationFilter.absolute_range(Location(0, 1), Location(1, 1)), OLD[1:4]),
        (NEXT, LocationFilter.absolute_range(Location(2, 1), Location(9, 9)), OLD[6:]),
        (NEXT, LocationFilter.absolute_start(2, 1), OLD[6:]),
        (LocationFilter.none(), None, OLD),
        (None, None, OLD),
        (RELATIVE, None, OLD[5:]),
        (LocationFilter.groups(1, 1), None, OLD[2:5]),
        # Nothing: no stream, and no error.
        (NEXT, None, None),
        (NEXT, NEXT, None),
        (NEXT, LocationFilter.relative_start(0), None),
        (NEXT, LocationFilter.absolute_start(2, 2), None),
        (NEXT, LocationFilter.absolute_range(Location(1, 2), Location(1, 1)), None),
    ],
    ids=str,
)
async def test_4_and_8_the_range(
    outer: LocationFilter | None, inner: LocationFilter | None, expected: list[At] | None
) -> None:
    async with hostile(track=old_track()) as (_, peer):
        await asked(peer, Parameters(location_filter=outer, fill=Parameters(location_filter=inner)))
        if expected is None:
            await check_no_stream(peer)
        else:
            assert await read_fill(await peer.connection.accept()) == (0, expected)


async def test_4_the_range_of_an_update() -> None:
    """The filter is that after the update; relative types start from the Largest Object of its time."""
    async with hostile(track=old_track()) as (session, peer):
        track = next(iter(session.tracks))
        talk = await asked(peer, Parameters(location_filter=LocationFilter.groups(0, 0), forward=False))
        publish(track, (7, 0), (7, 1))
        update = Parameters(location_filter=RELATIVE, forward=True, fill=Parameters())
        await talk.say(RequestUpdate(peer.id(), update))
        assert await talk.next() == RequestOk(Parameters(largest=Location(7, 1)))
        assert (await read_fill(await peer.connection.accept()))[1] == [(7, 0), (7, 1)]


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (LocationFilter.absolute_start(0, 0), True),
        (LocationFilter.absolute_start(2, 1), True),
        (LocationFilter.absolute_start(2, 2), False),
        (RELATIVE, True),
        (LocationFilter.relative_start(0), False),
        (NEXT, False),
    ],
)
async def test_8_the_subscriber_knows_whether_to_expect_it(inner: LocationFilter, expected: bool) -> None:
    async with (
        sessions(track=old_track()) as ends,
        await ends.subscriber.subscribe(NAME, fill=Fill(filter=inner)) as subscription,
    ):
        assert subscription.expects_fill is expected
        items = await finish(ends, subscription)
        assert (StreamEnd(None, True, None) in items) is expected
        await asyncio.sleep(0.1)
        assert set(tables_of(ends.subscriber).values()) == {0}


async def test_18_what_lies_outside_of_the_range_is_dropped() -> None:
    """The end is min(filter end, LARGEST_OBJECT); a stream that nobody asked for is stopped."""
    async with hostile() as (session, peer):
        fill = Fill(filter=LocationFilter.groups(1, 5))
        _, subscription = await subscribe_at(session, peer, fill=fill, largest=Location(2, 3))
        number = 0 if session.connection.is_client else 1
        encoder = FetchEncoder(number)
        data = encoder.header()
        for at in ((0, 9), (1, 0), (2, 3), (2, 4), (3, 0)):
            data += encoder.object(Location(*at), 1) + b"x"
        await peer.send(data, fin=True)
        again = await peer.send(data)
        other = await peer.send(b"\x05\x63")
        assert [(item.location.group, item.location.object) for item in await take(subscription, 2)] == [
            (1, 0),
            (2, 3),
        ]
        assert await anext(subscription) == StreamEnd(None, True, None)
        await check_lives(peer)
        assert again.stopped is not None
        assert other.stopped is not None


async def test_a_fill_that_overtakes_the_reply_waits_for_it() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe(NAME, fill=WHOLE))
        talk, request = await peer.request()
        encoder = FetchEncoder(request.request_id)
        await peer.send(encoder.header() + encoder.object(Location(1, 0), 1) + b"x", fin=True)
        await asyncio.sleep(0.5)
        await talk.say(SubscribeOk(1, Parameters(largest=Location(1, 0))))
        subscription = await asking
        async with asyncio.timeout(0.1):
            assert [item.payload for item in await take(subscription, 1)] == [b"x"]
        updating = asyncio.ensure_future(subscription.update(fill=Fill(filter=RELATIVE)))
        update = await talk.next()
        assert isinstance(update, RequestUpdate)
        encoder = FetchEncoder(update.request_id)
        await peer.send(encoder.header() + encoder.object(Location(3, 0), 1) + b"y", fin=True)
        await asyncio.sleep(0.5)
        await talk.say(RequestOk(Parameters(largest=Location(3, 0))))
        async with asyncio.timeout(0.1):
            assert await updating
            assert [item.payload for item in await take(subscription, 1)] == [b"y"]


async def test_a_fill_of_an_update_that_is_refused() -> None:
    async with hostile() as (session, peer):
        talk, subscription = await subscribe_at(session, peer)
        updating = asyncio.ensure_future(subscription.update(fill=WHOLE))
        update = await talk.next()
        assert isinstance(update, RequestUpdate)
        early = await peer.send(b"\x05" + bytes((update.request_id,)))
        await asyncio.sleep(0.1)
        await talk.say(RequestError(0x9, 1001))
        with pytest.raises(RequestRejected) as caught:
            await updating
        assert caught.value.retry_after == 1.0
        await asyncio.sleep(0.1)
        assert early.stopped is not None
        await talk.say(PublishDone(DoneCode.UPDATE_FAILED, 0), fin=True)
        assert await collect(subscription) == []


# 5, 16: what it inherits.


@pytest.mark.parametrize(
    ("outer", "inner", "descending"),
    [
        (None, None, False),
        (GroupOrder.DESCENDING, None, True),
        (GroupOrder.DESCENDING, GroupOrder.ASCENDING, False),
        (None, GroupOrder.DESCENDING, True),
    ],
)
async def test_5_and_16_group_order(
    outer: GroupOrder | None, inner: GroupOrder | None, descending: bool
) -> None:
    async with hostile(track=old_track()) as (_, peer):
        await asked(peer, Parameters(group_order=outer, fill=Parameters(group_order=inner)))
        order = GroupOrder.DESCENDING if descending else GroupOrder.ASCENDING
        _, found = await read_fill(await peer.connection.accept(), order)
        assert found == sorted(OLD, key=lambda at: (-at[0] if descending else at[0], at[1]))


@pytest.mark.parametrize("order", list(GroupOrder))
async def test_16_our_fills_say_their_order(order: GroupOrder) -> None:
    fill = Fill(filter=LocationFilter.none(), order=order)
    async with (
        sessions(track=old_track()) as ends,
        await ends.subscriber.subscribe(NAME, fill=fill) as subscription,
    ):
        found = places(await finish(ends, subscription))
        assert found == sorted(OLD, key=lambda at: (at[0] * (1 if order == 1 else -1), at[1]))


def low(kind: RangeKind, last: int) -> RangeFilter:
    return RangeFilter(kind, ((0, last),))


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ((low(RangeKind.OBJECTID, 0),), (), [(0, 0), (1, 0), (2, 0)]),
        ((low(RangeKind.OBJECTID, 0),), (low(RangeKind.OBJECTID, 1),), [at for at in OLD if at[1] <= 1]),
        ((low(RangeKind.OBJECTID, 0),), (low(RangeKind.SUBGROUP, 9),), [(0, 0), (1, 0), (2, 0)]),
        ((), (low(RangeKind.OBJECTID, 0),), [(0, 0), (1, 0), (2, 0)]),
        ((low(RangeKind.OBJECTID, 0),), (RangeFilter(RangeKind.OBJECTID),), OLD),
    ],
)
async def test_5_range_filters(
    outer: tuple[RangeFilter, ...], inner: tuple[RangeFilter, ...], expected: list[At]
) -> None:
    async with hostile(track=old_track()) as (_, peer):
        await asked(peer, Parameters(range_filters=outer, fill=Parameters(range_filters=inner)))
        assert (await read_fill(await peer.connection.accept()))[1] == expected


@pytest.mark.parametrize(("inner", "first"), [(None, "live"), (3, "fill")])
async def test_5_priority(inner: int | None, first: str) -> None:
    """The fill's own, or that of the subscription: here another subscription is between both."""
    track = Track(NAME)
    track.append(0, 0, bytes(3_000_000))
    async with (
        sessions(track=track, window=16384) as ends,
        await ends.subscriber.subscribe(NAME, priority=5) as live,
        await ends.subscriber.subscribe(
            NAME, priority=9, fill=Fill(filter=LocationFilter.none(), priority=inner)
        ) as filled,
    ):
        track.append(1, 0, bytes(3_000_000))
        order: list[str] = []

        async def watch(name: str, items: object) -> None:
            assert hasattr(items, "__aiter__")
            async for item in items:
                if isinstance(item, ReceivedObject) and (name == "live" or item.fill):
                    order.append(name)
                    return

        await asyncio.gather(watch("live", live), watch("fill", filled))
        assert order[0] == first


# 9 to 12: how it ends.


async def test_10_stopped_by_the_subscriber() -> None:
    track = old_track(one_subgroup=False)
    track.append(2, 2, bytes(3_000_000))
    async with hostile(track=track) as (_, peer):
        talk = await asked(peer, Parameters(fill=Parameters()))
        fill = await peer.connection.accept()
        fill.stop(ResetCode.CANCELLED)
        publish(track, (3, 0))
        live = await peer.connection.accept()
        assert await live.read()
        await talk.say(RequestUpdate(peer.id(), Parameters(fill=Parameters(location_filter=RELATIVE))))
        assert isinstance(await talk.next(), RequestOk)
        assert (await read_fill(await peer.connection.accept()))[1] == [(3, 0)]


async def test_10_reset_by_the_publisher() -> None:
    async with hostile() as (session, peer):
        talk, subscription = await subscribe_at(session, peer, fill=WHOLE, largest=Location(3, 0))
        encoder = FetchEncoder(0 if session.connection.is_client else 1)
        fill = await peer.send(encoder.header() + encoder.object(Location(0, 0), 4) + b"ab")
        await asyncio.sleep(0.1)
        fill.reset(ResetCode.UNKNOWN_OBJECT_STATUS)
        assert await anext(subscription) == StreamEnd(None, True, ResetCode.UNKNOWN_OBJECT_STATUS)
        await talk.say(PublishDone(DoneCode.TRACK_ENDED, 1), fin=True)
        assert await collect(subscription) == []


async def test_11_cancelling_resets_all_fills() -> None:
    track = Track(NAME)
    track.append(0, 0, bytes(8_000_000))
    async with hostile(track=track) as (session, peer):
        talk = await asked(peer, Parameters(fill=Parameters()))
        await talk.say(RequestUpdate(peer.id(), Parameters(fill=Parameters())))
        fills = [await peer.connection.accept() for _ in range(2)]
        talk.stream.reset(ResetCode.CANCELLED)
        await asyncio.sleep(0.2)
        for fill in fills:
            with pytest.raises(StreamReset):
                await fill.read()
        assert set(tables_of(session).values()) == {0}


async def test_12_several_at_once() -> None:
    track = old_track(one_subgroup=False)
    async with (
        sessions(track=track, jitter=0.02, seed=4) as ends,
        await ends.subscriber.subscribe(NAME, fill=Fill(filter=LocationFilter.groups(0, 0))) as subscription,
    ):
        publish(track, *NEW)
        sent = await asyncio.gather(
            subscription.update(fill=Fill(filter=LocationFilter.groups(1, 1))),
            subscription.update(fill=Fill(filter=LocationFilter.groups(2, 9), order=GroupOrder.DESCENDING)),
            subscription.update(fill=Fill(filter=LocationFilter.groups(50, 60))),
        )
        assert list(sent) == [True, True, False]
        items = await finish(ends, subscription)
        check_once(places(items), OLD + NEW)
        assert ends_of(items).count(StreamEnd(None, True, None)) == 3


async def test_12_but_not_any_number() -> None:
    track = Track(NAME)
    track.append(0, 0, bytes(8_000_000))
    async with hostile(track=track, limits=Limits(max_fills=2, retry_after=0.5)) as (_, peer):
        talk = await asked(peer, Parameters(fill=Parameters()))
        for _ in range(2):
            await talk.say(RequestUpdate(peer.id(), Parameters(fill=Parameters())))
        assert isinstance(await talk.next(), RequestOk)
        answer = await talk.next()
        assert isinstance(answer, RequestError)
        assert (answer.code, answer.retry_after) == (0x9, 0.5)


# 14: the count.


async def test_14_fills_count_and_none_starts_after_publish_done() -> None:
    async with hostile(track=old_track()) as (session, peer):
        talk = await asked(peer, Parameters(fill=Parameters()))
        await talk.say(RequestUpdate(peer.id(), Parameters(fill=Parameters())))
        assert isinstance(await talk.next(), RequestOk)
        session.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        assert await talk.next() == PublishDone(DoneCode.TRACK_ENDED, 2, "")
        await talk.say(RequestUpdate(peer.id(), Parameters(fill=Parameters())))
        assert await talk.next() is None
        for _ in range(2):
            assert (await read_fill(await peer.connection.accept()))[1] == OLD
        await check_no_stream(peer)


async def test_14_a_fill_delays_publish_done() -> None:
    """And one that an update asks for meanwhile is still served."""
    track = Track(NAME)
    track.append(0, 0, bytes(6_000_000))
    async with hostile(track=track) as (session, peer):
        talk = await asked(peer, Parameters(fill=Parameters()))
        first = await peer.connection.accept()
        session.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        await talk.say(RequestUpdate(peer.id(), Parameters(fill=Parameters())))
        assert isinstance(await talk.next(), RequestOk)
        second = await peer.connection.accept()
        done = asyncio.ensure_future(talk.next())
        for stream in (first, second):
            await asyncio.sleep(1)
            assert not done.done()
            assert (await read_fill(stream))[1] == [(0, 0)]
        assert await done == PublishDone(DoneCode.TRACK_ENDED, 2, "")


async def test_the_credit_of_streams_runs_out_and_comes_back() -> None:
    options = QuicOptions(max_uni_streams=2)
    async with (
        sessions(track=old_track(), client=options) as ends,
        await ends.subscriber.subscribe(NAME, fill=WHOLE) as subscription,
    ):
        for _ in range(4):
            assert await subscription.update(fill=WHOLE)
        publish(ends.track, *NEW)
        for group in (2, 3, 4, 6):
            ends.track.end_group(group, 9)
        items = await finish(ends, subscription)
        check_once(places(items), OLD + NEW)
        assert subscription.done is not None
        assert subscription.done.stream_count == 9
