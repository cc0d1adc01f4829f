"""Objects that fail a check are discarded and treated as missing; all else goes on (kvcs 4, 7.4)."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from kvcs.assembly import Layer, Missing
from kvcs.errors import Check
from kvcs.names import DataTrack
from kvcs.payload import HEADER_SIZE
from kvcs.progress import ATTEMPTS
from kvcs.publisher import Publication
from kvcs.subscriber import CacheIncomplete
from moqt.filters import Location, LocationFilter
from moqt.track import StoredObject
from moqt.wire import Fetch
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    TOKENS,
    Cache,
    Stage,
    Wiretap,
    check_layer,
    check_layers,
    collect,
    descriptor,
    make_cache,
    now,
    put_layers,
    stage,
)

pytestmark = pytest.mark.virtual

LAYERS, BLOCKS = MODEL.layers, 3
Forge = Callable[[bytearray], bytes | bytearray]
"""What stands in the place of a payload."""

WHERE = ("v.raw.s0", 2, 1)


def swap(publication: Publication, name: str, layer: int, block: int, payload: bytes) -> None:
    """Put other octets in the place of a stored Object, behind the publisher's back."""
    track = publication.segments[DataTrack.parse(name).segment].tracks[DataTrack.parse(name)]
    item = track.get(Location(layer, block))
    assert item is not None
    entry = track._groups[layer].objects
    entry[block] = StoredObject(
        item.location, (memoryview(payload),), len(payload), item.subgroup, item.priority, item.properties
    )


def forge(publication: Publication, how: Forge, where: tuple[str, int, int] = WHERE) -> None:
    """Let the newest segment publish something else at one Location."""
    name, layer, block = where
    track = publication.segment.tracks[DataTrack.parse(name)]
    append = track.append

    def forged(group: int, object_id: int, payload: Any, **options: Any) -> bool:
        if (group, object_id) == (layer, block):
            payload = bytes(how(bytearray(b"".join(payload))))
        return append(group, object_id, payload, **options)

    track.append = forged  # type: ignore[method-assign]  # a fault, for once


def header(offset: int, octets: bytes) -> Forge:
    """Another header field, digest and all else left as they are."""

    def change(payload: bytearray) -> bytearray:
        assert payload[offset : offset + len(octets)] != octets
        payload[offset : offset + len(octets)] = octets
        return payload

    return change


def flip(payload: bytearray) -> bytearray:
    payload[-1] ^= 0x80
    return payload


def consistent(payload: bytearray) -> bytearray:
    """Other Data under its own digest: only the manifest can tell."""
    payload[-1] ^= 0x80
    payload[36:68] = hashlib.sha256(payload[68:]).digest()
    return payload


BAD: dict[Check, list[Forge]] = {
    Check.HEADER: [lambda payload: b"", lambda payload: payload[:67]],
    Check.MAGIC: [header(0, b"KVO2")],
    Check.VERSION: [header(4, b"\x02"), header(4, b"\x00")],
    Check.COMPONENT: [header(5, b"\x01"), header(5, b"\x03")],
    Check.LAYER: [header(8, struct.pack(">I", 1)), header(8, struct.pack(">I", 2**31))],
    Check.BLOCK_INDEX: [header(12, struct.pack(">I", 0)), header(12, struct.pack(">I", 2))],
    Check.TOKEN_START: [header(16, struct.pack(">Q", 0)), header(16, struct.pack(">Q", 2**63))],
    Check.TOKEN_COUNT: [header(24, struct.pack(">I", 1)), header(24, struct.pack(">I", 0))],
    Check.CODEC: [header(28, b"\xff\x01"), header(28, b"\x00\x00")],
    Check.DATA_LENGTH: [
        header(32, struct.pack(">I", 15)),
        header(32, b"\xff\xff\xff\xff"),
        lambda payload: payload[:-1],
        lambda payload: payload + b"\0",
    ],
    Check.SECTION_LENGTH: [
        lambda payload: (
            payload[:32] + struct.pack(">I", 8) + hashlib.sha256(payload[68:76]).digest() + payload[68:76]
        )
    ],
    Check.DATA_DIGEST: [flip, header(36, b"\x00" * 32)],
    Check.LISTED_DIGEST: [consistent],
}


