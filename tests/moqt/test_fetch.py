"""FETCH (moqt 6.3, 10)."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.errors import DoneCode, RequestCode, RequestRejected, ResetCode, StreamReset, UsageError
from moqt.filters import GroupOrder, Location, LocationFilter, RangeFilter, RangeKind
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.quic.api import QuicOptions
from moqt.quic.virtual import run_virtual
from moqt.session import Session
from moqt.subscribing import FetchStream, StreamEnd
from moqt.track import Track
from moqt.wire import (
    AliasType,
    Fetch,
    FetchEncoder,
    FetchOk,
    Parameters,
    PropertyType,
    RequestError,
    RequestOk,
    RequestUpdate,
    Token,
    encode_properties,
)
from tests.moqt.ends import (
    NAME,
    NAMESPACE,
    OLD,
    At,
    Ends,
    Peer,
    Talk,
    collect,
    ends_of,
    hostile,
    objects_of,
    old_track,
    payload,
    places,
    publish,
    publish_groups,
    sessions,
    tables_of,
    take,
)
from tests.moqt.raw import check_refused

pytestmark = pytest.mark.virtual

ALL = LocationFilter.absolute_start(0, 0)


async def fetched(ends: Ends, location_filter: LocationFilter, **options: object) -> tuple[list[At], FetchOk]:
    """What a fetch brings, and its FETCH_OK."""
    async with await ends.subscriber.fetch(NAME, filter=location_filter, **options) as fetch:  # type: ignore[arg-type]  # options of any kind
        items = await collect(fetch)
        assert ends_of(items) == [StreamEnd(None, True, None)]
        assert fetch.end is not None
        return places(items), fetch.end


@pytest.mark.parametrize(
    ("location_filter", "expected", "end"),
    [
        (LocationFilter.none(), OLD, (2, 1)),
        (ALL, OLD, (2, 1)),
        (LocationFilter.absolute_start(1, 1), OLD[3:], (2, 1)),
        (LocationFilter.absolute_start(2, 1), OLD[6:], (2, 1)),
        (LocationFilter.groups(0, 0), OLD[:2], (0, 1)),
        (LocationFilter.groups(1, 1), OLD[2:5], (1, 2)),
        (LocationFilter.groups(1, 2), OLD[2:], (2, 1)),
        (LocationFilter.groups(0, 99), OLD, (2, 1)),
        (LocationFilter.absolute_range(Location(0, 1), Location(1, 1)), OLD[1:4], (1, 1)),
        (LocationFilter.absolute_range(Location(1, 2), Location(1, 2)), OLD[4:5], (1, 2)),
        (LocationFilter.absolute_range(Location(0, 0), Location(9, 9)), OLD, (2, 1)),
        # In a valid range where nothing is: header and FIN. The end that is told is in the request's range.
        (LocationFilter.absolute_range(Location(0, 5), Location(0, 9)), [], (0, 9)),
        (LocationFilter(LocationFilter.groups(0, 0).type, 0, 5), [], (0, 5)),
    ],
    ids=str,
)
async def test_ranges(location_filter: LocationFilter, expected: list[At], end: At) -> None:
    async with sessions(track=old_track()) as ends:
        found, ok = await fetched(ends, location_filter)
        assert found == expected
        assert (ok.end, ok.end_of_track) == (Location(*end), False)


async def test_end_of_track() -> None:
    """Only if the End Location is the last Object of all (moqt 4.2)."""
    async with sessions(track=old_track()) as ends:
        ends.track.end(Location(3, 0))
        for location_filter, expected in (
            (ALL, True),
            (LocationFilter.groups(2, 2), True),
            (LocationFilter.absolute_range(Location(2, 1), Location(2, 1)), True),
            (LocationFilter.absolute_range(Location(0, 0), Location(99, 0)), True),
            (LocationFilter.groups(0, 1), False),
            (LocationFilter.absolute_range(Location(2, 0), Location(2, 0)), False),
        ):
            _, ok = await fetched(ends, location_filter)
            assert ok.end_of_track is expected


async def test_descending_groups_ascending_objects() -> None:
    async with sessions(track=old_track(), chunk=7) as ends:
        found, _ = await fetched(ends, ALL, order=GroupOrder.DESCENDING)
        assert found == [(2, 0), (2, 1), (1, 0), (1, 1), (1, 2), (0, 0), (0, 1)]


async def test_inside_a_group_by_object_id_whatever_the_subgroup() -> None:
    track = Track(NAME)
    for number in (5, 0, 3, 1, 4, 2):
        publish(track, (0, number), subgroup=number)
    async with sessions(track=track) as ends:
        async with await ends.subscriber.fetch(NAME, filter=ALL) as fetch:
            received = objects_of(await collect(fetch))
        assert [(item.location.object, item.subgroup) for item in received] == [(n, n) for n in range(6)]
        assert all(item.fill for item in received)


async def test_fields_of_objects_survive() -> None:
    properties = encode_properties(((0x78, 5), (0x79, b"x")))
    track = Track(NAME, properties=((PropertyType.MAX_CACHE_DURATION, 1000),))
    track.append(3, 7, b"abc", subgroup=9, priority=4, properties=properties)
    track.append(3, 8, b"", subgroup=2, priority=200)
    async with sessions(track=track) as ends, await ends.subscriber.fetch(NAME, filter=ALL) as fetch:
        first, second = objects_of(await collect(fetch))
        assert (first.subgroup, first.priority, first.properties) == (9, 4, ((0x78, 5), (0x79, b"x")))
        assert (second.subgroup, second.priority, bytes(second.payload)) == (2, 200, b"")
        assert fetch.properties == ((PropertyType.MAX_CACHE_DURATION, 1000),)


def by_object(*ranges: tuple[int, int | None]) -> tuple[RangeFilter, ...]:
    return (RangeFilter(RangeKind.OBJECTID, ranges),)


async def test_the_first_objects_of_each_group() -> None:
    async with sessions(track=old_track()) as ends:
        assert ends.subscriber.peer_setup.max_filter_ranges > 0
        found, ok = await fetched(ends, LocationFilter.groups(0, 1), range_filters=by_object((0, 0)))
        assert found == [(0, 0), (1, 0)]
        assert ok.end == Location(1, 2)


async def test_other_range_filters() -> None:
    track = Track(NAME)
    for group in range(4):
        for number in range(4):
            properties = encode_properties(((0x78, number),)) if group % 2 else b""
            track.append(
                group,
                number,
                payload((group, number)),
                subgroup=number % 2,
                priority=group,
                properties=properties,
            )
    every = [(group, number) for group in range(4) for number in range(4)]
    cases: list[tuple[tuple[RangeFilter, ...], list[At]]] = [
        ((RangeFilter(RangeKind.SUBGROUP, ((1, 1),)),), [at for at in every if at[1] % 2]),
        ((RangeFilter(RangeKind.PRIORITY, ((2, None),)),), [at for at in every if at[0] >= 2]),
        (
            (RangeFilter(RangeKind.OBJECT_PROPERTY, ((2, 9),), property_type=0x78),),
            [at for at in every if at[0] % 2 and at[1] >= 2],
        ),
        (by_object((0, 0), (3, None)), [at for at in every if at[1] in (0, 3)]),
        ((*by_object((9, 9)), RangeFilter(RangeKind.PRIORITY, ((0, 0),), 1)), every[:4]),
        (by_object((9, 9)), []),
    ]
    async with sessions(track=track) as ends:
        for filters, expected in cases:
            found, _ = await fetched(ends, ALL, range_filters=filters)
            assert found == expected


@pytest.mark.parametrize(
    "location_filter",
    [
        LocationFilter.absolute_start(2, 2),
        LocationFilter.absolute_start(3, 0),
        LocationFilter.groups(3, 9),
        LocationFilter.absolute_range(Location(1, 2), Location(1, 1)),
        LocationFilter.next_object(),
        LocationFilter.relative_start(0),
    ],
    ids=str,
)
async def test_invalid_ranges(location_filter: LocationFilter) -> None:
    async with hostile(track=old_track()) as (_, peer):
        talk = await peer.ask(Fetch(peer.id(), NAME, Parameters(location_filter=location_filter)))
        await check_refused(talk, RequestCode.INVALID_RANGE)


async def test_relative_start_is_answered() -> None:
    """We never send it, as its meaning depends on what the responder knows (moqt 25 #6)."""
    async with hostile(track=old_track()) as (_, peer):
        filter_ = LocationFilter.relative_start(1)
        talk = await peer.ask(Fetch(peer.id(), NAME, Parameters(location_filter=filter_)))
        assert await talk.next() == FetchOk(False, Location(2, 1))
    async with sessions() as ends:
        for refused in (filter_, LocationFilter.next_object()):
            with pytest.raises(UsageError):
                await ends.subscriber.fetch(NAME, filter=refused)


async def test_nothing_to_fetch() -> None:
    async with sessions() as ends:
        with pytest.raises(RequestRejected) as caught:
            await ends.subscriber.fetch(NAME, filter=ALL)
        assert caught.value.code == RequestCode.INVALID_RANGE
        assert caught.value.retry_after is None
        with pytest.raises(RequestRejected) as caught:
            await ends.subscriber.fetch(FullTrackName(NAMESPACE, b"none"), filter=ALL)
        assert caught.value.code == RequestCode.DOES_NOT_EXIST
        assert set(tables_of(ends.subscriber).values()) == {0}


@pytest.mark.requirement("R10e")
async def test_the_fetches_of_one_subscriber_are_limited() -> None:
    """More are told when to try again; a place is free when a fetch has left, or was cancelled."""
    track = Track(NAME, one_subgroup=True)
    track.append(0, 0, bytes(8_000_000))
    limits = Limits(max_fetches=3, retry_after=1.5, receive_buffer=1000)
    async with sessions(track=track, limits=limits) as ends:
        running = [await ends.subscriber.fetch(NAME, filter=ALL) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(RequestRejected) as caught:
                await ends.subscriber.fetch(NAME, filter=ALL)
            assert caught.value.code == RequestCode.EXCESSIVE_LOAD
            assert caught.value.retry_after == 1.5
        await running[0].close()
        await asyncio.sleep(0.1)
        again = await ends.subscriber.fetch(NAME, filter=ALL)
        for fetch in (*running[1:], again):
            assert len(objects_of(await collect(fetch))) == 1
        async with await ends.subscriber.fetch(NAME, filter=ALL) as last:
            assert len(objects_of(await collect(last))) == 1


@pytest.mark.parametrize("how", ["reset", "stop", "data", "all"])
async def test_cancelled_by_the_subscriber(how: str) -> None:
    """Both streams are reset (moqt 3.4); STOP_SENDING of the data alone ends the fetch too."""
    track = Track(NAME)
    track.append(0, 0, bytes(8_000_000))
    async with hostile(track=track) as (session, peer):
        await peer.connection.accept()
        talk = await peer.ask(Fetch(peer.id(), NAME))
        assert isinstance(await talk.next(), FetchOk)
        data = await peer.connection.accept()
        if how in ("reset", "all"):
            talk.stream.reset(ResetCode.CANCELLED)
        if how in ("stop", "all"):
            talk.stream.stop(ResetCode.CANCELLED)
        if how in ("data", "all"):
            data.stop(ResetCode.CANCELLED)
        await asyncio.sleep(0.2)
        if how in ("reset", "stop"):
            with pytest.raises(StreamReset):
                await data.read()
        if how == "data":
            assert await talk.next() is None
            await talk.say(b"", fin=True)
            await asyncio.sleep(0.1)
        assert set(tables_of(session).values()) == {0}
        await peer.alive()


async def test_closing_a_fetch_gives_credit_back() -> None:
    track = Track(NAME)
    track.append(0, 0, bytes(3_000_000))
    options = QuicOptions(max_uni_streams=2, max_stream_data=65536, max_data=262144)
    async with sessions(track=track, client=options, server=QuicOptions(max_bidi_streams=2)) as ends:
        for number in range(30):
            fetch = await ends.subscriber.fetch(NAME, filter=ALL)
            if number % 2:
                await asyncio.sleep(0.1)
            await fetch.close()
        async with await ends.subscriber.fetch(NAME, filter=ALL) as fetch:
            assert len(objects_of(await collect(fetch))) == 1
        await asyncio.sleep(0.1)
        assert set(tables_of(ends.subscriber).values()) == {0}
        assert set(tables_of(ends.publisher).values()) == {0}


async def fetching(session: Session, peer: Peer) -> tuple[Talk, FetchStream, FetchEncoder]:
    asking = asyncio.ensure_future(session.fetch(NAME, filter=ALL))
    talk, request = await peer.request()
    await talk.say(FetchOk(False, Location(9, 9)))
    return talk, await asking, FetchEncoder(request.request_id)


async def test_a_reset_in_the_middle_of_an_object() -> None:
    """What came before it is given, then it raises; it never looks like the end."""
    async with hostile() as (session, peer):
        talk, fetch, encoder = await fetching(session, peer)
        whole = encoder.object(Location(0, 0), 3) + b"abc"
        stream = await peer.send(encoder.header() + whole + encoder.object(Location(0, 1), 10) + b"12345")
        await asyncio.sleep(0.1)
        stream.reset(ResetCode.TOO_FAR_BEHIND)
        assert [item.payload for item in await take(fetch, 1)] == [b"abc"]
        for _ in range(2):
            with pytest.raises(StreamReset) as caught:
                await anext(fetch)
            assert caught.value.code == ResetCode.TOO_FAR_BEHIND
        await asyncio.sleep(0.1)
        assert talk.stream.stopped is not None
        assert set(tables_of(session).values()) == {0}


@pytest.mark.parametrize("suspicious", [True, False])
async def test_a_reset_before_the_header(suspicious: bool) -> None:
    """It can't be told whose stream it was. When the peer has said all about the fetch, that must be it."""
    limits = Limits(data_deadline=4.0, suspicion=0.5)
    async with hostile(limits=limits) as (session, peer):
        talk, fetch, _ = await fetching(session, peer)
        if suspicious:
            peer.connection.open(bidirectional=False).reset(ResetCode.UNKNOWN_OBJECT_STATUS)
        await asyncio.sleep(20)
        await talk.say(b"", fin=True)
        started = asyncio.get_running_loop().time()
        with pytest.raises(StreamReset) as caught:
            await collect(fetch)
        waited = asyncio.get_running_loop().time() - started
        assert waited == pytest.approx(0.51 if suspicious else 4.01)
        assert (caught.value.code == ResetCode.UNKNOWN_OBJECT_STATUS) is suspicious


async def test_the_request_is_reset_after_its_reply() -> None:
    async with hostile() as (session, peer):
        talk, fetch, encoder = await fetching(session, peer)
        stream = await peer.send(encoder.header() + encoder.object(Location(0, 0), 3) + b"abc")
        await asyncio.sleep(0.1)
        talk.stream.reset(ResetCode.INTERNAL_ERROR)
        with pytest.raises(StreamReset):
            await collect(fetch)
        await asyncio.sleep(0.1)
        assert stream.stopped is not None


async def test_data_before_the_reply() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.fetch(NAME, filter=ALL))
        talk, request = await peer.request()
        encoder = FetchEncoder(request.request_id)
        await peer.send(encoder.header() + encoder.object(Location(0, 0), 1) + b"a", fin=True)
        await asyncio.sleep(0.5)
        await talk.say(FetchOk(True, Location(0, 0)), fin=True)
        fetch = await asking
        assert [item.payload for item in objects_of(await collect(fetch))] == [b"a"]


async def test_data_before_a_rejection() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.fetch(NAME, filter=ALL))
        talk, request = await peer.request()
        encoder = FetchEncoder(request.request_id)
        stream = await peer.send(encoder.header() + encoder.object(Location(0, 0), 1) + b"a")
        await asyncio.sleep(0.1)
        await talk.say(RequestError(RequestCode.INTERNAL_ERROR), fin=True)
        with pytest.raises(RequestRejected):
            await asking
        await asyncio.sleep(0.1)
        assert stream.stopped is not None
        assert await talk.next() is None
        assert set(tables_of(session).values()) == {0}


