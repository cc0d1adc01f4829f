"""Publishers, relays in a row and subscribers over in-memory links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from moqt import Fill, FullTrackName, Limits, LocationFilter, Session, Subscription, Track, Tracks
from moqt.authorization import Policy
from moqt.errors import DoneCode
from moqt.quic.link import Link, pair
from moqt.relay import Relay
from moqt.relay.cached import CachedTrack
from moqt.wire import Token
from tests.moqt.scene import EVERYTHING, NAMESPACE

__all__ = ["Network", "join", "network", "until"]


@dataclass(slots=True)
class Network:
    """`tracks` are the publisher's; `sessions` are subscribers at the last relay. `links` go from the
    publisher to the first relay, from relay to relay, and to the subscribers. `tap` gets each link before
    anything goes over it. `policy` is that of all sessions that come to a relay.
    """

    tracks: Tracks
    relays: list[Relay]
    links: list[Link]
    publisher: Session
    sessions: list[Session]
    stack: AsyncExitStack
    more: dict[str, Any] = field(default_factory=dict)
    tap: Callable[[Link], object] = lambda _: None
    policy: Policy | None = None

    def end(self, track: Track) -> None:
        """The Track is whole: its subscriptions end with PUBLISH_DONE."""
        self.tracks.remove(track.name, DoneCode.TRACK_ENDED)

    def cached(self, name: FullTrackName, relay: int = -1) -> CachedTrack:
        """The Track as a relay has it."""
        return self.relays[relay].feeds[name].track

    @property
    def upstream_bytes(self) -> int:
        """What the publisher has sent, in bytes."""
        return self.links[0].client.stats.sent

    async def publish(
        self, tracks: Tracks, relay: int = 0, tokens: Sequence[Token] = (), **link_options: Any
    ) -> tuple[Link, Session]:
        """One more publisher dials a relay."""
        link = self._link(**link_options)
        session = Session(link.client, tracks=tracks, announce=True, tokens=tokens)
        await self._meet(session, self._accept(link, relay))
        return link, session

    async def subscriber(
        self,
        relay: int = -1,
        limits: Limits | None = None,
        relay_limits: Limits | None = None,
        tokens: Sequence[Token] = (),
        **link_options: Any,
    ) -> tuple[Link, Session]:
        """One more subscriber dials a relay, or the publisher where there is no relay."""
        link = self._link(**link_options)
        session = Session(link.client, limits=limits, tokens=tokens)
        await self._meet(session, self._accept(link, relay, relay_limits))
        return link, session

    async def chain(self, lower: int, upper: int, tokens: Sequence[Token] = ()) -> Link:
        """A relay dials another one."""
        link = self._link()
        session = Session(link.client, tracks=self.relays[lower].upward, announce=True, tokens=tokens)
        await self._meet(session, self._accept(link, upper))
        relay = self.relays[lower]
        up = asyncio.Event()

        async def use() -> None:
            async with relay.upstream(session):
                up.set()
                await session.wait_closed()

        relay.spawn(use(), "upstream")
        await up.wait()
        return link

    def _accept(self, link: Link, relay: int, limits: Limits | None = None) -> Session:
        tracks = self.relays[relay].tracks if self.relays else self.tracks
        return Session(link.server, tracks=tracks, announce=False, limits=limits, policy=self.policy)

    def _link(self, **options: Any) -> Link:
        link = pair(**{**self.more, **options})
        self.tap(link)
        return link

    async def _meet(self, *ends: Session) -> None:
        await asyncio.gather(*(end.start() for end in ends))
        for end in ends:
            self.stack.push_async_callback(end.close)


@asynccontextmanager
async def network(
    *tracks: Track,
    relays: int = 1,
    subscribers: int = 1,
    relay_options: dict[str, Any] | None = None,
    tap: Callable[[Link], object] = lambda _: None,
    policy: Policy | None = None,
    **link_options: Any,
) -> AsyncIterator[Network]:
    """A publisher of `tracks`, so many relays, and so many subscribers."""
    offered = Tracks()
    for track in tracks:
        offered.add(track)
    offered.announce(NAMESPACE)
    async with AsyncExitStack() as stack:
        made = [Relay(**(relay_options or {})) for _ in range(relays)]
        for relay in made:
            stack.push_async_callback(relay.close)
        net = Network(offered, made, [], None, [], stack, link_options, tap, policy)  # type: ignore[arg-type]  # just below
        if relays:
            link, net.publisher = await net.publish(offered)
            net.links.append(link)
        for number in range(1, relays):
            net.links.append(await net.chain(number, number - 1))
        for _ in range(subscribers):
            link, session = await net.subscriber()
            net.links.append(link)
            net.sessions.append(session)
        await asyncio.sleep(1)
        yield net


async def join(session: Session, name: FullTrackName, **more: Any) -> Subscription:
    """All of a Track: what is published from now on, and by a fill what was before."""
    options: dict[str, Any] = {
        "filter": LocationFilter.next_object(),
        "fill": Fill(filter=EVERYTHING),
        **more,
    }
    return await session.subscribe(name, **options)


async def until(condition: Callable[[], bool]) -> None:
    """Let virtual time pass until something is so; at most a minute."""
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that within a virtual minute")
