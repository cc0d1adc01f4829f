"""What a hostile publisher or subscriber could make a relay spend: memory, time, requests of others."""

from __future__ import annotations

import asyncio

import pytest

from moqt import Limits, Session
from moqt.errors import DoneCode
from moqt.quic.memory import Link, pair
from tests.moqt.scene import collect, make_track
from tests.relay.network import Network, join, network

pytestmark = pytest.mark.virtual


async def served(net: Network, limits: Limits) -> tuple[Link, Session, Session]:
    """A session of the relay with these limits, and its peer."""
    link = pair()
    relay = Session(link.server, tracks=net.relays[0].tracks, announce=False, limits=limits)
    peer = Session(link.client)
    await net._meet(peer, relay)
    return link, relay, peer


async def test_what_it_takes_to_let_streams_wait_counts() -> None:
    """Groups of one byte each: to have them wait for a subscriber that does not read takes more than a byte
    (moqt 9).
    """
    track = make_track(b"k", one_subgroup=True)
    async with network(track, subscribers=0) as net:
        link, relay, peer = await served(net, Limits(max_behind=1 << 20))
        subscription = await join(peer, track.name)
        [delivery] = relay.publishing._subscriptions
        link.stall()
        waiting = 0
        for group in range(2000):
            track.append(group, 0, b"x")
            track.end_group(group, 1)
            await asyncio.sleep(0.001)
            waiting = max(waiting, len(delivery._sending))
        assert 100 < waiting < 400
        assert not delivery._sending
        link.resume()
        await collect(subscription)
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.TOO_FAR_BEHIND
