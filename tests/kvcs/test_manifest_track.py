"""The manifest on its way: versions, how it is asked for, and what a consumer makes of it (kvcs 5, 7.2)."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from kvcs.identity import block_keys
from kvcs.manifest import MAX_MANIFEST_SIZE, Manifest
from kvcs.names import DataTrack, PublicationName
from kvcs.payload import data_digest
from kvcs.publisher import MANIFEST_INTERVAL, Publication, Publisher
from kvcs.subscriber import CacheIncomplete, NothingFound
from moqt.errors import DoneCode, RequestCode, RequestRefused
from moqt.filters import FilterType, Location, LocationFilter
from moqt.names import FullTrackName
from moqt.publishing import Publishing
from moqt.track import StoredObject, Track, TrackWatcher
from moqt.wire import Fetch, Subscribe
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    SCOPE_KEY,
    TOKENS,
    Stage,
    Wiretap,
    check_layer,
    check_layers,
    collect,
    descriptor,
    make_cache,
    manifests,
    now,
    put_layers,
    stage,
)

pytestmark = pytest.mark.virtual

LAYERS, BLOCKS = MODEL.layers, 3
KEYS = block_keys(SCOPE_KEY, MODEL, TOKENS)
K, V = DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0")


def track_of(publication: Publication, name: bytes = b"manifest") -> Track:
    track = publication.publisher.tracks.get(FullTrackName(publication.name.namespace, name))
    assert track is not None
    return track


# What is published (kvcs 5)


@pytest.mark.requirement("R5a")
async def test_each_version_is_object_0_of_a_new_group() -> None:
    publication = Publisher(MODEL, SCOPE_KEY).publish(TOKENS)
    await put_layers(publication.segment, CACHE)
    publication.add_segment([1, 2, 3, 4])
    await put_layers(publication.segment, make_cache(MODEL, 4))
    track = track_of(publication)
    locations = [item.location for item in track.objects(Location(0, 0), Location(1000, 1000))]
    assert locations == [Location(version, 0) for version in range(4)]
    assert [track.group_end(version) for version in range(4)] == [1] * 4


@pytest.mark.requirement("R5b")
@pytest.mark.parametrize("codecs", [["raw"], ["raw", "x-shuffle-zlib"]])
async def test_one_manifest_track(codecs: list[str]) -> None:
    publication = Publisher(MODEL, SCOPE_KEY, codecs=codecs).publish(TOKENS)
    publication.add_segment(TOKENS)
    names = [track.name.name for track in publication.publisher.tracks]
    assert [name for name in names if name.startswith(b"manifest")] == [b"manifest"]
    assert len(names) == 1 + 2 * 2 * len(codecs)


@pytest.mark.requirement("R5c", "R5d")
@pytest.mark.parametrize("layers", [1, 7, 8, 9, 16, 20])
async def test_versions_and_their_digests(layers: int) -> None:
    """At least one for eight completed layers, and one when the segment is complete; each lists all Objects
    that were published before it.
    """
    model = descriptor(layers=layers)
    publisher = Publisher(model, SCOPE_KEY, codecs=["raw", "x-shuffle-zlib"], joint_codecs=["raw"])
    publication = publisher.publish(TOKENS)
    track = track_of(publication)
    assert track.largest == Location(0, 0)
    completed: list[int] = []  # layers that were published when each version appeared

    class Watcher(TrackWatcher):
        def on_object(self, item: StoredObject) -> None:
            if item.payload:
                completed.append(publication.segment.next_layer)

        def on_removed(self, code: DoneCode) -> None:
            raise AssertionError

    track.watch(Watcher())
    await put_layers(publication.segment, make_cache(model, len(TOKENS)))
    steps = [after - before for before, after in zip([0, *completed], completed, strict=False)]
    assert max(steps) <= MANIFEST_INTERVAL == 8
    assert completed[-1] == layers
    versions = manifests(publication)
    assert [manifest.segments[0].complete for manifest in versions] == [False] * (len(versions) - 1) + [True]
    assert len(versions) == 1 + len(completed)
    for manifest, number in zip(versions, [0, *completed], strict=True):
        entry = manifest.segments[0]
        assert set(entry.object_digests) == (set(entry.tracks) if number else set())
        assert len(entry.tracks) == 5
        for name, groups in entry.object_digests.items():
            assert len(groups) == number
            for layer in range(number):
                for block in range(BLOCKS):
                    item = publication.segment.tracks[name].get(Location(layer, block))
                    assert item is not None
                    assert entry.listed_digest(name, layer, block) == data_digest(b"".join(item.payload))


@pytest.mark.requirement("R5d")
async def test_a_version_for_each_segment_that_is_added_or_completed() -> None:
    publication = Publisher(MODEL, SCOPE_KEY).publish(TOKENS)

    def state() -> tuple[int, list[bool]]:
        versions = manifests(publication)
        return len(versions), [entry.complete for entry in versions[-1].segments]

    assert state() == (1, [False])
    await put_layers(publication.segment, CACHE)
    assert state() == (2, [True])
    first, second = publication.add_segment([1, 2]), publication.add_segment([3, 4])
    assert state() == (4, [True, False, False])
    await put_layers(second, make_cache(MODEL, 2))
    assert state() == (5, [True, False, True])
    await put_layers(first, make_cache(MODEL, 2))
    assert state() == (6, [True, True, True])
    # Layers of several segments count together towards the eight.
    segments = [publication.add_segment([number, 0]) for number in range(4)]
    before = state()[0]
    for layer in range(LAYERS - 1):
        for segment in segments:
            await put_layers(segment, make_cache(MODEL, 2), first=layer, last=layer)
    assert state()[0] == before + 1
    assert len(manifests(publication)[-1].segments[3].object_digests[DataTrack.parse("k.raw.s3")]) == 2


@pytest.mark.requirement("R5h")
@pytest.mark.parametrize("stated", [None, False, True])
async def test_deterministic_only_when_the_publisher_says_so(stated: bool | None) -> None:
    options = {} if stated is None else {"deterministic": stated}
    publication = Publisher(MODEL, SCOPE_KEY).publish(TOKENS, **options)
    await put_layers(publication.segment, CACHE)
    for item in track_of(publication).objects(Location(0, 0), Location(99, 0)):
        assert json.loads(b"".join(item.payload))["deterministic"] is (stated is True)


async def test_a_manifest_that_would_be_too_large_lists_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Publishing goes on without the digests of further layers (security 4.4), also for other segments."""
    monkeypatch.setattr("kvcs.publisher.MAX_LISTED", 2 * BLOCKS * 3)
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        with caplog.at_level(logging.WARNING, "kvcs.publisher"):
            await put_layers(publication.segment, CACHE)
        assert caplog.text.count("lists 18 Objects at most") == 1
        entry = manifests(publication)[-1].segments[0]
        assert entry.complete
        assert [len(groups) for groups in entry.object_digests.values()] == [3, 3]
        check_layers(await scene.receive(), CACHE)
        publication.add_segment(TOKENS)
        await put_layers(publication.segment, CACHE)
        assert manifests(publication)[-1].segments[1].object_digests == {}
        assert len(await scene.receive(TOKENS + TOKENS)) == 2 * LAYERS