async def test_no_end_of_track_status_and_no_objects_beyond_the_range() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.fetch(NAME, filter=LocationFilter.groups(1, 2)))
        talk, request = await peer.request()
        encoder = FetchEncoder(request.request_id)
        await talk.say(FetchOk(False, Location(2, 9)))
        data = encoder.header()
        for at in ((0, 9), (1, 0), (2, 9), (3, 0)):
            data += encoder.object(Location(*at), 1) + b"x"
        await peer.send(data, fin=True)
        fetch = await asking
        assert [item.location.group for item in objects_of(await collect(fetch))] == [1, 2]


async def test_update_of_the_priority() -> None:
    """A fetch that is made more urgent overtakes the other."""
    track = Track(NAME)
    track.append(0, 0, bytes(4_000_000))
    async with sessions(track=track, window=16384) as ends:
        fetches = [await ends.subscriber.fetch(NAME, filter=ALL, priority=100) for _ in range(2)]
        order: list[int] = []

        async def drain(number: int) -> None:
            await collect(fetches[number])
            order.append(number)

        draining = asyncio.gather(drain(0), drain(1))
        await fetches[1].update(priority=3)
        await draining
        assert order == [1, 0]
        with pytest.raises(RequestRejected):
            await fetches[1].update(priority=9)