@pytest.mark.requirement("R4b", "R4c")
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("check", "how"), [(check, how) for check, hows in BAD.items() for how in hows])
async def test_each_check(check: Check, how: Forge, live: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The bad Object is discarded, asked for again, and then missing; every other Object is used, the session
    goes on.
    """
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        forge(publication, how)
        if live and check is Check.LISTED_DIGEST:
            publication.layer_done = list_all(publication)  # type: ignore[method-assign]  # the test takes its place
        if not live:
            await put_layers(publication.segment, CACHE)
        async with await scene.subscriber(patience=60.0).receive(TOKENS) as reception:
            reception.partial = True
            task = asyncio.create_task(collect(reception))
            await asyncio.sleep(1)
            if live:
                await put_layers(publication.segment, CACHE)
            layers = await task
            assert [layer.layer for layer in layers] == [0, 1, 3]
            for layer in layers:
                check_layer(layer, CACHE)
            assert reception.missing == [Missing(0, 2, 1)]
            assert ATTEMPTS <= reception.rejected <= ATTEMPTS + 1
            assert f"v.raw.s0, layer 2, block 1 was discarded: {check}:" in reception.reason
            assert now() < 3
        assert f"v.raw.s0, layer 2, block 1 was discarded: {check}: expected" in caplog.text
        assert not scene.here.closed
        other = scene.publisher().publish(TOKENS)
        await put_layers(other.segment, CACHE)
        check_layers(await scene.receive(publications=[other.name]), CACHE)


def list_all(publication: Publication) -> Callable[..., None]:
    """A new version of the manifest for each layer."""
    original = publication.layer_done

    def layer_done(segment: Any, digests: Any) -> None:
        original(segment, digests)
        publication._publish_manifest()

    return layer_done


@pytest.mark.requirement("R4c")
@pytest.mark.parametrize("live", [False, True])
async def test_an_object_that_is_right_the_next_time(live: bool) -> None:
    """As when a relay had a bad copy: the second one is used, and only that Object is fetched again."""
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        publication = scene.publisher().publish(TOKENS)
        good: list[bytes] = []

        def once(payload: bytearray) -> bytes:
            good.append(bytes(payload))
            return bytes(flip(payload))

        forge(publication, once)
        if not live:
            await put_layers(publication.segment, CACHE)

        fetch = scene.here.fetch

        async def fetch_once_repaired(track: Any, **options: Any) -> Any:
            location = options["filter"]
            if (location.start_group, location.start_object) == WHERE[1:]:
                swap(publication, *WHERE, good[0])
            return await fetch(track, **options)

        scene.here.fetch = fetch_once_repaired  # type: ignore[method-assign]  # the peer's doing, really
        async with await scene.subscriber().receive(TOKENS) as reception:
            task = asyncio.create_task(collect(reception))
            await asyncio.sleep(1)
            if live:
                await put_layers(publication.segment, CACHE)
            check_layers(await task, CACHE)
            assert reception.rejected == 1
            assert (reception.missing, reception.reason) == ([], "")
    fetches = [request for request in taps[0].requests(from_client=True) if isinstance(request, Fetch)]
    filters = [request.parameters.location_filter for request in fetches]
    again = LocationFilter.absolute_range(Location(2, 1), Location(2, 1))
    assert again in filters
    assert [one for one in filters if one != again] == ([] if live else [LocationFilter.groups(0, 3)] * 2)
    counts = taps[0].data_objects(from_client=False)
    assert counts.pop(("v", 2, 1)) in (2, 3)
    assert set(counts.values()) == {1}


async def test_a_bad_object_does_not_wait_for_the_end_of_a_long_fetch() -> None:
    """It is fetched again beside it, since its layer is due."""
    model = descriptor(layers=16, kv_heads=8, head_dim=64, block_tokens=16)
    tokens = list(range(64))
    cache = make_cache(model, len(tokens))
    times = []
    async with stage(latency=0.05, window=16 * 1024, chunk=1200) as scene:
        publication = scene.publisher(model).publish(tokens)
        good: list[bytes] = []

        def once(payload: bytearray) -> bytes:
            good.append(bytes(payload))
            return bytes(flip(payload))

        forge(publication, once, ("k.raw.s0", 1, 0))
        await put_layers(publication.segment, cache)
        async with await scene.subscriber(model).receive(tokens) as reception:
            async for layer in reception:
                check_layer(layer, cache, model)
                times.append(now())
                if layer.layer == 0:
                    swap(publication, "k.raw.s0", 1, 0, good[0])
            assert reception.rejected == 1
    assert times[1] - times[0] < (times[-1] - times[0]) / 3


@pytest.mark.requirement("R4c")
async def test_only_bad_objects() -> None:
    """All of a track: nothing is handed out, and it ends."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                forge(publication, flip, ("k.raw.s0", layer, block))
        await put_layers(publication.segment, CACHE)
        with pytest.raises(CacheIncomplete) as caught:
            await scene.receive(patience=30.0)
        assert caught.value.missing == tuple(
            Missing(0, layer, block) for layer in range(LAYERS) for block in range(BLOCKS)
        )
        assert now() < 5
        assert not scene.here.closed


@pytest.mark.requirement("R4d")
async def test_flags_and_reserved_are_ignored() -> None:
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        forge(publication, header(6, b"\xff\xff"))
        forge(publication, header(30, b"\xff\xff"), ("k.raw.s0", 0, 0))
        await put_layers(publication.segment, CACHE)
        async with await scene.subscriber().receive(TOKENS) as reception:
            check_layers(await collect(reception), CACHE)
            assert reception.rejected == 0
        track = publication.segment.tracks[DataTrack.parse("v.raw.s0")]
        item = track.get(Location(0, 0))
        assert item is not None
        sent = b"".join(item.payload)
        assert sent[6:8] == sent[30:32] == b"\0\0"


# Codecs


def packed(change: Callable[[bytes], bytes]) -> Forge:
    """Other Data under a consistent header."""

    def how(payload: bytearray) -> bytes:
        data = change(bytes(payload[HEADER_SIZE:]))
        head = payload[:32] + struct.pack(">I", len(data)) + hashlib.sha256(data).digest()
        return bytes(head) + data

    return how


BOMB = zlib.compress(bytes(64 * 1024 * 1024), 9)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"no zlib at all",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data + data,
        lambda data: zlib.compress(bytes(15)),
        lambda data: zlib.compress(bytes(17)),
        lambda data: BOMB,
        lambda data: zlib.compress(BOMB),
    ],
)
@pytest.mark.parametrize("joint", [False, True])
async def test_data_that_cannot_be_decoded(change: Callable[[bytes], bytes], joint: bool) -> None:
    """Bombs and broken streams of x-shuffle-zlib are discarded as any bad Object."""
    name = "kv.x-shuffle-zlib.s0" if joint else "v.x-shuffle-zlib.s0"
    codecs: dict[str, Any] = {"joint_codecs" if joint else "codecs": ["x-shuffle-zlib"]}
    async with stage() as scene:
        publication = scene.publisher(**({"codecs": []} | codecs)).publish(TOKENS)
        forge(publication, packed(change), (name, 2, 1))
        publication.layer_done = lambda segment, digests: None  # type: ignore[method-assign]  # none are listed
        async with await scene.subscriber(patience=30.0).receive(TOKENS) as reception:
            reception.partial = True
            task = asyncio.create_task(collect(reception))
            await asyncio.sleep(1)
            await put_layers(publication.segment, CACHE)
            layers = await task
            assert [layer.layer for layer in layers] == [0, 1, 3]
            assert reception.missing == [Missing(0, 2, 1)]
            assert "codec data" in reception.reason
        assert not scene.here.closed