# How it is asked for (kvcs 7.2)


def asked(tap: Wiretap, *, from_client: bool = True) -> list[Subscribe]:
    """The subscriptions to manifest tracks, in order."""
    requests = tap.requests(from_client=from_client)
    return [
        request
        for request in requests
        if isinstance(request, Subscribe) and request.track.name.startswith(b"manifest")
    ]


@pytest.mark.requirement("R7.2b", "R7.2c")
@pytest.mark.parametrize("publisher_dials", [False, True])
@pytest.mark.parametrize("versions", [1, 2])
async def test_manifest_cose_first_then_manifest(versions: int, publisher_dials: bool) -> None:
    """Both by Next Object with a fill of the current Group: the newest version comes, then later ones."""
    taps: list[Wiretap] = []
    async with stage(publisher_dials=publisher_dials, tap=lambda link: taps.append(Wiretap(link))) as scene:
        publication = scene.publisher().publish(TOKENS)
        if versions == 2:
            publication.add_segment(TOKENS)
        async with await scene.subscriber().receive(TOKENS) as reception:
            assert len(reception.manifest.segments) == versions
            publication.add_segment([1, 2])
            await asyncio.sleep(1)
            assert len(reception.manifest.segments) == versions + 1
    requests = asked(taps[0], from_client=not publisher_dials)
    assert [request.track.name for request in requests] == [b"manifest.cose", b"manifest"]
    for request in requests:
        assert request.track.namespace == publication.name.namespace
        assert request.parameters.location_filter == LocationFilter(FilterType.NEXT_OBJECT)
        assert request.parameters.fill is not None
        assert request.parameters.fill.location_filter == LocationFilter(FilterType.RELATIVE_START, 1)


