"""What a publisher publishes, and what it refuses (kvcs 3, 6, 9)."""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import Any

import numpy as np
import pytest

from kvcs.errors import InvalidTokens, InvalidValue
from kvcs.identity import block_keys
from kvcs.manifest import MAX_SEGMENTS
from kvcs.names import DataTrack, PublicationName
from kvcs.payload import HEADER_SIZE
from kvcs.publisher import Publisher
from kvcs.subscriber import CacheIncomplete
from moqt.errors import DoneCode, LocationTaken, RequestCode, RequestRejected
from moqt.filters import Location, LocationFilter
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.quic.api import QuicOptions
from moqt.subscribing import FetchStream, Fill, ReceivedObject
from moqt.track import Track
from moqt.tracks import Tracks
from moqt.wire import (
    AliasType,
    FetchHeader,
    ObjectHeader,
    ObjectStatus,
    PropertyType,
    PublishNamespace,
    SubgroupHeader,
    Token,
    get,
)
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    SCOPE_KEY,
    TOKENS,
    Wiretap,
    check_layer,
    check_layers,
    collect,
    descriptor,
    make_cache,
    payload,
    put_layers,
    stage,
    stored,
)

pytestmark = pytest.mark.virtual

LAYERS, BLOCKS = MODEL.layers, 3
SIZE = 16  # octets of Data of an Object of MODEL


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int, int]]:
    """(track, group, object) of all that is published, in order, whatever the track."""
    seen: list[tuple[bytes, int, int]] = []
    append = Track.append

    def record(self: Track, group: int, object_id: int, *args: Any, **options: Any) -> bool:
        seen.append((self.name.name, group, object_id))
        return append(self, group, object_id, *args, **options)

    monkeypatch.setattr(Track, "append", record)
    return seen


def publisher(**options: Any) -> Publisher:
    return Publisher(MODEL, SCOPE_KEY, **options)


# Groups and Objects (kvcs 3.3, 3.4)


@pytest.mark.requirement("R3.3a")
async def test_layers_come_in_order(appended: list[tuple[bytes, int, int]]) -> None:
    segment = publisher().publish(TOKENS).segment
    k, v = CACHE[0]
    for wrong in (1, 3, 4, -1):
        with pytest.raises(InvalidValue, match=f"layer {wrong} can't be published now: layer 0 is due"):
            await segment.put_layer(wrong, k, v)
    await segment.put_layer(0, k, v)
    for wrong in (0, 2):
        with pytest.raises(InvalidValue, match="layer 1 is due"):
            await segment.put_layer(wrong, k, v)
    await put_layers(segment, CACHE, first=1)
    with pytest.raises(InvalidValue, match="all 4 layers are published"):
        await segment.put_layer(4, k, v)
    for name in (b"k.raw.s0", b"v.raw.s0"):
        order = [(group, object_id) for track, group, object_id in appended if track == name]
        assert order == [(group, object_id) for group in range(LAYERS) for object_id in range(BLOCKS)]


@pytest.mark.requirement("R3.3c", "R3.3d", "R3.4d")
@pytest.mark.parametrize("publisher_dials", [False, True])
async def test_streams_of_a_live_subscription(publisher_dials: bool) -> None:
    """On the wire: a stream for each Group, Subgroup 0, its priority, Objects ascending, End of Group."""
    taps: list[Wiretap] = []
    async with stage(publisher_dials=publisher_dials, tap=lambda link: taps.append(Wiretap(link))) as scene:
        segment = scene.publisher().publish(TOKENS).segment
        task = asyncio.create_task(scene.receive())
        await asyncio.sleep(1)
        await put_layers(segment, CACHE)
        check_layers(await task, CACHE)
        await asyncio.sleep(1)
    groups: list[int] = []
    ends = 0
    manifest_priorities = set()
    for header, *events in taps[0].streams(from_client=publisher_dials):
        if isinstance(header, FetchHeader):  # the first version of the manifest
            objects = [event for event in events if isinstance(event, ObjectHeader)]
            manifest_priorities |= {event.priority for event in objects}
            continue
        assert isinstance(header, SubgroupHeader)
        objects = [event for event in events if isinstance(event, ObjectHeader)]
        statuses = [(event.location.object, event.status) for event in objects]
        assert {event.location.group for event in objects} == {header.group}
        assert header.subgroup == 0
        if objects[0].size and objects[0].size != HEADER_SIZE + SIZE:
            manifest_priorities.add(header.priority)
        elif objects[0].status is ObjectStatus.END_OF_TRACK:
            assert objects[0].location == Location(LAYERS, 0)
            assert len(objects) == 1
            ends += 1
        else:
            groups.append(header.group)
            assert header.priority == 128 * header.group // LAYERS
            assert header.end_of_group
            assert header.first_object
            assert statuses == [
                *((block, ObjectStatus.NORMAL) for block in range(BLOCKS)),
                (BLOCKS, ObjectStatus.END_OF_GROUP),
            ]
    assert sorted(groups) == sorted([*range(LAYERS), *range(LAYERS)])
    assert ends <= 2  # The consumer may have left with the last Object.
    assert manifest_priorities == {0}


