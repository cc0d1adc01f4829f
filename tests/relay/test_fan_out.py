"""One publisher, many subscribers: what goes up once, and who gets it when. In virtual time."""

from __future__ import annotations

import asyncio

import pytest

from moqt import DoneCode, FullTrackName, RequestCode, RequestRejected
from moqt.wire import Subscribe
from tests.kvcs.stage import Cache, check_layers, collect, descriptor, make_cache, now, put_layers
from tests.relay.caches import Tree, tree

pytestmark = pytest.mark.virtual

MODEL = descriptor(layers=16, kv_heads=8, head_dim=64, block_tokens=16)
TOKENS = list(range(64))
CACHE: Cache = make_cache(MODEL, len(TOKENS))
SIZE = sum(k.nbytes + v.nbytes for k, v in CACHE)
SLOW_LINK = {"latency": 0.02, "window": 16 * 1024}
"""Less than a layer is under way at a time, on each link."""


async def seconds(made: Tree, numbers: range) -> list[float]:
    """Have so many consumers receive the cache; how long each of them took."""
    began = now()

    async def consume(number: int) -> float:
        consumer = made.subscriber(number, MODEL)
        async with await consumer.receive(TOKENS, wait=5.0) as reception:
            check_layers(await collect(reception), CACHE, MODEL)
            assert (reception.missing, reception.rejected, reception.reason) == ([], 0, "")
        return now() - began

    return await asyncio.gather(*map(consume, numbers))


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("consumers", [1, 8, 32])
async def test_upstream_bytes_are_one_times(relays: int, consumers: int, live: bool) -> None:
    """Whether the cache is being produced or complete, and nobody has it: over each hop it goes once, and
    every consumer gets it.
    """
    async with tree(relays=relays, subscribers=consumers) as made:
        publication = made.publisher(MODEL).publish(TOKENS)
        if not live:
            await put_layers(publication.segment, CACHE)
        receiving = asyncio.create_task(seconds(made, range(consumers)))
        await asyncio.sleep(1 if live else 0)
        if live:
            await put_layers(publication.segment, CACHE)
        await receiving
        for links in made.hops:
            down = links[0].client if links is made.hops[0] else links[0].server
            assert SIZE < down.stats.sent < 1.1 * SIZE
        egress = sum(link.server.stats.sent for link in made.net.links[relays:])
        assert egress > consumers * SIZE


@pytest.mark.parametrize("relays", [1, 2])
async def test_that_a_track_does_not_exist_is_asked_once_for_all(relays: int) -> None:
    """As with "manifest.cose", which each consumer asks for first: the last answer does not wait for all
    others, one after the other.
    """
    async with tree(relays=relays, subscribers=32, latency=0.1) as made:
        name = FullTrackName((b"scene", b"one"), b"no")
        began = now()
        for times in (1, 2):
            answers = await asyncio.gather(
                *(session.subscribe(name) for session in made.net.sessions), return_exceptions=True
            )
            assert {type(answer) for answer in answers} == {RequestRejected}
            assert {getattr(answer, "code", None) for answer in answers} == {RequestCode.DOES_NOT_EXIST}
            for hop in range(relays):
                assert [one.track for one in made.asked(hop) if isinstance(one, Subscribe)] == [name] * times
        assert now() - began < 2 * (relays + 1) * 0.2 + 0.1


@pytest.mark.parametrize("live", [True, False])
async def test_eight_equal_consumers_end_together(live: bool) -> None:
    """On slow links the slowest of them takes at most 1.3 times as long as the fastest."""
    async with tree(relays=1, subscribers=8, seed=8, jitter=0.005, **SLOW_LINK) as made:
        publication = made.publisher(MODEL).publish(TOKENS)
        if not live:
            await put_layers(publication.segment, CACHE)
        receiving = asyncio.create_task(seconds(made, range(8)))
        if live:
            await put_layers(publication.segment, CACHE)
        took = await receiving
        assert max(took) <= 1.3 * min(took)
        assert min(took) > SIZE / (16 * 1024) * 0.02 / 2  # Links have made them wait.


@pytest.mark.parametrize("live", [True, False])
async def test_a_stopped_reader_changes_nothing_for_the_others(live: bool) -> None:
    """One of nine takes nothing any more, in the middle of it: the other eight take as long as without it,
    but for a tenth, by which the order of requests on the wire changes it.
    """
    took: dict[bool, list[float]] = {}
    for stopped in (False, True):
        async with tree(relays=1, subscribers=9, **SLOW_LINK) as made:
            publication = made.publisher(MODEL).publish(TOKENS)
            if not live:
                await put_layers(publication.segment, CACHE)
            ninth = asyncio.create_task(seconds(made, range(8, 9)))
            receiving = asyncio.create_task(seconds(made, range(8)))
            if live:
                await put_layers(publication.segment, CACHE)
            await asyncio.sleep(0.3)
            if stopped:
                made.net.links[-1].stall()
            took[stopped] = await receiving
            if not stopped:
                await ninth
            ninth.cancel()
            await asyncio.wait((ninth,))
            publication.close(DoneCode.TRACK_ENDED)
    assert sorted(took[True]) == pytest.approx(sorted(took[False]), rel=0.1)