async def test_an_update_that_fails_resets_the_data() -> None:
    track = Track(NAME)
    track.append(0, 0, bytes(8_000_000))
    async with hostile(track=track) as (session, peer):
        await peer.connection.accept()
        talk = await peer.ask(Fetch(peer.id(), NAME))
        assert isinstance(await talk.next(), FetchOk)
        data = await peer.connection.accept()
        await talk.say(RequestUpdate(peer.id(), Parameters(tokens=(Token(AliasType.USE_ALIAS, 5),))))
        assert isinstance(await talk.next(), RequestError)
        assert await talk.next() is None
        await asyncio.sleep(0.1)
        with pytest.raises(StreamReset):
            await data.read()
        await talk.say(b"", fin=True)
        await asyncio.sleep(0.1)
        assert set(tables_of(session).values()) == {0}


async def test_updates_that_cross_the_end() -> None:
    async with hostile(track=old_track()) as (_, peer):
        talk = await peer.ask(Fetch(peer.id(), NAME))
        assert isinstance(await talk.next(), FetchOk)
        await talk.say(*(RequestUpdate(peer.id(), Parameters(subscriber_priority=n)) for n in range(5)))
        while (message := await talk.next()) is not None:
            assert isinstance(message, RequestOk)
        await peer.alive()