@pytest.mark.requirement("R3.3d")
@pytest.mark.parametrize("name", ["k.raw.s0", "v.raw.s0"])
async def test_end_of_group_and_end_of_track(name: str) -> None:
    """As a subscriber sees them that stays to the end."""
    seen: list[tuple[Location, ObjectStatus]] = []
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        track = publication.segment.tracks[DataTrack.parse(name)]
        async with await scene.here.subscribe(track.name) as subscription:
            await put_layers(publication.segment, CACHE)
            assert track.ended == Location(LAYERS, 0)
            publication.close()
            async for item in subscription:
                if isinstance(item, ReceivedObject):
                    seen.append((item.location, item.status))
    expected = [
        (Location(group, object_id), status)
        for group in range(LAYERS)
        for object_id, status in [
            *((block, ObjectStatus.NORMAL) for block in range(BLOCKS)),
            (BLOCKS, ObjectStatus.END_OF_GROUP),
        ]
    ]
    assert sorted(seen) == [*expected, (Location(LAYERS, 0), ObjectStatus.END_OF_TRACK)]


@pytest.mark.requirement("R3.4d")
@pytest.mark.parametrize("layers", [1, 3, 5, 128, 200])
async def test_priorities(layers: int) -> None:
    model = descriptor(layers=layers)
    publication = Publisher(model, SCOPE_KEY).publish(TOKENS)
    await put_layers(publication.segment, make_cache(model, len(TOKENS)))
    for name in ("k.raw.s0", "v.raw.s0"):
        for (group, _), item in stored(publication, name).items():
            assert item.priority == int(128 * group / layers)
    manifest = publication.publisher.tracks.get(FullTrackName(publication.name.namespace, b"manifest"))
    assert manifest is not None
    assert {item.priority for item in manifest.objects(Location(0, 0), Location(99, 0))} == {0}


@pytest.mark.requirement("R3.4a", "R3.3b")
async def test_segments_of_a_chunked_prefill(appended: list[tuple[bytes, int, int]]) -> None:
    """Three passes; each takes the tokens that the one before left over; Group IDs rise in every track."""
    tokens = list(range(200, 213))  # 13: passes of 5, 4 and 4, so blocks of 2, 2 and 2, and one token over
    cache = make_cache(MODEL, len(tokens), seed=5)

    def part(start: int, stop: int) -> list[tuple[Any, Any]]:
        return [(k[start:stop], v[start:stop]) for k, v in cache]

    publication = publisher().publish(tokens[:5])
    first = publication.segment
    assert (first.number, first.first_block, first.blocks, first.tokens, first.tail) == (0, 0, 2, 5, 1)
    await put_layers(first, part(0, 5))
    second = publication.add_segment(tokens[5:9])
    assert (second.number, second.first_block, second.blocks, second.tokens, second.tail) == (1, 2, 2, 5, 1)
    assert publication.segment is second
    await put_layers(second, part(4, 9))
    third = publication.add_segment(np.array(tokens[9:]))
    assert (third.number, third.first_block, third.blocks, third.tokens, third.tail) == (2, 4, 2, 5, 1)
    await put_layers(third, part(8, 13))
    for segment in publication.segments:
        for name in segment.tracks:
            groups = [group for track, group, _ in appended if track == name.name]
            assert groups == sorted(groups)
            assert set(groups) == set(range(LAYERS))
            for (group, object_id), item in stored(publication, str(name)).items():
                layer, block, start, count = struct.unpack_from(">IIQI", payload(item), 8)
                assert (layer, block) == (group, object_id)
                assert start == (segment.first_block + object_id) * MODEL.block_tokens
                assert count == MODEL.block_tokens
                absolute = segment.first_block + object_id
                own = cache[group][name.component - 1][absolute * 2 : absolute * 2 + 2]
                assert payload(item)[HEADER_SIZE:] == own.tobytes()
    keys = block_keys(SCOPE_KEY, MODEL, tokens)
    assert publication.name.anchor_key == keys[1]
    assert all(entry.confirmed_by(keys) for entry in publication.manifest.segments)