@pytest.mark.requirement("R7.2b")
async def test_manifest_is_not_asked_for_when_authenticity_is_required() -> None:
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        scene.publisher().publish(TOKENS)
        with pytest.raises(NothingFound, match="a signed manifest is required, and the publication has none"):
            await scene.receive(require_signed=True)
    assert [request.track.name for request in asked(taps[0])] == [b"manifest.cose"]
    assert not any(isinstance(request, Fetch) for request in taps[0].requests(from_client=True))


@pytest.mark.requirement("R7.2b")
@pytest.mark.parametrize(
    "code",
    [code for code in RequestCode if code.name not in ("DOES_NOT_EXIST", "EXCESSIVE_LOAD", "REDIRECT")],
)
async def test_another_refusal_is_no_reason_to_ask_for_manifest(
    code: RequestCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = Publishing.subscribe

    async def refuse(self: Publishing, stream: Any, message: Subscribe, authority: Any) -> None:
        if message.track.name == b"manifest.cose":
            raise RequestRefused(code, "no")
        await serve(self, stream, message, authority)

    monkeypatch.setattr(Publishing, "subscribe", refuse)
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        scene.publisher().publish(TOKENS)
        with pytest.raises(NothingFound):
            await scene.receive(patience=3.0)
    assert {request.track.name for request in asked(taps[0])} == {b"manifest.cose"}


@pytest.mark.requirement("R7.2b")
@pytest.mark.parametrize("require_signed", [False, True])
async def test_manifest_is_not_asked_for_beside_manifest_cose(require_signed: bool) -> None:
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        publication = scene.publisher().publish(TOKENS)
        scene.tracks.add(Track(FullTrackName(publication.name.namespace, b"manifest.cose")))
        with pytest.raises(NothingFound, match=r"manifest\.cose"):
            await scene.receive(require_signed=require_signed)
    assert [request.track.name for request in asked(taps[0])] == [b"manifest.cose"]


async def test_a_publisher_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says when (moqt 4.2); within patience."""
    serve = Publishing.subscribe
    refusals = 0

    async def refuse(self: Publishing, stream: Any, message: Subscribe, authority: Any) -> None:
        nonlocal refusals
        if refusals < 7:
            refusals += 1
            raise RequestRefused(RequestCode.EXCESSIVE_LOAD, "not now")
        await serve(self, stream, message, authority)

    monkeypatch.setattr(Publishing, "subscribe", refuse)
    async with stage() as scene:
        await put_layers(scene.publisher().publish(TOKENS).segment, CACHE)
        check_layers(await scene.receive(patience=20.0), CACHE)
        assert refusals == 7
        assert 7 < now() < 8


# What a consumer makes of it


class Forgery:
    """A publication of which each version of the manifest can be said."""

    def __init__(self, scene: Stage, *, compat_id: bytes = MODEL.compat_id, anchor: bytes = KEYS[-1]) -> None:
        self.name = PublicationName.new(SCOPE_KEY.scope_id, compat_id, anchor)
        self.track = Track(FullTrackName(self.name.namespace, b"manifest"), priority=0)
        scene.tracks.add(self.track)
        scene.tracks.announce(self.name.namespace)
        self.tracks = {name: Track(FullTrackName(self.name.namespace, name.name)) for name in (K, V)}
        for track in self.tracks.values():
            scene.tracks.add(track)
        self.versions = 0

    def say(self, manifest: Manifest | bytes, *, group: int | None = None, object_id: int = 0) -> None:
        payload = manifest.to_json() if isinstance(manifest, Manifest) else manifest
        group = self.versions if group is None else group
        self.track.append(group, object_id, payload)
        self.track.end_group(group, object_id + 1)
        self.versions = group + 1


FIRST = Manifest(MODEL).with_segment(KEYS, [K, V])


@pytest.mark.requirement("R5f")
@pytest.mark.parametrize("changed", [{"model": "test/other"}, {"window": 4}, {"ext": {"a": 1}}])
async def test_a_manifest_of_another_model_discards_the_publication(changed: dict[str, Any]) -> None:
    """Its Compatibility ID is computed, and is not that of the namespace, though all else fits."""
    other = descriptor(**changed)
    async with stage() as scene:
        forged = Forgery(scene)
        forged.say(Manifest(other).with_segment(KEYS, [K, V]))
        with pytest.raises(NothingFound, match=f"its Compatibility ID is {other.compat_id.hex()}"):
            await scene.receive()
        good = scene.publisher().publish(TOKENS)
        await put_layers(good.segment, CACHE)
        async with await scene.subscriber().receive(TOKENS) as reception:
            assert reception.publication == good.name
            check_layers(await collect(reception), CACHE)


@pytest.mark.requirement("R5f")
async def test_a_later_version_of_another_model() -> None:
    """What it brings after that is not used."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE, last=1)
        async with await scene.subscriber().receive(TOKENS) as reception:
            check_layer(await anext(reception), CACHE)
            publication.manifest = Manifest(descriptor(model="test/other")).with_segment(KEYS, [K, V])
            publication._publish_manifest()
            await asyncio.sleep(1)
            check_layer(await anext(reception), CACHE)  # It was here, and verified.
            with pytest.raises(CacheIncomplete, match="Compatibility ID"):
                await anext(reception)
            assert {pair.layer for pair in reception.missing} == {2, 3}


@pytest.mark.requirement("R5g")
async def test_segments_that_our_tokens_do_not_confirm() -> None:
    """Segment 0: the publication is not used. A later one: it is not received, nor what follows."""
    async with stage() as scene:
        wrong = FIRST.segments[0]
        forged = Forgery(scene)
        forged.say(replace(FIRST, segments=(replace(wrong, block_keys_sha256=bytes(32)),)))
        with pytest.raises(NothingFound, match="none is confirmed by the Block Keys of our tokens"):
            await scene.receive()
        publication = scene.publisher().publish(TOKENS)
        publication.add_segment([1, 2, 3, 4])
        publication.add_segment([5, 6])
        for segment in publication.segments:
            await put_layers(segment, make_cache(MODEL, segment.tokens, seed=segment.number))
        for tokens, segments in (
            ([*TOKENS, 1, 2, 3, 4, 5, 6], {0, 1, 2}),
            ([*TOKENS, 1, 2, 3, 4, 5, 7], {0, 1}),
            ([*TOKENS, 1, 2, 3, 9, 5, 6], {0}),
            ([*TOKENS, 1, 2], {0}),
            ([*TOKENS, 1, 2, 3, 4], {0, 1}),
            (TOKENS, {0}),
        ):
            subscriber = scene.subscriber()
            async with await subscriber.receive(tokens, publications=[publication.name]) as reception:
                assert {layer.segment async for layer in reception} == segments
                assert reception.blocks == {1: 3, 2: 5, 3: 6}[len(segments)]
                assert not reception.missing


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "manifest"),
        (b"{}", "no member"),
        (b"\xff\xfe", "manifest"),
        (b"[" * 100_000, "manifest"),
        (FIRST.to_json()[:-1], "manifest"),
        (FIRST.to_json().replace(b'"kvcs":1', b'"kvcs":2'), "kvcs"),
        (FIRST.to_json().replace(b"k.raw.s0", b"k.raw.s00"), "track name"),
        (FIRST.to_json() + b" " * MAX_MANIFEST_SIZE, f"at most {MAX_MANIFEST_SIZE} are allowed"),
    ],
)
async def test_a_manifest_that_cannot_be_read(payload: bytes, message: str) -> None:
    async with stage() as scene:
        Forgery(scene).say(payload)
        with pytest.raises(NothingFound, match=message):
            await scene.receive()


