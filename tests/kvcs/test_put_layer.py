"""What `put_layer` takes, and what happens when it is called at the same time as other things."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvcs.assembly import Layer
from kvcs.errors import InvalidTensor, InvalidValue
from kvcs.layout import Order, arrange
from kvcs.publisher import Publisher
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    SCOPE_KEY,
    TOKENS,
    check_layer,
    check_layers,
    make_cache,
    now,
    put_layers,
    stage,
    stored,
)

pytestmark = pytest.mark.virtual

LAYERS, BLOCKS = MODEL.layers, 3


def publisher(**options: Any) -> Publisher:
    return Publisher(MODEL, SCOPE_KEY, **options)


@pytest.mark.parametrize("order", list(Order))
async def test_orders_of_axes(order: Order) -> None:
    async with stage() as scene:
        segment = scene.publisher().publish(TOKENS).segment
        for layer, (k, v) in enumerate(CACHE):
            arranged = [np.ascontiguousarray(arrange(tensor, order)) for tensor in (k, v)]
            await segment.put_layer(layer, *arranged, order=order)
        check_layers(await scene.receive(), CACHE)


async def test_tensors_are_not_copied() -> None:
    """Those that are contiguous in the order of sections."""
    segment = publisher().publish(TOKENS).segment
    await segment.put_layer(0, *CACHE[0])
    item = stored(segment.publication, "k.raw.s0")[0, 1]
    view = np.frombuffer(item.payload[1], np.uint8)
    assert np.shares_memory(view, CACHE[0][0])


@pytest.mark.parametrize(
    ("k", "v", "error", "message"),
    [
        (CACHE[0][0][:4], CACHE[0][1], InvalidValue, "takes arrays of 6 tokens, k has 4"),
        (CACHE[0][0], CACHE[0][1][:5], InvalidValue, "takes arrays of 6 tokens, v has 5"),
        (CACHE[0][0].astype(np.float32), CACHE[0][1], InvalidTensor, "float32"),
        (CACHE[0][0].transpose(1, 0, 2), CACHE[0][1], InvalidTensor, r"expected \[tokens, 2, 2\]"),
        (CACHE[0][0], None, InvalidValue, 'v may be None only with attention "mla"'),
    ],
)
async def test_tensors_that_do_not_fit(k: Any, v: Any, error: type[Exception], message: str) -> None:
    """Nothing is published of them, and the right ones can follow."""
    segment = publisher().publish(TOKENS).segment
    with pytest.raises(error, match=message):
        await segment.put_layer(0, k, v)
    assert segment.next_layer == 0
    assert not stored(segment.publication, "k.raw.s0")
    await put_layers(segment, CACHE)
    assert segment.complete


@pytest.mark.parametrize("number", [6, 7])
async def test_tokens_that_fill_no_block_are_told(number: int) -> None:
    """kvcs 14 #12: they are not sent; the arrays hold them all the same."""
    tokens = list(range(100, 100 + number))
    cache = make_cache(MODEL, number)
    async with stage() as scene:
        segment = scene.publisher().publish(tokens).segment
        assert (segment.blocks, segment.tokens, segment.tail) == (3, number, number - 6)
        await put_layers(segment, cache)
        for layer in await scene.receive(tokens):
            check_layer(layer, cache, blocks=(0, 3))


# Several things at once


async def test_arrays_may_lack_the_tail() -> None:
    segment = publisher().publish([*TOKENS, 99]).segment
    assert (segment.tokens, segment.tail) == (7, 1)
    longer = [np.concatenate((tensor, tensor[:1])) for tensor in CACHE[0]]
    await segment.put_layer(0, *longer)
    await segment.put_layer(1, *CACHE[0])
    objects = stored(segment.publication, "k.raw.s0")
    for block in range(BLOCKS):
        assert bytes(objects[0, block].payload[1]) == bytes(objects[1, block].payload[1])
    for wrong in (CACHE[0][0][:5], np.concatenate((longer[0], longer[0][:1]))):
        with pytest.raises(InvalidValue, match="takes arrays of 7 tokens, or 6 without the tail, k has"):
            await segment.put_layer(2, wrong, CACHE[0][1])


async def test_layers_put_at_once_are_published_in_turn() -> None:
    """Tasks that are made in order; also for two segments, side by side."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        first = publication.segment
        second = publication.add_segment(TOKENS)
        puts = [
            segment.put_layer(layer, *CACHE[layer]) for layer in range(LAYERS) for segment in (first, second)
        ]
        await asyncio.gather(*puts)
        layers = await scene.receive(TOKENS + TOKENS)
        assert len(layers) == 2 * LAYERS
        for layer in layers:
            assert layer.k.tobytes() == CACHE[layer.layer][0].tobytes()


async def test_one_layer_put_twice_at_once() -> None:
    segment = publisher().publish(TOKENS).segment
    results = await asyncio.gather(
        *(segment.put_layer(0, *CACHE[0]) for _ in range(3)), return_exceptions=True
    )
    assert results[0] is None
    assert all(isinstance(result, InvalidValue) for result in results[1:])
    assert segment.next_layer == 1


async def test_a_publication_closed_while_a_layer_is_put() -> None:
    """What was under way is not published; the error says why."""
    async with stage() as scene:
        publication = scene.publisher().publish(TOKENS)
        task = asyncio.create_task(publication.segment.put_layer(0, *CACHE[0]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        publication.close()
        with pytest.raises(InvalidValue, match="this publication was closed"):
            await task
        assert not stored(publication, "k.raw.s0")


async def test_a_cancelled_put_publishes_nothing_and_can_be_repeated() -> None:
    async with stage() as scene:
        segment = scene.publisher().publish(TOKENS).segment
        for turns in range(4):
            task = asyncio.create_task(segment.put_layer(0, *CACHE[0]))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                break
            assert segment.next_layer == 0
            assert not stored(segment.publication, "k.raw.s0")
        await put_layers(segment, CACHE, first=segment.next_layer)
        check_layers(await scene.receive(), CACHE)


async def test_many_publications_of_many_prompts() -> None:
    """They do not get in each other's way."""
    async with stage() as scene:
        maker = scene.publisher()
        caches = {number: make_cache(MODEL, 4, seed=number) for number in range(10)}
        for number, cache in caches.items():
            await put_layers(maker.publish([number] * 4).segment, cache)

        async def receive(number: int) -> list[Layer]:
            return await scene.receive([number] * 4)

        began = now()
        for number, layers in enumerate(await asyncio.gather(*map(receive, caches))):
            check_layers(layers, caches[number])
        assert now() < began + 1