@pytest.mark.requirement("R3.3b")
async def test_a_consumer_gets_all_segments() -> None:
    """Live, those that are added while it receives too; each layer of the earlier segment goes first."""
    tokens = list(range(200, 212))
    cache = make_cache(MODEL, len(tokens), seed=5)
    async with stage() as scene:
        publication = scene.publisher().publish(tokens[:4])
        task = asyncio.create_task(scene.receive(tokens))
        await asyncio.sleep(1)
        for number, stop in enumerate((4, 8, 12)):
            if number:
                publication.add_segment(tokens[stop - 4 : stop])
            await asyncio.sleep(0.5)
            await put_layers(
                publication.segment, [(k[stop - 4 : stop], v[stop - 4 : stop]) for k, v in cache]
            )
        layers = await task
        assert [(layer.segment, layer.layer) for layer in layers] == [
            (segment, layer) for segment in range(3) for layer in range(LAYERS)
        ]
        for layer in layers:
            check_layer(layer, cache, blocks=(2 * layer.segment, 2))
        again = await scene.receive(tokens)  # complete now: layer by layer, over all segments
        assert [(layer.layer, layer.segment) for layer in again] == sorted(
            (layer.layer, layer.segment) for layer in layers
        )
        some = await scene.receive(tokens, blocks=3, layers=(1, 2))
        assert [(layer.segment, layer.layer) for layer in some] == [(0, 1), (1, 1), (0, 2), (1, 2)]
        for layer in some:
            check_layer(layer, cache, blocks=(2 * layer.segment, 2 - layer.segment))


@pytest.mark.requirement("R3.4b")
async def test_a_second_payload_is_refused() -> None:
    publication = publisher().publish(TOKENS)
    await put_layers(publication.segment, CACHE)
    track = publication.segment.tracks[DataTrack.parse("k.raw.s0")]
    item = stored(publication, "k.raw.s0")[2, 1]
    other = bytearray(payload(item))
    other[-1] ^= 1
    with pytest.raises(LocationTaken, match="an Object is never changed"):
        track.append(2, 1, bytes(other), priority=item.priority)
    assert stored(publication, "k.raw.s0")[2, 1] is item
    assert not track.append(2, 1, payload(item), priority=item.priority)  # the same: nothing happens
    with pytest.raises(InvalidValue, match="all 4 layers are published"):
        await publication.segment.put_layer(2, *CACHE[2])


@pytest.mark.requirement("R3.4c", "R3.1b")
async def test_a_wrong_publication_is_closed_and_made_anew() -> None:
    async with stage() as scene:
        maker = scene.publisher()
        wrong = maker.publish(TOKENS)
        task = asyncio.create_task(scene.receive())
        await asyncio.sleep(1)
        await put_layers(wrong.segment, make_cache(MODEL, 6, seed=9), last=1)
        await asyncio.sleep(1)
        wrong.close()
        with pytest.raises(CacheIncomplete):
            await task
        right = maker.publish(TOKENS)
        assert right.name.publication_id != wrong.name.publication_id
        assert right.name.namespace[:4] == wrong.name.namespace[:4]
        await put_layers(right.segment, CACHE)
        async with await scene.subscriber().receive(TOKENS) as reception:
            assert reception.publication == right.name
            check_layers(await collect(reception), CACHE)
        with pytest.raises(InvalidValue, match="this publication was closed"):
            await wrong.segment.put_layer(2, *CACHE[2])
        with pytest.raises(InvalidValue, match="this publication was closed"):
            wrong.add_segment([1, 2, 3])
        wrong.close()  # once more: no effect
        assert scene.tracks.namespaces == (right.name.namespace,)
        assert all(track.name.namespace == right.name.namespace for track in scene.tracks)