async def test_a_manifest_of_several_megabytes() -> None:
    """It is parsed off the event loop, and used."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        publication.manifest = replace(publication.manifest, unknown={"padding": "x" * 3_000_000})
        await put_layers(publication.segment, CACHE)
        async with await scene.subscriber().receive(TOKENS) as reception:
            check_layers(await collect(reception), CACHE)
            assert len(str(reception.manifest.unknown["padding"])) == 3_000_000


async def test_a_version_that_is_not_object_0() -> None:
    async with stage() as scene:
        Forgery(scene).say(FIRST, object_id=1)
        with pytest.raises(NothingFound, match="a version is Object 0 of its Group"):
            await scene.receive()


async def test_versions_that_come_in_another_order() -> None:
    """One that was overtaken by a newer one is ignored, whatever it says (security 6 #8)."""
    async with stage() as scene:
        forged = Forgery(scene)
        forged.say(FIRST, group=3)
        async with await scene.subscriber().receive(TOKENS) as reception:
            newer = FIRST.with_group(K, [bytes(32)] * BLOCKS)
            forged.say(newer, group=5)
            await asyncio.sleep(1)
            assert reception.manifest == newer
            forged.track.append(4, 0, b"nonsense")
            await asyncio.sleep(1)
            assert reception.manifest == newer


SHRUNK = [
    (FIRST, "digests"),
    (FIRST.with_group(K, [bytes(32)] * BLOCKS).with_group(V, [b"x" * 32] * BLOCKS), "digests"),
    (replace(FIRST, deterministic=True), "deterministic"),
    (Manifest(MODEL).with_segment(KEYS[:2], [K, V]), "blocks"),
    (Manifest(MODEL), "segments"),
    (Manifest(MODEL).with_segment(KEYS, [K]), "tracks"),
]


@pytest.mark.parametrize(("then", "what"), SHRUNK)
async def test_a_version_that_takes_something_back(then: Manifest, what: str) -> None:
    """The publication contradicts itself: nothing more of it is used (security 6 #8)."""
    async with stage() as scene:
        forged = Forgery(scene)
        now_said = FIRST
        for _ in range(2):
            for name in (K, V):
                now_said = now_said.with_group(name, [bytes([name.component]) * 32] * BLOCKS)
        forged.say(now_said)
        async with await scene.subscriber().receive(TOKENS) as reception:
            forged.say(then)
            with pytest.raises(CacheIncomplete, match=what):
                await anext(reception)
            assert len(reception.missing) == LAYERS * BLOCKS
            assert now() < 1


async def test_a_digest_that_is_listed_later_and_differs() -> None:
    """The Object is dropped, fetched again, and taken for missing if it stays what it is (kvcs 5)."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE[:1] + [(k, v) for k, v in CACHE[1:]], last=0)
        # Layer 1 is half there when the manifest lists something else for one of its Objects.
        track = publication.segment.tracks[V]
        donor = Publisher(MODEL, SCOPE_KEY).publish(TOKENS)
        await put_layers(donor.segment, CACHE)
        async with await scene.subscriber(patience=60.0).receive(TOKENS) as reception:
            check_layer(await anext(reception), CACHE)
            for block in range(2):
                item = donor.segment.tracks[V].get(Location(1, block))
                assert item is not None
                track.append(1, block, item.payload, priority=item.priority)
            await asyncio.sleep(1)
            assert reception.received == (2 * BLOCKS + 2) * 84
            manifest = publication.manifest
            digests = [donor.manifest.segments[0].listed_digest(V, 1, block) for block in range(BLOCKS)]
            assert None not in digests
            digests[1] = b"?" * 32
            publication.manifest = manifest.with_group(V, [digest or b"" for digest in digests])
            publication._publish_manifest()
            with pytest.raises(CacheIncomplete, match="Data Digest listed in the manifest"):
                await anext(reception)
            assert reception.rejected == 3
            assert {(pair.layer, pair.block) for pair in reception.missing} == {
                (layer, block) for layer in (1, 2, 3) for block in range(BLOCKS)
            }
            assert now() < 3


@pytest.mark.parametrize("partial", [False, True])
async def test_digests_that_contradict_what_was_handed_out(partial: bool) -> None:
    """Then the caller must know, in any case."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        publication.layer_done = lambda segment, digests: None  # type: ignore[method-assign]  # we say it
        await put_layers(publication.segment, CACHE, last=1)
        async with await scene.subscriber(patience=60.0).receive(TOKENS) as reception:
            reception.partial = partial
            check_layer(await anext(reception), CACHE)
            publication.manifest = publication.manifest.with_group(K, [b"?" * 32] * BLOCKS)
            publication._publish_manifest()
            await asyncio.sleep(1)
            with pytest.raises(CacheIncomplete, match=r"k\.raw\.s0: layer 0 came with other digests"):
                await collect(reception)


async def test_a_later_segment_without_a_usable_codec() -> None:
    """What comes before it is received, and that is the end."""
    async with stage() as scene:
        publisher = scene.publisher()
        publication = publisher.publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        publisher.encodings = scene.publisher(codecs=["x-shuffle-zlib"]).encodings
        publication.add_segment([1, 2])
        async with await scene.subscriber(codecs=["raw"]).receive([*TOKENS, 1, 2]) as reception:
            check_layers(await collect(reception), CACHE)
            assert reception.blocks == BLOCKS


def grow(publication: Publication, keys: list[bytes]) -> None:
    """Publish a version in which segment 1 has all blocks of `keys` that segment 0 has not."""
    first, second = publication.manifest.segments
    manifest = replace(publication.manifest, segments=(first,))
    publication.manifest = manifest.with_segment(keys[first.blocks :], second.tracks)
    publication._publish_manifest()


async def test_a_segment_that_grows_before_anything_of_it_is_listed() -> None:
    """As a manifest may say it: its retrieval begins anew."""
    tokens = [*TOKENS, 1, 2, 3, 4]
    cache = make_cache(MODEL, 4)
    keys = block_keys(SCOPE_KEY, MODEL, tokens)
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        publication.add_segment([1, 2])
        task = asyncio.create_task(scene.receive(tokens))
        await asyncio.sleep(1)
        # As if the publisher had always meant the segment to have two blocks.
        grow(publication, keys)
        segment = publication.segment
        segment.blocks, segment.tokens = 2, 4
        await asyncio.sleep(1)
        await put_layers(segment, cache)
        layers = await task
        assert [(layer.segment, layer.layer) for layer in layers] == [
            (number, layer) for number in range(2) for layer in range(LAYERS)
        ]
        for layer in layers[LAYERS:]:
            assert layer.k.tobytes() == cache[layer.layer][0].tobytes()
            assert layer.first_block == 3


async def test_a_segment_that_grows_beyond_our_tokens() -> None:
    """It is not confirmed any more, so it is not received, and that is the end."""
    tokens = [*TOKENS, 1, 2]
    keys = block_keys(SCOPE_KEY, MODEL, [*tokens, 3, 4])
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        publication.add_segment([1, 2])
        async with await scene.subscriber().receive(tokens) as reception:
            assert reception.blocks == 4
            for _ in range(LAYERS):
                layer = await anext(reception)
                check_layer(layer, CACHE)
            names = publication.manifest.segments[1].tracks
            first = publication.manifest.segments[0]
            publication.manifest = replace(publication.manifest, segments=(first,)).with_segment(
                keys[3:], names
            )
            publication._publish_manifest()
            assert await collect(reception) == []
            assert reception.blocks == 3
            assert not reception.missing