# Other publications


async def spoiled(
    scene: Stage, cache: Cache, *where: tuple[str, int, int], deterministic: bool = False
) -> Publication:
    """A complete publication with bad Objects."""
    publication = scene.publisher().publish(TOKENS, deterministic=deterministic)
    for one in where:
        forge(publication, flip, one)
    await put_layers(publication.segment, cache)
    return publication


@pytest.mark.requirement("R7.4b")
async def test_a_segment_comes_from_another_publication_as_a_whole() -> None:
    """Layer 0 of the first is bad: nothing was handed out, so the second one brings all, and all of it is its
    own.
    """
    other = make_cache(MODEL, len(TOKENS), seed=77)
    async with stage() as scene:
        first = await spoiled(scene, CACHE, ("k.raw.s0", 0, 2))
        second = await spoiled(scene, other)
        async with await scene.subscriber().receive(TOKENS) as reception:
            assert reception.publication == first.name
            check_layers(await collect(reception), other)
            assert reception.publication == second.name
            assert reception.missing == []


async def test_a_publication_that_was_given_up_is_left_alone() -> None:
    """Nothing more is asked of it, and nothing is waited for."""
    other = make_cache(MODEL, len(TOKENS), seed=77)
    async with stage() as scene:
        first = scene.publisher().publish(TOKENS)
        forge(first, flip, ("k.raw.s0", 0, 2))
        second = scene.publisher().publish(TOKENS)
        async with await scene.subscriber().receive(TOKENS) as reception:
            task = asyncio.create_task(collect(reception))
            await put_layers(first.segment, CACHE, last=1)
            await asyncio.sleep(1)
            assert reception.publication == second.name
            assert not any(track._watchers for track in first.segment.tracks.values())
            await put_layers(second.segment, other)
            check_layers(await task, other)