@pytest.mark.requirement("R3.1b")
def test_publication_ids_are_random() -> None:
    maker = publisher()
    ids = {maker.publish(TOKENS).name.publication_id for _ in range(100)}
    assert len(ids) == 100
    bits = np.unpackbits(np.frombuffer(b"".join(ids), np.uint8))
    assert 0.4 < bits.mean() < 0.6


# Announcing (kvcs 6)


@pytest.mark.requirement("R6a")
async def test_the_full_namespace_is_announced_with_the_token() -> None:
    taps: list[Wiretap] = []
    token = Token(AliasType.USE_VALUE, type=7, value=b"let me publish")
    async with stage(
        publisher_dials=True, announce=True, tokens=[token], tap=lambda link: taps.append(Wiretap(link))
    ) as scene:
        maker = scene.publisher()
        first, second = maker.publish(TOKENS), maker.publish(TOKENS)
        await asyncio.sleep(1)
        assert list(scene.here.peer_namespaces) == [first.name.namespace, second.name.namespace]
        first.close()
        await asyncio.sleep(1)
        assert list(scene.here.peer_namespaces) == [second.name.namespace]
    requests = taps[0].requests(from_client=True)
    announced = [request for request in requests if isinstance(request, PublishNamespace)]
    assert [request.namespace for request in announced] == [first.name.namespace, second.name.namespace]
    for request in announced:
        assert [len(field) for field in request.namespace] == [6, 16, 32, 32, 16]
        assert request.parameters.tokens == (token,)
        assert (
            PublicationName.from_namespace(request.namespace).anchor_key
            == block_keys(SCOPE_KEY, MODEL, TOKENS)[-1]
        )


@pytest.mark.requirement("R6b")
async def test_the_manifest_goes_before_the_first_object(appended: list[tuple[bytes, int, int]]) -> None:
    publication = publisher().publish(TOKENS)
    assert appended == [(b"manifest", 0, 0)]
    assert publication.publisher.tracks.namespaces == (publication.name.namespace,)
    await put_layers(publication.segment, CACHE)
    publication.add_segment([1, 2])
    version = [track for track, _, _ in appended].count(b"manifest") - 1
    assert appended[-1] == (b"manifest", version, 0)
    assert len(publication.manifest.segments) == 2
    await put_layers(publication.segment, make_cache(MODEL, 2), last=0)
    assert appended[-2][0] == b"k.raw.s1"


@pytest.mark.requirement("R6c", "R6d")
@pytest.mark.parametrize("retention", [None, 0, 90.5, 30 * 86400])
async def test_properties_of_tracks(retention: float | None) -> None:
    """Retention, and no delivery timeout: as peers see them, in SUBSCRIBE_OK and FETCH_OK, and in Objects."""
    async with stage() as scene:
        publication = scene.publisher(retention=retention).publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        everything = LocationFilter.absolute_start(0, 0)
        for track in scene.tracks:
            async with (
                await scene.here.subscribe(track.name, fill=Fill(filter=everything)) as subscription,
                await scene.here.fetch(track.name, filter=everything) as fetch,
            ):
                for properties in (subscription.properties, fetch.properties):
                    kept = None if retention is None else int(retention * 1000)
                    assert get(properties, PropertyType.MAX_CACHE_DURATION) == kept
                    assert get(properties, PropertyType.OBJECT_DELIVERY_TIMEOUT) is None
                    assert get(properties, PropertyType.SUBGROUP_DELIVERY_TIMEOUT) is None
                async for item in fetch:
                    assert not getattr(item, "properties", ())


@pytest.mark.parametrize("retention", [-1, float("nan"), float("inf"), 2.0**60])
def test_retention_that_is_none(retention: float) -> None:
    with pytest.raises(InvalidValue, match="retention"):
        publisher(retention=retention)


