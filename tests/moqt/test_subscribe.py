"""SUBSCRIBE: filters, exactly once, updates (moqt 6, 7.3, 9)."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.errors import DoneCode, RequestRejected, ResetCode, UsageError
from moqt.filters import FilterType, Location, LocationFilter, RangeFilter, RangeKind
from moqt.limits import Limits
from moqt.quic.virtual import run_virtual
from moqt.subscribing import Fill, Item, StreamEnd, Subscription
from moqt.track import Track
from moqt.wire import (
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
from tests.moqt.raw import subgroup, subscribed

pytestmark = pytest.mark.virtual

# Filters.


@pytest.mark.parametrize(
    ("location_filter", "expected"),
    [
        (LocationFilter.none(), NEW),
        (LocationFilter.next_object(), NEW),
        (LocationFilter.relative_start(0), [at for at in NEW if at >= (3, 0)]),
        (LocationFilter.relative_start(1), NEW),
        (LocationFilter.relative_start(99), NEW),
        (LocationFilter.absolute_start(0, 0), NEW),
        (LocationFilter.absolute_start(3, 1), [at for at in NEW if at >= (3, 1)]),
        (LocationFilter.absolute_start(9, 0), []),
        (LocationFilter.groups(2, 3), [at for at in NEW if at < (4, 0)]),
        (LocationFilter.groups(0, 1), []),
        (LocationFilter.groups(5, 9), [(6, 0)]),
        (LocationFilter.absolute_range(Location(2, 3), Location(4, 1)), NEW[1:6]),
        (LocationFilter.absolute_range(Location(3, 5), Location(3, 2)), []),
        (LocationFilter.absolute_range(Location(4, 1), Location(4, 1)), [(4, 1)]),
    ],
    ids=str,
)
async def test_location_filters(location_filter: LocationFilter, expected: list[At]) -> None:
    """Only what is published later, and only inside the range (moqt 6.2)."""
    async with (
        sessions(track=old_track()) as ends,
        await ends.subscriber.subscribe(NAME, filter=location_filter) as subscription,
    ):
        assert subscription.largest == Location(2, 1)
        assert not subscription.expects_fill
        publish(ends.track, *NEW)
        assert places(await finish(ends, subscription)) == expected


@pytest.mark.parametrize("kind", list(FilterType))
async def test_location_filters_on_a_track_without_objects(kind: FilterType) -> None:
    fields = {FilterType.ABSOLUTE_START_GROUP_END: (0, 0, 9), FilterType.ABSOLUTE_RANGE: (0, 0, 9, 9)}
    location_filter = LocationFilter(kind, *fields.get(kind, ()))
    async with (
        sessions() as ends,
        await ends.subscriber.subscribe(NAME, filter=location_filter, fill=WHOLE) as subscription,
    ):
        assert subscription.largest is None
        assert not subscription.expects_fill
        publish_groups(ends.track, range(3), 2)
        expected = [(g, n) for g in range(3) for n in range(2)]
        assert places(await finish(ends, subscription)) == expected


def ranges(kind: RangeKind, *pairs: tuple[int, int | None], set_id: int = 0) -> RangeFilter:
    return RangeFilter(kind, pairs, set_id)


@pytest.mark.parametrize(
    ("filters", "passes"),
    [
        ([ranges(RangeKind.OBJECTID, (0, 1))], lambda at: at[1] <= 1),
        ([ranges(RangeKind.OBJECTID, (2, None))], lambda at: at[1] >= 2),
        ([ranges(RangeKind.SUBGROUP, (1, 1))], lambda at: at[1] % 2 == 1),
        ([ranges(RangeKind.PRIORITY, (0, 3))], lambda at: at[0] <= 3),
        (
            [ranges(RangeKind.OBJECTID, (0, 0)), ranges(RangeKind.PRIORITY, (3, 3))],
            lambda at: at == (3, 0),
        ),
        (
            [ranges(RangeKind.OBJECTID, (0, 0)), ranges(RangeKind.PRIORITY, (3, 3), set_id=1)],
            lambda at: at[1] == 0 or at[0] == 3,
        ),
    ],
)
async def test_range_filters(filters: list[RangeFilter], passes: object) -> None:
    assert callable(passes)
    async with (
        sessions(track=Track(NAME)) as ends,
        await ends.subscriber.subscribe(NAME, range_filters=tuple(filters)) as subscription,
    ):
        every = [(group, number) for group in range(2, 6) for number in range(4)]
        for group, number in every:
            ends.track.append(
                group,
                number,
                f"{group}/{number} ".encode() * (1 + (group * 7 + number * 3) % 11),
                subgroup=number % 2,
                priority=group,
            )
            if number == 3:
                ends.track.end_group(group, 4)
        items = await finish(ends, subscription)
        check_once(places(items), [at for at in every if passes(at)])
        # moqt 12.6: what a filter leaves out does not keep a stream from its FIN.
        assert {end.code for end in ends_of(items)} <= {None}


async def test_range_filters_that_the_peer_has_not_allowed() -> None:
    async with sessions(limits=Limits(max_filter_ranges=2)) as ends:
        three = (ranges(RangeKind.OBJECTID, (0, 1), (3, 4), (6, 7)),)
        with pytest.raises(UsageError):
            await ends.subscriber.subscribe(NAME, range_filters=three)
        with pytest.raises(UsageError):
            await ends.subscriber.subscribe(
                NAME, fill=Fill(filter=LocationFilter.none(), range_filters=three)
            )
        odd = RangeFilter(RangeKind.OBJECT_PROPERTY, ((0, 1),), property_type=3)
        with pytest.raises(UsageError):
            await ends.subscriber.subscribe(NAME, range_filters=(odd,))


# Exactly once.


async def join_everywhere(
    groups: int, objects: int, seed: int, *, subgroups: int, jitter: float, loss: float, ragged: bool
) -> None:
    """Publish a Track Object by Object and join before each: all get all, once."""
    track = Track(NAME, one_subgroup=subgroups == 1)
    expected = [(group, number) for group in range(groups) for number in range(objects)]
    pause = random.Random(seed)
    limits = Limits(max_fills=99)
    async with sessions(
        track=track, limits=limits, seed=seed, jitter=jitter, loss=loss, ragged=ragged, chunk=40
    ) as ends:
        joined: list[asyncio.Task[list[Item]]] = []
        streams: list[Subscription] = []

        async def receive() -> list[Item]:
            async with await ends.subscriber.subscribe(NAME, fill=WHOLE) as subscription:
                streams.append(subscription)
                return await collect(subscription)

        for group, number in expected:
            joined.append(asyncio.create_task(receive()))
            await asyncio.sleep(pause.choice([0, 0.001, 0.01, 0.02, 0.05]))
            publish(track, (group, number), subgroup=number % subgroups)
            if number == objects - 1:
                joined.append(asyncio.create_task(receive()))
                await asyncio.sleep(pause.choice([0, 0.01, 0.02]))
                track.end_group(group, objects)
        joined.append(asyncio.create_task(receive()))
        await asyncio.sleep(0.5)
        track.end(Location(groups, 0))
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        for items in await asyncio.gather(*joined):
            check_once(places(items), expected)
        for subscription in streams:
            assert subscription.done is not None
            assert subscription.done.status == DoneCode.TRACK_ENDED
        await asyncio.sleep(0.5)
        assert set(tables_of(ends.subscriber).values()) == {0}
        assert set(tables_of(ends.publisher).values()) == {0}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 3),
    objects=st.integers(1, 4),
    subgroups=st.integers(1, 3),
    jitter=st.sampled_from([0.0, 0.005, 0.05]),
    loss=st.sampled_from([0.0, 0.1]),
    ragged=st.booleans(),
)
def test_exactly_once_at_every_object_boundary(
    seed: int, groups: int, objects: int, subgroups: int, jitter: float, loss: float, ragged: bool
) -> None:
    run_virtual(
        join_everywhere(groups, objects, seed, subgroups=subgroups, jitter=jitter, loss=loss, ragged=ragged)
    )


async def test_two_subscriptions_to_one_track_have_a_copy_each() -> None:
    async with sessions(track=old_track()) as ends:
        first = await ends.subscriber.subscribe(NAME)
        second = await ends.subscriber.subscribe(NAME, fill=WHOLE)
        publish(ends.track, *NEW)
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        one, other = await asyncio.gather(collect(first), collect(second))
        check_once(places(one), NEW)
        check_once(places(other), OLD + NEW)


async def test_a_publisher_that_gives_one_alias_to_two_subscriptions() -> None:
    """They could not be told apart: the second is given up, the first and the session go on."""
    async with subscribed(filter=LocationFilter.none()) as (session, peer, subscription, _talk):
        asking = asyncio.ensure_future(session.subscribe(NAME))
        second, _ = await peer.request()
        await second.say(SubscribeOk(1))
        with pytest.raises(UsageError, match="one alias"):
            await asking
        await peer.send(subgroup((0, b"a")), fin=True)
        assert [item.payload for item in await take(subscription, 1)] == [b"a"]
        assert second.stream.stopped is not None


# REQUEST_UPDATE.


async def test_pause_and_resume() -> None:
    """moqt 9, 12.6: what was left out resets its stream; the gap is told by LARGEST_OBJECT."""
    async with (
        sessions(track=Track(NAME, one_subgroup=True)) as ends,
        await ends.subscriber.subscribe(NAME) as subscription,
    ):
        publish(ends.track, (0, 0), (0, 1))
        before = await take(subscription, 2)
        await subscription.update(forward=False)
        assert subscription.largest == Location(0, 1)
        publish(ends.track, (0, 2), (1, 0))
        await asyncio.sleep(0.2)
        assert await anext(subscription) == StreamEnd(0, False, ResetCode.CANCELLED)
        await subscription.update(forward=True)
        assert subscription.largest == Location(1, 0)
        publish(ends.track, (1, 1), (2, 0))
        ends.track.end_group(1, 2)
        ends.track.end_group(2, 1)
        items = await finish(ends, subscription)
        assert places([*before, *items]) == [(0, 0), (0, 1), (1, 1), (2, 0)]


async def test_a_pause_without_objects_breaks_nothing() -> None:
    async with sessions() as ends, await ends.subscriber.subscribe(NAME) as subscription:
        publish(ends.track, (0, 0))
        await subscription.update(forward=False)
        await subscription.update(forward=True)
        publish(ends.track, (0, 1))
        await subscription.update(forward=False)
        ends.track.end_group(0, 2)  # Nothing of the Subgroup was left out: FIN.
        items = await finish(ends, subscription)
        assert places(items) == [(0, 0), (0, 1)]
        assert ends_of(items) == [StreamEnd(0, False, None)]


async def test_what_was_published_before_a_pause_still_comes() -> None:
    async with sessions(window=4096) as ends, await ends.subscriber.subscribe(NAME) as subscription:
        ends.track.append(0, 0, bytes(200_000))
        ends.track.append(0, 1, bytes(200_000))
        ends.track.end_group(0, 2)
        await subscription.update(forward=False)
        assert len(objects_of(await finish(ends, subscription))) == 2


async def test_a_subscription_that_starts_paused() -> None:
    async with (
        sessions(track=old_track()) as ends,
        await ends.subscriber.subscribe(NAME, forward=False, fill=WHOLE) as subscription,
    ):
        assert not subscription.expects_fill
        publish(ends.track, (2, 2))
        await asyncio.sleep(0.1)
        assert not await subscription.update(forward=True)
        publish(ends.track, (2, 3), (3, 0))
        assert places(await finish(ends, subscription)) == [(2, 3), (3, 0)]


async def test_narrowing_resets_the_streams_left_out() -> None:
    async with (
        sessions(track=Track(NAME)) as ends,
        await ends.subscriber.subscribe(NAME, filter=LocationFilter.none()) as subscription,
    ):
        publish(ends.track, (0, 0), (1, 0), (2, 0), (3, 0))
        first = await take(subscription, 4)
        await subscription.update(filter=LocationFilter.groups(1, 2))
        await asyncio.sleep(0.1)
        publish(ends.track, (0, 1), (1, 1), (2, 1), (3, 1))
        for group in range(4):
            ends.track.end_group(group, 2)
        items = await finish(ends, subscription)
        assert places([*first, *items]) == [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1)]
        assert {(end.group, end.code) for end in ends_of(items)} == {
            (0, ResetCode.CANCELLED),
            (1, None),
            (2, None),
            (3, ResetCode.CANCELLED),
        }


async def test_narrowing_inside_a_group_resets_its_stream() -> None:
    """FIN, and the END_OF_GROUP bit of its header, would not be true any more."""
    async with (
        sessions() as ends,
        await ends.subscriber.subscribe(NAME, filter=LocationFilter.none()) as subscription,
    ):
        publish(ends.track, (0, 0))
        await take(subscription, 1)
        await subscription.update(filter=LocationFilter.absolute_range(Location(0, 0), Location(0, 1)))
        publish(ends.track, (0, 1), (0, 2))
        ends.track.end_group(0, 3)
        items = await finish(ends, subscription)
        assert set(places(items)) <= {(0, 1)}
        assert ends_of(items) == [StreamEnd(0, False, ResetCode.CANCELLED)]


async def test_filters_are_widened_and_removed() -> None:
    """Objects between the old end and Largest are not delivered (moqt 6.2)."""
    async with (
        sessions(track=Track(NAME)) as ends,
        await ends.subscriber.subscribe(NAME, filter=LocationFilter.groups(0, 0)) as subscription,
    ):
        publish(ends.track, (0, 0), (1, 0))
        await subscription.update(filter=LocationFilter.groups(0, 2))
        assert subscription.largest == Location(1, 0)
        publish(ends.track, (1, 1), (2, 0), (3, 0))
        await subscription.update(filter=LocationFilter.none())
        publish(ends.track, (3, 1), (0, 1), (9, 0))
        check_once(places(await finish(ends, subscription)), [(0, 0), (1, 1), (2, 0), (3, 1), (0, 1), (9, 0)])


async def test_objects_that_overtake_the_reply_to_a_wider_filter() -> None:
    async with subscribed(filter=LocationFilter.groups(0, 0)) as (_, peer, subscription, talk):
        updating = asyncio.ensure_future(subscription.update(filter=LocationFilter.groups(0, 5)))
        assert isinstance(await talk.next(), RequestUpdate)
        await peer.send(subgroup((0, b"a"), group=5), fin=True)
        await peer.send(subgroup((0, b"b"), group=6), fin=True)
        await asyncio.sleep(0.1)
        await talk.say(RequestOk())
        await updating
        await peer.send(subgroup((1, b"c"), group=4), fin=True)
        assert [item.payload for item in await take(subscription, 2)] == [b"a", b"c"]


async def test_range_filters_are_replaced_and_removed() -> None:
    async with sessions(track=Track(NAME)) as ends:
        low = (ranges(RangeKind.OBJECTID, (0, 0)),)
        async with await ends.subscriber.subscribe(NAME, range_filters=low) as subscription:
            publish(ends.track, (0, 0), (0, 1))
            await subscription.update(range_filters=(ranges(RangeKind.OBJECTID, (3, None)),))
            publish(ends.track, (0, 2), (0, 3))
            await subscription.update(range_filters=(ranges(RangeKind.SUBGROUP, (0, 0)),))
            publish(ends.track, (1, 0), (1, 3))
            await subscription.update(range_filters=(RangeFilter(RangeKind.OBJECTID),))
            publish(ends.track, (2, 0))
            publish(ends.track, (2, 1), subgroup=1)
            assert places(await finish(ends, subscription)) == [(0, 0), (0, 3), (1, 3), (2, 0)]


async def test_a_range_filter_that_excludes_an_open_subgroup_resets_it() -> None:
    async with sessions(track=Track(NAME)) as ends, await ends.subscriber.subscribe(NAME) as subscription:
        publish(ends.track, (0, 0), subgroup=0)
        publish(ends.track, (0, 1), subgroup=1)
        await take(subscription, 2)
        await subscription.update(range_filters=(ranges(RangeKind.SUBGROUP, (1, 1)),))
        publish(ends.track, (0, 2), subgroup=0)
        publish(ends.track, (0, 3), subgroup=1)
        ends.track.end_group(0, 4)
        items = await finish(ends, subscription)
        assert places(items) == [(0, 3)]
        assert sorted(str(end.code) for end in ends_of(items)) == ["1", "None"]


async def test_an_update_that_is_refused_ends_the_subscription() -> None:
    """PUBLISH_DONE UPDATE_FAILED (moqt 4.2), and nothing of the update was done."""
    async with hostile(limits=Limits(max_filter_ranges=1)) as (session, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await talk.next(), SubscribeOk)
        two = (ranges(RangeKind.OBJECTID, (0, 1), (3, 4)),)
        await talk.say(
            RequestUpdate(peer.id(), Parameters(forward=False, subscriber_priority=1, range_filters=two))
        )
        assert isinstance(await talk.next(), RequestError)
        assert await talk.next() == PublishDone(DoneCode.UPDATE_FAILED, 0, "")
        assert await talk.next() is None
        await peer.alive()
        await talk.say(b"", fin=True)
        await asyncio.sleep(0.1)
        assert session.serving == 0


async def test_updates_that_cross_publish_done() -> None:
    """They are no violation, for neither side, and get no answer."""
    async with sessions() as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        ends.tracks.remove(NAME, DoneCode.TRACK_ENDED)
        await asyncio.sleep(0.015)
        with pytest.raises(RequestRejected):
            await subscription.update(priority=3)
        assert await collect(subscription) == []
        with pytest.raises(RequestRejected):
            await subscription.update(priority=4)
        assert not ends.publisher.closed
        assert not ends.subscriber.closed


async def test_an_update_without_an_answer_in_time() -> None:
    async with subscribed(limits=Limits(reply_deadline=2.0)) as (_, peer, subscription, talk):
        with pytest.raises(TimeoutError):
            await subscription.update(priority=3)
        assert isinstance(await talk.next(), RequestUpdate)
        await talk.say(RequestOk())  # Too late; it must not be taken for the next answer.
        again = asyncio.ensure_future(subscription.update(priority=4))
        assert isinstance(await talk.next(), RequestUpdate)
        await asyncio.sleep(0.1)
        assert not again.done()
        await talk.say(RequestOk())
        await again
        await peer.alive()


async def test_more_updates_than_the_peer_takes() -> None:
    async with sessions(limits=Limits(max_request_updates=2)) as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        waiting = [asyncio.ensure_future(subscription.update(priority=n)) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(UsageError):
            await subscription.update(priority=9)
        await asyncio.gather(*waiting)
        await subscription.update(priority=9)


async def test_cancelled_while_an_update_waits() -> None:
    async with sessions() as ends:
        subscription = await ends.subscriber.subscribe(NAME)
        ends.link.stall()
        waiting = asyncio.ensure_future(subscription.update(priority=7))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        ends.link.resume()
        publish(ends.track, (0, 0))
        await take(subscription, 1)
        await subscription.update(priority=8)
