"""A fault at every step of a production, with two relays between publisher and consumers: each consumer ends
whole, or is told exactly what is missing, within its bound; who is not concerned feels nothing (issue 3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcs.assembly import Layer, Missing
from kvcs.publisher import Publisher
from kvcs.subscriber import NothingFound, Subscriber
from moqt import ResetCode, Session
from moqt.relay import Relay
from tests.kvcs.stage import CACHE, MODEL, SCOPE_KEY, TOKENS, put_one_by_one
from tests.relay.network import Network
from tests.relay.test_kvcs import check, production

pytestmark = pytest.mark.virtual

PATIENCE = 5.0
BOUND = 3 * PATIENCE
"""Seconds from the fault to the end: patience from the last progress, which a publisher's return may give."""

Fault = Callable[[Network, Publisher], Awaitable[None]]


@dataclass
class Outcome:
    """What a consumer got, and what it was told that is missing."""

    layers: list[Layer] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def check_told(self) -> None:
        """Every layer has come, or is said to be missing."""
        come = {layer.layer for layer in self.layers}
        told = {missing.layer for missing in self.missing}
        assert come | told == set(range(MODEL.layers))
        assert not come & told


async def consume(session: Session) -> Outcome:
    outcome = Outcome()
    subscriber = Subscriber(session, MODEL, SCOPE_KEY, patience=PATIENCE)
    try:
        receiving = await subscriber.receive(TOKENS, wait=5.0)
    except NothingFound:
        blocks = len(TOKENS) // MODEL.block_tokens
        outcome.missing = [
            Missing(0, layer, block) for layer in range(MODEL.layers) for block in range(blocks)
        ]
        return outcome
    async with receiving as reception:
        reception.partial = True
        async for layer in reception:
            outcome.layers.append(layer)
        outcome.missing = list(reception.missing)
    return outcome


def reset_streams(relay: Relay | None, publisher: Publisher) -> None:
    """Reset whatever is being sent: of the publisher's Tracks, or of a relay's."""
    tracks = list(publisher.tracks) if relay is None else [feed.track for feed in relay.feeds.values()]
    for track in tracks:
        for delivery in list(track._watchers):
            for outgoing in list(delivery._sending):  # type: ignore[attr-defined]  # All are Deliveries.
                delivery.session.scheduler.reset(outgoing, ResetCode.INTERNAL_ERROR)  # type: ignore[attr-defined]


async def killed(net: Network, _: Publisher) -> None:
    net.links[0].cut()


async def stalled(net: Network, _: Publisher) -> None:
    net.links[0].stall()


async def stalled_for_a_while(net: Network, _: Publisher) -> None:
    net.links[0].stall()
    asyncio.get_running_loop().call_later(2.0, net.links[0].resume)


async def comes_back(net: Network, publisher: Publisher) -> None:
    net.links[0].cut()
    await asyncio.sleep(0.5)
    await net.publish(publisher.tracks)


async def resets(_: Network, publisher: Publisher) -> None:
    reset_streams(None, publisher)


async def relay_resets(net: Network, publisher: Publisher) -> None:
    reset_streams(net.relays[0], publisher)


async def last_relay_resets(net: Network, publisher: Publisher) -> None:
    reset_streams(net.relays[1], publisher)


async def upstream_cut(net: Network, _: Publisher) -> None:
    net.links[1].cut()


async def upstream_stalled(net: Network, _: Publisher) -> None:
    net.links[1].stall()


async def upstream_back(net: Network, _: Publisher) -> None:
    net.links[1].cut()
    await asyncio.sleep(0.5)
    await net.chain(1, 0)


async def upstream_says_goaway(net: Network, _: Publisher) -> None:
    sessions: set[Session] = {
        delivery.session  # type: ignore[attr-defined]  # All are Deliveries.
        for feed in net.relays[0].feeds.values()
        for delivery in feed.track._watchers
    }
    for session in sessions:
        if session.connection is net.links[1].server:
            await session.goaway(timeout=30.0)
    await net.chain(1, 0)


async def cache_lost(net: Network, _: Publisher) -> None:
    for relay in net.relays:
        for feed in list(relay.feeds.values()):
            for item in list(feed.track.kept()):
                if not item.busy:
                    feed.track.evict(item)


async def another_consumer_killed(net: Network, _: Publisher) -> None:
    net.links[3].cut()


async def another_consumer_stalled(net: Network, _: Publisher) -> None:
    net.links[3].stall()


HARMLESS: list[Fault] = [
    stalled_for_a_while,
    comes_back,
    resets,
    relay_resets,
    last_relay_resets,
    upstream_back,
    upstream_says_goaway,
    cache_lost,
    another_consumer_killed,
    another_consumer_stalled,
]
"""Faults that a consumer must ride out."""

FATAL: list[tuple[Fault, bool]] = [
    (killed, True),
    (stalled, True),
    (upstream_cut, False),
    (upstream_stalled, False),
]
"""Faults after which nothing more comes to the last relay, and whether nothing more comes to the first."""


async def run(fault: Fault, boundary: int, **relay_options: Any) -> tuple[list[Outcome], float]:
    """The outcomes of a consumer at the last relay, of one that comes there after the fault, and of one at
    the first relay; and how long they took from the fault on.
    """
    options = {"subscribers": 2, "seed": boundary, "jitter": 0.004, "relay_options": relay_options}
    async with production(relays=2, **options) as (net, publisher):
        _, there = await net.subscriber(relay=0)
        publication = publisher.publish(TOKENS)
        first = [asyncio.ensure_future(consume(session)) for session in (net.sessions[0], there)]
        other = asyncio.ensure_future(consume(net.sessions[1]))
        await asyncio.sleep(2)
        steps = put_one_by_one(publication.segment, CACHE)
        for _ in range(boundary):
            next(steps, None)
            await asyncio.sleep(0.005)
        await fault(net, publisher)
        started = asyncio.get_running_loop().time()
        _, session = await net.subscriber()
        late = asyncio.ensure_future(consume(session))
        for _ in steps:
            await asyncio.sleep(0.005)
        outcomes = [await first[0], await late, await first[1]]
        took = asyncio.get_running_loop().time() - started
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        return outcomes, took


@pytest.mark.parametrize("boundary", range(0, 36, 3))
@pytest.mark.parametrize("fault", HARMLESS, ids=lambda fault: fault.__name__)
async def test_faults_that_are_ridden_out(fault: Fault, boundary: int) -> None:
    outcomes, took = await run(fault, boundary)
    for outcome in outcomes:
        assert not outcome.missing
        check(outcome.layers)
    assert took < BOUND


@pytest.mark.parametrize("boundary", range(0, 36, 5))
@pytest.mark.parametrize("fault", [cache_lost, comes_back, relay_resets], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("cache_bytes", [0, 25_000])
async def test_faults_while_the_cache_is_full(fault: Fault, boundary: int, cache_bytes: int) -> None:
    """Nothing, or two Tracks, can be kept: what is not being sent goes at once, and is fetched again."""
    outcomes, took = await run(fault, boundary, cache_bytes=cache_bytes)
    for outcome in outcomes:
        assert not outcome.missing
        check(outcome.layers)
    assert took < BOUND


@pytest.mark.parametrize("boundary", range(3, 36, 3))
@pytest.mark.parametrize(("fault", "for_all"), FATAL, ids=lambda value: getattr(value, "__name__", ""))
async def test_faults_that_end_it(fault: Fault, for_all: bool, boundary: int) -> None:
    (first, late, there), took = await run(fault, boundary)
    for outcome in (first, late, there):
        outcome.check_told()
    if not for_all:
        check(there.layers)
    assert took < BOUND