@pytest.mark.parametrize(
    ("code", "whole", "expected"),
    [
        (None, True, DoneCode.TRACK_ENDED),
        (None, False, DoneCode.GOING_AWAY),
        (DoneCode.EXPIRED, True, DoneCode.EXPIRED),
        (DoneCode.EXPIRED, False, DoneCode.EXPIRED),
    ],
)
async def test_closing_ends_subscriptions(code: DoneCode | None, whole: bool, expected: DoneCode) -> None:
    """kvcs 14 #10."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE, last=None if whole else 1)
        names = [track.name for track in scene.tracks]
        assert len(names) == 3
        subscriptions = [await scene.here.subscribe(name) for name in names]
        publication.close(code)
        for subscription in subscriptions:
            async for _ in subscription:
                pass
            assert subscription.done is not None
            assert subscription.done.status == expected
            await subscription.close()
        with pytest.raises(RequestRejected, match="DOES_NOT_EXIST"):
            await scene.here.subscribe(names[0])


def test_tokens_of_any_kind() -> None:
    maker = publisher()
    names = {
        maker.publish(tokens).name.anchor_key
        for tokens in (TOKENS, tuple(TOKENS), range(100, 106), np.array(TOKENS), np.array(TOKENS, np.uint16))
    }
    assert len(names) == 1
    for tokens in ([], [1], [-1, 2], [2**32, 1], [[1, 2]], [1.5, 2.5], ["a", "b"]):
        with pytest.raises((InvalidTokens, InvalidValue)):
            maker.publish(tokens)  # type: ignore[arg-type]  # options of any kind
    publication = maker.publish(TOKENS)
    with pytest.raises(InvalidValue, match="fill no further block of 2: append more at once"):
        publication.add_segment([7])
    with pytest.raises(InvalidTokens):
        publication.add_segment([-1, 2])
    assert len(publication.segments) == 1


def test_nothing_is_announced_when_there_is_nothing_to_publish() -> None:
    tracks = Tracks()
    with pytest.raises(InvalidValue, match="1 tokens fill no block of 2: there is nothing to publish"):
        publisher(tracks=tracks).publish([1])
    assert not list(tracks)
    assert not tracks.namespaces


def test_no_more_segments_than_consumers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcs.publisher.MAX_SEGMENTS", 3)
    assert MAX_SEGMENTS == 4096
    publication = publisher().publish(TOKENS)
    publication.add_segment([1, 2])
    publication.add_segment([1, 2])
    with pytest.raises(InvalidValue, match="3 segments at most"):
        publication.add_segment([1, 2])


@pytest.mark.requirement("R9a")
@pytest.mark.parametrize(
    ("block_tokens", "warned"), [(15, True), (16, False), (512, False), (1024, False), (1025, True)]
)
def test_object_sizes_outside_the_recommended_draw_a_warning(
    block_tokens: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """8 heads of 64 elements of 2 octets: 1 KiB for a token."""
    model = descriptor(block_tokens=block_tokens, kv_heads=8, head_dim=64)
    with caplog.at_level(logging.WARNING, "kvcs.publisher"):
        Publisher(model, SCOPE_KEY)
    assert ("16 KiB to 1 MiB" in caplog.text) == warned
    if warned:
        assert "choose block_tokens 16 to 1024" in caplog.text


@pytest.mark.requirement("R10e")
async def test_fetches_of_one_subscriber_are_limited() -> None:
    """Those beyond the limit are told when to come again; when one has ended there is room."""
    model = descriptor(kv_heads=8, head_dim=64, block_tokens=16)
    tokens = range(48)
    async with stage(
        limits=Limits(max_fetches=3),
        subscriber_limits=Limits(receive_buffer=0),  # Nothing is taken but what is asked for.
        options=QuicOptions(max_stream_data=20_000),
    ) as scene:
        publication = scene.publisher(model).publish(tokens)
        await put_layers(publication.segment, make_cache(model, len(tokens)))
        name = publication.segment.tracks[DataTrack.parse("k.raw.s0")].name
        everything = LocationFilter.absolute_start(0, 0)
        fetches = await asyncio.gather(
            *(scene.here.fetch(name, filter=everything) for _ in range(5)), return_exceptions=True
        )
        refused = [one for one in fetches if isinstance(one, RequestRejected)]
        assert [(one.code, one.retry_after) for one in refused] == [(RequestCode.EXCESSIVE_LOAD, 1.0)] * 2
        accepted = [one for one in fetches if isinstance(one, FetchStream)]
        assert len(accepted) == 3
        await accepted[0].close()
        await asyncio.sleep(1)
        async with await scene.here.fetch(name, filter=everything) as fetch:
            assert len([item async for item in fetch]) == LAYERS * BLOCKS + 1  # and the end of the stream
        for one in accepted:
            await one.close()
