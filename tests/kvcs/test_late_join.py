"""A subscriber that joins a live publication at any moment gets every Object exactly once (kvcs 7.2)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.assembly import Layer
from kvcs.publisher import Segment
from moqt.filters import GroupOrder, Location, LocationFilter
from moqt.quic.virtual import run_virtual
from moqt.wire import Subscribe
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    TOKENS,
    Stage,
    Wiretap,
    check_layers,
    now,
    put_layers,
    put_one_by_one,
    stage,
)

LAYERS, BLOCKS = MODEL.layers, len(TOKENS) // MODEL.block_tokens
ONCE = Counter(
    (component, layer, block) for component in "kv" for layer in range(LAYERS) for block in range(BLOCKS)
)
STEPS = LAYERS * (2 * BLOCKS + 2 + 1) + 2
"""Objects of two tracks, End of Group of both, and the manifest's turn; and End of Track of both."""


async def receive(scene: Stage, layers: list[Layer]) -> None:
    """Receive all, into `layers`, without a single repair."""
    async with await scene.subscriber().receive(TOKENS) as reception:
        async for layer in reception:
            layers.append(layer)
        assert (reception.missing, reception.rejected, reception.reason) == ([], 0, "")


def whole_layers(segment: Segment) -> list[int]:
    """The layers of which every Object is published in every track."""
    return [
        layer
        for layer in range(LAYERS)
        if all(
            len(list(track.objects(Location(layer, 0), Location(layer, 1000)))) == BLOCKS
            for track in segment.tracks.values()
        )
    ]


@pytest.mark.requirement("R7.2a", "R7.4a")
@pytest.mark.parametrize("publisher_dials", [False, True])
@pytest.mark.parametrize("join", range(STEPS + 1))
@pytest.mark.virtual
async def test_join_at_every_boundary(join: int, publisher_dials: bool) -> None:
    """The subscription begins after `join` steps of the production; after each further one, the layers that
    were handed out are those that are whole.
    """
    taps: list[Wiretap] = []
    layers: list[Layer] = []
    async with stage(publisher_dials=publisher_dials, tap=lambda link: taps.append(Wiretap(link))) as scene:
        segment = scene.publisher().publish(TOKENS).segment
        production = put_one_by_one(segment, CACHE)
        for _ in range(join):
            next(production)
        task = asyncio.create_task(receive(scene, layers))
        steps = join
        while True:
            await asyncio.sleep(0.4)
            assert [layer.layer for layer in layers] == whole_layers(segment)
            if next(production, None) is None:
                break
            steps += 1
        await task
    assert steps == STEPS
    check_layers(layers, CACHE)
    assert taps[0].data_objects(from_client=publisher_dials) == ONCE
    if join < STEPS:  # Else the segment was complete, and is fetched.
        requests = taps[0].requests(from_client=not publisher_dials)
        subscriptions = [one for one in requests if isinstance(one, Subscribe) and b".s0" in one.track.name]
        assert {one.track.name for one in subscriptions} == {b"k.raw.s0", b"v.raw.s0"}
        for one in subscriptions:
            fill = one.parameters.fill
            assert fill is not None
            assert one.parameters.location_filter == LocationFilter.next_object()
            assert fill.location_filter == LocationFilter.absolute_start(0, 0)
            assert fill.group_order is GroupOrder.ASCENDING


@pytest.mark.requirement("R7.2a")
@settings(max_examples=150, deadline=None)
@given(
    join=st.integers(0, STEPS),
    pauses=st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.011, 0.03]), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
    jitter=st.sampled_from([0.0, 0.005, 0.05]),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    ragged=st.booleans(),
    chunk=st.sampled_from([30, 100, 16384]),
    window=st.sampled_from([400, 256 * 1024]),
    publisher_dials=st.booleans(),
    codec=st.sampled_from(["raw", "x-shuffle-zlib"]),
    joint=st.booleans(),
)
def test_join_in_any_interleaving(
    join: int,
    pauses: list[float],
    seed: int,
    jitter: float,
    loss: float,
    ragged: bool,
    chunk: int,
    window: int,
    publisher_dials: bool,
    codec: str,
    joint: bool,
) -> None:
    """Objects are published while the subscriptions are under way, over networks that reorder and delay."""
    taps: list[Wiretap] = []
    layers: list[Layer] = []

    async def produce(production: Iterator[object]) -> None:
        for step, _ in enumerate(production):
            await asyncio.sleep(pauses[step % len(pauses)])

    async def main() -> None:
        async with stage(
            publisher_dials=publisher_dials,
            tap=lambda link: taps.append(Wiretap(link)),
            seed=seed,
            jitter=jitter,
            loss=loss,
            ragged=ragged,
            chunk=chunk,
            window=window,
        ) as scene:
            publisher = scene.publisher(codecs=() if joint else (codec,), joint_codecs=(codec,) * joint)
            production = put_one_by_one(publisher.publish(TOKENS).segment, CACHE)
            for _ in range(join if not joint else join // 2):
                next(production)
            async with asyncio.TaskGroup() as group:
                group.create_task(receive(scene, layers))
                group.create_task(produce(production))

    run_virtual(main())
    check_layers(layers, CACHE)
    expected = ONCE
    if joint:
        expected = Counter(("kv", layer, block) for layer in range(LAYERS) for block in range(BLOCKS))
    assert taps[0].data_objects(from_client=publisher_dials) == expected


@pytest.mark.requirement("R6e")
@pytest.mark.virtual
async def test_a_layer_leaves_before_the_next_is_computed() -> None:
    """Each layer takes a second to compute; it is in the consumer's hands before the next one begins."""
    came: list[tuple[int, float]] = []
    async with stage() as scene:
        segment = scene.publisher().publish(TOKENS).segment
        computed: list[float] = []

        async def produce() -> None:
            for layer in range(LAYERS):
                await asyncio.sleep(1.0)
                computed.append(now())
                await put_layers(segment, CACHE, first=layer, last=layer)

        task = asyncio.create_task(produce())
        async with await scene.subscriber().receive(TOKENS) as reception:
            async for layer in reception:
                came.append((layer.layer, now()))
                times = reception.times[0, layer.layer]
                assert times.usable is not None
                assert computed[layer.layer] < times.first_object <= times.usable <= now()
                assert len(computed) == layer.layer + 1
        await task
    assert [layer for layer, _ in came] == list(range(LAYERS))
    for (_, at), began in zip(came, computed, strict=True):
        assert at - began < 0.1


@pytest.mark.virtual
async def test_several_subscribers_at_different_moments() -> None:
    """Each gets everything, whatever the others do."""
    async with stage() as scene:
        segment = scene.publisher().publish(TOKENS).segment
        production = put_one_by_one(segment, CACHE)
        results: list[list[Layer]] = []
        tasks = []
        for step, _ in enumerate(production):
            if step % 5 == 0:
                results.append([])
                tasks.append(asyncio.create_task(receive(scene, results[-1])))
            await asyncio.sleep(0.03)
        await asyncio.gather(*tasks)
    assert len(results) == 8
    for layers in results:
        check_layers(layers, CACHE)