async def test_the_track_goes_while_it_is_fetched() -> None:
    track = Track(NAME)
    publish_groups(track, range(20), 3)
    async with (
        sessions(track=track, chunk=50) as ends,
        await ends.subscriber.fetch(NAME, filter=ALL) as fetch,
    ):
        ends.tracks.remove(NAME, DoneCode.GOING_AWAY)
        assert len(places(await collect(fetch))) == 60


@settings(max_examples=60, deadline=None)
@given(
    present=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1),
    start=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    end=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 6)),
    order=st.sampled_from(GroupOrder),
    seed=st.integers(0, 9),
)
def test_any_range_of_any_track(
    present: set[At], start: At, end: At | None, order: GroupOrder, seed: int
) -> None:
    """Against a list."""
    if end is not None and end[0] < start[0]:
        end = (start[0], end[1])

    async def play() -> None:
        track = Track(NAME)
        publish(track, *sorted(present))
        if end is None:
            location_filter = LocationFilter.absolute_start(*start)
        else:
            location_filter = LocationFilter.absolute_range(Location(*start), Location(*end))
        invalid = start > max(present) or (end is not None and end < start)
        async with sessions(track=track, seed=seed, ragged=True, chunk=20) as ends:
            if invalid:
                with pytest.raises(RequestRejected) as caught:
                    await ends.subscriber.fetch(NAME, filter=location_filter)
                assert caught.value.code == RequestCode.INVALID_RANGE
                return
            found, ok = await fetched(ends, location_filter, order=order)
            inside = [at for at in present if at >= start and (end is None or at <= end)]
            sign = 1 if order is GroupOrder.ASCENDING else -1
            assert found == sorted(inside, key=lambda at: (sign * at[0], at[1]))
            assert Location(*start) <= ok.end <= Location(*max(present))

    run_virtual(play())
