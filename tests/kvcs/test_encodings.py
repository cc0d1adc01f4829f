"""One segment in several encodings: pairs and kv tracks, codecs, attention without V (kvcs 3.2, 4)."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from kvcs.codecs import CODECS
from kvcs.errors import InvalidTensor, InvalidValue
from kvcs.identity import layer_digest
from kvcs.payload import HEADER_SIZE, data_digest
from kvcs.publisher import Publisher
from kvcs.subscriber import NothingFound
from moqt.tracks import Tracks
from moqt.wire import (
    Fetch,
    Subscribe,
)
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    SCOPE_KEY,
    TOKENS,
    Wiretap,
    check_layers,
    descriptor,
    make_cache,
    payload,
    put_layers,
    stage,
    stored,
)

pytestmark = pytest.mark.virtual

LAYERS, BLOCKS = MODEL.layers, 3


def publisher(**options: Any) -> Publisher:
    return Publisher(MODEL, SCOPE_KEY, **options)


async def test_several_encodings_of_one_segment() -> None:
    """The manifest lists them in the order in which the publisher was told of them."""
    async with stage() as scene:
        maker = scene.publisher(codecs=["raw", "x-shuffle-zlib"], joint_codecs=["raw", "x-shuffle-zlib"])
        publication = maker.publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        assert [str(track) for track in publication.manifest.segments[0].tracks] == [
            "k.raw.s0",
            "v.raw.s0",
            "k.x-shuffle-zlib.s0",
            "v.x-shuffle-zlib.s0",
            "kv.raw.s0",
            "kv.x-shuffle-zlib.s0",
        ]


RAW, ZIP = "raw", "x-shuffle-zlib"


@pytest.mark.requirement("R3.2b")
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("codecs", "joint", "wanted", "taken"),
    [
        ([RAW, ZIP], [RAW, ZIP], [RAW, ZIP], {"k.raw.s0", "v.raw.s0"}),
        ([RAW, ZIP], [RAW, ZIP], [ZIP, RAW], {"k.x-shuffle-zlib.s0", "v.x-shuffle-zlib.s0"}),
        ([RAW, ZIP], [], [ZIP], {"k.x-shuffle-zlib.s0", "v.x-shuffle-zlib.s0"}),
        ([], [RAW], [RAW], {"kv.raw.s0"}),
        ([], [ZIP], [RAW, ZIP], {"kv.x-shuffle-zlib.s0"}),
        ([ZIP], [RAW], [RAW, ZIP], {"kv.raw.s0"}),
        ([ZIP], [RAW], [ZIP, RAW], {"k.x-shuffle-zlib.s0", "v.x-shuffle-zlib.s0"}),
    ],
)
async def test_what_a_consumer_takes(
    codecs: list[str], joint: list[str], wanted: list[str], taken: set[str], live: bool
) -> None:
    """The pair of the codec that it prefers, or the kv track where there is no pair; nothing else is sent."""
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        publication = scene.publisher(codecs=codecs, joint_codecs=joint).publish(TOKENS)
        if not live:
            await put_layers(publication.segment, CACHE)
        task = asyncio.create_task(scene.receive(codecs=wanted))
        await asyncio.sleep(1)
        if live:
            await put_layers(publication.segment, CACHE)
        check_layers(await task, CACHE)
    requests = taps[0].requests(from_client=True)
    asked = {request.track.name for request in requests if isinstance(request, Subscribe | Fetch)}
    assert asked - {b"manifest.cose", b"manifest"} == {name.encode() for name in taken}


@pytest.mark.requirement("R4e")
async def test_digests_of_the_pair_and_of_kv_agree() -> None:
    """SHA-256 over the K Data and the V Data is the digest of the kv Data and the KVSP layer digest."""
    publication = publisher(joint_codecs=["raw"]).publish(TOKENS)
    await put_layers(publication.segment, CACHE)
    k, v, kv = (stored(publication, f"{component}.raw.s0") for component in ("k", "v", "kv"))
    assert len(k) == len(v) == len(kv) == LAYERS * BLOCKS
    for location in kv:
        parts = payload(k[location])[HEADER_SIZE:], payload(v[location])[HEADER_SIZE:]
        digest = hashlib.sha256(b"".join(parts)).digest()
        assert payload(kv[location])[HEADER_SIZE:] == b"".join(parts)
        assert data_digest(payload(kv[location])) == digest == layer_digest(*parts)
        block = slice(2 * location[1], 2 * location[1] + 2)
        tensors = CACHE[location[0]]
        assert digest == layer_digest(tensors[0][block].tobytes(), tensors[1][block].tobytes())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codecs": ["raw", "x-none"]}, "no codec x-none here; there are raw, x-shuffle-zlib"),
        ({"joint_codecs": ["zip"]}, "no codec zip"),
        ({"codecs": []}, "at least one codec"),
        ({"codecs": ["raw", "raw"]}, "named twice"),
        ({"joint_codecs": ["raw", "raw"]}, "named twice"),
    ],
)
def test_codecs_that_cannot_be(options: dict[str, Any], message: str) -> None:
    tracks = Tracks()
    with pytest.raises(InvalidValue, match=message):
        publisher(tracks=tracks, **options)
    assert not list(tracks)
    assert not tracks.namespaces


MLA = descriptor(attention="mla", kv_heads=1, head_dim=6)


async def test_mla_has_no_v() -> None:
    """K and V share one latent tensor: only kv tracks, and `v` is None on both sides."""
    cache = make_cache(MLA, len(TOKENS))
    with pytest.raises(InvalidValue, match="offer joint codecs only"):
        Publisher(MLA, SCOPE_KEY)
    for codec in CODECS:
        async with stage() as scene:
            segment = scene.publisher(MLA, codecs=[], joint_codecs=[codec]).publish(TOKENS).segment
            await segment.put_layer(0, cache[0][0], None)
            with pytest.raises(InvalidTensor):
                await segment.put_layer(1, cache[1][0], cache[1][0])
            await put_layers(segment, cache, first=1)
            layers = await scene.receive(model=MLA)
            check_layers(layers, cache, MLA)
            assert all(layer.v is None for layer in layers)


async def test_a_pair_of_tracks_is_of_no_use_with_mla() -> None:
    """A publisher that offers one all the same is not taken, and the reception does not break."""
    async with stage() as scene:
        maker = scene.publisher(MLA, codecs=[], joint_codecs=["raw"])
        maker.encodings = scene.publisher().encodings
        maker.publish(TOKENS)
        with pytest.raises(NothingFound, match=r"no usable codec: k\.raw\.s0, v\.raw\.s0"):
            await scene.receive(model=MLA)


async def test_v_has_another_head_dim() -> None:
    model = descriptor(v_head_dim=5, dtype="float32")
    cache = make_cache(model, len(TOKENS))
    async with stage() as scene:
        await put_layers(scene.publisher(model, joint_codecs=["raw"]).publish(TOKENS).segment, cache)
        check_layers(await scene.receive(model=model), cache, model)
