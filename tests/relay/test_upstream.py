"""A relay that keeps itself connected to another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moqt import ConnectionLost, RequestCode, Session, SessionClosed, SessionCode
from moqt.authorization import AccessRequest, Decision, Denied, Policy
from moqt.quic.link import Link, pair
from moqt.relay import Relay
from moqt.relay.upstream import Upstream, keep_upstream
from tests.moqt.scene import check_exactly_once, collect, make_track, objects, piece
from tests.relay.network import Network, join, network, until

pytestmark = pytest.mark.virtual


class Dialer:
    """Dials relays of a network by name, instead of by address."""

    def __init__(self, net: Network, lower: Relay, reachable: dict[str, Relay]) -> None:
        self.net = net
        self.lower = lower
        self.reachable = reachable
        self.links: list[Link] = []
        self.servers: list[Session] = []
        self.told: list[Upstream] = []
        self.policies: dict[str, Policy] = {}

    @asynccontextmanager
    async def __call__(self, uri: str) -> AsyncIterator[Session]:
        if uri not in self.reachable:
            raise ConnectionLost(f"nobody at {uri}")
        link = pair()
        server = Session(
            link.server, tracks=self.reachable[uri].tracks, announce=False, policy=self.policies.get(uri)
        )
        client = Session(link.client, tracks=self.lower.upward, announce=True)
        self.net.stack.push_async_callback(server.close)
        self.links.append(link)
        self.servers.append(server)
        await asyncio.gather(server.start(), client.start(), return_exceptions=True)
        try:
            yield client
        finally:
            await client.close()

    def keep(self, *uris: str) -> None:
        self.lower.spawn(keep_upstream(self.lower, uris, self, self.told.append), "upstream")


async def test_the_addresses_are_tried_in_order_and_again() -> None:
    track = make_track(b"k")
    async with network(track, subscribers=0) as net:
        lower = Relay()
        net.stack.push_async_callback(lower.close)
        dialer = Dialer(net, lower, {})
        dialer.keep("moqt://a", "moqt://b")
        await asyncio.sleep(0.1)
        assert [what.uri for what in dialer.told] == ["moqt://a", "moqt://b"]
        assert all(what.error for what in dialer.told)
        dialer.reachable["moqt://b"] = net.relays[0]
        await until(lambda: dialer.told[-1] == Upstream("moqt://b"))
        dialer.links[0].cut()
        dialer.reachable["moqt://a"] = net.relays[0]
        await until(lambda: dialer.told[-1] == Upstream("moqt://a"))


class Closed:
    """A policy that lets nobody in."""

    async def decide(self, request: AccessRequest) -> Decision:
        return Denied(RequestCode.EXPIRED_AUTH_TOKEN, "the token has expired")


async def test_an_upstream_that_denies_a_session_is_left_for_the_next() -> None:
    """And is not dialled all the time: with back-off, like one that can't be reached."""
    async with network(subscribers=0) as net:
        lower = Relay()
        net.stack.push_async_callback(lower.close)
        dialer = Dialer(net, lower, {"moqt://a": net.relays[0], "moqt://b": net.relays[0]})
        dialer.policies = {"moqt://a": Closed()}
        dialer.keep("moqt://a", "moqt://b")
        await asyncio.sleep(30)
        assert [what.uri for what in dialer.told if what.error is None] == ["moqt://a", "moqt://b"]
        (error,) = [what.error for what in dialer.told if what.error is not None]
        assert isinstance(error, SessionClosed)
        assert error.code == SessionCode.EXPIRED_AUTH_TOKEN
        dialer.told.clear()
        dialer.policies = {"moqt://a": Closed(), "moqt://b": Closed()}
        dialer.links[-1].cut()
        await asyncio.sleep(60)
        assert 5 <= len([what for what in dialer.told if what.error is None]) <= 12
        dialer.policies = {}
        await asyncio.sleep(20)
        assert dialer.told[-1].error is None


@pytest.mark.parametrize("way", ["cut", "GOAWAY"])
@pytest.mark.parametrize("boundary", range(0, 12, 2))
async def test_subscribers_ride_out_the_loss_of_an_upstream(way: str, boundary: int) -> None:
    """Each Object once, whether the upstream is lost or asks us to leave."""
    track = make_track(b"k", one_subgroup=True)
    async with network(track, subscribers=0, seed=boundary) as net:
        lower = Relay()
        net.stack.push_async_callback(lower.close)
        dialer = Dialer(net, lower, {"moqt://a": net.relays[0]})
        dialer.keep("moqt://a")
        net.relays.append(lower)
        _, session = await net.subscriber()
        reading = asyncio.ensure_future(collect(await join(session, track.name)))
        for number in range(12):
            piece(track, number // 4, number % 4, 60_000)
            if number % 4 == 3:
                track.end_group(number // 4, 4)
            await asyncio.sleep(0.02)
            if number == boundary:
                if way == "cut":
                    dialer.links[0].cut()
                else:
                    await dialer.servers[0].goaway(timeout=20.0)
        await asyncio.sleep(30)
        assert len(dialer.links) == 2
        net.end(track)
        check_exactly_once(track, objects(await reading))
