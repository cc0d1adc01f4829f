"""Retrieval of a complete segment: ranges of layers, the first blocks, layer by layer (kvcs 7.3)."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from moqt.filters import FilterType, GroupOrder, LocationFilter, RangeFilter, RangeKind
from moqt.limits import Limits
from moqt.wire import Fetch, Subscribe
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    TOKENS,
    Wiretap,
    check_layer,
    collect,
    descriptor,
    make_cache,
    now,
    put_layers,
    stage,
)

pytestmark = pytest.mark.virtual

LAYERS, BLOCKS = MODEL.layers, 3
NO_FILTERS = Limits(max_filter_ranges=0)


@pytest.mark.requirement("R7.3a")
@pytest.mark.parametrize("publisher_dials", [False, True])
@pytest.mark.parametrize(("first", "last"), [(a, b) for a in range(LAYERS) for b in range(a, LAYERS)])
async def test_a_range_of_layers_comes_by_one_fetch_for_each_track(
    first: int, last: int, publisher_dials: bool
) -> None:
    taps: list[Wiretap] = []
    async with stage(publisher_dials=publisher_dials, tap=lambda link: taps.append(Wiretap(link))) as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        layers = await scene.receive(layers=(first, last))
    assert [layer.layer for layer in layers] == list(range(first, last + 1))
    for layer in layers:
        check_layer(layer, CACHE)
    requests = taps[0].requests(from_client=not publisher_dials)
    fetches = [request for request in requests if isinstance(request, Fetch)]
    assert [request.track.name for request in fetches] == [b"k.raw.s0", b"v.raw.s0"]
    for request in fetches:
        assert request.track.namespace == publication.name.namespace
        location = request.parameters.location_filter
        assert location == LocationFilter(FilterType.ABSOLUTE_START_GROUP_END, first, 0, last - first)
        assert request.parameters.group_order is GroupOrder.ASCENDING
        assert request.parameters.range_filters == ()
    # Nothing but the manifest is subscribed to, and no layer beyond the range goes over the wire.
    names = {request.track.name for request in requests if isinstance(request, Subscribe)}
    assert names == {b"manifest.cose", b"manifest"}
    sent = taps[0].data_objects(from_client=publisher_dials)
    assert set(sent) == set(itertools.product("kv", range(first, last + 1), range(BLOCKS)))
    assert set(sent.values()) == {1}


@pytest.mark.requirement("R7.3b")
@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("layers", [(0, LAYERS - 1), (1, 2)])
async def test_the_first_blocks(layers: tuple[int, int], blocks: int, filters: bool) -> None:
    """By OBJECTID_FILTER where the peer takes filters; else all is sent, and the rest discarded."""
    taps: list[Wiretap] = []
    async with stage(
        limits=None if filters else NO_FILTERS, tap=lambda link: taps.append(Wiretap(link))
    ) as scene:
        await put_layers(scene.publisher().publish(TOKENS).segment, CACHE)
        got = await scene.receive(blocks=blocks, layers=layers)
    assert [layer.layer for layer in got] == list(range(layers[0], layers[1] + 1))
    for layer in got:
        check_layer(layer, CACHE, blocks=(0, blocks))
    fetches = [request for request in taps[0].requests(from_client=True) if isinstance(request, Fetch)]
    assert len(fetches) == 2
    only = RangeFilter(RangeKind.OBJECTID, ((0, blocks - 1),))
    for request in fetches:
        assert request.parameters.range_filters == ((only,) if filters else ())
        assert request.parameters.location_filter == LocationFilter.groups(*layers)
    sent = taps[0].data_objects(from_client=False)
    assert {block for _, _, block in sent} == set(range(blocks if filters else BLOCKS))
    assert set(sent.values()) == {1}


async def test_more_blocks_than_there_are() -> None:
    """All blocks: no filter is needed."""
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        await put_layers(scene.publisher().publish(TOKENS).segment, CACHE)
        async with await scene.subscriber().receive(TOKENS, blocks=1000) as reception:
            assert reception.blocks == BLOCKS
            layers = await collect(reception)
    assert len(layers) == LAYERS
    for request in taps[0].requests(from_client=True):
        if isinstance(request, Fetch):
            assert request.parameters.range_filters == ()


@pytest.mark.requirement("R7.3a")
@pytest.mark.parametrize("codecs", [{"codecs": ["raw"]}, {"codecs": [], "joint_codecs": ["raw"]}])
async def test_layers_are_usable_one_by_one(codecs: dict[str, list[str]]) -> None:
    """On a slow link each layer is there long before the last, and layer 0 before much else is sent."""
    model = descriptor(layers=16, kv_heads=8, head_dim=64, block_tokens=16)
    tokens = list(range(64))
    cache = make_cache(model, len(tokens))
    times = []
    async with stage(latency=0.05, window=16 * 1024, chunk=1200) as scene:
        await put_layers(scene.publisher(model, **codecs).publish(tokens).segment, cache)
        began = now()
        async with await scene.subscriber(model).receive(tokens) as reception:
            async for layer in reception:
                check_layer(layer, cache, model)
                times.append(now() - began)
                if layer.layer == 0:
                    assert reception.received < 4 * cache[0][0].nbytes * 2
    assert len(times) == 16
    assert times == sorted(times)
    # As good as evenly spaced: no layer waits for a later one.
    steps = [after - before for before, after in itertools.pairwise(times)]
    assert max(steps) < 2 * (times[-1] - times[0]) / 15
    assert times[0] < times[-1] / 5


@pytest.mark.requirement("R7.4a")
@pytest.mark.parametrize("slow", ["k", "v"])
async def test_a_layer_waits_for_all_its_tracks(slow: str) -> None:
    """One of the tracks is held up: no layer is handed out from the other alone."""
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        publication = scene.publisher().publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        held = asyncio.Event()
        fetch = scene.here.fetch

        async def hold(track, **options):  # type: ignore[no-untyped-def]  # as the session's
            if track.name.startswith(slow.encode()):
                await held.wait()
            return await fetch(track, **options)

        scene.here.fetch = hold  # type: ignore[method-assign]  # the test takes its place
        async with await scene.subscriber().receive(TOKENS) as reception:
            waiter = asyncio.create_task(anext(reception))
            await asyncio.sleep(3)
            assert not waiter.done()
            half = reception.received
            assert half == LAYERS * BLOCKS * (68 + 16)
            assert len(reception.missing) == LAYERS * BLOCKS
            held.set()
            check_layer(await waiter, CACHE)
            assert len(await collect(reception)) == LAYERS - 1
            assert reception.received == 2 * half


async def test_wrong_ranges_are_the_callers_fault() -> None:
    async with stage() as scene:
        subscriber = scene.subscriber()
        for layers in ((0, LAYERS), (-1, 0), (2, 1)):
            with pytest.raises(ValueError, match=r"layers -?\d+-\d+ do not lie within 0-3"):
                await subscriber.receive(TOKENS, layers=layers)
        for blocks in (0, -1):
            with pytest.raises(ValueError, match="number of blocks"):
                await subscriber.receive(TOKENS, blocks=blocks)
        with pytest.raises(ValueError, match="expected codecs"):
            scene.subscriber(codecs=["raw", "x-none"])
        with pytest.raises(ValueError, match="none at all"):
            scene.subscriber(codecs=[])
