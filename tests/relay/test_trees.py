"""KV caches through trees of relays: the requirements of a direct connection hold through one relay and two,
and what the relays add to them (kvcs 8).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.assembly import Missing
from kvcs.discovery import Found, discover, discover_in_scope
from kvcs.identity import block_keys
from kvcs.names import content_prefix, scope_prefix
from kvcs.subscriber import CacheIncomplete, Subscriber
from moqt import (
    DoneCode,
    FetchStream,
    FullTrackName,
    GroupOrder,
    Limits,
    Location,
    LocationFilter,
    ObjectStatus,
    RangeFilter,
    RangeKind,
    ReceivedObject,
    Session,
    Subscription,
    Track,
    Tracks,
)
from moqt.filters import FilterType
from moqt.quic.virtual import run_virtual
from moqt.wire import Fetch, Properties, SubscribeNamespace, encode_properties
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    SCOPE_KEY,
    TOKENS,
    check_layer,
    check_layers,
    collect,
    descriptor,
    make_cache,
    now,
    payload,
    put_layers,
    put_one_by_one,
)
from tests.kvcs.test_completion import SOON, lose, never_complete, never_end, never_end_a_group
from tests.kvcs.test_late_join import STEPS
from tests.kvcs.test_many_streams import hold_back, open_streams
from tests.moqt.scene import EVERYTHING, noise, objects
from tests.moqt.scene import collect as collect_all
from tests.relay.caches import BLOCKS, LAYERS, ONCE, Tree, every_object, tree
from tests.relay.network import join

through_relays = pytest.mark.parametrize("relays", [1, 2])
virtual = pytest.mark.virtual

SCOPE_ID, COMPAT_ID = SCOPE_KEY.scope_id, MODEL.compat_id
KEYS = block_keys(SCOPE_KEY, MODEL, TOKENS)


# Discovery (kvcs 3.1, 7.1).


@pytest.mark.requirement("R3.1c")
@through_relays
@virtual
async def test_four_fields_find_the_publications_of_a_prefix(relays: int) -> None:
    """Those that were announced before anybody asked, those that come later, and not those that have gone."""
    async with tree(relays=relays) as made:
        publisher = made.publisher()
        publications = [publisher.publish(TOKENS) for _ in range(2)]
        publisher.publish(TOKENS[:2])

        async def find() -> set[Found]:
            return set(await discover(made.session(), MODEL, SCOPE_KEY, TOKENS, min_blocks=BLOCKS))

        assert await find() == {Found(one.name, BLOCKS) for one in publications}
        publications.append(publisher.publish(TOKENS))
        publications.pop(0).close()
        await asyncio.sleep(1)
        assert await find() == {Found(one.name, BLOCKS) for one in publications}
        asked = {one.prefix for one in made.requests() if isinstance(one, SubscribeNamespace)}
        assert asked == {content_prefix(SCOPE_ID, COMPAT_ID, KEYS[-1])}


@pytest.mark.requirement("R3.1c")
@through_relays
@virtual
async def test_two_fields_find_all_of_the_scope(relays: int) -> None:
    async with tree(relays=relays) as made:
        publisher = made.publisher()
        short, whole = publisher.publish(TOKENS[:2]), publisher.publish(TOKENS)
        made.publisher(descriptor(model="test/other")).publish(TOKENS)
        await asyncio.sleep(1)
        found = await discover_in_scope(made.session(), MODEL, SCOPE_KEY, TOKENS)
        assert found == [Found(whole.name, 3), Found(short.name, 1)]
        asked = [one.prefix for one in made.requests() if isinstance(one, SubscribeNamespace)]
        assert asked == [scope_prefix(SCOPE_ID)]


# One payload at each Location (kvcs 3.4, 6).


@pytest.mark.requirement("R3.4b")
@through_relays
@pytest.mark.parametrize("other", [b"other", b"another"])
@virtual
async def test_a_second_payload_is_never_passed_on(relays: int, other: bytes) -> None:
    """Another publisher of the same namespace has a different Object: the Track ends as malformed down the
    tree, and what consumers have of that Location is the first payload.
    """
    name = FullTrackName((b"scene", b"one"), b"k.raw.s0")
    tracks = [Track(name), Track(name)]
    async with tree(relays=relays) as made:
        for track in tracks:
            offered = Tracks()
            offered.add(track)
            offered.announce(name.namespace)
            await made.net.publish(offered)
        subscription = await join(made.session(), name)
        await asyncio.sleep(1)
        tracks[0].append(0, 0, b"first")
        await asyncio.sleep(1)
        tracks[1].append(0, 0, other)
        tracks[1].append(0, 1, b"more of it")
        received = [item async for item in subscription if isinstance(item, ReceivedObject)]
        assert [bytes(item.payload) for item in received] == [b"first"]
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.MALFORMED_TRACK
        await asyncio.sleep(1)
        assert not any(len(relay.cache) for relay in made.net.relays)


# Retrieval during production (kvcs 7.2).


def one_subscription_per_hop(made: Tree) -> None:
    """Each data track was subscribed to once over each hop, and each Object went down it at most once."""
    for hop in range(len(made.hops)):
        assert made.subscriptions(hop) == {b"k.raw.s0": 1, b"v.raw.s0": 1}
        assert made.carried(hop) == ONCE


@pytest.mark.requirement("R7.2a", "R8a", "R8d")
@through_relays
@pytest.mark.parametrize("boundary", range(STEPS))
@virtual
async def test_late_join_at_every_object_boundary(relays: int, boundary: int) -> None:
    """What is there comes from the caches or, for the first consumer, through them by upstream fetches; the
    rest live. Each Object once to each consumer, and once over each hop for both.
    """
    async with tree(relays=relays, subscribers=2, seed=boundary, jitter=0.004) as made:
        production = put_one_by_one(made.publisher().publish(TOKENS).segment, CACHE)
        for _ in range(boundary):
            next(production)
            await asyncio.sleep(0.005)
        first = asyncio.create_task(made.receive())
        await asyncio.sleep(0.5)
        second = asyncio.create_task(made.receive(1))
        for _ in production:
            await asyncio.sleep(0.005)
        for number, task in enumerate((first, second)):
            check_layers(await task, CACHE)
            assert made.received(number) == ONCE
        one_subscription_per_hop(made)


@pytest.mark.requirement("R7.2a")
@settings(max_examples=60, deadline=None)
@given(
    relays=st.integers(1, 2),
    joins=st.lists(st.integers(0, STEPS), min_size=2, max_size=2),
    cuts=st.lists(st.tuples(st.integers(0, STEPS), st.integers(0, 1)), max_size=3),
    outage=st.integers(0, 12),
    pauses=st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.011, 0.03]), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
    latency=st.sampled_from([0.001, 0.01, 0.1]),
    jitter=st.sampled_from([0.0, 0.005, 0.05]),
    loss=st.sampled_from([0.0, 0.1]),
    chunk=st.sampled_from([30, 16384]),
)
def test_join_in_any_interleaving_with_cuts(
    relays: int,
    joins: list[int],
    cuts: list[tuple[int, int]],
    outage: int,
    pauses: list[float],
    **link: Any,
) -> None:
    """Two consumers come at any time, and links between publisher and relays break, for `outage` steps of the
    production, which goes on: each subscription and its fill bring each Object once.
    """

    async def consume(session: Session, name: FullTrackName, joined: asyncio.Event) -> list[ReceivedObject]:
        subscription = await join(session, name)
        joined.set()
        return objects(await collect_all(subscription))

    async def main() -> None:
        longer = {"grace": 60.0, "upstream_wait": 60.0}  # than all outages together
        async with (
            tree(relays=relays, subscribers=2, relay_options=longer, **link) as made,
            asyncio.TaskGroup() as group,
        ):
            publication = made.publisher().publish(TOKENS)
            tracks = list(publication.segment.tracks.values())
            steps = put_one_by_one(publication.segment, CACHE)
            consumers: list[tuple[Track, asyncio.Task[list[ReceivedObject]]]] = []
            joined: list[asyncio.Event] = []
            await asyncio.sleep(2)  # It is announced.
            for number in range(STEPS + 1):
                for consumer in [consumer for consumer, at in enumerate(joins) if at == number]:
                    for track in tracks:
                        joined.append(asyncio.Event())
                        task = consume(made.session(consumer), track.name, joined[-1])
                        consumers.append((track, group.create_task(task)))
                for _, hop in [cut for cut in cuts if cut[0] == number]:
                    for one in joined:  # A publisher that is away can't be subscribed to.
                        await one.wait()
                    made.hops[hop % relays][-1].cut()
                    for _ in itertools.islice(steps, outage):
                        await asyncio.sleep(pauses[0])
                    await made.mend(hop % relays)
                next(steps, None)
                await asyncio.sleep(pauses[number % len(pauses)])
            await asyncio.sleep(20)  # What is withdrawn can't be fetched any more.
            stored = {track: list(track.objects(Location(0, 0), Location(LAYERS, 0))) for track in tracks}
            publication.close()
            for track, reading in consumers:
                received = {item.location: bytes(item.payload) for item in await reading}
                assert len(await reading) == len(received) == LAYERS * BLOCKS
                assert received == {item.location: payload(item) for item in stored[track]}

    run_virtual(main())


@pytest.mark.requirement("R7.2d")
@through_relays
@pytest.mark.parametrize("way", ["End of Track", "PUBLISH_DONE", "manifest"])
@virtual
async def test_a_track_is_complete_in_each_of_three_ways(relays: int, way: str) -> None:
    """One Object is never published, so the consumer ends when it knows that the track is complete: at once,
    and not when its patience is over.
    """
    async with tree(relays=relays) as made:
        publication = made.publisher().publish(TOKENS)
        lose(publication, "v.raw.s0", 2, 1)
        never_end_a_group(publication)
        if way != "manifest":
            never_complete(publication)
        if way != "End of Track":
            never_end(publication)
        consumer = made.subscriber(patience=30.0)
        task = asyncio.create_task(incomplete(consumer))
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE)
        if way == "PUBLISH_DONE":
            await asyncio.sleep(3)
            assert not task.done()
            for track in publication.segment.tracks.values():
                track.close(DoneCode.TRACK_ENDED)
        began = now()
        ended, missing = await task
        assert missing == (Missing(0, 2, 1),)
        assert ended - began < 2 * SOON


async def incomplete(consumer: Subscriber) -> tuple[float, tuple[Missing, ...]]:
    """Receive what will turn out to be incomplete: when that was known, and what is missing."""
    with pytest.raises(CacheIncomplete) as caught:
        async with await consumer.receive(TOKENS, wait=5.0) as reception:
            await collect(reception)
    return now(), caught.value.missing


@pytest.mark.requirement("R7.2d")
@through_relays
@virtual
async def test_a_consumer_that_comes_after_the_end(relays: int) -> None:
    """Fetch streams carry no status: the manifest that marks the segment complete is enough, whether the
    publisher is there or has left.
    """
    async with tree(relays=relays, subscribers=2) as made:
        publisher = made.publisher()
        publication = publisher.publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        for number in range(2):
            began = now()
            check_layers(await made.receive(number), CACHE)
            assert now() - began < 2
            assert made.received(number) == ONCE


# Retrieval of completed caches (kvcs 7.3).

RANGES = [(first, last) for first in range(LAYERS) for last in range(first, LAYERS)]


@pytest.mark.requirement("R7.3a", "R8a")
@through_relays
@pytest.mark.parametrize("layers", RANGES)
@virtual
async def test_a_range_of_layers(relays: int, layers: tuple[int, int]) -> None:
    """By FETCH 0x03, ascending; over each hop the range alone, and for a second consumer nothing more."""
    first, last = layers
    async with tree(relays=relays, subscribers=2) as made:
        await put_layers(made.publisher().publish(TOKENS).segment, CACHE)
        for number in range(2):
            received = await made.receive(number, layers=layers)
            assert [layer.layer for layer in received] == list(range(first, last + 1))
            for layer in received:
                check_layer(layer, CACHE)
            fetches = [one for one in made.requests(number) if isinstance(one, Fetch)]
            assert [one.track.name for one in fetches] == [b"k.raw.s0", b"v.raw.s0"]
            for one in fetches:
                assert one.parameters.location_filter == LocationFilter(
                    FilterType.ABSOLUTE_START_GROUP_END, first, 0, last - first
                )
                assert one.parameters.group_order is GroupOrder.ASCENDING
            wanted = every_object(range(first, last + 1))
            assert made.received(number) == wanted
            for hop in range(relays):
                assert made.carried(hop) == wanted


@pytest.mark.requirement("R7.3a")
@through_relays
@virtual
async def test_layers_are_usable_one_by_one(relays: int) -> None:
    """Each layer is there long before the last, on slow links: no relay waits for a later layer, or for the
    end of an Object.
    """
    model = descriptor(layers=16, kv_heads=8, head_dim=64, block_tokens=16)
    cache = make_cache(model, 64)
    times = []
    async with tree(relays=relays, latency=0.05, window=16 * 1024, chunk=1200) as made:
        await put_layers(made.publisher(model).publish(list(range(64))).segment, cache)
        began = now()
        async with await made.subscriber(0, model).receive(list(range(64)), wait=5.0) as reception:
            async for layer in reception:
                check_layer(layer, cache, model)
                times.append(now() - began)
    assert len(times) == 16
    steps = [after - before for before, after in itertools.pairwise(times)]
    assert max(steps) < 2 * (times[-1] - times[0]) / 15
    assert times[0] < times[-1] / 3


@pytest.mark.requirement("R7.3b")
@through_relays
@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
@virtual
async def test_the_first_blocks(relays: int, blocks: int, filters: bool) -> None:
    """By OBJECTID_FILTER where the relay takes filters; else all is sent, and the rest discarded. What the
    relay sends of it is its own affair: a consumer of the whole gets the whole afterwards.
    """
    async with tree(relays=relays, subscribers=0) as made:
        await put_layers(made.publisher().publish(TOKENS).segment, CACHE)
        for _ in range(2):
            limits = None if filters else Limits(max_filter_ranges=0)
            link, session = await made.net.subscriber(relay_limits=limits)
            made.net.links.append(link)
            made.net.sessions.append(session)
        for layer in await made.receive(blocks=blocks):
            check_layer(layer, CACHE, blocks=(0, blocks))
        fetches = [one for one in made.requests() if isinstance(one, Fetch)]
        assert len(fetches) == 2
        only = RangeFilter(RangeKind.OBJECTID, ((0, blocks - 1),))
        for one in fetches:
            assert one.parameters.range_filters == ((only,) if filters else ())
        assert made.received() == every_object(blocks=blocks if filters else BLOCKS)
        check_layers(await made.receive(1), CACHE)
        assert made.received(1) == ONCE
        for hop in range(relays):
            assert made.carried(hop) == ONCE


# What relays do (kvcs 8).


@pytest.mark.requirement("R8a")
@through_relays
@pytest.mark.parametrize("known", [[(1, 1)], [(0, 0), (2, 3)], [(3, 3)], [(0, 1), (1, 2)]])
@virtual
async def test_gaps_are_filled_with_upstream_fetches(relays: int, known: list[tuple[int, int]]) -> None:
    """Each Object is fetched from upstream once, whichever parts of a Track were wanted before."""
    async with tree(relays=relays, subscribers=len(known) + 1) as made:
        await put_layers(made.publisher().publish(TOKENS).segment, CACHE)
        for number, layers in enumerate(known):
            await made.receive(number, layers=layers)
        held = {layer for first, last in known for layer in range(first, last + 1)}
        for hop in range(relays):
            assert made.carried(hop) == sum((every_object(range(one, one + 1)) for one in held), Counter())
        check_layers(await made.receive(len(known)), CACHE)
        assert made.received(len(known)) == ONCE
        for hop in range(relays):
            assert made.carried(hop) == ONCE


@pytest.mark.requirement("R8a")
@through_relays
@virtual
async def test_names_that_differ_in_one_field_are_other_tracks(relays: int) -> None:
    """Three publications of the same tokens, each with its own bits, and other tokens: none is taken for
    another, whatever a relay has of it.
    """
    seeds = range(3)
    async with tree(relays=relays, subscribers=2 * len(seeds)) as made:
        publisher = made.publisher()
        names = []
        for seed in seeds:
            publication = publisher.publish(TOKENS)
            await put_layers(publication.segment, make_cache(MODEL, len(TOKENS), seed=seed))
            names.append(publication.name)
        for number in range(2 * len(seeds)):
            seed = number % len(seeds)
            consumer = made.subscriber(number)
            async with await consumer.receive(TOKENS, publications=[names[seed]]) as reception:
                check_layers(await collect(reception), make_cache(MODEL, len(TOKENS), seed=seed))
        assert made.carried(0) == Counter({key: len(seeds) for key in ONCE})


@pytest.mark.requirement("R8c")
@through_relays
@virtual
async def test_what_expires_is_fetched_again(relays: int) -> None:
    """MAX_CACHE_DURATION: until it is over Objects come from the cache; then they are unknown, not gone."""
    async with tree(relays=relays, subscribers=3) as made:
        await put_layers(made.publisher(retention=10.0).publish(TOKENS).segment, CACHE)
        first = now()
        check_layers(await made.receive(0), CACHE)
        assert made.carried(0) == ONCE
        await asyncio.sleep(first + 9.0 - now())
        check_layers(await made.receive(1), CACHE)
        assert made.carried(0) == ONCE
        await asyncio.sleep(first + 12.0 - now())
        assert not any(len(relay.cache) for relay in made.net.relays)
        check_layers(await made.receive(2), CACHE)
        assert made.carried(0) == ONCE + ONCE
        for number in range(3):
            assert made.received(number) == ONCE


@pytest.mark.requirement("R9b")
@through_relays
@pytest.mark.parametrize("jitter", [0.0, 0.2])
@virtual
async def test_160_streams_at_once(relays: int, jitter: float) -> None:
    """80 layers of two tracks, none of which ends before all have begun: on each hop all are open."""
    model = descriptor(layers=80)
    cache = make_cache(model, len(TOKENS))
    async with tree(relays=relays, jitter=jitter, seed=3) as made:
        publication = made.publisher(model).publish(TOKENS)
        later: list[Callable[[], object]] = []
        for track in publication.segment.tracks.values():
            hold_back(track, later)
        layer_done = publication.layer_done
        publication.layer_done = lambda *args: later.append(lambda: layer_done(*args))  # type: ignore[method-assign]  # the test takes its place
        async with await made.subscriber(0, model).receive(TOKENS, wait=5.0) as reception:
            task = asyncio.create_task(collect(reception))
            await asyncio.sleep(1)
            await put_layers(publication.segment, cache)
            await asyncio.sleep(2)
            receivers = [
                links[-1].server if hop == 0 else links[-1].client for hop, links in enumerate(made.hops)
            ]
            for receiver in [*receivers, made.net.links[-1].client]:
                assert open_streams(receiver) == 160 + 1  # and the control stream
            for action in later:
                action()
            check_layers(await task, cache, model)
            assert (reception.missing, reception.rejected) == ([], 0)
    assert set(made.received().values()) == {1}
    assert len(made.received()) == 2 * 80 * 3


# Byte-identical Objects, whichever way they came.

Seen = dict[Location, tuple[bytes, int, int, Properties]]


async def seen(reception: Subscription | FetchStream) -> Seen:
    """Payload, Subgroup, priority and properties of each Object, to the end; each has come once."""
    found: Seen = {}
    async for item in reception:
        if isinstance(item, ReceivedObject) and item.status is ObjectStatus.NORMAL:
            assert item.location not in found
            found[item.location] = (bytes(item.payload), item.subgroup, item.priority, item.properties)
    return found


@pytest.mark.requirement("R8a")
@pytest.mark.parametrize("relays", [0, 1, 2])
@virtual
async def test_objects_are_the_same_whichever_way_they_came(relays: int) -> None:
    """Live, by a fill and by a fetch, cold and warm, directly and through relays: payload, Subgroup, priority
    and properties, which nobody here knows, are the publisher's.
    """
    track = Track(FullTrackName((b"scene", b"one"), b"any"))
    published: Seen = {}

    def publish(groups: range) -> None:
        for group, object_id in itertools.product(groups, range(3)):
            location = Location(group, object_id)
            data = noise(location, 40_000 * object_id)
            properties: Properties = ((0x3C0, object_id), (0x3C1, b"opaque")) if object_id else ()
            subgroup, priority = object_id % 2, 10 * group + object_id % 2
            encoded = encode_properties(properties)
            track.append(group, object_id, data, properties=encoded, subgroup=subgroup, priority=priority)
            published[location] = (bytes(data), subgroup, priority, properties)

    async with tree(relays=relays, subscribers=4, jitter=0.01, seed=relays) as made:
        made.tracks.add(track)
        cold, live, late, warm = made.net.sessions
        publish(range(2))
        assert await seen(await cold.fetch(track.name, filter=EVERYTHING)) == published
        subscriptions = [await join(live, track.name)]
        publish(range(2, 4))
        await asyncio.sleep(1)
        subscriptions.append(await join(late, track.name))
        publish(range(4, 6))
        await asyncio.sleep(1)
        assert await seen(await warm.fetch(track.name, filter=EVERYTHING)) == published
        made.net.end(track)
        for subscription in subscriptions:
            assert await seen(subscription) == published
