"""KV caches through relays: live, joined late, and complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvcs.assembly import Layer
from kvcs.publisher import Publisher
from kvcs.subscriber import Subscriber
from moqt import Tracks
from tests.kvcs.stage import CACHE, MODEL, SCOPE_KEY, TOKENS, collect, put_layers
from tests.relay.network import Network, network

pytestmark = pytest.mark.virtual


@asynccontextmanager
async def production(**options: Any) -> AsyncIterator[tuple[Network, Publisher]]:
    """Relays, and a publisher of caches at the first of them."""
    async with network(**options) as net:
        tracks = Tracks()
        link, _ = await net.publish(tracks)
        net.links[0] = link
        yield net, Publisher(MODEL, SCOPE_KEY, tracks=tracks)


async def receive(net: Network, number: int = 0) -> list[Layer]:
    subscriber = Subscriber(net.sessions[number], MODEL, SCOPE_KEY)
    async with await subscriber.receive(TOKENS, wait=5.0) as reception:
        return await collect(reception)


def check(layers: list[Layer]) -> None:
    """All layers are there, bit for bit."""
    assert [layer.layer for layer in layers] == list(range(MODEL.layers))
    for layer, (k, v) in zip(layers, CACHE, strict=True):
        assert layer.v is not None
        assert layer.k.tobytes() == k.tobytes()
        assert layer.v.tobytes() == v.tobytes()


@pytest.mark.parametrize("relays", [1, 2])
async def test_live(relays: int) -> None:
    async with production(relays=relays) as (net, publisher):
        publication = publisher.publish(TOKENS)
        receiving = asyncio.ensure_future(receive(net))
        for layer in range(MODEL.layers):
            await asyncio.sleep(0.5)
            await put_layers(publication.segment, CACHE, first=layer, last=layer)
        check(await receiving)


@pytest.mark.parametrize("relays", [1, 2])
async def test_complete(relays: int) -> None:
    async with production(relays=relays, subscribers=2) as (net, publisher):
        publication = publisher.publish(TOKENS)
        await put_layers(publication.segment, CACHE)
        await asyncio.sleep(1)
        check(await receive(net))
        before = net.upstream_bytes
        check(await receive(net, 1))
        assert net.upstream_bytes - before < 1000  # All of it from the caches.


@pytest.mark.parametrize("relays", [1, 2])
async def test_a_publisher_that_reconnects_in_the_middle(relays: int) -> None:
    async with production(relays=relays) as (net, publisher):
        publication = publisher.publish(TOKENS)
        receiving = asyncio.ensure_future(receive(net))
        await asyncio.sleep(1)
        await put_layers(publication.segment, CACHE, last=1)
        net.links[0].cut()
        await asyncio.sleep(0.5)
        await put_layers(publication.segment, CACHE, first=2)
        await net.publish(publisher.tracks)
        check(await receiving)