async def test_segments_that_are_cut_differently() -> None:
    """A later segment of another publication is of use only where it goes on from what is covered."""
    tokens = [*TOKENS, 1, 2, 3, 4, 5, 6]
    cache = make_cache(MODEL, 12)
    async with stage() as scene:
        publications = [scene.publisher().publish(TOKENS) for _ in range(2)]
        for publication, cuts in zip(publications, ((6, 10), (6, 8, 12)), strict=True):
            start = 0
            for stop in cuts:
                if start:
                    publication.add_segment(tokens[start:stop])
                part = slice(start, stop)
                await put_layers(publication.segment, [(k[part], v[part]) for k, v in cache])
                start = stop
        names = [publication.name for publication in publications]
        for order, blocks in ((names, [3, 2]), (names[::-1], [3, 1, 2])):
            async with await scene.subscriber().receive(tokens, publications=order) as reception:
                layers = await collect(reception)
                assert reception.blocks == sum(blocks)
            assert len(layers) == LAYERS * len(blocks)
            for layer in layers:
                check_layer(layer, cache, blocks=(sum(blocks[: layer.segment]), blocks[layer.segment]))


@pytest.mark.requirement("R7.4b")
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("who", [(), (0,), (1,)])
@pytest.mark.parametrize("listed", [0, 10**6])
async def test_publications_are_not_mixed(
    listed: int, who: tuple[int, ...], partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 0 and 1 were handed out, layer 2 is bad: unless both are deterministic, the rest is missing;
    whether digests are listed or not.
    """
    monkeypatch.setattr("kvcs.publisher.MAX_LISTED", listed)
    other = make_cache(MODEL, len(TOKENS), seed=77)
    async with stage() as scene:
        first = await spoiled(scene, CACHE, ("k.raw.s0", 2, 0), deterministic=0 in who)
        await spoiled(scene, other, deterministic=1 in who)
        async with await scene.subscriber().receive(TOKENS) as reception:
            reception.partial = partial
            layers: list[Layer] = []
            with nullcontext() if partial else pytest.raises(CacheIncomplete):
                async for layer in reception:
                    layers.append(layer)
            assert reception.publication == first.name
            assert reception.missing == [Missing(0, 2, 0)]
            assert [layer.layer for layer in layers] == ([0, 1, 3] if partial else [0, 1])
            for layer in layers:
                check_layer(layer, CACHE)


@pytest.mark.requirement("R7.4b")
async def test_deterministic_publications_complete_each_other() -> None:
    """Only what the first does not bring comes from the second, and from the third what the second lacks."""
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        bad = [("k.raw.s0", 2, 0), ("v.raw.s0", 3, 1)]
        await spoiled(scene, CACHE, *bad, deterministic=True)
        second = await spoiled(scene, CACHE, ("v.raw.s0", 3, 1), deterministic=True)
        third = await spoiled(scene, CACHE, deterministic=True)
        async with await scene.subscriber().receive(TOKENS) as reception:
            check_layers(await collect(reception), CACHE)
            assert reception.missing == []
            assert reception.publication == third.name
        asked = [
            (request.track.namespace[4], request.track.name, request.parameters.location_filter)
            for request in taps[0].requests(from_client=True)
            if isinstance(request, Fetch)
        ]
        for name, where in ((second.name, bad), (third.name, bad[1:])):
            starts = {
                (track.decode(), *astuple(location))
                for publication_id, track, location in asked
                if publication_id == name.publication_id and location is not None
            }
            assert {start[:3] for start in starts} == set(where)


def astuple(location: Any) -> tuple[int, int]:
    return location.start_group, location.start_object


@pytest.mark.requirement("R7.4b")
async def test_deterministic_publications_that_differ_are_not_mixed() -> None:
    """The digests that the second lists give it away."""
    other = make_cache(MODEL, len(TOKENS), seed=77)
    async with stage() as scene:
        await spoiled(scene, CACHE, ("k.raw.s0", 2, 0), deterministic=True)
        await spoiled(scene, other, deterministic=True)
        with pytest.raises(CacheIncomplete) as caught:
            await scene.receive()
        assert caught.value.missing == (Missing(0, 2, 0),)


@pytest.mark.requirement("R7.4b")
@pytest.mark.parametrize("listed", [6, 10**6])
async def test_the_second_brings_the_whole_when_nothing_was_handed_out(
    listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that say they are deterministic and differ, also where only layer 0 is listed of the second."""
    other = make_cache(MODEL, len(TOKENS), seed=77)
    async with stage() as scene:
        await spoiled(scene, CACHE, ("k.raw.s0", 0, 0), deterministic=True)
        monkeypatch.setattr("kvcs.publisher.MAX_LISTED", listed)
        await spoiled(scene, other, deterministic=True)
        check_layers(await scene.receive(), other)


async def test_a_producer_that_stalls_is_replaced_by_another_publication() -> None:
    """After patience; a publication in another codec will do."""
    other = make_cache(MODEL, len(TOKENS), seed=77)
    async with stage() as scene:
        stalled = scene.publisher().publish(TOKENS)
        second = scene.publisher(codecs=["x-shuffle-zlib"]).publish(TOKENS)
        async with await scene.subscriber(patience=3.0).receive(TOKENS) as reception:
            assert reception.publication == stalled.name
            task = asyncio.create_task(collect(reception))
            await asyncio.sleep(1)
            await put_layers(second.segment, other, last=1)
            await asyncio.sleep(3)
            assert reception.publication == second.name
            # The first one is not asked any more.
            assert not any(track._watchers for track in stalled.segment.tracks.values())
            await put_layers(stalled.segment, CACHE)
            await put_layers(second.segment, other, first=2)
            check_layers(await task, other)


async def test_several_segments_each_from_a_publication_that_has_it() -> None:
    """Segment 0 is bad in one publication, segment 1 in the other."""
    tokens = [*TOKENS, 1, 2, 3, 4]
    caches = [make_cache(MODEL, 10, seed=seed) for seed in (1, 2)]
    async with stage() as scene:
        publications = [scene.publisher().publish(TOKENS) for _ in caches]
        for number, (publication, cache) in enumerate(zip(publications, caches, strict=True)):
            if number == 0:
                forge(publication, flip, ("k.raw.s0", 0, 0))
            await put_layers(publication.segment, [(k[:6], v[:6]) for k, v in cache])
            publication.add_segment([1, 2, 3, 4])
            if number == 1:
                forge(publication, flip, ("v.raw.s1", 0, 1))
            await put_layers(publication.segment, [(k[6:], v[6:]) for k, v in cache])
        async with await scene.subscriber().receive(
            tokens, publications=[publication.name for publication in publications]
        ) as reception:
            layers = await collect(reception)
            assert reception.missing == []
        assert len(layers) == 2 * LAYERS
        for layer in layers:
            source = caches[1] if layer.segment == 0 else caches[0]
            check_layer(layer, source, blocks=(3 * layer.segment, 3 - layer.segment))
